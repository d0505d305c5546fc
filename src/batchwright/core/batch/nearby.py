"""Valid requests close to a given one: other batches on the same ranks, other rank counts with about the same batch.

With a tolerance of a few per cent almost every node count is usable, so it is often cheaper to change the batch than
to wait for nodes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import islice

from batchwright.core.errors import PlanError, raise_violations

from .plan import plan, rank_step
from .request import BatchRequest, batch_in_samples, devices_of, resolve_ranks, world_of

MOST_ROWS = 200
MOST_COUNTS = 10_000  # rank counts looked at on each side

_LIMITS = ("max_micro_batch_size", "expansion_factor", "loading_hosts", "stored_hosts")


@dataclass(frozen=True)
class Nearby:
    """A valid request, and its distance from the given one."""

    global_batch_size: int
    data_parallel_size: int
    nodes: int | None
    accumulation_steps: int | None
    batch_change: float
    ranks_change: float


def nearby(request: BatchRequest, tolerance: Fraction) -> tuple[Nearby, ...]:
    """Valid requests within `tolerance` of the given batch and rank count, closest first.

    >>> [n.global_batch_size for n in nearby(BatchRequest(global_batch_size=1000, micro_batch_size=3,
    ...     data_parallel_size=64), Fraction(1, 20)) if n.data_parallel_size == 64]
    [960]
    """
    batch, ranks = _asked(request)
    low, high = (batch * (1 - tolerance)).__ceil__(), (batch * (1 + tolerance)).__floor__()
    factor = (request.micro_batch_size or 1) * (request.accumulation_steps or 1)
    all_known = bool(request.micro_batch_size and request.accumulation_steps)  # then the ranks determine the batch
    step = rank_step(request)
    reach = min(ranks * tolerance, MOST_COUNTS * step)
    first = max(step, ((ranks - reach) / step).__ceil__() * step)
    # (distance × batch × ranks, batch, ranks), scaled to integers, so that ties are exact
    found: list[tuple[int, int, int]] = []
    (samples, per), (of, share) = batch.as_integer_ratio(), ranks.as_integer_ratio()
    for other in range(first, (ranks + reach).__floor__() + 1, step):
        quantum = factor * other
        closest = 1 if all_known else max(1, (2 * samples + quantum * per) // (2 * quantum * per))
        asked = other * share == of and not all_known  # on the given ranks: every valid batch
        more = MOST_ROWS if asked else 0
        for k in range(max(1, closest - more), closest + more + 1):
            if low <= k * quantum <= high:
                distance = abs(k * quantum * per - samples) * of + abs(other * share - of) * samples
                found.append((distance, k * quantum, other))
    found.sort()
    rows = (_row(request, batch, ranks, size, other) for _, size, other in found)
    return tuple(islice((row for row in rows if _works(request, row)), MOST_ROWS))


def _asked(request: BatchRequest) -> tuple[Fraction, Fraction]:
    """The given batch and ranks: exact, even if tokens are not whole samples or devices not whole replicas."""
    tokens, length = request.global_batch_size_tokens, request.sequence_length
    batch: int | Fraction | None
    if tokens is None or length is None or request.global_batch_size is not None:
        batch = batch_in_samples(request)
    else:
        batch = Fraction(tokens, length)
    devices, wrong = devices_of(request)
    raise_violations(PlanError, wrong)
    ranks: int | Fraction | None
    if devices is None or request.data_parallel_size is not None:
        ranks = resolve_ranks(request)
    else:
        ranks = Fraction(devices, world_of(request, 1).model_parallel_size)
    if batch is None or ranks is None:
        raise PlanError(
            "tolerance needs a global batch and a number of ranks (devices, or nodes × devices_per_node, or "
            "data_parallel_size) to compare with.",
            field="tolerance",
        )
    return Fraction(batch), Fraction(ranks)


def _works(request: BatchRequest, row: Nearby) -> bool:
    """A batch that divides can still break a limit, a rule of the pipeline or of the loading: `plan` checks them all."""
    if request.pipeline_parallel == 1 and all(getattr(request, name) is None for name in _LIMITS):
        return True
    per_node = world_of(request, 1).devices_per_node
    other = replace(
        request,
        global_batch_size=row.global_batch_size,
        global_batch_size_tokens=None,
        data_parallel_size=row.data_parallel_size,
        devices=None,
        nodes=None if per_node else request.nodes,
        devices_per_node=per_node,
        step_seconds=None,
        round=None,
        allow_ragged=False,
    )
    try:
        plan(other)
    except PlanError:
        return False
    return True


def _row(request: BatchRequest, batch: Fraction, ranks: Fraction, size: int, other: int) -> Nearby:
    steps, world = request.accumulation_steps, world_of(request, other)
    if request.micro_batch_size:
        steps = size // (request.micro_batch_size * other)
    return Nearby(
        global_batch_size=size,
        data_parallel_size=other,
        nodes=request.nodes if world.devices_per_node is None else world.nodes,
        accumulation_steps=steps,
        batch_change=float(size / batch - 1),
        ranks_change=float(other / ranks - 1),
    )
