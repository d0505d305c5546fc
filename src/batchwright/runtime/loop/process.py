"""The process a loop runs in: its rank and device, the model wrapped for it, and the signals that ask it to stop."""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from batchwright.core.errors import PlanError
from batchwright.runtime.device import choose, collectives_for, use
from batchwright.runtime.ranks import check_rendezvous, discover

from .settings import Strategy

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
# torch's annotations of its collectives are incomplete.
collectives = cast(Any, dist)


@dataclass(frozen=True)
class ThisProcess:
    """The rank of this process, the number of ranks, its device, and gloo groups for everything but gradients."""

    rank: int
    ranks: int
    device: torch.device
    control: dist.ProcessGroup | None
    bare: bool
    """No launcher started this process, so its caller sees its exit code."""
    saving: dist.ProcessGroup | None = None
    """A gloo group for checkpoints only: a thread may save while every step uses `control`."""

    def broadcast(self, value: Any) -> Any:
        """The value of rank 0, on all ranks."""
        if self.control is None:
            return value
        box = [value]
        collectives.broadcast_object_list(box, src=0, group=self.control)
        return box[0]

    def maximum(self, value: int) -> int:
        """The largest number of all ranks; every rank waits for all others."""
        return self.maxima(value)[0]

    def maxima(self, *values: int) -> list[int]:
        """The largest of each of several numbers, of all ranks; every rank waits for all others."""
        return self._reduced(values, dist.ReduceOp.MAX)

    def total(self, value: int) -> int:
        """The sum of the numbers of all ranks; every rank waits for all others."""
        return self._reduced((value,), dist.ReduceOp.SUM)[0]

    def _reduced(self, values: tuple[int, ...], how: Any) -> list[int]:
        if self.control is None:
            return list(values)
        tensor = torch.tensor(values)
        collectives.all_reduce(tensor, how, group=self.control)
        return cast("list[int]", cast(Any, tensor).tolist())


@contextmanager
def joined(device: str, strategy: Strategy) -> Generator[ThisProcess]:
    """Join the process group that torchrun or srun describes, or use the existing one; leave it after success.

    After an error, a group of several ranks stays: with NCCL, destroying it waits for ranks that are blocked in a
    collective, so that a failing rank would never exit.
    """
    ranks = discover()
    place = choose(device, ranks)
    use(place)
    ours = not dist.is_initialized()
    several = ranks.size if ours else dist.get_world_size()
    if strategy == "none" and several > 1:
        raise PlanError(
            f"strategy='none' does not train on {several} ranks: their gradients would not be summed. Nearest: 'ddp', "
            "'fsdp2'.",
            field="strategy",
            given="none",
            nearest=("ddp", "fsdp2"),
        )
    if ours and ranks.size > 1:
        check_rendezvous(ranks)
        dist.init_process_group(**collectives_for(place, ranks.size), rank=ranks.rank, world_size=ranks.size)
    elif ours and strategy == "fsdp2":  # FSDP2 needs a mesh, so a group, on one rank too
        dist.init_process_group(collectives_for(place)["backend"], store=HashStore(), rank=0, world_size=1)
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    groups: list[dist.ProcessGroup] = [collectives.new_group(backend="gloo") for _ in range(2 if size > 1 else 0)]
    control, saving = groups or (None, None)
    succeeded = False
    try:
        yield ThisProcess(rank, size, place, control, ranks.local_size is None and size == 1, saving)
        succeeded = True
    finally:
        if succeeded or size == 1:
            for group in groups:
                dist.destroy_process_group(group)
            if ours and dist.is_initialized():
                dist.destroy_process_group()


def wrapped(
    model: nn.Module, strategy: Strategy, process: ThisProcess, reduce_dtype: torch.dtype | None = None
) -> nn.Module:
    """The model on its device with the weights of rank 0, in DDP or FSDP2; `reduce_dtype`: FSDP2 sums gradients in it."""
    if strategy == "fsdp2":
        return _sharded(model, process, MixedPrecisionPolicy(reduce_dtype=reduce_dtype))
    model = model.to(process.device)
    if strategy == "none" or process.ranks == 1:
        return model
    # DDP itself sends the weights of rank 0 to all ranks.
    return _with_fixed_buckets(
        DistributedDataParallel(model, device_ids=[process.device] if process.device.type != "cpu" else None)
    )


def _sharded(model: nn.Module, process: ThisProcess, policy: MixedPrecisionPolicy) -> nn.Module:
    """The model in FSDP2, which moves one part after the other to the device and keeps this rank's shard of it. Then each
    parameter is filled from rank 0, one at a time; parameters outside of module lists are whole on a device for a moment."""
    whole = [parameter.detach() for parameter in model.parameters()]  # in the host's memory
    mesh = init_device_mesh(process.device.type, (process.ranks,))
    for part in _repeated(model):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    model = cast(nn.Module, fully_shard(model, mesh=mesh, mp_policy=policy))
    if process.ranks > 1:
        with torch.no_grad():
            for parameter, values in zip(model.parameters(), whole, strict=True):
                shard = cast(Any, parameter)
                filled: Any = distribute_tensor(values.to(process.device), mesh, shard.placements)
                shard.to_local().copy_(filled.to_local())
            for buffer in model.buffers():
                collectives.broadcast(buffer, src=0)
    return model


def _repeated(model: nn.Module) -> list[nn.Module]:
    """The modules to shard one by one: members of module lists, such as the blocks of a transformer. Inner ones come first:
    FSDP2 needs that."""
    lists = [parts for parts in model.modules() if isinstance(parts, nn.ModuleList)]
    return [part for parts in reversed(lists) for part in parts if any(p.requires_grad for p in part.parameters())]


def _with_fixed_buckets(model: DistributedDataParallel) -> DistributedDataParallel:
    """Make DDP choose its buckets before the first step, by a backward pass of zeros.

    DDP regroups gradients after its first backward pass, in the order in which they came. Without this, the first step
    after a restart would be summed in other groups than the same step without a restart, and differ in the last bits from
    three ranks on. Zeros from the last parameter to the first give the order of a forward pass in registration order.
    """
    total: Any = 0.0
    parameters: list[nn.Parameter] = [p for p in cast(Any, model).module.parameters() if p.requires_grad]
    for parameter in parameters:
        total = total + parameter.reshape(-1)[:1].sum() * 0.0
    model.reducer.prepare_for_backward([])
    total.backward()
    for parameter in parameters:
        parameter.grad = None
    return model


@contextmanager
def without_worker_failures() -> Generator[None]:
    """Delay torch's report of a loader worker that died until the block has ended.

    The report is an exception that a handler of SIGCHLD raises wherever the main thread is: a save would fail for it, or
    the process would abort in the middle of a call of C++.
    """
    handler = signal.getsignal(signal.SIGCHLD)
    if threading.current_thread() is not threading.main_thread() or handler is None:
        yield
        return
    received: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGCHLD, lambda number, frame: received.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, handler)
    if received and callable(handler):
        handler(*received[-1])


class StopSignals:
    """Records a signal, so that the loop can finish its step; a second Ctrl-C interrupts at once.

    >>> with StopSignals() as signals: signals.received
    0
    """

    def __init__(self) -> None:
        self.received = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():  # Python sets handlers in the main thread only
            self._before = {number: signal.signal(number, self._receive) for number in STOP_SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.received == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = number
