"""What the command line needs of Slurm: start or continue a run, stop it, show its jobs, try it without submitting."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from batchwright.core import codec
from batchwright.core.errors import EnvironmentFault
from batchwright.core.nodes.policies import Launch
from batchwright.launch.directory import RunDirectory, write_json
from batchwright.launch.records import Manifest, RunPlan
from batchwright.launch.show import duration
from batchwright.launch.status import RunStatus
from batchwright.launch.supervisor import Listener
from batchwright.launch.work import dry_run as local_dry_run
from batchwright.launch.work import work
from batchwright.rundir import names

from . import chain
from . import commands as slurm
from .claim import HEARTBEAT_SECONDS, job_record
from .engine import SlurmSupervisor, cancel_all
from .script import chain_script, ranks_command, script_path, write_script
from .site import SlurmRun, read_site, remember

STOP_SECONDS = 60.0  # in addition to the ranks' grace_seconds
HEAD = ("launch", "job", "state", "nodes", "from sample", "to sample", "waited", "node-hours", "planned")


def detach(directory: RunDirectory, plan: RunPlan) -> list[str]:
    """Start or continue a chain: the jobs that are in the queue now. Refused while a job of it runs."""
    refuse_running(directory)
    run = remember(directory, read_site(plan.options.slurm), detached=True)
    return chain.begin(directory, plan, run)


def supervise(directory: RunDirectory, plan: RunPlan, listener: Listener) -> str:
    """Run to the end from here. The waiting jobs of a chain are cancelled; refused while a job of it runs."""
    refuse_running(directory)
    chained = is_chain(directory)
    # Before the cancelling: a job that starts meanwhile sees it.
    run = remember(directory, read_site(plan.options.slurm), detached=False)
    if chained:
        cancel_all(directory, run.token)
    return SlurmSupervisor(directory, plan, listener).run()


def refuse_running(directory: RunDirectory) -> None:
    """An error if a job of a chain runs."""
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
    """Stop a chain, or a run whose supervisor is gone: cancel jobs that wait, and wait until a job that runs has saved."""
    run = SlurmRun.load(directory)
    write_json(directory.path / names.STOP, {"now": now})
    try:
        waiting = [one.job for one in slurm.jobs(run.token) if one.state == "PENDING"]
    except slurm.Unreachable as error:
        raise EnvironmentFault(
            f"Slurm does not answer here ({error}), so no job was cancelled. A job of {directory.path} that runs, or that "
            "starts later, sees the request and stops by itself.",
            field="stop",
            given=str(directory.path),
        ) from None
    for job in waiting:
        slurm.cancel(job)
    if now:
        cancel_all(directory, run.token)
    patience = max(plan.options.grace_seconds, run.site.signal_seconds) + STOP_SECONDS
    deadline = time.monotonic() + patience
    while (left := _living(run.token)) is None or left:
        if time.monotonic() > deadline:
            who = f"job {left[0].job} of {directory.path}" if left else "Slurm's controller does not answer; the run"
            raise EnvironmentFault(
                f"{who} did not end within {patience:.0f} s. Try --stop … --now.",
                field="stop",
                given=str(directory.path),
            )
        time.sleep(0.5)


def is_chain(directory: RunDirectory) -> bool:
    """Whether the jobs of a run submit one another."""
    return SlurmRun.path(directory).exists() and SlurmRun.load(directory).detached


def seen(directory: RunDirectory, plan: RunPlan, now: RunStatus) -> tuple[RunStatus, Jobs]:
    """A run's status with its jobs: a run with a job in the queue runs, even if its lock is free."""
    if now.state == "stopped" and not (directory.path / names.OUTCOME).exists() and SlurmRun.path(directory).exists():
        try:
            run = SlurmRun.load(directory)
        except EnvironmentFault as error:
            return replace(now, reason=str(error)), Jobs(rows(directory, plan))
        living = _living(run.token)
        if living is None:
            now = replace(now, reason="squeue does not answer here: whether it has a job in the queue is not known")
        elif living:
            now = replace(now, state="running", reason=_waits(living, run.detached))
        elif run.detached:
            now = replace(now, reason="no job of its chain is in the queue: continue with --resume … --detach")
    return now, Jobs(rows(directory, plan))


