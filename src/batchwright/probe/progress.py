"""What a user sees while trials run: a live table on a terminal, plain lines elsewhere; always on standard error."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Protocol

from . import process
from .records import Trial
from .request import megabytes


class Progress(Protocol):
    """Told of every trial; `left` is how many more are expected after this one."""

    def started(self, size: int, purpose: str, left: int) -> None: ...
    def finished(self, trial: Trial) -> None: ...
    def note(self, text: str) -> None: ...
    def close(self) -> None: ...


class Silent:
    """Says nothing: what the library uses unless told otherwise."""

    def started(self, size: int, purpose: str, left: int) -> None: ...
    def finished(self, trial: Trial) -> None: ...
    def note(self, text: str) -> None: ...
    def close(self) -> None: ...


class Lines:
    """One line per trial."""

    def __init__(self) -> None:
        self._seconds: list[float] = []
        self._left = 0

    def started(self, size: int, purpose: str, left: int) -> None:
        self._left = left

    def finished(self, trial: Trial) -> None:
        if trial.seconds and not trial.resumed:
            self._seconds.append(trial.seconds)
        _print(f"{trial.purpose:<10}  micro_batch_size {trial.micro_batch_size:<6} {verdict(trial)}{self._eta()}")

    def _eta(self) -> str:
        return eta(self._seconds, self._left)

    def note(self, text: str) -> None:
        _print(text)

    def close(self) -> None: ...


class Live(Lines):
    """A table that grows, with what runs now and how long it will take."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live as RichLive

        super().__init__()
        self._trials: list[Trial] = []
        self._notes: list[str] = []
        self._now = "starting"
        self._live = RichLive(
            console=Console(stderr=True, no_color=process.colourless()), get_renderable=self._render,
            refresh_per_second=4, transient=True,
        )  # fmt: skip
        self._live.start()

    def started(self, size: int, purpose: str, left: int) -> None:
        super().started(size, purpose, left)
        self._now = f"{purpose}: micro_batch_size {size} …{self._eta()}"
        self._live.refresh()

    def finished(self, trial: Trial) -> None:
        if trial.seconds and not trial.resumed:
            self._seconds.append(trial.seconds)
        self._trials.append(trial)
        self._live.refresh()

    def note(self, text: str) -> None:
        self._live.console.print(text, highlight=False)

    def close(self) -> None:
        self._now = ""
        self._live.stop()

    def _render(self) -> Any:
        from rich.console import Group
        from rich.spinner import Spinner
        from rich.table import Table

        table = Table(box=None, pad_edge=False)
        for column in HEAD:
            table.add_column(column, justify="left" if column in ("purpose", "verdict") else "right")
        for trial in self._trials:
            table.add_row(*row(trial), style="" if trial.fits else "red")
        return Group(table, Spinner("dots", self._now)) if self._now else table


HEAD = ("purpose", "micro batch", "verdict", "peak memory", "predicted", "samples/s", "seconds")


def row(trial: Trial) -> tuple[str, ...]:
    """A trial as the cells of a table."""
    return (
        trial.purpose,
        str(trial.micro_batch_size),
        (trial.status if trial.fits else f"{trial.status} ({trial.death})") + (", resumed" if trial.resumed else ""),
        megabytes(trial.peak_memory_bytes),
        megabytes(trial.predicted_peak_memory_bytes),
        "-" if trial.samples_per_second is None else f"{trial.samples_per_second:.4g}",
        "-" if trial.seconds is None else f"{trial.seconds:.1f}",
    )


def verdict(trial: Trial) -> str:
    """A trial in a line: what happened, and why."""
    if not trial.fits:
        return f"{trial.status} ({trial.death}): {(trial.reason or '')[:160]}"
    words = ["fits"]
    if trial.peak_memory_bytes and trial.purpose != "throughput":
        words.append(f"peak {megabytes(trial.peak_memory_bytes)}")
        if trial.predicted_peak_memory_bytes:
            words.append(f"predicted {megabytes(trial.predicted_peak_memory_bytes)}")
    if trial.samples_per_second and trial.timing:
        words.append(f"{trial.samples_per_second:.4g} samples/s ± {trial.timing.noise:.0%}")
    return ", ".join(words) + (" (resumed)" if trial.resumed else "")


def eta(seconds: Sequence[float], left: int) -> str:
    """How long the trials to come will take, if they take as long as those before.

    >>> eta([2.0, 4.0], 2)
    '  [about 2 more, 6 s]'
    """
    if left <= 0 or not seconds:
        return ""
    return f"  [about {left} more, {left * sum(seconds) / len(seconds):.0f} s]"


def _print(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
