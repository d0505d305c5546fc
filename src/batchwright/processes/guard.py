"""A process between ours and a command of the user: nothing that the command starts outlives the guard.

Run as a script, by path (it imports the standard library only, so it starts in milliseconds):

    python guard.py '{"pipe": 5}' COMMAND...

`pipe` is the read end of a pipe; only our process holds the write end. When our process ends, even by SIGKILL, the pipe
ends, and the guard kills everything below it; a byte in the pipe asks for the same. The guard is a subreaper: orphans
become its children, so it also finds daemons and double forks. When the command ends, the guard kills what is still
running below it, and then ends with the same exit code or signal. A signal that ends the guard does so after it has
killed everything below it.

Optional: `address_space`, the most bytes that the command may map; `first`, whether the kernel ends the command before any
other program if the host is out of memory; `report`, a file for the peak memory of all processes
below; `scratch`, a folder to remove if our process ended without sending a byte.
"""

from __future__ import annotations

import ctypes
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Collection, Sequence

_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_SAMPLE_SECONDS = 0.05


def prctl(option: int, value: int) -> None:
    """Linux's prctl. On other systems it does nothing: only process groups are killed there."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def die_with(parent: int) -> None:
    """Ask the kernel to kill this process when its parent ends; if the parent has already ended, end now."""
    prctl(_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(125)


def command_line(command: Sequence[str], pipe: int, **options: object) -> list[str]:
    """What runs `command` below a guard."""
    import json

    return [sys.executable, "-I", "-S", __file__, json.dumps({"pipe": pipe, **options}), *command]


def _stat(pid: int | str) -> list[bytes] | None:
    """The fields of /proc/PID/stat from the state on; None if the process is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rsplit(b")", 1)[1].split()
    except (OSError, IndexError):
        return None


def start_time(pid: int) -> int | None:
    """When a process was started, in the kernel's ticks: pid and start time together identify a process."""
    fields = _stat(pid)
    return None if fields is None else int(fields[19])


def process_state(pid: int, started: int | None) -> str | None:
    """The letter of a process in /proc (R, S, D, T, Z); None if it is gone or its number was given to another one."""
    fields = _stat(pid)
    if fields is None or (started is not None and int(fields[19]) != started):
        return None
    return fields[0].decode()


def send(pid: int, number: int) -> None:
    """Signal a process, unless it has just ended."""
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        pass


