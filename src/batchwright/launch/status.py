"""Where a run is, from its files alone: anybody may look, from anywhere, whether a supervisor is there or not."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from batchwright.core import codec
from batchwright.core.errors import EnvironmentFault
from batchwright.rundir import names
from batchwright.rundir.files import find_json

from .directory import RunDirectory, write_json
from .records import COMMAND, RunPlan
from .work import work


@dataclass(frozen=True)
class RunStatus:
    """A run as `--status` shows it; `stage` and `launch` count from 0."""

    state: str  # running | complete | failed | stopped
    stage: int
    stages: int
    consumed_samples: int
    total_samples: int
    step: int
    total_steps: int
    restarts: int
    launch: int
    launches: int
    starts: int
    saved_samples: int
    supervisor: int | None
    reason: str | None
    boundaries: tuple[Mapping[str, Any], ...]
    starts_list: tuple[Mapping[str, Any], ...]
    directory: str

    def to_json(self, ledger: Mapping[str, Any] | None) -> dict[str, Any]:
        """The document of `run --json` and `run --status DIR --json`."""
        document = codec.encode(self)
        lost = sum(b["lost_seconds"] for b in self.boundaries)
        history = document.pop("starts_list")
        return {
            "schema": codec.SCHEMA,
            **document,
            "lost_seconds": round(lost, 3) if self.boundaries else None,
            "history": history,
            "ledger": dict(ledger or {"ok": None, "gaps": None, "repeats": None}),
        }


def status(directory: RunDirectory, plan: RunPlan | None = None) -> RunStatus:
    """The state of a run. A run without a supervisor that is neither complete nor failed is stopped."""
    plan = plan or directory.plan()
    supervisor = directory.supervisor()
    doing = work(directory, plan)
    numbers = directory.numbers()
    saved = _saved(directory, plan, doing)
    consumed = saved
    if supervisor is not None and numbers and (manifest := directory.manifest(numbers[-1])) is not None:
        consumed = max(saved, doing.progress(manifest).position)
    left = find_json(directory.path / names.OUTCOME) or {}
    reason = None
    if supervisor is not None:
        state = "running"
    elif saved >= plan.total_samples:
        state = "complete"
    else:
        state = "failed" if left.get("state") == "failed" else "stopped"
        failure = left.get("failure") or {}
        told = " ".join(part for part in (failure.get("reason"), failure.get("advice")) if part)
        reason = told or (None if left else "its supervisor is gone" if numbers else "it was not begun")
    starts = [_start(directory, number) for number in numbers]
    indices = {start["launch"] for start in starts}
    last = plan.launches[-1] if saved >= plan.total_samples else plan.launch_at(min(consumed, plan.total_samples - 1))
    return RunStatus(
        state=state,
        stage=plan.stage_at(consumed).index,
        stages=len(plan.stages),
        consumed_samples=consumed,
        total_samples=plan.total_samples,
        step=plan.step_at(consumed),
        total_steps=plan.schedule.total_steps or 0,
        restarts=len(starts) - len(indices),
        launch=last.index,
        launches=len(plan.launches),
        starts=len(starts),
        saved_samples=saved,
        supervisor=supervisor,
        reason=reason,
        boundaries=tuple(e for e in directory.events() if e.get("kind") == "boundary"),
        starts_list=tuple(starts),
        directory=str(directory.path),
    )


def _saved(directory: RunDirectory, plan: RunPlan, doing: Any) -> int:
    """Where the newest checkpoint is. Looking never runs a command: what a supervisor last heard is in the endings."""
    if plan.kind != COMMAND or not plan.position_command:
        return doing.position()
    for number in reversed(directory.numbers()):
        ending, manifest = directory.ending(number), directory.manifest(number)
        if ending is not None:
            return ending.position
        if manifest is not None:
            return manifest.start_sample
    return 0


def _start(directory: RunDirectory, number: int) -> dict[str, Any]:
    """One line of the history: what was started, and how it ended."""
    manifest, ending = directory.manifest(number), directory.ending(number)
    record: dict[str, Any] = {"number": number, "launch": None, "nodes": None, "ranks": None, "start_sample": None}
    if manifest is not None:
        record |= {key: getattr(manifest, key) for key in ("launch", "nodes", "ranks", "start_sample")}
    failure = ending.failure if ending is not None else None
    return record | {
        "outcome": ending.outcome if ending is not None else None,
        "position": ending.position if ending is not None else None,
        "reason": failure.reason if failure is not None else None,
        "seconds": round(ending.ended - manifest.started, 3) if ending is not None and manifest is not None else None,
    }


def stop(directory: RunDirectory, plan: RunPlan, now: bool = False) -> None:
    """Ask the supervisor to end, with a checkpoint unless it is to be now, and wait until it has."""
    write_json(directory.path / names.STOP, {"now": now})
    patience = plan.options.grace_seconds + 60
    deadline = time.monotonic() + patience
    while (supervisor := directory.supervisor()) is not None:
        if time.monotonic() > deadline:
            raise EnvironmentFault(
                f"the supervisor of {directory.path} (process {supervisor}) did not end within {patience:.0f} s. Try --stop "
                "… --now.",
                field="stop",
                given=str(directory.path),
            )
        time.sleep(0.2)
