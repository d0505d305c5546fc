"""The audit: was every sample trained in exactly one step that led to the newest checkpoint?

Launches form a tree: each starts from a checkpoint of an earlier one. The lineage is the path from the first launch to the
newest checkpoint; each launch counts from its start to the start of the next. All other work of the ranks (steps after the
checkpoint that survived) was repeated, and counts as `discarded_samples`.

Along the lineage, the audit checks three things: the spans of the runs of steps follow each other without gap or overlap;
the ranks of each run trained as many samples as its span has; and the sum of their hashes is that of the span, computed
from the order (ledger.py explains the hashes). Only the last needs the order, and time that grows with the samples: without
it (`recompute=False`), the audit instead finds ranks with equal hashes, which trained the same samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from batchwright.core.errors import RunError
from batchwright.rundir import names
from batchwright.rundir.checkpoint import MANIFEST, STATE, listing, read_manifest
from batchwright.rundir.files import read_json
from batchwright.runtime.data.order import GlobalOrder
from batchwright.runtime.data.sampler import share

from .joined import MASK, JoinedRun, LaunchLedger, LedgerFinding, hash_in, read_ledgers, whole
from .ledger import sample_hashes, span_hash
from .updates import audit_updates

# Positions whose ids are in memory at once: a few megabytes.
_BLOCK = 1 << 19
# Wrong runs whose ranks are named: for each, every file of a launch is read again.
_NAMED_RUNS = 8


@dataclass(frozen=True)
class LedgerAudit:
    """The result of an audit, in samples: `samples` were trained in one step each, `gaps` in none, `repeats` in several.

    `discarded_samples` were trained in steps that were lost and repeated, `unsaved_samples` after the newest checkpoint,
    `skipped_samples` in steps that a GradScaler skipped. `wrong_runs` counts runs of steps with wrong samples.
    `ids_checked` is false if only spans and counts were compared, and no sample's id with the order.
    In reinforcement learning, samples are prompts; `responses` entered `updates`, each where it belongs, and
    `dropped_responses` (too old) and `discarded_responses` (of a lost policy) entered none. `policy_lag` is the worst.

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
    ids_checked: bool = True
    updates: int = 0
    responses: int = 0
    dropped_responses: int = 0
    discarded_responses: int = 0
    policy_lag: int = 0

    def summary(self) -> str:
        """The result in one line."""
        redone = f"; {self.discarded_samples:,} discarded and redone" if self.discarded_samples else ""
        if self.ok:
            how = "" if self.ids_checked else " by spans and counts"
            if self.updates:
                lost = self.dropped_responses + self.discarded_responses
                unused = f", {lost:,} responses not used" if lost else ""
                made = f"{self.responses:,} responses in {self.updates:,} updates{unused}"
                return f"ok{how}: {self.samples:,} prompts, each in exactly one round; {made}{redone}"
            return f"ok{how}: {self.samples:,} samples, each in exactly one step{redone}"
        wrong = f", wrong samples in {self.wrong_runs:,} runs of steps" if self.wrong_runs else ""
        return f"failed: {self.gaps:,} samples missing, {self.repeats:,} repeated{wrong}{redone}"


def audit(directory: Path | str, *, recompute: bool = True) -> LedgerAudit:
    """Audit a run directory (or its `ledger` folder); `recompute=False` checks spans and counts, but no ids.

    >>> audit("nowhere")
    Traceback (most recent call last):
    batchwright.core.errors.RunError: nowhere holds no ledger: no file launch-…-rank-….jsonl in it or in its ledger folder.
    """
    root = Path(directory)
    folder = root / names.LEDGER if (root / names.LEDGER).is_dir() else root
    totals, notes = _Totals(recompute), list[str]()
    launches = read_ledgers(folder, totals.findings, notes)
    if not launches and not totals.findings:
        raise RunError(
            f"{root} holds no ledger: no file launch-…-rank-….jsonl in it or in its ledger folder.",
            field="directory",
            given=str(root),
        )
    damaged = bool(totals.findings)
    checkpoints = folder.parent / names.CHECKPOINTS
    number, saved = _newest(checkpoints, launches, totals.findings, notes)
    lineage: list[tuple[LaunchLedger, int, int]] = []
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
    first = launches[min(launches)].first_sample if launches else 0
    if first:
        notes.append(f"samples 0 to {first:,} were trained elsewhere: the run began at sample {first:,}.")
    if end > first:
        totals.gaps += end - first
        message = f"samples {first:,} to {end:,} are in no ledger."
        totals.fault("gap", message, lineage[0][0].number if lineage else None)
    elif end < first:
        message = f"the run began at sample {first:,} by its ledgers, and its first launch at {end:,}."
        totals.fault("lineage", message, lineage[0][0].number if lineage else None)
    for launch in launches.values():
        if launch.first_sample != first:
            message = f"the run began at sample {launch.first_sample:,} by launch {launch.number}, and at {first:,} by others."
            totals.fault("lineage", message, launch.number)
    for launch, start, stop in lineage:
        totals.add_launch(launch, start, stop)
    spans = [(launch.number, start, stop) for launch, start, stop in lineage]
    trained = audit_updates(folder, spans, totals.findings, notes, required=_counts_updates(checkpoints))
    done = sum(run.samples for launch in launches.values() for run in launch.runs)
    last = launches[max(launches)].runs if launches else ()
    unsaved = sum(run.samples for run in last if run.start >= saved)
    if damaged:
        proof = "in exactly one step each" + ", with the ids of the order" * recompute
        notes.append(
            f"what the undamaged lines prove: {totals.proven:,} of {saved - first:,} saved samples are {proof}."
        )
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
        ids_checked=recompute,
        **(vars(trained) if trained else {}),
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

    def add_launch(self, launch: LaunchLedger, start: int, stop: int) -> None:
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

    def _add_run(self, launch: LaunchLedger, run: JoinedRun) -> None:
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
            if run.first is not None and run.same is not None:
                self.wrong += 1
                message = f"{where}: rank {run.same} trained the same samples as rank {run.first[0]}."
                self.fault("ids", message, launch.number, run.first_step)
            return
        # A damaged line may claim a span that would take years to compute.
        if expected > 2 * found + _BLOCK:
            return
        if run.hash != _expected(launch.order, run.start, run.end, run.first_step, run.batch):
            self.wrong += 1
            wrong = _wrong_ranks(launch, run) if self.wrong <= _NAMED_RUNS else []
            ranks = f", on rank {_few(wrong)} of {launch.ranks}" if wrong else ""
            message = f"{where}: the samples are not those of the order{ranks}."
            self.fault("ids", message, launch.number, run.first_step)


