"""The steps that are estimated and, in a trial, really run: one code for both, so that they hold the same tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from batchwright.core.errors import PlanError
from batchwright.runtime.task import Task

# Fake and real alike: the second step has the optimizer's state, and no later one needs more.
STEPS = 2


def run_steps(
    task: Task,
    loss: Callable[[Any], tuple[Any, Any, Any]],
    model: nn.Module,
    optimizer: Optimizer,
    batch: Any,
    *,
    precision: str,
    accumulation_steps: int,
    before_forward: Callable[[], None] = lambda: None,
    stepping: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> None:
    """Two optimizer steps as the runtime takes them: sums of losses, divided once, gradients dropped afterwards."""
    for _ in range(STEPS):
        total: Any = 0
        for _ in range(min(accumulation_steps, 2)):  # from the second micro step on, gradients live through the forward
            before_forward()
            with torch.autocast("cpu", torch.bfloat16) if precision == "bf16" else nullcontext():
                loss_sum, weight, auxiliary = loss(batch)
            objective = loss_sum if auxiliary is None else loss_sum + weight * auxiliary
            objective.backward()
            total = total + (weight.detach() if isinstance(weight, torch.Tensor) else weight)
            del loss_sum, objective, auxiliary, weight
        for p in model.parameters():
            if p.grad is not None:
                p.grad.div_(total)
        with stepping():
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def take_grouped_step(optimizer: Optimizer) -> None:
    """Let the optimizer update all parameters at once, which torch prefers on devices; it costs a copy of them."""
    for group in optimizer.param_groups:
        if group.get("foreach", False) is None and not group.get("fused"):
            group["foreach"] = True


def blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a model: members of one list that share a class and hold parameters; none inside another.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.ModuleList(nn.Sequential(nn.Linear(2, 2)) for _ in range(3)))
    >>> len(blocks(model))
    3
    """
    return list(_blocks(model))


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    children = list(module.children())
    kinds = [type(c) for c in children]
    for child in children:
        repeated = isinstance(module, (nn.ModuleList, nn.Sequential)) and kinds.count(type(child)) > 1
        # A Linear or a LayerNorm is a layer, not a block: nothing inside it to drop and compute again.
        if repeated and next(child.children(), None) is not None and next(child.parameters(), None) is not None:
            yield child
        else:
            yield from _blocks(child)


def checkpoint_blocks(model: nn.Module) -> None:
    """Wrap every block so that its activations are computed again in the backward."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    chosen = {id(block) for block in blocks(model)}
    if not chosen:
        raise PlanError(
            f"checkpoint_activations finds no repeated blocks in {type(model).__name__}: it looks for members of a "
            "ModuleList or Sequential that share a class and have layers inside. Checkpoint inside the model instead "
            "(torch.utils.checkpoint): the estimate follows that as it is.",
            field="checkpoint_activations",
            given=True,
            nearest=(False,),
        )
    apply_activation_checkpointing(model, check_fn=lambda module: id(module) in chosen)
