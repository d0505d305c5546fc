"""Inside an allocation: one launch as a step of srun, or as the user's own command on the first node.

Ranks are asked for a checkpoint one by one, by a small step beside theirs (`slurm_trace`). Where no step can be made, as
without a controller, srun passes the wish on; how far it comes is then up to Slurm (proctrack/cgroup: to a task's first
process).
"""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from batchwright.core.errors import EnvironmentFault
from batchwright.launch.engine import Action, Handle, Job, Poll, RankLog, rank_logs
from batchwright.processes.guard import die_with
from batchwright.rundir import atomic

from . import commands as slurm
from . import sbatch
from .site import Site
from .trace import signal_ranks

LEAVING_SECONDS = 30.0  # for a launcher, or a job, to follow the last of its ranks
_AGAIN_SECONDS = 10.0  # until a wish is repeated: a rank may not have been listening, or a controller was away
_MOMENT = 0.5  # for a signal of Slurm's to be seen by all whom it was sent to
_FIRST_PORT = 20_000  # of those to meet at
# A constant text: what it starts comes as words of their own.
_RANK_SHELL = ("sh", "-c", 'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID; export RANK LOCAL_RANK; exec "$@"', "rank")


class Leaving:
    """Whether a launch is about to end by itself: all of its ranks have, and not long ago.

    It must not be killed then. A step daemon that is to kill what ends at that moment misses its own wake-up (Slurm 22.05,
    step_terminate_monitor_stop), hangs for UnkillableStepTimeout, and has its node drained: "Kill task failed".
    """

    def __init__(self) -> None:
        self._since: dict[str, float] = {}  # when all ranks of a launch were first seen to have ended

    def soon(self, launch: str, ranks: tuple[RankLog, ...]) -> bool:
        """Whether it is."""
        if not ranks or any(rank.code is None for rank in ranks):
            return False
        return time.monotonic() - self._since.setdefault(launch, time.monotonic()) < LEAVING_SECONDS


