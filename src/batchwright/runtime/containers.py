"""Samples and batches: what their containers hold, how they are rebuilt, and how much a sample holds.

parts, rebuild = members(batch)
changed = rebuild(batch, {at: change(part) for at, part in parts.items()})
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, MutableSequence, Sequence
from collections.abc import Set as AnySet
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any, cast

import numpy as np
from torch import Tensor


def members(value: Any) -> tuple[dict[Any, Any], Callable[[Any, dict[Any, Any]], Any] | None]:
    """What a container holds, by key, index or name, and the function that rebuilds it; nothing for any other object."""
    if isinstance(value, Mapping):
        return dict(cast("Mapping[Any, Any]", value)), _mapping
    if isinstance(value, (Sequence, AnySet)):
        return dict(enumerate(cast("Sequence[Any]", value))), _sequence
    if is_dataclass(value) and not isinstance(value, type):
        names = [each.name for each in fields(value)]
        return {name: getattr(value, name) for name in names if hasattr(value, name)}, _dataclass
    return {}, None


def _mapping(old: Any, values: dict[Any, Any]) -> Any:
    if not isinstance(old, MutableMapping):
        return cast(Any, type(old))(values)
    # Not type(old)(values): a defaultdict takes other arguments.
    made: MutableMapping[Any, Any] = copy(cast("MutableMapping[Any, Any]", old))
    made.update(values)
    return made


def _sequence(old: Any, values: dict[Any, Any]) -> Any:
    kind = cast(Any, type(old))
    if hasattr(kind, "_fields"):
        return kind(*values.values())
    if not isinstance(old, MutableSequence) or type(cast(Any, old)) is list:
        return kind(values.values())
    made: MutableSequence[Any] = copy(cast("MutableSequence[Any]", old))
    made[:] = values.values()
    return made


def _dataclass(old: Any, values: dict[Any, Any]) -> Any:
    made: Any = copy(old)
    for name, value in values.items():
        # Not `replace`: that calls __init__, which may compute and check. The copy may be frozen.
        object.__setattr__(made, name, value)
    return made


def elements(sample: Any) -> int:
    """How much a sample holds: the elements of its tensors and arrays, the characters of its texts, its numbers.

    >>> import torch
    >>> elements({"input_ids": [5, 6, 7], "text": "abc"}), elements((torch.zeros(2, 3), 1))
    (6, 7)
    """
    if isinstance(sample, Tensor):
        return sample.numel()
    if isinstance(sample, np.ndarray):
        return sample.size
    if isinstance(sample, (str, bytes, range)):
        return len(sample)
    if isinstance(sample, (list, tuple)) and {*map(type, cast("Sequence[Any]", sample))} <= {int, float, bool}:
        return len(cast("Sequence[Any]", sample))  # token ids may be many
    parts, rebuild = members(sample)
    return sum(map(elements, parts.values())) if rebuild else 1


def own(sample: Any) -> Any:
    """A copy of a sample that a collate function may change (`sample.pop("labels")`); other samples as they are."""
    return copy(cast(Any, sample)) if isinstance(sample, (MutableMapping, MutableSequence)) else sample
