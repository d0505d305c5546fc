"""Progress for people: a bar on a terminal, a line now and then elsewhere; to stderr, as all diagnostics."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any, TextIO

from batchwright.core.numbers import human

# Between two lines where there is no terminal: a log of a day has some thousand of them.
_SECONDS = 10.0


class Progress:
    """A tracker that shows how far the run is; `total` in samples, None for an open end."""

    def __init__(self, total: int | None, stream: TextIO | None = None, every: float = _SECONDS) -> None:
        self._total, self._stream, self._every = total, stream or sys.stderr, every
        self._last, self._bar, self._task = 0.0, None, None

    def event(self, event: Mapping[str, Any]) -> None:
        """Show a step on the bar, or as a line if the last is old enough; every other event as a line."""
        if self._stream.isatty():
            self._on_terminal(event)
        elif event["kind"] != "step" or time.monotonic() - self._last >= self._every:
            if event["kind"] == "step":
                self._last = time.monotonic()
            print(_text(event, self._total), file=self._stream, flush=True)

    def close(self) -> None:
        """Leave the bar as it is."""
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
        if event["kind"] == "step" and self._task is not None:
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
