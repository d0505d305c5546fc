"""The audit: did every sample enter exactly one step of the lineage of the surviving checkpoint?

Launches form a tree: each goes on from a checkpoint that an earlier one saved. The lineage is the path back from the
newest checkpoint; a launch counts in it from where it started to where the next went on. What ranks did besides (work
after the checkpoint that survived) was redone, and is counted as `discarded_samples`.

What is checked along the lineage: that the spans of its runs follow each other without gap or overlap; that the ranks
of each run were fed as many samples as the span has; and that the sum of their hashes is that of the span, recomputed
from the order (see ledger.py for why that can fail).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchwright.core.errors import BatchwrightError, RunError
from batchwright.rundir import names
from batchwright.rundir.checkpoint import STATE, listing
from batchwright.runtime.data.order import GlobalOrder
from batchwright.runtime.data.sampler import share

from .ledger import span_hash

# Positions whose ids are held at once: a few megabytes.
_BLOCK = 1 << 19


@dataclass(frozen=True)
class LedgerFinding:
    """One fault, with the launch and the steps it is in."""

    cause: str
    message: str
    launch: int | None = None
    first_step: int | None = None


@dataclass(frozen=True)
class LedgerAudit:
    """What the ledger proves: `samples` entered one step each; `gaps` none, `repeats` more than one (counts of samples).

    `discarded_samples` were trained in work that did not survive, and trained again; `unsaved_samples` after the newest
    checkpoint, so not yet safe; `skipped_samples` in steps that a GradScaler skipped.

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
        """One line for people."""
        redone = f"; {self.discarded_samples:,} discarded and redone" if self.discarded_samples else ""
        if self.ok:
            return f"ok: {self.samples:,} samples, each in exactly one step{redone}"
        wrong = f", {self.wrong_runs:,} runs with other samples than the order says" if self.wrong_runs else ""
        return f"failed: {self.gaps:,} samples missing, {self.repeats:,} repeated{wrong}{redone}"


@dataclass(frozen=True)
class _Run:
    """The lines of all ranks for the same steps, added up."""

    first_step: int
    steps: int
    start: int
    batch: int
    outcome: str
    by_rank: dict[int, tuple[int, int]]  # rank -> samples, hash

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
    runs: tuple[_Run, ...]
    missing: tuple[int, ...]


def audit(directory: Path | str, *, recompute: bool = True) -> LedgerAudit:
    """Audit a run directory (or its `ledger` folder); `recompute=False` leaves out the hashes, and checks spans only.

    >>> audit("nowhere")
    Traceback (most recent call last):
    batchwright.core.errors.RunError: nowhere holds no ledger: no file launch-…-rank-….jsonl in it or in its ledger folder.
    """
    run = Path(directory)
    folder = run / "ledger" if (run / "ledger").is_dir() else run
    launches = _read(folder)
    if not launches:
        raise RunError(
            f"{run} holds no ledger: no file launch-…-rank-….jsonl in it or in its ledger folder.",
            field="directory",
            given=str(run),
        )
    tip_launch, tip, notes = _tip(folder.parent / "checkpoints", launches)
    walk = _Walk(recompute, list(notes))
    pieces, end = [], tip
    number: int | None = tip_launch
    while number is not None and number in launches:
        launch = launches[number]
        pieces.append((launch, launch.position, end))
        end, number = launch.position, launch.parent
        if number is not None and number >= launch.number:
            walk.fault("lineage", f"launch {launch.number} says that it goes on from launch {number}.", launch.number)
            break
    if number is not None and number not in launches:
        walk.fault("lineage", f"the ledger of launch {number} is missing: what it trained cannot be shown.", number)
    if end:
        walk.gaps += end
        walk.fault("gap", f"samples 0 to {end:,} are in no ledger.", pieces[-1][0].number if pieces else None)
    for launch, start, stop in reversed(pieces):
        walk.piece(launch, start, stop)
    lineage = tuple(launch.number for launch, _, _ in reversed(pieces))
    done = sum(run.samples for launch in launches.values() for run in launch.runs)
    unsaved = sum(r.samples for r in launches[max(launches)].runs if r.start >= tip)
    return LedgerAudit(
        ok=not walk.findings,
        samples=walk.samples,
        gaps=walk.gaps,
        repeats=walk.repeats,
        discarded_samples=done - walk.fed - unsaved,
        unsaved_samples=unsaved,
        skipped_samples=walk.skipped,
        wrong_runs=walk.wrong,
        steps=walk.steps,
        launches=len(launches),
        lineage=lineage,
        findings=tuple(walk.findings),
        notes=tuple(walk.notes),
    )


