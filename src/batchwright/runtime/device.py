"""The device that this process trains on, and a batch moved to it."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from copy import copy
from typing import Any, cast

import torch

from batchwright.core.errors import PlanError

from .ranks import Ranks


def choose(name: str, ranks: Ranks) -> torch.device:
    """Return the device called `name`; "auto" is CUDA if available, else the CPU. An accelerator always has an index.

    If `name` has no index, the index is the local rank, or 0 if this process sees only one device: the launcher may give
    each process its own device (`srun --gpus-per-task=1`).
    """
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if name == "auto":
        name = "cuda" if found is not None and found.type == "cuda" else "cpu"
    known = ("cpu", *([found.type] if found else []))
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
    number = int(index) if index else ranks.local_rank if count > 1 else 0
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
    return torch.device(kind, number)


def to_device(batch: Any, device: torch.device) -> Any:
    """Move a batch to `device`: tensors and objects with a `to` method, nested in mappings and sequences.

    >>> to_device({"x": [torch.ones(1)], "name": "a"}, torch.device("meta"))
    {'x': [tensor(..., device='meta', size=(1,))], 'name': 'a'}
    """
    if device.type == "cpu":
        return batch
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    # Before mappings and sequences: a tokenizer's BatchEncoding and torch's PackedSequence move themselves.
    if hasattr(batch, "to"):
        return batch.to(device)
    kind = cast(Any, type(batch))
    if isinstance(batch, Mapping):
        moved = {key: to_device(value, device) for key, value in cast("Mapping[Any, Any]", batch).items()}
        if not isinstance(batch, MutableMapping):
            return kind(moved)
        # Not kind(moved): a defaultdict takes other arguments.
        same: MutableMapping[Any, Any] = copy(cast("MutableMapping[Any, Any]", batch))
        same.update(moved)
        return same
    if isinstance(batch, Sequence) and not isinstance(batch, (str, bytes, range)):
        values = (to_device(value, device) for value in cast("Sequence[Any]", batch))
        return kind(*values) if hasattr(kind, "_fields") else kind(values)
    return batch
