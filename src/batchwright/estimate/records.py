"""What the estimating process is asked, and what it returns. Both are sent as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from batchwright.core.codec import SCHEMA, encode

from .devices import Device

# The largest micro batch size of a search.
MOST = 2**20


@dataclass(frozen=True)
class EstimateRequest:
    """What the worker runs: the task, its sizes and options."""

    task: str
    args: Mapping[str, Any] = field(default_factory=dict[str, Any])
    micro_batch_sizes: tuple[int, ...] = ()  # empty: the search chooses them
    sequence_lengths: tuple[int, ...] = ()  # empty: the task's own
    memory_bytes: int | None = None  # the limit; None: no search for the largest size
    precision: str = "fp32"
    checkpoint_activations: bool = False
    ranks: int = 1
    accumulation_steps: int = 1
    accelerator: bool = False  # use the optimizer's grouped ("foreach") step, as torch does on devices but not on CPU
    progress: bool = False

    def arguments(self, sequence_length: int | None) -> dict[str, Any]:
        """The task's arguments at one sequence length (None: the task's own)."""
        return {**self.args, **({} if sequence_length is None else {"sequence_length": sequence_length})}


@dataclass(frozen=True)
class Point:
    """The estimated peak of one micro batch size, and its parts at that moment."""

    micro_batch_size: int
    sequence_length: int | None
    peak_memory_bytes: int
    breakdown: Mapping[str, int]


@dataclass(frozen=True)
class Slope:
    """Memory as a line in the micro batch, on the activation-bound segment: `base_bytes + bytes_per_sample × B`.

    A lower bound: peak memory is a maximum of lines, and allocator and device context need more.

    >>> Slope(bytes_per_sample=2.0, base_bytes=10.0, micro_batch_sizes=(8, 16)).predict(32)
    74
    """

    bytes_per_sample: float
    base_bytes: float
    micro_batch_sizes: tuple[int, ...]  # the line goes through these two
    peaks: Mapping[int, int] = field(default_factory=dict[int, int])  # all sizes that were estimated, for the prober

    def predict(self, micro_batch_size: int) -> int:
        """The peak at another size."""
        return round(self.base_bytes + self.bytes_per_sample * micro_batch_size)


@dataclass(frozen=True)
class Length:
    """The line and the limit at one sequence length (None: the task's own)."""

    sequence_length: int | None
    slope: Slope | None
    max_micro_batch_size: int | None  # None: no memory was given


@dataclass(frozen=True)
class FrontierRow:
    """The largest micro batch at a sequence length; `source` is `estimated` (a fake run) or `fit`."""

    sequence_length: int
    max_micro_batch_size: int
    source: str


@dataclass(frozen=True)
class FrontierFit:
    """peak = constant + linear × B·T + quadratic × B·T²; `error` is the largest relative error at the estimated points."""

    constant: float
    linear: float
    quadratic: float
    error: float


@dataclass(frozen=True)
class Calibration:
    """One real trial on this CPU and its estimate. The difference is memory that is not in tensors."""

    micro_batch_size: int
    sequence_length: int | None
    estimated_bytes: int
    measured_bytes: int  # peak resident memory above that of the process after its imports
    difference_bytes: int
    max_micro_batch_size: int | None  # the largest that fits with the difference added; also a prediction


@dataclass(frozen=True)
class Estimate:
    """Everything `batchwright estimate` prints. `max_micro_batch_size` is a prediction for the longest sequence."""

    task: str
    framework: str
    device: Device | None
    memory_bytes: int | None
    margin_bytes: int
    precision: str
    checkpoint_activations: bool
    ranks: int
    accumulation_steps: int
    points: tuple[Point, ...]
    lengths: tuple[Length, ...]
    max_micro_batch_size: int | None
    fit: FrontierFit | None = None
    frontier: tuple[FrontierRow, ...] = ()
    calibration: Calibration | None = None
    assumptions: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The document that `--json` prints."""
        limit = None if self.memory_bytes is None else self.memory_bytes - self.margin_bytes
        points = [
            encode(p) | {"fits": None if limit is None else p.peak_memory_bytes <= limit, "source": "predicted"}
            for p in self.points
        ]
        slope = self.lengths[-1].slope if self.lengths else None
        return {
            "schema": SCHEMA,
            **encode(self),
            "points": points,
            "bytes_per_sample": slope.bytes_per_sample if slope else None,
            "base_bytes": slope.base_bytes if slope else None,
            "source": "predicted",
        }
