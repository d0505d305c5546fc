"""Events: one JSON line per step, evaluation, save, stage and launch, written by a thread and passed to trackers.

`RUN/events/launch-00003.jsonl`, written by rank 0. Every line has `kind`, `time` (seconds since 1970), `launch`; keys by
kind, beside those:

    launch      step, samples, nodes, ranks, strategy, device, parameters, seed, dataset_size, total_samples,
                setup_seconds, load_seconds, lost_seconds, lost
    step        step, samples, tokens, loss, auxiliary, global_batch_size, micro_batch_size, accumulation_steps,
                samples_per_second, tokens_per_second, step_seconds, wait_seconds (the longest that a rank waited for data
                in this step), learning_rate, grad_norm, mfu, stage, nodes, ranks, noise_scale, noise_low, noise_high (its
                95% interval), outcome (applied, or skipped by the GradScaler), loss_scale (the GradScaler's next)
    stage       stage, step, samples, global_batch_size
    evaluating  step, samples, evaluated (samples so far): when an evaluation begins, and about once a second
    evaluation  step, samples, loss, weight, seconds
    saving      step, samples: when a save begins
    save        step, samples, checkpoint, seconds
    nonfinite   step, samples, steps: the loss was not finite in so many steps in a row, and the launch fails
    stop        reason, step, samples, next_stage, readers (processes that read), hosts, loading_hosts (null: not given),
                rows_read (of all ranks in this launch), rows_trained, read_amplification (their ratio), wait_seconds (of all
                steps)
    tracker     tracker, error: a tracker that failed; the run continues without it

`train_rl` counts prompts as samples and rounds as steps, and adds to `step` reward, policy_lag, responses and
dropped_responses. Its own kinds (`spans`: lists of process, what it does, begin and end in seconds of the round):

    rollout     kept_prompts, discarded_responses: what a launch took over from earlier ones
    update      update, round, samples, prompts, responses, loss, auxiliary, weight, grad_norm, learning_rate, policy_lag, outcome
    round       round, samples, first_prompt, prompts, responses, dropped_responses, policy_version, policy_lag, loss, reward,
                seconds, rollout_seconds, train_seconds, wait_seconds, begin, spans
    rollout_replaced   worker, why, prompts: a worker process died or hung, and these prompts are sampled again

`samples` is the position after the event. `tokens` is the sum of the loss's weights so far, which counts tokens if a weight
does. Rates are of the whole job. An unknown value (MFU without a peak) is null.
"""

from __future__ import annotations

import json
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, TextIO

from batchwright.core.numbers import human
from batchwright.rundir import atomic
from batchwright.rundir.events import read_events as read_events
from batchwright.rundir.files import write_fault

from .trackers import CLOSE_SECONDS

# Seconds between two writes to the file: long enough to cost nothing, short enough to follow a run.
_WRITE_SECONDS = 0.5
# Events that wait for a slow tracker, some megabytes. It misses the oldest of more.
_MOST_WAITING = 10_000
# Events that tell a supervisor that the loop has not stopped. A person sees what follows them.
_BEGINNINGS = ("evaluating", "saving")
# Seconds between two lines of progress without a terminal: the log of a day has about 9,000.
_LINE_SECONDS = 10.0


class Tracker(Protocol):
    """Receives events besides the file: one of `trackers/`, a progress bar, or your own class."""

    def event(self, event: Mapping[str, Any]) -> None:
        """Receive one event, as in the table of this module; called in a thread of this tracker's own."""

    def close(self) -> None:
        """Called after the last event, in the same thread."""


