"""`torch.sim`: the module of the simulated device, as strict about its arguments as `torch.cuda`."""

from __future__ import annotations

import contextlib
import types
from typing import Any

import torch

from . import NAME
from .memory import device as state


def _index(device: Any, optional: bool = False) -> int:
    if isinstance(device, int):
        return device
    device = torch.device(device) if device is not None else None
    if device is not None and device.type != NAME:
        raise ValueError(f"Expected a cuda device, but got: {device}")
    if device is None or device.index is None:
        if not optional:
            raise ValueError(f"Expected a torch.device with a specified index or an integer, but got:{device}")
        return state.index
    return device.index


class Stream:
    """All work of the device is done at once, so there is nothing to order."""

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def wait_stream(self, other: Any) -> None: ...
    def wait_event(self, other: Any) -> None: ...
    def record_event(self, event: Any = None) -> Any:
        return event or Event()

    def synchronize(self) -> None:
        state.wait("stream")

    def query(self) -> bool:
        return True

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: Any) -> None: ...


class Event:
    """An event of a stream."""

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def record(self, stream: Any = None) -> None: ...
    def wait(self, stream: Any = None) -> None: ...
    def synchronize(self) -> None:
        state.wait("event")

    def query(self) -> bool:
        return True


class _Entered:
    def __init__(self, device: Any) -> None:
        _index(device, optional=True)

    def __enter__(self) -> None: ...
    def __exit__(self, *_: Any) -> None: ...


def set_device(device: Any) -> None:
    if _index(device) >= 1:
        raise RuntimeError("CUDA error: invalid device ordinal")
    state.index, state.used_once = _index(device), True


def synchronize(device: Any = None) -> None:
    _index(device, optional=True)
    state.wait("synchronize")


def mem_get_info(device: Any = None) -> tuple[int, int]:
    _index(device, optional=True)
    state.used_once = True
    return state.total - state.used, state.total


def set_per_process_memory_fraction(fraction: float, device: Any = None) -> None:
    _index(state.index if device is None else device)
    if not isinstance(fraction, float):
        raise TypeError("Invalid type for fraction argument, must be `float`")
    if not 0 <= fraction <= 1:
        raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
    state.limit = int(state.total * fraction)


def reset_peak_memory_stats(device: Any = None) -> None:
    _index(device, optional=True)
    state.peak = state.used


def manual_seed_all(seed: int) -> None:
    state.generator = torch.Generator().manual_seed(seed).get_state()


def get_rng_state(device: Any = NAME) -> torch.Tensor:
    _index(device, optional=True)
    return state.generator.clone()


def set_rng_state(new: torch.Tensor, device: Any = NAME) -> None:
    _index(device, optional=True)
    state.generator = new.clone()


def _of_device(value: Any) -> Any:
    def read(device: Any = None) -> Any:
        _index(device, optional=True)
        return value()

    return read


def build() -> types.ModuleType:
    """The module."""
    module = types.ModuleType(f"torch.{NAME}")
    members = {
        "is_available": lambda: True,
        "is_initialized": lambda: state.used_once,
        "init": lambda: None,
        "current_device": lambda: state.index,
        "device_count": lambda: 1,
        "_is_in_bad_fork": lambda: False,
        "device": _Entered,
        "Stream": Stream,
        "Event": Event,
        "current_stream": lambda device=None: Stream(),
        "default_stream": lambda device=None: Stream(),
        "stream": lambda stream: contextlib.nullcontext(),
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
        "empty_cache": lambda: None,
        "get_device_name": _of_device(lambda: "Simulated accelerator"),
        "get_device_capability": _of_device(lambda: (9, 0)),
        "memory_allocated": _of_device(lambda: state.used),
        "memory_reserved": _of_device(lambda: state.used),
        "max_memory_allocated": _of_device(lambda: state.peak),
        "max_memory_reserved": _of_device(lambda: state.peak),
        "memory_stats": _of_device(lambda: {"num_alloc_retries": 0}),
        "manual_seed": manual_seed_all,
    }
    functions = (
        set_device,
        synchronize,
        mem_get_info,
        set_per_process_memory_fraction,
        reset_peak_memory_stats,
        manual_seed_all,
        get_rng_state,
        set_rng_state,
    )
    for name, value in {**members, **{f.__name__: f for f in functions}}.items():
        setattr(module, name, value)
    return module
