"""Two pictures for a terminal: throughput and memory against batch size, with the knee and the first failure marked."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .records import Probe, Trial


def plots(probe: Probe, width: int = 76) -> list[str]:
    """The plots' lines, without colours; none where there is nothing to draw, or plotext has another interface."""
    speed = _best_by_size([t for t in probe.trials if t.samples_per_second and t.fits], lambda t: t.samples_per_second)
    memory = _best_by_size(
        [t for t in probe.trials if t.purpose == "limit" and t.fits], lambda t: (t.peak_memory_bytes or 0) / 2**20
    )
    lines: list[str] = []
    if len(speed) > 1:
        marks = [(size, speed[size], "knee") for size in [probe.saturating_micro_batch_size] if size in speed]
        lines += _plot("samples/s against micro_batch_size (knee: 90% of the best)", speed, marks, width)
    if len(memory) > 1 and probe.memory_bytes:  # without a limit, the peak is only the host's part of a command
        failing = probe.first_failing_micro_batch_size
        marks = [(failing, probe.memory_bytes / 2**20, "fails")] if failing else []
        lines += _plot("peak memory, MiB, against micro_batch_size", memory, marks, width)
    return lines


def _best_by_size(trials: Sequence[Trial], value) -> dict[int, float]:
    found: dict[int, float] = {}
    for trial in trials:
        found[trial.micro_batch_size] = max(found.get(trial.micro_batch_size, 0.0), float(value(trial)))
    return dict(sorted((size, v) for size, v in found.items() if v > 0))


def _plot(title: str, points: dict[int, float], marks: list[tuple[int, float, str]], width: int) -> list[str]:
    import plotext

    figure = getattr(plotext, "figure", None)
    if figure is None or not hasattr(figure, "signal"):  # plotext 5 and before
        return []
    figure.clear()
    plotext.terminal.limit(False, False)
    figure.plot_size(width, 14)
    figure.title(title)
    line = figure.signal([math.log2(s) for s in points], list(points.values()), marker="braille")
    line.lines()
    figure.draw(line)
    figure.draw(figure.signal([math.log2(s) for s in points], list(points.values()), marker="•"))
    for size, value, label in marks:
        figure.draw(figure.signal([math.log2(size)], [value], marker="×" if label == "fails" else "◆"))
        figure.draw(figure.text(math.log2(size), value, f"{label} {size} ", alignment="right"))
    sizes = sorted({*points, *(size for size, *_ in marks)})
    kept = [s for i, s in enumerate(sizes) if i == 0 or s >= 1.3 * sizes[i - 1]]
    figure.ruler("x").ticks([math.log2(s) for s in kept], [str(s) for s in kept])
    text = figure.build().string(colorless=True)
    figure.clear()
    return ["", *(row.rstrip() for row in text.rstrip("\n").split("\n"))]
