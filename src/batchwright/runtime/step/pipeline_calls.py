"""How a pipeline calls a task's loss, as it is: on the first stage up to its call of the model, on the last stage after it.

What a loss draws at random is seeded by the run's seed, the step and the sample, because two processes call it.
"""

# pyright: reportUnknownMemberType=false
# torch's annotations are incomplete.

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from batchwright.core.errors import RunError
from batchwright.runtime.data.windows import MicroBatch
from batchwright.runtime.device import to_device
from batchwright.runtime.state import generators

Loss = Callable[[nn.Module, Any], tuple[Any, ...]]
# What may enter a pipeline beside tensors.
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


class _Asked(BaseException):
    """Ends a loss at its call of the model. Not an `Exception`: a loss may catch those."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.call = (args, kwargs)


class _Input(nn.Module):
    """Stands for the model on the first stage."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(torch.is_autocast_enabled(kind) for kind in {"cpu", *(tensor.device.type for tensor in tensors)}):
            raise RunError(
                "the loss calls the model under torch.autocast, which does not reach the stages of a pipeline: they run later, "
                "and on other ranks. Enter autocast in the model's own forward.",
                field="loss",
            )
        raise _Asked(args, kwargs)


class Output(nn.Module):
    """Stands for the model on the last stage: its result is the output of the pipeline."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self._result: Any = [output]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self._result:
            raise RunError(
                "the loss calls the model twice for one micro batch: a pipeline passes each microbatch through its "
                "stages once. Compute everything in one call.",
                field="loss",
            )
        return self._result.pop()


def called(loss: Loss, model: nn.Module, micro: MicroBatch, device: torch.device, seed: int) -> tuple[Any, ...]:
    """What a loss returns for a micro batch. What it draws (a mask of tokens) is the same in both processes that call it, but
    another one in the next epoch, and in a run with another seed."""
    with generators.draws_of_loss(seed, micro.step.step, int(micro.ids[0]), device):
        return loss(model, to_device(micro.data, device))


def asked_of(
    loss: Loss, micro: MicroBatch, device: torch.device, *, training: bool = True, seed: int = 0
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with which a loss calls the model."""
    try:
        called(loss, _Input().train(training), micro, device, seed)
    except _Asked as asked:
        return asked.call
    raise RunError(
        "the loss did not call the model, so nothing enters the pipeline: it must call model(…) once.", field="loss"
    )


def shape(value: Any) -> Any:
    """What must be equal in all microbatches: the shape and the type of a tensor, or a plain value."""
    return (tuple(value.shape), str(value.dtype)) if isinstance(value, Tensor) else repr(value)


def unfit(asked: Sequence[tuple[list[tuple[Any, Any]], Any]]) -> str:
    """Why torch's pipeline cannot take these calls of the model, one for each microbatch; "" if it can."""
    count = f"the {len(asked)} microbatches of a step"
    if any(spec != asked[0][1] for _, spec in asked):
        return (
            f"the loss passes different numbers or names of arguments to the model in {count}. Pass the same in each."
        )
    for column in zip(*(named for named, _ in asked), strict=True):
        (_, first), values = column[0], [value for _, value in column]
        name = _argument(column[0][0])
        if isinstance(first, Tensor):
            shapes = sorted({str(shape(value)[0]) for value in values if isinstance(value, Tensor)})
            if first.dim() == 0:
                return (
                    f"{name} of the model is a tensor of 0 dimensions. A tensor that enters a pipeline has one row for each "
                    "sample: pass a number, or one row for each sample."
                )
            if len({shape(value) for value in values}) > 1:
                return (
                    f"{name} of the model has different shapes or types in {count} ({', '.join(shapes[:3])}), and torch's "
                    "pipeline sends tensors of one shape. Pad all samples to one length, and let global_batch_size be a "
                    "multiple of micro_batch_size × data-parallel ranks in every step."
                )
        elif not isinstance(first, _PLAIN):
            return (
                f"{name} of the model is of type {type(first).__name__}. A pipeline takes tensors with one row for each sample, "
                "and plain values that are equal in all microbatches: numbers, text, None."
            )
        elif any(type(value) is not type(first) or value != first for value in values):
            other = next(value for value in values if type(value) is not type(first) or value != first)
            return (
                f"{name} of the model differs in {count} ({first!r:.40}, {other!r:.40}). What is not a tensor must be equal in "
                "all of them: pass a tensor with one row for each sample."
            )
    return ""


def _argument(path: Sequence[Any]) -> str:
    """The name of an argument of a call (args, kwargs), from its path in that pair.

    >>> from torch.utils._pytree import tree_flatten_with_path
    >>> [_argument(path) for path, _ in tree_flatten_with_path(((1, [2]), {"scale": 3}))[0]]
    ['argument 0', 'argument 1[0]', 'argument scale']
    """
    return f"argument {getattr(path[1], 'idx', getattr(path[1], 'key', ''))}{''.join(map(str, path[2:]))}"
