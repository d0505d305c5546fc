"""Start a trial's processes, read what they print, end them in time. The one file of this room with environments."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import batchwright.processes.guard

from .zygote import Zygote

_TAIL = 64 * 1024  # enough for any traceback
# glibc's moving threshold keeps freed blocks on a fragmented heap: the slope of memory over batch was 17% low, and the
# limit moved between runs. Fixed, tensors are mapped and unmapped one by one. One arena: each reserves 64 MiB. OpenBLAS,
# which comes with numpy, starts a thread per processor when it is loaded: in a fork their stacks would be room for free.
_FIXED_ALLOCATOR = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "OPENBLAS_NUM_THREADS": "1",
}


@dataclass(frozen=True)
class Exit:
    """How a process ended: `returncode` is None when we ended it, at its timeout or because we had seen enough."""

    returncode: int | None
    seconds: float
    output: str
    enough: bool = False
    report: Mapping[str, Any] | None = None


def environment(*, limited: bool, ranks: int = 1, task: bool = True) -> dict[str, str]:
    """The environment of a trial: threads fixed, and under a budget the allocator; speed is that of the user's own."""
    made = dict(os.environ)
    made.update(_FIXED_ALLOCATOR if limited else {})
    made.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))  # torchrun would set 1
    made["PYTHONUNBUFFERED"] = "1"  # a step marker must arrive when it is printed
    if task:
        made["PYTHONSAFEPATH"] = "1"  # a `random.py` in the current folder replaces nothing
    return made


def colourless() -> bool:
    """Whether the user asked for no colours (https://no-color.org)."""
    return bool(os.environ.get("NO_COLOR"))


def physical_memory() -> int:
    """Bytes of memory this process may hope for: the machine's, or its control group's limit."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            total = min(total, int(Path(path).read_text()))
        except (OSError, ValueError):
            continue
    return total


def run(
    command: Sequence[str],
    env: Mapping[str, str],
    *,
    timeout: float,
    scratch: Path,
    address_space: int = 0,
    on_line: Callable[[str, float], bool] | None = None,
    report: bool = False,
) -> Exit:
    """Run a command under the guard until it ends, `timeout` seconds pass, or `on_line` returns True."""
    options: dict[str, Any] = {"scratch": str(scratch), "address_space": address_space}
    report_path = scratch / "exit.json"
    report_path.unlink(missing_ok=True)
    if report:
        options["report"] = str(report_path)

    def start(pipe: int, output: int) -> Callable[[bool], int]:
        guard = subprocess.Popen(
            [
                sys.executable,
                "-I",
                "-S",
                batchwright.processes.guard.__file__,
                json.dumps({"pipe": pipe, **options}),
                *command,
            ],
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=[pipe],
            start_new_session=True,  # Ctrl-C is for the prober; what it means for a trial is ours to say
        )
        return lambda asked: guard.wait()

    done = _watch(start, timeout, on_line)
    if report_path.exists():
        done = replace(done, report=json.loads(report_path.read_text(encoding="utf-8")))
    return done


def run_forked(zygote: Zygote, spec: Path, *, timeout: float) -> Exit:
    """The same for a trial of a task, forked from a process that has imported everything."""

    def start(pipe: int, output: int) -> Callable[[bool], int]:
        zygote.start(str(spec), pipe, output)
        return lambda asked: zygote.wait(asked=asked)

    return _watch(start, timeout)


def _watch(
    start: Callable[[int, int], Callable[[bool], int]],
    timeout: float,
    on_line: Callable[[str, float], bool] | None = None,
) -> Exit:
    """`start` a guard with a pipe to listen to and one to write to; it returns how to wait for it."""
    started = time.monotonic()
    deadline = started + timeout
    (reading, writing), (output, theirs) = os.pipe(), os.pipe()
    try:
        wait = start(reading, theirs)
    except BaseException:
        os.close(writing)
        os.close(output)
        raise
    finally:
        os.close(reading)
        os.close(theirs)
    tail = _Tail(on_line)
    ended = enough = late = False
    try:
        while not enough and not late:
            left = deadline - time.monotonic()
            if select.select([output], [], [], max(0.0, min(left, 1.0)))[0]:
                chunk = os.read(output, 65536)
                if not chunk:  # the guard writes here too, so it has ended
                    ended = True
                    break
                enough = tail.feed(chunk, time.monotonic() - started)
            late = time.monotonic() >= deadline
    finally:
        if not ended:
            _tell(writing)
        os.close(writing)
        code = wait(not ended)
        os.close(output)
    return Exit(None if enough or late else code, time.monotonic() - started, tail.text(), enough)


def _tell(writing: int) -> None:
    try:
        os.write(writing, b"x")
    except OSError:  # the guard has just ended by itself
        pass


class _Tail:
    """The last output, and its lines one by one; progress bars return the carriage instead of starting a line."""

    def __init__(self, on_line: Callable[[str, float], bool] | None) -> None:
        self._on_line, self._bytes, self._line = on_line, b"", b""

    def feed(self, chunk: bytes, when: float) -> bool:
        """Take more output; True when `on_line` has seen enough."""
        self._bytes = (self._bytes + chunk)[-_TAIL:]
        *lines, self._line = (self._line + chunk).replace(b"\r", b"\n").split(b"\n")
        self._line = self._line[-_TAIL:]
        if self._on_line is None:
            return False
        return any([self._on_line(line.decode("utf-8", "replace"), when) for line in lines if line.strip()])

    def text(self) -> str:
        """What is left of the output."""
        return self._bytes.decode("utf-8", "replace").replace("\r", "\n")
