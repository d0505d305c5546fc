"""A process that imports torch once and forks one trial at a time: fresh memory, without seconds of imports per trial.

    prober -> guard -> server -> trial

The server runs no code of the user and has no threads but OpenBLAS's, which survive a fork, so a forked trial starts in
the same state as a new process would. If another import has started threads or has touched the device, the trial becomes
a new interpreter. The guard kills
everything when the prober ends; a trial that exceeds its timeout is ended together with the server.

multiprocessing's fork server was tried here, and it needs more code:
- It has to run below the guard, so a server process like this one has to start it, and it adds a resource tracker: two
  more processes.
- Each child holds the pipe that keeps the fork server alive, so it outlives a killed parent during a trial, unless a
  preloaded module asks the kernel for a signal as a side effect of its import.
- Its socket is a file in TMPDIR: the folder stays when the guard kills the server, and it fails where TMPDIR is longer
  than about 75 characters.
- It hides ImportErrors of preloaded modules, and reports 255 when it is killed itself.
"""

from __future__ import annotations

import os
import socket
import sys
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from batchwright.processes.guard import adopt_orphans, die_with, kill_orphans
from batchwright.processes.start import Exit, GuardedProcess


class TrialServer(GuardedProcess):
    """The prober's side."""

    def __init__(self, env: Mapping[str, str], scratch: Path) -> None:
        self._channel, theirs = socket.socketpair()
        command = [sys.executable, "-P", "-c", "from batchwright.probe.server import main; main()"]
        with theirs:
            super().__init__(command, env, stdin=theirs.fileno(), scratch=str(scratch))

    def run(self, spec: Path, *, timeout: float) -> Exit:
        """Fork a trial and wait until it ends. If the server itself ends, its exit code is the trial's."""
        with suppress(ConnectionError):
            self._channel.sendall(str(spec).encode())
        return self.watch(timeout, replies=self._channel)

    def end(self) -> None:
        """End the server and its trial."""
        super().end()
        self._channel.close()


def serve(channel: socket.socket) -> None:
    """Each request is the path of a specification; the reply is the exit code of its trial."""
    import numpy  # noqa: F401  # OpenBLAS starts threads, and starts them again after a fork

    usual = _threads()
    from . import worker

    adopt_orphans()
    while spec := channel.recv(4096).decode():
        server, threads = os.getpid(), _threads()
        trial = os.fork()
        if trial == 0:
            try:
                channel.close()
                os.setsid()
                die_with(server)
                # A fork has no threads, but keeps the memory of their stacks: the trial would have it for free.
                if threads > usual or not worker.may_fork():
                    os.execv(sys.executable, [sys.executable, "-P", "-m", worker.__name__, spec])
                sys.argv = [str(worker.__file__), spec]
                worker.main(spec)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)  # never return to the server's loop
        code = os.waitstatus_to_exitcode(os.waitpid(trial, 0)[1])
        kill_orphans(())
        channel.sendall(str(code).encode())


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def main() -> None:
    """Serve requests on standard input, which trials do not inherit."""
    channel, nothing = socket.socket(fileno=os.dup(0)), os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    serve(channel)
    os._exit(0)  # shutting an interpreter with torch down takes a second
