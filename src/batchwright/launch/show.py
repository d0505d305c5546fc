"""What a person sees while a run goes on: one bar over samples on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any, TextIO

from batchwright.core.numbers import human

from .eta import duration
from .records import Ending, Manifest, Progress, RunPlan

LINE_SECONDS = 10.0  # between two lines where there is no terminal


def describe(plan: RunPlan, manifest: Manifest, progress: Progress, eta: float | None) -> str:
    """One line: stage, batch, ranks, speed, loss, time left."""
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
    parts = [
        f"stage {stage.index + 1}/{len(plan.stages)}",
        f"batch {stage.global_batch_size}",
        f"{manifest.ranks} rank{'s' * (manifest.ranks != 1)}",
        speed,
        None if progress.loss is None else f"loss {progress.loss:.4f}",
        None if eta is None else f"{duration(eta)} left",
    ]
    return " · ".join(part for part in parts if part)


class Lines:
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

    def progress(self, plan: RunPlan, manifest: Manifest, progress: Progress, eta: float | None) -> None:
        """It went on."""
        if time.monotonic() - self._last >= self._every:
            self._last = time.monotonic()
            share = progress.position / max(1, plan.total_samples)
            self._print(
                f"{share:4.0%}  {human(progress.position)} of {human(plan.total_samples)} samples · "
                + describe(plan, manifest, progress, eta)
            )

    def ended(self, plan: RunPlan, manifest: Manifest, ending: Ending) -> None:
        """It ended; where it failed, why."""
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
        """Something else worth a line."""
        self._print(text)

    def close(self) -> None:
        """Nothing to put away."""

    def _print(self, text: str) -> None:
        try:
            print(text, file=self._stream, flush=True)
        except (OSError, ValueError):  # whoever read this has gone; the run has not
            pass


class Bar(Lines):
    """The same with one bar over samples below the lines; rich is imported when it is drawn."""

    def __init__(self, stream: TextIO | None = None) -> None:
        super().__init__(stream)
        self._bar: Any = None
        self._task: Any = None

    def launched(self, plan: RunPlan, manifest: Manifest) -> None:
        """A launch was started."""
        if self._bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn

            columns = (
                BarColumn(bar_width=30),
                TextColumn("{task.percentage:>3.0f}%"),
                TextColumn("{task.description}"),
            )
            self._bar = Progress(*columns, console=Console(file=self._stream), refresh_per_second=2)
            self._task = self._bar.add_task("starting", total=plan.total_samples, completed=manifest.start_sample)
            self._bar.start()
        super().launched(plan, manifest)

    def progress(self, plan: RunPlan, manifest: Manifest, progress: Progress, eta: float | None) -> None:
        """It went on."""
        if self._bar is not None:
            text = describe(plan, manifest, progress, eta)
            self._bar.update(self._task, completed=progress.position, description=text)

    def close(self) -> None:
        """Leave the bar as it is."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _print(self, text: str) -> None:
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            super()._print(text)


def listener(stream: TextIO | None = None) -> Lines:
    """A bar where somebody watches, lines where nobody does."""
    out: TextIO = stream or sys.stderr
    return Bar(out) if out.isatty() else Lines(out)
