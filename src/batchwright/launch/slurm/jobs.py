"""The chain as a table: launch, job, state, nodes, samples, waiting time, node-hours against the plan.

All of it from the run's own files; squeue is asked once, for what has not yet begun, and may stay silent.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from batchwright.core import codec
from batchwright.core.nodes.policies import Launch
from batchwright.launch.directory import RunDirectory
from batchwright.launch.records import Manifest, RunPlan
from batchwright.launch.show import duration
from batchwright.rundir.files import find_json

from . import commands as slurm
from .claim import BEAT_SECONDS
from .site import SlurmRun

HEAD = ("launch", "job", "state", "nodes", "from sample", "to sample", "waited", "node-hours", "planned")


@dataclass(frozen=True)
class Row:
    """One job of a chain, or a launch that is still to come; `launch` counts from 0, times are seconds."""

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
            str(self.launch + 1), self.job or "-", self.state, str(self.nodes), f"{self.start_sample:,}",
            "-" if self.end_sample is None else f"{self.end_sample:,}",
            "-" if self.waited_seconds is None else duration(self.waited_seconds),
            "-" if self.node_hours is None else f"{self.node_hours:.3g}",
            "-" if self.planned_node_hours is None else f"{self.planned_node_hours:.3g}",
        )  # fmt: skip


def rows(directory: RunDirectory, plan: RunPlan) -> list[Row]:
    """Every start so far, then what waits or is still to come."""
    queue = _queue(directory)
    submitted = {str(e["job"]): float(e["time"]) for e in directory.events() if e.get("kind") == "submitted"}
    manifests = [m for number in directory.numbers() if (m := directory.manifest(number)) is not None]
    begun, before = list[Row](), 0.0
    for manifest in manifests:
        row, before = _begun(directory, plan, manifest, queue, submitted, before)
        begun.append(row)
    known = {row.job for row in begun}
    waiting: dict[int, slurm.Queued] = {}
    for one in queue.values():
        role, index = slurm.role_of(one.comment)
        if one.alive and one.job not in known and role in ("link", "spare"):
            waiting.setdefault(index, one)
    position = max((row.end_sample or row.start_sample for row in begun), default=0)
    running = {row.launch for row in begun if row.end_sample is None}
    coming = [
        launch
        for launch in plan.launches
        if (launch.end_sample is None or launch.end_sample > position) and launch.index not in running
    ]
    return [*begun, *(_coming(plan, launch, position, waiting.get(launch.index), submitted) for launch in coming)]


def _begun(
    directory: RunDirectory, plan: RunPlan, manifest: Manifest, queue: Mapping[str, slurm.Queued],
    submitted: Mapping[str, float], before: float,
) -> tuple[Row, float]:  # fmt: skip
    """One start, and when it was over. An successor waits from the end of the one `before` it: till then nobody needed it."""
    handle, ending = manifest.handle or {}, directory.ending(manifest.number)
    job = None if handle.get("job") is None else str(handle["job"])
    path = directory.launch(manifest.number) / "job.json"
    record = find_json(path) or {}
    since = record.get("started")
    until = record.get("ended") or (ending.ended if ending else time.time())
    if since is not None and not record.get("ended") and ending is not None:
        # It left no word, and was found hours later, perhaps: it lived as long as it touched its record.
        until = min(until, path.stat().st_mtime + BEAT_SECONDS)
    asked = handle.get("submitted") or submitted.get(job or "")
    if ending is not None:
        state = ending.outcome
    else:
        state = queue[job].state.lower() if job is not None and job in queue else "gone" if queue else "unknown"
    row = Row(
        manifest.launch, job, state, manifest.nodes, manifest.start_sample, ending.position if ending else None,
        waited_seconds=None if asked is None else max(0.0, (since or until) - max(asked, before)),
        node_hours=None if since is None else (record.get("nodes") or manifest.nodes) * (until - since) / 3600,
        planned_node_hours=_planned(plan, manifest.start_sample, manifest.end_sample),
    )  # fmt: skip
    return row, until


def _coming(
    plan: RunPlan, launch: Launch, position: int, job: slurm.Queued | None, submitted: Mapping[str, float]
) -> Row:
    start, asked = max(position, launch.start_sample), submitted.get(job.job) if job else None
    return Row(
        launch.index, job.job if job else None, f"{job.state.lower()} ({job.reason})" if job else "to come",
        job.nodes if job else launch.nodes, start, launch.end_sample,
        waited_seconds=None if asked is None else time.time() - asked,
        node_hours=None,
        planned_node_hours=_planned(plan, start, launch.end_sample),
    )  # fmt: skip


def _queue(directory: RunDirectory) -> dict[str, slurm.Queued]:
    try:
        return {one.job: one for one in slurm.jobs(SlurmRun.load(directory).token)}
    except slurm.Unreachable:
        return {}


def _planned(plan: RunPlan, start: int, end: int | None) -> float | None:
    """Node-hours that the plan has for a span of samples, where it knows how long a step takes."""
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


@dataclass(frozen=True)
class Jobs:
    """A chain's table."""

    rows: Sequence[Row]
    head = HEAD

    def cells(self) -> list[tuple[str, ...]]:
        """As text."""
        return [row.cells() for row in self.rows]

    def to_json(self, plan: RunPlan) -> dict[str, Any]:
        """The `chain` of `run --status DIR --json`: the jobs, node-hours used and planned, and all the waiting."""
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
