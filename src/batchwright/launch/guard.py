"""Stands between the supervisor and a launch: no process of the launch outlives it, whoever dies, and however.

Run as a script, by path (it imports the standard library only, so it starts in milliseconds):

    python guard.py PIPE COMMAND...

PIPE is the read end of a pipe whose write end only the supervisor holds: when that goes away, even by SIGKILL, the pipe
ends, and everything below is killed. A subreaper inherits orphans, so daemons and double forks are found as well. When
the command ends, what it left running is killed; then this process ends the way the command did.
"""

from __future__ import annotations

import ctypes
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Collection

_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h


def prctl(option: int, value: int) -> None:
    """Linux's prctl; elsewhere nothing, and process groups have to do."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def die_with(parent: int) -> None:
    """Ask the kernel to kill this process when its parent dies; if that happened before we asked, die now."""
    prctl(_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(125)


def no_core() -> None:
    """A core file is a file outside the run directory."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def die_as(code: int) -> None:
    """End this process the way a child ended, so that whoever waits reads the same."""
    if code < 0:
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


def adopt_orphans(wanted: bool) -> None:
    """Whether what is orphaned below this process comes to it, rather than to init."""
    prctl(_SET_CHILD_SUBREAPER, int(wanted))


def _processes() -> dict[int, tuple[int, int, bytes]]:
    """Parent, session and state of every process."""
    found: dict[int, tuple[int, int, bytes]] = {}
    for name in os.listdir("/proc") if os.path.isdir("/proc/self") else ():
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    fields = file.read().rsplit(b")", 1)[1].split()
                found[int(name)] = (int(fields[1]), int(fields[3]), fields[0])
            except (OSError, IndexError):
                continue  # it ended meanwhile
    return found


def _descendants(*roots: int) -> list[int]:
    """All processes below `roots` that have not ended, by the kernel's list of parents."""
    processes = _processes()
    children: dict[int, list[int]] = {}
    for pid, (parent, _, _) in processes.items():
        children.setdefault(parent, []).append(pid)
    found, level = [], [*roots]
    while level:
        level = [child for parent in level for child in children.get(parent, ())]
        found += level
    return [pid for pid in found if processes[pid][2] != b"Z"]


def _kill(pids: Collection[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass


def foreign_children() -> set[int]:
    """Children of another session: what we started as such, and what came to us when its parent died."""
    me, session = os.getpid(), os.getsid(0)
    return {pid for pid, (parent, its, _) in _processes().items() if parent == me and its != session}


def kill_orphans(known: Collection[int], seconds: float = 10.0) -> None:
    """Kill what came to us when a guard died, and all below it; `known` children are none of that."""
    deadline = time.monotonic() + seconds
    while (orphans := foreign_children() - set(known)) and time.monotonic() < deadline:
        _kill([*orphans, *_descendants(*orphans)])
        for pid in orphans:
            try:
                os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                pass
        time.sleep(0.01)


def kill_below(root: int, seconds: float = 1.0) -> None:
    """Kill all below a process that is not ours to wait for, generation after generation."""
    deadline = time.monotonic() + seconds
    while (left := _descendants(root)) and time.monotonic() < deadline:
        _kill(left)
        time.sleep(0.01)


def _kill_all(group: int) -> None:
    """Kill until no child is left; orphans of orphans come to us one generation at a time."""
    while True:
        _kill(_descendants(os.getpid()))
        try:
            os.killpg(group, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def main(words: list[str]) -> None:
    """Run the command; see the module's text."""
    pipe, command = int(words[0]), words[1:]
    prctl(_SET_CHILD_SUBREAPER, 1)
    no_core()
    me = os.getpid()
    try:
        child = subprocess.Popen(command, preexec_fn=lambda: die_with(me), start_new_session=True)
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error.strerror}\n")
        sys.exit(127 if isinstance(error, FileNotFoundError) else 126)
    except subprocess.SubprocessError:  # the parent was gone before the child asked
        sys.exit(125)
    waited: list[int] = [pipe]
    try:
        waited.append(os.pidfd_open(child.pid))
        patience = None
    except (AttributeError, OSError):  # an old kernel: look now and then
        patience = 0.2
    while child.poll() is None:
        if pipe in select.select(waited, [], [], patience)[0]:
            _kill_all(child.pid)
            sys.exit(137)
    code = child.returncode
    _kill_all(child.pid)
    die_as(code)


if __name__ == "__main__":
    main(sys.argv[1:])
