"""The ledgers of all ranks, joined: what the ranks of each launch trained together, run of steps by run of steps.

A launch has as many files as ranks, and each line of one rank has a line with equal steps on all others. They are added up
as they are read, so that memory does not grow with the ranks. All lines but the first rank's are read without JSON.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from batchwright.core.errors import BatchwrightError
from batchwright.rundir import names
from batchwright.rundir.files import parse_object, read_bytes
from batchwright.runtime.data.order import LARGEST_POSITION, GlobalOrder

from .ledger import SCHEMA

MASK = 2**64 - 1
# More ranks than this in a header are damage.
_MOST_RANKS = 10**7
_HASH = re.compile("[0-9a-f]{32}")
# A line as ledger.py writes it: what is equal on all ranks, the samples and the hash of this rank.
_LINE = re.compile(
    rb'^(\{"first_step": \d+, "steps": \d+, "start_sample": \d+, "global_batch_size": \d+), "samples": (0|[1-9]\d{0,17}), '
    rb'"outcome": "(?:applied|skipped)", "hash": "([0-9a-f]{32})", "time": [1-9]\d*\.\d+\} *$',
    re.MULTILINE,
)


@dataclass(frozen=True)
class LedgerFinding:
    """One fault, with its launch and the first step of its run."""

    cause: str
    message: str
    launch: int | None = None
    first_step: int | None = None


@dataclass
class JoinedRun:
    """A run of steps: the sums over the lines of all ranks for the same steps."""

    first_step: int
    steps: int
    start: int
    batch: int
    outcome: str
    samples: int = 0
    differ: bool = False
    """Whether ranks have different numbers of steps."""
    last_rank: int = -1
    first: tuple[int, int] | None = None
    """The first rank with samples, and its hash."""
    same: int | None = None
    """A later rank with the same hash."""
    _hashes: int = 0
    _low: int = 0

    @property
    def end(self) -> int:
        """The first sample after it."""
        return self.start + self.steps * self.batch

    @property
    def hash(self) -> int:
        """The sum of the hashes, each half mod 2^64."""
        return (self._hashes - self._low >> 64 & MASK) << 64 | self._low & MASK

    def add(self, rank: int, samples: int, value: int) -> None:
        """Add what one rank trained."""
        self.last_rank = rank
        self.samples += samples
        self._hashes += value
        self._low += value & MASK
        if self.first is None:
            self.first = (rank, value) if samples else None
        elif value == self.first[1]:
            self.same = rank


@dataclass(frozen=True)
class LaunchLedger:
    """One launch: its header, its runs of steps, the ranks without a file, and the files of the others."""

    number: int
    ranks: int
    step: int
    position: int
    parent: int | None
    order: GlobalOrder
    runs: tuple[JoinedRun, ...] = ()
    missing: tuple[int, ...] = ()
    files: Mapping[int, Path] = field(default_factory=dict[int, Path])
    first_sample: int = 0
    """Where the run began: the samples before it were trained elsewhere."""


def read_ledgers(folder: Path, faults: list[LedgerFinding], notes: list[str]) -> dict[int, LaunchLedger]:
    """Every launch in a folder by its number; the lines of all ranks are joined. Damaged lines are left out."""
    files: dict[int, dict[int, Path]] = {}
    for name in names.listed(folder):
        if numbers := names.read_ledger(name):
            files.setdefault(numbers[0], {})[numbers[1]] = folder / name
    read = {number: _launch(number, files[number], faults, notes) for number in sorted(files)}
    return {number: launch for number, launch in read.items() if launch is not None}


def _launch(number: int, files: dict[int, Path], faults: list[LedgerFinding], notes: list[str]) -> LaunchLedger | None:
    header: LaunchLedger | None = None
    joined: dict[int, JoinedRun] = {}
    known: dict[bytes, JoinedRun] = {}  # by the beginning of a line, which is equal on all ranks
    for rank, path in sorted(files.items()):
        try:
            data = read_bytes(path)
        except OSError as error:
            faults.append(LedgerFinding("damaged", f"{path} cannot be read: {error.strerror}.", number))
            continue
        quickly = _add_quickly(rank, data, known)
        for place, text, line in _lines(path, data, number, faults, notes, only_first=quickly):
            try:
                if "ranks" in line:
                    read = _header(line, number, rank)
                    if header is not None and read != header:
                        raise ValueError("the header differs from that of another rank")
                    header = read
                else:
                    run = _join(joined, rank, line)
                    if found := _LINE.fullmatch(text):
                        known[found[1]] = run
            except ValueError as error:
                faults.append(LedgerFinding("damaged", f"{place}: {error}.", number))
    if header is None:
        return None
    missing = tuple(rank for rank in range(header.ranks) if rank not in files)
    runs = tuple(joined[step] for step in sorted(joined))
    return replace(header, runs=runs, missing=missing, files=dict(sorted(files.items())))


def _add_quickly(rank: int, data: bytes, known: Mapping[bytes, JoinedRun]) -> bool:
    """Add all lines of a file but its header, without JSON; False, and nothing is added, if a line is not as expected."""
    if not data.startswith(b'{"schema"') or not data.endswith(b"\n"):
        return False
    found = _LINE.findall(data)
    runs = [known.get(beginning) for beginning, _, _ in found]
    if len(found) != data.count(b"\n") - 1 or len({run and run.first_step for run in runs}) != len(runs):
        return False
    added = [(run, int(samples), int(value, 16)) for run, (_, samples, value) in zip(runs, found, strict=True) if run]
    if len(added) != len(runs):
        return False
    for run, samples, value in added:
        run.add(rank, samples, value)
    return True


def _header(line: dict[str, Any], number: int, rank: int) -> LaunchLedger:
    """The first line of a file; a ValueError that says what is wrong with it."""
    if (schema := whole(line, "schema", 1)) > SCHEMA:
        raise ValueError(f"schema is {schema}, and this version of batchwright reads up to {SCHEMA}")
    for name, expected in (("launch", number), ("rank", rank)):
        if whole(line, name) != expected:
            raise ValueError(f"{name} is {line[name]}, and the name of the file says {expected}")
    order = line.get("order")
    if not isinstance(order, dict) or not isinstance(cast("dict[str, Any]", order).get("shuffle"), bool):
        raise ValueError("order is not valid")
    try:
        made = GlobalOrder(**cast("dict[str, Any]", order))
    except (BatchwrightError, TypeError) as error:
        raise ValueError(f"order is not valid: {error}") from None
    if "parent" not in line:  # null for the first launch
        raise ValueError("parent is missing")
    parent = None if line["parent"] is None else whole(line, "parent")
    ranks = whole(line, "ranks", 1, _MOST_RANKS)
    first = whole(line, "first_sample") if "first_sample" in line else 0  # ledgers of older versions have none
    return LaunchLedger(number, ranks, whole(line, "step"), whole(line, "position"), parent, made, first_sample=first)


def _join(joined: dict[int, JoinedRun], rank: int, line: dict[str, Any]) -> JoinedRun:
    """Add one rank's line to its run of steps; a ValueError that says what is wrong with it."""
    first, steps = whole(line, "first_step"), whole(line, "steps", 1)
    start, batch, samples = whole(line, "start_sample"), whole(line, "global_batch_size", 1), whole(line, "samples")
    outcome, value = line.get("outcome"), line.get("hash")
    if max(first + steps, start + steps * batch) > LARGEST_POSITION:
        raise ValueError(f"the run of {steps} steps of {batch} samples ends after sample 2^63")
    if outcome not in ("applied", "skipped"):
        raise ValueError(f"outcome is {str(outcome)[:40]!r}, not applied or skipped")
    if not isinstance(value, str) or not _HASH.fullmatch(value):
        raise ValueError("hash is not a number of 32 hexadecimal digits")
    run = joined.setdefault(first, JoinedRun(first, steps, start, batch, outcome))
    if (run.start, run.batch) != (start, batch):
        raise ValueError(
            f"step {first} has {batch} samples from {start} on, and {run.batch} from {run.start} on elsewhere"
        )
    if rank == run.last_rank:
        raise ValueError(f"a second line for first_step {first}")
    run.add(rank, samples, int(value, 16))
    # Ranks that were killed may differ by a step, which was never saved.
    run.steps, run.differ = min(run.steps, steps), run.differ or run.steps != steps
    return run


