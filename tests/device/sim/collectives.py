"""`simccl`: collectives of the simulated device. As NCCL it takes tensors of its device only; gloo carries the data."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from . import NAME
from .tensor import is_sim, raw

BACKEND = "simccl"
# Groups that carry the data on the CPU, by the backend that they stand behind.
_carriers: dict[int, Any] = {}
_kept: list[Any] = []


def register() -> None:
    """Make `simccl` the backend of the device."""
    dist.Backend.register_backend(BACKEND, _create, devices=[NAME])
    # As for CUDA, torch must find a gloo backend where it asks a group for one; `collective` refuses to use it.
    dist.Backend.backend_capability["gloo"].append(NAME)


def _create(store: Any, rank: int, size: int, timeout: Any) -> Any:
    backend = dist.ProcessGroupGloo(store, rank, size, timeout)
    carrier = dist.ProcessGroup(store, rank, size)
    carrier._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    carrier._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    carrier._set_group_name("carrier")
    _carriers[id(backend)] = carrier
    _kept.append(backend)
    return backend


def _is_group(value: Any) -> bool:
    return isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type())


def collective(func: Any, args: Any, kwargs: Any) -> Any:
    """A collective on tensors of the device; an error if a tensor is elsewhere, or the group has no backend for it."""
    flat, spec = tree_flatten((args, kwargs))
    tensors = [value for value in flat if isinstance(value, torch.Tensor)]
    if not all(is_sim(t) for t in tensors):
        raise RuntimeError(f"{func._schema.name}: tensors of one collective are on different devices")
    group = next(distributed_c10d.ProcessGroup.unbox(value) for value in flat if _is_group(value))
    backend = group._get_backend(torch.device(NAME))  # raises where this group has none
    carrier = _carriers.get(id(backend))
    if carrier is None:
        raise RuntimeError(f"{func._schema.name}: this group has no backend for tensors of {NAME}")
    swapped = [carrier.boxed() if _is_group(value) else raw(value) for value in flat]
    raw_args, raw_kwargs = tree_unflatten(swapped, spec)
    out = func(*raw_args, **raw_kwargs)
    known = {id(t.raw): t for t in tensors}
    return tree_map(lambda t: known.get(id(t), t) if isinstance(t, torch.Tensor) else t, out)
