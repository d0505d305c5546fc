"""Devices: which one this process uses, what it can do, and how data gets there. No other file names a kind of device.

torch finds the accelerator (`torch.accelerator`), and each kind has a module with the same functions
(`torch.get_device_module`): CUDA, ROCm and XPU. MPS has some of them. On the CPU every function here works, too: it waits
for nothing, limits nothing and has no peaks.

    device = choose("auto", ranks);  use(device)              # before the process group
    init_process_group(**collectives_for(device), …)
    for batch in loader:  loss(model, to_device(batch, device))
"""

# pyright: reportUnknownMemberType=false
# torch's annotations are incomplete.

from __future__ import annotations

import platform
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from collections.abc import Set as AnySet
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from inspect import signature
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from batchwright.core.errors import PlanError, RunError

from .containers import members
from .ranks import Ranks

MIB = 2**20
# Memory that a process uses on its device outside of torch's allocator, which a limit on that allocator does not cover:
# kernels and handles of libraries, and with several ranks the buffers of the collectives, which grow with their number.
# An assumption: `make gpu` measures it.
OUTSIDE_ALLOCATOR = 256 * MIB
OUTSIDE_FOR_COLLECTIVES, OUTSIDE_PER_RANK = 256 * MIB, 32 * MIB


def choose(name: str, ranks: Ranks) -> torch.device:
    """Return the device called `name`; "auto" is the accelerator that torch finds, else the CPU.

    An accelerator always has an index. If `name` has none, it is the local rank, or 0 if this process sees only one
    device: the launcher may give each process its own device (`srun --gpus-per-task=1`; torchrun does not). One device
    for several ranks is refused: their collectives would wait forever.
    """
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    known = ("cpu", *([found.type] if found else []))
    if name == "auto":
        name = known[-1]
    kind, _, index = name.partition(":")
    if kind not in known or (index and not index.isdecimal()) or (kind == "cpu" and index not in ("", "0")):
        raise PlanError(
            f"device={name[:40]!r} is not available: torch {torch.__version__} finds {' and '.join(known)}.",
            field="device",
            given=name[:40],
            nearest=known,
        )
    if kind == "cpu":
        return torch.device("cpu")
    count = torch.accelerator.device_count()
    own = count > 1 or ranks.same_devices
    number = int(index) if index else ranks.local_rank if own else 0
    if number >= count:
        asked, remedy = f"device={name!r}", ""
        if not index:
            asked = f"local rank {number} needs {kind}:{number}, which"
            remedy = f" Start at most {count} processes per node, or make more devices visible."
        raise PlanError(
            f"{asked} does not exist: this process sees {count} {kind} device{'s' * (count != 1)}, indices 0 to "
            f"{count - 1}.{remedy}",
            field="device",
            given=name[:40],
            nearest=tuple(f"{kind}:{i}" for i in range(count)),
        )
    several = max(ranks.local_rank + 1, min(ranks.local_size or 1, ranks.size))
    if index and own and several > 1:
        raise PlanError(
            f"device={name!r} is one device for {several} ranks of this node, and each needs its own. Nearest: {kind}, which "
            "gives each rank the device of its local rank.",
            field="device",
            given=name[:40],
            nearest=(kind,),
        )
    return torch.device(kind, number)


def use(device: torch.device) -> None:
    """Make it the current device of this process: before the process group, and before the user's code names a device."""
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)


def collectives_for(device: torch.device, ranks: int = 1) -> dict[str, Any]:
    """The arguments of `init_process_group` for tensors of this device and of the CPU."""
    if device.type == "cpu":
        return {"backend": "gloo"}
    backend = dist.Backend.default_device_backend_map.get(device.type, "gloo")
    if backend == "gloo" and ranks > 1:
        raise PlanError(
            f"device={device.type!r} has no collectives in torch, and there are {ranks} ranks. Train on one, or with "
            "device='cpu'.",
            field="device",
            given=device.type,
            nearest=("cpu",),
        )
    made: dict[str, Any] = {"backend": f"cpu:gloo,{device.type}:{backend}"}
    # torch asks every later group for a backend of this device, also a gloo group for the CPU; gloo has none for XPU.
    if device.type in dist.Backend.backend_capability["gloo"]:
        made["device_id"] = device
    return made


