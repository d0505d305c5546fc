"""A process that imports torch once and forks a trial at a time: fresh memory, without seconds of imports for each.

    prober -> zygote -> guard -> trial

The zygote runs nothing of the user's and has one thread, so that a trial begins as one that was started by itself would
(with more threads, or a device that an import has touched, it is started by itself). Its guard is forked likewise. Each
request is the path of a specification, with two descriptors: the pipe the guard listens to, and where the trial's output
goes. The reply is the exit code. When the prober goes away the channel ends, and with it the zygote.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping

from batchwright.guard import become_guard, die_as, die_with, see_out

_PATIENCE = 10.0  # seconds to end what was asked to end


class Zygote:
    """The prober's side."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._channel, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "batchwright.probe.zygote", str(theirs.fileno())],
                env=dict(env), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()], start_new_session=True,
            )  # fmt: skip

    @property
    def alive(self) -> bool:
        """Whether it can start a trial."""
        return self._process.poll() is None

    def start(self, spec: str, pipe: int, output: int) -> None:
        """Begin a trial."""
        socket.send_fds(self._channel, [spec.encode()], [pipe, output])

    def wait(self, *, asked: bool) -> int:
        """The exit code of the trial; a zygote that died (an import failed, or somebody killed it) gives its own.

        A trial that was `asked` to end has seconds left; in vain where the imports themselves hang.
        """
        self._channel.settimeout(_PATIENCE if asked else None)
        try:
            reply = self._channel.recv(64)
        except OSError:
            reply = b""
        if reply:
            return int(reply)
        self._process.kill()
        return self._process.wait()

    def close(self) -> None:
        """End it."""
        self._channel.close()
        try:
            self._process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _serve(channel: socket.socket) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    while True:
        spec, descriptors, *_ = socket.recv_fds(channel, 4096, 2)
        if not spec:
            return
        pipe, output = descriptors
        for descriptor in (1, 2):
            os.dup2(output, descriptor)  # an import that fails says so in the trial's output
        import batchwright.probe.worker  # noqa: F401

        threads = len(os.listdir("/proc/self/task"))
        me, guard = os.getpid(), os.fork()
        if guard == 0:
            channel.close()
            die_with(me)
            _guard(spec.decode(), pipe, threads)
        for descriptor in (1, 2):
            os.dup2(nowhere, descriptor)
        os.close(pipe)
        os.close(output)
        channel.sendall(str(os.waitstatus_to_exitcode(os.waitpid(guard, 0)[1])).encode())


def _guard(spec: str, pipe: int, threads: int) -> None:
    become_guard()
    me, trial = os.getpid(), os.fork()
    if trial == 0:
        try:
            os.setsid()
            die_with(me)
            os.close(pipe)
            _trial(spec, threads)
        finally:
            os._exit(1)  # whatever happens, this is not the zygote
    os.setsid()
    die_as(see_out(trial, pipe, scratch=os.path.dirname(spec)))


def _trial(spec: str, threads: int) -> None:
    from . import worker

    # Stacks of threads that a fork leaves behind are memory the trial would have for free.
    if threads > 1 or not worker.forkable():
        os.execv(sys.executable, [sys.executable, "-P", "-m", "batchwright.probe.worker", spec])
    worker.main(spec)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as _channel:
        _serve(_channel)