class _Walk:
    """Adds up what the pieces of a lineage prove."""

    def __init__(self, recompute: bool, notes: list[str]) -> None:
        self.recompute, self.notes = recompute, notes
        self.samples = self.gaps = self.repeats = self.skipped = self.wrong = self.steps = self.fed = 0
        self.findings: list[LedgerFinding] = []
        self._order: GlobalOrder | None = None

    def fault(self, cause: str, message: str, launch: int | None, step: int | None = None) -> None:
        self.findings.append(LedgerFinding(cause, message, launch, step))

    def piece(self, launch: _Launch, start: int, stop: int) -> None:
        """The part of one launch that survived: samples `start` to `stop`."""
        if launch.missing and stop > start:
            self.fault(
                "rank",
                f"launch {launch.number}: no ledger of rank {_few(launch.missing)} of {launch.ranks}.",
                launch.number,
            )
        if self._order is not None and launch.order != self._order:
            self.fault("order", f"launch {launch.number} went along {launch.order}, not {self._order}.", launch.number)
        self._order = launch.order
        at, step = start, launch.step
        for run in launch.runs:
            if run.start >= stop:
                break
            if run.start != at or run.first_step != step:
                lost, again = max(0, run.start - at), max(0, at - run.start)
                self.gaps, self.repeats = self.gaps + lost, self.repeats + again
                what = f"{lost:,} samples missing" if lost else f"{again:,} repeated" if again else "steps renumbered"
                self.fault("span", f"launch {launch.number}: step {run.first_step:,} starts at sample {run.start:,}, where "
                           f"step {step:,} at sample {at:,} was due: {what}.", launch.number, run.first_step)  # fmt: skip
            if run.end > stop:
                past = f"step {run.first_step:,} begins a run of {run.steps:,} that goes past sample {stop:,}"
                message = f"launch {launch.number}: {past}, where the checkpoint was saved."
                self.fault("span", message, launch.number, run.first_step)
            self._run(launch, run)
            at, step = run.end, run.first_step + run.steps
        if at < stop:
            self.gaps += stop - at
            self.fault(
                "gap", f"launch {launch.number}: samples {at:,} to {stop:,} are in no ledger.", launch.number, step
            )

    def _run(self, launch: _Launch, run: _Run) -> None:
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
                f"{where}: {found:,} samples were fed, the span has {expected:,}.",
                launch.number,
                run.first_step,
            )
        if not self.recompute:
            return
        if _added(h for _, h in run.by_rank.values()) != _expected(
            launch.order, run.start, run.end, run.first_step, run.batch
        ):
            self.wrong += 1
            culprits = [rank for rank, (_, h) in sorted(run.by_rank.items()) if h != _of_rank(launch, run, rank)]
            self.fault("ids", f"{where}: the samples fed are not those of the order, on rank {_few(culprits)} of "
                       f"{launch.ranks}.", launch.number, run.first_step)  # fmt: skip


