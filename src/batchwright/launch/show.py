"""What a person sees during a run: a bar on a terminal, plain lines elsewhere; and the time that is left."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any, TextIO

from batchwright.core.numbers import human

from .records import Ending, LaunchProgress, Manifest, RunPlan

ASSUMED_BOUNDARY_SECONDS = 15.0  # local torchrun, until one is measured: 6 to 11 s are typical
LINE_SECONDS = 10.0  # between two lines without a terminal


def describe(
    plan: RunPlan, manifest: Manifest, progress: LaunchProgress, eta: float | None, width: int | None = None
) -> str:
    """One line: stage, batch, ranks, speed, loss, time left; without the parts for which `width` has no room."""
    stage = plan.stage_before(progress.position, manifest.start_sample)
    length = stage.sequence_length
    tokens = progress.tokens_per_second
    if tokens is None and progress.samples_per_second and length:
        tokens = progress.samples_per_second * length
    speed = None
    if tokens is not None:
        speed = f"{tokens:,.0f} tokens/s"
    elif progress.samples_per_second is not None:
        speed = f"{progress.samples_per_second:,.0f} samples/s"
    parts = {
        "stage": f"stage {stage.index + 1}/{len(plan.stages)}",
        "batch": f"batch {stage.global_batch_size}",
        "ranks": f"{manifest.ranks} rank{'s' * (manifest.ranks != 1)}",
        "speed": speed,
        "loss": None if progress.loss is None else f"loss {progress.loss:.4f}",
        "left": None if eta is None else f"{duration(eta)} left",
    }
    for left_out in ("", "ranks", "batch", "speed", "stage", "left"):
        parts[left_out] = None
        line = " · ".join(part for part in parts.values() if part)
        if width is None or len(line) <= width:
            break
    return line


class LineDisplay:
    """Plain lines, to stderr by default."""

    def __init__(self, stream: TextIO | None = None, every: float = LINE_SECONDS) -> None:
        self._stream, self._every, self._last = stream or sys.stderr, every, 0.0

    def launched(self, plan: RunPlan, manifest: Manifest) -> None:
        """A launch was started."""
        stage = plan.stage_at(manifest.start_sample)
        self._print(
            f"launch {manifest.number}: samples {human(manifest.start_sample)} to {human(manifest.end_sample)}, stage "
            f"{stage.index + 1}/{len(plan.stages)}, batch {stage.global_batch_size} = {stage.micro_batch_size} micro × "
            f"{stage.accumulation_steps} accumulation × {stage.data_parallel_size} ranks"
        )
        self._last = time.monotonic()

    def progress(self, plan: RunPlan, manifest: Manifest, progress: LaunchProgress, eta: float | None) -> None:
        """The launch made progress."""
        if time.monotonic() - self._last >= self._every:
            self._last = time.monotonic()
            share = progress.position / max(1, plan.total_samples)
            self._print(
                f"{share:4.0%}  {human(progress.position)} of {human(plan.total_samples)} samples · "
                + describe(plan, manifest, progress, eta)
            )

    def ended(self, plan: RunPlan, manifest: Manifest, ending: Ending) -> None:
        """The launch ended; if it failed, why."""
        seconds = ending.ended - manifest.started
        self._print(
            f"launch {ending.number} {ending.outcome} at sample {human(ending.position)} after {duration(seconds)}"
        )
        if ending.failure is not None:
            self._print(f"  {ending.failure.reason}")
            for line in ending.failure.lines:
                self._print(f"  | {line}")
            if ending.failure.advice:
                self._print(f"  {ending.failure.advice}")

    def note(self, text: str) -> None:
        """Any other line."""
        self._print(text)

    def close(self) -> None:
        """Nothing to close."""

    def _print(self, text: str) -> None:
        try:
            print(text, file=self._stream, flush=True)
        except (OSError, ValueError):  # the reader is gone; the run continues
            pass


class BarDisplay(LineDisplay):
    """The same, with a bar over samples below the lines; rich is imported only when the bar is drawn."""

    def __init__(self, stream: TextIO | None = None) -> None:
        super().__init__(stream)
        self._bar: Any = None
        self._bar_width = 0
        self._task: Any = None

    def launched(self, plan: RunPlan, manifest: Manifest) -> None:
        """A launch was started."""
        if self._bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn

            console = Console(file=self._stream)
            self._bar_width = 30 if console.width >= 110 else 10 if console.width >= 60 else 0
            columns = (
                *([BarColumn(bar_width=self._bar_width)] if self._bar_width else []),
                TextColumn("{task.percentage:>3.0f}%"),
                TextColumn("{task.description}"),
            )
            self._bar = Progress(*columns, console=console, refresh_per_second=2)
            self._task = self._bar.add_task("starting", total=plan.total_samples, completed=manifest.start_sample)
            self._bar.start()
        super().launched(plan, manifest)

    def progress(self, plan: RunPlan, manifest: Manifest, progress: LaunchProgress, eta: float | None) -> None:
        """The launch made progress."""
        if self._bar is not None:
            # Beside the text: the bar, 100%, and a space after each.
            text = describe(plan, manifest, progress, eta, self._bar.console.width - self._bar_width - 6)
            self._bar.update(self._task, completed=progress.position, description=text)

    def close(self) -> None:
        """Stop the bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _print(self, text: str) -> None:
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            super()._print(text)


