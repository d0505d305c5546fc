"""The probe: limit, evaluation, throughput and bottleneck of a task or a command; an interrupted probe can be resumed."""

from __future__ import annotations

import builtins
import json
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from batchwright.core.errors import BatchwrightError, ConfigError, MissingExtraError, RunError
from batchwright.core.numbers import format_bytes
from batchwright.processes.endings import sentence
from batchwright.processes.memory import physical_memory
from batchwright.processes.target import is_jax_task, task_file

from .command import CommandRunner
from .display import NoProgress, TrialProgress
from .journal import Journal, path_for
from .records import Probe, ProbeRequest, Trial, read_request
from .runner import TaskRunner
from .search import Limit, find_limit
from .speed import CONTENDED, Curve, analyse, diagnose, sizes

# Seconds for an estimate; a model that takes longer is probed without one.
_ESTIMATE_SECONDS = 120.0
# Trials of a search that has not begun, for the remaining time: the median of random programs without an estimate.
_SEARCH = 6


class Runner(Protocol):
    """Makes trials of a task or of a command."""

    @property
    def identity(self) -> Mapping[str, Any]: ...
    def conditions(self, purpose: str) -> dict[str, Any]: ...
    def describe(self) -> Mapping[str, Any]: ...
    def limit(self, size: int) -> Trial: ...
    def throughput(self, size: int, contrasts: bool = False) -> Trial: ...


def probe(
    target: str | Sequence[str],
    *,
    args: Mapping[str, Any] | None = None,
    memory: int | str | None = None,
    margin: int | str = 0,
    max: int | str | None = None,
    multiple_of: int | str = 1,
    exact: bool = False,
    longest: bool = False,
    evaluation: bool = False,
    accumulation_steps: int | str | None = None,
    ranks: int | str = 1,
    timeout: float | str = 600.0,
    on: str | None = None,
    workers: int | str = 0,
    seconds: float | str = 2.0,
    throughput: bool = True,
    step_regex: str | None = None,
    dir: str | Path | None = ".batchwright",
    fresh: bool = False,
    peak_tflops: float | str | None = None,
    estimate: bool = True,
    progress: TrialProgress | None = None,
) -> Probe:
    """Measure what fits and what is fast: `target` is `FILE.py:function`, or a command as a list of arguments.

    A limit trial accumulates, so that its answer holds for any number of steps; `accumulation_steps=1` is for jobs that
    never accumulate. `on` is the device to run on. With `estimate`, an estimate of a task's memory saves trials.
    `dir=None` keeps no journal.

    >>> probe("missing.py:task")
    Traceback (most recent call last):
    batchwright.core.errors.ConfigError: task file missing.py does not exist (looked for it at ...).
    """
    if isinstance(target, str) and is_jax_task(target):  # a program of its own, which prints its steps
        file, function = task_file(target)
        if str(ranks) != "1":
            raise ConfigError(
                f"ranks={ranks}: a JaxTask is probed on all devices of one process. Nearest: 1.",
                field="ranks",
                given=ranks,
                nearest=(1,),
            )
        given = json.dumps(dict(args or {}))
        program = [sys.executable, "-m", "batchwright.jax.trial"]
        target, args = [*program, str(file), function, given, "{micro_batch_size}"], {}
    request = read_request(
        target,
        args=dict(args or {}),
        memory=memory,
        margin=margin,
        largest=max,
        multiple_of=multiple_of,
        exact=exact,
        longest=longest,
        evaluation=evaluation,
        accumulation_steps=accumulation_steps,
        ranks=ranks,
        timeout=timeout,
        on=on,
        workers=workers,
        seconds=seconds,
        throughput=throughput,
        step_regex=step_regex,
        directory=dir,
        fresh=fresh,
        peak_tflops=peak_tflops,
    )
    return run_probe(request, estimate=estimate, progress=progress)


def run_probe(
    request: ProbeRequest,
    *,
    estimate: bool = True,
    progress: TrialProgress | None = None,
) -> Probe:
    """The same for a request that is already read."""
    with ExitStack() as stack:
        folder = stack.enter_context(_scratch())
        runner = (
            CommandRunner(request, folder)
            if request.command
            else stack.enter_context(closing(TaskRunner(request, folder)))
        )
        return _Session(request, runner, progress or NoProgress()).run(estimate)


