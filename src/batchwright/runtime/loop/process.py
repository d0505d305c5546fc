"""The process a loop runs in: its group and device, the model wrapped for it, and the signals that ask it to stop."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
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
from torch.nn.parallel import DistributedDataParallel

from batchwright.core.errors import PlanError
from batchwright.runtime.device import choose
from batchwright.runtime.ranks import check_rendezvous, discover

from .settings import Strategy

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


@dataclass(frozen=True)
class World:
    """Rank and size of this process, its device, and a gloo group for everything that is not training."""

    rank: int
    ranks: int
    device: torch.device
    control: dist.ProcessGroup | None
    bare: bool
    """No launcher started this process: its exit code reaches somebody."""
    saving: dist.ProcessGroup | None = None
    """A gloo group for checkpoints alone: a thread may save while `control` is used at every step."""

    def tell(self, value: Any) -> Any:
        """Rank 0's value, on all ranks."""
        if self.control is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.control)
        return box[0]

    def largest(self, value: int) -> int:
        """The largest of all ranks' numbers."""
        if self.control is None:
            return value
        tensor = torch.tensor(value)
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.control)
        return int(tensor)


@contextmanager
def joined(device: str, strategy: Strategy) -> Iterator[World]:
    """Join the group that torchrun or srun describes (or use the one that exists), and leave it after success.

    After an error a group of several ranks is left as it is: with NCCL, destroying it waits for ranks that sit in a
    collective and will never come, so that a failing rank would never end.
    """
    ranks = discover()
    place = choose(device, ranks)
    cuda = place.type == "cuda"
    if cuda:
        torch.cuda.set_device(place)
    ours = not dist.is_initialized()
    several = ranks.size if ours else dist.get_world_size()
    if strategy == "none" and several > 1:
        raise PlanError(
            f"strategy='none' does not train on {several} ranks: nobody would sum their gradients. Nearest: 'ddp', 'fsdp2'.",
            field="strategy",
            given="none",
            nearest=("ddp", "fsdp2"),
        )
    if ours and ranks.size > 1:
        check_rendezvous(ranks)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo", device_id=place if cuda else None,
            rank=ranks.rank, world_size=ranks.size,
        )  # fmt: skip
    elif ours and strategy == "fsdp2":  # a group of one: FSDP2 needs a mesh
        dist.init_process_group("nccl" if cuda else "gloo", store=HashStore(), rank=0, world_size=1)
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    groups = [cast(dist.ProcessGroup, dist.new_group(backend="gloo")) for _ in range(2 if size > 1 else 0)]
    control, saving = groups or (None, None)
    succeeded = False
    try:
        yield World(rank, size, place, control, ranks.local_size is None and size == 1, saving)
        succeeded = True
    finally:
        if succeeded or size == 1:
            for group in groups:
                dist.destroy_process_group(group)
            if ours and dist.is_initialized():
                dist.destroy_process_group()


def wrapped(model: nn.Module, strategy: Strategy, world: World, reduce_dtype: torch.dtype | None = None) -> nn.Module:
    """The model on its device, with rank 0's weights, under DDP or FSDP2, which adds gradients up in `reduce_dtype`."""
    model = model.to(world.device)
    if dist.is_initialized() and world.ranks > 1:
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                dist.broadcast(tensor, src=0)
    if strategy == "fsdp2":
        mesh = init_device_mesh(world.device.type, (world.ranks,))
        policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
        for part in _repeated(model):
            fully_shard(part, mesh=mesh, mp_policy=policy)
        return cast(nn.Module, fully_shard(model, mesh=mesh, mp_policy=policy))
    if strategy == "none" or world.ranks == 1:
        return model
    return _with_fixed_buckets(
        DistributedDataParallel(model, device_ids=[world.device] if world.device.type == "cuda" else None)
    )


def _repeated(model: nn.Module) -> list[nn.Module]:
    """What is sharded by itself: the members of module lists, as a transformer's blocks are."""
    return [part for parts in model.modules() if isinstance(parts, nn.ModuleList) for part in parts
            if any(p.requires_grad for p in part.parameters())]  # fmt: skip


def _with_fixed_buckets(model: DistributedDataParallel) -> DistributedDataParallel:
    """Let DDP choose its buckets before the first step, by a backward of zeros.

    It regroups gradients after its first backward, in the order in which they came. The first step after a restart would
    then be summed in other groups than the same step without one, and differ in the last bits from three ranks on.
    Zeros from the last parameter to the first make the order that a forward in the order of registration would.
    """
    total: Any = 0.0
    parameters = [p for p in model.module.parameters() if p.requires_grad]
    for parameter in parameters:
        total = total + parameter.reshape(-1)[:1].sum() * 0.0
    model.reducer.prepare_for_backward([])
    total.backward()
    for parameter in parameters:
        parameter.grad = None
    return model


class StopSignals:
    """Remembers a signal until the step in work is done; a second Ctrl-C interrupts at once.

    >>> with StopSignals() as signals: signals.received
    0
    """

    def __init__(self) -> None:
        self.received = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():  # others may not set handlers
            self._before = {number: signal.signal(number, self._take) for number in STOP_SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _take(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.received == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = number
