"""The tensor of the simulated device, and what its operations do: check the devices, run on the CPU, wrap the result."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from . import NAME
from .memory import device

aten = torch.ops.aten
# CUDA takes CPU tensors here: copies and indices. Elsewhere it takes numbers, tensors without dimensions.
_MIXED = {
    "aten::copy_",
    "aten::_copy_from",
    "aten::_to_copy",
    "aten::index",
    "aten::index_put_",
    "aten::index_put",
    "aten::_index_put_impl_",
    "aten::set_",
    "aten::_foreach_copy_",
}
# Here not even numbers.
_STRICT = ("aten::_fused_", "aten::stack", "aten::cat")
# Their result depends on values: the host waits for it.
_WAITING = {"aten::equal", "aten::is_nonzero", "aten::nonzero", "aten::masked_select", "aten::_unique2"}


class Held:
    """A part of the device's memory, until it is collected."""

    __slots__ = ("key",)

    def __init__(self, key: int | None) -> None:
        self.key = key

    def __del__(self) -> None:
        device.drop(self.key)

    def __reduce__(self) -> Any:
        return Held, (None,)


class SimTensor(torch.Tensor):
    """`raw` is the data on the CPU."""

    raw: torch.Tensor
    held: Held

    @staticmethod
    def __new__(cls, raw: torch.Tensor, requires_grad: bool = False) -> SimTensor:
        key = device.take(raw.untyped_storage())
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            raw.shape,
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            layout=raw.layout,
            device=torch.device(NAME, 0),
            requires_grad=requires_grad,
        )
        made.raw, made.held = raw, Held(key)
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(func, args, kwargs or {})

    def tolist(self) -> Any:
        device.wait("tolist")
        return self.raw.tolist()

    def pin_memory(self, device: Any = None) -> Any:
        raise RuntimeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned")

    def numpy(self, **_: Any) -> Any:
        raise TypeError(
            "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy it to the host first."
        )

    def __repr__(self, **_: Any) -> str:
        return f"SimTensor({self.raw!r})"


def is_sim(value: Any) -> bool:
    return isinstance(value, SimTensor)


def raw(value: Any) -> Any:
    return value.raw if isinstance(value, SimTensor) else value


def dispatch(func: Any, args: Any, kwargs: Any) -> Any:
    """One operation with at least one tensor, or a device, of the simulated device."""
    name = func._schema.name
    if name.startswith("c10d::"):
        from .collectives import collective

        return collective(func, args, kwargs)
    if name == "aten::_local_scalar_dense":
        device.wait("item")
        return args[0].raw.item()
    if name in _WAITING:
        device.wait(name)
    if name == "aten::_to_copy":
        return to_copy(*args, **kwargs)
    if name == "aten::copy_":
        copy(args[0], args[1], bool(kwargs.get("non_blocking", args[2] if len(args) > 2 else False)))
        return args[0]
    if name == "aten::is_pinned":
        return False
    if name in ("aten::_pin_memory", "aten::pin_memory"):
        raise RuntimeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned")
    flat, spec = tree_flatten((args, kwargs))
    _refuse_mixed(func, flat)
    raw_args, raw_kwargs = tree_unflatten([raw(value) for value in flat], spec)
    where = kwargs.get("device")
    if "device" in raw_kwargs:
        raw_kwargs["device"] = torch.device("cpu")
    raw_kwargs.pop("pin_memory", None)
    with _generator(func, raw_kwargs):
        out = func(*raw_args, **raw_kwargs)
    if where is not None and torch.device(where).type != NAME:
        return out
    known = {id(value.raw): value for value in flat if is_sim(value)}
    out = tree_map(lambda t: known[id(t)] if id(t) in known else wrap(t), out)
    if not func._schema.returns:
        return None
    try:
        return return_and_correct_aliasing(func, args, kwargs, out)
    except (RuntimeError, AssertionError, NotImplementedError):
        return out


def wrap(value: Any) -> Any:
    if type(value).__name__ == "AsyncCollectiveTensor":
        value = value.trigger_wait()
    return SimTensor(value) if isinstance(value, torch.Tensor) and not is_sim(value) else value


def to_copy(
    tensor: Any,
    *,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    non_blocking: bool = False,
    memory_format: Any = None,
) -> Any:
    """`tensor.to(...)`: as on CUDA, a copy to the host that does not block goes to pinned memory."""
    there = torch.device(device).type == NAME if device is not None else is_sim(tensor)
    data = aten._to_copy.default(raw(tensor), dtype=dtype, memory_format=memory_format)
    if there == is_sim(tensor):
        return SimTensor(data) if there else data
    if there:
        if not non_blocking:
            _device().wait("copy to the device")
        return SimTensor(data)
    if not non_blocking:
        _device().wait("copy to the host")
        return data
    later = torch.empty_like(data)
    later.sim_pinned = True
    _device().deliver_later(later, data)
    return later


def copy(into: Any, source: Any, non_blocking: bool) -> None:
    """`into.copy_(source)`. A copy to memory of the host that is not pinned always blocks."""
    if is_sim(into) == is_sim(source) or (is_sim(into) and non_blocking):
        raw(into).copy_(raw(source))
    elif is_sim(into):
        # A collective's result reaches DDP as the data itself, which is on the device.
        if not device.owns(source.untyped_storage()):
            device.wait("copy to the device")
        into.raw.copy_(source)
    elif non_blocking and into.is_pinned():
        device.deliver_later(into, raw(source).to(into.dtype).expand_as(into))
    else:
        device.wait("copy to the host")
        into.copy_(source.raw)


def _device() -> Any:
    return device


def _refuse_mixed(func: Any, flat: list[Any]) -> None:
    name = func._schema.name
    if name in _MIXED:
        return
    others = [t for t in flat if isinstance(t, torch.Tensor) and not is_sim(t) and t.device.type == "cpu"]
    strict = name.startswith(_STRICT)
    if any(t.dim() or strict for t in others):
        message = (
            f"Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! ({name})"
        )
        device.fail(RuntimeError(message))
    first = flat[0] if flat else None
    in_place = func._schema.is_mutable and name.endswith("_") and not name.startswith(("aten::_foreach_", "aten::_amp"))
    if in_place and isinstance(first, torch.Tensor) and not is_sim(first):
        device.fail(RuntimeError(f"{name} of a CPU tensor with a tensor of the device: the devices do not match"))


@contextlib.contextmanager
def _generator(func: Any, kwargs: dict[str, Any]) -> Iterator[None]:
    """Random operations draw from the device's generator."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        yield
        return
    given = kwargs.pop("generator", None)
    if given is not None and given.device.type != NAME:
        raise RuntimeError(f"Expected a 'cuda' device type for generator but found '{given.device.type}'")
    with device.lock:
        kept = torch.default_generator.get_state()
        torch.default_generator.set_state(device.generator)
        try:
            yield
        finally:
            device.generator = torch.default_generator.get_state()
            torch.default_generator.set_state(kept)
