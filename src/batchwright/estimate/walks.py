"""Peaks of many variants of one request, in one process: whole, or from three and five layers where all layers are the same.

A peak is a maximum of lines in the number of layers, as it is in the batch: the line through three and five layers is never
above the peak of all. So a variant that does not fit by this line does not fit, and one that fits has to be walked as a whole.
One and two layers are no part of that: FSDP2 holds the buffers of two layers at once from the third layer on.
Bytes are rounded (shards, parts of a device), and a line over many layers multiplies that: it is lowered by as much.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any

from batchwright.core.numbers import format_bytes

from .records import EstimateRequest, Point

FEW, MORE = 3, 5
# The fields of errors that say: this model cannot be recomputed, or sharded. Then that is no way to train it.
CLOSED = ("checkpoint_activations", "ranks")
Runs = Callable[[EstimateRequest, int | None], Any]  # FakeRuns: each `point` is the peak at one size


class Walks:
    """`point(request, size)` is the peak of a variant at a size; each is computed once."""

    def __init__(self, runs: Runs) -> None:
        self.runs = runs
        self.model: str | None = None
        self.known: dict[tuple[str, int], Point] = {}
        self.runners: dict[str, Any] = {}
        self.ranks = 1

    @cached_property
    def layers(self) -> int | None:
        """The layers of the model, if they are all the same; None: every walk is a whole one."""
        if self.model is None:
            return None
        from .models.causal_lm import alike

        count = alike(self.model)
        # Up to eight, all layers are no more than three and five of them.
        return None if count is None or count <= FEW + MORE else count

    def whole_only(self) -> None:
        """Walk all layers from now on."""
        self.layers = None

    def point(self, request: EstimateRequest, size: int, *, whole: bool = False) -> Point:
        """The peak of all layers if `whole` or if it is known; else `extrapolated` from fewer."""
        self.model = request.model
        if whole or request.model is None or self.layers is None or (_key(request), size) in self.known:
            return self._walk(request, size).split(request.tensor_parallel)
        few, more = (self._walk(replace(request, layers=n), size) for n in (FEW, MORE))
        rest = self.layers - FEW
        parts = {k: v + (more.breakdown.get(k, 0) - v) * rest // (MORE - FEW) for k, v in few.breakdown.items()}
        peak = few.peak_memory_bytes + (more.peak_memory_bytes - few.peak_memory_bytes) * rest // (MORE - FEW)
        lowered = rounding(len(parts), self.layers, request.tensor_parallel)
        parts["activations"] = parts.get("activations", 0) - lowered  # in a part: it is divided as the others are
        made = replace(few, peak_memory_bytes=peak - lowered, breakdown=parts, source="extrapolated")
        return made.split(request.tensor_parallel)

    def exceeds(self, request: EstimateRequest, size: int, limit: int) -> bool:
        """Whether three layers alone need more than the limit: then all do, and five need not be walked."""
        self.model = request.model
        if request.model is None or self.layers is None:
            return False
        few = self._walk(replace(request, layers=FEW), size).split(request.tensor_parallel)
        return few.peak_memory_bytes - len(few.breakdown) > limit

    def said(self, what: str) -> list[str]:
        """The `rules` or `notes` of the model: those of the first walk."""
        return list(getattr(next(iter(self.runners.values())), what, ()))

    def _walk(self, request: EstimateRequest, size: int) -> Point:
        key = _key(request)
        if (key, size) not in self.known:
            if request.ranks != self.ranks:
                from .fake import destroy_fake_group

                destroy_fake_group()  # the ranks of the group are those of the first variant that was sharded
                self.ranks = request.ranks
            if key not in self.runners:
                length = next(iter(request.sequence_lengths), None)
                self.runners[key] = self.runs(request.as_task(), length)
            self.known[key, size] = self.runners[key].point(size)
            if request.progress:
                _say(request, self.known[key, size])
        return self.known[key, size]


def rounding(parts: int, layers: int, devices: int) -> int:
    """How far the line through a few layers may be above the peak of all because each part is rounded to bytes.

    >>> rounding(6, 32, 1)
    90
    """
    return parts * ((layers - FEW) // (MORE - FEW) + devices)


def _say(request: EstimateRequest, point: Point) -> None:
    ways = [f"{request.layers} layers"] if request.layers else []
    ways += ["recomputed"] if request.checkpoint_activations else []
    ways += [f"sharded over {request.ranks}"] if request.ranks > 1 else []
    ways += [f"{request.accumulation_steps} micro batches"] if request.accumulation_steps > 1 else []
    how = f" ({', '.join(ways)})" if ways else ""
    peak = format_bytes(point.peak_memory_bytes)
    print(f"estimated micro_batch_size {point.micro_batch_size}{how}: {peak}", file=sys.stderr, flush=True)


def _key(request: EstimateRequest) -> str:
    return repr(replace(request, tensor_parallel=1, memory_bytes=None))
