"""The cheapest chain within a limit, exactly: labels from both ends that meet in the middle.

A label is a way through some of the stages: (weight, cost, nodes). One is dropped when another on the same nodes is no
worse in both, when its lightest completion breaks the limit, or when its Lagrangian value, q × cost + p × weight with the
best completion there is, lies too far above the least of all chains. How far is found by widening: a chain that costs no
more than the bound allows is kept, so the first width within which one is found holds the cheapest of all.

The problem is NP-hard. Where restarts are free and many stages could change nodes at the same price, what is left is to
fill the limit to the microsecond, and the labels of such ties double with every stage. Beyond some thousands they are
thinned out; the answer then comes with a bound on what a cheaper one could save.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import itemgetter
from typing import TypeAlias

Pair: TypeAlias = tuple[int, int]  # (cost, weight)
Values: TypeAlias = Sequence[Mapping[int, int]]  # by stage, then by nodes
Link: TypeAlias = "tuple[int, Link] | None"  # the nodes chosen so far, last first
Label: TypeAlias = tuple[int, int, Link]  # (weight, cost, nodes)

# Labels kept after a stage: more and more while some had to be dropped, up to the last, which bounds the time.
_KEPT = (500, 4_000, 16_000)
# A choice that is dearer by less than this part (a power of two: one in 10^9) counts as the cheapest.
_SETTLED = 30
# Choices besides the best of each stage that the first width takes in; every further one takes in twice as many.
_FIRST = 16


@dataclass(frozen=True)
class Search:
    """A chain of stages, the multipliers (q, p), and the least values and weights from each end to every choice."""

    options: Sequence[Mapping[int, Pair]]
    move: Mapping[int, Pair]
    stay: Mapping[int, Pair]
    limit: int
    q: int
    p: int
    ahead: Values
    behind: Values
    ahead_weight: Values
    behind_weight: Values

    def cheapest(self, best: int, counts: list[int]) -> tuple[list[int], int]:
        """The cheapest chain within the limit, of which one, `counts`, is known to cost `best`.

        And what a cheaper one could save at most: nothing, unless labels had to be thinned out.
        """
        least, kept = min(self.ahead[0].values()), list(_KEPT)
        reach = sorted((self.through(i, n) - least, i, n) for i, option in enumerate(self.options) for n in option)
        taken, width = _FIRST, 0

        def gap() -> int:
            return self.q * best + self.p * self.limit - least

        while True:
            inside = bisect_right(reach, (gap(), len(self.options)))
            if len(self.options) + taken + taken // 4 < inside:
                width = max(width, reach[len(self.options) + taken][0])
            else:
                width = gap()
            allowed: list[list[int]] = [[] for _ in self.options]
            for _, i, n in reach[: bisect_right(reach, (width, len(self.options)))]:
                allowed[i].append(n)
            found, whole = self.met(allowed, least + width, kept[0])
            if found is not None and found[0] < best:
                best, counts = found
            if (whole and width >= gap()) or gap() <= self.q * best >> _SETTLED:
                return counts, 0
            if whole:
                taken *= 2
            elif len(kept) > 1:
                kept.pop(0)
            else:
                return counts, gap() // self.q

    def through(self, stage: int, nodes: int) -> int:
        """The least value of all chains that take so many nodes at a stage."""
        cost, weight = self.options[stage][nodes]
        return self.ahead[stage][nodes] + self.behind[stage][nodes] - self.q * cost - self.p * weight

    def met(self, allowed: Sequence[Sequence[int]], top: int, most: int) -> tuple[tuple[int, list[int]] | None, bool]:
        """The cheapest chain of a value up to `top` (or a dearer one, or none); and whether none was left out."""
        # Every choice beyond one multiplies the labels: as many on this side of the middle as on the other.
        more, last = list(accumulate(len(row) - 1 for row in allowed)), len(allowed)
        middle = min(max(1, bisect_left(more, more[-1] / 2)), last - 1)
        free = dict.fromkeys(self.move, (0, 0))
        there, back = range(middle), range(last - 1, middle - 1, -1)
        first, front, whole = self.sweep(there, allowed, self.ahead, self.ahead_weight, self.move, free, top, most)
        second, rear, too = self.sweep(back, allowed, self.behind, self.behind_weight, free, self.move, top, most)
        meetings = [(front, rear, (0, 0))]
        meetings += [(first[n], second[n], self.stay[n]) for n in first.keys() & second.keys()]
        best: tuple[int, Link, Link] | None = None
        for ones, others, (cost, weight) in meetings:
            at = len(others) - 1
            for one_weight, one_cost, link in ones:  # heavier and cheaper, one by one; the others the other way round
                while at >= 0 and others[at][0] + one_weight + weight > self.limit:
                    at -= 1
                if at < 0:
                    break
                total = one_cost + cost + others[at][1]
                if best is None or total < best[0]:
                    best = total, link, others[at][2]
        found = None if best is None else (best[0], [*reversed([*_nodes(best[1])]), *_nodes(best[2])])
        return found, whole and too

    def sweep(
        self,
        stages: Iterable[int],
        allowed: Sequence[Sequence[int]],
        rest: Values,
        rest_weight: Values,
        enter: Mapping[int, Pair],
        leave: Mapping[int, Pair],
        top: int,
        most: int,
    ) -> tuple[dict[int, list[Label]], list[Label], bool]:
        """Labels through `stages`, by nodes and all together, and whether they are all there are.

        `enter` and `leave` say on which side a move is paid.
        """
        q, p, limit = self.q, self.p, self.limit
        labels: dict[int, list[Label]] = {}
        front: list[Label] = []
        values: list[int] | None = None
        whole = True
        for i in stages:
            now: dict[int, list[Label]] = {}
            for n in allowed[i]:
                cost, weight = self.options[i][n]
                room, value = limit - rest_weight[i][n], top - rest[i][n]
                if values is None:
                    arriving: list[Label] = [(weight, cost, (n, None))] if room >= 0 else []
                else:
                    c, w = enter[n]
                    most_value, most_weight = value - q * c - p * w, room - w
                    c, w = c + cost, w + weight
                    arriving = [
                        (a + w, b + c, (n, link))
                        for (a, b, link), v in zip(front, values, strict=True)
                        if v <= most_value and a <= most_weight
                    ]
                    if n in labels:
                        c, w = self.stay[n]
                        most_value, most_weight = value - q * c - p * w, room - w
                        c, w = c + cost, w + weight
                        arriving += [
                            (a + w, b + c, (n, link))
                            for a, b, link in labels[n]
                            if a <= most_weight and q * b + p * a <= most_value
                        ]
                        arriving = undominated(arriving)
                if arriving:
                    now[n] = arriving
            front = undominated(
                [(a + leave[n][1], b + leave[n][0], link) for n, row in now.items() for a, b, link in row]
            )
            labels = {n: row for n in now if (row := self.worth(now[n], front, enter[n], self.stay[n]))}
            if len(front) > most:
                whole = False
                front = self.thinned(front, most)
                labels = {n: self.thinned(row, max(1, most // len(labels))) for n, row in labels.items()}
            values = [q * b + p * a for a, b, _ in front]
        return labels, front, whole

    def worth(self, labels: list[Label], front: list[Label], enter: Pair, stay: Pair) -> list[Label]:
        """The labels that are better kept on their nodes than replaced by any other with a move to these nodes."""
        cost, weight = enter[0] - stay[0], enter[1] - stay[1]
        kept: list[Label] = []
        at = 0
        for label in labels:
            while at < len(front) and front[at][0] + weight <= label[0]:
                at += 1
            if at == 0 or front[at - 1][1] + cost > label[1]:
                kept.append(label)
        return kept

    def thinned(self, labels: list[Label], most: int) -> list[Label]:
        """At most so many: of neighbours in weight, the one of the least value."""
        size = -(-len(labels) // most)
        parts = (labels[k : k + size] for k in range(0, len(labels), size))
        return [min(part, key=lambda label: self.q * label[1] + self.p * label[0]) for part in parts]


def undominated(labels: list[Label]) -> list[Label]:
    """The labels that no other one matches in both weight and cost, the lightest first.

    >>> undominated([(3, 1, None), (1, 5, None), (2, 5, None)])
    [(1, 5, None), (3, 1, None)]
    """
    kept: list[Label] = []
    for label in sorted(labels, key=itemgetter(0)):  # of several sorted rows: cheap
        if not kept or label[1] < kept[-1][1]:
            if kept and kept[-1][0] == label[0]:
                kept.pop()
            kept.append(label)
    return kept


def _nodes(link: Link) -> Iterable[int]:
    while link is not None:
        yield link[0]
        link = link[1]
