"""Terminal plots. plotext is imported when one is drawn."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from shutil import get_terminal_size
from typing import Any

_NARROWEST = 30  # columns of a plot; a narrower terminal breaks its lines
_PLAIN = re.compile(r"\x1b\[[0-9;]*m")


def staircase(
    edges: Sequence[int],
    series: Mapping[str, Sequence[int]],
    *,
    xlabel: str,
    width: int = 90,
    height: int = 14,
    color: bool,
) -> str:
    """Values that hold from one edge to the next, as stairs; `edges` has one more entry than each series.

    Each series gets its own panel, because a batch and a node count have no common scale. The panels share the x axis.
    """
    panels = [_panel(edges, name, values, width, height, color) for name, values in series.items()]
    return "\n".join([*panels, xlabel.center(len(_PLAIN.sub("", panels[-1]).splitlines()[1])).rstrip()])


def _panel(edges: Sequence[int], name: str, values: Sequence[int], width: int, height: int, color: bool) -> str:
    import plotext

    xs: list[int] = []
    ys: list[int] = []
    for left, right, value in zip(edges, edges[1:], values, strict=False):
        xs += [left, right]
        ys += [value, value]
    figure = plotext.figure
    figure.clear()
    # A terminal of a few rows scrolls; plotext would draw nothing.
    plotext.terminal.limit(False, False)
    figure.plot_size(max(_NARROWEST, min(width, get_terminal_size((width, height)).columns)), height)
    figure.draw(figure.signal(xs, ys).lines())
    # The axis starts at zero, so that a doubling looks like one.
    figure.draw(figure.signal([xs[0]], [0], marker=" "))
    ticks = _ticks(edges[0], edges[-1])
    figure.ruler("x").ticks(ticks, [_short(t) for t in ticks])
    levels = sorted({0, *values})
    shown = levels if len(levels) <= height - 4 else levels[:: -(-len(levels) // (height - 4))]
    figure.ruler("y").ticks(shown, [str(v) for v in shown])
    figure.title(name)
    return "\n".join(_lines(figure, color=color))


def curve(
    title: str,
    values: Mapping[int, float],
    points: Sequence[tuple[int, float, str, str]],
    *,
    width: int,
) -> list[str]:
    """Values by size on a logarithmic axis, and labelled points: (size, value, label, marker)."""
    import plotext

    figure = plotext.figure
    figure.clear()
    plotext.terminal.limit(False, False)
    figure.plot_size(width, 14)
    figure.title(title)
    xs, ys = [math.log2(size) for size in values], list(values.values())
    line = figure.signal(xs, ys, marker="braille")
    line.lines()
    figure.draw(line)
    figure.draw(figure.signal(xs, ys, marker="•"))
    for size, value, label, marker in points:
        figure.draw(figure.signal([math.log2(size)], [value], marker=marker))
        # A text replaces what is below it, so it ends with the marker.
        figure.draw(figure.text(math.log2(size), value, f"{label} {marker}", alignment="right"))
    sizes = sorted({*values, *(size for size, *_ in points)})
    # Labels of sizes that are too close to each other would overlap.
    kept = [size for i, size in enumerate(sizes) if i == 0 or size >= 1.3 * sizes[i - 1]]
    figure.ruler("x").ticks([math.log2(size) for size in kept], [str(size) for size in kept])
    return _lines(figure, color=False)


def _lines(figure: Any, *, color: bool) -> list[str]:
    text = figure.build().string() if color else figure.build().string(colorless=True)
    figure.clear()
    return [line.rstrip() for line in text.rstrip("\n").splitlines()]


def _ticks(low: int, high: int) -> list[int]:
    """About six round positions from `low` to `high`."""
    step = 10 ** (len(str(max(1, (high - low) // 5))) - 1)
    while (high - low) // step > 8:
        step = step * 5 // 2 if str(step)[0] == "2" else step * 2
    return list(range(low // step * step, high + 1, step))


def _short(number: int) -> str:
    for factor, suffix in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= factor:
            return f"{number / factor:.4g}{suffix}"
    return str(number)
