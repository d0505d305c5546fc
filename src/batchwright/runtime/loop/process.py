"""The process a loop runs in: its rank and device, the model wrapped for it, and the signals that ask it to stop."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from batchwright.core.errors import PlanError
from batchwright.core.numbers import divisors
from batchwright.runtime.answers import Answer
from batchwright.runtime.device import choose, collectives_for, use
from batchwright.runtime.ranks import check_rendezvous, discover

from .settings import Strategy

# torch's annotations of its collectives are incomplete.
collectives = cast(Any, dist)
T = TypeVar("T")


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
    gradients: dist.ProcessGroup | None = None
    """The ranks that train, if other ranks of the job do something else; None: all of them."""
    mesh: DeviceMesh | None = None
    """The ranks as pipeline × data-parallel ("pp", "dp"), if the model is in a pipeline."""

    @property
    def data_rank(self) -> int:
        """The data-parallel rank: ranks of one pipeline train the same samples."""
        return self.rank if self.mesh is None else self.mesh.get_local_rank("dp")

    @property
    def data_ranks(self) -> int:
        """The number of data-parallel ranks."""
        return self.ranks if self.mesh is None else self.mesh["dp"].size()

    @property
    def records(self) -> bool:
        """Whether this rank writes the ledger of its data-parallel rank: in a pipeline, the rank of the first stage."""
        return self.mesh is None or self.mesh.get_local_rank("pp") == 0

    def broadcast(self, value: Any) -> Any:
        """The value of rank 0, on all ranks."""
        if self.control is None:
            return value
        box = [value]
        collectives.broadcast_object_list(box, src=0, group=self.control)
        return box[0]

    def from_first(self, what: str, question: Callable[[], T]) -> T:
        """What `question()` about the dataset returns on rank 0, on all ranks. Its error is raised on all; `what` names it."""
        own = Answer(question if self.rank == 0 else None, f"rank 0: {what} failed", "dataset")
        return own.heard(self.broadcast(own.sent))

    def from_all(self, what: str, question: Callable[[], T]) -> list[T]:
        """What `question()` about the dataset returns on every rank, on all ranks. The error of one rank is raised on all."""
        own = Answer(question, f"rank {self.rank}: {what} failed", "dataset")
        return [own.heard(said) for said in self.gathered(own.sent)]

    def gathered(self, value: Any) -> list[Any]:
        """The values of all ranks, on all ranks."""
        if self.control is None:
            return [value]
        found: list[Any] = [None] * self.ranks
        collectives.all_gather_object(found, value, group=self.control)
        return found

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
def joined(device: str, strategy: Strategy, pipeline_parallel: int = 1) -> Generator[ThisProcess]:
    """Join the process group that torchrun or srun describes, or use the existing one; leave it after success.

    After an error, a group of several ranks stays: with NCCL, destroying it waits for ranks that are blocked in a
    collective, so that a failing rank would never exit.
    """
    ranks = discover()
    place = choose(device, ranks)
    use(place)
    ours = not dist.is_initialized()
    several = ranks.size if ours else dist.get_world_size()
    if several % pipeline_parallel:
        fitting = divisors(several)
        nearest = (
            *[p for p in fitting if p < pipeline_parallel][-1:],
            *[p for p in fitting if p > pipeline_parallel][:1],
        )
        raise PlanError(
            f"pipeline_parallel={pipeline_parallel} does not divide the {several} ranks of this launch: "
            f"{several} / {pipeline_parallel} = {several / pipeline_parallel:.2f}. Nearest: {' or '.join(map(str, nearest))}.",
            field="pipeline_parallel",
            given=pipeline_parallel,
            nearest=nearest,
        )
    if strategy == "none" and several > pipeline_parallel:
        raise PlanError(
            f"strategy='none' does not train on {several // pipeline_parallel} ranks: their gradients would not be summed. "
            "Nearest: 'ddp', 'fsdp2'.",
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
    shape, succeeded, mesh = (pipeline_parallel, size // pipeline_parallel), False, None
    if pipeline_parallel > 1:
        mesh = init_device_mesh(place.type, shape, mesh_dim_names=("pp", "dp"))
    try:
        yield ThisProcess(rank, size, place, control, ranks.local_size is None and size == 1, saving, mesh=mesh)
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
        DistributedDataParallel(
            model,
            device_ids=[process.device] if process.device.type != "cpu" else None,
            process_group=process.gradients,
        )
    )


def wrapped_stage(
    module: nn.Module,
    wrapper: Literal["ddp", "sharded", "ours"],
    process: ThisProcess,
    reduce_dtype: torch.dtype | None,
) -> nn.Module:
    """A stage of a pipeline on its device, with the weights of its first data-parallel rank."""
    assert process.mesh is not None
    if wrapper == "sharded":
        return _sharded(module, process, MixedPrecisionPolicy(reduce_dtype=reduce_dtype), process.mesh["dp"])
    module = module.to(process.device)
    group = process.mesh.get_group("dp")
    if wrapper == "ddp":
        devices = [process.device] if process.device.type != "cpu" else None
        return _with_fixed_buckets(DistributedDataParallel(module, device_ids=devices, process_group=group))
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            collectives.broadcast(tensor, group=group, group_src=0)
    return module


def _sharded(
    model: nn.Module, process: ThisProcess, policy: MixedPrecisionPolicy, mesh: DeviceMesh | None = None
) -> nn.Module:
    """The model in FSDP2, which moves one part after the other to the device and keeps this rank's shard of it. Then each
    parameter is filled from rank 0, one at a time; parameters outside of module lists are whole on a device for a moment."""
    whole = [parameter.detach() for parameter in model.parameters()]  # in the host's memory
    if mesh is None and process.gradients is not None:
        mesh = DeviceMesh.from_group(process.gradients, process.device.type)
    mesh = mesh or init_device_mesh(process.device.type, (process.ranks,))
    for part in _repeated(model):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    model = cast(nn.Module, fully_shard(model, mesh=mesh, mp_policy=policy))
    if mesh.size() > 1:
        with torch.no_grad():
            for parameter, values in zip(model.parameters(), whole, strict=True):
                shard = cast(Any, parameter)
                filled: Any = distribute_tensor(values.to(process.device), mesh, shard.placements)
                shard.to_local().copy_(filled.to_local())
            for buffer in model.buffers():
                collectives.broadcast(buffer, group=mesh.get_group(), group_src=0)
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
