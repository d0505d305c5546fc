"""The best chain of node counts: one choice per stage, a price for every change, optionally within a limit.

Without a limit it is a shortest path by dynamic programming. With one it is a constrained shortest path, solved
exactly: labels of (weight, cost) without the dominated ones, cut by a Lagrangian bound.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from operator import itemgetter
from typing import TypeAlias

from .record import record

Pair: TypeAlias = tuple[int, int]  # (cost, weight)
_Link: TypeAlias = "tuple[int, _Link] | None"  # the nodes chosen so far, last first
_Label: TypeAlias = tuple[int, int, _Link]  # (weight, cost, nodes)


def cheapest_chain(
    options: Sequence[Mapping[int, Pair]],
    start: Callable[[int], Pair],
    *,
    always: bool = False,
    limit: int | None = None,
) -> list[int] | None:
    """The nodes for each stage at the least total cost, of total weight up to `limit`; None where there are none.

    A stage's `options` are {nodes: (cost, weight)}; a `start` on other nodes than before (`always`: at every boundary)
    costs extra. Integers only, so ties are ties: among equal costs fewer changes win, then fewer nodes.

    >>> stages = [{1: (10, 10), 2: (12, 6)}, {2: (20, 10)}]
    >>> cheapest_chain(stages, lambda nodes: (1, 1)), cheapest_chain(stages, lambda nodes: (3, 1))
    ([1, 2], [2, 2])
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
    return chain.path(chain.to_go(1, 0)) if limit is None else chain.within(limit)


@record
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

    def suffixes(self, table: Sequence[Mapping[int, tuple[int, int]]]) -> list[dict[int, Pair]]:
        """(cost, weight) of the way that `to_go` found best from every stage and count on."""
        found: list[dict[int, Pair]] = [{}]
        for option, row in zip(reversed(self.options), reversed(table), strict=True):
            now: dict[int, Pair] = {}
            for n, (cost, weight) in option.items():
                then = row[n][1]
                if then:
                    (c, w), (d, v) = (self.stay if then == n else self.move)[then], found[-1][then]
                    cost, weight = cost + c + d, weight + w + v
                now[n] = (cost, weight)
            found.append(now)
        return found[:0:-1]

    def within(self, limit: int) -> list[int] | None:
        """The cheapest choice of weight up to `limit`, exactly: a shortest path with a resource.

        Labels (weight, cost, nodes so far) go from stage to stage. One is dropped when another on the same nodes is no
        worse in both, when its lightest completion breaks the limit, or when a Lagrangian bound shows that it cannot
        beat the best choice known (a label completed along that bound's own way is such a choice). The problem is
        NP-hard, and the answer exact: a hundred stages take 20 to 200 ms, but where restarts are free a knapsack of
        nearly equal slopes remains, which can take seconds.
        """
        free = self.path(self.to_go(1, 0))
        low = self.total(free)
        if low[1] <= limit:
            return free
        lightest = self.to_go(0, 1)
        high = self.total(self.path(lightest))
        if high[1] > limit:
            return None
        while True:  # p / q closes in on the slope of the convex hull where it crosses the limit
            q, p = low[1] - high[1], high[0] - low[0]
            bound = self.to_go(q, p)
            cost, weight = found = self.total(self.path(bound))
            if q * cost + p * weight >= q * low[0] + p * low[1]:
                break
            low, high = (found, high) if weight > limit else (low, found)
        rest = self.suffixes(bound)
        best = high[0]
        labels: dict[int, list[_Label]] = {}
        front: list[_Label] = [(0, 0, None)]
        for i, option in enumerate(self.options):
            now: dict[int, list[_Label]] = {}
            for n, (cost, weight) in option.items():
                arriving: list[_Label] = []
                room, floor, (rest_cost, rest_weight) = limit - lightest[i][n][0], bound[i][n][0], rest[i][n]
                for row, (c, w) in ((front, self.move[n] if i else (0, 0)), (labels.get(n, ()), self.stay[n])):
                    for before_weight, before_cost, link in row:
                        at_weight, at_cost = before_weight + w, before_cost + c
                        if q * (at_cost - best) + p * (at_weight - limit) + floor > 0:
                            if row is front:  # ascending in just this
                                break
                        elif at_weight <= room:
                            arriving.append((at_weight, at_cost, link))
                            if at_weight + rest_weight <= limit:
                                best = min(best, at_cost + rest_cost)
                if arriving:
                    now[n] = [(w + weight, c + cost, (n, link)) for w, c, link in _undominated(arriving)]
            labels = now
            front = _undominated([label for row in labels.values() for label in row])
            front.sort(key=lambda label: q * label[1] + p * label[0])
        *_, link = min((label for row in labels.values() for label in row), key=itemgetter(1))
        counts: list[int] = []
        while link is not None:
            counts.append(link[0])
            link = link[1]
        return counts[::-1]


def _undominated(labels: list[_Label]) -> list[_Label]:
    """The labels that no other one matches in both weight and cost."""
    kept: list[_Label] = []
    for label in sorted(labels, key=itemgetter(0, 1)):
        if not kept or label[1] < kept[-1][1]:
            kept.append(label)
    return kept