def synchronise(device: torch.device) -> None:
    """Wait until the device has done everything that was asked of it."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def device_name(device: torch.device) -> str:
    """What the device calls itself; its kind and the processor's if it has no name."""
    named = getattr(_module(device), "get_device_name", None)
    return f"{device.type} ({platform.machine()})" if named is None or device.type == "cpu" else str(named(device))


def may_fork() -> bool:
    """Whether this process, forked from another, can use the accelerator: not if that one has used it."""
    found = torch.accelerator.current_accelerator()
    return found is None or not _module(found)._is_in_bad_fork()


@cache
def widest_float(device: torch.device) -> torch.dtype:
    """The widest float of a device; weights and losses are summed in it. MPS and some of Intel's GPUs have no fp64."""
    if device.type in ("cpu", "meta"):
        return torch.float64
    properties = getattr(_module(device), "get_device_properties", None)
    has = device.type != "mps" and (properties is None or getattr(properties(device), "has_fp64", True))
    return torch.float64 if has else torch.float32


def _module(device: torch.device) -> Any:
    return torch.get_device_module(device)


# --- memory ---


def outside_allocator(ranks: int) -> int:
    """Bytes to keep free on a device beside a limit of torch's allocator, in a job of so many ranks (an assumption).

    >>> outside_allocator(1) // MIB, outside_allocator(2) // MIB, outside_allocator(8) // MIB
    (256, 576, 768)
    """
    return OUTSIDE_ALLOCATOR + (OUTSIDE_FOR_COLLECTIVES + OUTSIDE_PER_RANK * ranks if ranks > 1 else 0)


def free_and_total(device: torch.device) -> tuple[int, int] | None:
    """Bytes that are free on an accelerator, and all that it has; None if torch cannot tell or cannot limit them."""
    module = _module(device)
    if not (hasattr(module, "mem_get_info") and hasattr(module, "set_per_process_memory_fraction")):
        return None
    try:
        return cast("tuple[int, int]", module.mem_get_info(device))
    except RuntimeError:  # some of Intel's GPUs cannot tell
        return None


def limit_memory(device: torch.device, size: int, total: int) -> None:
    """Let torch's allocator use `size` of the device's `total` bytes; above it raises torch.OutOfMemoryError."""
    _module(device).set_per_process_memory_fraction(max(0.0, min(1.0, size / total)), device)


def peaks(device: torch.device) -> dict[str, int | None]:
    """The largest memory that this process has used on an accelerator; None where torch does not keep it (MPS)."""
    module = _module(device)
    if not hasattr(module, "max_memory_allocated"):
        return {"peak_memory_bytes": None}
    return {
        "peak_memory_bytes": module.max_memory_allocated(device),
        "reserved_bytes": module.max_memory_reserved(device),
        "allocator_retries": module.memory_stats(device).get("num_alloc_retries", 0),
    }


# --- the generator of an accelerator ---


def generator_state(device: torch.device) -> Tensor:
    """The state of the generator that dropout uses on an accelerator, as bytes in the host's memory."""
    return cast(Tensor, _module(device).get_rng_state(device))


def set_generator_state(device: torch.device, state: Tensor) -> None:
    """Set what `generator_state` returned."""
    _module(device).set_rng_state(state, device)


@contextmanager
def drawing_from(device: torch.device, seed: int) -> Generator[None]:
    """Seed the generator of an accelerator, the current device, and set it back when the block ends. Nothing on the CPU."""
    if device.type == "cpu":
        yield
        return
    kept = generator_state(device)
    _module(device).manual_seed(seed)
    try:
        yield
    finally:
        set_generator_state(device, kept)


# --- data ---


def pins(device: torch.device) -> bool:
    """Whether copies to and from the device need not wait if the host's memory is pinned."""
    return device.type not in ("cpu", "meta", "mps")


