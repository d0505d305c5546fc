"""A process that imports torch once and forks a trial at a time: fresh memory, without seconds of imports for each.

    prober -> guard -> zygote -> guard -> trial

The zygote runs nothing of the user's and has one thread, so that a trial begins as one that was started by itself would
(with more threads, or a device that an import has touched, it is started by itself). Each request on the channel, its
standard input, is the path of a specification, with two descriptors: the pipe that the trial's own guard listens to, and
where the trial's output goes. The reply is the exit code. When the prober goes away, the first guard ends everything.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import batchwright.processes.guard
from batchwright.processes.guard import become_guard, die_as, die_with, see_out

_PATIENCE = 10.0  # seconds to end what was asked to end


class Zygote:
    """The prober's side."""

    def __init__(self, env: Mapping[str, str], scratch: Path) -> None:
        self._channel, theirs = socket.socketpair()
        reading, self._pipe = os.pipe()
        options = json.dumps({"pipe": reading, "scratch": str(scratch)})
        guard = [sys.executable, "-I", "-S", batchwright.processes.guard.__file__, options]
        try:
            self._process = subprocess.Popen(
                [*guard, sys.executable, "-P", "-m", "batchwright.probe.zygote"], env=dict(env), stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, pass_fds=[reading], start_new_session=True,
            )  # fmt: skip
        finally:
            theirs.close()
            os.close(reading)

    @property
    def alive(self) -> bool:
        """Whether it can start a trial."""
        return self._process.poll() is None

    def start(self, spec: str, pipe: int, output: int) -> None:
        """Begin a trial."""
        try:
            socket.send_fds(self._channel, [spec.encode()], [pipe, output])
        except BrokenPipeError:  # it has just died: `wait` says how
            pass

    def wait(self, *, asked: bool) -> int:
        """The exit code of the trial; a zygote that died (an import failed, or somebody killed it) gives its own.

        A trial that was `asked` to end has seconds left; in vain where the imports themselves hang.
        """
        self._channel.settimeout(_PATIENCE if asked else None)
        try:
            reply = self._channel.recv(64)
        except OSError:
            reply = b""
        return int(reply) if reply else self._end()

    def close(self) -> None:
        """End it."""
        self._channel.close()
        self._end()
        os.close(self._pipe)

    def _end(self) -> int:
        """Its exit code; where it does not end by itself, its guard ends everything."""
        try:
            return self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            with suppress(OSError):  # it has just ended by itself
                os.write(self._pipe, b"x")
            return self._process.wait()


def _serve(channel: socket.socket) -> None:
    while True:
        spec, descriptors, *_ = socket.recv_fds(channel, 4096, 2)
        if not spec:
            return
        pipe, output = descriptors
        _say_to(output)  # an import that fails says so in the trial's output
        import batchwright.probe.worker  # noqa: F401

        threads = len(os.listdir("/proc/self/task"))
        me, guard = os.getpid(), os.fork()
        if guard == 0:
            channel.close()
            die_with(me)
            _guard(spec.decode(), pipe, threads)
        _say_to(os.open(os.devnull, os.O_WRONLY))
        os.close(pipe)
        channel.sendall(str(os.waitstatus_to_exitcode(os.waitpid(guard, 0)[1])).encode())


def _say_to(descriptor: int) -> None:
    for mine in (1, 2):
        os.dup2(descriptor, mine)
    os.close(descriptor)


def _guard(spec: str, pipe: int, threads: int) -> None:
    become_guard()
    me, trial = os.getpid(), os.fork()
    if trial == 0:
        try:
            os.setsid()
            die_with(me)
            os.close(pipe)
            _trial(spec, threads)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)  # whatever happens, this is not the zygote
    os.setsid()
    die_as(see_out(trial, pipe, scratch=os.path.dirname(spec)))


def _trial(spec: str, threads: int) -> None:
    from . import worker

    sys.argv = [str(worker.__file__), spec]
    # Stacks of threads that a fork leaves behind are memory the trial would have for free.
    if threads > 1 or not worker.forkable():
        os.execv(sys.executable, [sys.executable, "-P", "-m", "batchwright.probe.worker", spec])
    worker.main(spec)


if __name__ == "__main__":
    _channel = socket.socket(fileno=os.dup(0))
    _nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(_nothing, 0)
    os.close(_nothing)
    _serve(_channel)
    os._exit(0)  # as in the guard: nothing to tear down
