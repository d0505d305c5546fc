"""Follows the memory of fake tensors: a storage counts from the operation that creates it until it dies.

An operation visits its own results only, so the cost grows with the number of operations, not with that times the number of
live tensors. Torch's own trackers are the oracle in the tests.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.optim import Optimizer
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    is_traceable_wrapper_subclass,
    is_traceable_wrapper_subclass_type,
)

KINDS = ("parameters", "gradients", "optimizer", "activations", "buffers", "other")
_PLAIN = {Tensor, FakeTensor, nn.Parameter, nn.Buffer}
_DEVICE = torch.ops.prim.device.default


class Held(weakref.ref[torch.UntypedStorage]):
    """A storage that counts: its address, its bytes, and the part that they belong to."""

    __slots__ = ("address", "kind", "size")
    address: int
    kind: str
    size: int


class Tracker(TorchDispatchMode):
    """Bytes of live fake tensors by part: now (`live`), and at the `peak` (`breakdown`).

    What an operation creates is an activation, or the optimizer's inside of `stepping`. Parameters, buffers, gradients and
    the batch are known by name. Temporary memory of the backward counts as activations: it also grows with the batch.

    >>> mode = FakeTensorMode()
    >>> with mode:
    ...     layer, batch = nn.Linear(4, 4), torch.ones(8, 4)
    ...     tracker = Tracker(mode)
    ...     with tracker.following(layer, batch=[batch]):
    ...         layer(batch).sum().backward()
    >>> tracker.live["parameters"], tracker.live["gradients"], tracker.live["activations"], tracker.live["other"]
    (80, 80, 0, 128)
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self.mode = mode
        self.live = {kind: 0 for kind in KINDS}
        self.total = self.peak = 0
        self.breakdown = dict(self.live)
        self.visits = 0  # storages that were looked at: the cost
        self._created = "activations"  # the part of what operations create now
        self._held: dict[int, Held] = {}
        self._collectives: dict[Any, tuple[tuple[int, str], ...]] = {}

    @contextmanager
    def following(
        self, model: nn.Module, optimizer: Optimizer | None = None, batch: Iterable[Tensor] = ()
    ) -> Iterator[None]:
        """Count what exists, then every operation inside."""
        for tensor in batch:
            self._hold(tensor, "other")
        for parameter in model.parameters():
            self._hold(parameter, "parameters")
            if parameter.grad is not None:
                self._hold(parameter.grad, "gradients")
        for buffer in model.buffers():
            self._hold(buffer, "buffers")
        if optimizer is not None:
            self._hold_state(optimizer)
        self._mark()
        with ExitStack() as stack:
            stack.enter_context(self._resizes())
            for parameter in model.parameters():
                if parameter.requires_grad:
                    self._label_gradient(parameter, stack)
            self._label_shards(model, stack)
            stack.enter_context(self)
            yield

    @contextmanager
    def stepping(self, optimizer: Optimizer) -> Iterator[None]:
        """What operations create inside belongs to the optimizer."""
        self._created = "optimizer"
        try:
            yield
            self._hold_state(optimizer)
        finally:
            self._created = "activations"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # `tensor.device` comes here twice as often as all operations
        if not _PLAIN.issuperset(types) and any(is_traceable_wrapper_subclass_type(t) for t in types):
            return NotImplemented  # its own operations, on the tensors inside, come here afterwards
        result = func(*args, **kwargs or {})
        if isinstance(result, Tensor):
            self._hold(result)
        elif isinstance(result, (tuple, list)):
            self._hold_all(result)
        for position, kind in self._collectives.get(func, ()):
            self._hold(args[position], kind)
        self._mark()
        return result

    def _hold_all(self, results: Iterable[Any]) -> None:
        for result in results:
            if isinstance(result, Tensor):
                self._hold(result)
            elif isinstance(result, (tuple, list)):
                self._hold_all(result)

    def _hold(self, tensor: Tensor, kind: str | None = None) -> None:
        """Count a tensor's storage if it does not count yet; with `kind`, it belongs to that part from now on."""
        if isinstance(tensor, FakeTensor):
            # A tensor of another fake mode is not of this step.
            if tensor.fake_mode is self.mode:
                self._count(tensor.untyped_storage(), kind)
        elif is_traceable_wrapper_subclass(tensor):
            for name in tensor.__tensor_flatten__()[0]:
                self._hold(getattr(tensor, name), kind)

    def _hold_state(self, optimizer: Optimizer) -> None:
        for state in optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    self._hold(value, "optimizer")

    def _count(self, storage: torch.UntypedStorage, kind: str | None = None) -> None:
        self.visits += 1
        address, size = storage._cdata, storage.nbytes()
        held = self._held.get(address)
        if held is None:
            held = self._held[address] = Held(storage, self._forget)
            held.address, held.kind, held.size = address, kind or self._created, 0
        elif kind is not None and kind != held.kind:
            self.live[held.kind] -= held.size
            self.live[kind] += held.size
            held.kind = kind
        if size != held.size:
            self.live[held.kind] += size - held.size
            self.total += size - held.size
            held.size = size

    def _forget(self, held: Held) -> None:
        del self._held[held.address]
        self.live[held.kind] -= held.size
        self.total -= held.size

    def _mark(self) -> None:
        if self.total > self.peak:
            self.peak, self.breakdown = self.total, dict(self.live)

    @contextmanager
    def _resizes(self) -> Iterator[None]:
        """FSDP2 frees and allocates its gathered parameters by `UntypedStorage.resize_`, which is not an operation."""
        original = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            original(storage, size)
            if storage._cdata in self._held:
                self._count(storage)
            return storage

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign]
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = original  # type: ignore[method-assign]

    def _label_gradient(self, parameter: Tensor, stack: ExitStack) -> None:
        def arrives(gradient: Tensor) -> None:
            self._hold(gradient, "gradients")

        def accumulated(parameter: Tensor) -> None:
            if parameter.grad is not None:
                self._hold(parameter.grad, "gradients")

        # Before and after it is added: the sum may be a new tensor.
        stack.callback(parameter.register_hook(arrives).remove)
        stack.callback(parameter.register_post_accumulate_grad_hook(accumulated).remove)

    def _label_shards(self, model: nn.Module, stack: ExitStack) -> None:
        """FSDP2: gathered parameters are parameters, reduced gradients are gradients, buffers of collectives are other."""
        if not torch.distributed.is_available() or not torch.distributed.is_initialized():
            return
        from torch.distributed.fsdp import FSDPModule

        c10d = torch.ops.c10d
        self._collectives = {
            c10d._allgather_base_.default: ((0, "other"),),
            c10d._reduce_scatter_base_.default: ((0, "gradients"), (1, "other")),
        }
        known: dict[int, Tensor] = {}

        def gathered(module: nn.Module, _: Any) -> None:
            for parameter in module.parameters():
                self._hold(parameter, "parameters")
                if parameter.requires_grad and isinstance(parameter, FakeTensor) and id(parameter) not in known:
                    known[id(parameter)] = parameter
                    self._label_gradient(parameter, stack)

        for module in model.modules():
            if isinstance(module, FSDPModule):
                stack.callback(module.register_forward_pre_hook(gathered).remove)
