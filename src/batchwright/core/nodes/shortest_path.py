"""The best chain of node counts: one choice per stage, a price for every change, optionally within a limit.

Without a limit it is a shortest path by dynamic programming. With one it is a constrained shortest path: a Lagrangian
bound, and a search by labels within it (`labels.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from .labels import Pair, Search


class Found(NamedTuple):
    """The nodes of each stage, and by how much a cheaper choice could be cheaper at most.

    0 where this is the cheapest: without a limit exactly, with one to one part in 2^30, which counts as equal.
    """

    counts: list[int]
    gap: int = 0


def cheapest_chain(
    options: Sequence[Mapping[int, Pair]],
    start: Callable[[int], Pair],
    *,
    always: bool = False,
    limit: int | None = None,
) -> Found | None:
    """The nodes for each stage at the least total cost, of total weight up to `limit`; None where there are none.

    A stage's `options` are {nodes: (cost, weight)}; a `start` on other nodes than before (`always`: at every boundary)
    costs extra. Integers only, so ties are ties: among equal costs fewer changes win, then fewer nodes. Within a limit a
    chain dearer by up to one part in 2^30 may be returned as the cheapest.

    >>> stages = [{1: (10, 10), 2: (12, 6)}, {2: (20, 10)}]
    >>> [cheapest_chain(stages, lambda nodes: (wait, 1)).counts for wait in (1, 3)]
    [[1, 2], [2, 2]]
    """
    # The order of preference becomes one number, cost | changes | nodes: wide enough that no sum runs over.
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
    return None if found is None else Found(found[0], -(-found[1] >> shift))


@dataclass(frozen=True)
class _Chain:
    options: Sequence[Mapping[int, Pair]]
    move: Mapping[int, Pair]
    stay: Mapping[int, Pair]

    def to_go(self, q: int, p: int) -> list[dict[int, tuple[int, int]]]:
        """For every stage and count of nodes: the least q × cost + p × weight from there on, and the next count.

        The best move to other nodes is the same wherever one comes from, so a stage costs one pass over its options.
        """
        move = {n: q * cost + p * weight for n, (cost, weight) in self.move.items()}
        stay = {n: q * cost + p * weight for n, (cost, weight) in self.stay.items()}
        table: list[dict[int, tuple[int, int]]] = []
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

    def path(self, table: Sequence[Mapping[int, tuple[int, int]]]) -> list[int]:
        """The counts that `to_go` found best."""
        at = min(table[0], key=lambda n: (table[0][n][0], n))
        counts: list[int] = []
        for row in table:
            counts.append(at)
            at = row[at][1]
        return counts

    def total(self, counts: Sequence[int]) -> Pair:
        """(cost, weight) of a choice."""
        pairs = [option[n] for option, n in zip(self.options, counts, strict=True)]
        pairs += [self.stay[b] if a == b else self.move[b] for a, b in pairwise(counts)]
        return sum(cost for cost, _ in pairs), sum(weight for _, weight in pairs)

    def so_far(self, q: int, p: int) -> list[dict[int, int]]:
        """For every stage and count of nodes: the least q × cost + p × weight up to there."""
        move = {n: q * cost + p * weight for n, (cost, weight) in self.move.items()}
        stay = {n: q * cost + p * weight for n, (cost, weight) in self.stay.items()}
        table: list[dict[int, int]] = []
        for option in self.options:
            now = {n: q * cost + p * weight for n, (cost, weight) in option.items()}
            if table:
                before, least = table[-1], min(table[-1].values())
                now = {
                    n: value + min(least + move[n], before[n] + stay[n] if n in before else least + move[n])
                    for n, value in now.items()
                }
            table.append(now)
        return table

    def within(self, limit: int) -> tuple[list[int], int] | None:
        """The cheapest choice of weight up to `limit`, and what a cheaper one could save at most: usually nothing."""
        free = self.path(self.to_go(1, 0))
        low = self.total(free)
        if low[1] <= limit:
            return free, 0
        lightest = self.to_go(0, 1)
        counts = self.path(lightest)
        high = self.total(counts)
        if high[1] > limit:
            return None
        if len(self.options) == 1:
            return [min((cost, n) for n, (cost, weight) in self.options[0].items() if weight <= limit)[1]], 0
        while True:  # p / q closes in on the slope of the convex hull where it crosses the limit
            q, p = low[1] - high[1], high[0] - low[0]
            bound = self.to_go(q, p)
            path = self.path(bound)
            cost, weight = found = self.total(path)
            if q * cost + p * weight >= q * low[0] + p * low[1]:
                break
            if weight > limit:
                low = found
            else:
                high, counts = found, path
        search = Search(
            self.options,
            self.move,
            self.stay,
            limit,
            q,
            p,
            ahead=_values(bound),
            behind=self.so_far(q, p),
            ahead_weight=_values(lightest),
            behind_weight=self.so_far(0, 1),
        )
        return search.cheapest(high[0], counts)


def _values(table: Sequence[Mapping[int, tuple[int, int]]]) -> list[dict[int, int]]:
    return [{n: value for n, (value, _) in row.items()} for row in table]
