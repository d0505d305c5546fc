"""Torch on fake tensors: shapes without memory. The tracker follows two training steps on them.

The fake device is the CPU: on a build without CUDA, a fake CUDA tensor that requires grad aborts the process. Several
ranks are FSDP2 on a fake process group. `explain` says what fake tensors cannot follow.
"""

from __future__ import annotations

import linecache
import traceback
from collections.abc import Iterator
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
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from batchwright.core.errors import BatchwrightError, PlanError, RunError
from batchwright.processes.endings import is_users, sentence, users_frames
from batchwright.runtime.task import Task, load_task

from .records import CAUSAL_LM, EstimateRequest, Point
from .rules import FourBits, bucket_bytes, four_bits, route_uniformly
from .steps import (
    AUTOCAST,
    Batches,
    blocks,
    checkpoint_blocks,
    divide_gradients,
    make_pure,
    micro_step,
    pure_batch,
    run_steps,
    take_grouped_step,
)
from .tracker import Tracker
from .tracker import __file__ as tracker_file

REFUSED = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)


class ReadsAsOne(TorchDispatchMode):
    """Every value that is read is 1: for optimizers (Adafactor's norms), whose memory does not depend on it."""

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


class FakeRuns:
    """Estimates of one task at one sequence length; each `point` is the peak of two steps at one micro batch size."""

    def __init__(self, request: EstimateRequest, sequence_length: int | None = None) -> None:
        self.request, self.sequence_length = request, sequence_length
        self.args = request.arguments(sequence_length)
        # Real batches and weights (from numpy, from a file) are allowed.
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.task, self.batches = self._load()
        self.rules: tuple[str, ...] = ()
        self.four_bits: FourBits | None = None
        self.optimizer_by_rule = False
        self.model = self._build() if request.ranks == 1 else None
        self.warm = False
        self.differs = False  # the second step of this task is not like its first

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
        return (*((text,) if kinds else ()), *self._other_class(model))

    def _other_class(self, model: nn.Module) -> tuple[str, ...]:
        """If a configuration is of another class than the causal language model that is estimated."""
        named = getattr(getattr(model, "config", None), "architectures", None) or ()
        made = type(model).__name__
        if self.request.task != CAUSAL_LM or not named or self.request.lora or made in named:
            return ()
        return (f"The configuration names {', '.join(named)}; {made}, its causal language model, is estimated.",)

    def point(self, micro_batch_size: int) -> Point:
        """The estimated peak at one size."""
        batch = self.batches.of(micro_batch_size)
        # Sharding changes a model, so each run has its own.
        model = self._build() if self.model is None else self.model
        with self.mode:
            if self.request.ranks > 1:
                self._shard(model)
            tracker = self._follow(model, pure_batch(batch, self.request.precision))
        return self._point(tracker, micro_batch_size)

    def _point(self, tracker: Tracker, micro_batch_size: int) -> Point:
        peak, parts = tracker.peak, dict(tracker.breakdown)
        if self.four_bits is not None:
            saved = -(-self.four_bits.saved_bytes // self.request.ranks)
            parts["parameters"] -= saved
            parts["other"] += self.four_bits.largest_bytes
            peak += self.four_bits.largest_bytes - saved
        if self.model is not None and self.request.replicas > 1:
            parts["buckets"] = bucket_bytes(self.model)
            peak += parts["buckets"]
        by_rule = self.four_bits is not None or self.optimizer_by_rule
        return Point(micro_batch_size, self.sequence_length, peak, parts, "rule" if by_rule else "predicted")

    def _load(self) -> tuple[Task, Batches]:
        # In fake mode a model of any size needs no memory. A task that reads values of its data (`.numpy()`, `.item()`)
        # is loaded again without fake mode: only its model has to be fake.
        try:
            with building(self.mode):
                task = load_task(self.request.task, self.args)
            return task, Batches(task, self.mode, self.request.longest)
        except PlanError:
            raise  # a wrong file, function or argument: the second attempt would fail, too
        except Exception:
            pass
        # Outside of `except`: a traceback of the second attempt does not show the first one.
        task = load_task(self.request.task, self.args)
        return task, Batches(task, self.mode, self.request.longest)

    def _build(self) -> nn.Module:
        task = self.task
        if self.request.ranks > 1 and isinstance(task.model, nn.Module):
            task = self._load()[0]
        try:
            with building(self.mode):
                model = task.build_model(seed=0)
        except REFUSED:  # such as `.item()` on a table of rates: build the model, then replace its tensors
            model = task.build_model(seed=0)
        with building(self.mode):
            _make_fake(model, self.mode)
            make_pure(model, self.request.precision)
            self.rules = route_uniformly(model)
            if self.request.quantize_frozen:
                self.four_bits = four_bits(model)
                if not self.four_bits.layers:
                    raise PlanError(
                        "quantize_frozen: no linear layer is frozen, so none is stored in 4 bits. Freeze the base model, or "
                        "give lora for a model; embeddings and the output head stay as they are.",
                        field="quantize_frozen",
                        given=True,
                        nearest=(False,),
                    )
                self.rules += (self.four_bits.assumption,)
            if self.request.checkpoint_activations:
                checkpoint_blocks(model)
        return model

    def _optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        with ReadsAsOne():  # an 8-bit optimizer reads the values of its code table
            optimizer = self.task.optimizer(model.parameters())
        self.optimizer_by_rule = hasattr(optimizer, "by_rule")
        if self.request.accelerator:
            take_grouped_step(optimizer)
        return optimizer

    def _follow(self, model: nn.Module, batch: Any) -> Tracker:
        """Two steps; from one forward and backward where the second would do the same."""
        if not self.differs:
            tracker = self._once(model, batch)
            if tracker is not None:
                return tracker
            self.differs = True
        return self._twice(model, batch)

    def _twice(self, model: nn.Module, batch: Any) -> Tracker:
        optimizer, tracker = self._optimizer(model), Tracker(self.mode)
        try:
            with tracker.following(model, optimizer, _tensors(batch)):
                run_steps(
                    lambda b: self.task.loss_of(model, b),
                    model,
                    optimizer,
                    batch,
                    precision=self.autocast,
                    accumulation_steps=self.request.accumulation_steps,
                    stepping=lambda: _stepping(tracker, optimizer),
                )
        finally:
            model.zero_grad(set_to_none=True)
        return tracker

    def _once(self, model: nn.Module, batch: Any) -> Tracker | None:
        """One forward and backward, and the optimizer's step twice.

        In the second step the optimizer's state exists already, so each moment of forward and backward holds that much more.
        Gradients of a first micro batch are as large as their parameters. None if that is not the same as two steps: a
        parameter had no gradient, or the first forward left something behind.
        """
        optimizer, tracker = self._optimizer(model), Tracker(self.mode)
        given: dict[nn.Parameter, torch.Tensor] = {}
        if self.request.accumulation_steps > 1:
            given = {p: torch.zeros_like(p) for p in model.parameters() if p.requires_grad}
            for p, gradient in given.items():
                p.grad = gradient
        try:
            with tracker.following(model, optimizer, _tensors(batch)):
                before = dict(tracker.live)
                total = micro_step(lambda b: self.task.loss_of(model, b), batch, self.autocast)
                if any(p.grad is not gradient or not _local(gradient)._version for p, gradient in given.items()):
                    return None
                divide_gradients(model, total)
                peak, parts = tracker.peak, tracker.breakdown
                with _stepping(tracker, optimizer):
                    optimizer.step()
                # Adagrad makes its state in its constructor: it is in `before`.
                state = tracker.live["optimizer"] - before["optimizer"]
                with _stepping(tracker, optimizer):
                    optimizer.step()
                del total
                if any(
                    tracker.live[kind] != before[kind] for kind in ("parameters", "activations", "buffers", "other")
                ):
                    return None
        finally:
            model.zero_grad(set_to_none=True)
        if peak + state > tracker.peak:
            tracker.peak, tracker.breakdown = peak + state, {**parts, "optimizer": parts["optimizer"] + state}
        return tracker

    @property
    def autocast(self) -> str:
        """The precision of autocast; FSDP2 has its own policy instead."""
        return "fp32" if self.request.ranks > 1 else self.request.precision

    def _shard(self, model: nn.Module) -> None:
        _shard(model, self.request.ranks, self.request.precision)
        if not self.warm:
            # Torch runs every operation on shards once on whole fake tensors, to find out what it returns. These must not
            # count, so the operations of a step on shards run here first.
            optimizer = self._optimizer(model)
            if reason := getattr(optimizer, "refuses_shards", None):
                raise PlanError(
                    f"ranks={self.request.ranks}: {reason}.", field="ranks", given=self.request.ranks, nearest=(1,)
                )
            for p in model.parameters():
                p.grad = torch.zeros_like(p) if p.requires_grad else None
            divide_gradients(model, 1)
            with ReadsAsOne():
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            self.warm = True


@contextmanager
def _stepping(tracker: Tracker, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    with tracker.stepping(optimizer), ReadsAsOne():
        yield


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """The shard of a tensor that is sharded."""
    return getattr(tensor, "_local_tensor", tensor)


def _make_fake(model: nn.Module, mode: FakeTensorMode) -> None:
    """Replace real parameters and buffers by fake ones; tied ones stay tied."""
    for module in model.modules():
        for members in (module._parameters, module._buffers):
            for name, tensor in members.items():
                if tensor is not None and not isinstance(tensor, FakeTensor):
                    members[name] = mode.from_tensor(tensor)  # type: ignore[assignment]


def _tensors(batch: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]


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
    if precision in AUTOCAST:
        policy = MixedPrecisionPolicy(param_dtype=AUTOCAST[precision], reduce_dtype=torch.float32)
    try:
        for block in blocks(model):
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
    except ValueError as error:  # such as a ModuleList, which has no forward
        raise PlanError(
            f"ranks={ranks}: FSDP2 cannot shard this model: {str(error).splitlines()[0]}",
            field="ranks",
            given=ranks,
            nearest=(1,),
        ) from None


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
    _without_tracker(error)
    failed = RunError(
        f"the task failed while it was estimated: {sentence(f'{type(error).__name__}: {error}')} If it trains without "
        f"estimate, it does not work with fake tensors; measure instead: batchwright probe {task}",
        field="task",
        given=task,
    )
    failed.__cause__ = error
    return failed


def _without_tracker(error: BaseException) -> None:
    """Remove the tracker's frames: every operation of the user's code passes through them."""
    frame = error.__traceback__
    while frame is not None:
        while frame.tb_next is not None and frame.tb_next.tb_frame.f_code.co_filename == tracker_file:
            frame.tb_next = frame.tb_next.tb_next
        frame = frame.tb_next


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
