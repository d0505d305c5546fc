"""Engine `local`: torchrun as a subprocess. A node is a group of `devices_per_node` processes on this machine.

    supervisor -> guard -> torchrun -> rank.py -> the rank, once per rank
    supervisor -> guard -> rank.py -> COMMAND                       where the command starts its own ranks

Each arrow ends what is below it when it breaks. Signals go to the ranks themselves: torchrun would pass them to the
ranks' whole groups, loader workers too, and then ends by SIGKILL whoever takes longer than its timeout. A command is asked
to stop once: torchrun, and others, take a second signal as the wish to stop without a save.

When the guard itself is killed, what a command started goes on: it comes to the supervisor, which ends it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import batchwright.processes.guard
from batchwright.core.errors import EnvironmentFault, MissingExtraError
from batchwright.processes.guard import adopt_orphans, foreign_children, kill_below, kill_orphans, start_time
from batchwright.rundir import atomic

from .engine import Action, Handle, Job, Poll, RankLog, process_state, rank_logs, torchrun

_GUARD = (sys.executable, "-I", "-S", batchwright.processes.guard.__file__)
ENVIRONMENT = {
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # else a restart reads the old store's addresses
    "PYTHONFAULTHANDLER": "1",  # a rank that hangs leaves its stack when it is ended
    "PYTHONUNBUFFERED": "1",
    "PYTHONDONTWRITEBYTECODE": "1",  # nothing is written outside the run directory
}


class LocalEngine:
    """torchrun on this machine."""

    name = "local"

    def __init__(self) -> None:
        self._running: dict[int, tuple[subprocess.Popen[bytes], int]] = {}
        self._others: set[int] = set()  # children that were there before a launch
        self._asked: set[tuple[str, int]] = set()  # commands that heard that they are to stop

    def command(self, job: Job) -> tuple[str, ...]:
        """What the guard runs: torchrun, or the command itself."""
        wrapper = (sys.executable, "-P", "-m", "batchwright.launch.rank", str(job.directory))
        if job.direct:
            return (*wrapper, "0", *job.argv)
        ranks = job.nodes * job.ranks_per_node
        # --standalone: a rendezvous on a free port.
        launcher = torchrun(sys.executable, job, "--standalone", ranks=ranks, shutdown_seconds=15)
        return (*launcher, *wrapper, "RANK", *job.argv)

    def start(self, job: Job) -> Handle:
        """Start a launch under a guard; it ends with this process."""
        if not job.direct and find_spec("torch") is None:
            raise MissingExtraError(
                "a task needs torch, which is not installed: pip install 'batchwright[torch]'. A command of your own "
                "(batchwright run … -- COMMAND) does not.",
                field="task",
            )
        (job.directory / "logs").mkdir(parents=True, exist_ok=True)
        adopt_orphans(True)
        self._others = foreign_children()
        reading, writing = os.pipe()
        try:
            with open(job.directory / "logs" / "launcher.log", "ab", opener=atomic.no_follow) as log:
                guard = subprocess.Popen(
                    [*_GUARD, json.dumps({"pipe": reading}), *self.command(job)],
                    cwd=job.working_directory,
                    env={**os.environ, **job.environment},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=[reading],
                    start_new_session=True,  # Ctrl-C is for the supervisor; what it means for a rank is ours to say
                )
        except OSError as error:
            os.close(writing)
            raise EnvironmentFault(f"cannot start {job.name}: {error}.", field="engine", given="local") from error
        finally:
            os.close(reading)
        self._running[guard.pid] = (guard, writing)
        return {
            "engine": self.name,
            "pid": guard.pid,
            "start_time": start_time(guard.pid),
            "boot": _boot(),
            "directory": str(job.directory),
            "stop_signal": job.stop_signal if job.direct else "SIGUSR1",
            "direct": job.direct,
        }

    def poll(self, handle: Handle) -> Poll:
        """Whether it runs; one that another supervisor started is looked up by its process."""
        known = self._running.get(handle["pid"])
        if known is None:
            state = process_state(handle["pid"], handle["start_time"]) if handle["boot"] == _boot() else None
            return Poll("ended" if state in (None, "Z") else "running", detail="left by another supervisor")
        guard, writing = known
        code = guard.poll()
        if code is None:
            return Poll("running")
        if writing >= 0:
            os.close(writing)
            self._running[handle["pid"]] = (guard, -1)
            kill_orphans({*self._others, *(pid for pid, (_, pipe) in self._running.items() if pipe >= 0)})
            adopt_orphans(any(pipe >= 0 for _, pipe in self._running.values()))
        return Poll("ended", code)

    def signal(self, handle: Handle, action: Action) -> None:
        """Ask every rank, or end everything below the guard."""
        if action == "kill":
            known = self._running.get(handle["pid"])
            if known is None:
                # The guard's death is the end of ranks and commands, not of what a command started: that goes first.
                if handle["boot"] == _boot() and process_state(handle["pid"], handle["start_time"]):
                    kill_below(handle["pid"])
                    _send(handle["pid"], signal.SIGKILL)
            elif known[1] >= 0:
                _write(known[1])
            return
        for rank in self.logs(handle):
            if rank.pid and rank.state not in (None, "Z"):
                if action == "checkpoint" and handle.get("direct"):
                    if (handle["directory"], rank.pid) in self._asked:
                        continue
                    self._asked.add((handle["directory"], rank.pid))
                _send(rank.pid, signal.SIGABRT if action == "trace" else signal.Signals[handle["stop_signal"]])
                if action == "trace":
                    _send(rank.pid, signal.SIGCONT)  # one that was stopped leaves its trace when it goes on

    def logs(self, handle: Handle) -> tuple[RankLog, ...]:
        """Every rank's state and last output."""
        return rank_logs(Path(handle["directory"]), alive=handle["boot"] == _boot())


def _write(pipe: int) -> None:
    try:
        os.write(pipe, b"x")
    except OSError:  # the guard has just ended by itself
        pass


def _send(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        pass


def _boot() -> str:
    """Which start of which machine this is: process numbers mean nothing elsewhere."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
