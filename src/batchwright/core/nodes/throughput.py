"""How long an optimizer step takes on a number of nodes: a model, a measured curve, or times given per stage.

A step of m micro batches on n nodes, with i micro steps of pipeline idle time:

    step = (m + i) × micro_step(micro_batch_size)                      compute, with the pipeline's bubble
         + sync_latency_seconds × ceil(log2 n)                         a tree's depth
         + sync_seconds × 2 (n - 1) / n                                a ring's volume

`micro_step` is a + b × micro_batch_size, or interpolated between measured points. `sync_seconds` is the time to send all
gradients of a device once over the network of its node. Synchronisation inside a node belongs to `micro_step`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from math import inf
from statistics import median
from typing import Any, cast

from batchwright.core.errors import ConfigError, Violation, raise_violations
from batchwright.core.numbers import count, positive


@dataclass(frozen=True)
class Throughput:
    """The time of a step from few named parameters; `measured` points replace a + b × micro_batch_size.

    >>> model = Throughput(fixed_seconds=0.02, per_sample_seconds=0.01, sync_latency_seconds=0.001, sync_seconds=0.1)
    >>> round(model.step_seconds(nodes=4, micro_batch_size=2, accumulation_steps=8), 6)
    0.472
    """

    fixed_seconds: float = 0.0
    per_sample_seconds: float = 0.0
    measured: tuple[tuple[int, float], ...] = ()
    """(micro_batch_size, seconds of one micro step), in ascending order of size."""
    sync_latency_seconds: float = 0.0
    sync_seconds: float = 0.0
    sequence_length: int | None = None
    """The length that the times were measured at; times at other lengths are scaled by tokens, without attention's extra cost."""

    def __post_init__(self) -> None:
        found = [
            Violation(f"{name}={value}: must be at least 0 and finite.", name, str(value), (0,))
            for name in ("fixed_seconds", "per_sample_seconds", "sync_latency_seconds", "sync_seconds")
            if not 0 <= (value := getattr(self, name)) < inf
        ]
        sizes = [size for size, _ in self.measured]
        if sizes != sorted(set(sizes)) or any(size < 1 or not 0 < seconds < inf for size, seconds in self.measured):
            message = f"measured={list(self.measured)} needs sizes from 1 up in ascending order, and times above zero."
            found.append(Violation(message, "measured", list(self.measured)))
        if self.measured and (self.fixed_seconds or self.per_sample_seconds):
            message = "measured points and fixed_seconds or per_sample_seconds are mutually exclusive."
            found.append(Violation(message, "measured", list(self.measured)))
        if not self.measured and self.fixed_seconds + self.per_sample_seconds <= 0:
            message = "a throughput needs fixed_seconds and per_sample_seconds, or measured points."
            found.append(Violation(message, "per_sample_seconds", self.per_sample_seconds))
        raise_violations(ConfigError, found)

    @classmethod
    def from_probe(cls, record: Mapping[str, Any], **parameters: Any) -> Throughput:
        """The curve of a probe file: the timed trials that fit; for one size, those made for throughput are preferred.

        The sequence length is the probed one if the file has it, else the given one.

        >>> trial = {"micro_batch_size": 4, "status": "fits", "step_seconds": 0.5}
        >>> Throughput.from_probe({"trials": [trial, {"micro_batch_size": 8, "status": "oom"}]}).measured
        ((4, 0.5),)
        """
        found = cast("list[Mapping[str, Any]]", record.get("trials"))
        if not isinstance(found, list) or not all(isinstance(trial, Mapping) for trial in found):  # pyright: ignore
            raise ConfigError("the probe file has no list of trials.", field="trials")
        runs: dict[int, list[tuple[bool, float]]] = {}
        for trial in found:
            if trial.get("status") == "fits" and trial.get("step_seconds") is not None:
                size = count(trial.get("micro_batch_size", "missing"), "micro_batch_size")
                seconds = positive(trial["step_seconds"], "step_seconds")
                runs.setdefault(size, []).append((trial.get("purpose") == "throughput", seconds))
        points: list[tuple[int, float]] = []
        for size, timed in sorted(runs.items()):
            meant = [seconds for for_throughput, seconds in timed if for_throughput]
            points.append((size, median(meant or [seconds for _, seconds in timed])))
        if not points:
            raise ConfigError(
                f"the probe file has no timed trial: {len(found)} trials, none with status fits and step_seconds.",
                field="trials",
                given=len(found),
            )
        if (probed := probed_length(record)) is not None:
            parameters["sequence_length"] = probed
        return cls(measured=tuple(points), **parameters)

    def micro_step_seconds(self, micro_batch_size: float) -> float:
        """One forward and backward: exact at measured sizes, linear in between.

        Above the largest measured size the last slope continues (with one point: in proportion), and `remarks` says so;
        below the smallest size, the time is that of the smallest, an upper bound.

        >>> curve = Throughput(measured=((2, 0.3), (4, 0.5)))
        >>> [round(curve.micro_step_seconds(size), 3) for size in (1, 2, 3, 4, 8)]
        [0.3, 0.3, 0.4, 0.5, 0.9]
        """
        if not self.measured:
            return self.fixed_seconds + self.per_sample_seconds * micro_batch_size
        points = self.measured
        at = bisect_left(points, micro_batch_size, key=lambda point: point[0])
        if at < len(points) and (at == 0 or points[at][0] == micro_batch_size):
            return points[at][1]
        if len(points) == 1:
            return points[0][1] * micro_batch_size / points[0][0]
        (x0, y0), (x1, y1) = points[at - 1 : at + 1] if at < len(points) else points[-2:]
        slope = (y1 - y0) / (x1 - x0)
        if at < len(points):
            return y0 + slope * (micro_batch_size - x0)
        # Noise can make the last slope negative: a larger micro batch is never predicted to be faster.
        return y1 + max(0.0, slope) * (micro_batch_size - x1)

    def sync_step_seconds(self, nodes: int) -> float:
        """The time of a step in which gradients travel between nodes.

        >>> Throughput(per_sample_seconds=1.0, sync_latency_seconds=0.5, sync_seconds=4.0).sync_step_seconds(4)
        7.0
        """
        return self.sync_latency_seconds * (nodes - 1).bit_length() + self.sync_seconds * 2 * (nodes - 1) / nodes

    def step_seconds(
        self,
        *,
        nodes: int,
        micro_batch_size: int,
        accumulation_steps: int,
        idle: float = 0.0,
        sequence_length: int | None = None,
        stage: int = 0,
    ) -> float:
        """One optimizer step with `idle` micro steps of pipeline idle time; `stage` has no effect here.

        >>> model = Throughput(per_sample_seconds=0.5)
        >>> model.step_seconds(nodes=1, micro_batch_size=1, accumulation_steps=8, idle=2)
        5.0
        """
        computing = self.compute_seconds(micro_batch_size, accumulation_steps + idle, sequence_length)
        return computing + self.sync_step_seconds(nodes)

    def compute_seconds(self, micro_batch_size: int, micro_steps: float, sequence_length: int | None = None) -> float:
        """The time of a step that does not depend on the number of nodes.

        >>> Throughput(per_sample_seconds=0.5).compute_seconds(4, 3)
        6.0
        """
        return micro_steps * self.micro_step_seconds(self.size(micro_batch_size, sequence_length))

    def size(self, micro_batch_size: int, sequence_length: int | None) -> float:
        """The micro batch with the same number of tokens at the measured sequence length.

        >>> Throughput(per_sample_seconds=1.0, sequence_length=4096).size(2, 8192)
        4.0
        """
        if not sequence_length or not self.sequence_length or sequence_length == self.sequence_length:
            return micro_batch_size
        return micro_batch_size * sequence_length / self.sequence_length

    def remarks(self, micro_batch_sizes: Iterable[int], sequence_lengths: Iterable[int | None] = ()) -> tuple[str, ...]:
        """Notes on the times that are predicted for these sizes, each at its sequence length.

        >>> Throughput(measured=((4, 0.5),)).remarks([8])
        ('micro_batch_size 8 is above the largest measured size 4: its time is extrapolated. Probe it.',)
        """
        found: list[str] = []
        asked = list(dict.fromkeys(zip_longest(micro_batch_sizes, sequence_lengths)))
        lengths = sorted({length for _, length in asked if length})
        if self.measured:
            least, largest = self.measured[0][0], self.measured[-1][0]
            sizes = sorted((self.size(micro, length), micro) for micro, length in asked)
            if above := [self._named(*size) for size in sizes if size[0] > largest]:
                found.append(
                    f"micro_batch_size {', '.join(dict.fromkeys(above))} is above the largest measured size {largest}: "
                    "its time is extrapolated. Probe it."
                )
            if below := [self._named(*size) for size in sizes if size[0] < least]:
                found.append(
                    f"micro_batch_size {', '.join(dict.fromkeys(below))} is below the smallest measured size {least}: "
                    "its time is that of the smallest size, an upper bound."
                )
        if self.sequence_length:
            found += [
                f"times at sequence_length {other} are scaled by tokens from {self.sequence_length}; attention's extra "
                "cost is not included."
                for other in lengths
                if other != self.sequence_length
            ]
        elif len(lengths) > 1:
            found.append(
                f"times are the same at every sequence_length ({', '.join(map(str, lengths))}): it is unknown at "
                "which one they were measured. Give that sequence_length."
            )
        return tuple(found)

    def _named(self, size: float, micro_batch_size: int) -> str:
        same = size == micro_batch_size
        return f"{micro_batch_size}" + ("" if same else f" (as {size:g} at sequence_length {self.sequence_length})")