def sent(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers as a tensor on the device, without waiting for it.

    >>> sent([1, 2.5], torch.float64, torch.device("cpu"))
    tensor([1.0000, 2.5000], dtype=torch.float64)
    """
    if not pins(device):
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype).pin_memory().to(device, non_blocking=True)


def to_device(batch: Any, device: torch.device) -> Any:
    """Move a batch to `device`: tensors and objects with a `to` method, nested in mappings, sequences and dataclasses.

    Numbers, text, numpy arrays and ranges stay as they are. An object that holds tensors in another way is an error.

    >>> to_device({"x": [torch.ones(1)], "name": "a"}, torch.device("meta"))
    {'x': [tensor(..., device='meta', size=(1,))], 'name': 'a'}
    """
    if device.type == "cpu":
        return batch
    return _each(batch, lambda t: t.to(device, non_blocking=pins(device)), device, "batch")


def pinned(batch: Any) -> Any:
    """A batch with its tensors in pinned memory; tensors that are on a device already stay there.

    An object with a method `pin_memory` pins itself, as with torch's DataLoader.
    """

    def pin(tensor: Tensor) -> Tensor:
        return tensor.pin_memory() if tensor.device.type == "cpu" and tensor.layout is torch.strided else tensor

    return _each(batch, pin, None, "batch")


@dataclass(frozen=True)
class Pinnable:
    """What a worker of a DataLoader has read. The loader calls `pin_memory`; its own way fails on tensors of a device."""

    read: Any

    @staticmethod
    def after(collate: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        """A collate function whose result can be pinned."""
        return _PinnableAfter(collate)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.read)

    def pin_memory(self) -> Any:
        """The batch, pinned."""
        return pinned(self.read)


@dataclass(frozen=True)
class _PinnableAfter:
    collate: Callable[[list[Any]], Any]

    def __call__(self, rows: list[Any]) -> Any:
        return Pinnable(self.collate(rows))


def _each(value: Any, change: Callable[[Tensor], Tensor], device: torch.device | None, path: str) -> Any:
    """A batch with every tensor changed; `device`: what an object's own `to` is called with, None to leave it."""
    if isinstance(value, Tensor):
        return change(value)
    if value is None or isinstance(value, (str, bytes, int, float, range)):
        return value
    # Before mappings and sequences: a tokenizer's BatchEncoding moves itself, and the batch_sizes of a PackedSequence must
    # stay on the CPU.
    if device is None and hasattr(value, "pin_memory"):
        return value.pin_memory()
    if device is not None and hasattr(value, "to"):
        moved = value.to(
            device, **({"non_blocking": True} if pins(device) and _takes_non_blocking(cast(Any, type(value))) else {})
        )
        if moved is None:
            raise _unmoved(path, value, device, "its `to` returned None. Return the moved object.")
        return moved

    old, rebuild = members(value)
    new = {at: _each(inner, change, device, path + _shown(value, at)) for at, inner in old.items()}
    if all(new[at] is inner for at, inner in old.items()):
        if device is not None and rebuild is None and any(isinstance(v, Tensor) for v in _attributes(value).values()):
            raise _unmoved(path, value, device, "it holds tensors, and has no method `to` that returns it moved.")
        return value
    try:
        return cast("Callable[[Any, dict[Any, Any]], Any]", rebuild)(value, new)
    except Exception as error:  # of the user's class
        raise _unmoved(path, value, device, f"{type(error).__name__}: {error}.") from error


@cache
def _takes_non_blocking(kind: type) -> bool:
    """Whether the method `to` of a class can be asked not to wait."""
    if kind is PackedSequence:  # it passes its arguments on to its tensors
        return True
    try:
        return "non_blocking" in signature(cast(Any, kind).to).parameters
    except (TypeError, ValueError):  # written in C
        return False


def _attributes(value: Any) -> dict[str, Any]:
    return getattr(value, "__dict__", {})


def _shown(value: Any, at: Any) -> str:
    return f"[{at!r}]" if isinstance(value, (Mapping, Sequence, AnySet)) else f".{at}"


def _unmoved(path: str, value: Any, device: torch.device | None, why: str) -> RunError:
    return RunError(
        f"{path} of type {type(value).__name__} cannot be moved to {device or 'pinned memory'}: {why} Let collate return "
        "tensors in dicts, lists, tuples or dataclasses, or objects with a method `to(device)`.",
        field="collate",
        given=type(value).__name__,
    )
