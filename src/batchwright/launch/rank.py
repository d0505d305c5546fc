"""The parent of one rank: gives it a log and records its exit code, which torchrun loses. Used by every engine.

Run once per rank:

    python -P -m batchwright.launch.rank DIRECTORY RANK COMMAND...

RANK is a number, or the name of the variable that holds it. It writes below DIRECTORY: `logs/rank-N.log`, `ranks/N.json`
(the process), `ranks/N.exit.json` (its exit code), `ranks/N.told.json` (this parent got SIGTERM, and so did the command).
The kernel kills the rank when this process ends, and this process when its parent ends. A rank of our loop, whose number
is in a variable, starts with SIGUSR1 ignored: a request to stop while torch is imported must not kill it. A command does
not: a shell cannot trap a signal that is ignored when it starts.
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

_TRACE_SECONDS = 5.0  # for all ranks to write their stacks: srun kills the others when the first one ends
_PASSED_ON = (signal.SIGTERM, signal.SIGUSR1)


def _write(path: str, document: dict[str, object]) -> None:
    """Atomic; on a full disk the record is lost and the rank continues."""
    try:
        atomic.write(Path(path), json.dumps(document), sync=False)
    except OSError:
        pass


def main(arguments: list[str]) -> None:
    """Run the rank; see the text of this module."""
    directory, number_or_variable, command = arguments[0], arguments[1], arguments[2:]
    is_command = number_or_variable.isdigit()
    rank = int(number_or_variable) if is_command else int(os.environ.get(number_or_variable, "0"))
    parent, me = os.getppid(), os.getpid()
    die_with(parent)
    for folder in ("ranks", "logs"):
        os.makedirs(os.path.join(directory, folder), exist_ok=True)
    no_core()
    record = os.path.join(directory, "ranks", str(rank))
    child: subprocess.Popen[bytes] | None = None
    early: list[int] = []

    def on_signal(number: int, frame: object) -> None:
        # This process stays until the rank has ended. torchrun signals the process group of the rank; Slurm, if it tracks
        # processes by cgroup, only the first process of a task. Our loop may get a signal twice, so it is passed on. A
        # command may not: the engine signals it.
        if is_command and number == signal.SIGTERM:
            _write(f"{record}.told.json", {"time": time.time()})  # the command got it, too: see slurm/step.py
        if number not in ((signal.SIGTERM,) if is_command else _PASSED_ON):
            return
        if child is None:
            early.append(number)
        elif not is_command:
            child.send_signal(number)

    for number in (*_PASSED_ON, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR2):
        signal.signal(number, on_signal)

    def prepare() -> None:
        die_with(me)
        if not is_command:
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)

    log = open(os.path.join(directory, "logs", f"rank-{rank}.log"), "ab", buffering=0, opener=atomic.no_follow)
    try:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=prepare)
    except OSError as error:
        log.write(os.fsencode(f"{command[0]}: {error.strerror}\n"))
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
        time.sleep(_TRACE_SECONDS)  # not until their files say so: thousands of ranks would list them again and again
    die_as(code)


if __name__ == "__main__":
    main(sys.argv[1:])
