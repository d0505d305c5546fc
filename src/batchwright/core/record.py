"""Frozen dataclasses whose methods are written once instead of compiled for every class.

`@dataclass(frozen=True)` writes and compiles six methods per class: 1 to 3 ms each, and a command such as `plan` defines a
dozen. A record is the same to whoever uses it (`fields`, `replace`, defaults, `==`, `hash`, `repr`, type checkers), and
costs a tenth of that. Objects that are made or looked up by the thousand (`schedule.py`) stay dataclasses: making one is
faster, and so is reading it.
"""

from __future__ import annotations

from dataclasses import MISSING, FrozenInstanceError, dataclass, field, fields
from typing import Any, TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def record(cls: type[T]) -> type[T]:
    """Make a class a frozen dataclass.

    >>> @record
    ... class Point:
    ...     x: int
    ...     y: int = 0
    >>> Point(1), Point(1, y=2) == Point(1, 2)
    (Point(x=1, y=0), True)
    """
    made: Any = dataclass(init=False, repr=False, eq=False)(cls)
    found = fields(made)
    ready = {f.name: f.default for f in found if f.default is not MISSING}
    fresh = {f.name: f.default_factory for f in found if f.default_factory is not MISSING}
    made.__record_defaults__ = ready
    made.__record_factories__ = fresh
    made.__record_checks__ = hasattr(made, "__post_init__")
    for name, method in _METHODS.items():
        setattr(made, name, method)
    return made


def _init(self: Any, *args: Any, **given: Any) -> None:
    names: tuple[str, ...] = self.__match_args__
    values: dict[str, Any] = self.__dict__
    if len(args) < len(names):
        values.update(self.__record_defaults__)
        for name in self.__record_factories__:
            values[name] = self.__record_factories__[name]()
    values.update(zip(names, args, strict=False))
    if given:
        values.update(given)
        wrong = values.keys() != self.__dataclass_fields__.keys() or not given.keys().isdisjoint(names[: len(args)])
    else:
        wrong = len(values) != len(names)
    if wrong or len(args) > len(names):
        raise TypeError(f"{type(self).__name__} takes {', '.join(names)}: not {len(args)} values and {sorted(given)}.")
    if self.__record_checks__:
        self.__post_init__()


def _values(self: Any) -> tuple[Any, ...]:
    return tuple(map(self.__dict__.__getitem__, self.__match_args__))


def _repr(self: Any) -> str:
    shown = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.__match_args__)
    return f"{type(self).__qualname__}({shown})"


def _eq(self: Any, other: object) -> Any:
    return _values(self) == _values(other) if type(other) is type(self) else NotImplemented


def _hash(self: Any) -> int:
    return hash(_values(self))


def _frozen(self: Any, name: str, *value: Any) -> None:
    raise FrozenInstanceError(f"{type(self).__name__} is frozen: its {name} cannot change.")


_METHODS = {
    "__init__": _init,
    "__repr__": _repr,
    "__eq__": _eq,
    "__hash__": _hash,
    "__setattr__": _frozen,
    "__delattr__": _frozen,
}
