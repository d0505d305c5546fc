"""Micro batches from any loader: what the step needs of one, and `windows`, which gives it to ordinary batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from batchwright.core.errors import PlanError, RunError
from batchwright.core.ramp.schedule import Step


class MicroBatch(Protocol):
    """What the step needs of a micro batch: the loader's `Micro` has it, and so has a `Window`."""

    @property
    def data(self) -> Any: ...
    @property
    def step(self) -> Step: ...
    @property
    def index(self) -> int: ...
    @property
    def count(self) -> int: ...
    @property
    def ids(self) -> Any: ...
    @property
    def filler(self) -> bool: ...


@dataclass(frozen=True)
class Window:
    """A batch of any loader as micro batch `index` of `count`; `ids` numbers the samples of that loader."""

    data: Any
    step: Step
    index: int
    count: int
    ids: range
    filler: bool = False


def windows(
    loader: Iterable[Any],
    accumulation_steps: int,
    *,
    first_step: int = 0,
    start_sample: int = 0,
    first_index: int = 0,
    data_parallel_size: int = 1,
    samples: Callable[[Any], int] | None = None,
) -> Iterator[Window]:
    """Group the batches of any loader: every `accumulation_steps` batches are the micro batches of one step.

    The last step may be partial: the accumulator's `partial` option decides what happens to it. To complete a carried
    step, pass `first_index=accumulator.pending`. `samples` counts a batch; the default is the length of its first tensor.

    >>> [(m.step.step, m.index, len(m.ids)) for m in windows(["ab", "cd", "e"], 2, samples=len)]
    [(0, 0, 2), (0, 1, 2), (1, 0, 1)]
    """
    if not 0 <= first_index < accumulation_steps:
        raise PlanError(
            f"first_index={first_index} is not a micro step: with accumulation_steps={accumulation_steps} it is 0 to "
            f"{accumulation_steps - 1}.",
            field="first_index",
            given=first_index,
            nearest=(0,),
        )
    count, index, position = samples or leading_size, first_index, start_sample
    step: Step | None = None
    for batch in loader:
        size = count(batch)
        if step is None:
            declared = size * (accumulation_steps - index) * data_parallel_size
            step = Step(first_step, position, declared, 0)
        yield Window(batch, step, index, accumulation_steps, range(position, position + size))
        position, index = position + size * data_parallel_size, index + 1
        if index == accumulation_steps:
            step, index, first_step = None, 0, first_step + 1


def leading_size(batch: Any) -> int:
    """Count the samples in a batch: the length of the first object in it that has a shape.

    >>> import torch
    >>> leading_size({"tokens": torch.zeros(4, 128), "mask": torch.zeros(4, 128)})
    4
    """
    if getattr(batch, "shape", ()):
        return int(batch.shape[0])
    members: Iterable[Any] = ()
    if isinstance(batch, Mapping):
        members = cast("Mapping[Any, Any]", batch).values()
    elif isinstance(batch, Sequence) and not isinstance(batch, str):
        members = cast("Sequence[Any]", batch)
    for member in members:
        return leading_size(member)
    raise RunError(
        f"cannot count the samples in a batch of type {type(cast(object, batch)).__name__}: it has no shape. Pass samples=, "
        "a function that counts them.",
        field="samples",
    )


class Feed:
    """An iterator over micro batches that can look one ahead.

    >>> import torch
    >>> feed = Feed(windows([torch.ones(1), torch.ones(1)], 1))
    >>> feed.continues(feed.take().step)  # the second batch is a step of its own
    False
    """

    def __init__(self, micros: Iterable[MicroBatch]) -> None:
        self._micros = iter(micros)
        self._next: MicroBatch | None = None

    def peek(self) -> MicroBatch | None:
        """Return the next micro batch without taking it; None at the end."""
        if self._next is None:
            self._next = next(self._micros, None)
        return self._next

    def continues(self, plan: Step) -> bool:
        """Whether the next micro batch belongs to the same step."""
        following = self.peek()
        # The same object unless a worker sent it: comparing fields would be half of a micro step's cost here.
        return following is not None and (following.step is plan or following.step == plan)

    def take(self) -> MicroBatch:
        """Take the next micro batch."""
        micro, self._next = self.peek(), None
        if micro is None:
            raise RunError("the micro batches ended in the middle of a step.")
        return micro