def display(stream: TextIO | None = None) -> LineDisplay:
    """A bar on a terminal, lines elsewhere."""
    out: TextIO = stream or sys.stderr
    return BarDisplay(out) if out.isatty() else LineDisplay(out)


def remaining_seconds(
    plan: RunPlan, position: int, speeds: Mapping[int, float], boundary_seconds: float | None = None
) -> float | None:
    """Seconds from `position` to the end, from the samples per second of measured stages; None without any.

    A stage that was not measured is assumed to be as fast per rank as the nearest measured one.
    """
    if not speeds:
        return None
    total = 0.0
    for stage in plan.stages:
        left = (stage.end_sample or plan.total_samples) - max(position, stage.start_sample)
        if left <= 0:
            continue
        near = min(speeds, key=lambda index: (abs(index - stage.index), -index))
        each = speeds[near] / plan.stages[near].data_parallel_size
        total += left / (speeds[stage.index] if stage.index in speeds else each * stage.data_parallel_size)
    ahead = sum(launch.start_sample > position for launch in plan.launches)
    return total + ahead * (ASSUMED_BOUNDARY_SECONDS if boundary_seconds is None else boundary_seconds)


def duration(seconds: float) -> str:
    """Seconds as text.

    >>> duration(7), duration(433), duration(100_000)
    ('7 s', '7 min', '27 h 46 min')
    """
    whole = round(seconds)
    if whole < 120:
        return f"{whole} s"
    if whole < 7200:
        return f"{whole // 60} min"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


class Speeds:
    """Samples per second of each stage, from positions and their times, without the start of a launch."""

    def __init__(self) -> None:
        self.by_stage: dict[int, float] = {}
        self._anchor: tuple[int, int, float] | None = None

    def seen(self, stage: int, position: int, when: float, reported: float | None = None) -> None:
        """A position in a stage. `reported` is the launch's own speed; without it the first position starts the clock."""
        if reported:
            self.by_stage[stage] = reported + 0.8 * (self.by_stage.get(stage, reported) - reported)
            return
        if self._anchor is None or self._anchor[0] != stage or position < self._anchor[1]:
            self._anchor = (stage, position, when)
            return
        samples, seconds = position - self._anchor[1], when - self._anchor[2]
        if samples > 0 and seconds > 0:
            self.by_stage[stage] = samples / seconds

    def restart(self) -> None:
        """A new launch: the clock starts again."""
        self._anchor = None
