"""The conditions under which a checkpoint was made, and what a change of them means for a run that resumes.

A position means: all samples before it are trained. That holds only for the same order of the same samples. The number of
ranks, the micro batch and the strategy may change freely. A new schedule applies to later samples only.
"""

from __future__ import annotations

import math
import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from batchwright.core.codec import encode
from batchwright.core.ramp.schedule import Schedule
from batchwright.runtime.data.order import GlobalOrder

from . import generators

if TYPE_CHECKING:
    from torch import nn

# Samples in the digest of a dataset: enough to notice another file, and fast to read.
_DIGEST_SAMPLES = 8

# breaks: the position no longer says which samples were trained. changes: the position holds, but training continues
# differently. free: the result does not depend on it, up to the order of floating-point sums.
Severity = Literal["breaks", "changes", "free"]
_MEANING: dict[str, tuple[Severity, str]] = {
    "dataset_size": ("breaks", "the order is a permutation of all samples, so another size is another order"),
    "seed": ("breaks", "the seed determines the order"),
    "shuffle": ("breaks", "it determines the order"),
    "dataset": ("breaks", "samples with the same ids have other contents"),
    "schedule": ("changes", "the past stays as it was trained; the new schedule applies from this position on"),
    "optimizer": ("changes", "the options in the checkpoint are used; to use others, set them after loading"),
    "learning_rate": ("changes", "the rate is a function of the position, so it changes from here on"),
    "accumulate_dtype": ("changes", "gradients are summed in another precision from here on"),
    "grad_scaler": ("changes", "from here on, losses are scaled and steps that overflow are skipped, or no longer"),
    "model": ("changes", "weights are loaded by name and shape"),
    "micro_batch_size": ("free", "it only partitions a step"),
    "ranks": ("free", "they only partition a step"),
    "strategy": ("free", "weights are resharded"),
    "pipeline": ("free", "weights are loaded by name"),
    "threads": ("free", "sums are computed in another order"),
    "versions": ("free", "computations may round differently"),
}


@dataclass(frozen=True)
class Change:
    """One condition that changed since the checkpoint was saved."""

    field: str
    severity: Severity
    message: str


def fingerprint(
    order: GlobalOrder, schedule: Schedule, model: nn.Module | str, dataset: str | None, **facts: Any
) -> dict[str, Any]:
    """The conditions under which a checkpoint is made, as plain JSON; `facts` are further fields of `_MEANING`.

    `model` is a module, or the digest of another framework's parameters; `dataset` is its `dataset_digest`.
    """
    return {
        "dataset_size": order.size,
        "seed": order.seed,
        "shuffle": order.shuffle,
        "dataset": dataset,
        "schedule": encode(schedule),
        "model": model if isinstance(model, str) else _model_digest(model),
        "versions": versions(),
        **facts,
    }


def changes(saved: Mapping[str, Any], now: Mapping[str, Any], position: int) -> tuple[Change, ...]:
    """What changed between two fingerprints, the most severe first, each with an explanation.

    >>> for change in changes({"seed": 1, "ranks": 2}, {"seed": 7, "ranks": 4}, 960): print(change.message)
    seed was 1 and is 7: the seed determines the order, so position 960 no longer says which samples were trained.
    ranks was 2 and is 4: they only partition a step.
    """
    found: list[Change] = []
    for field, (severity, meaning) in _MEANING.items():
        before, after = saved.get(field), now.get(field)
        if before is None or after is None or before == after:
            continue
        if isinstance(before, dict) and isinstance(after, dict):
            old, new = cast(dict[str, Any], before), cast(dict[str, Any], after)
            parts = [f"{key} {old.get(key)} to {value}" for key, value in new.items() if old.get(key) != value]
            short = parts and all(len(part) < 60 for part in parts)
            shown = f"{field} changed" + (f" ({', '.join(parts)})" if short else "")
        else:
            shown = f"{field} was {_short(before)} and is {_short(after)}"
        end = f", so position {position:,} no longer says which samples were trained." if severity == "breaks" else "."
        found.append(Change(field, severity, f"{shown}: {meaning}{end}"))
    return tuple(found)


def versions() -> dict[str, str]:
    """The versions of Python and of the libraries that compute."""
    found = {"python": platform.python_version(), "numpy": np.__version__}
    used = ((name, sys.modules.get(name)) for name in ("torch", "jax"))
    return found | {name: str(module.__version__) for name, module in used if module is not None}


READING_DIGEST = "reading samples for the fingerprint of the dataset"
"""What a process does that computes `dataset_digest`, as an error names it."""


def dataset_digest(dataset: Any, size: int) -> str | None:
    """A digest of a dataset: its own `fingerprint`, else of a few samples; None if a second reading differs."""
    own = getattr(dataset, "fingerprint", None) or getattr(dataset, "_fingerprint", None)
    if isinstance(own, str):
        return own
    ids = sorted({int(i) for i in np.linspace(0, size - 1, min(size, _DIGEST_SAMPLES))})
    first = _samples_digest(dataset, ids)
    return first if first == _samples_digest(dataset, ids) else None


def _samples_digest(dataset: Any, ids: list[int]) -> str:
    digest = sha256()
    with generators.put_back():
        for i in ids:
            # As in the loader, so that an augmentation is the same every time.
            generators.seed_sample(0, i)
            _feed(digest, dataset[i])
    return digest.hexdigest()[:32]


def _feed(digest: Any, value: Any) -> None:
    digest.update(type(value).__name__.encode())
    torch: Any = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        tensor: Any = value.detach().cpu()
        if tensor.dtype is torch.bfloat16:  # numpy has no bfloat16
            tensor = (tensor if tensor.ndim else tensor.reshape(-1)).contiguous().view(torch.uint8)
        _feed(digest, tensor.numpy())
    elif isinstance(value, np.ndarray):
        array = cast(NDArray[Any], value)
        digest.update(f"{array.dtype}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).tobytes() if array.dtype != object else b"")
    elif isinstance(value, bytes):
        digest.update(value)
    elif isinstance(value, (str, int, float, bool, np.generic, type(None))):
        digest.update(repr(cast(Any, value)).encode())
    elif isinstance(value, Mapping):
        for key, inner in cast(Mapping[Any, Any], value).items():
            digest.update(repr(key).encode())
            _feed(digest, inner)
    elif isinstance(value, (list, tuple)):
        for inner in cast(Sequence[Any], value):
            _feed(digest, inner)


def _model_digest(model: nn.Module) -> str:
    from batchwright.runtime.stages import Stages  # imports torch, which a JAX run does not need

    if isinstance(model, Stages):
        return parameters_digest(model.described())
    # Without the prefixes of DDP and torch.compile.
    named = ((n.removeprefix("module.").removeprefix("_orig_mod."), p) for n, p in model.named_parameters())
    return parameters_digest((name, tuple(p.shape), str(p.dtype)) for name, p in named)


def parameters_digest(parameters: Iterable[tuple[str, tuple[int, ...], str]]) -> str:
    """A digest of the names, shapes and types of parameters.

    >>> parameters_digest([("weight", (2, 3), "float32")])
    '6 parameters, f617c486f52be44f'
    """
    listed = list(parameters)
    text = "\n".join(f"{name} {shape} {dtype}" for name, shape, dtype in listed)
    return f"{sum(math.prod(shape) for _, shape, _ in listed)} parameters, {sha256(text.encode()).hexdigest()[:16]}"


def _short(value: Any) -> str:
    text = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
    return text if len(text) <= 60 else text[:57] + "…"
