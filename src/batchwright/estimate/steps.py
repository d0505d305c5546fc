"""The steps that are estimated and, in a trial, really run, and their batches: one code for both, so that they hold the
same tensors."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.optim import Optimizer
from torch.utils._pytree import register_pytree_node, tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from batchwright.core.errors import PlanError, RunError
from batchwright.processes.memory import status_bytes
from batchwright.runtime.containers import elements, members, own
from batchwright.runtime.task import Task, load_task

from .records import EstimateRequest

# The optimizer's state exists in the second step, and no later step needs more.
STEPS = 2
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
PURE = {"bf16-pure": torch.bfloat16, "fp16-pure": torch.float16}
_PLAIN = (torch.Tensor, str, bytes, range)  # no containers of a batch
# Enough samples to include a long one in most data, few enough to read at once.
FIRST = 8


def run_steps(
    loss: Callable[[Any], tuple[Any, Any, Any]],
    model: nn.Module,
    optimizer: Optimizer,
    batch: Any,
    *,
    precision: str,
    accumulation_steps: int,
    stepping: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> None:
    """Two optimizer steps as in the runtime: sums of losses, divided once, gradients dropped afterwards."""
    for _ in range(STEPS):
        total: Any = 0
        # From the second micro step on, gradients exist during the forward: two are enough.
        for _ in range(min(accumulation_steps, 2)):
            total = total + micro_step(loss, batch, precision)
        divide_gradients(model, total)
        with stepping():
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def micro_step(loss: Callable[[Any], tuple[Any, Any, Any]], batch: Any, precision: str) -> Any:
    """Forward and backward of one micro batch; its weight."""
    with torch.autocast("cpu", AUTOCAST[precision]) if precision in AUTOCAST else nullcontext():
        loss_sum, weight, auxiliary = loss(batch)
    objective = loss_sum if auxiliary is None else loss_sum + weight * auxiliary
    objective.backward()
    return weight.detach() if isinstance(weight, torch.Tensor) else weight


def make_pure(model: nn.Module, precision: str) -> None:
    """Convert the model if the precision is a pure one: parameters, gradients and the optimizer's state have its dtype."""
    if precision in PURE:
        model.to(PURE[precision])


def pure_batch(batch: Any, precision: str) -> Any:
    """The batch in the model's dtype if the precision is a pure one; indices stay integers."""
    if precision not in PURE:
        return batch
    return tree_map_only(torch.Tensor, lambda t: t.to(PURE[precision]) if t.is_floating_point() else t, batch)


def divide_gradients(model: nn.Module, weight: Any) -> None:
    """The gradient of a sum becomes that of a mean."""
    for p in model.parameters():
        if p.grad is not None:
            p.grad.div_(weight)


def take_grouped_step(optimizer: Optimizer) -> None:
    """Let the optimizer update all parameters at once, as torch does on devices; it needs a copy of them."""
    for group in optimizer.param_groups:
        if group.get("foreach", False) is None and not group.get("fused"):
            group["foreach"] = True


def blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a model: members of one list with the same class and with parameters; no block is inside another.

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
        # A Linear or a LayerNorm is a layer, not a block: it has no inner activations to compute again.
        if repeated and next(child.children(), None) is not None and next(child.parameters(), None) is not None:
            yield child
        else:
            yield from _blocks(child)


def checkpoint_blocks(model: nn.Module) -> None:
    """Wrap every block, so that the backward computes its activations again."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    chosen = {id(block) for block in blocks(model)}
    if not chosen:
        raise PlanError(
            f"checkpoint_activations finds no repeated blocks in {type(model).__name__}: it looks for members of a "
            "ModuleList or Sequential that share a class and contain layers. Use torch.utils.checkpoint inside the model "
            "instead: the estimate follows it.",
            field="checkpoint_activations",
            given=True,
            nearest=(False,),
        )
    apply_activation_checkpointing(model, check_fn=lambda module: id(module) in chosen)


def largest_sample(task: Task, longest: bool = False) -> int | None:
    """The index of the largest of the dataset's first samples, or of all; None if the task has an example batch."""
    if task.example_batch is not None:
        return None
    if len(task.dataset) < 1:
        raise RunError("Task.dataset is empty: a sample is needed for the shape of a batch.", field="dataset")
    count = len(task.dataset) if longest else min(FIRST, len(task.dataset))
    return max(range(count), key=lambda i: elements(task.dataset[i]))


