"""What a run did, as one document for charts and reports: its state, its plan, every step, its failures and versions.

Everything is read from the files of the run. What cannot be read is left out, and `skipped` says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from batchwright.core import codec
from batchwright.core.ramp.request import RampRequest
from batchwright.rundir import names
from batchwright.rundir.checkpoint import STATE, listing
from batchwright.rundir.events import RunEvents, read_columns
from batchwright.rundir.files import find_object

from .directory import RunDirectory
from .records import RunPlan
from .status import RunStatus, headline, status


def history(
    directory: RunDirectory,
    plan: RunPlan | None = None,
    now: RunStatus | None = None,
    ledger: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The document of a run: that of `run --status --json`, and beside it its plan, steps, failures and versions.

    `steps` has columns (`rundir.events.COLUMNS`) of the steps that led to its newest state.
    """
    plan = plan or directory.plan()
    now = now or status(directory, plan)
    events = read_columns(directory.path)
    document = now.to_json(ledger)
    _complete(document["history"], events)
    return document | {
        "name": directory.path.name,
        "headline": headline(plan, now),
        "plan": _plan(plan),
        "steps": events.steps,
        "evaluations": [e for e in events.others if e["kind"] == "evaluation"],
        "failures": _failures(directory),
        "replanned": [e for e in directory.events() if e.get("kind") == "replanned"],
        "skipped": events.skipped,
        "device": _last(events, "device"),
        "strategy": _last(events, "strategy"),
        "parameters": _last(events, "parameters"),
        "versions": _versions(directory),
    }


def _plan(plan: RunPlan) -> dict[str, Any]:
    """What was planned, and where each number of it comes from."""
    batch, ramp = plan.batch, plan.ramp
    given = {} if batch is None else {name: getattr(batch, name, None) for name in sorted(batch.given)}
    usual = vars(RampRequest())
    asked = {} if ramp is None else {name: value for name, value in vars(ramp).items() if value != usual[name]}
    asked.pop("probe", None)
    return {
        "stages": codec.encode(plan.stages),
        "launches": codec.encode(plan.launches),
        "total_samples": plan.total_samples,
        "devices_per_node": plan.devices_per_node,
        "kind": plan.kind,
        "target": plan.target,
        "command": list(plan.command),
        "engine": plan.options.engine,
        "seed": plan.options.seed,
        "given": codec.encode(given | asked),
        "origins": {} if batch is None else dict(batch.origins),
        "notes": list(plan.notes),
    }


def _complete(starts: list[dict[str, Any]], events: RunEvents) -> None:
    """Fill in how far a launch without an ending was, by its last event: it runs, or nobody recorded its end."""
    for start in starts:
        if start["outcome"] is not None or start.get("started") is None:
            continue
        launches, samples, times = (events.steps[name] for name in ("launch", "samples", "time"))
        at = next((i for i in range(len(launches) - 1, -1, -1) if launches[i] == start["number"]), None)
        if at is not None and times[at] > start["started"]:
            start["position"] = int(samples[at])
            start["seconds"] = round(times[at] - start["started"], 3)


def _failures(directory: RunDirectory) -> list[dict[str, Any]]:
    """Every launch that failed, with its reason and the last lines of its log."""
    found: list[dict[str, Any]] = []
    for launch in directory.numbers():
        ending = directory.ending(launch)
        if ending is not None and ending.failure is not None:
            found.append({"number": launch, "position": ending.position, **codec.encode(ending.failure)})
    return found


def _last(events: RunEvents, name: str) -> Any:
    """What the newest launch says about itself."""
    known = [e[name] for e in events.others if e["kind"] == "launch" and isinstance(e.get(name), (str, int))]
    return known[-1] if known else None


def _versions(directory: RunDirectory) -> dict[str, str]:
    """The versions that the newest checkpoint names."""
    folder = directory.path / names.CHECKPOINTS
    for name, _, _ in listing(folder):
        found: Any = (find_object(folder / name / STATE) or {}).get("fingerprint")
        versions: Any = cast("dict[str, Any]", found).get("versions") if isinstance(found, dict) else None
        if isinstance(versions, dict):
            return {str(key): str(value) for key, value in cast("dict[Any, Any]", versions).items()}
    return {}
