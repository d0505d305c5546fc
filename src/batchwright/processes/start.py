"""Start a command under the guard, read its output, end it in time. Children of probe and estimate get their environment here.

with GuardedProcess(["python", "train.py"], environment()) as child:
    ended = child.watch(timeout=60.0)
"""

from __future__ import annotations

import os
import select
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from . import guard

TAIL_BYTES = 64 * 1024  # enough for any traceback
# glibc's moving threshold keeps freed blocks on a fragmented heap: the slope of memory over batch was 17% low, and the
# limit moved between runs. Fixed, tensors are mapped and unmapped one by one. One arena: each reserves 64 MiB. OpenBLAS,
# which comes with numpy, starts a thread per processor when it is loaded: a forked process would get the memory of their
# stacks for free.
FIXED_ALLOCATOR = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "OPENBLAS_NUM_THREADS": "1",
}


def environment(*changes: Mapping[str, str], default: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment for a child, with `changes`; `default` counts where the user has set nothing."""
    made = {**(default or {}), **os.environ}
    for change in changes:
        made.update(change)
    return made


def torchrun(python: str, *rendezvous: str, ranks: int, log_dir: Path, shutdown_seconds: int) -> list[str]:
    """torchrun for `ranks` processes on one node; the command of a rank follows."""
    return [
        python,
        "-m",
        "torch.distributed.run",
        *rendezvous,
        f"--nproc-per-node={ranks}",
        # The caller restarts: from a checkpoint with a new launch number, or as another trial.
        "--max-restarts=0",
        # Without this, SIGUSR1 ends torchrun and leaves its ranks without a parent.
        "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
        f"--shutdown-timeout={shutdown_seconds}",
        f"--log-dir={log_dir}",
        "--no-python",
    ]


@dataclass(frozen=True)
class Exit:
    """How a process ended: `returncode` is None if we ended it, at its timeout or because `on_line` had seen enough."""

    returncode: int | None
    seconds: float
    output: str
    enough: bool = False


class GuardedProcess:
    """A command below a guard of its own. Leaving the `with` block, or the end of our process, kills all that it started."""

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str], *, stdin: int = subprocess.DEVNULL, **options: Any
    ) -> None:
        """`options` are the guard's: address_space, first, report, scratch."""
        (reading, writing), (output, theirs) = os.pipe(), os.pipe()
        self._end, self._output = open(writing, "wb", buffering=0), open(output, "rb", buffering=0)
        try:
            self._process = subprocess.Popen(
                guard.command_line(command, reading, **options),
                env=dict(env),
                stdin=stdin,
                stdout=theirs,
                stderr=theirs,
                pass_fds=[reading],
                start_new_session=True,  # Ctrl-C is for our process, which decides what it means for the child
            )
        except BaseException:
            self._end.close()
            self._output.close()
            raise
        finally:
            os.close(reading)
            os.close(theirs)

    @property
    def alive(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def watch(
        self,
        timeout: float,
        *,
        on_line: Callable[[str, float], bool] | None = None,
        replies: socket.socket | None = None,
        echo: bool = False,
    ) -> Exit:
        """Wait until the command ends, or end it: after `timeout` seconds, or when `on_line(line, seconds)` returns True.

        A process that serves several requests sends each exit code through `replies`, and is not ended then. `echo`
        copies the output to our standard error.
        """
        started, tail = time.monotonic(), _Tail(on_line, echo)
        waited: list[Any] = [self._output, *([replies] if replies else [])]
        code, enough = None, False
        while code is None and not enough and (left := started + timeout - time.monotonic()) > 0:
            ready = select.select(waited, [], [], min(left, 3600.0))[0]  # select refuses a wait of centuries
            if self._output in ready:
                chunk = self._output.read(65536)
                if chunk:
                    enough = tail.feed(chunk, time.monotonic() - started)
                else:
                    code = self._process.wait()  # the guard holds the output, too: it has ended
            elif ready and replies:  # the request's whole output was read: it was written before the reply
                try:
                    reply = replies.recv(64)
                except ConnectionError:  # it ended before it read the request
                    reply = b""
                code = int(reply) if reply else None
                waited = waited if reply else [self._output]
        if code is None:
            self.end()
        return Exit(code, time.monotonic() - started, tail.text(), enough)

    def end(self) -> None:
        """Kill the command and everything below it."""
        with suppress(OSError, ValueError):  # the guard has just ended by itself, or this was called before
            self._end.write(b"x")
        self._end.close()
        self._process.wait()
        self._output.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


class _Tail:
    """The last output, and its lines one by one; progress bars return the carriage instead of starting a line."""

    def __init__(self, on_line: Callable[[str, float], bool] | None, echo: bool) -> None:
        self._on_line, self._echo, self._bytes, self._line = on_line, echo, b"", b""

    def feed(self, chunk: bytes, when: float) -> bool:
        """Take more output; True when `on_line` has seen enough."""
        if self._echo:
            with suppress(OSError):  # the reader of our standard error is gone
                os.write(2, chunk)
        self._bytes = (self._bytes + chunk)[-TAIL_BYTES:]
        *lines, self._line = (self._line + chunk).replace(b"\r", b"\n").split(b"\n")
        self._line = self._line[-TAIL_BYTES:]
        if self._on_line is None:
            return False
        return any([self._on_line(line.decode("utf-8", "replace"), when) for line in lines if line.strip()])

    def text(self) -> str:
        """The last output."""
        return self._bytes.decode("utf-8", "replace").replace("\r", "\n")
