"""What `check` and `convert` share: a configuration read from files, KEY=VALUE and pasted command lines, and shown."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from batchwright.core.batch.request import READERS
from batchwright.core.errors import ConfigError
from batchwright.core.numbers import count
from batchwright.dialects import is_about_a_batch
from batchwright.dialects.checking import Report, equation
from batchwright.dialects.reading import read
from batchwright.dialects.record import Given, Reading, version_text

from . import text
from .files import names_file, not_read, read_arguments, read_entries, without_deleted, words_of
from .naming import Names
from .options import DEVICES


def read_configuration(
    arguments: tuple[str, ...], left_out: tuple[str, ...], flags: Mapping[str, Any], name: str | None
) -> Reading:
    """The keys of files, KEY=VALUE and a pasted line, as the framework reads them."""
    entries = [one for _, _, found in read_arguments(arguments, left_out) for one in found]
    entries = without_deleted(entries, (*arguments, *left_out))
    reading = read(entries, words=(*left_out, *words_of(arguments)), name=name, world=world_of(flags))
    unread = not_read(arguments, left_out, entries)
    if unread and not any(reading.dialect.reads(key) for key in (*reading.given, *reading.filled_in)):
        raise ConfigError(f"{unread[0]} No other key about the batch is given.", field="file")
    named = {key for key, one in entries if names_file(key, one)}
    others = tuple(key for key in reading.passed_over if key not in named)
    return replace(reading, notes=(*reading.notes, *unread), passed_over=others)


def read_text_as(path: str, text: str, flags: Mapping[str, Any], name: str) -> Reading:
    """A text that is not yet in its file, as a framework reads it."""
    return read(read_entries(path, text), name=name, world=world_of(flags))


def world_of(flags: Mapping[str, Any]) -> dict[str, Given]:
    """The devices that flags give."""
    return {n: Given(count(flags[n], n), f"--{n.replace('_', '-')}", 2) for n in DEVICES if flags.get(n) is not None}


def heading(reading: Reading) -> str:
    """The framework, its version, and why it is that one."""
    version = version_text(reading.version)
    by = reading.detected_by
    shown = ", ".join(by[:3]) + (f" and {len(by) - 3} more" if len(by) > 3 else "")
    return f"{reading.dialect.title}{f' {version}' if version else ''}" + (f" (by {shown})" if by else "")


def render(report: Report) -> list[str]:
    """A report as text: the verdict, the equation, the keys with their meaning, and the findings."""
    errors = sum(finding.severity == "error" for finding in report.findings)
    verdict = "ok" if report.ok else f"not ok: {errors} error{'s' * (errors > 1)}"
    lines = [*text.fitted([f"{verdict}: {heading(report.reading)}"]), ""]
    if report.job is not None:
        lines += [*text.fitted([equation(report.job)]), ""]
    lines += keys_table(report.reading)
    for finding in report.findings:
        lines += ["", f"{finding.severity}: {finding.cause}"]
        lines += text.bullets([spelled(report.reading, finding.message, finding.key)])
    if report.reading.notes:
        lines += ["", "notes:", *text.bullets(spelled(report.reading, one) for one in report.reading.notes)]
    return [*lines, *passed_over(report.reading)]


def keys_table(reading: Reading) -> list[str]:
    """The framework's keys beside batchwright's names."""
    names: dict[str, list[str]] = {}
    for name, given in reading.fields.items():
        for key in _own_keys(reading, given):
            names.setdefault(key, []).append(f"{name} {_shown(given.value)}")
    rows = [
        (key, _shown(given.value), ", ".join(names.get(key, ())))
        for key, given in reading.given.items()
        if reading.dialect.reads(key)
    ]
    others: dict[str, list[str]] = {}
    for name, given in reading.fields.items():
        if given.origin and not _own_keys(reading, given):
            others.setdefault(given.origin, []).append(f"{name} {_shown(given.value)}")
    return text.table([*rows, *((origin, "", ", ".join(shown)) for origin, shown in others.items())], right=[1])


def _keys_of(reading: Reading, given: Given) -> list[str]:
    """The keys that an origin names: the framework's, and those of a framework beside it."""
    words = {word.rpartition(": ")[2].partition("=")[0] for word in given.origin.split(" and ")}
    words |= set(given.origin.replace("=", " ").split())
    words |= {word.removeprefix(f"{given.section}.") for word in words}
    return [key for key in {**reading.given, **reading.beside} if key in words]


def _own_keys(reading: Reading, given: Given) -> list[str]:
    """The framework's own keys that an origin names."""
    return [] if given.section else [key for key in _keys_of(reading, given) if key in reading.given]


def _shown(value: Any) -> str:
    shown = ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
    return shown if len(shown) <= 40 else shown[:39] + "…"


def spelled(reading: Reading, message: str, field: str | None = None) -> str:
    """A message with the framework's keys for batchwright's names."""
    flags: dict[str, str] = {}
    given: dict[str, tuple[Any, str | None]] = {}
    for name, one in reading.fields.items():
        keys = _keys_of(reading, one)
        written = one.origin if one.origin.startswith("--") else keys[0] if len(keys) == 1 else None
        # A key in another unit (tokens, all devices) keeps our name: a value of ours would be wrong in it.
        alike = not keys or str(_value_of(reading, keys[0], one)) == str(one.value)
        if written and alike and name in READERS:
            flags[name] = written
            given[name] = (one.value, written)
    # No framework has batches whose shares differ.
    return Names(flags, given).spell(re.sub(r" Or give allow_ragged\b[^.]*\.", "", message), field)


def _value_of(reading: Reading, key: str, given: Given) -> Any:
    """What a key that an origin names says."""
    first, second = (reading.beside, reading.given) if given.section else (reading.given, reading.beside)
    return first[key].value if key in first else second[key].value


def passed_over(reading: Reading) -> list[str]:
    """How many keys do not concern the batch."""
    others = len(reading.passed_over)
    if not others:
        return []
    doubtful = [key for key in reading.passed_over if is_about_a_batch(key)][:5]
    named = f"; these may be about the batch: {', '.join(doubtful)}" if doubtful else ": not about the batch"
    return ["", *text.fitted([f"{others} other key{'s' * (others > 1)} passed over{named}"])]
