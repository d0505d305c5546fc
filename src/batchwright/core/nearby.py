"""Requests near a request that work: other batches on the same ranks, other rank counts with the same batch or nearly.

A tolerance of a few per cent makes almost every node count usable, so it is often cheaper to bend the batch than to
wait for a machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from .errors import PlanError
from .request import Request, batch_in_samples, resolve_ranks, world_of

MOST_ROWS = 200


@dataclass(frozen=True)
class Nearby:
    """One request that works, and how far it is from what was asked."""

    global_batch_size: int
    data_parallel_size: int
    nodes: int | None
    accumulation_steps: int | None
    batch_change: float
    ranks_change: float


def nearby(request: Request, tolerance: Fraction) -> tuple[Nearby, ...]:
    """What works within `tolerance` of the requested batch and rank count, closest first.

    >>> [n.global_batch_size for n in nearby(Request(global_batch_size=1000, micro_batch_size=3,
    ...     data_parallel_size=64), Fraction(1, 20)) if n.data_parallel_size == 64]
    [960]
    """
    batch, ranks = batch_in_samples(request), resolve_ranks(request)
    if batch is None or ranks is None:
        raise PlanError(
            "tolerance looks around a request, so it needs a global batch and a number of ranks (devices, or nodes × "
            "devices_per_node, or data_parallel_size).",
            field="tolerance",
        )
    low, high = (batch * (1 - tolerance)).__ceil__(), (batch * (1 + tolerance)).__floor__()
    factor = (request.micro_batch_size or 1) * (request.accumulation_steps or 1)
    step = world_of(request, ranks).replica_step
    first = max(step, -(-(ranks * (1 - tolerance)).__ceil__() // step) * step)
    found: list[tuple[int, int, int]] = []  # (distance × batch × ranks, batch, ranks): integers, so that ties are exact
    for other in range(first, (ranks * (1 + tolerance)).__floor__() + 1, step):
        if other % request.expert_parallel:
            continue
        quantum = factor * other
        closest = max(1, (2 * batch + quantum) // (2 * quantum))
        reach = MOST_ROWS if other == ranks else 0  # on the ranks asked for: every batch that works
        for k in range(max(1, closest - reach), closest + reach + 1):
            if low <= k * quantum <= high:
                distance = abs(k * quantum - batch) * ranks + abs(other - ranks) * batch
                found.append((distance, k * quantum, other))
    found.sort()
    return tuple(_row(request, batch, ranks, size, other) for _, size, other in found[:MOST_ROWS])


def _row(request: Request, batch: int, ranks: int, size: int, other: int) -> Nearby:
    steps = request.accumulation_steps
    if request.micro_batch_size:
        steps = size // (request.micro_batch_size * other)
    return Nearby(
        global_batch_size=size,
        data_parallel_size=other,
        nodes=world_of(request, other).nodes,
        accumulation_steps=steps,
        batch_change=size / batch - 1,
        ranks_change=other / ranks - 1,
    )
