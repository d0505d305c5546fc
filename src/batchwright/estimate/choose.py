"""From a model and devices to a plan: which micro batch, recomputed or not, sharded or not.

Every way to train is estimated on its own; those that fit are ranked by a rule, and the best is walked as a whole before it
is recommended. The rule's constants are assumptions, and the output says so.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from batchwright.core.batch.pipeline import ASSUMED_LENGTH, HALF_SPEED_TOKENS
from batchwright.core.batch.plan import BatchPlan, plan
from batchwright.core.batch.request import BatchRequest, resolve_ranks
from batchwright.core.errors import PlanError
from batchwright.core.numbers import divisors

from .fit import largest, solve
from .records import MOST, Candidate, EstimateRequest, Point
from .walks import CLOSED, Walks

# Assumptions: recomputation is one more forward pass of three; gathering parameters is not hidden completely.
RECOMPUTED, SHARDED = 4 / 3, 1.1
# So many winners that a whole walk refutes, and all ways are walked as a whole.
MISSES = 4
T = TypeVar("T")


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
    made = [replace(base, ranks=r, checkpoint_activations=c) for r in shards for c in recomputed]
    return [replace(way, replicas=ranks if way.ranks == 1 else 1) for way in made]


def choose(batch: BatchRequest, open_ways: Sequence[EstimateRequest], limit: int, walks: Walks) -> Choice | None:
    """The best way to train that fits, or None. `batch` is valid and names its devices."""
    found = _all(batch, open_ways, limit, walks)
    misses = 0
    while True:
        fitting = [way for way in found if way.plan is not None]
        # A line from fewer layers is not believed where it says that nothing fits, or where it is often wrong.
        if walks.layers is not None and (not fitting or misses == MISSES):
            if not fitting:
                request, _, size = closest(batch, open_ways, walks)
                if walks.point(request, size, whole=True).peak_memory_bytes > limit:
                    return None
            walks.whole_only()
            found = _all(batch, open_ways, limit, walks)
            continue
        if not fitting:
            return None
        best = min(fitting, key=lambda way: way.candidate.relative_time or 0.0)
        assert best.plan is not None
        micro, steps = best.plan.micro_batch_size, best.plan.accumulation_steps
        point = walks.point(replace(best.request, accumulation_steps=min(steps, 2)), micro, whole=True)
        if point.peak_memory_bytes <= limit:
            shown = replace(best.candidate, peak_memory_bytes=point.peak_memory_bytes, source=_source(point))
            rest = sorted((way for way in found if way is not best), key=_order)
            return Choice(best.plan, best.request, point, (shown, *(way.candidate for way in rest)))
        misses += 1
        found[found.index(best)] = _way(batch, best.request, limit, walks)


def closest(
    batch: BatchRequest, open_ways: Sequence[EstimateRequest], walks: Walks
) -> tuple[EstimateRequest, Point, int]:
    """The way and the micro batch that need least, and their peak."""
    found = _each(open_ways, lambda way: _least(batch, way, walks))
    return min(found, key=lambda one: one[1].peak_memory_bytes)


def _least(batch: BatchRequest, request: EstimateRequest, walks: Walks) -> tuple[EstimateRequest, Point, int]:
    """The micro batch of one way that needs least: the smallest, or the whole share, which does not accumulate."""
    fixed, share = _fixed(batch), _share(batch)
    size = fixed or 1
    at = _at(batch, request, size)
    found = at, walks.point(at, size), size
    if fixed or share is None or share > (batch.max_micro_batch_size or MOST):
        return found
    at = _at(batch, request, share)
    if walks.exceeds(at, share, found[1].peak_memory_bytes):
        return found
    return min(found, (at, walks.point(at, share), share), key=lambda one: one[1].peak_memory_bytes)


def _each(open_ways: Sequence[EstimateRequest], walk: Callable[[EstimateRequest], T]) -> list[T]:
    """`walk` of every way that the model allows; an error if it allows none."""
    found: list[T] = []
    closed: list[PlanError] = []
    for way in open_ways:
        try:
            found.append(walk(way))
        except PlanError as error:
            closed.append(error)
            if error.field not in CLOSED:
                raise
    if not found:
        raise closed[0]
    return found


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


def _share(batch: BatchRequest) -> int | None:
    """The samples of one rank in a step; None if the global batch is open."""
    if batch.global_batch_size is None and batch.global_batch_size_tokens is None:
        return None
    whole = plan(replace(batch, max_micro_batch_size=None))
    return -(-whole.global_batch_size // whole.data_parallel_size)


def _at(batch: BatchRequest, request: EstimateRequest, size: int) -> EstimateRequest:
    """The request at a micro batch. Gradients exist during the forward unless one micro batch is the whole step."""
    share = _share(batch)
    steps = batch.accumulation_steps or (1 if share is None or size >= share else 2)
    return replace(request, accumulation_steps=min(steps, 2))


def _all(batch: BatchRequest, open_ways: Sequence[EstimateRequest], limit: int, walks: Walks) -> list[_Way]:
    """Every way. What fits without recomputation or sharding also fits with it: the search starts there."""
    found: list[_Way] = []

    def walk(request: EstimateRequest) -> None:
        below = [
            way.candidate.max_micro_batch_size
            for way in found
            if way.request.checkpoint_activations <= request.checkpoint_activations
            and way.request.ranks <= request.ranks
        ]
        found.append(_way(batch, request, limit, walks, max(below, default=0)))

    _each(open_ways, walk)
    return found


def _way(batch: BatchRequest, request: EstimateRequest, limit: int, walks: Walks, least: int = 0) -> _Way:
    """The largest micro batch of one way; sizes up to `least` are expected to fit."""

    known: dict[int, int] = {}

    def peak(size: int) -> int:
        known[size] = walks.point(_at(batch, request, size), size).peak_memory_bytes
        return known[size]

    def fits(size: int) -> bool:
        return not walks.exceeds(_at(batch, request, size), size, limit) and peak(size) <= limit

    fixed, share = _fixed(batch), _share(batch)
    most = min(share or MOST, batch.max_micro_batch_size or MOST)
    why, notes = "estimate of the memory", batch.notes
    if fixed is not None:
        size = fixed if peak(fixed) <= limit else 0
    elif share is None:
        size = largest(peak, limit, most=most)
    elif most == share and fits(share):  # without accumulation, it may need less than a smaller size
        size, why = share, f"estimate of the memory: all {share} samples of a rank fit"
    else:
        ragged = plan(replace(batch, max_micro_batch_size=None)).ragged
        sizes = [d for d in (range(1, most + 1) if ragged else divisors(share)) if d <= most and d < share]
        size = _last(sizes, fits, least, lambda low, high: _meets(known, (low, high), limit))
        if not ragged:
            why += f": the largest divisor of {share} samples per rank that fits"
            above = next((d for d in divisors(share) if size < d <= most), 0)
            if size and above > 2 * size:
                notes += (
                    f"micro_batch_size {size} is the largest divisor of {share} samples per rank that fits; the next one, "
                    f"{above}, does not. Sizes between them may fit: another global batch would allow them.",
                )
    if size == 0:
        smallest = fixed or 1
        point = walks.point(_at(batch, request, smallest), smallest)
        return _Way(request, _candidate(request, 0, None, point, None), None)
    origins = batch.origins
    if size != batch.max_micro_batch_size:
        origins = {**origins, "max_micro_batch_size": why}
    made = plan(replace(batch, max_micro_batch_size=size, origins=origins, notes=notes))
    at = replace(request, accumulation_steps=min(made.accumulation_steps, 2))
    point = walks.point(at, made.micro_batch_size)
    if point.peak_memory_bytes > limit and least:
        return _way(batch, request, limit, walks)
    return _Way(request, _candidate(request, size, made, point, _time(request, made)), made)


def _last(
    sizes: Sequence[int],
    fits: Callable[[int], bool],
    least: int,
    meets: Callable[[int, int], int | None] = lambda low, high: None,
) -> int:
    """The largest size that fits; 0 if none does. Sizes up to `least` are taken to fit.

    By bisection, in turn with `meets`: where the line between a size that fits and one that does not is at the limit.

    >>> _last([1, 2, 4, 8], lambda size: size <= 5, 0), _last([1, 2], lambda size: False, 0)
    (4, 0)
    """
    low = sum(size <= least for size in sizes) - 1
    if low < 0:
        if not sizes or not fits(sizes[0]):
            return 0
        low = 0
    high, between = len(sizes), True
    while low + 1 < high:
        middle = (low + high) // 2
        at = meets(sizes[low], sizes[high]) if between and high < len(sizes) else None
        between = at is None
        if at is not None:
            middle = max(low + 1, min(bisect_right(sizes, at) - 1, high - 1))
        low, high = (middle, high) if fits(sizes[middle]) else (low, middle)
    return sizes[low]


def _meets(known: Mapping[int, int], sizes: tuple[int, int], limit: int) -> int | None:
    """The size at which the line through two known peaks meets the limit; None if one is not known."""
    return solve(known, sizes, limit) if known.keys() >= set(sizes) else None


def _time(request: EstimateRequest, made: BatchPlan) -> float:
    """The time per sample, relative to large micro batches without recomputation and sharding."""
    tokens = made.micro_batch_size * (made.sequence_length or ASSUMED_LENGTH)
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
        source=_source(point),
    )


def _source(point: Point) -> str:
    return "estimated" if point.source == "predicted" else point.source
