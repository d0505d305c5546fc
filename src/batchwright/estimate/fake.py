"""Torch on fake tensors: shapes without memory, followed through two training steps by torch's own memory tracker.

The fake device is the CPU: on a build without CUDA, a fake CUDA tensor that requires grad aborts the process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from batchwright.core.errors import PlanError
from batchwright.runtime.task import Task, load_task

from .batches import Batches
from .records import Point, Request
from .steps import checkpoint_blocks, run_steps, take_grouped_step

# The trackers' categories in our words. What the backward holds for a moment is activations' gradients: counted with
# activations, since it too grows with the batch.
WORDS = {
    "Parameter": "parameters",
    "Buffer": "buffers",
    "Gradient": "gradients",
    "Activation": "activations",
    "Temp": "activations",
    "Optstate": "optimizer",
    "Other": "other",
    "Sharded Param": "parameters",
    "Unsharded Param": "parameters",
    "Sharded Grad": "gradients",
    "Unsharded Grad": "gradients",
    "All Gather": "other",
    "Reduce Scatter": "other",
    "OptState": "optimizer",
    "Inputs": "other",
}
REFUSED = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)
KINDS = ("parameters", "gradients", "optimizer", "activations", "buffers", "other")


class Whole(nn.Module):
    """Model and loss as one module, so that a loss may call the model several times."""

    def __init__(self, task: Task, model: nn.Module) -> None:
        super().__init__()
        self.model, self.task = model, task

    def forward(self, batch: Any) -> tuple[Any, Any, Any]:
        return self.task.loss_of(self.model, batch)


class ReadsAsOne(TorchDispatchMode):
    """Reading a value gives one. For optimizers' steps (Adafactor's norms): what they hold does not depend on it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and getattr(args[0], "constant", None) is None:
            return 1.0 if args[0].is_floating_point() else 1
        return func(*args, **kwargs or {})


@contextmanager
def building(mode: FakeTensorMode) -> Iterator[None]:
    """Fake tensors that `module.to(...)`, `.half()` and the like convert in place.

    torch converts a fake parameter by `swap_tensors`, which refuses one that a weak reference points to; its own fake mode
    keeps such a reference for every parameter. Here fake tensors are swapped without that check; tied ones stay tied.
    """
    checked = torch.utils.swap_tensors

    def swap(old: torch.Tensor, new: torch.Tensor) -> None:
        if isinstance(old, FakeTensor) and isinstance(new, FakeTensor):
            old.__dict__, new.__dict__ = new.__dict__, old.__dict__  # pyright: ignore
            torch._C._swap_tensor_impl(old, new)  # pyright: ignore
        else:
            checked(old, new)

    torch.utils.swap_tensors = swap
    try:
        with mode:
            yield
    finally:
        torch.utils.swap_tensors = checked


class NoHandle:
    """Stands where the tracker would put a hook's handle."""

    def remove(self) -> None: ...