def no_core() -> None:
    """Write no core file: it would be outside the run directory."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def die_as(code: int) -> None:
    """End this process with the exit code or signal of a child."""
    if code < 0:
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def end_first() -> None:
    """If the host is out of memory, let the kernel end this process, or one that it starts, before others."""
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    except OSError:  # not Linux
        pass


def adopt_orphans() -> None:
    """From now on orphans below this process become its children, and not those of init."""
    prctl(_SET_CHILD_SUBREAPER, 1)


def _processes() -> dict[int, tuple[int, int, bytes]]:
    """Parent, session and state of every process."""
    found: dict[int, tuple[int, int, bytes]] = {}
    for name in os.listdir("/proc") if os.path.isdir("/proc/self") else ():
        if name.isdigit() and (fields := _stat(name)) is not None:
            found[int(name)] = (int(fields[1]), int(fields[3]), fields[0])
    return found


def _descendants(*roots: int) -> list[int]:
    """All processes below `roots` that have not ended."""
    processes = _processes()
    children: dict[int, list[int]] = {}
    for pid, (parent, _, _) in processes.items():
        children.setdefault(parent, []).append(pid)
    found: list[int] = []
    level = [*roots]
    while level:
        level = [child for parent in level for child in children.get(parent, ())]
        found += level
    return [pid for pid in found if processes[pid][2] != b"Z"]


def _kill(pids: Collection[int]) -> None:
    for pid in pids:
        send(pid, signal.SIGKILL)


def foreign_children() -> set[int]:
    """Children in another session: those that we started so, and orphans that became ours."""
    me, session = os.getpid(), os.getsid(0)
    return {pid for pid, (parent, its, _) in _processes().items() if parent == me and its != session}


def kill_orphans(known: Collection[int], seconds: float = 10.0) -> None:
    """Kill the orphans that became our children, and all below them, but not the `known` children."""
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
    """Kill everything below a process that is not our child."""
    deadline = time.monotonic() + seconds
    while (left := _descendants(root)) and time.monotonic() < deadline:
        _kill(left)
        time.sleep(0.01)


def _kill_all(group: int | None = None) -> None:
    """Kill until no child is left. The children of a killed process become ours, so this repeats."""
    while True:
        _kill(_descendants(os.getpid()))
        try:
            if group is not None:
                os.killpg(group, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _peak_bytes(root: int) -> int:
    """The largest VmPeak of the processes below `root`, which a limit of address space applies to."""
    peak = 0
    for pid in _descendants(root):
        try:
            with open(f"/proc/{pid}/status", "rb") as file:
                peak = max(peak, *(int(line.split()[1]) * 1024 for line in file if line.startswith(b"VmPeak")), 0)
        except OSError:
            continue
    return peak


def _report(path: str, peak: int) -> None:
    import json

    resident = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    try:
        with open(f"{path}.{os.getpid()}", "x", encoding="utf-8") as file:
            json.dump({"peak_address_space_bytes": peak, "peak_resident_bytes": resident}, file)
        os.replace(file.name, path)
    except OSError:  # on a full disk there is no report; the exit code still arrives
        pass


def _ended(child: int) -> int | None:
    """A child's exit code as in `subprocess` (below zero: a signal), or None while it runs."""
    pid, status = os.waitpid(child, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if pid else None


def _guard(child: int, pipe: int, report: str = "", scratch: str = "") -> int:
    """Wait for a child, the leader of its own session: its exit code, or 137 if the pipe ended first."""
    waited: list[int] = [pipe]
    interval: float | None = _SAMPLE_SECONDS
    try:
        waited.append(os.pidfd_open(child))
        interval = _SAMPLE_SECONDS if report else None
    except (AttributeError, OSError):  # an old kernel: poll
        pass
    peak, asked, code = 0, False, None
    while not asked and (code := _ended(child)) is None:
        asked = pipe in select.select(waited, [], [], interval)[0]
        peak = max(peak, _peak_bytes(os.getpid())) if report else 0
    _kill_all(child)
    if report:
        _report(report, peak)
    if asked and scratch and not os.read(pipe, 1):  # a process that sends a byte removes the folder itself
        import shutil

        shutil.rmtree(scratch, ignore_errors=True)
    return 137 if code is None else code


def main(arguments: list[str]) -> None:
    """Run the command; see the module's text."""
    import json
    import subprocess

    options, command = json.loads(arguments[0]), arguments[1:]
    adopt_orphans()
    no_core()
    me, space, first = os.getpid(), options.pop("address_space", 0), options.pop("first", False)
    most = resource.getrlimit(resource.RLIMIT_AS)[1]
    if space and most not in (resource.RLIM_INFINITY, -1) and space > most:
        sys.stderr.write(f"{command[0]}: ulimit -v allows {most:,} bytes, and the budget is {space:,}\n")
        sys.exit(126)

    def prepare() -> None:
        die_with(me)
        if first:
            end_first()
        if space:
            resource.setrlimit(resource.RLIMIT_AS, (space, space))

    def on_signal(number: int, frame: object) -> None:
        _kill_all()
        die_as(-number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, on_signal)  # the command gets the default: exec resets handlers
    try:
        child = subprocess.Popen(command, preexec_fn=prepare, start_new_session=True)
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error.strerror}\n")
        sys.exit(127 if isinstance(error, FileNotFoundError) else 126)
    die_as(_guard(child.pid, **options))


if __name__ == "__main__":
    main(sys.argv[1:])
