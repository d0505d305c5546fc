"""Which responses entered which update: a file beside the ledger for each trainer rank, and its audit.

The ledger (ledger.py) counts prompts: each is in exactly one round. Here is what the updates of a round were made of. Rank 1
of launch 3 writes `RUN/ledger/updates/updates-launch-00003-rank-00001.jsonl`: a header, then a line for each update with
its prompts, the number of responses that this rank trained, their hash, and the policy versions that sampled them.

A response is number `position × generations + generation`, as its file says. Its hash is that of the ledger, mixed from the
update and the number; the hash of an update is a sum, so it does not depend on ranks and micro batches. The audit compares it
with the sum over all responses to the update's prompts: a response that is missing, repeated or in another update changes it.
The files that the ranks read must have all prompts of the update, each in one file, sampled by one policy.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from batchwright.rundir import names
from batchwright.rundir.files import parse_object, read_bytes, write_fault

from .joined import LedgerFinding, whole
from .ledger import sample_hashes, sums, write_all

SCHEMA = 1
_BLOCK = 1 << 19  # responses whose hashes are in memory at once


class Updates:
    """One rank's record of the updates of one launch: `fed` for each micro batch, `applied` for each update."""

    def __init__(self, directory: Path, *, launch: int, rank: int, generations: int, **header: Any) -> None:
        self.path = directory / names.UPDATES / names.updates(launch, rank)
        self._count, self._low, self._high = 0, 0, 0
        self._sampled: dict[tuple[int, int], int] = {}
        facts = {"schema": SCHEMA, "launch": launch, "rank": rank, "generations": generations, **header}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND, 0o644)
        except OSError as error:
            raise self._fault(error) from error
        self._write({**facts, "time": time.time()})

    def fed(self, update: int, numbers: Sequence[int], pieces: Iterable[tuple[range, int]]) -> None:
        """Add responses by their numbers, as they were stored, and the (positions, policy version) of their files."""
        ids = np.array(numbers, dtype=np.int64)
        low, high = sums(*sample_hashes(update, ids))
        self._count, self._low, self._high = self._count + len(ids), self._low + low, self._high + high
        for positions, version in pieces:
            self._sampled[positions.start, positions.stop] = version

    def applied(self, update: int, round: int, prompts: range, dropped: int) -> None:
        """Write the line of an update; `dropped` responses of its round were too old and were sampled again."""
        line = {
            "update": update,
            "round": round,
            "first": prompts.start,
            "stop": prompts.stop,
            "responses": self._count,
            "hash": f"{self._high % 2**64:016x}{self._low % 2**64:016x}",
            "sampled": [[*span, version] for span, version in sorted(self._sampled.items())],
            "dropped": dropped,
        }
        self._count = self._low = self._high = 0
        self._sampled.clear()
        self._write(line)

    def sync(self) -> None:
        """Make the file durable: before a checkpoint is saved."""
        try:
            os.fsync(self._file)
        except OSError as error:
            raise self._fault(error) from error

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _write(self, line: Mapping[str, Any]) -> None:
        text = json.dumps(line).encode() + b"\n"
        try:
            write_all(self._file, text)
        except OSError as error:
            raise self._fault(error) from error

    def _fault(self, error: OSError) -> Exception:
        return write_fault(error, f"the record {self.path.name}", self.path.parent, "Checkpoints are untouched.")


@dataclass
class UpdatesAudit:
    """What an audit of updates found: `responses` entered `updates`, each where it belongs, if there are no findings."""

    updates: int = 0
    responses: int = 0
    dropped_responses: int = 0
    discarded_responses: int = 0
    policy_lag: int = 0


def audit_updates(
    folder: Path,
    lineage: Sequence[tuple[int, int, int]],
    faults: list[LedgerFinding],
    notes: list[str],
    *,
    required: bool = False,
) -> UpdatesAudit | None:
    """Audit the updates of each (launch, start, stop) of a lineage, in positions of prompts; None if there are none.

    With `required`, because a checkpoint counts updates, their files must be there.
    """
    files: dict[int, dict[int, Path]] = {}
    for name in names.listed(folder / names.UPDATES):
        if numbers := names.read_updates(name):
            files.setdefault(numbers[0], {})[numbers[1]] = folder / names.UPDATES / name
    if not files and not required:
        return None
    found = UpdatesAudit()
    for launch, start, stop in lineage:
        if stop > start:
            _Launch(launch, files.get(launch, {}), faults, notes).add(start, stop, found)
    for launch in files:  # also of launches whose work was lost
        headers = _lines(files[launch].get(0), launch, [], [])[:1]
        found.discarded_responses += sum(int(line.get("discarded_responses") or 0) for line in headers)
    return found


