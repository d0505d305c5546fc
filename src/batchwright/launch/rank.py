"""The parent of one rank: gives it a log and a death wish, and writes down how it ended, which torchrun loses.

Run once per rank:

    python -P -m batchwright.launch.rank DIRECTORY RANK COMMAND...

RANK is a number, or the name of the variable that holds it. Below DIRECTORY: `logs/rank-N.log`, `ranks/N.json` (its
process), `ranks/N.exit.json` (its end), `ranks/N.told.json` (a command that was sent SIGTERM with this parent of it). The
kernel kills the rank when this process dies, and this one when its parent does. A rank of our loop, whose number is in a
variable, ignores SIGUSR1 until it asks for it: a wish to stop that comes while torch is imported is not its death. A
command of the user's own does not: a shell cannot trap what it was born deaf to.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from batchwright.processes.guard import die_as, die_with, no_core, start_time
from batchwright.rundir import atomic

_TRACE_SECONDS = 5.0  # for all ranks to write their stacks
_PASSED_ON = (signal.SIGTERM, signal.SIGUSR1)


def _write(path: str, document: dict[str, object]) -> None:
    """Whole or not at all; a full disk costs the record, not the rank."""
    try:
        atomic.write(Path(path), json.dumps(document), sync=False)
    except OSError:
        pass


def _await_others(folder: str) -> None:
    """Ranks that leave their stacks go together: srun takes all along with the first, even one that is still writing."""
    deadline = time.monotonic() + _TRACE_SECONDS
    while time.monotonic() < deadline:
        names = os.listdir(folder)
        if all(f"{name[:-5]}.exit.json" in names for name in names if name[:-5].isdigit()):
            return
        time.sleep(0.02)


def main(words: list[str]) -> None:
    """Run the rank; see the module's text."""
    directory, place, command = words[0], words[1], words[2:]
    rank = int(place) if place.isdigit() else int(os.environ.get(place, "0"))
    parent, me = os.getppid(), os.getpid()
    die_with(parent)
    for folder in ("ranks", "logs"):
        os.makedirs(os.path.join(directory, folder), exist_ok=True)
    no_core()
    record = os.path.join(directory, "ranks", str(rank))
    child: subprocess.Popen[bytes] | None = None
    early: list[int] = []

    def heard(number: int, frame: object) -> None:
        # This process stays until the rank has gone. torchrun asks the rank's whole group; Slurm, where it tracks processes
        # by cgroup, the first one of a task alone. Our loop may hear a wish twice; a command may not, and is asked itself.
        if place.isdigit() and number == signal.SIGTERM:
            _write(f"{record}.told.json", {"time": time.time()})  # the command is, too: see slurm_step.py
        if number not in ((signal.SIGTERM,) if place.isdigit() else _PASSED_ON):
            return
        if child is None:
            early.append(number)
        elif not place.isdigit():
            child.send_signal(number)

    for number in (*_PASSED_ON, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR2):
        signal.signal(number, heard)

    def prepare() -> None:
        die_with(me)
        if not place.isdigit():
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)

    log = open(os.path.join(directory, "logs", f"rank-{rank}.log"), "ab", buffering=0, opener=atomic.no_follow)
    try:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=prepare)
    except OSError as error:
        log.write(f"{command[0]}: {error.strerror}\n".encode())
        code = 127 if isinstance(error, FileNotFoundError) else 126
        _write(f"{record}.json", {"pid": None})
        _write(f"{record}.exit.json", {"code": code, "time": time.time()})
        sys.exit(code)
    for number in early:
        child.send_signal(number)
    _write(f"{record}.json", {"pid": child.pid, "parent": me, "start_time": start_time(child.pid), "time": time.time()})
    code = child.wait()
    _write(f"{record}.exit.json", {"code": code, "time": time.time()})
    if code == -signal.SIGABRT and os.path.isdir(os.path.join(directory, "tracing")):
        _await_others(os.path.join(directory, "ranks"))
    die_as(code)


if __name__ == "__main__":
    main(sys.argv[1:])