class StepEngine:
    """The engine that a job uses within itself."""

    name = "slurm"

    def __init__(self, site: Site) -> None:
        self._site = site
        self._process: subprocess.Popen[bytes] | None = None
        self._job: Job | None = None
        self._asked: set[int] = set()  # commands that heard that they are to stop
        self._wished: float | None = None  # when that was first wished for
        self._again: dict[Action, float] = {}  # when a wish is to be repeated
        self._leaving = Leaving()
        self._passed_on = False  # whether torchrun was signalled: a second time would be its end

    def command(self, job: Job) -> tuple[str, ...]:
        """srun with its ranks; a command of the user's own is started once, and starts its own."""
        site, python = self._site, sys.executable
        if job.direct:
            return sbatch.rank_words(Site(), job.directory, job.argv, python, "0")
        srun = sbatch.srun_words(site, nodes=job.nodes, ranks_per_node=job.ranks_per_node)
        rank = sbatch.rank_words(site, job.directory, job.argv, python, "RANK")
        if site.launcher == "srun":
            return (*srun, *_RANK_SHELL, *rank)
        return (
            *srun,
            *sbatch.torchrun_words(
                site.python or python, job.directory, nodes=job.nodes, ranks_per_node=job.ranks_per_node,
                grace=job.grace_seconds,
            ),
            *rank,
        )  # fmt: skip

    def start(self, job: Job) -> Handle:
        """Start it; it ends with this process."""
        (job.directory / "logs").mkdir(parents=True, exist_ok=True)
        me = os.getpid()
        try:
            with open(job.directory / "logs" / "launcher.log", "ab", opener=atomic.no_follow) as log:
                self._process = subprocess.Popen(
                    self.command(job), cwd=job.working_directory, env={**os.environ, **self._variables(job)},
                    stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                    preexec_fn=lambda: die_with(me),
                )  # fmt: skip
        except OSError as error:
            raise EnvironmentFault(f"cannot start {job.name}: {error}.", field="engine", given="slurm") from error
        self._job = job
        return {"engine": self.name, "job": slurm.me(), "directory": str(job.directory)}

    def _variables(self, job: Job) -> dict[str, str]:
        made = dict(job.environment)
        if job.direct:
            return made
        world = {"WORLD_SIZE": str(job.nodes * job.ranks_per_node), "LOCAL_WORLD_SIZE": str(job.ranks_per_node)}
        rendezvous = {"MASTER_ADDR": _address(), "MASTER_PORT": str(_free_port())}
        if (cpus := os.environ.get("SLURM_CPUS_PER_TASK")) is not None:
            made["SRUN_CPUS_PER_TASK"] = cpus  # the job's own option, which srun has not taken over since 22.05
        if self._site.launcher == "torchrun":
            return {**made, **{f"PET_{key}": value for key, value in rendezvous.items()}}
        return {**made, **world, **rendezvous}

    def poll(self, handle: Handle) -> Poll:
        """Whether it runs."""
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
                if (
                    not rank.pid
                    or rank.state in (None, "Z")
                    or (action == "checkpoint" and not self._to_ask(job, rank))
                ):
                    continue
                try:
                    os.kill(rank.pid, number)
                except ProcessLookupError:
                    pass  # it has just ended by itself
            if action == "kill":
                process.kill()  # its ranks asked the kernel to go with it
            return
        if time.monotonic() < self._again.get(action, 0.0):
            return
        if action == "kill":
            if self._leaving.soon(str(job.directory), self.logs(handle)):
                return
            self._kill()
        elif action == "trace":
            self._ask(job, signal.SIGABRT)
        elif not self._ask(job, signal.SIGUSR1) and not self._passed_on:
            self._passed_on = self._site.launcher == "torchrun"
            process.send_signal(signal.SIGUSR1)
        self._again[action] = time.monotonic() + _AGAIN_SECONDS

    def _to_ask(self, job: Job, rank: RankLog) -> bool:
        """A command is asked once: many take a second signal for "now".

        A SIGTERM that Slurm sends to a job goes, but for proctrack/cgroup, to all of its processes, and is seen by the
        command's parent (`rank.py`) within a moment.
        """
        assert rank.pid is not None
        if job.stop_signal == "SIGTERM":
            self._wished = self._wished or time.monotonic()
            if (job.directory / "ranks" / f"{rank.rank}.told.json").exists():
                self._asked.add(rank.pid)
            elif time.monotonic() - self._wished < _MOMENT:
                return False
        if rank.pid in self._asked:
            return False
        self._asked.add(rank.pid)
        return True

    def _ask(self, job: Job, number: signal.Signals) -> bool:
        """Signal every rank, wherever it is; whether that was possible, or Slurm has done so itself."""
        if job.nodes == 1:
            signal_ranks(job.directory, 0, job.ranks_per_node, number)
            return True
        words = (
            "srun", "--overlap", "--export=ALL", f"--nodes={job.nodes}", f"--ntasks={job.nodes}", "--ntasks-per-node=1",
            sys.executable, "-P", "-m", "batchwright.launch.slurm.trace",
            str(job.directory), str(job.ranks_per_node), number.name,
        )  # fmt: skip
        try:
            done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, timeout=20, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return False  # a node or a controller that does not answer
        # A job that is being ended has no further steps, and torchrun has its SIGTERM from Slurm.
        ending = b"completing" in done.stderr and self._site.launcher == "torchrun"
        return done.returncode == 0 or ending

    def _kill(self) -> None:
        """End the ranks' step; a prologue may have had steps before it."""
        me = slurm.me() or ""
        try:
            steps = slurm.steps(me)
        except slurm.Unreachable:
            steps = [f"{me}.0"]
        for step in steps:
            slurm.cancel(step, "--signal=KILL")

    def logs(self, handle: Handle) -> tuple[RankLog, ...]:
        """Every rank's files; the kernel's view where all of them are here."""
        return rank_logs(
            Path(handle["directory"]), alive=bool(self._job and (self._job.direct or self._job.nodes == 1))
        )


def _address() -> str:
    """The first node, which this is, by the first of its names that resolves."""
    for name in (os.environ.get("SLURMD_NODENAME"), socket.gethostname(), socket.getfqdn()):
        try:
            if name and socket.gethostbyname(name):
                return name
        except OSError:
            continue
    return "127.0.0.1"


def _free_port() -> int:
    """A port that is free here, and stays so until rank 0 has it: below those that the kernel gives to connections."""
    try:
        with open("/proc/sys/net/ipv4/ip_local_port_range", encoding="ascii") as file:
            first_given = int(file.read().split()[0])
    except (OSError, ValueError):
        first_given = 32768
    # Last any: where connections are given all ports, or a hundred were taken.
    for port in (*random.sample(range(_FIRST_PORT, max(first_given, _FIRST_PORT + 100)), 100), 0):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
                return probe.getsockname()[1]
            except OSError:
                continue
    raise EnvironmentFault("no port is free for the ranks to meet at.", field="engine", given="slurm")