def _waits(living: list[slurm.Queued], chained: bool) -> str | None:
    """What the jobs of a run wait for; some wait for a person."""
    waiting = [one for one in living if one.state == "PENDING"]
    reason = f"job {waiting[0].job} waits ({waiting[0].reason})" if len(waiting) == len(living) else None
    first = [one for one in living if not one.waits_for_a_job]
    if first and all(one.stuck for one in first):
        reason = f"Slurm holds job {first[0].job} ({first[0].reason}): continue with --resume …{' --detach' * chained}"
    if not chained:
        lost = f"job {living[0].job} has lost its supervisor: --resume waits until it ends"
        reason = f"{lost}; {reason}" if reason else lost
    return reason


def _living(token: str) -> list[slurm.Queued] | None:
    """The run's jobs that run or wait; None if Slurm does not answer."""
    try:
        return [one for one in slurm.jobs(token) if one.alive]
    except slurm.Unreachable:
        return None


@dataclass(frozen=True)
class Row:
    """One job of a run, or a launch that is still to come; `launch` counts from 0, times are seconds."""

    launch: int
    job: str | None
    state: str
    nodes: int
    start_sample: int
    end_sample: int | None
    waited_seconds: float | None
    node_hours: float | None
    planned_node_hours: float | None

    def cells(self) -> tuple[str, ...]:
        """As text."""
        return (
            str(self.launch + 1),
            self.job or "-",
            self.state,
            str(self.nodes),
            f"{self.start_sample:,}",
            "-" if self.end_sample is None else f"{self.end_sample:,}",
            "-" if self.waited_seconds is None else duration(self.waited_seconds),
            "-" if self.node_hours is None else f"{self.node_hours:.3g}",
            "-" if self.planned_node_hours is None else f"{self.planned_node_hours:.3g}",
        )


@dataclass(frozen=True)
class Jobs:
    """The table of a run's jobs."""

    rows: Sequence[Row]
    head = HEAD

    def cells(self) -> list[tuple[str, ...]]:
        """As text."""
        return [row.cells() for row in self.rows]

    def to_json(self, plan: RunPlan) -> dict[str, Any]:
        """The `chain` of `run --status DIR --json`: the jobs, node-hours used and planned, and the time they waited."""
        return {
            "jobs": codec.encode(list(self.rows)),
            "node_hours": sum(row.node_hours or 0.0 for row in self.rows),
            "planned_node_hours": _planned(plan, 0, None),
            "waited_seconds": sum(row.waited_seconds or 0.0 for row in self.rows),
        }

    def sum(self, plan: RunPlan) -> str:
        """The same in one line."""
        made = self.to_json(plan)
        planned = made["planned_node_hours"]
        against = f" of {planned:.3g} planned" if planned is not None else ""
        return f"{made['node_hours']:.3g} node-hours used{against}, {duration(made['waited_seconds'])} waited"


def rows(directory: RunDirectory, plan: RunPlan) -> list[Row]:
    """Every start so far, from the run's files; then the launches to come, with their jobs if squeue answers."""
    try:
        queue = {one.job: one for one in slurm.jobs(SlurmRun.load(directory).token)}
    except slurm.Unreachable:
        queue = {}
    submitted = {str(e["job"]): float(e["time"]) for e in directory.events() if e.get("kind") == "submitted"}
    manifests = [m for number in directory.numbers() if (m := directory.manifest(number)) is not None]
    begun, before = list[Row](), 0.0
    for manifest in manifests:
        row, before = _begun(directory, plan, manifest, queue, submitted, before)
        begun.append(row)
    known = {row.job for row in begun}
    waiting: dict[int, slurm.Queued] = {}
    # First the job that waits for no other, then its successors.
    for one in sorted(queue.values(), key=lambda one: (one.waits_for_a_job, int(one.job))):
        role, index = slurm.role_of(one.comment)
        if one.alive and one.job not in known and role != "start":
            waiting.setdefault(index, one)
    position = max((row.end_sample or row.start_sample for row in begun), default=plan.start_sample)
    running = {row.launch for row in begun if row.end_sample is None}
    coming = [
        launch
        for launch in plan.launches
        if (launch.end_sample is None or launch.end_sample > position) and launch.index not in running
    ]
    return [*begun, *(_coming(plan, launch, position, waiting.get(launch.index), submitted) for launch in coming)]


