"""Configurations of other frameworks, read as the command line reads them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from batchwright.dialects import flatten
from batchwright.dialects.checking import Report, check
from batchwright.dialects.reading import read
from batchwright.dialects.record import Given, Reading


def reading(keys: Mapping[str, Any], name: str | None = None, *, words: tuple[str, ...] = (), **world: int) -> Reading:
    """These keys, as a framework reads them."""
    entries = [(key, Given(value, f"file: {key}", 0)) for key, value in flatten(keys).items()]
    return read(entries, words=words, name=name, world={n: Given(v, f"--{n}", 2) for n, v in world.items()})


def checked(keys: Mapping[str, Any], name: str | None = None, **world: int) -> Report:
    """What `check` says about these keys."""
    return check(reading(keys, name, **world))


def causes(report: Report) -> set[str]:
    """The causes of all findings; errors begin with an exclamation mark."""
    return {("!" if f.severity == "error" else "") + f.cause for f in report.findings}
