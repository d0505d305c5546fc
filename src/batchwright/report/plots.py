"""Terminal plots. plotext is imported when one is drawn."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from shutil import get_terminal_size
from typing import Any

from batchwright.core.numbers import short

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
    widest = max(len(str(value)) for values in series.values() for value in values)
    panels = [_panel(edges, name, values, width, height, color, widest) for name, values in series.items()]
    return "\n".join([*panels, xlabel.center(len(_PLAIN.sub("", panels[-1]).splitlines()[1])).rstrip()])


def _panel(
    edges: Sequence[int], name: str, values: Sequence[int], width: int, height: int, color: bool, widest: int
) -> str:
    import plotext

    xs: list[int] = []
    ys: list[int] = []
    for left, right, value in zip(edges, edges[1:], values, strict=False):
        xs += [left, right]
        ys += [value, value]
    figure = plotext.figure
    figure.clear()
    figure.theme("simple")  # the background of the terminal, also if it is dark
    # A terminal of a few rows scrolls; plotext would draw nothing.
    plotext.terminal.limit(False, False)
    figure.plot_size(max(_NARROWEST, min(width, get_terminal_size((width, height)).columns)), height)
    figure.draw(figure.signal(xs, ys).lines())
    # The axis starts at zero, so that a doubling looks like one.
    figure.draw(figure.signal([xs[0]], [0], marker=" "))
    ticks = round_numbers(edges[0], edges[-1], most=9)
    figure.ruler("x").ticks(ticks, [short(t) for t in ticks])
    shown = few(values, height)
    figure.ruler("y").ticks(shown, [str(v).rjust(widest) for v in shown])
    figure.title(name)
    return "\n".join(_lines(figure, color=color))


@dataclass(frozen=True)
class Series:
    """Points with a name and a look; several with one name are parts of one series."""

    name: str
    points: Sequence[tuple[float, float]]
    look: str = "line"


# The marker of every look, the one that stands for it in the legend, and whether its points are joined.
_LOOKS = {
    "line": ("braille", "⠒", True), "planned": ("·", "·", True), "level": ("─", "─", True), "faint": ("·", "·", False),
    "dots": ("o", "o", False), "points": ("•", "•", False), "cross": ("×", "×", False),
}  # fmt: skip


def lines(
    series: Sequence[Series],
    *,
    x: tuple[float, float],
    y: tuple[float, float],
    xlabel: str,
    width: int,
    height: int = 14,
    decades: Sequence[float] = (),
    levels: Sequence[float] = (),
    sizes: Sequence[int] = (),
    borders: Sequence[tuple[float, str]] = (),
    marks: Sequence[tuple[float, float, str]] = (),
) -> list[str]:
    """Series on common axes, with a legend if there are several; `borders` are vertical lines with a text at their top.

    `decades` are labels of a logarithmic y axis, `sizes` those of a logarithmic x axis; without them an axis is linear, and
    `levels` may be the labels of y. `marks` are (x, y, text).
    """
    import plotext

    figure = plotext.figure
    figure.clear()
    plotext.terminal.limit(False, False)
    figure.plot_size(width, height)
    across, up = math.log2 if sizes else float, math.log10 if decades else float
    left, right, low, high = across(x[0]), across(x[1]), up(y[0]), up(y[1])

    def write(at: float, value: float, text: str) -> None:
        # Inside the plot: a text begins or ends at its place.
        figure.draw(figure.text(at, value, text, alignment="left" if 2 * at < left + right else "right"))

    for at, _ in borders:
        figure.draw(figure.signal([across(at)] * 2, [low, high], marker="┊").lines())
    for one in series:
        marker, _, joined = _LOOKS[one.look]
        signal = figure.signal([across(p) for p, _ in one.points], [up(v) for _, v in one.points], marker=marker)
        figure.draw(signal.lines() if joined else signal)
    for at, text in borders:
        if text:
            write(across(at), high, text)
    for at, value, text in marks:
        write(across(at), up(value), f"◆ {text}" if 2 * across(at) < left + right else f"{text} ◆")
    figure.ruler("x").lim(left, right)
    figure.ruler("y").lim(low, high)
    xs = _apart(sizes, width, right - left) if sizes else round_numbers(*x, most=max(2, width // 12))
    figure.ruler("x").ticks([across(v) for v in xs], [str(v) if sizes else short(v) for v in xs])
    ys = [v for v in decades if y[0] <= v <= y[1]] or levels or round_numbers(*y, most=6)
    figure.ruler("y").ticks([up(v) for v in ys], [short(v) for v in ys])
    made = _lines(figure, color=False)
    names = {one.name: _LOOKS[one.look][1] for one in reversed(series)}
    legend = [f"  {names.pop(one.name)} {one.name}" for one in series if one.name in names] if len(names) > 1 else []
    return [*legend, *made, *([xlabel.center(len(made[-2])).rstrip()] if xlabel else [])]


def few(levels: Collection[int], height: int) -> list[int]:
    """Zero and the values of a staircase; fewer if the axis has no room for all."""
    ordered = sorted({0, *levels})
    return ordered if len(ordered) <= height - 4 else ordered[:: -(-len(ordered) // (height - 4))]


def _apart(sizes: Sequence[int], width: int, span: float) -> list[int]:
    """The sizes whose labels do not touch each other on a logarithmic axis: the largest ones matter most."""
    kept: list[int] = []
    for size in sorted(sizes, reverse=True):
        if not kept or (math.log2(kept[-1]) - math.log2(size)) / span * width >= len(str(kept[-1])) + 2:
            kept.append(size)
    return kept[::-1]


@dataclass(frozen=True)
class Bar:
    """A bar of parts, each a character and a length; `marks` are characters at a value."""

    label: str
    parts: Sequence[tuple[str, float]]
    text: str
    marks: Sequence[tuple[float, str]] = ()


def bars(rows: Sequence[Bar], *, width: int) -> list[str]:
    """Horizontal bars with a label before and a text after them; on a narrow terminal these are on lines of their own.

    >>> bars([Bar("a", [("█", 2)], "2"), Bar("bc", [("█", 1), ("░", 3)], "4", [(3, "│")])], width=30)
    ['  a   ██████████             2', '  bc  █████░░░░░░░░░░│░░░░░  4']
    >>> bars([Bar("bc", [("█", 1), ("░", 3)], "4", [(3, "│")])], width=14)
    ['  bc', '  4', '  ██░░░░░│░░']
    """
    first, last = max(len(bar.label) for bar in rows), max(len(bar.text) for bar in rows)
    beside = width - first - last - 6 >= _NARROWEST // 2
    room = min(50, width - first - last - 6 if beside else width - 4)
    top = max([0.0, *(sum(size for _, size in b.parts) for b in rows), *(at for b in rows for at, _ in b.marks)]) or 1.0
    made: list[str] = []
    for bar in rows:
        drawn, at = "", 0.0
        for character, size in bar.parts:
            at += size
            drawn += character * (round(at / top * room) - len(drawn))
        cells = list(drawn.ljust(room))
        for value, character in bar.marks:
            cells[min(room - 1, max(0, round(value / top * room) - 1))] = character
        line = "".join(cells)
        parts = [f"{bar.label.ljust(first)}  {line}  {bar.text}"] if beside else [bar.label, bar.text, line]
        made += [f"  {part}".rstrip() for part in parts if part]
    return made


def round_numbers(low: float, high: float, most: int) -> list[float]:
    """At most `most` multiples of 1, 2 or 5 times a power of ten, from `low` to `high`.

    >>> round_numbers(0, 5000, 6), round_numbers(2.1, 5.9, 6)
    ([0, 1000, 2000, 3000, 4000, 5000], [3, 4, 5])
    """
    if not high > low:
        return [low]
    power = math.floor(math.log10((high - low) / most))
    for step in (factor * 10.0**p for p in (power, power + 1) for factor in (1, 2, 5)):
        found = [n * step for n in range(math.ceil(low / step), math.floor(high / step) + 1)]
        if len(found) <= most:
            return [int(v) if v == int(v) else float(f"{v:.12g}") for v in found]
    return [low, high]


def _lines(figure: Any, *, color: bool) -> list[str]:
    text = figure.build().string() if color else figure.build().string(colorless=True)
    figure.clear()
    return [line.rstrip() for line in text.rstrip("\n").splitlines()]