@contextmanager
def _scratch() -> Iterator[Path]:
    """A temporary directory that is removed even if a signal ends this process: between trials there is no guard."""
    ends = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_DFL]
    if threading.current_thread() is not threading.main_thread():
        ends = []  # only the main thread can set a handler
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ends)  # until the directory is known
    try:
        with tempfile.TemporaryDirectory(prefix="batchwright-probe-", ignore_cleanup_errors=True) as folder:

            def end(number: int, frame: FrameType | None) -> None:
                shutil.rmtree(folder, ignore_errors=True)
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)

            for number in ends:
                signal.signal(number, end)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            yield Path(folder)
    finally:
        for number in ends:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Session:
    """One probe: its trials so far, their journal, and the progress display."""

    def __init__(self, request: ProbeRequest, runner: Runner, progress: TrialProgress) -> None:
        self.request, self.runner, self.progress = request, runner, progress
        self.trials: list[Trial] = []
        self.notes: list[str] = []
        self._began = time.monotonic()
        path = path_for(request.directory, request.name) if request.directory else None
        self.journal = Journal(path)
        self._stored: dict[tuple[str, int], list[Trial]] = {}

    def run(self, estimate: bool) -> Probe:
        try:
            return self._run(estimate)
        except KeyboardInterrupt:
            kept = len([t for t in self.trials if t.status in ("fits", "oom")]) + sum(map(len, self._stored.values()))
            if kept and self.journal.path and not self.journal.error:
                self._note(f"{_trials_are(kept)} kept in {self.journal.path}: the same command continues from there.")
            raise

    def _run(self, estimate: bool) -> Probe:
        self._resume()
        shape = self._shape() if estimate else None
        limit = self._limit("limit", self.runner.limit, shape)
        evaluation = None
        if self.request.evaluation and isinstance(self.runner, TaskRunner):
            evaluation = self._limit("evaluation", self.runner.evaluation, None)
            if evaluation.first_failing is None:
                self.notes.append(f"evaluation batch {evaluation.largest} is the cap (--max), not the limit.")
        return self._conclude(limit, evaluation)

    def _resume(self) -> None:
        if self.request.fresh:
            self.journal.restart()
        if not self.journal.stored():
            return
        if isinstance(self.runner, CommandRunner):
            self.runner.ignore(self.journal.written)
        identity = self.runner.describe()
        if not identity:
            return  # the task could not be built: the first trial says why
        trials, changed = self.journal.resume(identity, self.runner.conditions)
        for change in changed:
            self._note(f"{change}; probing again")
        for trial in trials:
            self._stored.setdefault((trial.purpose, trial.micro_batch_size), []).append(trial)
        if trials:
            self._note(f"resumed: {_trials_are(len(trials))} in {self.journal.path}")

    def _shape(self) -> Mapping[int, int] | None:
        """Estimated peaks of a few sizes; None for a command, and for a task that the estimate cannot follow."""
        r = self.request
        if r.command or r.worker or self._stored:
            return None  # stored trials predict better than an estimate, and cost nothing
        from batchwright.estimate import predict_slope

        if isinstance(self.runner, TaskRunner):
            self.runner.prepare()
        try:
            return predict_slope(
                r.target,
                r.args,
                memory_bytes=self._memory(),
                accumulation_steps=min(2, r.accumulation_steps),
                longest=r.longest,
                timeout=_ESTIMATE_SECONDS,
            ).peaks
        except MissingExtraError:
            raise
        except (BatchwrightError, RuntimeError) as error:
            self._note(f"no estimate: {sentence(str(error).splitlines()[0][:200])} More trials replace it.")
            return None

    def _memory(self) -> int | None:
        """The limit, as far as it is known before a trial: on an accelerator only if it is given."""
        r = self.request
        if r.memory is None and r.on != "cpu":
            return None
        return (r.memory or physical_memory() // 2 // r.ranks) - r.margin

    def _limit(self, purpose: str, run: Callable[[int], Trial], shape: Mapping[int, int] | None) -> Limit:
        def one(size: int, predicted: int | None, left: int) -> Trial:
            return self._trial(run, size, purpose, left=left + self._after_search(purpose, size), predicted=predicted)

        r = self.request
        return find_limit(
            one,
            cap=r.largest,
            multiple_of=r.multiple_of,
            exact=r.exact,
            shape=shape,
            memory=self._memory() if shape else None,
            stored=[size for kind, size in self._stored if kind == purpose],
        )

    def _after_search(self, purpose: str, size: int) -> int:
        """How many trials follow a search that is at `size`: of the evaluation's search, and of the speed up to the limit."""
        r = self.request
        if purpose == "evaluation":
            size = builtins.max(t.micro_batch_size for t in self.trials if t.purpose == "limit" and t.fits)
        speed = len(sizes(size, r.multiple_of)) + (not r.command) if r.throughput else 0
        return speed + (_SEARCH if r.evaluation and purpose == "limit" else 0)

    def _trial(
        self,
        run: Callable[[int], Trial],
        size: int,
        purpose: str,
        left: int = 0,
        predicted: int | None = None,
        needed: bool = True,
    ) -> Trial:
        """One trial: from the journal, or run now and written to it. A crash ends the probe if the trial is needed."""
        stored = self._stored.get((purpose, size))
        if stored:
            trial = stored.pop(0)
        else:
            self.progress.started(size, purpose, left)
            trial = replace(run(size), predicted_peak_memory_bytes=predicted)
            if trial.status != "crash":
                written = self.runner.written if isinstance(self.runner, CommandRunner) else ()
                self.journal.add(self.runner.identity, self.runner.conditions(purpose), trial, written)
        self.trials.append(trial)
        self.progress.finished(trial)
        if trial.status == "crash" and needed:
            raise _failed(trial)
        return trial

    def _conclude(self, limit: Limit, evaluation: Limit | None) -> Probe:
        r = self.request
        timed: dict[int, Trial] = {}
        if r.throughput:
            wanted = sizes(limit.largest, r.multiple_of)
            for at, size in enumerate(wanted):
                trial = self._trial(self.runner.throughput, size, "throughput", left=len(wanted) - at - bool(r.command))
                if trial.fits and trial.timing:
                    timed[size] = trial
                elif trial.fits and trial.last_lines is not None:
                    break  # its output shows no steps, so the output of other sizes will not either
        curve, recommended, last = self._verdict(timed)
        contrasts = last.contrasts or {} if last else {}
        diagnosis = diagnose(contrasts, curve, recommended, r.ranks) if curve and recommended else None
        self._remark(limit, timed, curve)
        at = timed.get(recommended) if recommended else None
        identity = self.runner.identity
        speed = at.samples_per_second if at else None
        tflops = last.flops / at.step_seconds / 1e12 if at and at.step_seconds and last and last.flops else None
        highest = "highest" in str(identity.get("precision"))
        peak = r.peak_tflops or known_peak(str(identity.get("device")), last.flops_type if last else None, highest)
        return Probe(
            trials=tuple(self.trials),
            max_micro_batch_size=limit.largest,
            first_failing_micro_batch_size=limit.first_failing,
            saturating_micro_batch_size=curve.saturating if curve else None,
            recommended_micro_batch_size=recommended,
            recommended_peak_memory_bytes=at.held_bytes if at else None,
            largest_worthwhile_micro_batch_size=curve.largest_worthwhile if curve else None,
            bottleneck=diagnosis.bottleneck if diagnosis else None,
            max_evaluation_batch_size=evaluation.largest if evaluation else None,
            curve=curve,
            diagnosis=diagnosis,
            memory_bytes=next((t.limit_bytes for t in self.trials if t.limit_bytes), None),
            margin_bytes=r.margin,
            ranks=r.ranks,
            tokens_per_second=speed * at.tokens_per_sample if at and speed and at.tokens_per_sample else None,
            tflops_per_second=tflops,
            mfu=tflops / peak if tflops and peak else None,
            device=identity.get("device"),
            target=r.target or " ".join(r.command),
            identity=dict(identity),
            notes=tuple(self.notes),
            journal=str(self.journal.path) if self.journal.path and not self.journal.error else None,
            journal_error=self.journal.error,
            seconds=time.monotonic() - self._began,
        )

    def _verdict(self, timed: dict[int, Trial]) -> tuple[Curve | None, int | None, Trial | None]:
        """The curve, the recommended size, and the trial that compares; a size that is out of memory there is dropped."""
        while timed:
            curve = analyse({size: t.timing for size, t in timed.items() if t.timing})
            recommended, notes = self._recommended(curve, timed)
            last = None
            if recommended and not self.request.command:
                compare = lambda size: self.runner.throughput(size, True)  # noqa: E731
                last = self._trial(compare, recommended, "throughput", needed=False)
                if last.status not in ("fits", "crash"):
                    del timed[recommended]
                    continue
                if last.status == "crash":
                    notes.append(
                        f"the trial for the bottleneck of micro_batch_size {recommended} failed: {sentence(last.reason or '')} "
                        "The bottleneck is only what the times of all sizes show."
                    )
                elif last.contrasts and "loader" not in last.contrasts:
                    notes.append("the task has an example batch, so waiting for data was not measured.")
            self.notes += notes
            return curve, recommended, last
        why = "speed was not measured"
        if any(t.purpose == "throughput" and not t.fits for t in self.trials):
            why = "none ran while its speed was measured"
        self.notes.append(f"no size is recommended: {why}.")
        return None, None, None

    def _recommended(self, curve: Curve, timed: Mapping[int, Trial]) -> tuple[int | None, list[str]]:
        """The largest worthwhile size whose peak with the user's own allocator is within the limit, and why it is another."""
        wanted = curve.largest_worthwhile
        memory = next((t.limit_bytes for t in self.trials if t.limit_bytes), None)
        peaks = {size: t.held_bytes or 0 for size, t in timed.items()}
        if memory is None or peaks[wanted] <= memory:
            return wanted, []
        within = {size: t.timing for size, t in timed.items() if t.timing and peaks[size] <= memory}
        chosen = analyse(within).largest_worthwhile if within else None
        instead = f"{chosen} is recommended instead" if chosen else "no size that was measured is within it"
        notes = [
            f"micro_batch_size {wanted} is faster, but needs {format_bytes(peaks[wanted])} with your own allocator, "
            f"and the limit is {format_bytes(memory)}: {instead}."
        ]
        if chosen is None:
            notes.append(
                "no size is recommended: use a larger --memory, or the allocator of the limit (docs/probe.md)."
            )
        return chosen, notes

    def _flat_from(self, largest: int) -> int | None:
        """The smallest size with the peak of the largest, if it is a quarter of it or less."""
        peaks = {t.micro_batch_size: t.peak_memory_bytes for t in self.trials if t.purpose == "limit" and t.fits}
        top = peaks.get(largest)
        return top and min(
            (b for b, peak in peaks.items() if 4 * b <= largest and peak and peak > 0.99 * top), default=None
        )

    def _note(self, text: str) -> None:
        self.notes.append(text)
        self.progress.note(text)

    def _remark(self, limit: Limit, timed: Mapping[int, Trial], curve: Curve | None) -> None:
        """Add notes about the numbers."""
        r = self.request
        failing = next((t for t in self.trials if t.micro_batch_size == limit.first_failing and not t.fits), None)
        if limit.first_failing is None:
            self.notes.append(f"{limit.largest} is the cap (--max), not the limit: larger sizes were not tried.")
            if r.command and (same := self._flat_from(limit.largest)):
                self.notes.append(
                    f"peak memory is the same at micro_batch_size {same} and {limit.largest}: does the dataset have fewer "
                    "samples than the batch? Then sizes above that number are not what ran, and --max must be below it."
                )
        elif failing is not None and failing.status == "timeout":
            self.notes.append(
                f"micro_batch_size {limit.first_failing} timed out, so the limit may not be one of memory."
            )
        if limit.refuted:
            self.notes.append("the estimate was far from what the trials measured, so the search went on without it.")
        if limit.ended_early and limit.first_failing is not None:
            count = sum(t.purpose == "limit" for t in self.trials)
            apart = (limit.first_failing - limit.largest) / limit.largest
            where = " from the journal" if self.journal.path and not self.journal.error else ""
            self.notes.append(
                f"the search ended after {count} trials: {limit.largest} ran, {limit.first_failing} did not, {apart:.1%} "
                f"apart; --exact continues{where}."
            )
        if r.memory is None and not r.command and "cpu" in str(self.runner.identity.get("device", "")):
            limit_bytes = next((t.limit_bytes for t in self.trials if t.limit_bytes), None)
            half = physical_memory() // 2 // r.ranks - r.margin
            what = "what ulimit -v leaves" if limit_bytes and limit_bytes < half else "half of this host's"
            self.notes.append(f"memory {format_bytes(limit_bytes)} is {what}; --memory sets another budget.")
        if outside := next((t.outside_bytes for t in self.trials if t.outside_bytes), None):
            self.notes.append(
                f"{format_bytes(outside)} of the device's memory were kept for what lies outside torch's allocator (libraries, "
                "collectives): an assumption that grows with the ranks. --margin keeps more."
            )
        if curve is not None and curve.noisy:
            self.notes.append(
                "the times are noisy: a larger size is recommended only where noise does not explain its gain."
            )
        slow = [t for t in self.trials if t.purpose == "throughput" and t.status in ("oom", "timeout")]
        for size, trial in {t.micro_batch_size: t for t in slow}.items():
            what = "ran out of memory" if trial.status == "oom" else "timed out"
            self.notes.append(
                f"micro_batch_size {size} fits, but {what} while its speed was measured ({trial.reason}); a smaller "
                "one, or a --margin, is safer."
            )
        if r.throughput and not timed and not slow:
            last = [line for trial in self.trials for line in trial.last_lines or ()]
            shown = f", which ended with: {' / '.join(last)}" if last else ""
            self.notes.append(
                f"no throughput: too few steps were seen in the output{shown}. Describe a step with --step-regex, such as "
                "'batch (\\d+)', where the group is the number of the step; or print `batchwright: step N`; or put {steps} into "
                "the command."
            )
        busy = [s for s, t in timed.items() if t.timing and (t.timing.contention or 0) > CONTENDED]
        if busy:
            self.notes.append(f"other programs used the processors while {len(busy)} of {len(timed)} sizes were timed.")
        if any(t.allocator_retries for t in self.trials if t.fits):
            self.notes.append("near the limit the allocator had to free its cache and try again, which is slow.")


def _trials_are(count: int) -> str:
    return "1 trial is" if count == 1 else f"{count} trials are"


def _failed(trial: Trial) -> RunError:
    error = RunError(
        f"micro_batch_size={trial.micro_batch_size}: {sentence(trial.reason or '')} This does not depend on the size "
        f"({trial.cause}), so the search stopped.",
        field="micro_batch_size",
        given=trial.micro_batch_size,
    )
    if trial.traceback:
        error.add_note(trial.traceback.rstrip())
    return error


def known_peak(device: str, kind: str | None, highest: bool = True) -> float | None:
    """The device's peak TFLOP/s in a type, from the data sheet; None if the table has neither.

    `highest`: torch's precision of float32 products, which else are computed in TF32.

    >>> known_peak("NVIDIA H100 80GB HBM3", "bfloat16"), known_peak("NVIDIA H100 80GB HBM3", "float32", highest=False)
    (989, 494)
    """
    table = json.loads(Path(__file__).with_name("peaks.json").read_text(encoding="utf-8"))["devices"]
    row = next((row for row in table if re.search(rf"\b{row['name']}\b", device)), None)
    # A part of a card, or another card with the same name before its own.
    if row is None or re.search(r"\b(?:MIG|Laptop|Max-Q|Ti|D)\b", device):
        return None
    return row.get("tf32" if kind == "float32" and not highest else kind)
