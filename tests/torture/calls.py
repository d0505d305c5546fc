"""Calls of the command line, each in a fork of one process that has imported everything, with a time limit.

    python -m tests.torture.calls

is that process: it reads one JSON line per call from stdin and answers with one JSON line.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from .record import unpromised

ROOT = Path(__file__).resolve().parents[2]
NOBODY = 65534
MOST_MEMORY = 4 << 30  # bytes: a call that reads /dev/zero must not take the whole machine
_MODULES = (
    "batchwright.cli.run",
    "batchwright.cli.check",
    "batchwright.cli.plan",
    "batchwright.cli.ramp",
    "batchwright.cli.probe",
    "batchwright.launch.supervisor",
    "batchwright.launch.local",
    "batchwright.launch.slurm.control",
    "batchwright.launch.status",
    "batchwright.cli.report",
    "batchwright.inputs",
    "batchwright.launch.history",
    "batchwright.report.write",
    "batchwright.estimate.records",
    "batchwright.report.plots",
    "plotext",
    "plotext._methods.file",
    "batchwright.probe.prober",
    "batchwright.probe.display",
    "batchwright.runtime.state.audit",
)


@dataclass(frozen=True)
class Call:
    """How a call ended; `code` is None if it was killed at its time limit, and `err` ends with its stack then."""

    argv: tuple[str, ...]
    code: int | None
    out: str
    err: str

    def wrong(self) -> list[str]:
        """What breaks the promise of batchwright."""
        return [f"batchwright {' '.join(self.argv)}: {text}" for text in unpromised(self.code, self.out, self.err)]


class Caller:
    """The process that forks; one call at a time."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.torture.calls"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )

    def __enter__(self) -> Caller:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()

    def __call__(
        self, *argv: str | os.PathLike[str], cwd: Path, seconds: float = 20.0, user: int | None = None
    ) -> Call:
        """`batchwright ARGV...` in `cwd`, as another user if given."""
        assert self._process.stdin and self._process.stdout
        words = [os.fspath(word) for word in argv]
        print(json.dumps([words, os.fspath(cwd), seconds, user]), file=self._process.stdin, flush=True)
        code, out, err = json.loads(self._process.stdout.readline())
        return Call(tuple(words), code, out, err)


def _serve() -> None:
    for name in _MODULES:
        importlib.import_module(name)
    for line in sys.stdin:
        argv, cwd, seconds, user = json.loads(line)
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            code = _called(argv, cwd, seconds, user, out, err)
            texts = [os.pread(file.fileno(), 1 << 20, 0).decode("utf-8", "replace") for file in (out, err)]
        print(json.dumps([code, *texts]), flush=True)


def _called(argv: list[str], cwd: str, seconds: float, user: int | None, out: Any, err: Any) -> int | None:
    server, child = os.getpid(), os.fork()
    if not child:
        _become(argv, cwd, user, server, out.fileno(), err.fileno())
    waiting = os.pidfd_open(child)
    ended = select.select([waiting], [], [], seconds)[0]
    if not ended:
        os.kill(child, signal.SIGABRT)  # faulthandler writes the stack
        if not select.select([waiting], [], [], 5.0)[0]:
            os.kill(child, signal.SIGKILL)
    os.close(waiting)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code if ended else None


def _become(argv: list[str], cwd: str, user: int | None, server: int, out: int, err: int) -> NoReturn:
    """The forked process: its own session, its own output, then the command line."""
    try:
        os.setsid()
        null = os.open(os.devnull, os.O_RDONLY)
        for target, source in enumerate((null, out, err)):
            os.dup2(source, target)
        sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")
        faulthandler.enable(file=sys.stderr)
        resource.setrlimit(resource.RLIMIT_DATA, (MOST_MEMORY, MOST_MEMORY))
        os.chdir(cwd)
        if user is not None:
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)
        from batchwright.cli import main
        from batchwright.processes.guard import die_with

        die_with(server)  # also if it hangs and the torture is killed
        try:
            main(argv)
        except SystemExit as done:
            code = done.code if isinstance(done.code, int) else 0 if done.code is None else 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    except BaseException:
        import traceback

        traceback.print_exc()
        sys.stderr.flush()
    os._exit(1)


if __name__ == "__main__":
    _serve()
