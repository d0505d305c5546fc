"""The audit: was every sample trained in exactly one step that led to the newest checkpoint?

Launches form a tree: each starts from a checkpoint of an earlier one. The lineage is the path from the first launch to the
newest checkpoint; each launch counts from its start to the start of the next. All other work of the ranks (steps after the
checkpoint that survived) was repeated, and counts as `discarded_samples`.

Along the lineage, the audit checks three things: the spans of the runs of steps follow each other without gap or overlap;
the ranks of each run trained as many samples as its span has; and the sum of their hashes is that of the span, computed
from the order (ledger.py explains the hashes).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from batchwright.core.errors import BatchwrightError, RunError
from batchwright.rundir import names
from batchwright.rundir.checkpoint import MANIFEST, STATE, listing, read_manifest
from batchwright.rundir.files import parse_object, read_bytes, read_json
from batchwright.runtime.data.order import LARGEST_POSITION, GlobalOrder
from batchwright.runtime.data.sampler import share

from .ledger import SCHEMA, span_hash

# Positions whose ids are in memory at once: a few megabytes.
_BLOCK = 1 << 19
_MASK = 2**64 - 1
# More ranks than this in a header are damage.
_MOST_RANKS = 10**7
_HASH = re.compile("[0-9a-f]{32}")


@dataclass(frozen=True)
class LedgerFinding:
    """One fault, with its launch and the first step of its run."""

    cause: str
    message: str
    launch: int | None = None
    first_step: int | None = None


@dataclass(frozen=True)
class LedgerAudit:
    """The result of an audit, in samples: `samples` were trained in one step each, `gaps` in none, `repeats` in several.

    `discarded_samples` were trained in steps that were lost and repeated, `unsaved_samples` after the newest checkpoint,
    `skipped_samples` in steps that a GradScaler skipped. `wrong_runs` counts runs of steps with wrong samples.

    >>> LedgerAudit(ok=True, samples=64, gaps=0, repeats=0, discarded_samples=8).summary()
    'ok: 64 samples, each in exactly one step; 8 discarded and redone'
    """

    ok: bool
    samples: int
    gaps: int
    repeats: int
    discarded_samples: int
    unsaved_samples: int = 0
    skipped_samples: int = 0
    wrong_runs: int = 0
    steps: int = 0
    launches: int = 0
    lineage: tuple[int, ...] = ()
    findings: tuple[LedgerFinding, ...] = ()
    notes: tuple[str, ...] = ()

    def summary(self) -> str:
        """The result in one line."""
        redone = f"; {self.discarded_samples:,} discarded and redone" if self.discarded_samples else ""
        if self.ok:
            return f"ok: {self.samples:,} samples, each in exactly one step{redone}"
        wrong = f", wrong samples in {self.wrong_runs:,} runs of steps" if self.wrong_runs else ""
        return f"failed: {self.gaps:,} samples missing, {self.repeats:,} repeated{wrong}{redone}"


@dataclass(frozen=True)
class _JoinedRun:
    """A run of steps: the lines of all ranks for the same steps."""

    first_step: int
    steps: int
    start: int
    batch: int
    outcome: str
    by_rank: dict[int, tuple[int, int]]
    """rank -> (samples, hash)"""
    differ: bool = False
    """Whether ranks have different numbers of steps."""

    @property
    def end(self) -> int:
        return self.start + self.steps * self.batch

    @property
    def samples(self) -> int:
        return sum(samples for samples, _ in self.by_rank.values())


@dataclass(frozen=True)
class _Launch:
    number: int
    ranks: int
    step: int
    position: int
    parent: int | None
    order: GlobalOrder
    runs: tuple[_JoinedRun, ...]
    missing: tuple[int, ...]


def audit(directory: Path | str, *, recompute: bool = True) -> LedgerAudit:
    """Audit a run directory (or its `ledger` folder); `recompute=False` checks spans and counts, but no hashes.

    >>> audit("nowhere")
    Traceback (most recent call last):
    batchwright.core.errors.RunError: nowhere holds no ledger: no file launch-…-rank-….jsonl in it or in its ledger folder.
    """
    root = Path(directory)
    folder = root / names.LEDGER if (root / names.LEDGER).is_dir() else root
    totals, notes = _Totals(recompute), list[str]()
    launches = _read(folder, totals.findings, notes)
    if not launches and not totals.findings:
        raise RunError(
            f"{root} holds no ledger: no file launch-…-rank-….jsonl in it or in its ledger folder.",
            field="directory",
            given=str(root),
        )
    damaged = bool(totals.findings)
    number, saved = _newest(folder.parent / names.CHECKPOINTS, launches, totals.findings, notes)
    lineage: list[tuple[_Launch, int, int]] = []
    end = saved
    while number is not None and number in launches:
        launch = launches[number]
        lineage.insert(0, (launch, launch.position, end))
        end, number = launch.position, launch.parent
        if number is not None and number >= launch.number:
            totals.fault("lineage", f"launch {launch.number} names launch {number} as its parent.", launch.number)
            break
    if number is not None and number not in launches:
        totals.fault("lineage", f"the ledger of launch {number} is missing: its samples cannot be checked.", number)
    if end:
        totals.gaps += end
        totals.fault("gap", f"samples 0 to {end:,} are in no ledger.", lineage[0][0].number if lineage else None)
    for launch, start, stop in lineage:
        totals.add_launch(launch, start, stop)
    done = sum(run.samples for launch in launches.values() for run in launch.runs)
    last = launches[max(launches)].runs if launches else ()
    unsaved = sum(run.samples for run in last if run.start >= saved)
    if damaged:
        proof = "in exactly one step each" + ", with the ids of the order" * recompute
        notes.append(f"what the undamaged lines prove: {totals.proven:,} of {saved:,} saved samples are {proof}.")
    return LedgerAudit(
        ok=not totals.findings,
        samples=totals.samples,
        gaps=totals.gaps,
        repeats=totals.repeats,
        discarded_samples=max(0, done - totals.fed - unsaved),
        unsaved_samples=unsaved,
        skipped_samples=totals.skipped,
        wrong_runs=totals.wrong,
        steps=totals.steps,
        launches=len(launches),
        lineage=tuple(launch.number for launch, _, _ in lineage),
        findings=tuple(totals.findings),
        notes=tuple(notes),
    )


class _Totals:
    """The numbers and faults of an audit, added up launch by launch along the lineage."""

    def __init__(self, recompute: bool) -> None:
        self.recompute = recompute
        self.samples = self.gaps = self.repeats = self.skipped = self.wrong = self.steps = self.fed = self.proven = 0
        self.findings: list[LedgerFinding] = []
        self._order: GlobalOrder | None = None

    def fault(self, cause: str, message: str, launch: int | None, step: int | None = None) -> None:
        self.findings.append(LedgerFinding(cause, message, launch, step))

    def add_launch(self, launch: _Launch, start: int, stop: int) -> None:
        """Add the part of a launch that is in the lineage: samples `start` to `stop`."""
        if launch.missing and stop > start:
            self.fault(
                "rank",
                f"launch {launch.number}: no ledger of rank {_few(launch.missing)} of {launch.ranks}.",
                launch.number,
            )
        if self._order is not None and launch.order != self._order:
            self.fault("order", f"launch {launch.number} used {launch.order}, not {self._order}.", launch.number)
        self._order = launch.order
        at, step = start, launch.step
        for run in launch.runs:
            if run.start >= stop:
                break
            if run.start != at or run.first_step != step:
                lost, again = max(0, run.start - at), max(0, at - run.start)
                self.gaps, self.repeats = self.gaps + lost, self.repeats + again
                what = f"{lost:,} samples missing" if lost else f"{again:,} repeated" if again else "steps renumbered"
                starts = f"step {run.first_step:,} starts at sample {run.start:,}"
                message = f"{starts}; expected was step {step:,} at sample {at:,}: {what}."
                self.fault("span", f"launch {launch.number}: {message}", launch.number, run.first_step)
            if run.differ:
                message = f"launch {launch.number}: the ranks differ in the steps from step {run.first_step:,} on."
                self.fault("span", message, launch.number, run.first_step)
            if run.end > stop:
                message = f"a run of {run.steps:,} steps from step {run.first_step:,} passes sample {stop:,}"
                message = f"launch {launch.number}: {message}, where the checkpoint was saved."
                self.fault("span", message, launch.number, run.first_step)
            found = len(self.findings)
            self._add_run(launch, run)
            if len(self.findings) == found and at <= run.start and run.end <= stop:
                self.proven += run.samples
            at, step = run.end, run.first_step + run.steps
        if at < stop:
            self.gaps += stop - at
            self.fault(
                "gap", f"launch {launch.number}: samples {at:,} to {stop:,} are in no ledger.", launch.number, step
            )

    def _add_run(self, launch: _Launch, run: _JoinedRun) -> None:
        expected, found = run.end - run.start, run.samples
        self.fed += found
        self.steps += run.steps
        self.samples += min(expected, found)
        self.skipped += found if run.outcome == "skipped" else 0
        where = f"launch {launch.number}, steps {run.first_step:,} to {run.first_step + run.steps:,}"
        if found != expected:
            self.gaps += max(0, expected - found)
            self.repeats += max(0, found - expected)
            self.fault(
                "count",
                f"{where}: the ranks trained {found:,} samples, and the span has {expected:,}.",
                launch.number,
                run.first_step,
            )
        # A damaged line may claim a span that would take years to compute.
        if not self.recompute or expected > 2 * found + _BLOCK:
            return
        expected_hash = _expected(launch.order, run.start, run.end, run.first_step, run.batch)
        if _added(value for _, value in run.by_rank.values()) != expected_hash:
            self.wrong += 1
            wrong = [rank for rank, (_, value) in sorted(run.by_rank.items()) if value != _of_rank(launch, run, rank)]
            message = f"{where}: the samples are not those of the order, on rank {_few(wrong)} of {launch.ranks}."
            self.fault("ids", message, launch.number, run.first_step)


def _expected(order: GlobalOrder, start: int, end: int, first_step: int, batch: int) -> int:
    """The hash of a span, computed from the order."""
    block = max(1, _BLOCK // batch) * batch  # whole steps
    blocks = (range(at, min(at + block, end)) for at in range(start, end, block))
    return _added(_hash(order, part, first_step + (part.start - start) // batch, batch) for part in blocks)


def _of_rank(launch: _Launch, run: _JoinedRun, rank: int) -> int:
    """The hash that one rank should have: that of its share of every step."""
    starts = enumerate(range(run.start, run.end, run.batch), run.first_step)
    shares = ((step, share(range(start, start + run.batch), rank, launch.ranks)) for step, start in starts)
    return _added(_hash(launch.order, own, step, run.batch) for step, own in shares)


def _hash(order: GlobalOrder, positions: range, first_step: int, batch: int) -> int:
    """The hash of at most _BLOCK positions of whole steps, or of any number of positions of one step."""
    parts = (positions[at : at + _BLOCK] for at in range(0, len(positions), _BLOCK))
    hashes = (span_hash(order.ids(part), first_step, batch) for part in parts)
    return _added(high << 64 | low for low, high in hashes)


def _added(hashes: Iterable[int]) -> int:
    """The sum of hashes, each half mod 2^64."""
    low = high = 0
    for value in hashes:
        low, high = low + (value & _MASK), high + (value >> 64)
    return (high & _MASK) << 64 | low & _MASK


def _newest(
    checkpoints: Path, launches: dict[int, _Launch], faults: list[LedgerFinding], notes: list[str]
) -> tuple[int | None, int]:
    """(launch, position) of the newest checkpoint; without one, of that from which the last launch started.

    A damaged checkpoint of the last launch is a fault, and the one before it counts.
    """
    last = launches[max(launches)] if launches else None
    for name, _, number in listing(checkpoints):
        try:
            found = _state(checkpoints / name)
            if last is None or number <= last.number:
                launch, position = _whole(found, "launch"), _whole(found, "position")
                # The last launch resumed from an older checkpoint, so this one was damaged.
                if last and last.parent is not None and number < last.number and position != last.position:
                    break
                return launch, position
        except (RunError, ValueError) as error:
            if last is not None and number < last.number:
                notes.append(f"checkpoint {name} cannot be read: {error}")
                break
            faults.append(LedgerFinding("checkpoint", f"checkpoint {name} cannot be read: {error}", number))
    else:
        if not checkpoints.is_dir():
            notes.append(f"{checkpoints} does not exist: the audit ends where the last launch started.")
    return (last.parent, last.position) if last else (None, 0)


def _state(checkpoint: Path) -> dict[str, Any]:
    """The state of a checkpoint; an error if it is damaged. A copy of a run may have no manifest to compare it with."""
    state = read_json(checkpoint / STATE)
    if not isinstance(state, dict):
        raise ValueError("it is no JSON object")
    if (checkpoint / MANIFEST).exists() and (problem := read_manifest(checkpoint).problem_of(STATE)):
        raise ValueError(problem)
    return cast("dict[str, Any]", state)


def _read(folder: Path, faults: list[LedgerFinding], notes: list[str]) -> dict[int, _Launch]:
    """Every launch in a folder by its number; the lines of all ranks are joined. Damaged lines are left out."""
    files: dict[int, dict[int, Path]] = {}
    for name in names.listed(folder):
        if numbers := names.read_ledger(name):
            files.setdefault(numbers[0], {})[numbers[1]] = folder / name
    read = {number: _launch(number, files[number], faults, notes) for number in sorted(files)}
    return {number: launch for number, launch in read.items() if launch is not None}


def _launch(number: int, files: dict[int, Path], faults: list[LedgerFinding], notes: list[str]) -> _Launch | None:
    header: _Launch | None = None
    joined: dict[int, _JoinedRun] = {}
    for rank, path in sorted(files.items()):
        for place, line in _lines(path, number, faults, notes):
            try:
                if "ranks" in line:
                    read = _header(line, number, rank)
                    if header is not None and read != header:
                        raise ValueError("the header differs from that of another rank")
                    header = read
                else:
                    _join(joined, rank, line)
            except ValueError as error:
                faults.append(LedgerFinding("damaged", f"{place}: {error}.", number))
    if header is None:
        return None
    missing = tuple(rank for rank in range(header.ranks) if rank not in files)
    return replace(header, runs=tuple(joined[step] for step in sorted(joined)), missing=missing)


def _header(line: dict[str, Any], number: int, rank: int) -> _Launch:
    """The first line of a file; a ValueError that says what is wrong with it."""
    if (schema := _whole(line, "schema", 1)) > SCHEMA:
        raise ValueError(f"schema is {schema}, and this version of batchwright reads up to {SCHEMA}")
    for name, expected in (("launch", number), ("rank", rank)):
        if _whole(line, name) != expected:
            raise ValueError(f"{name} is {line[name]}, and the name of the file says {expected}")
    order = line.get("order")
    if not isinstance(order, dict) or not isinstance(cast("dict[str, Any]", order).get("shuffle"), bool):
        raise ValueError("order is not valid")
    try:
        made = GlobalOrder(**cast("dict[str, Any]", order))
    except (BatchwrightError, TypeError) as error:
        raise ValueError(f"order is not valid: {error}") from None
    parent = None if line.get("parent") is None else _whole(line, "parent")
    ranks = _whole(line, "ranks", 1, _MOST_RANKS)
    return _Launch(number, ranks, _whole(line, "step"), _whole(line, "position"), parent, made, (), ())


def _join(joined: dict[int, _JoinedRun], rank: int, line: dict[str, Any]) -> None:
    """Add one rank's line to its run of steps; a ValueError that says what is wrong with it."""
    first, steps = _whole(line, "first_step"), _whole(line, "steps", 1)
    start, batch, samples = _whole(line, "start_sample"), _whole(line, "global_batch_size", 1), _whole(line, "samples")
    outcome, value = line.get("outcome"), line.get("hash")
    if max(first + steps, start + steps * batch) > LARGEST_POSITION:
        raise ValueError(f"the run of {steps} steps of {batch} samples ends after sample 2^63")
    if outcome not in ("applied", "skipped"):
        raise ValueError(f"outcome is {str(outcome)[:40]!r}, not applied or skipped")
    if not isinstance(value, str) or not _HASH.fullmatch(value):
        raise ValueError("hash is not a number of 32 hexadecimal digits")
    run = joined.setdefault(first, _JoinedRun(first, steps, start, batch, outcome, {}))
    if (run.start, run.batch) != (start, batch):
        raise ValueError(
            f"step {first} has {batch} samples from {start} on, and {run.batch} from {run.start} on elsewhere"
        )
    if rank in run.by_rank:
        raise ValueError(f"a second line for first_step {first}")
    run.by_rank[rank] = (samples, int(value, 16))
    # Ranks that were killed may differ by a step, which was never saved.
    if steps != run.steps:
        joined[first] = replace(run, steps=min(steps, run.steps), differ=True)


