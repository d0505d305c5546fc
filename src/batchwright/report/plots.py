"""Terminal plots. plotext is imported when one is drawn."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

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

    Several series share the x axis, each in a panel of its own: a batch and a node count have no common scale.
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
    figure.plot_size(width, height)
    figure.draw(figure.signal(xs, ys).lines())
    # From zero, so that a doubling looks like one.
    figure.draw(figure.signal([xs[0]], [0], marker=" "))
    ticks = _ticks(edges[0], edges[-1])
    figure.ruler("x").ticks(ticks, [_short(t) for t in ticks])
    levels = sorted({0, *values})
    shown = levels if len(levels) <= height - 4 else levels[:: -(-len(levels) // (height - 4))]
    figure.ruler("y").ticks(shown, [str(v) for v in shown])
    figure.title(name)
    text = figure.build().string() if color else figure.build().string(colorless=True)
    figure.clear()
    return "\n".join(line.rstrip() for line in text.splitlines())


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
