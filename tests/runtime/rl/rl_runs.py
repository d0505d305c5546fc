"""Processes for the tests of `train_rl`: `python rl_runs.py SPEC.json`, alone or under torchrun; to be waited for or killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any


def start(folder: Path, spec: dict[str, Any], ranks: int = 0) -> subprocess.Popen[bytes]:
    """Start a run; with `ranks`, under torchrun."""
    folder.mkdir(exist_ok=True)
    file = folder / f"spec-{time.monotonic_ns()}.json"
    file.write_text(json.dumps(spec))
    command = [sys.executable]
    if ranks:
        command += ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--monitor-interval=0.1"]
        command += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
    with open(folder / "output.log", "ab") as output:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            [*command, __file__, str(file)], stdout=output, stderr=output, env=environment, start_new_session=True
        )


def wait_for(path: Path, count: int, process: subprocess.Popen[bytes], seconds: float = 120.0) -> None:
    """Wait until a file has so many lines."""
    deadline = time.monotonic() + seconds
    while not path.exists() or path.read_bytes().count(b"\n") < count:
        logs = [folder / "output.log" for folder in path.parents if (folder / "output.log").exists()]
        assert process.poll() is None and time.monotonic() < deadline, logs[0].read_text()
        time.sleep(0.01)


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill -9 of a process; its workers must die with it."""
    workers = children(process.pid)
    assert workers
    process.kill()
    process.wait()
    deadline = time.monotonic() + 60
    while any(_runs(pid) for pid in workers):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def children(pid: int) -> list[int]:
    """The processes that a process has started."""
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def main() -> None:
    import torch

    sys.path.insert(0, str(Path(__file__).parent))
    from rl_tasks import PLAN, task

    import batchwright
    from batchwright.core.ramp.rules import Thresholds
    from batchwright.runtime import RLSettings, train_rl

    spec = json.loads(Path(sys.argv[1]).read_text())
    directory, rank = Path(spec["settings"]["directory"]), os.environ.get("RANK", "0")
    directory.mkdir(parents=True, exist_ok=True)
    (directory / f"pid-{rank}").write_text(str(os.getpid()))
    plan = batchwright.rl(**{**PLAN, **spec.get("plan", {})})
    settings = RLSettings(progress=False, threads=1, **spec["settings"])
    final: list[Any] = []
    results: list[Any] = []

    def keep(result: Any, model: torch.nn.Module) -> None:
        results.append(asdict(result))
        state = getattr(model, "module", model).state_dict()
        whole = {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in state.items()}
        final[:] = [{name: value.double().flatten().tolist() for name, value in whole.items()}]

    if other := spec.get("before"):  # a run in another directory, in the same process group, which is the user's
        torch.distributed.init_process_group("gloo")
        train_rl(task(), plan, replace(settings, directory=other), rounds=1)
    rounds: dict[str, Any] = {"rounds": spec["rounds"]}
    if ramp := spec.get("ramp"):  # (first prompt, prompts per round) of each stage, and the end
        rounds = {"schedule": Thresholds(tuple(map(tuple, ramp["stages"]))).compile().until(ramp["end"])}
    status = train_rl(task(**spec.get("task", {})), plan, settings, **rounds, on_round=keep)
    (directory / f"rounds-{rank}.json").write_text(json.dumps(results))
    if final and rank == "0":
        (directory / "weights.json").write_text(json.dumps(final[0]))
    print(status.state, status.position)


if __name__ == "__main__":
    main()
