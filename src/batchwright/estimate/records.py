"""What the estimating process is asked, and what it returns. Both are sent as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from batchwright.core.batch.request import BatchRequest
from batchwright.core.codec import SCHEMA, encode
from batchwright.report.notebook import Shown

from .devices import NO_ALLOWANCE, Allowance, Device

# The largest micro batch size of a search.
MOST = 2**20
# `-pure`: parameters, gradients and states in 16 bits; without it, autocast and parameters in 32 bits.
PRECISIONS = ("fp32", "bf16", "fp16", "bf16-pure", "fp16-pure")
OPTIMIZERS = ("adamw", "adamw-8bit", "sgd", "adafactor")
CAUSAL_LM = f"{Path(__file__).parent / 'models' / 'causal_lm.py'}:task"


@dataclass(frozen=True)
class EstimateRequest:
    """What the worker runs: the task or the model's configuration, its sizes and options."""

    task: str
    args: Mapping[str, Any] = field(default_factory=dict[str, Any])
    micro_batch_sizes: tuple[int, ...] = ()  # empty: the search chooses them
    sequence_lengths: tuple[int, ...] = ()  # empty: the task's own
    memory_bytes: int | None = None  # the limit; None: no search for the largest size
    precision: str = "fp32"
    checkpoint_activations: bool = False
    quantize_frozen: bool = False  # frozen linear layers in four bits, by rule
    ranks: int = 1
    accumulation_steps: int = 1
    accelerator: bool = False  # use the optimizer's grouped ("foreach") step, as torch does on devices but not on CPU
    longest: bool = False  # samples are as large as the largest of the dataset, not of its first few
    progress: bool = False
    model: str | None = None  # a config.json, instead of a task; the options below are for a model
    optimizer: str = "adamw"
    lora: int = 0  # the rank of the adapters; 0: all parameters are trained
    tensor_parallel: int = 1  # by rule
    layers: int | None = None  # build only so many; None: all
    replicas: int = 1  # above 1, and not sharded: DDP's buckets, by rule

    def as_task(self) -> EstimateRequest:
        """The request with the task of its model: transformers and peft do what the estimate does for other tasks."""
        if self.model is None:
            return self
        # Sharded, FSDP2's policy does what autocast does otherwise.
        policy = self.ranks > 1 and self.precision in ("bf16", "fp16")
        args = {
            "config": self.model,
            "precision": "fp32" if policy else self.precision,
            "optimizer": self.optimizer,
            "lora": self.lora,
            "checkpoint_activations": self.checkpoint_activations,
            "layers": self.layers,
        }
        precision = self.precision if policy else "fp32"
        return replace(self, task=CAUSAL_LM, args=args, precision=precision, checkpoint_activations=False)

    def arguments(self, sequence_length: int | None) -> dict[str, Any]:
        """The task's arguments at one sequence length (None: the task's own)."""
        return {**self.args, **({} if sequence_length is None else {"sequence_length": sequence_length})}


@dataclass(frozen=True)
class Room:
    """The memory to fit in: a device's or a number of bytes, and what is usable without margin and allowance."""

    device: Device | None
    memory_bytes: int | None
    margin_bytes: int
    allowance: Allowance
    usable_bytes: int | None


@dataclass(frozen=True)
class ChoiceRequest:
    """What the worker chooses from: a valid batch on known devices, and the ways to train; None: both are open."""

    batch: BatchRequest
    base: EstimateRequest
    checkpoint_activations: bool | None = None
    sharded: bool | None = None


@dataclass(frozen=True)
class Point:
    """The estimated peak of one micro batch size, and its parts at that moment."""

    micro_batch_size: int
    sequence_length: int | None
    peak_memory_bytes: int
    breakdown: Mapping[str, int]
    source: str = "predicted"  # `rule` if a part is by rule, `extrapolated` if from fewer layers

    def split(self, devices: int) -> Point:
        """The point on one of several tensor-parallel devices, by rule: all but the batch is divided evenly.

        >>> Point(1, None, 100, {"parameters": 80, "activations": 16, "other": 4}).split(2).peak_memory_bytes
        52
        """
        if devices == 1:
            return self
        parts = {name: size if name == "other" else -(-size // devices) for name, size in self.breakdown.items()}
        return replace(self, peak_memory_bytes=sum(parts.values()), breakdown=parts, source="rule")


@dataclass(frozen=True)
class Remedy:
    """A change that was estimated because nothing fits, and whether it would fit."""

    change: str
    peak_memory_bytes: int
    fits: bool
    source: str


@dataclass(frozen=True)
class Candidate:
    """One way to train a model on the devices of a plan; sizes are None if nothing fits."""

    checkpoint_activations: bool
    sharded: bool
    max_micro_batch_size: int
    micro_batch_size: int | None
    accumulation_steps: int | None
    peak_memory_bytes: int
    relative_time: float | None  # by rule, not measured
    source: str


@dataclass(frozen=True)
class Placement:
    """How a planned model is trained, what it needs on one device, and the other ways that were estimated."""

    task: str | None
    model: str | None
    device: Device | None
    memory_bytes: int
    margin_bytes: int
    allowance: Allowance
    usable_bytes: int
    precision: str
    optimizer: str | None
    lora: int
    checkpoint_activations: bool
    sharded: bool
    tensor_parallel: int
    peak_memory_bytes: int
    breakdown: Mapping[str, int]
    source: str  # `estimated`, or `rule` with tensor parallelism
    candidates: tuple[Candidate, ...]
    assumptions: tuple[str, ...]


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
class Estimate(Shown):
    """Everything `batchwright estimate` prints. `max_micro_batch_size` is a prediction for the longest sequence."""

    kind = "estimate"

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
    allowance: Allowance = NO_ALLOWANCE
    usable_bytes: int | None = None  # what fits safely: the memory without margin and allowance
    model: str | None = None
    optimizer: str | None = None
    lora: int = 0
    tensor_parallel: int = 1
    fit: FrontierFit | None = None
    frontier: tuple[FrontierRow, ...] = ()
    calibration: Calibration | None = None
    args: Mapping[str, str] = field(default_factory=dict[str, str])  # of the task's function, as text
    assumptions: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def verdict(self, point: Point) -> str | None:
        """`fits`, `does not fit safely` (it leaves less than margin and allowance) or `does not fit`."""
        if self.memory_bytes is None or self.usable_bytes is None:
            return None
        if point.peak_memory_bytes <= self.usable_bytes:
            return "fits"
        return "does not fit safely" if point.peak_memory_bytes <= self.memory_bytes else "does not fit"

    def to_json(self) -> dict[str, Any]:
        """The document that `--json` prints."""
        points = [
            encode(p) | {"fits": None if (v := self.verdict(p)) is None else v == "fits", "verdict": v}
            for p in self.points
        ]
        slope = self.lengths[-1].slope if self.lengths else None
        return {
            "schema": SCHEMA,
            **encode(self),
            "points": points,
            "bytes_per_sample": slope.bytes_per_sample if slope else None,
            "base_bytes": slope.base_bytes if slope else None,
            "source": "rule" if any(p.source == "rule" for p in self.points) else "predicted",
        }
