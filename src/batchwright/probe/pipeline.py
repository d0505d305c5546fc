"""How many microbatches a pipeline should have, measured: step times and idle shares over the valid numbers at one batch.

    times[m] = A × (1 + idle / (v·m)) × (1 + m·t₀ / tokens)

`idle` is what the schedule predicts. A and t₀, the tokens at which a microbatch runs at half its best speed, are fitted. The
best number is one that was measured.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from batchwright.core.batch.pipeline import RUN_BY_TORCH, PipelineRule
from batchwright.core.codec import SCHEMA, encode
from batchwright.core.errors import PlanError, Violation, raise_violations
from batchwright.core.numbers import divisors
from batchwright.processes.together import run_ranks
from batchwright.report.notebook import Shown
from batchwright.rundir.files import read_json, write_json

TIMES = "batchwright.runtime.pipeline_times"


@dataclass(frozen=True)
class PipelineTrial:
    """One number of microbatches: medians over the rounds."""

    pipeline_microbatches: int
    micro_batch_size: int
    step_seconds: float
    idle_share: float
    predicted_idle_share: float


@dataclass(frozen=True)
class PipelineProbe(Shown):
    """The result of `probe --pipeline-microbatches`."""

    kind = "pipeline"

    schedule: str
    stages: int
    virtual_stages: int
    global_batch_size: int
    tokens: float
    """Of a step: samples × length if the model takes token ids or vectors, else samples."""
    device: str
    trials: tuple[PipelineTrial, ...]
    best_microbatches: int
    planned_microbatches: int
    half_speed_tokens: int | None
    """Fitted; None if the times do not determine it."""
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The result as `--json` prints it, and as `plan --from-probe` reads it."""
        return {"schema": SCHEMA, "kind": "pipeline", **encode(self)}


def probe_pipeline(
    target: str,
    *,
    args: Mapping[str, Any] | None = None,
    microbatches: Sequence[int],
    stages: int,
    global_batch_size: int,
    schedule: str = "1f1b",
    virtual_stages: int = 1,
    rounds: int = 5,
    device: str = "auto",
    timeout: float = 600.0,
) -> PipelineProbe:
    """Run a task in a pipeline of processes on this machine, with each number of microbatches at one global batch."""
    rule = PipelineRule(RUN_BY_TORCH.get(schedule, schedule), stages, virtual_stages)
    counts = sorted(set(microbatches))
    raise_violations(PlanError, _refused(rule, counts, global_batch_size))
    with tempfile.TemporaryDirectory(prefix="batchwright-pipeline-") as folder:
        result = Path(folder, "result.json")
        spec = {
            "target": target,
            "args": dict(args or {}),
            "pipeline": encode(rule),
            "microbatches": counts,
            "global_batch_size": global_batch_size,
            "rounds": rounds,
            "threads": 1,
            "device": device,
            "result": str(result),
        }
        file = Path(folder, "spec.json")
        write_json(file, spec, sync=False)
        run_ranks(TIMES, file, stages, timeout=timeout, field="task")
        found = read_json(result)
    trials = tuple(_trial(rule, count, global_batch_size, found["times"][str(count)]) for count in counts)
    tokens = int(found["tokens"])
    fitted = rule.fit_half_speed({t.pipeline_microbatches: t.step_seconds for t in trials}, tokens)
    notes: list[str] = []
    if fitted is None:
        notes.append(
            "The times do not determine how a microbatch loses speed as it becomes smaller: plan keeps its assumption."
        )
    planned = rule.best(counts, tokens)
    assert planned is not None
    best = min(trials, key=lambda trial: trial.step_seconds).pipeline_microbatches
    device = str(found["device"])
    return PipelineProbe(
        rule.schedule,
        stages,
        virtual_stages,
        global_batch_size,
        tokens,
        device,
        trials,
        best,
        planned,
        fitted,
        tuple(notes),
    )


def _refused(rule: PipelineRule, counts: Sequence[int], batch: int) -> list[Violation]:
    found: list[Violation] = []
    if rule.schedule not in RUN_BY_TORCH:
        message = f"pipeline_schedule={rule.schedule} is not run by torch. Nearest: {', '.join(RUN_BY_TORCH)}."
        found.append(Violation(message, "pipeline_schedule", rule.schedule, tuple(RUN_BY_TORCH)))
    legal = [m for m in divisors(batch) if rule.refusal(m) is None]
    for count in counts:
        if count in legal:
            continue
        reason = rule.refusal(count) or f"{batch} samples / {count} = {batch / count:.2f} is not whole"
        below, above = [m for m in legal if m < count][-1:], [m for m in legal if m > count][:1]
        near = (*below, *above)
        message = f"pipeline_microbatches={count}: {reason}. Nearest: {' or '.join(map(str, near)) or 'none'}."
        found.append(Violation(message, "pipeline_microbatches", count, near))
    return found


def _trial(rule: PipelineRule, count: int, batch: int, rounds: Sequence[Mapping[str, Any]]) -> PipelineTrial:
    idle = [1 - sum(each["compute_seconds"]) / (rule.stages * each["seconds"]) for each in rounds]
    seconds = median(float(each["seconds"]) for each in rounds)
    return PipelineTrial(count, batch // count, seconds, median(idle), float(rule.bubble(count)))
