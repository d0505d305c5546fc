"""Frozen dataclasses to JSON and back: `decode(type(x), encode(x)) == x` for every record that is stored."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, TypeVar

T = TypeVar("T")

SCHEMA = 1


def encode(value: Any) -> Any:
    """Plain lists, dicts and scalars; a fraction becomes text such as `1/8`, a set a sorted list.

    >>> encode((1, Fraction(1, 8)))
    [1, '1/8']
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: encode(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Fraction):
        return str(value)
    if isinstance(value, Mapping):
        return {str(k): encode(v) for k, v in typing.cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, (list, tuple, range)):
        return [encode(v) for v in typing.cast("Sequence[Any]", value)]
    if isinstance(value, frozenset):
        return sorted(encode(v) for v in typing.cast("frozenset[Any]", value))
    return value


def decode(kind: type[T], data: Any) -> T:
    """The inverse of `encode`; keys that the dataclass does not have (such as `schema`) are left out."""
    return typing.cast(T, _decode(kind, data))


def _decode(kind: Any, data: Any) -> Any:
    origin = typing.get_origin(kind)
    args = typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        if data is None:
            return None
        matching = [a for a in args if a is not type(None) and _looks_like(a, data)]
        return _decode(matching[0], data) if matching else data
    if origin is tuple:
        kinds = [args[0]] * len(data) if args[-1] is Ellipsis else args
        return tuple(_decode(kind, item) for kind, item in zip(kinds, data, strict=True))
    if origin is frozenset:
        return frozenset(_decode(args[0], item) for item in data)
    if origin in (dict, Mapping) or (isinstance(origin, type) and issubclass(origin, Mapping)):
        return {k: _decode(args[1], v) for k, v in data.items()}
    if kind is Fraction:
        return Fraction(data)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return kind(
            **{f.name: _decode(hints[f.name], data[f.name]) for f in dataclasses.fields(kind) if f.name in data}
        )
    return data


def _looks_like(kind: Any, data: Any) -> bool:
    origin = typing.get_origin(kind) or kind
    if dataclasses.is_dataclass(origin) or (isinstance(origin, type) and issubclass(origin, Mapping)):
        return isinstance(data, Mapping)
    if origin is tuple:
        return isinstance(data, list)
    if origin is Fraction:
        return isinstance(data, str)
    if origin is float:
        return isinstance(data, (int, float)) and not isinstance(data, bool)
    return isinstance(origin, type) and isinstance(data, origin)