class Events:
    """Collects the events of a training loop; a thread writes them to the file, and one per tracker passes them on.

    `emit` appends to a list and returns; the thread wakes twice a second. With `now` the file is written before `emit`
    returns: a process that hangs after that has said what it was doing. A tracker that fails is removed, and a line in the
    file says so: a failed plot must not stop a run. One that is slow misses events, and one that hangs is left behind.
    """

    def __init__(self, path: Path | str | None, trackers: Sequence[Tracker] = (), **common: Any) -> None:
        self._common = common
        # One thread appends, another removes; so the deque is never replaced.
        self._unwritten: deque[dict[str, Any]] = deque()
        self._writing = threading.Lock()
        self._wake, self._closed = threading.Event(), False
        self._file = None
        if path is not None:
            try:
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                self._file = open(path, "a", encoding="utf-8", opener=atomic.no_follow)
            except OSError as error:
                raise write_fault(error, "the events", Path(path).parent, "Checkpoints are untouched.") from error
        self._feeds = [_Feed(tracker, self._failed) for tracker in trackers]
        self._thread = threading.Thread(target=self._work, name="batchwright-events", daemon=True)
        self._thread.start()

    def emit(self, kind: str, *, now: bool = False, **values: Any) -> None:
        """Add one event to the list of those to be written; with `now`, write the list."""
        self._unwritten.append({"kind": kind, "time": time.time(), **self._common, **values})
        if now:
            self._write_all()

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Write the remaining events and end the threads; trackers have `seconds` to close, all together."""
        if self._closed:
            return
        self._closed = True
        self._wake.set()
        self._thread.join()
        deadline = time.monotonic() + seconds
        for feed in self._feeds:
            feed.finish()
        for feed in self._feeds:
            feed.join(max(0.0, deadline - time.monotonic()))
            if feed.is_alive():
                self._failed(feed.tracker, f"it did not close within {seconds:g} s; what it has not sent is lost")
            elif feed.missed:
                self._failed(feed.tracker, f"it is slower than the run, and has missed {feed.missed:,} events")
        with self._writing:
            file, self._file = self._file, None
        if file is not None:
            # As in `_write`: closing tries again to write what a full disk refused.
            with suppress(OSError):
                file.close()

    def _work(self) -> None:
        while not self._closed:
            self._wake.wait(_WRITE_SECONDS)
            self._write_all()
        self._write_all()

    def _write_all(self) -> None:
        with self._writing:
            events = [self._unwritten.popleft() for _ in range(len(self._unwritten))]
            if events:
                self._write(events)
                for feed in self._feeds:
                    feed.pass_on(events)

    def _failed(self, tracker: Tracker, error: str) -> None:
        event = {"kind": "tracker", "time": time.time(), **self._common, "tracker": _name(tracker), "error": error}
        with self._writing:
            self._write([event])

    def _write(self, events: Sequence[Mapping[str, Any]]) -> None:
        if self._file is not None:
            try:
                self._file.write("".join(json.dumps(_finite(event)) + "\n" for event in events))
                self._file.flush()
            except OSError:  # a full disk, which the next checkpoint reports; these events are lost
                pass


class _Feed(threading.Thread):
    """Passes events to one tracker. A daemon: the process exits also if the tracker hangs."""

    def __init__(self, tracker: Tracker, failed: Callable[[Tracker, str], None]) -> None:
        super().__init__(name=f"batchwright-{_name(tracker)}", daemon=True)
        self.tracker, self._failed = tracker, failed
        self.missed = 0
        self._waiting: deque[Mapping[str, Any]] = deque(maxlen=_MOST_WAITING)
        self._wake, self.closing = threading.Event(), False
        self.start()

    def pass_on(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Let the thread pass these to the tracker."""
        if self.is_alive():
            self.missed += max(0, len(self._waiting) + len(events) - _MOST_WAITING)
            self._waiting.extend(events)
            self._wake.set()

    def finish(self) -> None:
        """Let the thread end after the events that wait."""
        self.closing = True
        self._wake.set()

    def run(self) -> None:
        """Pass events until `finish`, then close the tracker; stop at its first error."""
        try:
            while not self.closing or self._waiting:
                self._wake.wait()
                self._wake.clear()
                while self._waiting:
                    self.tracker.event(self._waiting.popleft())
            self.tracker.close()
        except BaseException as error:  # a package may also call sys.exit
            self._failed(self.tracker, str(error).strip() or type(error).__name__)


def trackers_hang() -> bool:
    """Whether a tracker that was closed has not ended."""
    return any(isinstance(thread, _Feed) and thread.closing for thread in threading.enumerate())


def _name(tracker: Tracker) -> str:
    return getattr(tracker, "name", None) or type(tracker).__name__


def _finite(event: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has no NaN and no infinity: they become text."""
    return {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in event.items()}


class ProgressBar:
    """A tracker that prints to stderr: a bar on a terminal, elsewhere a line every few seconds.

    `total` is in samples, None for a run without an end.
    """

    def __init__(self, total: int | None, stream: TextIO | None = None, every: float = _LINE_SECONDS) -> None:
        self._total, self._stream, self._every = total, stream or sys.stderr, every
        self._last_line = float("-inf")
        self._bar: Any = None
        self._task: Any = None

    def event(self, event: Mapping[str, Any]) -> None:
        """Show a step on the bar, or as a line if the last one is old enough; every other event as a line."""
        if event["kind"] in _BEGINNINGS:
            return
        if self._stream.isatty():
            self._on_terminal(event)
        elif event["kind"] != "step" or time.monotonic() - self._last_line >= self._every:
            if event["kind"] == "step":
                self._last_line = time.monotonic()
            print(_text(event, self._total), file=self._stream, flush=True)

    def close(self) -> None:
        """Stop the bar and leave it on the screen."""
        if self._bar is not None:
            self._bar.stop()

    def _on_terminal(self, event: Mapping[str, Any]) -> None:
        if self._bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (
                TextColumn("{task.description}"),
                BarColumn(None),
                TextColumn("{task.percentage:>3.0f}%"),
                TimeRemainingColumn(),
            )
            self._bar = Progress(*columns, console=Console(file=self._stream), refresh_per_second=4, expand=True)
            self._bar.start()
            self._task = self._bar.add_task("", total=self._total)
        if event["kind"] == "step":
            self._bar.update(self._task, completed=event["samples"], description=_brief(event))
        elif event["kind"] in ("evaluation", "stage", "stop"):
            self._bar.console.print(_text(event, self._total), highlight=False)


def _brief(event: Mapping[str, Any]) -> str:
    rate = event.get("tokens_per_second") or 0
    return f"step {event['step']:,} loss {event['loss']:.3f} batch {event['global_batch_size']} {rate:,.0f} tok/s"


def _text(event: Mapping[str, Any], total: int | None) -> str:
    kind, samples = event["kind"], event.get("samples") or 0
    of = f" of {human(total)}" if total else ""
    if kind == "step":
        rate = event.get("tokens_per_second") or 0
        return (
            f"step {event['step']:,} · {human(samples)}{of} samples · loss {event['loss']:.4f} · batch "
            f"{event['global_batch_size']} · stage {event['stage']} · {event['ranks']} ranks · {rate:,.0f} tokens/s"
        )
    if kind == "evaluation":
        return f"evaluation at {human(samples)} samples: loss {event['loss']:.4f}"
    if kind == "save":
        return f"saved {event['checkpoint']} in {event['seconds']:.2f} s"
    if kind == "stage":
        return f"stage {event['stage']} from step {event['step']:,}: global batch {event['global_batch_size']}"
    if kind == "launch":
        return f"launch {event['launch']}: {event['ranks']} ranks, {event['strategy']}, from sample {samples:,}"
    if kind == "stop":
        return f"stopped at {human(samples)}{of} samples: {event['reason']}"
    return str(event.get("error") or kind)
