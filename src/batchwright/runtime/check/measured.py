"""What `check` measures, whatever the framework: gradients as vectors, the variants of a task, and who measures them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Gradient = dict[str, Any]
"""Parameter name -> gradient in fp64, a torch tensor on the CPU or a numpy array; parameters without one are omitted."""


@dataclass(frozen=True)
class Variant:
    """The parts of a task that are on while its gradient is measured; the default is the task as it trains."""

    random: bool = True  # dropout and other random draws
    statistics: bool = True  # BatchNorm normalises over its micro batch
    auxiliary: bool = True
    exact: bool = False  # everything in fp64, also under autocast and where the user's code casts


@dataclass(frozen=True)
class Piece:
    """Some samples as one micro batch: the weight, and the gradients of the loss sum and of the auxiliary mean."""

    loss: Gradient
    weight: float
    auxiliary: Gradient | None


class Measures(Protocol):
    """One task and one global batch of one framework."""

    size: int
    seed: int
    kinds: set[str]
    """The types of the parameters, such as float32."""
    framework: str

    def reference(self, variant: Variant, seed: int | None = None) -> Gradient:
        """The gradient of the whole batch in one piece."""
        ...

    def split(self, variant: Variant, micro_batch_size: int) -> Gradient:
        """The gradient that reaches the optimizer if the batch is run in micro batches."""
        ...

    def piece(self, variant: Variant, rows: Sequence[Any]) -> Piece:
        """The weight of some samples, and the gradient of each part of their loss."""
        ...

    def uses_statistics(self, variant: Variant) -> bool:
        """Whether a forward of the whole batch uses batch statistics."""
        ...

    def keeps_state(self, variant: Variant) -> float:
        """The relative change of the gradient if the same model runs the same batch a second time."""
        ...

    def collate_draws(self, variant: Variant) -> bool:
        """Whether collating the same rows twice gives different tensors."""
        ...

    def shapes(self, rows: Sequence[Any]) -> tuple[Any, ...]:
        """The shapes of the arrays of a batch of these rows, without the number of rows."""
        ...

    @property
    def rows(self) -> list[Any]:
        """The samples of the batch, as the dataset returns them."""
        ...


def norm(gradient: Gradient) -> float:
    """The norm over all parameters.

    >>> import numpy as np
    >>> norm({"a": np.array([3.0]), "b": np.array([4.0])})
    5.0
    """
    return math.sqrt(sum(float((g * g).sum()) for g in gradient.values()))


def combine(*terms: tuple[float, Gradient]) -> Gradient:
    """The weighted sum of gradients.

    >>> import numpy as np
    >>> combine((2.0, {"a": np.array([3.0])}), (-1.0, {"b": np.array([4.0])}))
    {'a': array([6.]), 'b': array([-4.])}
    """
    total: Gradient = {}
    for factor, gradient in terms:
        for name, g in gradient.items():
            total[name] = total[name] + factor * g if name in total else factor * g
    return total


def dot(first: Gradient, second: Gradient) -> float:
    """The inner product over all parameters."""
    return sum(float((g * second[name]).sum()) for name, g in first.items() if name in second)


def relative_error(gradient: Gradient, reference: Gradient) -> float:
    """||g - r|| / ||r|| over all parameters.

    >>> import numpy as np
    >>> relative_error({"a": np.array([3.0])}, {"a": np.array([2.0])})
    0.5
    """
    return norm(combine((1.0, gradient), (-1.0, reference))) / norm(reference)


def group_errors(gradient: Gradient, reference: Gradient, total: float | None = None) -> dict[str, float]:
    """||g - r|| of each module's own parameters, divided by the norm of the whole reference; largest first."""
    total, squares = total or norm(reference), dict[str, float]()
    for name, g in combine((1.0, gradient), (-1.0, reference)).items():
        module = name.rpartition(".")[0] or name
        squares[module] = squares.get(module, 0.0) + float((g * g).sum())
    return {m: math.sqrt(s) / total for m, s in sorted(squares.items(), key=lambda item: -item[1])}
