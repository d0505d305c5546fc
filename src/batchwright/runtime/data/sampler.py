"""Cuts a step's span of positions into shares for the data-parallel ranks, and a share into micro batches.

Ranks and micro batches only *partition* the span `[start_sample, end_sample)`; the gradient of the step does not depend
on which rank trains which sample. Shares are contiguous and in rank order (one host reads neighbouring positions), and
the first `B % ranks` shares are one sample longer. Micro batches are contiguous, full ones first: a ramp adds micro
steps before it changes the shape of a micro batch, so torch.compile stays valid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from batchwright.core.batch.loading import share as share
from batchwright.core.errors import PlanError, ScheduleError, Violation, raise_violations
from batchwright.core.numbers import nearest_multiples
from batchwright.core.ramp.schedule import Schedule, Step


@dataclass(frozen=True)
class Slice:
    """The positions of one micro batch: micro step `index` of `count`, which is the same on all ranks."""

    step: Step
    index: int
    count: int
    positions: range
    """Absolute positions in the global order."""
    filler: bool = False
    """This rank has no sample left and repeats one, so that collectives match; its weight is zero, it is not counted."""

    @property
    def samples(self) -> int:
        """Samples that are counted: 0 in a filler."""
        return 0 if self.filler else len(self.positions)


def micro_steps(samples: int, ranks: int, micro_batch_size: int) -> int:
    """Micro steps of a step on every rank: those of the longest share, `⌈⌈samples / ranks⌉ / micro_batch_size⌉`.

    >>> micro_steps(10, ranks=4, micro_batch_size=2)
    2
    """
    return -(-samples // (ranks * micro_batch_size))


def slices(step: Step, rank: int, ranks: int, micro_batch_size: int) -> Iterator[Slice]:
    """One rank's micro batches of one step; fillers if its share ends before the longest one.

    >>> step = Step(step=0, start_sample=0, global_batch_size=5, segment=0)
    >>> [(s.positions, s.filler) for s in slices(step, rank=0, ranks=2, micro_batch_size=2)]
    [(range(0, 2), False), (range(2, 3), False)]
    >>> [(s.positions, s.filler) for s in slices(step, rank=1, ranks=2, micro_batch_size=2)]
    [(range(3, 5), False), (range(4, 5), True)]
    """
    span = range(step.start_sample, step.end_sample)
    own = share(span, rank, ranks)
    count = micro_steps(len(span), ranks, micro_batch_size)
    for index in range(count):
        positions = own[index * micro_batch_size : (index + 1) * micro_batch_size]
        # A filler repeats the sample that this rank read last, if any: it is in the host's cache.
        yield Slice(step, index, count, positions or own[-1:] or span[:1], filler=not positions)


@dataclass(frozen=True)
class StepSampler:
    """This rank's micro batches, for every step of a schedule from position `start` on.

        for step in steps of schedule from start:
            yield from slices(step, rank, ranks, micro_batch_size)

    `start` is the whole data state of a run: the first position that is not trained yet. It does not
    matter how the positions before it were split. Each iteration begins at `start`; the training loop advances it.

    >>> from batchwright.core.ramp.rules import Linear
    >>> schedule = Linear(start=4, increment=4, samples=8, target=8).compile().until(24)
    >>> [s.positions for s in StepSampler(schedule, micro_batch_size=2, rank=1, ranks=2, start=4)]
    [range(6, 8), range(12, 14), range(14, 16), range(20, 22), range(22, 24)]
    """

    schedule: Schedule
    micro_batch_size: int | Callable[[Step], int]
    """Samples per forward/backward: a number, or a function of the step (its `segment` is the stage)."""
    rank: int = 0
    """Data-parallel rank: `rank, ranks = data_parallel(mesh, "dp")`."""
    ranks: int = 1
    """Data-parallel size."""
    start: int = 0
    allow_ragged: bool = False
    """Run batches that `micro_batch_size × ranks` does not divide, exactly, with short micro batches and fillers."""

    def __post_init__(self) -> None:
        if self.ranks < 1 or not 0 <= self.rank < self.ranks:
            last = max(self.ranks, 1) - 1
            raise PlanError(
                f"rank={self.rank}: must be 0 to {last}, since ranks={self.ranks}. "
                f"Nearest: {min(max(self.rank, 0), last)} of {last + 1}.",
                field="rank",
                given=self.rank,
                nearest=[min(max(self.rank, 0), last)],
            )
        first = self.first_step()
        if first is not None:
            ahead = [first, *(self.schedule.at_step(s.first_step) for s in self.schedule.segments[first.segment + 1 :])]
            raise_violations(PlanError, [v for step in ahead for v in self._violations(step)])

    def __iter__(self) -> Iterator[Slice]:
        for step in self.steps():
            raise_violations(PlanError, self._violations(step))
            yield from slices(step, self.rank, self.ranks, self.micro(step))

    def steps(self) -> Iterator[Step]:
        """The steps from `start` to the end of the schedule, or without end."""
        step, total = self.first_step(), self.schedule.total_steps
        while step is not None:
            yield step
            step = self.schedule.at_step(step.step + 1) if total is None or step.step + 1 < total else None

    def first_step(self) -> Step | None:
        """The step that begins at `start`, or None at the end of the schedule."""
        if self.start == self.schedule.total_samples:
            return None
        step = self.schedule.at_sample(self.start)
        if step.start_sample != self.start:
            raise ScheduleError(
                f"start={self.start:,} is inside a step: step {step.step:,} has positions {step.start_sample:,} to "
                f"{step.end_sample:,}, and a step cannot be trained in part. Nearest: {step.start_sample:,} (before it) or "
                f"{step.end_sample:,} (after it).",
                field="start",
                given=self.start,
                nearest=[step.start_sample, step.end_sample],
            )
        return step

    def share(self, step: Step) -> range:
        """All positions of `step` that this rank trains."""
        return share(range(step.start_sample, step.end_sample), self.rank, self.ranks)

    def micro(self, step: Step) -> int:
        """Samples per forward/backward in a step."""
        return self.micro_batch_size(step) if callable(self.micro_batch_size) else self.micro_batch_size

    def _violations(self, step: Step) -> list[Violation]:
        micro, batch = self.micro(step), step.global_batch_size
        if micro < 1:
            what = f"micro_batch_size={micro} at step {step.step:,}: must be at least 1. Nearest: 1."
            return [Violation(what, "micro_batch_size", micro, (1,))]
        quantum = micro * self.ranks
        # The schedule's own `until` shortens its last step on purpose: that step may be ragged.
        shortened = batch < self.schedule.segments[step.segment].global_batch_size
        if self.allow_ragged or shortened or batch % quantum == 0:
            return []
        nearest = nearest_multiples(quantum, batch)
        return [
            Violation(
                f"global_batch_size={batch} of step {step.step:,} is not a whole number of accumulation steps: "
                f"micro_batch_size {micro} × {self.ranks} ranks = {quantum}, and {batch} / {quantum} = "
                f"{batch / quantum:.2f}. Nearest: {' or '.join(f'{n} ({n // quantum})' for n in nearest)}; or "
                "allow_ragged=True, which runs it exactly with short micro batches.",
                "global_batch_size",
                batch,
                nearest,
            )
        ]
