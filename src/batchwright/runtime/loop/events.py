"""Events: one JSON line per step, evaluation, save, stage and launch, written off the hot path.

`RUN/events/launch-00003.jsonl`, written by rank 0. Every line has `kind`, `time` (seconds since 1970), `launch`; keys by
kind, beside those:

    launch      step, samples, ranks, strategy, device, parameters, setup_seconds, load_seconds, lost_seconds, lost
    step        step, samples, tokens, loss, auxiliary, global_batch_size, micro_batch_size, accumulation_steps,
                samples_per_second, tokens_per_second, step_seconds, learning_rate, grad_norm, mfu, stage, ranks,
                noise_scale, outcome (applied, or skipped by the GradScaler), loss_scale (the GradScaler's next)
    stage       stage, step, samples, global_batch_size
    evaluation  step, samples, loss, weight, seconds
    save        step, samples, checkpoint, seconds
    stop        reason, step, samples, next_stage

`samples` is the position after the event; `tokens` counts the loss's weight up to there (tokens, where the weights are
tokens); rates are of the whole job. A key that is not known (MFU without a peak) is null.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from batchwright.core.errors import MissingExtraError
from batchwright.rundir import atomic, names
from batchwright.rundir.files import JsonLines, write_fault

# Long enough to cost nothing, short enough to watch.
_SECONDS = 0.5


class Tracker(Protocol):
    """Where events go besides the file: TensorBoard, a progress bar, or one's own."""

    def event(self, event: Mapping[str, Any]) -> None:
        """Take one event, as in the module's table; called from the events' own thread."""

    def close(self) -> None:
        """The last event has come."""


class Events:
    """Takes events in a training loop and hands them to the file and the trackers from a thread.

    `emit` appends to a list and returns; the thread wakes twice a second. A tracker that fails is dropped with a line
    in the file: a plot is no reason to stop a run.
    """

    def __init__(self, path: Path | str | None, trackers: Sequence[Tracker] = (), **common: Any) -> None:
        self._trackers, self._common = list(trackers), common
        self._pending: deque[dict[str, Any]] = deque()  # appended to and emptied by two threads, and never replaced
        self._wake, self._closed = threading.Event(), False
        self._file = None
        if path is not None:
            try:
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                self._file = open(path, "a", encoding="utf-8", opener=atomic.no_follow)
            except OSError as error:
                raise write_fault(error, "the events", Path(path).parent, "Checkpoints are untouched.") from error
        self._thread = threading.Thread(target=self._work, name="batchwright-events", daemon=True)
        self._thread.start()

    def emit(self, kind: str, **values: Any) -> None:
        """Take one event; costs an append."""
        self._pending.append({"kind": kind, "time": time.time(), **self._common, **values})

    def close(self) -> None:
        """Write what is left and end the thread."""
        if self._closed:
            return
        self._closed = True
        self._wake.set()
        self._thread.join()
        for tracker in self._trackers:
            try:
                tracker.close()
            except Exception as error:
                self._failed(tracker, error)
        if self._file is not None:
            with suppress(OSError):  # as in `_write`; what a full disk refused is tried again here
                self._file.close()

    def _work(self) -> None:
        while not self._closed:
            self._wake.wait(_SECONDS)
            self._flush()
        self._flush()

    def _flush(self) -> None:
        pending = [self._pending.popleft() for _ in range(len(self._pending))]
        if not pending:
            return
        for event in pending:
            for tracker in list(self._trackers):
                try:
                    tracker.event(event)
                except Exception as error:
                    self._trackers.remove(tracker)
                    self._failed(tracker, error)
        self._write(pending)

    def _failed(self, tracker: Tracker, error: Exception) -> None:
        self._write([{"kind": "tracker", "time": time.time(), "tracker": type(tracker).__name__, "error": str(error)}])

    def _write(self, events: Sequence[Mapping[str, Any]]) -> None:
        if self._file is not None:
            try:
                self._file.write("".join(json.dumps(_finite(event)) + "\n" for event in events))
                self._file.flush()
            except OSError:  # a full disk: checkpoints say so; the events of this half second are lost
                pass


def _finite(event: Mapping[str, Any]) -> dict[str, Any]:
    """JSON knows no NaN; a loss that is one becomes text."""
    return {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in event.items()}


def read_events(directory: Path | str, *, lineage: bool = True) -> list[dict[str, Any]]:
    """All events of a run directory in order; with `lineage`, without the steps that a later launch did again.

    >>> read_events("nowhere")
    []
    """
    folder = Path(directory) / "events"
    found = sorted((number, name) for name in names.listed(folder) if (number := names.read_events(name)) is not None)
    launches: list[list[dict[str, Any]]] = []
    for _, name in found:
        launches.append(JsonLines(folder / name).new())
    if lineage:
        limit = math.inf
        for index in reversed(range(len(launches))):
            starts = [e["samples"] for e in launches[index] if e["kind"] == "launch"]
            launches[index] = [e for e in launches[index] if e.get("samples", 0) <= limit or e["kind"] == "launch"]
            limit = min([limit, *starts])
    return [event for events in launches for event in events]


class TensorBoard:
    """Events as TensorBoard scalars over samples; `TensorBoard(RUN / "tensorboard")` as one of `trackers`."""

    SCALARS = ("loss", "auxiliary", "global_batch_size", "tokens_per_second", "learning_rate", "grad_norm", "mfu",
               "noise_scale", "ranks", "stage")  # fmt: skip

    def __init__(self, directory: Path | str) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise MissingExtraError(
                "TensorBoard needs the package tensorboard, which is not installed: pip install tensorboard.",
                field="tracker",
                given="tensorboard",
            ) from error
        self._writer = SummaryWriter(str(directory))

    def event(self, event: Mapping[str, Any]) -> None:
        """Write the numbers of a step, an evaluation or a launch."""
        if event["kind"] == "step":
            for name in self.SCALARS:
                if event.get(name) is not None:
                    self._writer.add_scalar(f"train/{name}", event[name], event["samples"], event["time"])
        elif event["kind"] == "evaluation":
            self._writer.add_scalar("evaluation/loss", event["loss"], event["samples"], event["time"])
        elif event["kind"] == "launch" and event.get("lost_seconds") is not None:
            self._writer.add_scalar("launch/lost_seconds", event["lost_seconds"], event["samples"], event["time"])

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()
