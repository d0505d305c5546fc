"""The one file that knows our training loop's files: what it is told, where it writes, and how far that says it is."""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from batchwright.core import codec
from batchwright.core.nodes.policies import Launch, Stage

from .directory import RunDirectory, read_json
from .records import Manifest, Progress, RunPlan

MODULE = "batchwright.runtime.loop"
SAVES = 20  # in a whole run, where nobody says otherwise; boundaries come on top
_CHECKPOINT = re.compile(r"step-(\d{12})-launch-(\d{5,})")


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
    folder = directory.path / "checkpoints"
    names = os.listdir(folder) if folder.is_dir() else []
    found = [(int(m[2]), int(m[1]), m[0]) for m in map(_CHECKPOINT.fullmatch, names) if m]
    for _, _, name in sorted(found, reverse=True):
        state = _complete(folder / name, verify)
        if state is not None:
            return state
    return 0


def _complete(path: Path, verify: bool) -> int | None:
    """Its position, if every file of the manifest has its size, and its hash where that is to be read, too."""
    manifest, state = read_json(path / "manifest.json"), read_json(path / "state.json")
    try:
        for name, facts in manifest["files"].items():
            if (path / name).stat().st_size != facts["size"] or (verify and _digest(path / name) != facts["sha256"]):
                return None
        return int(state["position"])
    except (OSError, TypeError, KeyError, ValueError):
        pass
    return None


def _digest(path: Path) -> str:
    with open(path, "rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Follower:
    """Reads the loop's events of one launch as they are written: launch, step, save and stop, with their times."""

    def __init__(self, directory: RunDirectory, manifest: Manifest) -> None:
        self.number = manifest.number
        self._path = directory.path / "events" / f"launch-{manifest.number:05d}.jsonl"
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
