"""Values read strictly by the name of their field: one reader per name, and one error with everything that is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

from .errors import ConfigError, Violation, did_you_mean, raise_violations
from .numbers import positive

Readers: TypeAlias = Mapping[str, Callable[[Any, str], Any]]  # name -> reader(value, name)


def read_fields(values: Mapping[str, Any], readers: Readers, section: str = "") -> dict[str, Any]:
    """Each value as the reader of its name reads it; a value of None is left out.

    Raises one ConfigError with every value that its reader refuses and every name that has no reader. `section`
    comes before the names in errors about unknown keys.

    >>> read_fields({"on": "yes", "off": None}, {"on": switch, "off": switch})
    {'on': True}
    """
    wrong: list[Violation] = []
    read: dict[str, Any] = {}
    for name, value in values.items():
        if name not in readers:
            wrong.append(unknown_key(f"{section}{name}", value, [f"{section}{known}" for known in readers]))
        elif value is not None:
            try:
                read[name] = readers[name](value, name)
            except ConfigError as error:
                wrong.extend(error.violations)
    raise_violations(ConfigError, wrong)
    return read


def choice(*names: str) -> Callable[[Any, str], str]:
    """A reader for one of a few names."""

    def read(value: Any, name: str) -> str:
        if value not in names:
            raise ConfigError(
                f"{name}={str(value)[:40]!r} is not one of {', '.join(names)}.", field=name, given=value, nearest=names
            )
        return value

    return read


def switch(value: Any, name: str) -> bool:
    """A reader for true or false."""
    values = {"true": True, "false": False, "yes": True, "no": False, "1": True, "0": False}
    text = str(value).strip().lower()
    if text not in values:
        raise ConfigError(
            f"{name}={text[:40]!r} is not true or false.", field=name, given=value, nearest=("true", "false")
        )
    return values[text]


def seconds(value: Any, name: str) -> float:
    """A reader for a time that may be 0."""
    return 0.0 if str(value).strip() in ("0", "0.0") else positive(value, name)


def unknown_key(name: str, value: Any, known: Iterable[str], where: str = "") -> Violation:
    """A violation for an unknown key, with the known keys that are close to it."""
    from difflib import get_close_matches  # slow to import, and only wrong input needs it

    close = get_close_matches(name, list(known), n=2, cutoff=0.6)
    given = value if isinstance(value, (int, float)) else str(value)[:40]
    return Violation(f"{name[:60]} is not a known key{where}.{did_you_mean(close)}", name[:60], given, tuple(close))
