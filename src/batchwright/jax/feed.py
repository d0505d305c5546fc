"""Feeds the global order of samples to the devices of a JAX program: each process reads the rows of its own devices.

A data-parallel rank is a place along the mesh axes that split the rows. Ranks and micro batches partition the span of a step
as in the torch loader (`runtime/data/sampler.py`), so the position, one integer, is the whole state: a run goes on with other
numbers of processes and devices, and with another micro batch.

With `loading_hosts`, some processes read for all. Arrays are then made of real rows on the reading processes and of
placeholders on the others, and the devices exchange them: a compiled function drops the placeholders and gives every device
its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from batchwright.core.errors import PlanError, RunError, Violation, either, raise_violations
from batchwright.core.numbers import nearest_multiples
from batchwright.core.ramp.schedule import Schedule, Step
from batchwright.runtime.data.hosts import Hosts, LoadingHosts
from batchwright.runtime.data.order import GlobalOrder, Ints
from batchwright.runtime.data.reading import MapDataset, Reader
from batchwright.runtime.data.sampler import StepSampler, micro_steps, share

ROW_AXES = ("data", "fsdp")
"""Mesh axes that split rows, where nothing else is given."""


@dataclass(frozen=True)
class Rows:
    """What a process has read: for each of its ranks, a tree of numpy arrays."""

    own: list[Any]
    count: int
    """Micro steps."""
    micro: int
    each: int
    """Rows of a rank in one micro step: its own micro batch, or what it reads for all."""


@dataclass(frozen=True)
class StepBatch:
    """One optimizer step. Its rows are read when they are asked for: `batches`, or `micro_batches()`, on all processes."""

    feed: Feed
    plan: Step
    count: int
    """Micro steps of this step."""

    @property
    def ids(self) -> Ints:
        """The samples of this step that this process records in its ledger. Every sample is recorded by one process."""
        span = range(self.plan.start_sample, self.plan.end_sample)
        return self.feed.order.ids([p for rank in self.feed.recorded for p in share(span, rank, self.feed.size)])

    @cached_property
    def rows(self) -> Rows:
        """The rows of this process. A loop that asks for them early reads while the devices compute the step before."""
        return self.feed.read(self.plan, range(self.count))

    @cached_property
    def batches(self) -> Any:
        """All rows as arrays of shape [most, rows, …] for `accumulate`; micro batches from `count` on are zeros."""
        return self.feed.arrays(self.rows, self.feed.most(self.plan))

    def micro_batches(self) -> Iterator[Any]:
        """Arrays of shape [rows, …], one micro batch after another, for `micro_steps`."""
        for index in range(self.count):
            yield _first(self.feed.arrays(self.feed.read(self.plan, range(index, index + 1)), 1))


class Feed:
    """The steps of a schedule from position `start` on, as arrays on a mesh. It is the loop

        for step in steps of schedule from start:
            yield StepBatch(step)        # the rows at its positions, split over the ranks of the mesh

    `micro_batch_size` is per rank: a number, or a function of the step. `collate` makes a batch, a tree of numpy arrays, of a
    list of rows; by default the leaves of the rows are stacked. Shapes must not depend on the rows. `blank` is a row that
    weighs nothing in the loss: it fills batches that `micro_batch_size × ranks` does not divide. Without one, these are refused.
    """

    def __init__(
        self,
        dataset: MapDataset,
        order: GlobalOrder,
        schedule: Schedule,
        micro_batch_size: int | Callable[[Step], int],
        *,
        mesh: Mesh,
        axis: str | Sequence[str] | None = None,
        start: int = 0,
        collate: Callable[[list[Any]], Any] | None = None,
        blank: Any = None,
        loading_hosts: LoadingHosts | None = None,
        read_retries: int = 3,
    ) -> None:
        self.order, self.schedule, self.mesh, self.start = order, schedule, mesh, start
        self.micro_batch_size: Callable[[Step], int] = (
            micro_batch_size if callable(micro_batch_size) else lambda step: micro_batch_size
        )
        self.axes = _row_axes(mesh, axis)
        self.size = prod(mesh.shape[name] for name in self.axes)
        """The number of ranks: the data-parallel size."""
        self.blank = blank
        self.reader = Reader(dataset, order.seed, collate or stack, retries=read_retries)
        ranks, me = _processes(mesh, self.axes, self.size), jax.process_index()
        self.local = tuple(rank for rank, processes in enumerate(ranks) if me in processes)
        """The ranks whose devices are on this process."""
        self.recorded = tuple(rank for rank, processes in enumerate(ranks) if me == min(processes))
        self.reading: tuple[int, ...] | None = None
        """The ranks whose processes read; None: each reads its own rows."""
        self.loading_hosts: int | None = None
        if loading_hosts is not None:
            if collate is not None:
                raise PlanError(
                    "loading_hosts needs rows that are stacked: a custom collate sees the rows of one micro batch, and these "
                    "are read by several processes. Make rows of one shape in the dataset, or let every process read.",
                    field="loading_hosts",
                    given=str(loading_hosts),
                )
            hosts = Hosts.of(jax.process_count(), loading_hosts)
            if len(hosts.reading) < jax.process_count():
                if any(len(processes) > 1 for processes in ranks):
                    raise PlanError(
                        f"loading_hosts={loading_hosts}: rows are split over {', '.join(self.axes)}, and other axes of the mesh "
                        "cross processes, so several processes need the same rows. Give the axes that split rows the outer "
                        "places of the mesh, or let every process read.",
                        field="loading_hosts",
                        given=str(loading_hosts),
                    )
                self.loading_hosts = len(hosts.reading)
                self.reading = tuple(rank for rank, processes in enumerate(ranks) if min(processes) in hosts.reading)
        self._check()

    def __iter__(self) -> Iterator[StepBatch]:
        for plan in self._sampler.steps():
            self.most(plan)
            yield StepBatch(self, plan, micro_steps(plan.global_batch_size, self.size, self.micro_batch_size(plan)))

    def most(self, step: Step) -> int:
        """The micro batches that the arrays of a step have room for: those of the largest step with its micro batch size.

        So a shape changes only where the micro batch size does.
        """
        micro, first = self.micro_batch_size(step), self._first_of(step)
        if self.micro_batch_size(first) != micro:
            raise PlanError(
                f"micro_batch_size is {micro} at step {step.step:,}, and {self.micro_batch_size(first)} at step "
                f"{first.step:,} of the same segment. It may change only where the global batch does: shapes are compiled.",
                field="micro_batch_size",
                given=micro,
                nearest=(self.micro_batch_size(first),),
            )
        return self._most[micro]

    def _first_of(self, step: Step) -> Step:
        """The first step of a step's segment that is fed."""
        first = self.schedule.at_step(self.schedule.segments[step.segment].first_step)
        return first if first.start_sample >= self.start else self.schedule.at_sample(self.start)

    def _check(self) -> None:
        # With a blank row, any batch runs. Without one, what the sampler would refuse is refused here, with this remedy.
        self._sampler = StepSampler(self.schedule, self.micro_batch_size, 0, self.size, self.start, allow_ragged=True)
        self._most: dict[int, int] = {}
        first, total = self._sampler.first_step(), self.schedule.total_steps
        if first is None:
            return
        ahead = [first, *(self.schedule.at_step(s.first_step) for s in self.schedule.segments[first.segment + 1 :])]
        for step in ahead:
            micro = self.micro_batch_size(step)
            batch = self.schedule.segments[step.segment].global_batch_size
            self._most[micro] = max(self._most.get(micro, 0), micro_steps(batch, self.size, micro))
        last = [self.schedule.at_step(total - 1)] if total else []
        if self.blank is None:
            raise_violations(PlanError, [v for step in dict.fromkeys([*ahead, *last]) for v in self._ragged(step)])

    def _ragged(self, step: Step) -> list[Violation]:
        micro, batch = self.micro_batch_size(step), step.global_batch_size
        quantum = micro * self.size
        if batch % quantum == 0:
            return []
        nearest = nearest_multiples(quantum, batch)
        message = (
            f"step {step.step:,} has {batch} samples, which is not a whole number of micro steps: micro_batch_size {micro} × "
            f"{self.size} ranks = {quantum}, and {batch} / {quantum} = {batch / quantum:.2f}. Nearest: {either(nearest)}. Or "
            "give `blank`, a row that weighs nothing in the loss: compiled shapes are fixed, and it fills the batch."
        )
        return [Violation(message, "blank", batch, nearest)]

    def read(self, plan: Step, indices: range) -> Rows:
        """Read what this process holds of some micro steps of a step."""
        micro = self.micro_batch_size(plan)
        if self.reading is None:
            own = [
                stacked([self._batch(plan, rank, index, micro) for index in indices], lambda i: f"micro batch {i}")
                for rank in self.local
            ]
            return Rows(own, len(indices), micro, micro)
        each = -(-micro * self.size // len(self.reading))
        return Rows([self._read_for_all(plan, rank, indices, each) for rank in self.local], len(indices), micro, each)

    def arrays(self, rows: Rows, most: int) -> Any:
        """Rows as arrays of shape [most, rows, …] on the mesh."""
        count, micro, each = rows.count, rows.micro, rows.each
        if self.reading is None:

            def place(*leaves: Any) -> jax.Array:  # [count, micro, …] of every local rank
                shape = leaves[0].shape[2:]
                data = np.zeros((most, len(leaves), micro, *shape), _dtype(leaves[0]))
                data[:count] = np.stack(leaves, axis=1)
                data = data.reshape(most, len(leaves) * micro, *shape)
                return self._array(P(None, self.axes), data, (most, self.size * micro, *shape))

            return jax.tree.map(place, *rows.own)

        def place_for_all(*leaves: Any) -> jax.Array:  # [count × each, …] of every local rank
            shape = leaves[0].shape[1:]
            data = np.zeros((len(leaves), most, each, *shape), _dtype(leaves[0]))
            data[:, :count] = np.stack(leaves).reshape(len(leaves), count, each, *shape)
            return self._array(P(self.axes), data, (self.size, most, each, *shape))

        return self._exchange(jax.tree.map(place_for_all, *rows.own), micro * self.size)

    def _own(self, plan: Step, rank: int, index: int, micro: int) -> range:
        """The positions of a rank in a micro step; none, if its share has ended."""
        own = share(range(plan.start_sample, plan.end_sample), rank, self.size)
        return own[index * micro : (index + 1) * micro]

    def _batch(self, plan: Step, rank: int, index: int, micro: int) -> Any:
        """One rank's micro batch, filled up with blanks."""
        positions = self._own(plan, rank, index, micro)
        ids = self.order.ids(positions)
        with self.reader.own_generators():
            rows = self.reader.rows(positions, ids.tolist()) if len(ids) else []
            rows += [self.blank] * (micro - len(rows))
            if self.reader.collate is stack:
                return stacked(rows, lambda i: self._named(positions[i] if i < len(positions) else None))
            return self.reader.collated(rows, positions or range(plan.start_sample, plan.start_sample + 1), ids)

    def _named(self, position: int | None) -> str:
        if position is None:
            return "the blank row"
        return self.reader.named([position], self.order.ids([position]).tolist())

    def _read_for_all(self, plan: Step, rank: int, indices: range, each: int) -> Any:
        """What one rank holds before the exchange: `each` rows of every micro step, or placeholders if it does not read.

        The rows of a micro step are numbered: rows of rank 0, of rank 1, and so on. Readers read them in equal parts.
        """
        assert self.reading is not None
        if rank not in self.reading:
            return stack([self._example] * (len(indices) * each))
        micro, place = self.micro_batch_size(plan), self.reading.index(rank)
        positions: list[int | None] = []
        for index in indices:
            for number in range(place * each, (place + 1) * each):
                owner, row = divmod(number, micro)
                own = self._own(plan, owner, index, micro) if owner < self.size else range(0)
                positions.append(own[row] if row < len(own) else None)
        real = [position for position in positions if position is not None]
        with self.reader.own_generators():
            found = iter(self.reader.rows(real, self.order.ids(real).tolist()) if real else ())
            rows = [self._example if position is None else next(found) for position in positions]
        return stacked(rows, lambda i: self._named(positions[i]))

    @cached_property
    def _example(self) -> Any:
        """A row that is not trained: the blank one, or the first of the dataset, for its shape."""
        return self.reader.dataset[0] if self.blank is None else self.blank

    @cached_property
    def _exchange(self) -> Callable[[Any, int], Any]:
        """Drop the placeholders, and give every rank its rows."""
        reading = np.array(self.reading)

        def exchange(blocks: Any, rows: int) -> Any:
            def one(block: jax.Array) -> jax.Array:
                real = block[reading].swapaxes(0, 1)  # [most, reader, rows of the reader, …]
                return real.reshape(real.shape[0], -1, *real.shape[3:])[:, :rows]

            return jax.tree.map(one, blocks)

        return jax.jit(exchange, static_argnums=1, out_shardings=NamedSharding(self.mesh, P(None, self.axes)))

    def _array(self, spec: P, data: Any, shape: tuple[int, ...]) -> jax.Array:
        return jax.make_array_from_process_local_data(NamedSharding(self.mesh, spec), data, shape)


def stack(rows: list[Any]) -> Any:
    """Rows of one shape as one batch: their leaves stacked.

    >>> stack([{"x": 1.0}, {"x": 2.0}])
    {'x': array([1., 2.])}
    """
    return jax.tree.map(lambda *leaves: np.stack([np.asarray(leaf) for leaf in leaves]), *rows)


def stacked(rows: list[Any], name: Callable[[int], str]) -> Any:
    """Stack rows; if one of them has another shape than the first, the error names both."""
    try:
        return stack(rows)
    except (ValueError, TypeError):
        shapes = [jax.tree.map(np.shape, row) for row in rows]
        odd = next((i for i, shape in enumerate(shapes) if shape != shapes[0]), None)
        if odd is None:
            raise
        raise RunError(
            f"{name(odd)} has the shape {shapes[odd]}, and {name(0)} has {shapes[0]}. Compiled shapes are fixed: give all rows "
            "one shape in the dataset (pad them), or all batches one shape in JaxTask.collate.",
            field="dataset",
            given=str(shapes[odd]),
        ) from None


@jax.jit
def _first(arrays: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf[0], arrays)


def _dtype(leaf: Any) -> Any:
    return jax.dtypes.canonicalize_dtype(leaf.dtype)


def _row_axes(mesh: Mesh, axis: str | Sequence[str] | None) -> tuple[str, ...]:
    given = tuple(name for name in ROW_AXES if name in mesh.shape) if axis is None else axis
    axes = (given,) if isinstance(given, str) else tuple(given)
    if not axes or not set(axes) <= set(mesh.axis_names):
        known = ", ".join(f"{name} ({size})" for name, size in mesh.shape.items())
        raise PlanError(
            f"axis={axis!r} does not name the axes of the mesh that split rows. Its axes: {known}.",
            field="axis",
            given=str(axis),
            nearest=tuple(mesh.axis_names),
        )
    return axes


def _processes(mesh: Mesh, axes: tuple[str, ...], size: int) -> list[set[int]]:
    """For every rank, the processes that have a device of it: several, if other axes cross processes."""
    found: list[set[int]] = [set() for _ in range(size)]
    for device, (index,) in NamedSharding(mesh, P(axes)).devices_indices_map((size,)).items():
        for rank in range(size)[index]:
            found[rank].add(device.process_index)
    return found
