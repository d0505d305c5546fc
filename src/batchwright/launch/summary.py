"""A run told in a few lines: its launches, what the boundaries cost, and what to try next."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping
from typing import Any

from batchwright.core import codec
from batchwright.core.numbers import human

from .directory import RunDirectory
from .engine import engine
from .eta import duration
from .records import RunPlan
from .status import RunStatus
from .work import work

LAUNCH_HEAD = ("start", "launch", "nodes", "ranks", "from sample", "to sample", "time", "outcome")
BOUNDARY_HEAD = ("at sample", "save", "stop", "start", "load", "lost")


def headline(plan: RunPlan, now: RunStatus) -> str:
    """State and place in one line."""
    stage = plan.stages[now.stage]
    share = now.consumed_samples / max(1, now.total_samples)
    return (
        f"{now.state}: {human(now.consumed_samples)} of {human(now.total_samples)} samples ({share:.0%}), step "
        f"{now.step:,} of {now.total_steps:,}, stage {now.stage + 1} of {now.stages}, global batch "
        f"{stage.global_batch_size}, {now.restarts} restart{'s' * (now.restarts != 1)}"
    )


def launch_rows(now: RunStatus, most: int = 16) -> list[tuple[str, ...]]:
    """One row per start, the last ones when there are many."""
    rows: list[tuple[str, ...]] = []
    for start in now.starts_list[-most:]:
        position, seconds, launch = start["position"], start["seconds"], start["launch"]
        rows.append(
            (
                str(start["number"]),
                "-" if launch is None else str(launch + 1),
                *("-" if start[key] is None else str(start[key]) for key in ("nodes", "ranks")),
                "-" if start["start_sample"] is None else f"{start['start_sample']:,}",
                "-" if position is None else f"{position:,}",
                "-" if seconds is None else f"{seconds:.1f} s",
                (start["outcome"] or ("running" if now.state == "running" else "left alone"))
                + (f": {start['reason']}" if start["reason"] else ""),
            )
        )
    return rows


def boundary_rows(boundaries: Collection[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """What each change of launch cost, in seconds, by its parts."""
    keys = ("save_seconds", "stop_seconds", "start_seconds", "load_seconds", "lost_seconds")
    return [(f"{b['position']:,}", *(f"{b[key]:.1f} s" for key in keys)) for b in boundaries]


def next_steps(plan: RunPlan, now: RunStatus, ledger: Mapping[str, Any], verbs: Collection[str]) -> list[str]:
    """What to try next, of the verbs that are there."""
    place = shlex.quote(now.directory)
    found: list[str] = []
    if now.state == "running":
        found.append(f"save and end it: batchwright run --stop {place}")
    elif now.state != "complete":
        found.append(f"go on: batchwright run --resume {place}")
    lost = sum(b["lost_seconds"] for b in now.boundaries)
    spent = sum(start["seconds"] or 0.0 for start in now.starts_list)
    if now.boundaries and spent and lost / spent > 0.1:
        count = "1 boundary" if len(now.boundaries) == 1 else f"{len(now.boundaries)} boundaries"
        found.append(
            f"{count} cost {duration(lost)} of {duration(spent)}: fewer stages, or "
            "--node-policy constant, would save most of it (batchwright ramp compares)"
        )
    if ledger.get("ok") is False and "check" in verbs:
        found.append(f"see what the ledger misses: batchwright check --ledger {place}")
    if now.state == "complete" and "report" in verbs:
        found.append(f"read how it went: batchwright report {place}")
    if now.state == "complete" and plan.kind == "task" and "probe" in verbs:
        found.append(f"find the fastest micro batch: batchwright probe {shlex.quote(plan.target)}")
    return found


def dry_run(directory: RunDirectory, plan: RunPlan) -> list[dict[str, Any]]:
    """Every launch as it would be started from its first sample; nothing is written."""
    doing, chosen = work(directory, plan), engine(plan.options.engine)
    records: list[dict[str, Any]] = []
    for launch in plan.launches:
        job = doing.job(launch, launch.index + 1, launch.start_sample)
        records.append(
            {
                **codec.encode(launch),
                "ranks": plan.ranks(launch),
                "command": list(chosen.command(job)),
                "environment": dict(job.environment),
                "working_directory": str(job.working_directory),
            }
        )
    return records
