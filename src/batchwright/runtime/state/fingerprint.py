"""What a checkpoint was made with, and what a change of it means for going on.

The position says "everything before me is trained". That stays true only along the same order over the same samples;
the number of ranks, the micro batch or the strategy may change freely; the past of the schedule is history; another
model has other weights.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from batchwright.core.codec import encode
from batchwright.core.ramp.schedule import Schedule
from batchwright.runtime.data.order import GlobalOrder

from . import generators

# Enough to notice another file, too few to be felt at the start of a run.
_LOOKED_AT = 8

Severity = Literal["breaks", "changes", "free"]
SEVERITY: dict[Severity, str] = {
    "breaks": "the position no longer says which samples were trained",
    "changes": "the position holds, but training goes on differently",
    "free": "the result does not depend on it, up to floating-point order",
}
_MEANING: dict[str, tuple[Severity, str]] = {
    "dataset_size": ("breaks", "the order is a permutation of all samples, so another number of them is another order"),
    "seed": ("breaks", "the seed chooses the order"),
    "shuffle": ("breaks", "it chooses the order"),
    "dataset": ("breaks", "samples at the same ids have another content"),
    "schedule": ("changes", "the past stays as it was trained; the new schedule applies from this position on"),
    "optimizer": ("changes", "its options in the checkpoint win; change them after loading to change them"),
    "learning_rate": ("changes", "the rate is a function of the position, so it changes from here on"),
    "accumulate_dtype": ("changes", "gradients are added up in another precision from here on"),
    "grad_scaler": ("changes", "losses are scaled, and steps that overflow skipped, from here on or no longer"),
    "model": ("changes", "weights are loaded by name and shape"),
    "micro_batch_size": ("free", "it only partitions a step"),
    "ranks": ("free", "they only partition a step"),
    "strategy": ("free", "weights are resharded"),
    "threads": ("free", "sums are taken in another order"),
    "versions": ("free", "kernels may round differently"),
}


@dataclass(frozen=True)
class Change:
    """One thing that is not as it was when the checkpoint was saved."""

    field: str
    severity: Severity
    message: str


def fingerprint(order: GlobalOrder, schedule: Schedule, model: nn.Module, dataset: Any, **facts: Any) -> dict[str, Any]:
    """What a checkpoint remembers of its making, as plain JSON; `facts` are further fields by their names here."""
    return {
        "dataset_size": order.size,
        "seed": order.seed,
        "shuffle": order.shuffle,
        "dataset": dataset_digest(dataset, order.size),
        "schedule": encode(schedule),
        "model": _model_digest(model),
        "versions": versions(),
        **facts,
    }


def changes(saved: Mapping[str, Any], now: Mapping[str, Any], position: int) -> tuple[Change, ...]:
    """What changed between two fingerprints, the worst first, each explained.

    >>> for change in changes({"seed": 1, "ranks": 2}, {"seed": 7, "ranks": 4}, 960): print(change.message)
    seed was 1 and is 7: the seed chooses the order, so position 960 no longer says which samples were trained.
    ranks was 2 and is 4: they only partition a step.
    """
    found: list[Change] = []
    for field, (severity, meaning) in _MEANING.items():
        before, after = saved.get(field), now.get(field)
        if before is None or after is None or before == after:
            continue
        shown = (
            f"{field} changed" if isinstance(before, dict) else f"{field} was {_short(before)} and is {_short(after)}"
        )
        if isinstance(before, dict) and isinstance(after, dict):
            parts = [f"{k} {before.get(k)} to {v}" for k, v in after.items() if before.get(k) != v]
            shown += f" ({', '.join(parts)})" if parts and all(len(part) < 60 for part in parts) else ""
        end = f", so position {position:,} no longer says which samples were trained." if severity == "breaks" else "."
        found.append(Change(field, severity, f"{shown}: {meaning}{end}"))
    return tuple(found)


def versions() -> dict[str, str]:
    """The libraries that compute."""
    return {"python": platform.python_version(), "torch": str(torch.__version__), "numpy": np.__version__}


def dataset_digest(dataset: Any, size: int) -> str | None:
    """A digest of a dataset: its own `fingerprint` if it has one, else of a few samples; None if they are not stable."""
    own = getattr(dataset, "fingerprint", None) or getattr(dataset, "_fingerprint", None)
    if isinstance(own, str):
        return own
    ids = sorted({int(i) for i in np.linspace(0, size - 1, min(size, _LOOKED_AT))})
    first = _samples_digest(dataset, ids)
    return first if first == _samples_digest(dataset, ids) else None


def _samples_digest(dataset: Any, ids: list[int]) -> str:
    digest = sha256()
    with generators.put_back():
        for i in ids:
            generators.seed_sample(0, i)  # as the loader does it: an augmentation is then the same every time
            _feed(digest, dataset[i])
    return digest.hexdigest()[:32]


def _feed(digest: Any, value: Any) -> None:
    digest.update(type(value).__name__.encode())
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        if value.dtype is torch.bfloat16:  # which numpy does not know
            value = (value if value.ndim else value.reshape(-1)).contiguous().view(torch.uint8)
        _feed(digest, value.numpy())
    elif isinstance(value, np.ndarray):
        digest.update(f"{value.dtype}{value.shape}".encode())
        digest.update(np.ascontiguousarray(value).tobytes() if value.dtype != object else b"")
    elif isinstance(value, bytes):
        digest.update(value)
    elif isinstance(value, (str, int, float, bool, np.generic, type(None))):
        digest.update(repr(value).encode())
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            digest.update(repr(key).encode())
            _feed(digest, inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            _feed(digest, inner)


def _model_digest(model: nn.Module) -> str:
    prefixes = ("module.", "_orig_mod.")
    names = []
    for name, parameter in model.named_parameters():
        for prefix in prefixes:
            name = name.removeprefix(prefix)
        names.append(f"{name} {tuple(parameter.shape)} {parameter.dtype}")
    text = "\n".join(names)
    return f"{sum(p.numel() for p in model.parameters())} parameters, {sha256(text.encode()).hexdigest()[:16]}"


def _short(value: Any) -> str:
    text = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
    return text if len(text) <= 60 else text[:57] + "…"