def whole(line: dict[str, Any], name: str, least: int = 0, most: int = LARGEST_POSITION) -> int:
    """A number of a record; a ValueError that says what is there instead."""
    value = line.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"{name} is {'missing' if value is None else f'{str(value)[:40]!r}, no valid number'}")
    return value


def _lines(
    path: Path, data: bytes, launch: int, faults: list[LedgerFinding], notes: list[str], *, only_first: bool
) -> Iterator[tuple[str, bytes, dict[str, Any]]]:
    """(file and line number, text, object) of every line that holds a JSON object."""
    texts = data.split(b"\n", 1 if only_first else -1)
    filled = [(index, text) for index, text in enumerate(texts, 1) if text.strip(b"\0 ")]
    for index, text in filled[:1] if only_first else filled:
        place = f"{path}, line {index}"
        try:
            yield place, text, parse_object(text)
        except ValueError as error:
            # The last line of a machine that failed may be incomplete. If its steps were saved, they show as a gap.
            if index == filled[-1][0]:
                notes.append(f"{place}: {error}. It is the last line: a crash cuts it off.")
            else:
                faults.append(LedgerFinding("damaged", f"{place}: {error}.", launch))


def hash_in(path: Path, first_step: int) -> int | None:
    """The hash in the line of a file for this first step; None if there is none."""
    try:
        data = read_bytes(path)
    except OSError:
        return None
    at = data.find(b'\n{"first_step": %d, ' % first_step) + 1
    found = _LINE.match(data, at) if at else None
    return int(found[3], 16) if found else None
