"""The state of a run, read from its files alone: from anywhere, with or without a supervisor; and its tables."""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, cast

from batchwright.core import codec
from batchwright.core.errors import EnvironmentFault
from batchwright.core.numbers import human
from batchwright.report.notebook import Shown
from batchwright.rundir import names
from batchwright.rundir.files import find_object

from .directory import RunDirectory, write_json
from .records import COMMAND, TASK, RunPlan
from .show import duration
from .work import Work, work

LAUNCH_HEAD = ("launch", "stage", "nodes", "ranks", "from sample", "to sample", "time", "outcome")
BOUNDARY_HEAD = ("at sample", "save", "stop", "start", "load", "lost")


@dataclass(frozen=True)
class RunStatus(Shown):
    """A run as `--status` shows it; `stage` and `launch` count from 0. `chart()` reads the files of the run."""

    kind = "run"

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
    nonfinite_steps: int
    supervisor: int | None
    reason: str | None
    boundaries: tuple[Mapping[str, Any], ...]
    starts_list: tuple[Mapping[str, Any], ...]
    directory: str

    def document(self) -> Mapping[str, Any]:
        """The record of the run, which has all its steps."""
        from .history import history

        return history(RunDirectory(self.directory), now=self)

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
        consumed = max(saved, doing.reached(manifest))
    left = find_object(directory.path / names.OUTCOME) or {}
    loop = (find_object(directory.path / names.STATUS) if plan.kind == TASK else None) or {}
    reason = None
    if supervisor is not None:
        state = "running"
    elif saved >= plan.total_samples:
        state = "complete"
    else:
        state = "failed" if left.get("state") == "failed" else "stopped"
        found: Any = left.get("failure")
        failure = cast("dict[str, Any]", found) if isinstance(found, dict) else {}
        known = " ".join(part for key in ("reason", "advice") if isinstance(part := failure.get(key), str) and part)
        reason = known or (None if left else "its supervisor is gone" if numbers else "it was not started")
    starts = [_start(directory, plan, number) for number in numbers]
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
        nonfinite_steps=count if isinstance(count := loop.get("nonfinite_steps"), int) else 0,
        supervisor=supervisor,
        reason=reason,
        boundaries=tuple(e for e in directory.events() if e.get("kind") == "boundary" and _is_boundary(e)),
        starts_list=tuple(starts),
        directory=str(directory.path),
    )


def _saved(directory: RunDirectory, plan: RunPlan, doing: Work) -> int:
    """The position of the newest checkpoint. No position command is run: the endings have what it last printed."""
    if plan.kind != COMMAND or not plan.position_command:
        return doing.position()
    for number in reversed(directory.numbers()):
        ending, manifest = directory.ending(number), directory.manifest(number)
        if ending is not None:
            return ending.position
        if manifest is not None:
            return manifest.start_sample
    return 0


def _start(directory: RunDirectory, plan: RunPlan, number: int) -> dict[str, Any]:
    """One start of the history: what was started, and how it ended. `launch` is the index in the plan."""
    manifest, ending = directory.manifest(number), directory.ending(number)
    record: dict[str, Any] = {"number": number, "launch": None, "stage": None, "started": None}
    record |= {key: getattr(manifest, key, None) for key in ("launch", "nodes", "ranks", "start_sample")}
    if manifest is not None:
        record["stage"] = plan.stage_at(manifest.start_sample).index
        record["started"] = manifest.started
    failure = ending.failure if ending is not None else None
    return record | {
        "outcome": ending.outcome if ending is not None else None,
        "position": ending.position if ending is not None else None,
        "reason": failure.reason if failure is not None else None,
        "seconds": round(ending.ended - manifest.started, 3) if ending is not None and manifest is not None else None,
        "loading": _loading(directory, number) if plan.kind == TASK else None,
    }


_LOADING_NUMBERS = ("readers", "rows_read", "rows_trained", "read_amplification", "wait_seconds")


