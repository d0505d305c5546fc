"""The batch script of a job, and the command that starts the ranks inside the job.

The `#SBATCH` lines hold no path: Slurm allows no newline there, expands `%` and has its own quotes. The body changes
directory and opens its log itself. The script holds neither the user's command nor its environment: the job reads both
from the run directory, which only its owner may read. So no value passes through a shell.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from batchwright.core.nodes.policies import Launch
from batchwright.launch.directory import RunDirectory
from batchwright.launch.engine import Job
from batchwright.launch.records import RunPlan
from batchwright.launch.work import launch_end, work
from batchwright.processes.start import torchrun
from batchwright.rundir import atomic

from . import commands as slurm
from .site import Site, SlurmRun, job_name, quote

JOB_MODULE = "batchwright.launch.slurm.job"
# A constant text: the command follows as separate arguments.
_RANK_SHELL = ("sh", "-c", 'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID; export RANK LOCAL_RANK; exec "$@"', "rank")
_TORCHRUN_SHELL = ("bash", "-c", 'PET_NODE_RANK=$SLURM_NODEID exec "$@"', "torchrun")


def write_script(path: Path, text: str) -> Path:
    """Write a script; only its owner may read it, because a prologue may hold secrets."""
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic.write(path, text, mode=0o700)
    return path


def write_chain_script(directory: RunDirectory, plan: RunPlan, run: SlurmRun, launch: Launch) -> Path:
    """Write the script of a chain's job into the run directory."""
    return write_script(script_path(directory, launch, "scripts"), chain_script(directory, plan, run, launch))


def script_path(directory: RunDirectory, launch: Launch, folder: str) -> Path:
    """Where the script of a launch is."""
    return directory.path / folder / f"launch-{launch.index + 1}.sh"


def chain_script(directory: RunDirectory, plan: RunPlan, run: SlurmRun, launch: Launch) -> str:
    """The script of a chain's job; a job that runs it takes the launch that is next then."""
    number, end = launch.index + 1, launch_end(plan, launch)
    job = work(directory, plan).job(launch, number, launch.start_sample)
    nodes = f"{launch.nodes} nodes × {plan.ranks(launch) // launch.nodes} ranks"
    title = f"launch {number} of {len(plan.launches)}, {nodes}, samples {launch.start_sample:,} to {end:,}"
    log = directory.path / "logs" / f"launch-{number}.log"
    return render(directory, run, job, "chain", launch.index, title=title, log=log)


def render(directory: RunDirectory, run: SlurmRun, job: Job, role: str, number: int, *, title: str, log: Path) -> str:
    """The text of the script; `role` and `number` are the arguments of `job.py` and part of the comment in the queue."""
    site = run.site
    # A user's own command may srun its ranks itself, so it gets all tasks.
    tasks_per_node = 1 if site.launcher == "torchrun" and not job.direct else job.ranks_per_node
    options = (
        f"--job-name={quote(job_name(site, directory))}",
        f"--nodes={job.nodes}",
        f"--ntasks-per-node={tasks_per_node}",
        f"--comment={quote(slurm.comment(run.token, role, number))}",
        *site.lines(),
        f"--signal=B:USR1@{site.signal_seconds}",  # to the batch script only, which asks every rank for a checkpoint
        "--no-requeue",  # a requeued job waits for two minutes; a new job does not
        "--output=/dev/null",  # the log is opened below
        "--chdir=/",
    )
    command = (sys.executable, "-P", "-m", JOB_MODULE, str(directory.path), role, str(number))
    lines = [
        "#!/bin/bash",
        f"# batchwright: {_one_line(title)}",
        *(f"#SBATCH {option}" for option in options),
        "",
        f"bw_log={shlex.quote(str(log))}",
        'mkdir -p -- "${bw_log%/*}" && exec >>"$bw_log" 2>&1 </dev/null || exit 4',
        f"cd -- {shlex.quote(str(job.working_directory))} || exit 4",
        f"bw_job=({shlex.join(command)})",
    ]
    if site.prologue:
        lines += ["", 'bw_failed() { export BATCHWRIGHT_PROLOGUE_FAILED="$1 $2"; exec "${bw_job[@]}"; }']
        for position, prologue in enumerate(site.prologue, 1):
            # The check is on its own line because a command may end in a comment.
            lines += [prologue, f'bw_code=$?; [ "$bw_code" = 0 ] || bw_failed {position} "$bw_code"']
    lines += ["", f"# runs: {_one_line(shlex.join(ranks_command(site, job)))}"]
    return "\n".join([*lines, 'exec "${bw_job[@]}"', ""])


def _one_line(text: str) -> str:
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def ranks_command(site: Site, job: Job) -> tuple[str, ...]:
    """What the job runs: srun with its ranks; or the user's own command, once, which starts its own ranks."""
    if job.direct:
        return _rank(Site(), job, "0")
    srun = _srun(site, job)
    if site.launcher == "srun":
        return (*srun, *_RANK_SHELL, *_rank(site, job, "RANK"))
    python = site.python or sys.executable
    launcher = torchrun(
        python,
        f"--nnodes={job.nodes}",
        ranks=job.ranks_per_node,
        log_dir=job.directory / "torchrun",
        shutdown_seconds=max(1, int(job.grace_seconds)),
    )
    return (*srun, *_TORCHRUN_SHELL, *launcher, *_rank(site, job, "RANK"))


def _srun(site: Site, job: Job) -> tuple[str, ...]:
    """srun for one launch: every rank is a task, or one torchrun on each node is."""
    per_node = job.ranks_per_node if site.launcher == "srun" else 1
    container: list[str] = []
    if isinstance(site.container, str):
        container.append(f"--container-image={site.container}")
        if site.container_mounts:
            container.append(f"--container-mounts={','.join(site.container_mounts)}")
    return (
        "srun",
        f"--nodes={job.nodes}",
        f"--ntasks={job.nodes * per_node}",
        f"--ntasks-per-node={per_node}",
        "--kill-on-bad-exit=1",  # the other ranks would hang in a collective
        "--input=none",
        "--output=none",  # every rank has its own log
        "--error=none",
        "--distribution=block",
        "--export=ALL",  # a site's --export=NONE is for the job: ranks need the variables that the job sets
        *container,
        *site.srun,
    )


def _rank(site: Site, job: Job, variable: str) -> tuple[str, ...]:
    """What a task runs: the rank's parent, which keeps its log, and the rank; inside the container if there is one."""
    python = site.python or sys.executable
    command = [python if argument == sys.executable else argument for argument in job.argv]
    container = site.container if isinstance(site.container, tuple) else ()
    return (*container, python, "-P", "-m", "batchwright.launch.rank", str(job.directory), variable, *command)
