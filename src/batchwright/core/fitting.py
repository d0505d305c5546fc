"""Which batches run on which nodes: the rules that every stage of a ramp must satisfy, whatever chose its nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

from .errors import Violation, either
from .nearest import divisors
from .world import World


class Fit(NamedTuple):
    """How a batch runs on a number of nodes."""

    nodes: int
    data_parallel_size: int
    micro_batch_size: int
    accumulation_steps: int
    ragged: bool


@dataclass(frozen=True)
class StageRules:
    """What every stage must satisfy, whatever chose its nodes."""

    world: World
    nodes: int
    micro_batch_size: int | None
    max_micro_batch_size: int | None
    allow_ragged: bool
    refusal: Callable[[int], str | None]

    def replicas(self, nodes: int) -> int | None:
        """The data-parallel size on so many nodes, or None where they hold no whole number of (expert) replicas."""
        devices, size = nodes * (self.world.devices_per_node or 1), self.world.model_parallel_size
        return None if devices % size or devices // size % self.world.expert_parallel else devices // size

    def fit(self, batch: int, nodes: int) -> Fit | None:
        """How `batch` runs on `nodes`, or None."""
        dp = self.replicas(nodes)
        if not dp or (batch < dp and not self.allow_ragged):
            return None
        share, ragged = -(-batch // dp), bool(batch % dp)
        micro = self.micro_batch_size
        if micro is not None:
            sizes: Sequence[int] = (micro,)
            ragged = ragged or bool(share % micro)
        else:
            cap = min(share, self.max_micro_batch_size or share)
            # An exact share is cut into equal micro batches; a ragged one has fillers anyhow, so any size will do.
            sizes = range(cap, 0, -1) if ragged else [d for d in reversed(divisors(share)) if d <= cap]
        if ragged and not self.allow_ragged:
            return None
        for size in sizes:
            accumulation = -(-share // size)
            if self.refusal(accumulation) is None:
                return Fit(nodes, dp, size, accumulation, ragged)
        return None

    def fits(self, batch: int) -> Iterator[Fit]:
        """Every legal count of nodes, ascending. Without raggedness only divisors of the batch are looked at."""
        counts: Iterator[int] | range = range(1, self.nodes + 1)
        if not self.allow_ragged:
            replicas, over = divmod(batch, self.micro_batch_size or 1)
            size, per_node = self.world.model_parallel_size, self.world.devices_per_node or 1
            counts = iter(
                () if over else [d * size // per_node for d in divisors(replicas) if d * size % per_node == 0]
            )
        for nodes in counts:
            if nodes > self.nodes:
                return
            if fit := self.fit(batch, nodes):
                yield fit

    def violation(self, batch: int, nodes: int, where: str) -> Violation:
        """Why `fit` says no: the arithmetic, the nearest batches on these nodes and the nearest nodes for this batch."""
        per_node, size, dp = self.world.devices_per_node or 1, self.world.model_parallel_size, self.replicas(nodes)
        legal = [fit.nodes for fit in self.fits(batch)]
        near = tuple(sorted(sorted(legal, key=lambda n: (abs(n - nodes), n))[:2]))
        other = f"; or {(either(near) or 'none')} nodes" if near else ""
        if not dp:
            message = (
                f"{where}: nodes={nodes} hold no whole number of replicas: {nodes} × {per_node} = {nodes * per_node} "
                f"devices, {size} per replica ({self.world.split() or 'one device'})"
                f"{f', expert_parallel {self.world.expert_parallel}' if self.world.expert_parallel > 1 else ''}."
            )
            return Violation(
                message + (f" Nearest: {(either(near) or 'none')} nodes." if near else ""), "nodes", nodes, near
            )
        micro = self.micro_batch_size
        quantum = dp * (micro or 1)
        named = f"batch_quantum {quantum} ({micro} × {dp})" if micro else f"data_parallel_size {dp}"
        if batch < quantum and not self.allow_ragged:
            what = f"global_batch_size={batch} is less than one micro batch on each replica: {named}"
        elif batch % quantum and not self.allow_ragged:
            what = f"global_batch_size={batch} is not a multiple of {named}"
        else:
            m = ceil(ceil(batch / dp) / (micro or 1))
            reason = self.refusal(m) or f"none with micro_batch_size up to {self.max_micro_batch_size} is accepted"
            what = f"global_batch_size={batch} gives accumulation_steps={m} on {named}, and {reason}"
        # Looking further than a few hundred quanta would offer a batch that nobody meant.
        at = batch // quantum
        below = next((b for k in range(at, max(0, at - 512), -1) if self.fit(b := k * quantum, nodes)), None)
        above = next((b for k in range(at + 1, at + 513) if self.fit(b := k * quantum, nodes)), None)
        nearest = tuple(b for b in (below, above) if b)
        return Violation(
            f"{where}: {what}. Nearest: {(either(nearest) or 'none')}{other}.", "global_batch_size", batch, nearest
        )


def feasible_nodes(
    global_batch_size: int,
    world: World,
    *,
    nodes: int,
    micro_batch_size: int | None = None,
    max_micro_batch_size: int | None = None,
    allow_ragged: bool = False,
    legal_microbatches: Callable[[int], str | None] | None = None,
) -> tuple[int, ...]:
    """All node counts up to `nodes` on which a batch is legal.

    >>> feasible_nodes(1280, World(1, devices_per_node=8), nodes=16, micro_batch_size=4)
    (1, 2, 4, 5, 8, 10)
    """
    legal = legal_microbatches or enough_microbatches(world)
    rules = StageRules(world, nodes, micro_batch_size, max_micro_batch_size, allow_ragged, legal)
    return tuple(fit.nodes for fit in rules.fits(global_batch_size))


def enough_microbatches(world: World) -> Callable[[int], str | None]:
    """The rule where no pipeline schedule is named: fewer microbatches than pipeline stages leave stages idle."""
    p = world.pipeline_parallel
    return lambda m: None if m >= p else f"{m} microbatches are fewer than the {p} pipeline stages"