def _begun(
    directory: RunDirectory,
    plan: RunPlan,
    manifest: Manifest,
    queue: Mapping[str, slurm.Queued],
    submitted: Mapping[str, float],
    before: float,
) -> tuple[Row, float]:
    """One start, and when it ended. A successor waits from the end of the job `before` it: it was not needed earlier."""
    handle, ending = manifest.handle or {}, directory.ending(manifest.number)
    job = None if handle.get("job") is None else str(handle["job"])
    folder = directory.launch(manifest.number)
    record = job_record(folder)
    since: float | None = record.get("started")
    until: float = record.get("ended") or (ending.ended if ending else time.time())
    if since is not None and not record.get("ended") and ending is not None:
        # It wrote no end, and another job found this perhaps hours later: it lived until its last heartbeat.
        until = min(until, (folder / "job.json").stat().st_mtime + HEARTBEAT_SECONDS)
    asked: float | None = handle.get("submitted") or submitted.get(job or "")
    if ending is not None:
        state = ending.outcome
    else:
        state = queue[job].state.lower() if job is not None and job in queue else "gone" if queue else "unknown"
    nodes: int = record.get("nodes") or manifest.nodes
    row = Row(
        manifest.launch,
        job,
        state,
        manifest.nodes,
        manifest.start_sample,
        ending.position if ending else None,
        waited_seconds=None if asked is None else max(0.0, (since or until) - max(asked, before)),
        node_hours=None if since is None else nodes * (until - since) / 3600,
        planned_node_hours=_planned(plan, manifest.start_sample, manifest.end_sample),
    )
    return row, until


def _coming(
    plan: RunPlan, launch: Launch, position: int, job: slurm.Queued | None, submitted: Mapping[str, float]
) -> Row:
    start, asked = max(position, launch.start_sample), submitted.get(job.job) if job else None
    return Row(
        launch.index,
        job.job if job else None,
        f"{job.state.lower()} ({job.reason})" if job else "to come",
        job.nodes if job else launch.nodes,
        start,
        launch.end_sample,
        waited_seconds=None if asked is None else time.time() - asked,
        node_hours=None,
        planned_node_hours=_planned(plan, start, launch.end_sample),
    )


def _planned(plan: RunPlan, start: int, end: int | None) -> float | None:
    """The plan's node-hours for a span of samples; None if it does not know how long a step takes."""
    total = 0.0
    stop = plan.total_samples if end is None else end
    for stage in plan.stages:
        first, last = stage.start_sample, plan.total_samples if stage.end_sample is None else stage.end_sample
        inside = min(stop, last) - max(start, first)
        if inside > 0:
            if stage.node_hours is None:
                return None
            total += stage.node_hours * inside / (last - first)
    return total


def dry_run(directory: RunDirectory, plan: RunPlan) -> list[dict[str, Any]]:
    """Every launch of a chain as it would start: its script in RUN/dry-run, tried with `sbatch --test-only`."""
    run = SlurmRun(read_site(plan.options.slurm), "dry-run", detached=True)
    records = local_dry_run(directory, plan)
    for launch, record in zip(plan.launches, records, strict=True):
        path = write_script(script_path(directory, launch, "dry-run"), chain_script(directory, plan, run, launch))
        job = work(directory, plan).job(launch, launch.index + 1, launch.start_sample)
        record |= {"command": list(ranks_command(run.site, job)), "script": str(path), **_tried(path)}
    return records


def _tried(path: Path) -> dict[str, Any]:
    """What the cluster answers to a script: `starts_in` seconds, or None with the reason in `test`."""
    if not slurm.installed():
        return {"test": "sbatch is not installed here: not tried", "starts_in": None}
    try:
        when, output = slurm.starts_at(path)
    except slurm.Unreachable as error:
        return {"test": f"not tried: {error}", "starts_in": None}
    return {"test": output, "starts_in": None if when is None else max(0.0, round(when - time.time(), 1))}
