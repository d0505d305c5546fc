"""Inside an allocation: one launch as an srun step, or as the user's own command on the first node.

To ask for a checkpoint, a second small step (`main`) signals the ranks of each node one by one. Slurm's own signals reach
all processes of the ranks' step or only the first process of each task, depending on how Slurm tracks processes. But
torchrun takes a second signal as "stop now", and a rank ends when its parent ends. Where no step can start, as without a
controller, srun passes the signal on.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from batchwright.core.errors import EnvironmentFault
from batchwright.launch.engine import Action, Handle, Job, Poll, RankLog, all_ended, rank_logs
from batchwright.launch.ports import free_port
from batchwright.processes.guard import die_with, send
from batchwright.rundir import atomic

from . import commands as slurm
from .script import ranks_command
from .site import Site

LEAVING_SECONDS = 30.0  # for a launcher, or a job, to end after the last of its ranks
_AGAIN_SECONDS = 10.0  # until a signal is repeated: a rank may not handle it yet, or the controller did not answer
_SIGNAL_SECONDS = 0.5  # until a signal from Slurm has reached all processes of a job
_TOGETHER_SECONDS = 15.0  # for all nodes to be ready for a stack trace
_NAMES_PER_SECOND = 1000  # that a node reads while it waits for the others: they all read the same folder


def say(text: str) -> None:
    """Print a line to the job's log."""
    print(f"{time.strftime('%H:%M:%S')} batchwright: {text}", flush=True)


def prologue_failure(site: Site) -> str | None:
    """Which prologue command failed, from the variable that the script sets; None if all succeeded."""
    failed = os.environ.pop("BATCHWRIGHT_PROLOGUE_FAILED", "").split()
    if len(failed) != 2 or not failed[0].isdigit():
        return None
    number = int(failed[0])
    line = site.prologue[number - 1].strip() if 0 < number <= len(site.prologue) else ""
    return f"prologue command {number} exited with {failed[1]}: {line[:200]}"


class Leaving:
    """Whether a launch is about to end by itself: all of its ranks have ended, and not long ago.

    It must not be killed then. A Slurm step daemon that gets a kill while its step ends misses its own wake-up (22.05,
    step_terminate_monitor_stop), hangs for UnkillableStepTimeout, and Slurm drains its node: "Kill task failed".
    """

    def __init__(self) -> None:
        self._since: dict[str, float] = {}  # when all ranks of a launch were first seen to have ended

    def soon(self, directory: str) -> bool:
        """Whether the launch with this directory is about to end."""
        if not all_ended(Path(directory)):
            return False
        return time.monotonic() - self._since.setdefault(directory, time.monotonic()) < LEAVING_SECONDS


