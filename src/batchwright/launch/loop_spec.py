"""The one file that knows our training loop's files: what it is told, where it writes, and how far that says it is."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from batchwright.core import codec
from batchwright.core.nodes.policies import Launch, Stage
from batchwright.rundir import names
from batchwright.rundir.checkpoint import positions

from .directory import RunDirectory
from .records import Manifest, Progress, RunPlan

MODULE = "batchwright.runtime.loop"
SAVES = 20  # in a whole run, where nobody says otherwise; boundaries come on top


def spec(directory: RunDirectory, plan: RunPlan, launch: Launch, number: int, end: int) -> dict[str, Any]:
    """What the loop is told of one launch: `runtime.settings.Spec`."""
    options = plan.options
    settings: dict[str, Any] = {
        "checkpoint_every": options.checkpoint_samples or max(1, plan.total_samples // SAVES),
        "keep": options.keep,
        "strategy": options.strategy,
        "seed": options.seed,
        **options.settings,
        "directory": str(directory.path),
        "micro_batch_size": [stage.micro_batch_size for stage in plan.stages],
        "allow_ragged": any(_cut(stage) for stage in plan.stages),
        "launch": number,
        "end_sample": end,
    }
    schedule = codec.encode(plan.schedule)
    return {
        "schema": codec.SCHEMA,
        "task": plan.target,
        "args": dict(plan.arguments),
        "schedule": schedule,
        "settings": settings,
    }


def _cut(stage: Stage) -> bool:
    """Ragged because it was asked for, or because the budget ends inside its last step."""
    if stage.ragged or stage.steps is None or stage.end_sample is None:
        return stage.ragged
    return stage.end_sample - stage.start_sample != stage.steps * stage.global_batch_size


def position(directory: RunDirectory, *, verify: bool = False) -> int:
    """The position of the newest checkpoint whose files are all there, and, to verify, unchanged; 0 without one."""
    return next(positions(directory.path / names.CHECKPOINTS, verify=verify), 0)


class Follower:
    """Reads the loop's events of one launch as they are written: launch, step, save and stop, with their times."""

    def __init__(self, directory: RunDirectory, manifest: Manifest) -> None:
        self.number = manifest.number
        self._path = directory.path / names.EVENTS / names.events(manifest.number)
        self._progress = Progress(manifest.start_sample)
        self._offset, self._rest = 0, b""

    def read(self) -> Progress:
        """What has been written since the last call, added to what was known."""
        try:
            with open(self._path, "rb") as file:
                file.seek(self._offset)
                chunk = file.read()
        except OSError:
            return self._progress
        self._offset += len(chunk)
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            try:
                event = json.loads(line)
                self._progress = _after(self._progress, event, float(event["time"]))
            except (ValueError, KeyError, TypeError):  # somebody else's line
                continue
        return self._progress


def _after(known: Progress, event: dict[str, Any], when: float) -> Progress:
    kind = event["kind"]
    if kind == "launch":
        return replace(
            known, position=int(event["samples"]), changed=when, loaded=when, load_seconds=event["load_seconds"]
        )
    if kind == "step":
        return replace(
            known,
            position=int(event["samples"]),
            changed=when,
            first_step=known.first_step or when,
            last_step=when,
            loss=event["loss"] if isinstance(event.get("loss"), float) else None,
            tokens_per_second=event.get("tokens_per_second"),
            samples_per_second=event.get("samples_per_second"),
        )
    if kind == "save":
        return replace(known, changed=when, saved=when, saved_position=int(event["samples"]))
    return replace(known, changed=when)