def _expected(order: GlobalOrder, start: int, end: int, first_step: int, batch: int) -> int:
    """The hash of a span, computed from the order."""
    block = max(1, _BLOCK // batch) * batch  # whole steps
    blocks = (range(at, min(at + block, end)) for at in range(start, end, block))
    return _added(_hash(order, part, first_step + (part.start - start) // batch, batch) for part in blocks)


def _wrong_ranks(launch: LaunchLedger, run: JoinedRun) -> list[int]:
    """The ranks whose hash is not that of their share of every step; their files are read again."""
    bounds = np.array([*(share(range(run.batch), rank, launch.ranks).start for rank in range(launch.ranks)), run.batch])
    expected = np.zeros((2, launch.ranks), np.uint64)
    for step, start in enumerate(range(run.start, run.end, run.batch), run.first_step):
        for offset in range(0, run.batch, _BLOCK):
            part = range(start + offset, start + min(offset + _BLOCK, run.batch))
            at = np.clip(bounds - offset, 0, len(part))
            for half, hashes in zip(expected, sample_hashes(step, launch.order.ids(part)), strict=True):
                below = np.concatenate((np.zeros(1, np.uint64), np.cumsum(hashes, dtype=np.uint64)))
                half += below[at[1:]] - below[at[:-1]]
    return [
        rank
        for rank, path in launch.files.items()
        if rank < launch.ranks
        and (value := hash_in(path, run.first_step)) is not None
        and value != int(expected[1, rank]) << 64 | int(expected[0, rank])
    ]


def _hash(order: GlobalOrder, positions: range, first_step: int, batch: int) -> int:
    """The hash of at most _BLOCK positions of whole steps, or of any number of positions of one step."""
    parts = (positions[at : at + _BLOCK] for at in range(0, len(positions), _BLOCK))
    hashes = (span_hash(order.ids(part), first_step, batch) for part in parts)
    return _added(high << 64 | low for low, high in hashes)


def _added(hashes: Iterable[int]) -> int:
    """The sum of hashes, each half mod 2^64."""
    low = high = 0
    for value in hashes:
        low, high = low + (value & MASK), high + (value >> 64)
    return (high & MASK) << 64 | low & MASK


def _newest(
    checkpoints: Path, launches: dict[int, LaunchLedger], faults: list[LedgerFinding], notes: list[str]
) -> tuple[int | None, int]:
    """(launch, position) of the newest checkpoint; without one, of that from which the last launch started.

    A damaged checkpoint of the last launch is a fault, and the one before it counts.
    """
    last = launches[max(launches)] if launches else None
    for name, _, number in listing(checkpoints):
        try:
            found = _state(checkpoints / name)
            if last is None or number <= last.number:
                launch, position = whole(found, "launch"), whole(found, "position")
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


def _counts_updates(checkpoints: Path) -> bool:
    """Whether a checkpoint is one of reinforcement learning, whose updates have a record of their own."""
    for name, _, _ in listing(checkpoints):
        with suppress(RunError, ValueError):
            return "updates" in _state(checkpoints / name)
    return False


def _state(checkpoint: Path) -> dict[str, Any]:
    """The state of a checkpoint; an error if it is damaged. A copy of a run may have no manifest to compare it with."""
    state = read_json(checkpoint / STATE)
    if not isinstance(state, dict):
        raise ValueError("it is no JSON object")
    if (checkpoint / MANIFEST).exists() and (problem := read_manifest(checkpoint).problem_of(STATE)):
        raise ValueError(problem)
    return cast("dict[str, Any]", state)


def _few(numbers: Sequence[int]) -> str:
    more = f" and {len(numbers) - 8} more" if len(numbers) > 8 else ""
    return ", ".join(map(str, numbers[:8])) + more
