"""Install the simulated device in this process, and patch the places in torch that know only backends written in C++."""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from typing import Any

import torch
from torch.utils import backend_registration
from torch.utils._pytree import tree_flatten, tree_unflatten

from . import NAME
from .collectives import register
from .memory import device
from .module import build, set_device, synchronize
from .tensor import Held, SimTensor, aten, copy, dispatch, is_sim

_libraries: list[Any] = []


def why_not() -> str | None:
    """Why this torch cannot simulate a device; None if it can."""
    if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
        return f"torch {torch.__version__} has no Python backend for devices (2.13 has)"
    return None


def install() -> None:
    """Once per process, before anything uses a device."""
    if _libraries:
        return

    class Hook(torch._C._acc.PrivateUse1Hooks):
        def is_available(self) -> bool:
            return True

        def has_primary_context(self, dev_id: int) -> bool:
            return True

        def is_built(self) -> bool:
            return True

    warnings.filterwarnings("ignore", message=".*privateuse.*")
    torch.serialization.add_safe_globals([SimTensor, Held])
    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=build(), hook=Hook())
    _operations()
    _autocast()
    _modules()
    _errors_in_backward()
    _pinned_memory()
    _sharding()
    register()
    torch.accelerator.synchronize = lambda device=None, /: synchronize(device)
    torch.accelerator.set_device_index = lambda device, /: set_device(device)
    import_module("torch.optim.optimizer")._foreach_supported_types.append(SimTensor)


def _operations() -> None:
    library = torch.library.Library("aten", "IMPL")

    def empty(size: Any, *, dtype: Any = None, memory_format: Any = None, **_: Any) -> Any:
        made = torch.empty(size, dtype=dtype, memory_format=memory_format or torch.contiguous_format, device="cpu")
        return SimTensor(made)

    def empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> Any:
        return SimTensor(torch.empty_strided(size, stride, dtype=dtype, device="cpu"))

    def copy_from(source: Any, into: Any, non_blocking: bool = False) -> Any:
        copy(into, source, non_blocking)
        return into

    library.impl("empty.memory_format", empty, "PrivateUse1")
    library.impl("empty_strided", empty_strided, "PrivateUse1")
    library.impl("_copy_from", copy_from, "PrivateUse1")
    rest = torch.library.Library("_", "IMPL")
    rest.fallback(lambda op, *args, **kwargs: dispatch(op, args, kwargs), "PrivateUse1")
    _libraries.extend((library, rest))


def _autocast() -> None:
    """The matrix products; every other operation runs in the type of its tensors."""
    rest = torch.library.Library("_", "IMPL")
    rest.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    library = torch.library.Library("aten", "IMPL")

    def lowered(op: Any) -> Any:
        def kernel(*args: Any, **kwargs: Any) -> Any:
            kind = torch.get_autocast_dtype(NAME)
            flat, spec = tree_flatten((args, kwargs))
            low = [t.to(kind) if isinstance(t, torch.Tensor) and t.dtype is torch.float32 else t for t in flat]
            inner_args, inner_kwargs = tree_unflatten(low, spec)
            key = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
            with torch._C._ExcludeDispatchKeyGuard(key):
                return op(*inner_args, **inner_kwargs)

        return kernel

    for name in ("linear", "mm", "matmul", "addmm", "bmm"):
        library.impl(name, lowered(getattr(aten, name).default), "AutocastPrivateUse1")
    _libraries.extend((rest, library))


def _errors_in_backward() -> None:
    run = torch.autograd._engine_run_backward

    def checked(*args: Any, **kwargs: Any) -> Any:
        try:
            return run(*args, **kwargs)
        finally:
            error, device.failed = device.failed, None
            if error is not None:
                raise error

    torch.autograd._engine_run_backward = checked


def _modules() -> None:
    """`Module.to` keeps the identity of parameters, as on CUDA; `load_state_dict` must not exchange them."""
    apply = torch.nn.Module._apply

    def exchanging(self: Any, fn: Any, recurse: bool = True) -> Any:
        kept = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            return apply(self, fn, recurse)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(kept)

    torch.nn.Module._apply = exchanging


def _pinned_memory() -> None:
    def pin_memory(self: torch.Tensor, to: Any = None) -> torch.Tensor:
        device.used_once = True  # the driver pins it, so there is a context on the device
        made = self.clone()
        made.sim_pinned = True
        return made

    torch.Tensor.pin_memory = pin_memory
    torch.Tensor.is_pinned = lambda self, device=None: getattr(self, "sim_pinned", False)


def _sharding() -> None:
    """FSDP2 moves parameters by `.data`, and frees and allocates storages in place."""
    import torch.distributed.fsdp._fully_shard._fsdp_init as init
    import torch.distributed.fsdp._fully_shard._fsdp_param as param

    free, allocate, move = param.free_storage, param.alloc_storage, init._move_states_to_device

    def free_storage(tensor: Any) -> None:
        device.resized(tensor.raw.untyped_storage(), 0) if is_sim(tensor) else free(tensor)

    def alloc_storage(tensor: Any) -> None:
        size = tensor.numel() * tensor.itemsize
        device.resized(tensor.raw.untyped_storage(), size) if is_sim(tensor) else allocate(tensor)

    def _move_states_to_device(params: list[Any], buffers: list[Any], where: torch.device) -> None:
        if where.type != NAME:
            return move(params, buffers, where)
        for tensor in (*params, *buffers):
            if tensor.device.type == "cpu":
                with torch.no_grad():
                    moved = tensor.detach().to(where).requires_grad_(tensor.requires_grad)
                    made = (
                        torch.nn.Parameter(moved, tensor.requires_grad)
                        if isinstance(tensor, torch.nn.Parameter)
                        else moved
                    )
                torch.utils.swap_tensors(tensor, made)
        return None

    patched = {f.__name__: f for f in (free_storage, alloc_storage, _move_states_to_device)}
    for module in [m for n, m in sys.modules.items() if n.startswith("torch.distributed.fsdp._fully_shard")]:
        for name, function in patched.items():
            if hasattr(module, name):
                setattr(module, name, function)
