"""Frozen dataclasses to JSON and back: `decode(type(x), encode(x)) == x` for every record that is stored."""

from __future__ import annotations

import dataclasses
import math
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


def read(kind: type[T], data: Any) -> T:
    """`decode` for a file that may be damaged: a ValueError names the first value that has not the type of its field.

    Floats are finite, and whole numbers below 2^64, so that everything can be computed with them and printed.

    >>> read(Fraction, "1/8"), read(tuple[int, ...], [1, 2])
    (Fraction(1, 8), (1, 2))
    >>> read(tuple[int, ...], [1, "2"])
    Traceback (most recent call last):
    ValueError: [1] is '2', not int
    """
    try:
        made = decode(kind, data)
    except (TypeError, LookupError, ArithmeticError, AttributeError, ValueError) as error:
        raise ValueError(str(error) or type(error).__name__) from None
    _verify(kind, made, "")
    return made


def _verify(kind: Any, value: Any, at: str) -> None:
    """A ValueError if a decoded value has not the type of its field."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in args:
            return
        matching = [a for a in args if a is not type(None) and isinstance(value, _plain(a))]
        if matching:
            return _verify(matching[0], value, at)
    elif origin is typing.Literal:
        if value in args:
            return
    elif isinstance(value, _plain(kind)) and (kind is bool or not isinstance(value, bool)):
        if origin is tuple:
            kinds = [args[0]] * len(value) if args[-1] is Ellipsis else args
            for index, (one, item) in enumerate(zip(kinds, value, strict=True)):
                _verify(one, item, f"{at}[{index}]")
        elif isinstance(value, frozenset):
            for item in typing.cast("frozenset[Any]", value):
                _verify(args[0], item, f"{at}[{item!r}]")
        elif isinstance(value, Mapping):
            for key, item in typing.cast("Mapping[Any, Any]", value).items():
                _verify(args[1], item, f"{at}[{key!r}]")
        elif dataclasses.is_dataclass(kind):
            hints = typing.get_type_hints(kind)
            for field in dataclasses.fields(kind):
                _verify(hints[field.name], getattr(value, field.name), f"{at}.{field.name}".lstrip("."))
        if not isinstance(value, (int, float)) or abs(value) < (2**64 if isinstance(value, int) else math.inf):
            return
        raise ValueError(f"{at} is not a finite number, or a whole number of more than 64 bits")
    raise ValueError(f"{at} is {str(value)[:40]!r}, not {getattr(kind, '__name__', None) or str(kind)}")


def _plain(kind: Any) -> Any:
    """The class of the values of a type; a whole number is also a float."""
    origin = typing.get_origin(kind) or kind
    return (int, float) if origin is float else origin if isinstance(origin, type) else object


def _decode(kind: Any, data: Any) -> Any:
    origin = typing.get_origin(kind)
    args = typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        if data is None:
            return None
        matching = [a for a in args if a is not type(None) and _looks_like(a, data)]
        return _decode(matching[0], data) if matching else data
    if origin is tuple:
        _require((list, tuple), data, "list")
        kinds = [args[0]] * len(data) if args[-1] is Ellipsis else args
        return tuple(_decode(kind, item) for kind, item in zip(kinds, data, strict=True))
    if origin is frozenset:
        return frozenset(_decode(args[0], item) for item in data)
    if origin in (dict, Mapping) or (isinstance(origin, type) and issubclass(origin, Mapping)):
        _require(Mapping, data, "object")
        return {k: _decode(args[1], v) for k, v in data.items()}
    if kind is Fraction:
        return Fraction(data)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        _require(Mapping, data, "object")
        hints = typing.get_type_hints(kind)
        return kind(
            **{f.name: _decode(hints[f.name], data[f.name]) for f in dataclasses.fields(kind) if f.name in data}
        )
    return data


def _require(kind: Any, data: Any, name: str) -> None:
    if not isinstance(data, kind):
        raise TypeError(f"{str(data)[:40]!r} must be a JSON {name}")


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
