"""Stands between the prober and a trial: no process of a trial outlives it, whoever dies, and however.

Run as a script, by path (it imports the standard library only, so it starts in milliseconds):

    python guard.py PIPE SCRATCH REPORT ADDRESS_SPACE COMMAND...

PIPE is the read end of a pipe whose write end only the prober holds. When the prober goes away, even by SIGKILL, the
pipe ends, and everything below is killed. A subreaper inherits orphans, so daemons and double forks are found as well.
When the command ends, what it left running is killed; then this process ends the way the command did.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import select
import shutil
import signal
import subprocess
import sys

_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_POLL_SECONDS = 0.05


def prctl(option: int, value: int) -> None:
    """Linux's prctl; elsewhere nothing, and process groups have to do."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def die_with(parent: int) -> None:
    """Ask the kernel to kill this process when its parent dies; if that happened before we asked, die now."""
    prctl(_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(125)


def descendants(root: int) -> list[int]:
    """All processes below `root`, by the kernel's list of parents."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc") if os.path.isdir("/proc/self") else ():
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    parent = int(file.read().rsplit(b")", 1)[1].split()[1])
            except (OSError, IndexError):
                continue  # it ended meanwhile
            children.setdefault(parent, []).append(int(name))
    found, level = [], [root]
    while level:
        level = [child for parent in level for child in children.get(parent, ())]
        found += level
    return found


def kill_all(group: int) -> None:
    """Kill until no child is left; orphans of orphans come to us one generation at a time."""
    while True:
        for pid in descendants(os.getpid()):
            _kill(os.kill, pid)
        _kill(os.killpg, group)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _kill(how, target: int) -> None:
    try:
        how(target, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass


def peak_bytes(root: int) -> int:
    """The largest VmPeak among the processes below `root`: what a limit of address space is compared with."""
    peak = 0
    for pid in descendants(root):
        try:
            with open(f"/proc/{pid}/status", "rb") as file:
                for line in file:
                    if line.startswith(b"VmPeak"):
                        peak = max(peak, int(line.split()[1]) * 1024)
                        break
        except OSError:
            continue
    return peak


def _report(path: str, peak: int) -> None:
    if path:
        resident = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
        with open(path + ".part", "w", encoding="utf-8") as file:
            json.dump({"peak_address_space_bytes": peak, "peak_resident_bytes": resident}, file)
        os.replace(path + ".part", path)


def main(words: list[str]) -> None:
    """Run the command; see the module's text."""
    pipe, scratch, report, space = int(words[0]), words[1], words[2], int(words[3])
    command = words[4:]
    prctl(_SET_CHILD_SUBREAPER, 1)
    me = os.getpid()

    def prepare() -> None:
        die_with(me)
        if space:
            resource.setrlimit(resource.RLIMIT_AS, (space, space))

    try:
        child = subprocess.Popen(command, preexec_fn=prepare, start_new_session=True)
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error.strerror}\n")
        sys.exit(127 if isinstance(error, FileNotFoundError) else 126)
    except subprocess.SubprocessError:  # the parent was gone before the child asked
        sys.exit(125)
    peak = 0
    while child.poll() is None:
        ended = select.select([pipe], [], [], _POLL_SECONDS)[0]
        peak = max(peak, peak_bytes(me)) if report else 0
        if ended:
            kill_all(child.pid)
            if os.read(pipe, 1):  # a prober that ends a trial on purpose says so with a byte, and tidies up itself
                _report(report, peak)
            else:
                shutil.rmtree(scratch, ignore_errors=True)
            return
    code = child.returncode
    kill_all(child.pid)
    _report(report, peak)
    if code < 0:  # the same death, so that the prober reads it from the status
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(me, -code)
    sys.exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