def _whole(line: dict[str, Any], name: str, least: int = 0, most: int = LARGEST_POSITION) -> int:
    value = line.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"{name} is {'missing' if value is None else f'{str(value)[:40]!r}, no valid number'}")
    return value


def _lines(
    path: Path, launch: int, faults: list[LedgerFinding], notes: list[str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """(file and line number, object) of every line that holds a JSON object."""
    try:
        texts = read_bytes(path).split(b"\n")
    except OSError as error:
        faults.append(LedgerFinding("damaged", f"{path} cannot be read: {error.strerror}.", launch))
        return
    filled = [(index, text) for index, text in enumerate(texts, 1) if text.strip(b"\0 ")]
    for index, text in filled:
        place = f"{path}, line {index}"
        try:
            yield place, parse_object(text)
        except ValueError as error:
            # The last line of a machine that failed may be incomplete. If its steps were saved, they show as a gap.
            if index == filled[-1][0]:
                notes.append(f"{place}: {error}. It is the last line: a crash cuts it off.")
            else:
                faults.append(LedgerFinding("damaged", f"{place}: {error}.", launch))


def _few(numbers: Sequence[int]) -> str:
    more = f" and {len(numbers) - 8} more" if len(numbers) > 8 else ""
    return ", ".join(map(str, numbers[:8])) + more
