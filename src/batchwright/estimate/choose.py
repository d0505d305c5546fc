"""From a model and devices to a plan: which micro batch, recomputed or not, sharded or not.

Every way to train is estimated on its own; those that fit are ranked by a rule, and the best is walked as a whole before it
is recommended. The rule's constants are assumptions, and the output says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from batchwright.core.batch.plan import BatchPlan, plan
from batchwright.core.batch.request import BatchRequest, resolve_ranks
from batchwright.core.numbers import divisors

from .fit import largest
from .records import MOST, Candidate, EstimateRequest, Point
from .walks import Walks

# Assumptions: recomputation is one more forward pass of three; gathering parameters is not hidden completely; a micro batch
# of so many tokens runs at half of the speed of a large one (the same constant as for pipelines).
RECOMPUTED, SHARDED, HALF_SPEED_TOKENS = 4 / 3, 1.1, 512
# So many winners that a whole walk refutes, and all ways are walked as a whole.
MISSES = 4


@dataclass(frozen=True)
class Choice:
    """The plan, the way to train that it needs, its peak, and all ways that were estimated, best first."""

    plan: BatchPlan
    request: EstimateRequest
    point: Point
    candidates: tuple[Candidate, ...]


@dataclass(frozen=True)
class _Way:
    request: EstimateRequest
    candidate: Candidate
    plan: BatchPlan | None


def ways(
    batch: BatchRequest, base: EstimateRequest, checkpoint: bool | None, shard: bool | None
) -> list[EstimateRequest]:
    """The ways to train that are open: recomputed or not, and sharded over the data-parallel ranks or not."""
    ranks = resolve_ranks(batch) or 1
    shards = [1] if ranks == 1 or shard is False else [ranks] if shard else [1, ranks]
    recomputed = [False, True] if checkpoint is None else [checkpoint]
    return [replace(base, ranks=r, checkpoint_activations=c) for r in shards for c in recomputed]


def choose(batch: BatchRequest, open_ways: Sequence[EstimateRequest], limit: int, walks: Walks) -> Choice | None:
    """The best way to train that fits, or None. `batch` is valid and names its devices."""
    found = _all(batch, open_ways, limit, walks)
    misses = 0
    while True:
        fitting = [way for way in found if way.plan is not None]
        if not fitting or misses == MISSES:
            # A line from fewer layers is not believed where it says that nothing fits, or where it is often wrong.
            if walks.layers is None:
                return None
            request, _, size = closest(batch, open_ways, walks)
            smallest = walks.point(request, size, whole=True)
            if not fitting and smallest.peak_memory_bytes > limit:
                return None
            walks.whole_only()
            found = _all(batch, open_ways, limit, walks)
            continue
        best = min(fitting, key=lambda way: way.candidate.relative_time or 0.0)
        assert best.plan is not None
        micro, steps = best.plan.micro_batch_size, best.plan.accumulation_steps
        point = walks.verify(replace(best.request, accumulation_steps=min(steps, 2)), micro)
        if point.peak_memory_bytes <= limit:
            source = "rule" if best.request.tensor_parallel > 1 else "estimated"
            shown = replace(best.candidate, peak_memory_bytes=point.peak_memory_bytes, source=source)
            rest = sorted((way for way in found if way is not best), key=_order)
            return Choice(best.plan, best.request, point, (shown, *(way.candidate for way in rest)))
        misses += 1
        found[found.index(best)] = _way(batch, best.request, limit, walks)


def closest(
    batch: BatchRequest, open_ways: Sequence[EstimateRequest], walks: Walks
) -> tuple[EstimateRequest, Point, int]:
    """The way that needs least at the smallest micro batch, its peak, and that micro batch."""
    size = _fixed(batch) or 1
    points = [(walks.point(way := _accumulating(batch, w), size), way) for w in open_ways]
    point, request = min(points, key=lambda one: one[0].peak_memory_bytes)
    return request, point, size


def _order(way: _Way) -> tuple[bool, float]:
    return way.plan is None, way.candidate.relative_time or way.candidate.peak_memory_bytes


def _fixed(batch: BatchRequest) -> int | None:
    """The micro batch, if the request leaves no choice."""
    if batch.micro_batch_size is not None:
        return batch.micro_batch_size
    if batch.global_batch_size is None and batch.global_batch_size_tokens is None:
        return None
    made = plan(batch)
    return None if made.alternatives else made.micro_batch_size


def _accumulating(batch: BatchRequest, request: EstimateRequest) -> EstimateRequest:
    """Gradients exist during the forward unless one micro batch is the whole step."""
    known = batch.global_batch_size is not None or batch.global_batch_size_tokens is not None
    steps = batch.accumulation_steps or (2 if known else 1)
    return replace(request, accumulation_steps=min(steps, 2))


def _all(batch: BatchRequest, open_ways: Sequence[EstimateRequest], limit: int, walks: Walks) -> list[_Way]:
    """Every way. What fits without recomputation or sharding also fits with it: the search starts there."""
    found: list[_Way] = []
    for request in open_ways:
        below = [
            way.candidate.max_micro_batch_size
            for way in found
            if way.request.checkpoint_activations <= request.checkpoint_activations
            and way.request.ranks <= request.ranks
        ]
        found.append(_way(batch, request, limit, walks, max(below, default=0)))
    return found


def _way(batch: BatchRequest, request: EstimateRequest, limit: int, walks: Walks, least: int = 0) -> _Way:
    """The largest micro batch of one way; sizes up to `least` are expected to fit."""
    accumulating = _accumulating(batch, request)

    def fits(size: int) -> bool:
        # One micro batch is the step: no gradients exist in the forward.
        single = whole is not None and size == share and batch.accumulation_steps in (None, 1)
        used = replace(accumulating, accumulation_steps=1) if single else accumulating
        return walks.point(used, size).peak_memory_bytes <= limit

    known = batch.global_batch_size is not None or batch.global_batch_size_tokens is not None
    whole = plan(replace(batch, max_micro_batch_size=None)) if known else None
    share = -(-whole.global_batch_size // whole.data_parallel_size) if whole else MOST
    most = min(share, batch.max_micro_batch_size or MOST)
    fixed = _fixed(batch)
    if fixed is not None:
        size = fixed if fits(fixed) else 0
    elif whole is not None:
        sizes = [d for d in (range(1, most + 1) if whole.ragged else divisors(share)) if d <= most]
        size = _last(sizes, fits, least)
    else:
        size = largest(lambda b: walks.point(accumulating, b).peak_memory_bytes, limit, most=most)
    if size == 0:
        point = walks.point(accumulating, fixed or 1)
        return _Way(request, _candidate(request, 0, None, point, None), None)
    origins = batch.origins
    if size != batch.max_micro_batch_size:
        origins = {**origins, "max_micro_batch_size": "estimate of the memory"}
    made = plan(replace(batch, max_micro_batch_size=size, origins=origins))
    at = replace(request, accumulation_steps=min(made.accumulation_steps, 2))
    point = walks.point(at, made.micro_batch_size)
    if point.peak_memory_bytes > limit and least:
        return _way(batch, request, limit, walks)
    return _Way(request, _candidate(request, size, made, point, _time(request, made)), made)


def _last(sizes: Sequence[int], fits: Callable[[int], bool], least: int) -> int:
    """The largest size that fits, by bisection; 0 if the smallest does not. Sizes up to `least` are taken to fit.

    >>> _last([1, 2, 4, 8], lambda size: size <= 5, 0), _last([1, 2], lambda size: False, 0)
    (4, 0)
    """
    low = sum(size <= least for size in sizes) - 1
    if low < 0:
        if not fits(sizes[0]):
            return 0
        low = 0
    high = len(sizes)
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(sizes[middle]) else (low, middle)
    return sizes[low]


def _time(request: EstimateRequest, made: BatchPlan) -> float:
    """The time per sample, relative to large micro batches without recomputation and sharding."""
    tokens = made.micro_batch_size * (made.sequence_length or HALF_SPEED_TOKENS * 8)
    recomputed = RECOMPUTED if request.checkpoint_activations else 1.0
    return recomputed * (SHARDED if request.ranks > 1 else 1.0) * (1 + HALF_SPEED_TOKENS / tokens)


def _candidate(
    request: EstimateRequest, size: int, made: BatchPlan | None, point: Point, time: float | None
) -> Candidate:
    return Candidate(
        checkpoint_activations=request.checkpoint_activations,
        sharded=request.ranks > 1,
        max_micro_batch_size=size,
        micro_batch_size=made.micro_batch_size if made else None,
        accumulation_steps=made.accumulation_steps if made else None,
        peak_memory_bytes=point.peak_memory_bytes,
        relative_time=time,
        source="estimated" if point.source == "predicted" else point.source,
    )
