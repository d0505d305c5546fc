"""The events of a run, read from its files: all of them, or the numbers of every step as columns.

`runtime/loop/events.py` writes them and lists their keys. A line that is cut off or damaged is left out and counted.
"""

from __future__ import annotations

import math
import os
from array import array
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from . import atomic, names
from .files import parse_object

# The numbers of a step that are drawn. Everything is a float: 100,000 steps are then 10 MB, and a million 100 MB.
COLUMNS = (
    "step", "samples", "time", "loss", "global_batch_size", "stage", "ranks", "launch", "samples_per_second",
    "tokens_per_second", "step_seconds", "noise_scale", "noise_low", "noise_high",
)  # fmt: skip

# The end of a file that has some hundred events.
_END_BYTES = 1 << 17


@dataclass
class RunEvents:
    """The steps that led to the newest state, column by column (an unknown number is NaN), and all other events."""

    steps: dict[str, array[float]] = field(default_factory=lambda: {name: array("d") for name in COLUMNS})
    others: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    skipped: dict[str, int] = field(default_factory=dict[str, int])
    """Lines that could not be read, by file."""


def read_events(directory: Path | str, *, lineage: bool = True) -> list[dict[str, Any]]:
    """All events of a run directory in order; with `lineage`, without the steps that a later launch repeated.

    >>> read_events("nowhere")
    []
    """
    launches = [[e for e in _lines(path) if e is not None] for path in _files(directory)]
    if lineage:
        limit = math.inf
        for index in reversed(range(len(launches))):
            starts = [e.get("samples", 0) for e in launches[index] if e["kind"] == "launch"]
            launches[index] = [e for e in launches[index] if e.get("samples", 0) <= limit or e["kind"] == "launch"]
            limit = min([limit, *starts])
    return [event for events in launches for event in events]


def read_columns(directory: Path | str) -> RunEvents:
    """The same with `lineage`, for drawing: memory for a few numbers per step instead of whole events."""
    parts: list[RunEvents] = []
    limit = math.inf
    for path in reversed(_files(directory)):
        part, skipped, start = RunEvents(), 0, limit
        for event in _lines(path):
            if event is None:
                skipped += 1
                continue
            kind, samples = event["kind"], event.get("samples", 0)
            if kind == "launch":
                start = min(start, samples)
            if samples > limit and kind != "launch":
                continue
            if kind == "step":
                for name, column in part.steps.items():
                    column.append(number(event.get(name)))
            else:
                part.others.append(event)
        if skipped:
            part.skipped[path.name] = skipped
        limit = min(limit, start)
        parts.insert(0, part)
    whole = RunEvents()
    for part in parts:
        for name, column in part.steps.items():
            whole.steps[name].extend(column)
        whole.others += part.others
        whole.skipped |= part.skipped
    return whole


def last_step(directory: Path | str, before: int) -> int:
    """The largest number of a step that launches before this one have recorded, from the ends of their files; -1 without any.

    >>> last_step("nowhere", before=3)
    -1
    """
    steps = [-1]
    for launch, path in _numbered(directory):
        if launch < before:
            with suppress(OSError), open(path, "rb", opener=atomic.regular) as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _END_BYTES))
                events = [_event(line) for line in file.readlines()]
                steps += [
                    int(e["step"]) for e in events if e and e["kind"] == "step" and math.isfinite(number(e.get("step")))
                ]
    return max(steps)


# The numbers of a round of reinforcement learning that are drawn.
ROUND_COLUMNS = (
    "round", "samples", "prompts", "responses", "dropped_responses", "policy_version", "policy_lag", "loss", "reward",
    "seconds", "rollout_seconds", "train_seconds", "wait_seconds",
)  # fmt: skip


def read_rounds(directory: Path | str) -> dict[str, Any] | None:
    """The rounds of a run of `train_rl` that led to its newest state, column by column, and the last one; None without any.

    >>> read_rounds("nowhere")
    """
    columns: dict[str, list[float]] = {name: [] for name in ROUND_COLUMNS}
    places: list[tuple[Path, int]] = []  # the file and the line of each round: all spans of all rounds would be large
    skipped: dict[str, int] = {}
    replaced, discarded = 0, 0
    for path in _files(directory):
        for line, event in enumerate(_lines(path)):
            kind = event["kind"] if event else None
            if event is None:
                skipped[path.name] = skipped.get(path.name, 0) + 1
            elif kind == "rollout_replaced":
                replaced += 1
            elif kind == "rollout" and math.isfinite(responses := number(event.get("discarded_responses"))):
                discarded += int(responses)
            elif kind == "launch":  # rounds after its start are trained again
                while places and columns["samples"][-1] > event.get("samples", 0):
                    for column in (places, *columns.values()):
                        column.pop()
            elif kind == "round":
                for name, column in columns.items():
                    column.append(number(event.get(name)))
                places.append((path, line))
    if not places:
        return None
    path, line = places[-1]
    return {
        "name": Path(directory).resolve().name,
        "rounds": columns,
        "last": next(islice(_lines(path), line, None), None) or {},
        "replaced_workers": replaced,
        "discarded_responses": discarded,
        "skipped": skipped,
    }


def has_rounds(directory: Path | str) -> bool:
    """Whether a folder holds events of `train_rl`.

    >>> has_rounds("nowhere")
    False
    """
    return any(event and event["kind"] == "round" for path in _files(directory) for event in _lines(path))


def number(value: Any) -> float:
    """A number of an event as a float; the loop writes NaN and infinity as text. NaN if it is none.

    >>> number(2), number("inf"), number("nan"), number(None), number(True)
    (2.0, inf, nan, nan, nan)
    """
    if isinstance(value, bool) or (isinstance(value, str) and value not in ("inf", "-inf")):
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _files(directory: Path | str) -> list[Path]:
    """The events files of all launches, in the order of the launches."""
    return [path for _, path in _numbered(directory)]


def _numbered(directory: Path | str) -> list[tuple[int, Path]]:
    """The same with the number of each launch."""
    folder = Path(directory) / names.EVENTS
    found = sorted((number, name) for name in names.listed(folder) if (number := names.read_events(name)) is not None)
    return [(number, folder / name) for number, name in found]


def _lines(path: Path) -> Iterator[dict[str, Any] | None]:
    """Each event of a file; None for a line that is none: it is damaged, or still being written."""
    try:
        with open(path, "rb", opener=atomic.regular) as file:
            for line in file:
                yield _event(line)
    except OSError:
        yield None


def _event(line: bytes) -> dict[str, Any] | None:
    try:
        found = parse_object(line) if line.endswith(b"\n") else {}
    except ValueError:
        found = {}
    return found if _is_event(found) else None


def _is_event(line: dict[str, Any]) -> bool:
    """Whether a line can be an event: a damaged line may be any JSON object."""
    samples = line.get("samples", 0)
    return isinstance(line.get("kind"), str) and isinstance(samples, (int, float)) and samples == samples
