"""Engine `local`: torchrun as a subprocess. A node is a group of `devices_per_node` processes on this machine.

    supervisor -> guard -> torchrun -> rank.py -> the rank, once per rank
    supervisor -> guard -> processes.py -> rank.py -> the process of a node, for JAX
    supervisor -> guard -> rank.py -> COMMAND                       where the command starts its own ranks

When a process of this tree ends, everything below it is killed. Signals go to the ranks themselves: torchrun would pass
them to the process groups of its ranks, loader workers included, and kill those that take longer than its timeout. A
command gets the stop signal once: torchrun and others take a second signal as a request to stop without a save.

When the guard itself is killed, processes that a command started continue. In `batchwright run` the supervisor inherits
and kills them. In another program (`batchwright.run()` in a notebook) it does not: it could not tell them from the
children of that program.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from batchwright.core.errors import EnvironmentFault
from batchwright.processes import guard
from batchwright.processes.start import torchrun
from batchwright.rundir import atomic

from .engine import Action, Handle, Job, Poll, RankLog, rank_logs


class LocalEngine:
    """torchrun on this machine. `owns_process`: this process does nothing else, so every orphan below it is a launch's."""

    name = "local"

    def __init__(self, owns_process: bool = False) -> None:
        self._owns_process = owns_process
        # Children from before, such as those of a shell that became this process by exec.
        self._others = guard.foreign_children() if owns_process else set[int]()
        self._running: dict[int, tuple[subprocess.Popen[bytes], int]] = {}
        self._asked: set[tuple[str, int]] = set()  # commands that got their stop signal

    def command(self, job: Job) -> tuple[str, ...]:
        """What the guard runs: torchrun or the command, with `rank.py` as the parent of each rank."""
        wrapper = (sys.executable, "-P", "-m", "batchwright.launch.rank", str(job.directory))
        if job.direct:
            return (*wrapper, "0", *job.argv)
        ranks = job.nodes * job.ranks_per_node
        if job.launcher == "processes":
            starter = (sys.executable, "-P", "-m", "batchwright.launch.processes", str(ranks))
            return (*starter, *wrapper, "RANK", *job.argv)
        # --standalone: a rendezvous on a free port.
        launcher = torchrun(
            sys.executable, "--standalone", ranks=ranks, log_dir=job.directory / "torchrun", shutdown_seconds=15
        )
        return (*launcher, *wrapper, "RANK", *job.argv)

    def start(self, job: Job) -> Handle:
        """Start a launch under a guard; it ends with this process."""
        (job.directory / "logs").mkdir(parents=True, exist_ok=True)
        if self._owns_process:
            guard.adopt_orphans()
        reading, writing = os.pipe()
        try:
            with open(job.directory / "logs" / "launcher.log", "ab", opener=atomic.no_follow) as log:
                started = subprocess.Popen(
                    guard.command_line(self.command(job), reading),
                    cwd=job.working_directory,
                    env={**os.environ, **job.environment},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=[reading],
                    start_new_session=True,  # Ctrl-C is for the supervisor, which decides what a rank gets
                )
        except OSError as error:
            os.close(writing)
            raise EnvironmentFault(f"cannot start {job.name}: {error}.", field="engine", given="local") from error
        finally:
            os.close(reading)
        self._running[started.pid] = (started, writing)
        return {
            "engine": self.name,
            "pid": started.pid,
            "start_time": guard.start_time(started.pid),
            "boot": _boot(),
            "directory": str(job.directory),
            "stop_signal": job.stop_signal if job.direct else "SIGUSR1",
            "direct": job.direct,
        }

    def poll(self, handle: Handle) -> Poll:
        """Whether it runs; a launch of another supervisor is found by its process."""
        known = self._running.get(handle["pid"])
        if known is None:
            state = guard.process_state(handle["pid"], handle["start_time"]) if handle["boot"] == _boot() else None
            return Poll("ended" if state in (None, "Z") else "running", detail="started by another supervisor")
        started, writing = known
        code = started.poll()
        if code is None:
            if guard.process_state(started.pid, None) == "T":
                # Someone has stopped the guard. The ranks would train on, and nothing would end them or notice their end.
                guard.send(started.pid, signal.SIGCONT)
            return Poll("running")
        if writing >= 0:
            os.close(writing)
            self._running[handle["pid"]] = (started, -1)
            if self._owns_process:
                guard.kill_orphans({*self._others, *(pid for pid, (_, pipe) in self._running.items() if pipe >= 0)})
        return Poll("ended", code)

    def signal(self, handle: Handle, action: Action) -> None:
        """Signal every rank, or kill everything below the guard."""
        if action == "kill":
            known = self._running.get(handle["pid"])
            if known is None:
                # Ranks and commands end with the guard. What a command started does not: it is killed first.
                if handle["boot"] == _boot() and guard.process_state(handle["pid"], handle["start_time"]):
                    guard.kill_below(handle["pid"])
                    guard.send(handle["pid"], signal.SIGKILL)
            elif known[1] >= 0:
                _write(known[1])
            return
        for rank in self.logs(handle):
            if rank.pid and rank.state not in (None, "Z"):
                if action == "checkpoint" and handle.get("direct"):
                    if (handle["directory"], rank.pid) in self._asked:
                        continue
                    self._asked.add((handle["directory"], rank.pid))
                guard.send(rank.pid, signal.SIGABRT if action == "trace" else signal.Signals[handle["stop_signal"]])
                if action == "trace":
                    guard.send(rank.pid, signal.SIGCONT)  # a stopped process writes its trace when it continues

    def logs(self, handle: Handle) -> tuple[RankLog, ...]:
        """Every rank's state and last output."""
        return rank_logs(Path(handle["directory"]), alive=handle["boot"] == _boot())


def _write(pipe: int) -> None:
    try:
        os.write(pipe, b"x")
    except OSError:  # the guard has just ended
        pass


def _boot() -> str:
    """The boot of this machine: process numbers are valid within one boot only."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