class FakeRuns:
    """Estimates of one task at one sequence length; each `point` is two fake steps at one micro batch size."""

    def __init__(self, request: Request, sequence_length: int | None = None) -> None:
        self.request, self.sequence_length = request, sequence_length
        self.args = dict(request.args) | ({} if sequence_length is None else {"sequence_length": sequence_length})
        # Batches or weights that the task made really (from numpy, from a file) are taken as they are.
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.task, self.batches = self._load()
        self.model = self._build() if request.ranks == 1 else None
        self.warm = False

    @property
    def notes(self) -> tuple[str, ...]:
        """What this model has that fake tensors do not show."""
        model = self._build() if self.model is None else self.model
        kinds = sorted({type(m).__name__ for m in model.modules() if isinstance(m, nn.RNNBase)})
        # Measured: a two-layer LSTM took 4.6 times its estimated bytes per sample on CPU.
        text = (
            f"{', '.join(kinds)}: recurrent kernels keep workspaces that fake tensors do not show, several times what is "
            "estimated. Compare with --calibrate, or probe."
        )
        return (text,) if kinds else ()

    def point(self, micro_batch_size: int) -> Point:
        """The estimated peak at one size."""
        batch = self.batches.of(micro_batch_size)
        if self.model is not None:
            with self.mode:
                peak = self._plain(self.model, batch)
        else:
            # Sharding changes a model for good, so each run has its own. The first of all is not looked at: it works out
            # (and then remembers) how operations act on shards by running them on whole fake tensors, which would count.
            if not self.warm:
                self._sharded(self._build(), batch)
                self.warm = True
            peak = self._sharded(self._build(), batch)
        return _point(peak, micro_batch_size, self.sequence_length)

    def _load(self) -> tuple[Task, Batches]:
        # In fake mode a model of any size costs nothing. A task whose data are read by value there (`.numpy()`,
        # `.item()` on its own tensors) is loaded again for real: only its model has to be fake.
        try:
            with building(self.mode):
                task = load_task(self.request.task, self.args)
            return task, Batches(task, self.mode)
        except PlanError:
            raise  # no such file, function or argument: the same the second time
        except Exception:
            task = load_task(self.request.task, self.args)
            return task, Batches(task, self.mode)

    def _build(self) -> nn.Module:
        task = self.task
        if self.request.ranks > 1 and isinstance(task.model, nn.Module):
            task = self._load()[0]
        try:
            with building(self.mode):
                model = task.build_model(seed=0)
        except REFUSED:  # `.item()` on a table of rates, say: the model is built really, then made fake
            model = task.build_model(seed=0)
        with self.mode:
            _make_fake(model, self.mode)
            if self.request.checkpoint_activations:
                checkpoint_blocks(model)
        return model

    def _optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        optimizer = self.task.optimizer(model.parameters())
        if self.request.accelerator:
            take_grouped_step(optimizer)
        return optimizer

    def _plain(self, model: nn.Module, batch: Any) -> Mapping[str, int]:
        optimizer = self._optimizer(model)
        tracker = MemTracker()
        tracker.track_external(model, optimizer, *_tensors(batch))
        for p in model.parameters():
            if not p.requires_grad:  # the tracker hooks every parameter, and a frozen one takes no hook
                tracker._param_to_grad_hook_handles[p] = (NoHandle(), NoHandle())  # type: ignore[assignment]
        try:
            with tracker:
                self._steps(Whole(self.task, model), model, optimizer, batch, tracker)
            return _snapshot(tracker)
        finally:
            model.zero_grad(set_to_none=True)

    def _sharded(self, model: nn.Module, batch: Any) -> Mapping[str, int]:
        from .sharded import shard, tracked

        with self.mode:
            shard(model, self.request.ranks, self.request.precision)
            optimizer = self._optimizer(model)
            tracker = tracked(model, optimizer, _tensors(batch))
            with tracker:
                self._steps(lambda b: self.task.loss_of(model, b), model, optimizer, batch, tracker)
            return _snapshot(tracker)

    def _steps(self, loss: Any, model: nn.Module, optimizer: Any, batch: Any, tracker: MemTracker) -> None:
        sharded = self.request.ranks > 1
        run_steps(
            self.task, loss, model, optimizer, batch,
            precision="fp32" if sharded else self.request.precision,  # FSDP2 has a policy of its own for bf16
            accumulation_steps=self.request.accumulation_steps,
            before_forward=tracker.reset_mod_stats,
            stepping=ReadsAsOne,
        )  # fmt: skip


def _make_fake(model: nn.Module, mode: FakeTensorMode) -> None:
    """Replace real parameters and buffers by fake ones; tied ones stay tied."""
    made: dict[int, Any] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            copy = mode.from_tensor(tensor.detach())
            made[id(tensor)] = nn.Parameter(copy, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copy
        return made[id(tensor)]

    for module in model.modules():
        for members in (module._parameters, module._buffers):
            for name, tensor in members.items():
                if tensor is not None and not isinstance(tensor.data, FakeTensor):
                    members[name] = fake(tensor)  # type: ignore[assignment]


def _tensors(batch: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]


def _snapshot(tracker: MemTracker) -> Mapping[str, int]:
    """The peak by category, over all devices (there is one: the CPU that stands in)."""
    peak: dict[str, int] = {}
    for kinds in tracker.get_tracker_snapshot("peak").values():
        for kind, size in kinds.items():
            name = str(getattr(kind, "value", kind))
            peak[name] = peak.get(name, 0) + int(size)
    return peak


def _point(peak: Mapping[str, int], micro_batch_size: int, sequence_length: int | None) -> Point:
    breakdown: dict[str, int] = {kind: 0 for kind in KINDS}
    for name, size in peak.items():
        if name != "Total":
            breakdown[WORDS[name]] += size
    return Point(micro_batch_size, sequence_length, peak["Total"], breakdown)