def collated(task: Task, size: int, index: int | None) -> Any:
    """A batch as in training: the task's example, or the sample with this index, repeated."""
    if task.example_batch is not None:
        return seen_through(task.example_batch(size))
    sample = task.dataset[index]
    return seen_through((task.collate or torch.utils.data.default_collate)([own(sample) for _ in range(size)]))


@dataclass(frozen=True)
class _Container:
    """A container without its parts, for torch's pytree: two are equal if their parts have the same places."""

    places: tuple[Any, ...]
    first: Any = field(compare=False, repr=False)


def seen_through(batch: Any) -> Any:
    """The batch; torch's pytree now knows its containers, also a dataclass or the `BatchEncoding` of transformers."""

    def taken_apart(value: Any) -> tuple[list[Any], _Container]:
        parts, _ = members(value)
        return list(parts.values()), _Container(tuple(parts), value)

    def rebuilt(parts: Iterable[Any], container: _Container) -> Any:
        _, rebuild = members(container.first)
        assert rebuild is not None
        return rebuild(container.first, dict(zip(container.places, parts, strict=True)))

    while unknown := {type(leaf) for leaf in tree_leaves(batch) if not isinstance(leaf, _PLAIN) and members(leaf)[1]}:
        for kind in unknown:
            register_pytree_node(kind, taken_apart, rebuilt)
    return batch


class Batches:
    """Fake batches of any size for a task, made from two small ones: dimensions that differ count samples."""

    def __init__(self, task: Task, mode: FakeTensorMode, longest: bool = False) -> None:
        self.task, self.mode, self.index = task, mode, largest_sample(task, longest)
        two, self.spec = tree_flatten(collated(task, 2, self.index))
        three, spec = tree_flatten(collated(task, 3, self.index))
        shapes = [_shape(a, b) for a, b in zip(two, three, strict=False)]
        self.leaves = two
        # None: a part of the batch is not a tensor, or grows in another way. Then every batch is collated.
        self.shapes = shapes if spec == self.spec and len(two) == len(three) and None not in shapes else None

    def of(self, size: int) -> Any:
        """A fake batch of `size` samples."""
        if self.shapes is None:
            return tree_map_only(torch.Tensor, self._fake, collated(self.task, size, self.index))
        leaves: list[Any] = []
        with self.mode:
            for leaf, shape in zip(self.leaves, self.shapes, strict=True):
                if isinstance(leaf, torch.Tensor):
                    dims = [constant + per_sample * size for constant, per_sample in shape or ()]
                    leaves.append(torch.empty(dims, dtype=leaf.dtype))
                else:
                    leaves.append(leaf)
        return tree_unflatten(leaves, self.spec)

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if isinstance(tensor, FakeTensor) else self.mode.from_tensor(tensor)


def _shape(two: Any, three: Any) -> list[tuple[int, int]] | None:
    """Each dimension as (constant, per sample), from batches of two and of three; None if it is not of that form."""
    if not isinstance(two, torch.Tensor):
        same = type(two) is type(three) and isinstance(two, (int, float, str, bool, type(None))) and two == three
        return [] if same else None
    if not isinstance(three, torch.Tensor) or two.dim() != three.dim() or two.dtype != three.dtype:
        return None
    dims: list[tuple[int, int]] = []
    for a, b in zip(two.shape, three.shape, strict=True):
        if a == b:
            dims.append((int(a), 0))
        elif a * 3 == b * 2:
            dims.append((0, int(a) // 2))
        else:
            return None
    return dims


def measure(request: EstimateRequest) -> int:
    """Run two steps at the request's only size: peak resident bytes above those of the process after its imports."""
    torch.set_num_threads(1)  # every thread has its own scratch memory
    args = request.arguments(next(iter(request.sequence_lengths), None))
    # Libraries that the task's functions import (transformers takes 150 MiB) are no tensors: a first model, whose tensors
    # take no memory, imports them. What it raises is raised again below if it is an error of the task.
    with suppress(Exception), torch.device("meta"):
        load_task(request.task, args).build_model(seed=0)
    gc.collect()
    before = status_bytes("VmRSS")
    task = load_task(request.task, args)
    model = task.build_model(seed=0)
    make_pure(model, request.precision)
    if request.checkpoint_activations:
        checkpoint_blocks(model)
    optimizer = task.optimizer(model.parameters())
    batch = pure_batch(collated(task, request.micro_batch_sizes[0], largest_sample(task)), request.precision)
    run_steps(
        lambda b: task.loss_of(model, b),
        model,
        optimizer,
        batch,
        precision=request.precision,
        accumulation_steps=request.accumulation_steps,
    )
    return status_bytes("VmHWM") - before