class _Launch:
    """The records of one launch."""

    def __init__(self, number: int, files: Mapping[int, Path], faults: list[LedgerFinding], notes: list[str]) -> None:
        self._number, self._faults = number, faults
        self._ranks = {rank: _lines(path, number, faults, notes) for rank, path in sorted(files.items())}

    def add(self, start: int, stop: int, found: UpdatesAudit) -> None:
        """Check the updates that trained the prompts `start` to `stop`, and add their numbers."""
        try:
            header = self._ranks[0][0]
            ranks, generations = whole(header, "ranks", 1), whole(header, "generations", 1)
            per_pass, per_round = whole(header, "updates_per_pass", 1), whole(header, "updates_per_round", 1)
            version, lag = whole(header, "version"), whole(header, "worst_policy_lag_updates")
        except (KeyError, IndexError, ValueError) as error:
            self._fault(f"its updates have no header that can be read ({error}).")
            return
        if missing := [rank for rank in range(ranks) if rank not in self._ranks]:
            self._fault(f"no record of the updates of rank {', '.join(map(str, missing[:8]))}.")
            return
        by_update: dict[int, list[dict[str, Any]]] = {}
        for lines in self._ranks.values():
            for line in lines[1:]:
                by_update.setdefault(line["update"], []).append(line)
        round_start = at = start
        number = 0
        while round_start < stop:
            lines = by_update.get(version, [])
            if len(lines) != ranks or len({(line["first"], line["stop"]) for line in lines}) != 1:
                self._fault(f"update {version:,} has {len(lines)} lines of {ranks} ranks, or they differ.", version)
                return
            first, end = lines[0]["first"], lines[0]["stop"]
            at = round_start if number % per_pass == 0 else at
            if first != at or end <= first:
                self._fault(f"update {version:,} has the prompts {first:,} to {end:,}, and {at:,} is next.", version)
                return
            self._check(version, lines, range(first, end), generations, lag, found)
            at, number, version = end, number + 1, version + 1
            if number == per_round:
                round_start, number = at, 0
        if round_start != stop:
            self._fault(f"the updates end at prompt {round_start:,}, and the checkpoint at {stop:,}.")

    def _check(
        self, update: int, lines: list[dict[str, Any]], prompts: range, generations: int, lag: int, found: UpdatesAudit
    ) -> None:
        expected, count = len(prompts) * generations, sum(line["responses"] for line in lines)
        found.updates, found.responses = found.updates + 1, found.responses + count
        found.dropped_responses += max(line["dropped"] for line in lines)
        hashes = [int(line["hash"], 16) for line in lines]
        low, high = sum(h & 2**64 - 1 for h in hashes) % 2**64, sum(h >> 64 for h in hashes) % 2**64
        if count != expected or (low, high) != _expected(update, prompts, generations):
            message = f"update {update:,}: {count:,} responses, which are not the {expected:,} of prompts {prompts.start:,} to "
            self._fault(f"{message}{prompts.stop:,}, {generations} each.", update)
        files = sorted({(first, stop, version) for line in lines for first, stop, version in line["sampled"]})
        if not _covers(files, prompts):
            message = (
                f"update {update:,}: the files that were read do not have each of the prompts {prompts.start:,} to "
            )
            self._fault(f"{message}{prompts.stop:,} once.", update)
        versions = [version for _, _, version in files]
        worst = update - min(versions, default=update)
        found.policy_lag = max(found.policy_lag, worst)
        if worst > lag or max(versions, default=update) > update:
            message = f"update {update:,}: policies {min(versions)} to {max(versions)} sampled its responses, and the planned lag"
            self._fault(f"{message} is {lag} updates.", update)

    def _fault(self, message: str, update: int | None = None) -> None:
        self._faults.append(LedgerFinding("updates", f"launch {self._number}: {message}", self._number, update))


def _covers(files: Sequence[tuple[int, int, int]], prompts: range) -> bool:
    """Whether sorted files (first, stop, version) have every prompt once. The first and the last may have others, too.

    >>> _covers([(0, 6, 3), (6, 8, 4)], range(4, 8)), _covers([(0, 6, 3), (7, 8, 4)], range(4, 8)), _covers([], range(4, 8))
    (True, False, False)
    """
    if not files or not files[0][0] <= prompts.start < files[0][1] or not files[-1][0] < prompts.stop <= files[-1][1]:
        return False
    return all(stop == first for (_, stop, _), (first, _, _) in itertools.pairwise(files))


def _expected(update: int, prompts: range, generations: int) -> tuple[int, int]:
    low = high = 0
    ids = range(prompts.start * generations, prompts.stop * generations)
    for at in range(0, len(ids), _BLOCK):
        part = ids[at : at + _BLOCK]
        one, two = sums(*sample_hashes(update, np.arange(part.start, part.stop, dtype=np.int64)))
        low, high = low + one, high + two
    return low % 2**64, high % 2**64


def _lines(path: Path | None, launch: int, faults: list[LedgerFinding], notes: list[str]) -> list[dict[str, Any]]:
    """The lines of a file that are records; a damaged one is a fault, unless it is the last."""
    if path is None:
        return []
    try:
        texts = read_bytes(path).split(b"\n")
    except OSError as error:
        faults.append(LedgerFinding("damaged", f"{path} cannot be read: {error.strerror}.", launch))
        return []
    found: list[dict[str, Any]] = []
    for index, text in enumerate(texts, 1):
        if not text:
            continue
        try:
            found.append(_record(parse_object(text)) if found else parse_object(text))
        except (ValueError, TypeError) as error:
            place = f"{path}, line {index}: {error}."
            if index == len(texts):
                notes.append(f"{place} It is the last line: a crash cuts it off.")
            else:
                faults.append(LedgerFinding("damaged", place, launch))
    return found


def _record(line: dict[str, Any]) -> dict[str, Any]:
    for name in ("update", "round", "first", "stop", "responses", "dropped"):
        whole(line, name)
    if not isinstance(line.get("hash"), str) or len(line["hash"]) != 32:
        raise ValueError("hash is not a number of 32 hexadecimal digits")
    int(line["hash"], 16)
    sampled: Any = line.get("sampled")
    if not isinstance(sampled, list):
        raise ValueError("sampled is not a list")
    for entry in cast("list[Any]", sampled):
        if not isinstance(entry, list) or [type(one) for one in cast("list[Any]", entry)] != [int, int, int]:
            raise ValueError("sampled is not a list of first, stop and version")
    return line
