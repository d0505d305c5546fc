"""The audit: was every sample trained in exactly one step that led to the newest checkpoint?

Launches form a tree: each starts from a checkpoint of an earlier one. The lineage is the path from the first launch to the
newest checkpoint; each launch counts from its start to the start of the next. All other work of the ranks (steps after the
checkpoint that survived) was repeated, and counts as `discarded_samples`.

Along the lineage, the audit checks three things: the spans of the runs of steps follow each other without gap or overlap;
the ranks of each run trained as many samples as its span has; and the sum of their hashes is that of the span, computed
from the order (ledger.py explains the hashes).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from batchwright.core.errors import BatchwrightError, RunError
from batchwright.rundir import names
from batchwright.rundir.checkpoint import STATE, listing
from batchwright.rundir.files import read_json
from batchwright.runtime.data.order import GlobalOrder
from batchwright.runtime.data.sampler import share

from .ledger import SCHEMA, span_hash

# Positions whose ids are in memory at once: a few megabytes.
_BLOCK = 1 << 19
_MASK = 2**64 - 1


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
    launches = _read(folder)
    if not launches:
        raise RunError(
            f"{root} holds no ledger: no file launch-…-rank-….jsonl in it or in its ledger folder.",
            field="directory",
            given=str(root),
        )
    number, saved, notes = _newest(folder.parent / names.CHECKPOINTS, launches)
    totals = _Totals(recompute)
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
    unsaved = sum(run.samples for run in launches[max(launches)].runs if run.start >= saved)
    return LedgerAudit(
        ok=not totals.findings,
        samples=totals.samples,
        gaps=totals.gaps,
        repeats=totals.repeats,
        discarded_samples=done - totals.fed - unsaved,
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
        self.samples = self.gaps = self.repeats = self.skipped = self.wrong = self.steps = self.fed = 0
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
                found = f"step {run.first_step:,} starts at sample {run.start:,}"
                message = f"{found}; expected was step {step:,} at sample {at:,}: {what}."
                self.fault("span", f"launch {launch.number}: {message}", launch.number, run.first_step)
            if run.end > stop:
                message = f"a run of {run.steps:,} steps from step {run.first_step:,} passes sample {stop:,}"
                message = f"launch {launch.number}: {message}, where the checkpoint was saved."
                self.fault("span", message, launch.number, run.first_step)
            self._add_run(launch, run)
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
        if not self.recompute:
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
    low, high = span_hash(order.ids(positions), first_step, batch)
    return high << 64 | low


def _added(hashes: Iterable[int]) -> int:
    """The sum of hashes, each half mod 2^64."""
    low = high = 0
    for value in hashes:
        low, high = low + (value & _MASK), high + (value >> 64)
    return (high & _MASK) << 64 | low & _MASK


def _newest(checkpoints: Path, launches: dict[int, _Launch]) -> tuple[int | None, int, list[str]]:
    """(launch, position, notes) of the newest checkpoint; without one, of that from which the last launch started."""
    last = launches[max(launches)]
    for name, _, number in listing(checkpoints):
        try:
            state = read_json(checkpoints / name / STATE)
            if number <= last.number:
                # The last launch resumed from an older checkpoint, so this one was damaged.
                if last.parent is not None and number < last.number and int(state["position"]) != last.position:
                    break
                return int(state["launch"]), int(state["position"]), []
        except (RunError, ValueError, KeyError, TypeError) as error:
            return last.parent, last.position, [f"checkpoint {name} cannot be read: {error}"]
    missing = f"{checkpoints} does not exist: the audit ends where the last launch started."
    return last.parent, last.position, [] if checkpoints.is_dir() else [missing]


def _read(folder: Path) -> dict[int, _Launch]:
    """Every launch in a folder by its number; the lines of all ranks are joined."""
    files: dict[int, dict[int, Path]] = {}
    for name in names.listed(folder):
        if numbers := names.read_ledger(name):
            files.setdefault(numbers[0], {})[numbers[1]] = folder / name
    return {number: launch for number in sorted(files) if (launch := _launch(number, files[number])) is not None}


def _launch(number: int, files: dict[int, Path]) -> _Launch | None:
    header: dict[str, Any] | None = None
    joined: dict[int, _JoinedRun] = {}
    for rank, path in sorted(files.items()):
        for line in _lines(path):
            if "ranks" in line:
                if line["schema"] > SCHEMA:
                    raise RunError(
                        f"{path} has schema {line['schema']}, but this version of batchwright reads up to {SCHEMA}. Update "
                        "batchwright.",
                        field="schema",
                    )
                header = header or line
                continue
            first, steps = line["first_step"], line["steps"]
            run = joined.get(first)
            if run is None:
                start, batch, outcome = line["start_sample"], line["global_batch_size"], line["outcome"]
                run = joined[first] = _JoinedRun(first, steps, start, batch, outcome, {})
            run.by_rank[rank] = (line["samples"], int(line["hash"], 16))
            # Ranks that were killed may differ by a step, which was never saved.
            if steps < run.steps:
                joined[first] = replace(run, steps=steps)
    if header is None:
        return None
    try:
        order = GlobalOrder(**header["order"])
    except BatchwrightError as error:
        raise RunError(f"launch {number}: the order in its ledger is not valid: {error}", field="order") from error
    missing = tuple(rank for rank in range(header["ranks"]) if rank not in files)
    runs = tuple(joined[step] for step in sorted(joined))
    return _Launch(number, header["ranks"], header["step"], header["position"], header["parent"], order, runs, missing)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    for text in path.read_bytes().split(b"\n"):
        if not text.strip(b"\0 "):
            continue
        try:
            yield json.loads(text)
        except ValueError:  # an incomplete line of a machine that failed; if its steps were saved, they show as a gap
            return


def _few(numbers: Sequence[int]) -> str:
    more = f" and {len(numbers) - 8} more" if len(numbers) > 8 else ""
    return ", ".join(map(str, numbers[:8])) + more
