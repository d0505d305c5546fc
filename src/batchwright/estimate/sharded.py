"""FSDP2 without ranks: a process group that only pretends, and torch's tracker for sharded modules."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from .steps import blocks


def mesh(ranks: int) -> DeviceMesh:
    """A mesh of `ranks` that exist in name only; a mesh holds a real tensor, so it is made outside fake mode."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    with unset_fake_temporarily():
        if not dist.is_initialized():
            dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
        return init_device_mesh("cpu", (ranks,))


def leave() -> None:
    """Forget the pretended ranks."""
    if dist.is_initialized() and dist.get_backend() == "fake":
        dist.destroy_process_group()


def shard(model: nn.Module, ranks: int, precision: str) -> None:
    """Shard every repeated block and then the rest, the way FSDP2 is meant to be applied."""
    world = mesh(ranks)
    policy = MixedPrecisionPolicy()
    if precision == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in blocks(model):
        fully_shard(block, mesh=world, mp_policy=policy)
    fully_shard(model, mesh=world, mp_policy=policy)


def tracked(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: list[torch.Tensor]) -> FSDPMemTracker:
    """The tracker for a sharded model; the batch counts as well."""
    tracker = FSDPMemTracker(model, optimizer)
    tracker.track_inputs(tuple(inputs))
    return tracker