class StepEngine:
    """The engine that a job uses inside its allocation."""

    name = "slurm"

    def __init__(self, site: Site) -> None:
        self._site = site
        self._process: subprocess.Popen[bytes] | None = None
        self._job: Job | None = None
        self._asked: set[int] = set()  # commands that were asked to stop
        self._first_asked: float | None = None
        self._again: dict[Action, float] = {}  # when an action may be repeated
        self._leaving = Leaving()
        self._passed_on = False  # whether torchrun was signalled: a second signal would end it at once

    def command(self, job: Job) -> tuple[str, ...]:
        """What `start` runs."""
        return ranks_command(self._site, job)

    def start(self, job: Job) -> Handle:
        """Start the launch; it ends with this process."""
        (job.directory / "logs").mkdir(parents=True, exist_ok=True)
        me = os.getpid()
        try:
            with open(job.directory / "logs" / "launcher.log", "ab", opener=atomic.no_follow) as log:
                self._process = subprocess.Popen(
                    self.command(job),
                    cwd=job.working_directory,
                    env={**os.environ, **self._variables(job)},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    preexec_fn=lambda: die_with(me),
                )
        except OSError as error:
            raise EnvironmentFault(f"cannot start {job.name}: {error}.", field="engine", given="slurm") from error
        self._job = job
        return {"engine": self.name, "job": slurm.me(), "directory": str(job.directory)}

    def _variables(self, job: Job) -> dict[str, str]:
        made = dict(job.environment)
        if job.direct:
            return made
        world = {"WORLD_SIZE": str(job.nodes * job.ranks_per_node), "LOCAL_WORLD_SIZE": str(job.ranks_per_node)}
        rendezvous = {"MASTER_ADDR": _address(), "MASTER_PORT": str(free_port())}
        if (cpus := os.environ.get("SLURM_CPUS_PER_TASK")) is not None:
            made["SRUN_CPUS_PER_TASK"] = cpus  # since 22.05 srun does not inherit this option from the job
        if self._site.launcher == "torchrun":
            return {**made, **{f"PET_{key}": value for key, value in rendezvous.items()}}
        return {**made, **world, **rendezvous}

    def poll(self, handle: Handle) -> Poll:
        """Whether the launch runs."""
        code = self._process.poll() if self._process else None
        return Poll("running") if self._process and code is None else Poll("ended", code)

    def signal(self, handle: Handle, action: Action) -> None:
        """Ask every rank, or end them all."""
        process, job = self._process, self._job
        if process is None or job is None or process.poll() is not None:
            return
        if job.direct:
            number = {"trace": signal.SIGABRT, "kill": signal.SIGKILL}.get(action, signal.Signals[job.stop_signal])
            for rank in self.logs(handle):
                if rank.pid and rank.state not in (None, "Z") and (action != "checkpoint" or self._to_ask(job, rank)):
                    send(rank.pid, number)
            if action == "kill":
                process.kill()  # Linux then kills its ranks
            return
        if time.monotonic() < self._again.get(action, 0.0):
            return
        if action == "kill":
            if self._leaving.soon(handle["directory"]):
                return
            self._kill()
        elif action == "trace":
            self._ask(job, signal.SIGABRT)
        elif not self._ask(job, signal.SIGUSR1) and not self._passed_on:
            self._passed_on = self._site.launcher == "torchrun"
            process.send_signal(signal.SIGUSR1)
        self._again[action] = time.monotonic() + _AGAIN_SECONDS

    def _to_ask(self, job: Job, rank: RankLog) -> bool:
        """Whether a command is still to be asked: only once, because many take a second signal as "stop now".

        Slurm sends SIGTERM to all processes of a job, except with proctrack/cgroup. Then the command has it already, and
        its parent (`rank.py`) has written so.
        """
        assert rank.pid is not None
        if job.stop_signal == "SIGTERM":
            self._first_asked = self._first_asked or time.monotonic()
            if (job.directory / "ranks" / f"{rank.rank}.told.json").exists():
                self._asked.add(rank.pid)
            elif time.monotonic() - self._first_asked < _SIGNAL_SECONDS:
                return False
        if rank.pid in self._asked:
            return False
        self._asked.add(rank.pid)
        return True

    def _ask(self, job: Job, number: signal.Signals) -> bool:
        """Signal every rank on every node; False if that was not possible and Slurm has not signalled them either."""
        if job.nodes == 1:
            signal_ranks(job.directory, 0, job.ranks_per_node, number)
            return True
        step = (
            "srun",
            "--overlap",
            "--export=ALL",
            f"--nodes={job.nodes}",
            f"--ntasks={job.nodes}",
            "--ntasks-per-node=1",
        )
        module = (sys.executable, "-P", "-m", "batchwright.launch.slurm.step")
        command = (*step, *module, str(job.directory), str(job.ranks_per_node), number.name)
        try:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=20, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return False  # a node or the controller does not answer
        # Slurm starts no further step in a job that it ends, but has sent SIGTERM to torchrun.
        ending = b"completing" in done.stderr and self._site.launcher == "torchrun"
        return done.returncode == 0 or ending

    def _kill(self) -> None:
        """End the step of the ranks; its number is not always 0, because a prologue may run steps, too."""
        me = slurm.me() or ""
        try:
            steps = slurm.steps(me)
        except slurm.Unreachable:
            steps = [f"{me}.0"]
        for step in steps:
            slurm.cancel(step, "--signal=KILL")

    def logs(self, handle: Handle) -> tuple[RankLog, ...]:
        """Every rank's files; process states, too, where all ranks run on this node."""
        here = bool(self._job and (self._job.direct or self._job.nodes == 1))
        return rank_logs(Path(handle["directory"]), alive=here)


def _address() -> str:
    """The first of this node's names that resolves; the job's first process runs on its first node."""
    for name in (os.environ.get("SLURMD_NODENAME"), socket.gethostname(), socket.getfqdn()):
        try:
            if name and socket.gethostbyname(name):
                return name
        except OSError:
            continue
    return "127.0.0.1"


def signal_ranks(directory: Path, node: int, per_node: int, number: int) -> None:
    """Signal the ranks on this node (srun places them in blocks); SIGABRT makes each write its stack to its log."""
    for rank in rank_logs(directory, range(node * per_node, (node + 1) * per_node)):
        if rank.pid and rank.state not in (None, "Z"):
            send(rank.pid, number)
            if number == signal.SIGABRT:
                send(rank.pid, signal.SIGCONT)  # a stopped process writes its stack when it continues


def _wait_for_nodes(directory: Path, node: int, nodes: int) -> None:
    """Wait until all nodes are ready: the first rank that ends ends the others, even before they wrote their stacks."""
    folder = directory / "tracing"
    folder.mkdir(exist_ok=True)
    (folder / str(node)).touch()
    deadline = time.monotonic() + _TOGETHER_SECONDS
    while len(os.listdir(folder)) < nodes and time.monotonic() < deadline:
        time.sleep(max(0.01, nodes / _NAMES_PER_SECOND))


def main(arguments: list[str]) -> int:
    """Signal the ranks of one node: python -P -m batchwright.launch.slurm.step DIR RANKS_PER_NODE SIGNAL."""
    directory, per_node, number = Path(arguments[0]), int(arguments[1]), signal.Signals[arguments[2]]
    node = int(os.environ.get("SLURM_NODEID", "0"))
    if number == signal.SIGABRT:
        _wait_for_nodes(directory, node, int(os.environ.get("SLURM_NNODES", "1")))
    signal_ranks(directory, node, per_node, number)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
