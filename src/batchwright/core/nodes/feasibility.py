"""Which batches run on which nodes: the rules that every stage of a ramp must satisfy under any policy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import gcd
from typing import NamedTuple

from batchwright.core.batch.equation import Unknowns, ragged_share, splits
from batchwright.core.batch.pipeline import PipelineRule
from batchwright.core.batch.world import World
from batchwright.core.errors import Violation, either
from batchwright.core.numbers import divisors


class Fit(NamedTuple):
    """How a batch runs on a number of nodes."""

    nodes: int
    data_parallel_size: int
    micro_batch_size: int
    accumulation_steps: int
    ragged: bool


@dataclass(frozen=True)
class StageRules:
    """What every stage must satisfy under any policy.

    The pipeline's microbatches are the accumulation steps, unless `inner_microbatches` of them are inside each step.

    >>> rules = StageRules(World(1, devices_per_node=8), nodes=16, micro_batch_size=4)
    >>> [fit.nodes for fit in rules.fits(1280)]
    [1, 2, 4, 5, 8, 10]
    """

    world: World
    nodes: int
    micro_batch_size: int | None = None
    max_micro_batch_size: int | None = None
    accumulation_steps: int | None = None
    allow_ragged: bool = False
    pipeline: PipelineRule | None = None
    inner_microbatches: int | None = None
    sequence_length: int | None = None

    def idle(self, steps: int) -> float:
        """Idle time of a pipeline stage in an optimizer step of `steps` micro steps, in micro steps."""
        if self.pipeline is None:
            return 0.0
        return self.pipeline.idle_steps(steps, self.inner_microbatches)

    def refusal(self, steps: int) -> str | None:
        """Why the pipeline does not run with this number of accumulation steps, or None."""
        return None if self.pipeline is None or self.inner_microbatches else self.pipeline.refusal(steps)

    def replicas(self, nodes: int) -> int | None:
        """The data-parallel size on this number of nodes, or None if they do not hold whole (expert) replicas."""
        devices, size = nodes * (self.world.devices_per_node or 1), self.world.model_parallel_size
        return None if devices % size or devices // size % self.world.expert_step else devices // size

    def fit(self, batch: int, nodes: int) -> Fit | None:
        """How `batch` runs on `nodes`, or None: the equation's best split that the pipeline runs."""
        dp = self.replicas(nodes)
        if not dp:
            return None
        if self.micro_batch_size is None:
            return next(self._free(batch, nodes, dp), None)
        # The equation with one unknown: the optima call this thousands of times.
        steps, over = divmod(batch, self.micro_batch_size * dp)
        steps += over > 0
        if (over and not self.allow_ragged) or not self._accepts(self.micro_batch_size, steps, dp):
            return None
        return Fit(nodes, dp, self.micro_batch_size, steps, over > 0)

    def _accepts(self, micro: int, steps: int, dp: int) -> bool:
        return (
            steps == (self.accumulation_steps or steps)
            and micro <= (self.max_micro_batch_size or micro)
            and self.refusal(steps) is None
            and self._divides_inner(micro, dp)
        )

    def _free(self, batch: int, nodes: int, dp: int) -> Iterator[Fit]:
        """Every valid split where the micro batch is free, best first."""
        rule = None if self.inner_microbatches else self.pipeline
        if batch % dp == 0:
            known = (batch, None, self.accumulation_steps, dp, self.max_micro_batch_size, 1, rule, self.sequence_length)
            for split in splits(Unknowns(*known)):
                if self._accepts(split.micro_batch_size, split.accumulation_steps, dp):
                    yield Fit(nodes, dp, split.micro_batch_size, split.accumulation_steps, False)
        if self.allow_ragged:
            micro, steps = ragged_share(-(-batch // dp), self.accumulation_steps, self.max_micro_batch_size, rule)
            if self._accepts(micro, steps, dp):
                yield Fit(nodes, dp, micro, steps, True)

    def resplit(self, batch: int, nodes: int, limit: int) -> Fit | None:
        """The best split of `batch` on `nodes` in micro batches of at most `limit`, or None where none is valid.

        A micro batch that the rules fix stays (or becomes `limit` if that is smaller) where that is valid. Accumulation
        steps that they fix do not stay: smaller micro batches or fewer ranks need more of them.

        >>> rules = StageRules(World(1, pipeline_parallel=4), nodes=8, pipeline=PipelineRule("circular", stages=4))
        >>> rules.resplit(24, nodes=8, limit=2)[1:4]  # 2 × 6 × 2 is the same batch, but 6 is not a multiple of 4
        (2, 1, 12)
        """
        dp = self.replicas(nodes)
        if not dp or limit < 1:
            return None
        free = replace(self, micro_batch_size=None, accumulation_steps=None, max_micro_batch_size=limit)
        found = free._free(batch, nodes, dp)
        if self.micro_batch_size is not None:
            kept = replace(free, micro_batch_size=min(self.micro_batch_size, limit)).fit(batch, nodes)
            found = chain([kept] if kept else [], found)
        return next(found, None)

    def _divides_inner(self, micro: int, dp: int) -> bool:
        """Whether one accumulation step divides into the pipeline's inner microbatches, if it has any."""
        return not self.inner_microbatches or micro * dp % self.inner_microbatches == 0

    def fits(self, batch: int) -> Iterator[Fit]:
        """Every valid number of nodes, ascending. Unless ragged, only divisors of the batch are tried."""
        if self.allow_ragged:
            counts: Iterable[int] = range(1, self.nodes + 1)
        else:
            counts = (nodes for nodes, _ in self._dividing(batch))
        for nodes in counts:
            if fit := self.fit(batch, nodes):
                yield fit

    def choices(self, batches: Sequence[int]) -> Iterator[list[tuple[int, int, int]]]:
        """For each batch the choices that can be best: (nodes, micro_batch_size, accumulation_steps), ascending.

        >>> rules = StageRules(World(1), nodes=100, micro_batch_size=1, allow_ragged=True)
        >>> [[nodes for nodes, _, _ in row] for row in rules.choices([5, 6])]
        [[1, 2, 3, 5, 6], [1, 2, 3, 5, 6]]
        """
        corners = self.corners(batches) if self.allow_ragged else None
        unit, known = self.micro_batch_size or 1, dict[tuple[int, int], tuple[int, int] | None]()
        for batch in batches:
            row: list[tuple[int, int, int]] = []
            for nodes, dp in self._dividing(batch) if corners is None else corners:
                share = -(-batch // (unit * dp))
                # The split depends only on the share of a replica, on whether the share is whole, and on whether the
                # replicas' micro batches divide into inner microbatches.
                whole = share if batch % dp or self.micro_batch_size else -share
                key = whole, dp % (self.inner_microbatches or 1)
                if key not in known:
                    fit = self.fit(batch, nodes)
                    known[key] = fit and (fit.micro_batch_size, fit.accumulation_steps)
                if split := known[key]:
                    row.append((nodes, *split))
            yield row

    def corners(self, batches: Iterable[int]) -> list[tuple[int, int]]:
        """The numbers of nodes that can be best if any number may be valid, with their replicas.

        With the same accumulation, a batch takes no more time on fewer nodes, and less node time. So a run of stages on
        the same nodes loses nothing by moving down to the next number on which one of `batches` needs fewer steps than on
        every smaller number. With inner microbatches the smaller number may not be valid: then every number counts.

        >>> StageRules(World(1), nodes=100, micro_batch_size=1, allow_ragged=True).corners([10])
        [(1, 1), (2, 2), (3, 3), (4, 4), (5, 5), (10, 10)]
        """
        per_node, size = self.world.devices_per_node or 1, self.world.model_parallel_size
        whole = size * self.world.expert_step
        least = whole // gcd(per_node, whole)
        dp, most = least * per_node // size, self.nodes // least
        if self.inner_microbatches:
            return [(k * least, k * dp) for k in range(1, most + 1)]
        unit, found = dp * (self.micro_batch_size or 1), set[int]()
        for batch in set(batches):
            k, share = 0, batch + 1
            while share > 1 and (k := -(-batch // (unit * (share - 1)))) <= most:
                share = -(-batch // (unit * k))
                found.add(k)
                if self.micro_batch_size is None and batch % (unit * k) == 0 and k < most:
                    found.add(k + 1)  # whole shares here, ragged shares above
        return [(k * least, k * dp) for k in sorted(found)]

    def _dividing(self, batch: int) -> Iterator[tuple[int, int]]:
        """Nodes and replicas that divide the batch, ascending."""
        replicas, over = divmod(batch, (self.micro_batch_size or 1) * (self.accumulation_steps or 1))
        size, per_node, step = self.world.model_parallel_size, self.world.devices_per_node or 1, self.world.expert_step
        for dp in () if over else divisors(replicas):
            nodes, rest = divmod(dp * size, per_node)
            if nodes > self.nodes:
                return
            if not rest and dp % step == 0:
                yield nodes, dp

    def violation(self, batch: int, nodes: int, where: str) -> Violation:
        """Why `fit` is None: the arithmetic, the nearest batches on these nodes and the nearest nodes for this batch."""
        per_node, size, dp = self.world.devices_per_node or 1, self.world.model_parallel_size, self.replicas(nodes)
        valid = [fit.nodes for fit in self.fits(batch)]
        near = tuple(sorted(sorted(valid, key=lambda n: (abs(n - nodes), n))[:2]))
        other = f"; or {either(near)} nodes" if near else ""
        if not dp:
            message = (
                f"{where}: nodes={nodes} do not hold a whole number of replicas: {nodes} × {per_node} = {nodes * per_node} "
                f"devices, {size} per replica ({self.world.split() or 'one device'})"
                f"{f', expert_parallel {self.world.expert_parallel}' if self.world.expert_parallel > 1 else ''}."
            )
            return Violation(message + (f" Nearest: {either(near)} nodes." if near else ""), "nodes", nodes, near)
        nearest = self._nearest(batch, nodes, dp)
        what = f"{where}: global_batch_size={batch} {self._reason(batch, dp)}"
        return Violation(f"{what}. Nearest: {either(nearest) or 'none'}{other}.", "global_batch_size", batch, nearest)

    def _reason(self, batch: int, dp: int) -> str:
        """What is wrong with a batch on `dp` replicas, as the end of a sentence."""
        micro, steps, most = self.micro_batch_size, self.accumulation_steps, self.max_micro_batch_size
        quantum, share = dp * (micro or steps or 1), -(-batch // dp)
        named = f"batch_quantum {quantum} ({micro} × {dp})" if micro else f"data_parallel_size {dp}"
        if steps and not micro:
            named = f"accumulation_steps {steps} × {dp} = {quantum}"
        if batch < quantum and not self.allow_ragged:
            return f"is less than one {'micro batch' if micro or not steps else 'sample in every step'} on each replica: {named}"
        if batch % quantum and not self.allow_ragged:
            return f"is not a multiple of {named}"
        needed = -(-share // (micro or 1))
        if micro and most and micro > most:
            return f"cannot run with micro_batch_size={micro}, which is more than max_micro_batch_size={most}"
        if micro and steps and needed != steps:
            division = f"{batch} / {quantum}{', rounded up' if batch % quantum else ''}"
            return f"needs accumulation_steps {needed} ({division}), and accumulation_steps={steps} is given"
        if refusal := self.refusal(steps or needed):
            return f"gives accumulation_steps={steps or needed} on {named}, and {refusal}"
        pieces = self.inner_microbatches
        if micro and not self._divides_inner(micro, dp):
            return (
                f"gives {micro} × {dp} = {micro * dp} samples to one accumulation step, which do not divide into "
                f"pipeline_microbatches {pieces}"
            )
        cap = f" with micro_batch_size up to {most}" if most else ""
        if pieces:
            cap += f", where micro_batch_size × {dp} is a multiple of pipeline_microbatches {pieces}"
        into = f"into accumulation_steps={steps}" if steps else "into a number of steps that the pipeline allows"
        return f"gives {share} samples to each of {dp} replicas, which do not split {into}{cap}"

    def _nearest(self, batch: int, nodes: int, dp: int) -> tuple[int, ...]:
        """The nearest batches that fit on this number of nodes."""
        micro, steps = self.micro_batch_size, self.accumulation_steps
        unit = dp * (micro or (1 if self.allow_ragged else steps) or 1)
        at = -(-batch // unit)
        # A batch further away than a few hundred units would not help.
        reach = max(512, 2 * (steps or 0))
        down, up = range(at, max(0, at - reach), -1), range(at, at + reach)
        if micro and steps:
            down = up = range(steps, steps + 1)
        # Ragged: one sample more than k - 1 units needs as many steps as k units.
        less = (k * unit for k in down)
        more = (b for k in up for b in (((k - 1) * unit + 1, k * unit) if self.allow_ragged else (k * unit,)))
        found = (
            next((b for b in less if b < batch and self.fit(b, nodes)), None),
            next((b for b in more if b > batch and self.fit(b, nodes)), None),
        )
        return tuple(b for b in found if b)