def _expected(order: GlobalOrder, start: int, end: int, first_step: int, batch: int) -> int:
    low = high = 0
    block = max(1, _BLOCK // batch) * batch  # whole steps
    for at in range(start, end, block):
        part_low, part_high = span_hash(
            order.ids(range(at, min(at + block, end))), first_step + (at - start) // batch, batch
        )
        low, high = low + part_low, high + part_high
    return (high % 2**64) << 64 | low % 2**64


def _of_rank(launch: _Launch, run: _Run, rank: int) -> int:
    """The hash of one rank, had it been fed its share of every step: to name the one that was not."""
    shares = []
    for index in range(run.steps):
        start = run.start + index * run.batch
        own = share(range(start, start + run.batch), rank, launch.ranks)
        low, high = span_hash(launch.order.ids(own), run.first_step + index, max(1, run.batch))
        shares.append((high << 64) | low)
    return _added(shares)


def _added(hashes: Any) -> int:
    low = high = 0
    for value in hashes:
        low, high = low + (value & (2**64 - 1)), high + (value >> 64)
    return (high % 2**64) << 64 | low % 2**64


def _tip(checkpoints: Path, launches: dict[int, _Launch]) -> tuple[int | None, int, list[str]]:
    """The launch and position of the surviving checkpoint: the newest on disk, or what the last launch started from."""
    last = launches[max(launches)]
    for name, _, number in listing(checkpoints):
        try:
            state = json.loads((checkpoints / name / STATE).read_text(encoding="utf-8"))
            if number <= last.number:
                if last.parent is not None and number < last.number and int(state["position"]) != last.position:
                    break  # the last launch chose an older one: this one was damaged
                return int(state["launch"]), int(state["position"]), []
        except (OSError, ValueError, KeyError, TypeError) as error:
            return last.parent, last.position, [f"checkpoint {name} cannot be read: {error}"]
    note = [] if checkpoints.is_dir() else ["no checkpoints are there: audited up to where the last launch started"]
    return last.parent, last.position, note


def _read(folder: Path) -> dict[int, _Launch]:
    """Every launch in a folder, the lines of its ranks joined run by run."""
    files: dict[int, dict[int, Path]] = {}
    for name in names.listed(folder):
        if numbers := names.read_ledger(name):
            files.setdefault(numbers[0], {})[numbers[1]] = folder / name
    return {number: launch for number in sorted(files) if (launch := _launch(number, files[number])) is not None}


def _launch(number: int, files: dict[int, Path]) -> _Launch | None:
    header: dict[str, Any] | None = None
    joined: dict[int, _Run] = {}
    for rank, path in sorted(files.items()):
        for line in _lines(path):
            if "ranks" in line:
                if line["schema"] > 1:
                    raise RunError(
                        f"{path} has schema {line['schema']}, but this batchwright knows up to 1. Update it.",
                        field="schema",
                    )
                header = header or line
                continue
            hash_ = int(line["hash"], 16)
            run = joined.get(line["first_step"])
            if run is None:
                run = joined[line["first_step"]] = _Run(
                    line["first_step"],
                    line["steps"],
                    line["start_sample"],
                    line["global_batch_size"],
                    line["outcome"],
                    {},
                )
            run.by_rank[rank] = (line["samples"], hash_)
            if line["steps"] != run.steps:  # killed in mid-step: ranks end a step apart; only seen in work not saved
                joined[line["first_step"]] = _Run(
                    run.first_step, min(run.steps, line["steps"]), run.start, run.batch, run.outcome, run.by_rank
                )
    if header is None:
        return None
    try:
        order = GlobalOrder(**header["order"])
    except BatchwrightError as error:
        raise RunError(f"launch {number}: its order cannot be: {error}", field="order") from error
    missing = tuple(rank for rank in range(header["ranks"]) if rank not in files)
    runs = tuple(joined[step] for step in sorted(joined))
    return _Launch(number, header["ranks"], header["step"], header["position"], header["parent"], order, runs, missing)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    for text in path.read_bytes().split(b"\n"):
        if not text.strip(b"\0 "):
            continue
        try:
            yield json.loads(text)
        except ValueError:  # cut short by a dying machine; whatever it held was not saved, or shows up as a gap
            return


def _few(numbers: Any) -> str:
    shown = [str(n) for n in numbers]
    return ", ".join(shown[:8]) + (f" and {len(shown) - 8} more" if len(shown) > 8 else "")
