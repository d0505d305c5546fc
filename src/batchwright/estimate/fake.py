"""Torch on fake tensors: shapes without memory. Torch's memory tracker follows two training steps on them.

The fake device is the CPU: on a build without CUDA, a fake CUDA tensor that requires grad aborts the process. Several
ranks are FSDP2 on a fake process group. `explain` says what fake tensors cannot follow.
"""

from __future__ import annotations

import linecache
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from batchwright.core.errors import BatchwrightError, PlanError, RunError
from batchwright.processes.endings import is_users, sentence, users_frames
from batchwright.runtime.task import Task, load_task

from .records import EstimateRequest, Point
from .steps import Batches, blocks, checkpoint_blocks, run_steps, take_grouped_step

# The trackers' categories in our terms. `Temp`, in the backward, are gradients of activations: they are counted as
# activations, since they also grow with the batch.
CATEGORIES = {
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
    """Every value that is read is 1: for optimizers' steps (Adafactor's norms), whose memory does not depend on it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and getattr(args[0], "constant", None) is None:
            return 1.0 if args[0].is_floating_point() else 1
        return func(*args, **kwargs or {})


@contextmanager
def building(mode: FakeTensorMode) -> Iterator[None]:
    """Fake mode in which `module.to(...)`, `.half()` and the like work.

    torch converts a fake parameter by `swap_tensors`, which refuses a tensor with a weak reference; fake mode keeps one
    for every parameter. Here fake tensors are swapped without that check; tied ones stay tied.
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
    """A replacement for the handle of a hook."""

    def remove(self) -> None: ...


class FakeRuns:
    """Estimates of one task at one sequence length; each `point` is two fake steps at one micro batch size."""

    def __init__(self, request: EstimateRequest, sequence_length: int | None = None) -> None:
        self.request, self.sequence_length = request, sequence_length
        self.args = request.arguments(sequence_length)
        # Real batches and weights (from numpy, from a file) are allowed.
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.task, self.batches = self._load()
        self.model = self._build() if request.ranks == 1 else None
        self.warm = False

    @property
    def notes(self) -> tuple[str, ...]:
        """Memory of this model that fake tensors do not show."""
        model = self._build() if self.model is None else self.model
        kinds = sorted({type(m).__name__ for m in model.modules() if isinstance(m, nn.RNNBase)})
        # Measured: a two-layer LSTM took 4.6 times its estimated bytes per sample on CPU.
        text = (
            f"{', '.join(kinds)}: recurrent kernels need workspaces that fake tensors do not show, several times the "
            "estimate. Compare with --calibrate, or probe."
        )
        return (text,) if kinds else ()

    def point(self, micro_batch_size: int) -> Point:
        """The estimated peak at one size."""
        batch = self.batches.of(micro_batch_size)
        if self.model is not None:
            with self.mode:
                peak = self._plain(self.model, batch)
        else:
            # Sharding changes a model, so each run has its own. The result of the first run is not used: torch then runs
            # every operation once on whole fake tensors to find out how it acts on shards, and these would count.
            if not self.warm:
                self._sharded(self._build(), batch)
                self.warm = True
            peak = self._sharded(self._build(), batch)
        return _point(peak, micro_batch_size, self.sequence_length)

    def _load(self) -> tuple[Task, Batches]:
        # In fake mode a model of any size needs no memory. A task that reads values of its data (`.numpy()`, `.item()`)
        # is loaded again without fake mode: only its model has to be fake.
        try:
            with building(self.mode):
                task = load_task(self.request.task, self.args)
            return task, Batches(task, self.mode)
        except PlanError:
            raise  # a wrong file, function or argument: the second attempt would fail, too
        except Exception:
            pass
        # Outside of `except`: a traceback of the second attempt does not show the first one.
        task = load_task(self.request.task, self.args)
        return task, Batches(task, self.mode)

    def _build(self) -> nn.Module:
        task = self.task
        if self.request.ranks > 1 and isinstance(task.model, nn.Module):
            task = self._load()[0]
        try:
            with building(self.mode):
                model = task.build_model(seed=0)
        except REFUSED:  # such as `.item()` on a table of rates: build the model, then replace its tensors
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
        from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker

        with self.mode:
            _shard(model, self.request.ranks, self.request.precision)
            optimizer = self._optimizer(model)
            tracker = FSDPMemTracker(model, optimizer)
            tracker.track_inputs(tuple(_tensors(batch)))  # the batch counts as well
            with tracker:
                self._steps(lambda b: self.task.loss_of(model, b), model, optimizer, batch, tracker)
            return _snapshot(tracker)

    def _steps(self, loss: Any, model: nn.Module, optimizer: Any, batch: Any, tracker: MemTracker) -> None:
        sharded = self.request.ranks > 1
        run_steps(
            loss,
            model,
            optimizer,
            batch,
            precision="fp32" if sharded else self.request.precision,  # FSDP2 has its own policy for bf16
            accumulation_steps=self.request.accumulation_steps,
            before_forward=tracker.reset_mod_stats,
            stepping=ReadsAsOne,
        )


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
    """The peak by category, over all devices (there is only the CPU)."""
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
            breakdown[CATEGORIES[name]] += size
    return Point(micro_batch_size, sequence_length, peak["Total"], breakdown)


def _shard(model: nn.Module, ranks: int, precision: str) -> None:
    """Shard every repeated block and then the rest, as FSDP2 recommends, over ranks that do not exist."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    with unset_fake_temporarily():  # a mesh contains a real tensor
        if not dist.is_initialized():
            dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
        mesh = init_device_mesh("cpu", (ranks,))
    policy = MixedPrecisionPolicy()
    if precision == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in blocks(model):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def destroy_fake_group() -> None:
    """Destroy the fake process group, if there is one."""
    if dist.is_initialized() and dist.get_backend() == "fake":
        dist.destroy_process_group()


# What a fake tensor raises where torch has no class for it: numpy(), range(tensor), an f-string.
_TEXTS = ("tensor subclasses", "FakeTensor", "only integer tensors of a single element", "fake tensor")
_READS = (
    "it reads a tensor's value (int(tensor), .item(), .tolist(), .numpy(), `if tensor:`), and a fake tensor has none"
)
_SHAPES = "the shape of its result depends on the data (y[mask], nonzero, unique), and a fake tensor has no data"


def explain(error: Exception, task: str) -> BatchwrightError:
    """The error to report: an operation that fake tensors cannot follow, or the user's code. Errors of ours are raised."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, REFUSED) or any(text in str(found) for text in _TEXTS):
            return _refusal(found, task)
        found = found.__cause__
    if users_frames(error) is None:
        raise error
    failed = RunError(
        f"the task failed while it was estimated: {sentence(f'{type(error).__name__}: {error}')} If it trains without "
        f"estimate, it does not work with fake tensors; measure instead: batchwright probe {task}",
        field="task",
        given=task,
    )
    failed.__cause__ = error
    return failed


def _refusal(error: BaseException, task: str) -> PlanError:
    name = str(error).splitlines()[0] if isinstance(error, REFUSED) else f"{type(error).__name__}: {error}"
    shape = isinstance(error, DynamicOutputShapeException)
    unsupported = isinstance(error, UnsupportedOperatorException)
    reason = "torch has no fake version of it" if unsupported else _SHAPES if shape else _READS
    return PlanError(
        f"estimate cannot follow {_line(error)} ({name}): {reason}. Measure instead: batchwright probe {task}",
        field="task",
        given=task,
        nearest=(f"batchwright probe {task}",),
    )


def _line(error: BaseException) -> str:
    """The innermost line of the user's code."""
    every = traceback.extract_tb(error.__traceback__)
    frames = [f for f in every if is_users(f.filename)] or [f for f in every if not _is_machinery(f.filename)]
    if not frames:
        return "a step of this task"
    last = frames[-1]
    code = linecache.getline(last.filename, last.lineno or 0).strip()
    return f"{Path(last.filename).name}:{last.lineno}: `{code}`"


def _is_machinery(filename: str) -> bool:
    ours = str(Path(__file__).resolve().parents[1])
    return any(part in filename for part in (ours, "_subclasses", "_python_dispatch", "_ops.py", "_tools"))
