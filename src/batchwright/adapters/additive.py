"""Does a loss add up? The mean loss of a micro batch, compared with those of its halves, recombined by their weights.

A loss that is a weighted mean over samples passes at any split. One with in-batch negatives, or a sum where a mean is
expected, does not: no scaling of micro batches gives the gradient of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]

from batchwright.core.errors import RunError
from batchwright.runtime.check.switches import Deterministic, freeze_statistics, without_dropout

# How far apart the two may be, relative to the loss: rounding, measured at 1e-7 (fp32) and 3e-3 (bf16) on tiny models. A
# loss over pairs differs by the logarithm of two.
FP32, HALF = 1e-3, 5e-2
# The same for gradients, which lose more to rounding.
GRADIENTS = {FP32: 1e-2, HALF: 0.2}
_FEW = 8  # parameters whose gradients are compared


def labels_that_count(shifted: bool) -> Callable[[Any], torch.Tensor]:
    """The default weight: labels that are not -100; those of a causal language model without the first of each row.

    >>> labels_that_count(shifted=True)({"labels": torch.tensor([[5, -100, 7], [5, 6, -100]])})
    tensor(2)
    """

    def weight(batch: Any) -> torch.Tensor:
        labels = batch.get("shift_labels") if hasattr(batch, "get") else None
        if labels is None:
            labels = batch.get("labels") if hasattr(batch, "get") else None
            if not torch.is_tensor(labels):
                raise RunError(
                    "the batch has no tensor `labels`, so the weight of a micro batch is unknown. Pass weight=, a function "
                    'of the batch: what its loss is a mean over, such as weight=lambda batch: len(batch["input_ids"]).',
                    field="weight",
                )
            labels = labels[..., 1:] if shifted else labels
        return (labels != -100).sum()  # a tensor: its value cannot be read where memory is estimated

    return weight


def warn_of_batch_statistics(model: nn.Module, warn: Callable[[str], Any]) -> None:
    """Name what no test of the loss can refuse: layers that normalise over the micro batch, whatever the weight."""
    names = [name for name, module in model.named_modules() if isinstance(module, _BatchNorm) and module.training]
    if names:
        warn(
            f"{len(names)} BatchNorm layer(s), such as {names[0]!r}, normalise over the micro batch, so the gradient depends "
            "on the split. Everything else is exact. LayerNorm or GroupNorm do not depend on it, nor does a BatchNorm in "
            "eval mode.",
        )


@contextmanager
def without_draws(model: nn.Module) -> Generator[None]:
    """Run the model in training mode, but without dropout, other random draws and gradients."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    modes = {module: module.training for module in model.modules()}
    recurrent = {module: module.dropout for module in model.modules() if isinstance(module, nn.RNNBase)}
    model.train()
    without_dropout(model)
    freeze_statistics(model)
    try:
        with torch.no_grad(), Deterministic(random=True, statistics=True, device=device):
            yield
    finally:
        for module, training in modes.items():
            module.training = training
        for module, dropout in recurrent.items():
            module.dropout = dropout


def difference(loss: Callable[[Any], float], weight: Callable[[Any], Any], whole: Any, parts: Sequence[Any]) -> float:
    """How far the mean of the parts' losses, by weight, is from the loss of the whole, relative to it.

    >>> mean = lambda rows: sum(rows) / len(rows)
    >>> difference(mean, len, [1.0, 2.0, 6.0], ([1.0], [2.0, 6.0])), difference(sum, len, [1.0, 1.0], ([1.0], [1.0]))
    (0.0, 0.5)
    """
    # Every part is run, also one without weight: other ranks wait for its collectives.
    losses, weights = [loss(part) for part in parts], [float(weight(part)) for part in parts]
    full = loss(whole)
    joined = sum(x * w for x, w in zip(losses, weights, strict=True) if w) / (sum(weights) or 1.0)
    return abs(joined - full) / abs(full) if full else abs(joined)


def gradient_difference(
    model: nn.Module,
    loss: Callable[[Any], torch.Tensor],
    weight: Callable[[Any], Any],
    whole: Any,
    parts: Sequence[Any],
) -> float:
    """How far the gradient of the parts, by weight, is from that of the whole, relative to it, for the smallest parameters.

    It also sees a wrong weight on a new model, where the losses of all samples are nearly equal. Call it within
    `without_draws`, and without synchronisation. The gradients of the model must be None, and are None afterwards.
    """
    chosen: list[nn.Parameter] = []

    def gradient(data: Any) -> torch.Tensor:
        with torch.enable_grad():
            loss(data).backward()
        if not chosen:
            used = [p for p in model.parameters() if p.grad is not None and bool(p.grad.count_nonzero())]
            chosen.extend(sorted(used, key=torch.numel)[:_FEW])  # not all: their copies might not fit
        # One norm for all of them: some gradients are zero but for rounding, such as that of a key's bias in attention.
        found = [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in chosen]
        model.zero_grad(set_to_none=True)
        return torch.cat([one.to("cpu", torch.float64) for one in found]) if found else torch.zeros(1)

    # Every part is run, also one without weight: other ranks wait for its collectives.
    full, own, weights = gradient(whole), [gradient(part) for part in parts], [float(weight(part)) for part in parts]
    joined = sum((g * w for g, w in zip(own, weights, strict=True) if w), torch.zeros_like(full)) / (
        sum(weights) or 1.0
    )
    return float((joined - full).norm() / full.norm()) if full.norm() else float(joined.norm())


def refuse(found: float, tolerance: float, gradient: float = 0.0) -> None:
    """Raise if a loss does not add up, or its gradient."""
    if not (found <= tolerance and gradient <= GRADIENTS[tolerance]):
        raise RunError(
            f"the loss does not add up: for one micro batch it is {found:.2%} away from that of its two halves, recombined by "
            f"weight, and its gradient {gradient:.2%}. No split can give the gradient of the whole batch. "
            "It must be a mean over what weight= counts; a loss "
            "with in-batch negatives is not. If it is a sum, divide it by its weight. additive=False skips this test.",
            field="loss",
            given=found,
        )
