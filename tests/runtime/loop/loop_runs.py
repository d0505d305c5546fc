"""Launches for the loop's tests: N real processes that train along a schedule, to be waited for or killed."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch

from batchwright.core.codec import encode
from batchwright.core.ramp.rules import Thresholds
from batchwright.core.ramp.schedule import Schedule
from batchwright.runtime.loop.events import read_events
from batchwright.runtime.state import tensors
from batchwright.runtime.state.checkpoint import Checkpoints


def ramp(samples: int = 192) -> Schedule:
    """Three stages: 8, 16 and 32 samples a step."""
    return Thresholds(((0, 8), (32, 16), (96, 32))).compile().until(samples)


class Launch:
    """`ranks` processes in one gloo group, each of which calls `train`; loop_server.py forks them."""

    def __init__(self, ranks: int, schedule: Schedule, settings: dict[str, Any], task: dict[str, Any]) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.pids = _ask(
            start=ranks,
            folder=self._folder.name,
            schedule=encode(schedule),
            settings=encode({"progress": False, **settings}),
            task=task,
        )

    def wait(self, timeout: float = 600) -> list[int]:
        """The exit codes; after the timeout, ranks are killed. Their output goes to stderr."""
        codes = _ask(wait=self.pids, timeout=timeout)
        for log in sorted(Path(self._folder.name).glob("rank*.log")):
            print(log.read_text(), file=sys.stderr)
        self._folder.cleanup()
        return codes

    def kill(self, *ranks: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to these ranks, or to all. `wait` collects their exit codes."""
        for one in (signal.SIGSTOP, number) if number == signal.SIGKILL else (number,):
            for rank in ranks or range(len(self.pids)):  # all are stopped first, so that none sees another exit
                os.kill(self.pids[rank], one)


def _ask(**request: Any) -> Any:
    server = _server()
    assert server.stdin is not None and server.stdout is not None
    server.stdin.write(json.dumps(request) + "\n")
    server.stdin.flush()
    return json.loads(server.stdout.readline())


@cache
def _server() -> subprocess.Popen[str]:
    command = [sys.executable, str(Path(__file__).parent / "loop_server.py")]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def launch(ranks: int, schedule: Schedule, settings: dict[str, Any], **task: Any) -> list[int]:
    """Run to the end of the launch."""
    return Launch(ranks, schedule, settings, task).wait()


def call(ranks: int, function: str, *args: Any) -> list[Any]:
    """The results of a function of loop_reshard.py on each of `ranks`."""
    with tempfile.TemporaryDirectory() as folder:
        codes = _ask(wait=_ask(start=ranks, folder=folder, call=function, args=args), timeout=600)
        for log in sorted(Path(folder).glob("rank*.log")):
            print(log.read_text(), file=sys.stderr)
        assert codes == [0] * ranks, codes
        return [pickle.loads((Path(folder) / f"rank{rank}.pickle").read_bytes()) for rank in range(ranks)]


def final(directory: Path | str) -> dict[str, torch.Tensor]:
    """All tensors of the newest checkpoint."""
    saved = Checkpoints(Path(directory) / "checkpoints").newest()
    assert saved is not None
    return tensors.read(saved.path / "tensors")


def furthest(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """The largest difference of two sets of weights."""
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a if name.startswith("model"))


def losses(directory: Path | str) -> dict[int, float]:
    """The loss of each step, from the last launch that trained it."""
    return {e["step"]: e["loss"] for e in read_events(directory) if e["kind"] == "step"}


def status(directory: Path | str) -> dict[str, Any]:
    return json.loads((Path(directory) / "status.json").read_text())


def launches(directory: Path) -> int:
    """The number of launches that have begun to train."""
    return len({p.name.split("-")[1] for p in (directory / "ledger").glob("launch-*")})


def progress(directory: Path, rank: int = 0) -> int:
    """The samples in the ledger of the newest launch so far, as a rank has written it."""
    files = (
        sorted((directory / "ledger").glob(f"launch-*-rank-{rank:05d}.jsonl"))
        if (directory / "ledger").exists()
        else []
    )
    lines = files[-1].read_text().splitlines() if files else []
    runs = [json.loads(line) for line in lines[1:] if line.strip()]
    return sum(run["steps"] * run["global_batch_size"] for run in runs)
