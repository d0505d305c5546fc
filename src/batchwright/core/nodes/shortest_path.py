"""The best chain of node counts: one choice per stage, a cost for every change, optionally within a limit.

Without a limit it is a shortest path, found by dynamic programming. With one it is a constrained shortest path, which is
NP-hard: a Lagrangian bound gives a chain within the limit and says how much a cheaper one could save. A
depth-first search under that bound, cut off after a fixed number of choices, improves it. That matters for ramps of few
stages: for 72 ramps of 3 to 8 stages the bound's own answer cost up to 19% more than the best, after the search 1%.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, TypeAlias

Pair: TypeAlias = tuple[int, int]  # (cost, weight)
Table: TypeAlias = (
    "list[dict[int, tuple[int, int]]]"  # by stage and nodes: the least value from there on, the next nodes
)
Nodes: TypeAlias = "tuple[int, Nodes] | None"  # the nodes chosen so far, last first

# Choices that the search looks at: enough for a ramp of five stages, 10 to 20 ms for any.
_MOST_CHOICES = 20_000


class Found(NamedTuple):
    """The nodes of each stage, and how much a cheaper choice could save at most: 0 if this one is the cheapest."""

    counts: list[int]
    gap: int = 0


def cheapest_chain(
    options: Sequence[Mapping[int, Pair]],
    start: Callable[[int], Pair],
    *,
    always: bool = False,
    limit: int | None = None,
) -> Found | None:
    """The nodes for each stage at the least total cost, of total weight up to `limit`; None if every chain is above it.

    A stage's `options` are {nodes: (cost, weight)}; a `start` on other nodes than before (`always`: at every boundary)
    costs extra. Integers only, so sums are exact: among equal costs fewer changes win, then fewer nodes. Within a limit
    the chain may cost more than the cheapest, by `gap` at most.

    >>> stages = [{1: (10, 10), 2: (12, 6)}, {2: (20, 10)}]
    >>> [cheapest_chain(stages, lambda nodes: (wait, 1)).counts for wait in (1, 3)]
    [[1, 2], [2, 2]]
    """
    # One number holds the order of preference, cost | changes | nodes: each part is wide enough for every sum.
    counts = sorted({n for option in options for n in option})
    change = (len(options) * counts[-1]).bit_length()
    shift = change + len(options).bit_length()
    starts = {n: start(n) for n in counts}
    chain = _Chain(
        [{n: ((cost << shift) + n, weight) for n, (cost, weight) in option.items()} for option in options],
        {n: ((cost << shift) + (1 << change), weight) for n, (cost, weight) in starts.items()},
        {n: (cost << shift, weight) if always else (0, 0) for n, (cost, weight) in starts.items()},
    )
    if limit is None:
        return Found(chain.path(chain.to_go(1, 0)))
    found = chain.within(limit)
    # Rounded up: of two chains that differ in cost by one, the other may have more changes and nodes.
    return None if found is None else Found(found.counts, -(-found.gap >> shift))


@dataclass(frozen=True)
class _Chain:
    options: Sequence[Mapping[int, Pair]]
    move: Mapping[int, Pair]
    stay: Mapping[int, Pair]

    def to_go(self, q: int, p: int) -> Table:
        """For every stage and count of nodes: the least q × cost + p × weight from there on, and the next count.

        The best move to other nodes does not depend on the nodes before, so a stage costs one pass over its options.
        """
        move = {n: q * cost + p * weight for n, (cost, weight) in self.move.items()}
        stay = {n: q * cost + p * weight for n, (cost, weight) in self.stay.items()}
        table: Table = []
        after: dict[int, tuple[int, int]] = {}
        for option in reversed(self.options):
            moved = min(((value + move[n], n) for n, (value, _) in after.items()), default=(0, 0))
            now: dict[int, tuple[int, int]] = {}
            for n, (cost, weight) in option.items():
                value, then = moved
                if n in after and (kept := after[n][0] + stay[n]) <= value:
                    value, then = kept, n
                now[n] = (value + q * cost + p * weight, then)
            table.append(now)
            after = now
        return table[::-1]

    def path(self, table: Table) -> list[int]:
        """The counts that `to_go` found best."""
        at = min(table[0], key=lambda n: (table[0][n][0], n))
        counts: list[int] = []
        for row in table:
            counts.append(at)
            at = row[at][1]
        return counts

    def total(self, counts: Sequence[int]) -> Pair:
        """(cost, weight) of a chain."""
        pairs = [option[n] for option, n in zip(self.options, counts, strict=True)]
        pairs += [self.stay[b] if a == b else self.move[b] for a, b in pairwise(counts)]
        return sum(cost for cost, _ in pairs), sum(weight for _, weight in pairs)

    def within(self, limit: int) -> Found | None:
        """A chain of weight up to `limit`, and how much a cheaper one could save at most."""
        counts = self.path(self.to_go(1, 0))
        low = self.total(counts)
        if low[1] <= limit:
            return Found(counts)
        lightest = self.to_go(0, 1)
        counts = self.path(lightest)
        high = self.total(counts)
        if high[1] > limit:
            return None
        while True:  # p / q converges to the slope of the convex hull where it crosses the limit
            q, p = low[1] - high[1], high[0] - low[0]
            bound = self.to_go(q, p)
            path = self.path(bound)
            cost, weight = found = self.total(path)
            least = q * cost + p * weight
            if least >= q * low[0] + p * low[1]:
                break
            if weight > limit:
                low = found
            else:
                high, counts = found, path
        best, better, complete = self.search(limit, q, p, bound, lightest, high[0])
        # A chain within the limit has q × cost >= least - p × limit.
        return Found(better or counts, 0 if complete else (q * best + p * limit - least) // q)

    def search(
        self, limit: int, q: int, p: int, bound: Table, lightest: Table, best: int
    ) -> tuple[int, list[int] | None, bool]:
        """The least cost below `best` within the limit, its chain, and whether every chain was looked at or ruled out."""
        found: Nodes = None
        looked_at, last = 0, len(self.options)
        stack: list[tuple[int, int, int, int, Nodes]] = [(0, 0, 0, 0, None)]  # value, stage, cost, weight, nodes
        while stack:
            value, stage, cost, weight, nodes = stack.pop()
            if value - p * limit >= q * best:
                continue
            if stage == last:
                if cost < best:
                    best, found = cost, nodes
                continue
            looked_at += len(self.options[stage])
            if looked_at > _MOST_CHOICES:
                break
            further: list[tuple[int, int, int, int, Nodes]] = []
            for n, (more_cost, more_weight) in self.options[stage].items():
                c, w = cost, weight
                if nodes is not None:
                    change = self.stay[n] if nodes[0] == n else self.move[n]
                    c, w = c + change[0], w + change[1]
                value = q * c + p * w + bound[stage][n][0]
                if w + lightest[stage][n][0] <= limit and value - p * limit < q * best:
                    further.append((value, stage + 1, c + more_cost, w + more_weight, (n, nodes)))
            stack += sorted(further, key=lambda choice: -choice[0])  # the last one, of the least value, is next
        chain: list[int] = []
        while found is not None:
            chain.append(found[0])
            found = found[1]
        return best, chain[::-1] or None, looked_at <= _MOST_CHOICES
