"""What the command line needs of Slurm, in a few calls: begin or go on, look, stop."""

from __future__ import annotations

import time
from dataclasses import replace

from batchwright.core.errors import EnvironmentFault
from batchwright.launch.directory import RunDirectory
from batchwright.launch.records import RunPlan
from batchwright.launch.status import RunStatus
from batchwright.launch.supervisor import Listener
from batchwright.rundir import names

from . import chain
from . import commands as slurm
from .engine import SlurmEngine, cancel_all
from .jobs import Jobs, rows
from .site import SlurmRun, read_site, remember
from .supervise import SlurmSupervisor

STOP_SECONDS = 60.0  # beyond the grace that the ranks have


def detach(directory: RunDirectory, plan: RunPlan) -> list[str]:
    """Begin a chain, or go on with one, and leave: the jobs that are in the queue now. One that runs is left alone."""
    _refuse_running(directory)
    run = remember(directory, read_site(plan.options.slurm), detached=True)
    return chain.begin(directory, plan, run)


def supervise(directory: RunDirectory, plan: RunPlan, listener: Listener) -> str:
    """Bring a run to its end from here; a chain of it that waits is taken back, one that runs is refused."""
    _refuse_running(directory)
    chained = is_chain(directory)
    # First: what starts meanwhile is to see it.
    run = remember(directory, read_site(plan.options.slurm), detached=False)
    if chained:
        cancel_all(directory, run.token)
    return SlurmSupervisor(directory, plan, SlurmEngine(), listener).run()


def _refuse_running(directory: RunDirectory) -> None:
    known = SlurmRun.load(directory)
    running = [one.job for one in _living(known.token) or () if one.state != "PENDING"] if known.detached else []
    if running:
        raise EnvironmentFault(
            f"{directory.path} is a chain, and job {running[0]} of it runs. Follow it with batchwright run --status "
            "DIR, or end it with batchwright run --stop DIR and then resume.",
            field="dir",
            given=str(directory.path),
        )


def stop(directory: RunDirectory, plan: RunPlan, now: bool) -> None:
    """End a run whose jobs look after themselves, or have lost their supervisor; wait until the last has gone."""
    run = SlurmRun.load(directory)
    chain.stop(directory, now=now)
    if now:
        cancel_all(directory, run.token)
    patience = max(plan.options.grace_seconds, run.site.signal_seconds) + STOP_SECONDS
    deadline = time.monotonic() + patience
    while (left := _living(run.token)) is None or left:
        if time.monotonic() > deadline:
            who = (
                f"job {left[0].job} of {directory.path}" if left else "Slurm's controller does not answer, and the run"
            )
            raise EnvironmentFault(
                f"{who} did not end within {patience:.0f} s. Try --stop … --now.",
                field="stop",
                given=str(directory.path),
            )
        time.sleep(0.5)


def is_chain(directory: RunDirectory) -> bool:
    """Whether a run looks after itself."""
    return SlurmRun.path(directory).exists() and SlurmRun.load(directory).detached


def seen(directory: RunDirectory, plan: RunPlan, now: RunStatus) -> tuple[RunStatus, Jobs]:
    """A run's status with its jobs: one that has a job in the queue runs, though nobody holds its lock."""
    if now.state == "stopped" and not (directory.path / names.OUTCOME).exists() and SlurmRun.path(directory).exists():
        try:
            run = SlurmRun.load(directory)
        except EnvironmentFault as error:
            return replace(now, reason=str(error)), Jobs(rows(directory, plan))
        living = _living(run.token)
        if living is None:
            now = replace(now, reason="squeue does not answer here: whether a job of it is there is not known")
        elif living:
            now = replace(now, state="running", reason=_waits(living, run.detached))
        elif run.detached:
            now = replace(now, reason="no job of its chain is in the queue: go on with --resume … --detach")
    return now, Jobs(rows(directory, plan))


def _waits(living: list[slurm.Queued], chained: bool) -> str | None:
    """What a run whose jobs these are waits for, a person perhaps."""
    waiting = [one for one in living if one.state == "PENDING"]
    reason = f"job {waiting[0].job} waits ({waiting[0].reason})" if len(waiting) == len(living) else None
    first = [one for one in living if "after" not in one.dependency]
    if first and all(one.stuck for one in first):
        reason = f"Slurm holds job {first[0].job} ({first[0].reason}): go on with --resume …{' --detach' * chained}"
    if not chained:
        lost = f"job {living[0].job} has lost its supervisor: --resume sees it out"
        reason = f"{lost}; {reason}" if reason else lost
    return reason


def _living(token: str) -> list[slurm.Queued] | None:
    """The run's jobs that run or wait; None where Slurm does not say."""
    try:
        return [one for one in slurm.jobs(token) if one.alive]
    except slurm.Unreachable:
        return None
