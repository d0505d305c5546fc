"""Inside an allocation: one launch as a step of srun, or as the user's own command on the first node.

The job's process is the parent of srun, and srun forwards signals to every task's group; nothing here needs the
controller to ask for a checkpoint.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

from batchwright.core.errors import EnvironmentFault
from batchwright.guard import die_with

from . import sbatch
from . import slurm_commands as slurm
from .engine import Handle, Job, Poll, RankLog, Wish, rank_logs
from .slurm_site import Site

# A constant text: what it starts comes as words of their own.
_RANK_SHELL = ("sh", "-c", 'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID; export RANK LOCAL_RANK; exec "$@"', "rank")


class StepEngine:
    """The engine that a job uses within itself."""

    name = "slurm"

    def __init__(self, site: Site) -> None:
        self._site = site
        self._process: subprocess.Popen[bytes] | None = None
        self._job: Job | None = None
        self._asked: set[int] = set()  # commands that heard that they are to stop

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
            with open(job.directory / "logs" / "launcher.log", "ab") as log:
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
        if self._site.launcher == "torchrun":
            return {**made, **{f"PET_{key}": value for key, value in rendezvous.items()}}
        return {**made, **world, **rendezvous}

    def poll(self, handle: Handle) -> Poll:
        """Whether it runs."""
        code = self._process.poll() if self._process else None
        return Poll("running") if self._process and code is None else Poll("ended", code)

    def signal(self, handle: Handle, wish: Wish) -> None:
        """Ask every rank, or end them all."""
        process, job = self._process, self._job
        if process is None or job is None or process.poll() is not None:
            return
        if job.direct:
            number = {"trace": signal.SIGABRT, "kill": signal.SIGKILL}.get(wish, signal.Signals[job.stop_signal])
            for rank in self.logs(handle):
                if not rank.pid or rank.state in (None, "Z") or (wish == "checkpoint" and rank.pid in self._asked):
                    continue  # a command is asked once: many take a second signal for "now"
                if wish == "checkpoint":
                    self._asked.add(rank.pid)
                os.kill(rank.pid, number)
            if wish == "kill":
                process.kill()  # its ranks asked the kernel to go with it
        elif wish == "checkpoint":
            process.send_signal(signal.SIGUSR1)
        elif wish == "trace":
            beside = ("srun", "--overlap", f"--nodes={job.nodes}", f"--ntasks={job.nodes}", "--ntasks-per-node=1")
            words = (sys.executable, "-P", "-m", "batchwright.launch.slurm_trace", str(job.directory))
            try:
                subprocess.run(
                    [*beside, *words, str(job.ranks_per_node)], stdin=subprocess.DEVNULL, timeout=20, check=False
                )
            except (OSError, subprocess.TimeoutExpired):
                pass  # a node that does not answer has no stack to give
        else:
            slurm.cancel(f"{slurm.me()}.0", "--signal=KILL")

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
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]
