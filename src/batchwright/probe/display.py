"""What a user sees: progress while trials run (on standard error), and a table of trials."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol

from batchwright.core.numbers import format_bytes

from .records import Trial


class TrialProgress(Protocol):
    """Is called before and after every trial; `left` is how many trials are expected after this one."""

    def started(self, size: int, purpose: str, left: int) -> None: ...
    def finished(self, trial: Trial) -> None: ...
    def note(self, text: str) -> None: ...
    def close(self) -> None: ...


class NoProgress:
    """Prints nothing: the library's default."""

    def started(self, size: int, purpose: str, left: int) -> None: ...
    def finished(self, trial: Trial) -> None: ...
    def note(self, text: str) -> None: ...
    def close(self) -> None: ...


class TrialLines:
    """One line per trial."""

    def __init__(self) -> None:
        self._seconds: list[float] = []

    def started(self, size: int, purpose: str, left: int) -> None:
        if self._seconds:
            _print(f"{'next':<10}  micro_batch_size {size:<6} {eta(self._seconds, left + 1)}")

    def finished(self, trial: Trial) -> None:
        self._count(trial)
        _print(f"{trial.purpose:<10}  micro_batch_size {trial.micro_batch_size:<6} {verdict(trial)}")

    def note(self, text: str) -> None:
        _print(text)

    def close(self) -> None: ...

    def _count(self, trial: Trial) -> None:
        if trial.seconds and not trial.resumed:
            self._seconds.append(trial.seconds)


class TrialTable(TrialLines):
    """For a terminal: a table that grows, the trial that runs now, and the expected time."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        super().__init__()
        self._trials: list[Trial] = []
        self._now = "starting"
        self._live = Live(
            console=Console(stderr=True), get_renderable=self._render, refresh_per_second=4, transient=True
        )
        self._live.start()

    def started(self, size: int, purpose: str, left: int) -> None:
        after = f" ({eta(self._seconds, left + 1)})" if self._seconds else ""
        self._now = f"{purpose}: micro_batch_size {size} …{after}"
        self._live.refresh()

    def finished(self, trial: Trial) -> None:
        self._count(trial)
        self._trials.append(trial)
        self._live.refresh()

    def note(self, text: str) -> None:
        self._live.console.print(text, highlight=False, markup=False)

    def close(self) -> None:
        self._now = ""
        self._live.stop()

    def _render(self) -> Any:
        from rich.console import Group
        from rich.spinner import Spinner
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False)
        for column in HEAD:
            table.add_column(column, justify="left" if column in ("purpose", "verdict") else "right")
        for trial in self._trials:
            table.add_row(*row(trial), style="" if trial.fits else "red")
        return Group(table, Spinner("dots", Text(self._now))) if self._now else table


HEAD = ("purpose", "micro batch", "verdict", "peak memory", "predicted", "samples/s", "seconds")


def row(trial: Trial) -> tuple[str, ...]:
    """A trial as the cells of a table."""
    return (
        trial.purpose,
        str(trial.micro_batch_size),
        (trial.status if trial.fits else f"{trial.status} ({trial.cause})") + (", resumed" if trial.resumed else ""),
        format_bytes(trial.peak_memory_bytes),
        format_bytes(trial.predicted_peak_memory_bytes),
        "-" if trial.samples_per_second is None else f"{trial.samples_per_second:.4g}",
        "-" if trial.seconds is None else f"{trial.seconds:.1f}",
    )


def verdict(trial: Trial) -> str:
    """A trial in one line: what happened, and why."""
    if not trial.fits:
        return f"{trial.status} ({trial.cause}): {(trial.reason or '')[:160]}"
    parts = ["fits"]
    if trial.peak_memory_bytes and trial.purpose != "throughput":
        parts.append(f"peak {format_bytes(trial.peak_memory_bytes)}")
        if trial.predicted_peak_memory_bytes:
            parts.append(f"predicted {format_bytes(trial.predicted_peak_memory_bytes)}")
    if trial.samples_per_second and trial.timing:
        parts.append(f"{trial.samples_per_second:.4g} samples/s ± {trial.timing.noise:.0%}")
    return ", ".join(parts) + (" (resumed)" if trial.resumed else "")


def eta(seconds: Sequence[float], trials: int) -> str:
    """How long the trials that are left will take, if they take as long as those before.

    >>> eta([2.0, 4.0], 2)
    'about 2 trials left, 6 s'
    """
    return f"about {trials} trial{'s' * (trials > 1)} left, {trials * sum(seconds) / len(seconds):.0f} s"


def _print(text: str) -> None:
    with suppress(OSError):  # the reader of our standard error is gone
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
