"""What a probe leaves: its trials and what follows from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from batchwright.core import codec

from .curve import Curve
from .diagnosis import Diagnosis
from .timing import Timing


@dataclass(frozen=True)
class Trial:
    """One measured run of one size, in processes of its own.

    >>> Trial(8, "fits", "limit", peak_memory_bytes=2**30).fits
    True
    """

    micro_batch_size: int
    status: str
    """fits | oom | timeout | crash"""
    purpose: str
    """limit | throughput | evaluation"""
    peak_memory_bytes: int | None = None
    limit_bytes: int | None = None
    predicted_peak_memory_bytes: int | None = None
    samples_per_second: float | None = None
    step_seconds: float | None = None
    seconds: float | None = None
    """Wall time of the whole trial, with its start."""
    death: str | None = None
    """device-oom | host-oom | loader-worker | hang | compile | crash"""
    reason: str | None = None
    traceback: str | None = None
    rank: int | None = None
    """The rank whose verdict it is, where there are several."""
    timing: Timing | None = None
    contrasts: Mapping[str, Timing] | None = None
    """Timings of `cached`, `loader` and `accumulate` steps, where they were compared."""
    flops: float | None = None
    """Of one step, forward and backward."""
    tokens_per_sample: int | None = None
    allocator_retries: int | None = None
    reserved_bytes: int | None = None
    last_lines: tuple[str, ...] | None = None
    """Of a command's output, if its speed was measured and too few steps were seen; else None."""
    resumed: bool = False

    @property
    def fits(self) -> bool:
        """Whether this size ran."""
        return self.status == "fits"


@dataclass(frozen=True)
class Probe:
    """The answer: only sizes that ran are in it. `to_json()` is what `--json` prints."""

    trials: tuple[Trial, ...]
    max_micro_batch_size: int
    first_failing_micro_batch_size: int | None
    saturating_micro_batch_size: int | None
    recommended_micro_batch_size: int
    largest_worthwhile_micro_batch_size: int | None
    bottleneck: str | None
    max_evaluation_batch_size: int | None = None
    curve: Curve | None = None
    diagnosis: Diagnosis | None = None
    memory_bytes: int | None = None
    margin_bytes: int = 0
    ranks: int = 1
    tokens_per_second: float | None = None
    tflops_per_second: float | None = None
    mfu: float | None = None
    device: str | None = None
    target: str = ""
    identity: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    journal: str | None = None
    journal_error: str | None = None
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """The probe as one JSON document; keys are added, never renamed."""
        return {"schema": codec.SCHEMA, **codec.encode(self)}