def _loading(directory: RunDirectory, number: int) -> dict[str, Any] | None:
    """What the loop counted of its reads, once the launch has stopped; None if it is not known, or damaged."""
    found: Any = (find_object(directory.path / names.status(number)) or {}).get("loading")
    if not isinstance(found, dict):
        return None
    record = {key: cast("dict[str, Any]", found).get(key) for key in ("hosts", "loading_hosts", *_LOADING_NUMBERS)}
    numbers = [record[key] for key in _LOADING_NUMBERS]
    numbers += [value for key in ("hosts", "loading_hosts") if (value := record[key]) is not None]
    known = all(isinstance(value, (int, float)) and math.isfinite(value) for value in numbers)
    return record if known else None


def stop(directory: RunDirectory, plan: RunPlan, now: bool = False) -> None:
    """Ask the supervisor to save a checkpoint (unless `now`) and to end; wait until it has ended."""
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


def headline(plan: RunPlan, now: RunStatus) -> str:
    """State and position in one line."""
    stage = plan.stages[now.stage]
    share = now.consumed_samples / max(1, now.total_samples)
    return (
        f"{now.state}: {human(now.consumed_samples)} of {human(now.total_samples)} samples ({share:.0%}), step "
        f"{now.step:,} of {now.total_steps:,}, stage {now.stage + 1} of {now.stages}, global batch "
        f"{stage.global_batch_size}, {now.restarts} restart{'s' * (now.restarts != 1)}"
        + f", loss not finite in {now.nonfinite_steps:,} step{'s' * (now.nonfinite_steps != 1)}"
        * bool(now.nonfinite_steps)
    )


def launch_rows(now: RunStatus, most: int = 16) -> list[tuple[str, ...]]:
    """One row per start, at most the last `most`."""
    rows: list[tuple[str, ...]] = []
    for start in now.starts_list[-most:]:
        position, seconds, stage = start["position"], start["seconds"], start["stage"]
        rows.append(
            (
                str(start["number"]),
                "-" if stage is None else str(stage + 1),
                *("-" if start[key] is None else str(start[key]) for key in ("nodes", "ranks")),
                "-" if start["start_sample"] is None else f"{start['start_sample']:,}",
                "-" if position is None else f"{position:,}",
                "-" if seconds is None else f"{seconds:.1f} s",
                (start["outcome"] or ("running" if now.state == "running" else "unknown"))
                + (f": {start['reason']}" if start["reason"] else ""),
            )
        )
    return rows


def boundary_rows(boundaries: Collection[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """What each change of launch cost, part by part."""
    return [(f"{b['position']:,}", *(f"{b[key]:.1f} s" for key in _BOUNDARY_SECONDS)) for b in boundaries]


_BOUNDARY_SECONDS = ("save_seconds", "stop_seconds", "start_seconds", "load_seconds", "lost_seconds")


def _is_boundary(event: Mapping[str, Any]) -> bool:
    """Whether every number is there: a damaged line is left out."""
    return all(isinstance(event.get(key), (int, float)) for key in ("position", *_BOUNDARY_SECONDS))


def next_steps(plan: RunPlan, now: RunStatus, ledger: Mapping[str, Any], verbs: Collection[str]) -> list[str]:
    """Commands to try next, of the verbs that are installed."""
    place = shlex.quote(now.directory)
    found: list[str] = []
    if now.state == "running":
        found.append(f"save and stop it: batchwright run --stop {place}")
    elif now.state != "complete":
        found.append(f"continue: batchwright run --resume {place}")
    lost = sum(b["lost_seconds"] for b in now.boundaries)
    spent = sum(start["seconds"] or 0.0 for start in now.starts_list)
    if now.boundaries and spent and lost / spent > 0.1:
        count = "1 boundary" if len(now.boundaries) == 1 else f"{len(now.boundaries)} boundaries"
        found.append(
            f"{count} cost {duration(lost)} of {duration(spent)}: fewer stages, or "
            "--node-policy constant, would save most of it (batchwright ramp compares)"
        )
    if ledger.get("ok") is False and "check" in verbs:
        found.append(f"see what is missing in the ledger: batchwright check --ledger {place}")
    if ledger.get("ok") and now.state == "complete" and "check" in verbs:
        found.append(f"check the id of every sample, too: batchwright check --ledger {place}")
    if now.state == "complete" and "report" in verbs:
        found.append(f"read its report: batchwright report {place}")
    if now.state == "complete" and plan.kind == "task" and "probe" in verbs:
        found.append(f"find the fastest micro batch: batchwright probe {shlex.quote(plan.target)}")
    return found
