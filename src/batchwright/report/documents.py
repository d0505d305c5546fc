"""The JSON documents that a report reads: which verb printed one, and whether its numbers can be drawn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from batchwright.core import codec
from batchwright.core.nodes.policies import Launch

ACCEPTED = (
    "a run directory (of run or train_rl), or the output of batchwright plan, ramp, probe (also of a pipeline) or estimate with "
    "--json (batchwright probe … --json > probe.json)"
)
# Keys that only the document of this kind has.
_KEYS = {
    "probe": ("trials", "max_micro_batch_size"),
    "pipeline": ("trials", "best_microbatches", "half_speed_tokens"),
    "estimate": ("points", "lengths"),
    "ramp": ("stages", "rule", "total_steps"),
    "plan": ("micro_batch_size", "accumulation_steps", "data_parallel_size", "alternatives"),
}
_OTHERS = {
    "run --json": ("state", "consumed_samples", "directory"),
    "check --json": ("findings", "ok"),
    "rl --json": ("prompts_per_round",),
    "a run's plan.json": ("schedule", "launches", "rules"),
}


def kind_of(document: Mapping[str, Any]) -> str | None:
    """plan, ramp, probe, pipeline (a probe of one) or estimate; None for anything else."""
    return next((kind for kind, keys in _KEYS.items() if all(key in document for key in keys)), None)


def why_not(document: Mapping[str, Any]) -> str:
    """What a document is that has no kind."""
    error = document.get("error")
    if isinstance(error, Mapping) and "message" in error:
        return f"it is an error that a verb printed: {str(error['message'])[:200].rstrip('.')}"  # pyright: ignore[reportUnknownArgumentType]
    other = next((name for name, keys in _OTHERS.items() if all(key in document for key in keys)), None)
    if other == "run --json":
        return f"it is the output of run: give the run directory, {str(document['directory'])[:200]}"
    return f"it is {other}" if other else f"its keys are {', '.join(map(str, document))[:120] or 'none'}"


@dataclass(frozen=True)
class StageRow:
    """A stage in the output of `ramp`."""

    index: int
    global_batch_size: int
    first_step: int
    steps: int | None
    start_sample: int
    end_sample: int | None
    nodes: int | None = None
    data_parallel_size: int | None = None
    micro_batch_size: int | None = None
    accumulation_steps: int | None = None
    step_seconds: float | None = None
    hours: float | None = None
    node_hours: float | None = None


@dataclass(frozen=True)
class RampDocument:
    """What a report reads of the output of `ramp`."""

    stages: tuple[StageRow, ...]
    total_steps: int | None = None
    total_samples: int | None = None
    start_sample: int = 0
    remaining_steps: int | None = None
    remaining_samples: int | None = None
    hours: float | None = None
    node_hours: float | None = None
    launches: tuple[Launch, ...] | None = None
    sources: Mapping[str, str] | None = None
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The part of the document that a report reads."""
        return codec.encode(self)
