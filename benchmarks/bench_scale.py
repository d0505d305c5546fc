"""What stopping, watching, explaining and auditing cost at 16, 512 and 8,192 ranks, on run directories without training.

    python benchmarks/bench_scale.py [--ranks 16,512,8192] [--lines 10] [--rounds 3]
    python benchmarks/bench_scale.py --before /tmp/before        # a checkout of another commit, run in turn with this one

A number is the CPU time of one call in a process of its own, the median of the rounds, and the peak memory of that process;
files are in the page cache. `--lines`, `--steps` and `--each`: lines of a ledger, steps in a line, samples of a rank in a step.
The script fails when `run --status` takes more than 5 s of CPU time, or a call that happens again and again more than 0.1 s.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(HERE))

from tests.fabricated import complete_run, launch_folder  # noqa: E402

CASES = {
    "signal": "a stop request, on a node with 8 of the ranks",
    "leaving": "one look whether all ranks have ended",
    "explain": "why a launch failed: one rank with exit code 1",
    "last_seen": "when the launch before took its last step",
    "status": "`run --status`",
    "check": "`check --ledger`",
}
AGAIN = ("signal", "leaving")  # up to ten times a second


def timed(call: Callable[[], object]) -> float:
    before = time.process_time()
    call()
    return time.process_time() - before


def verb(*arguments: str) -> None:
    from batchwright.cli import main

    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        main(list(arguments))


def measure(case: str, root: Path) -> None:
    """One case in this process: CPU seconds, and the peak memory in MiB."""
    run, launch = root / "run", root / "launch"
    handle: dict[str, Any] = {"job": "7", "directory": str(launch)}
    if case == "signal":
        from batchwright.launch.slurm.step import signal_ranks

        spent = timed(lambda: signal_ranks(launch, 1, 8, signal.SIGUSR1))
    elif case == "leaving":
        from batchwright.launch.slurm.engine import SlurmEngine

        engine = SlurmEngine()
        spent = timed(lambda: engine.signal(handle, "kill"))  # which does nothing if all ranks have ended
    elif case == "explain":
        from batchwright.launch.engine import Poll
        from batchwright.launch.failure import explain
        from batchwright.launch.slurm.engine import SlurmEngine

        spent = timed(lambda: explain(Poll("ended", 1), SlurmEngine().logs({"directory": str(root / "failed")}), ""))
    elif case == "last_seen":
        from batchwright.rundir.status import last_seen

        spent = timed(lambda: last_seen(run, 2))
    else:
        spent = timed(lambda: verb(*(("run", "--status") if case == "status" else ("check", "--ledger")), str(run)))
    print(spent, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def measured(checkout: Path, case: str, root: Path) -> tuple[float, ...]:
    environment = {**os.environ, "PYTHONPATH": str(checkout / "src")}
    done = subprocess.run(
        [sys.executable, __file__, "--case", case, "--root", root],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return tuple(map(float, done.stdout.split()))


def fabricate(root: Path, ranks: int, given: argparse.Namespace) -> None:
    launch_folder(root / "launch", ranks)
    launch_folder(root / "failed", ranks, ended=1, code=1)
    complete_run(root / "run", ranks, given.lines, steps=given.steps, each=given.each)
    (root / "run" / "events").mkdir()
    (root / "run" / "events" / "launch-00001.jsonl").touch()


def shown(seconds: float) -> str:
    return f"{seconds * 1000:,.1f} ms" if seconds < 1 else f"{seconds:,.1f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", default="16,512,8192")
    parser.add_argument("--lines", type=int, default=10)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--each", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--before", type=Path)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--root", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.case:
        return measure(given.case, given.root)
    checkouts = {**({"before": given.before.resolve()} if given.before else {}), "now": HERE}
    broken: list[str] = []
    print(
        f"| {given.lines:,} lines of {given.steps:,} steps | ranks | {' | '.join(f'{n} | memory {n}' for n in checkouts)} |"
    )
    print(f"|---|---{'|---|---' * len(checkouts)}|")
    for ranks in map(int, given.ranks.split(",")):
        with tempfile.TemporaryDirectory() as name:
            fabricate(Path(name), ranks, given)
            for case in given.cases.split(","):
                rounds: dict[str, list[tuple[float, ...]]] = {which: [] for which in checkouts}
                for _ in range(given.rounds):
                    for which, checkout in checkouts.items():
                        rounds[which].append(measured(checkout, case, Path(name)))
                middle = {n: [statistics.median(part) for part in zip(*r, strict=True)] for n, r in rounds.items()}
                cells = (f"{shown(cpu)} | {memory:,.0f} MiB" for cpu, memory in middle.values())
                print(f"| {CASES[case]} | {ranks:,} | {' | '.join(cells)} |", flush=True)
                cpu = middle["now"][0]
                if (case in AGAIN and cpu > 0.1) or (case == "status" and cpu > 5 and given.lines <= 10):
                    broken.append(f"{case} at {ranks:,} ranks takes {cpu:.2f} s of CPU time")
    if broken:
        sys.exit("; ".join(broken))


if __name__ == "__main__":
    main()