def probed_length(record: Mapping[str, Any]) -> int | None:
    """The sequence length of all samples in a probe file, or None if it is unknown.

    >>> probed_length({"identity": {"sequence_length": 1024}}), probed_length({})
    (1024, None)
    """
    about: Any = record.get("identity")
    length = cast("Mapping[str, Any]", about).get("sequence_length") if isinstance(about, Mapping) else None
    return None if length is None else count(length, "sequence_length")


@dataclass(frozen=True)
class StageSeconds:
    """Step times given per stage, as in a paper or a log: valid only for the nodes they were measured on.

    >>> StageSeconds((0.57, 0.58, 0.64)).step_seconds(stage=2)
    0.64
    """

    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.seconds or not all(0 < seconds < inf for seconds in self.seconds):
            raise ConfigError(
                f"step seconds per stage must be above zero: {list(self.seconds)}.", field="seconds", given=self.seconds
            )

    def step_seconds(self, *, stage: int, **_: Any) -> float:
        """The given time of a stage's step."""
        return self.seconds[stage]

    def remarks(self, micro_batch_sizes: Iterable[int], sequence_lengths: Iterable[int | None] = ()) -> tuple[str, ...]:
        """A note on the times; the same signature as `Throughput.remarks`."""
        return ("step times are given per stage, and are valid for the nodes they were measured on.",)
