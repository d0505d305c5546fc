"""Trackers of other packages: one small file each, imported when it is asked for.

All record the same numbers under the same names, with the number of the step as the x axis. A tracker starts with the first
event, in the thread of its own that `Events` gives it, so that a server which does not answer delays nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from batchwright.core.errors import MissingExtraError
from batchwright.rundir.trackers import identity

# The numbers of a step event that are recorded, as `train/loss`.
STEP = (
    "step", "loss", "auxiliary", "global_batch_size", "samples", "tokens", "stage", "nodes", "ranks", "samples_per_second",
    "tokens_per_second", "step_seconds", "learning_rate", "grad_norm", "noise_scale", "mfu", "loss_scale",
)  # fmt: skip
# What a launch event says about the whole run.
CONFIG = ("parameters", "strategy", "device", "seed", "dataset_size", "total_samples")
# Recorded a second time with samples as the x axis, where a user cannot choose the axis.
OVER_SAMPLES = {
    "train/loss": "over_samples/loss",
    "train/global_batch_size": "over_samples/global_batch_size",
    "evaluation/loss": "over_samples/evaluation_loss",
}
# How long a tracker may take to send its last numbers. A launch that has saved everything is killed after 60 s.
CLOSE_SECONDS = 20.0


def open_tracker(name: str, run: Path) -> Recorder:
    """The tracker of this name for a run directory; its package is imported here, and it starts with the first event."""
    try:
        return import_module(f"{__name__}.{name}").RECORDER(run)
    except ImportError as error:
        raise MissingExtraError(
            f"the tracker {name} needs the package {name}, which cannot be imported ({error}): pip install {name}.",
            field="tracker",
            given=name,
        ) from error


def numbers(event: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of an event by the name under which they are recorded; empty for most kinds.

    >>> numbers({"kind": "step", "step": 3, "samples": 32, "loss": 1.5, "mfu": None})
    {'train/step': 3, 'train/loss': 1.5, 'train/samples': 32}
    """
    kind = event["kind"]
    if kind == "step":
        return {f"train/{name}": event[name] for name in STEP if event.get(name) is not None}
    if kind == "evaluation":
        return {"evaluation/loss": event["loss"], "evaluation/samples": event["samples"]}
    if kind == "launch" and event.get("lost_seconds") is not None:
        return {"launch/lost_seconds": event["lost_seconds"]}
    return {}


class Recorder(ABC):
    """A tracker that records the numbers of events; each package has a subclass."""

    name = ""

    def __init__(self, run: Path) -> None:
        self.run = run.absolute()
        self.stopped: str | None = None
        """Why the launch stopped, once it has."""
        self.recorded = 0
        """Steps that earlier launches have recorded, as the tracker says: their first values stay."""
        self.evaluated = 0
        """The samples of the last evaluation that they have recorded."""
        self._begun = False

    def event(self, event: Mapping[str, Any]) -> None:
        """Start with the launch; record the numbers of steps and evaluations."""
        kind = event["kind"]
        if kind == "launch":
            self.begin(event)
            self._begun = True
        elif kind == "save":
            self.flush()  # the steps before a checkpoint are not trained again: a kill must not lose them
        elif kind == "stop":
            self.stopped = event["reason"]
        if values := numbers(event):
            # What is measured between two steps belongs to the one before.
            step = event["step"] if kind == "step" else max(0, event["step"] - 1)
            if kind == "launch":
                step = max(step, self.recorded - 1)
            known = kind == "evaluation" and event["samples"] <= self.evaluated
            if step >= self.recorded - (kind != "step") and not known:
                self.record(values, step, event["samples"], event["time"])

    def close(self) -> None:
        """End the run in the tracker, if it was begun."""
        if self._begun:
            self.end()

    def identity(self, make: Callable[[], str]) -> tuple[str, bool]:
        """The id of this run in the tracker, from an earlier launch or from `make`, and whether there was one."""
        return identity(self.run, self.name, make)

    @abstractmethod
    def begin(self, launch: Mapping[str, Any]) -> None:
        """Start or continue the run in the tracker."""

    @abstractmethod
    def record(self, values: Mapping[str, float], step: int, samples: int, time: float) -> None:
        """Record numbers at the end of a step."""

    def flush(self) -> None:  # noqa: B027 - not every package has one
        """Send what was recorded, where that is possible."""

    @abstractmethod
    def end(self) -> None:
        """Send what is left."""
