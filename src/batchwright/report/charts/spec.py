"""What all charts share: the frame of a specification, axes with readable numbers, series with a legend, fewer points.

A chart is a function from a document (what `--json` of a verb prints, or the record of a run) to a Vega-Lite specification,
or None if there is nothing to draw. `drawn` adds the theme. Measured values are solid marks; predicted ones are dashed
or hollow, and the legend says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from itertools import pairwise
from statistics import mode
from typing import Any, Concatenate, ParamSpec, TypeGuard

from .theme import config, themed

Spec = dict[str, Any]
Document = Mapping[str, Any]
P = ParamSpec("P")

WIDTH, HEIGHT = 640, 240
# 10000000 -> 10M, 1500 -> 1.5K, as everywhere in batchwright; d3 writes G and k.
_SHORT = (
    "abs(datum.value) < 1 ? format(datum.value, '~g') : replace(replace(format(datum.value, '~s'), 'G', 'B'), 'k', 'K')"
)
DASH = [6, 4]
# Every label of `values`: Vega would leave out every second one, until `tickCount` are left.
_ALL = {"labelOverlap": "greedy", "labelSeparation": 4, "tickCount": 100}
# Columns of pixels that a chart has at most: more points than two per column cannot be seen.
BUCKETS = 600


def drawn(function: Callable[P, Spec | None]) -> Callable[Concatenate[Any, ...], Spec | None]:
    """A chart with a `theme`: light, dark, or `css` for a page with the variables of `theme.COLORS`."""

    @wraps(function)
    def draw(*given: Any, theme: str = "light", **named: Any) -> Spec | None:
        made = function(*given, **named)
        if made is None:
            return None
        frame = {"$schema": "https://vega.github.io/schema/vega-lite/v5.json", "config": config(theme)}
        return themed(frame | made, theme)

    return draw


def frame(title: str, subtitle: str, description: str, **view: Any) -> Spec:
    """A chart with its title; `description` has the main numbers as text, for those who cannot see it."""
    return {"title": {"text": title, "subtitle": subtitle}, "description": description, "width": WIDTH, **view}


def short_axis(title: str | None = None, **more: Any) -> Spec:
    """An axis of large numbers: 10M, not 10,000,000 or 1e+07."""
    return {"title": title, "labelExpr": _SHORT, **(_ALL if "values" in more else {}), **more}


def samples_axis(end: float, start: float = 0, field: str = "samples", title: str = "samples", **axis: Any) -> Spec:
    """The encoding of positions in samples, from `start` to `end`."""
    scale = {"domain": [start, max(start + 1, end)], "nice": False}
    return {"field": field, "type": "quantitative", "scale": scale, "axis": short_axis(title, **axis)}


def sizes_axis(sizes: Iterable[int]) -> Spec:
    """The encoding of micro batch sizes on a logarithmic axis that is labelled at sizes that are there."""
    ordered = sorted(set(sizes))
    low, high = ordered[0] / 1.12, ordered[-1] * 1.12
    apart = (high / low) ** 0.05  # labels are a twentieth of the axis apart
    kept: list[int] = []
    for size in reversed(ordered):  # the largest ones matter most, and are closest to each other
        if not kept or size * apart <= kept[-1]:
            kept.append(size)
    scale = {"type": "log", "base": 2, "domain": [low, high], "nice": False}
    # labelExpr: a logarithmic axis leaves out labels that it formats itself.
    axis = {
        "title": "micro batch size, samples", "values": kept[::-1], "labelExpr": "format(datum.value, ',d')", **_ALL,
    }  # fmt: skip
    return {"field": "size", "type": "quantitative", "scale": scale, "axis": axis}


def series(names: Mapping[str, str], shapes: Sequence[str] = (), dashes: Sequence[Sequence[int]] = ()) -> Spec:
    """Encodings of the field `series` for several layers with one legend: name -> role of its colour."""
    domain = list(names)
    found: Spec = {
        "color": {
            "field": "series", "type": "nominal", "scale": {"domain": domain, "range": [f"@{c}" for c in names.values()]},
        }
    }  # fmt: skip
    if shapes:
        found["shape"] = {"field": "series", "type": "nominal", "scale": {"domain": domain, "range": list(shapes)}}
    if dashes:
        found["strokeDash"] = {
            "field": "series", "type": "nominal", "scale": {"domain": domain, "range": [list(d) for d in dashes]},
        }  # fmt: skip
    return found


def fills(field: str, looks: Mapping[str, tuple[str, float]], **legend: Any) -> Spec:
    """Encodings of areas by `field`: name -> the role of its colour, and how opaque, so that they differ in grey, too."""
    domain = list(looks)
    return {
        "color": {
            "field": field, "type": "ordinal",
            "scale": {"domain": domain, "range": [f"@{role}" for role, _ in looks.values()]},
            "legend": {"symbolType": "square", "symbolStrokeWidth": 0, **legend},
        },
        "opacity": {
            "field": field, "type": "ordinal",
            # Without a type, it would be a scale between the first and the last of these numbers.
            "scale": {"type": "ordinal", "domain": domain, "range": [opacity for _, opacity in looks.values()]},
        },
    }  # fmt: skip


def finite(value: Any) -> TypeGuard[Any]:
    """Whether a value is a finite number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def positive(value: Any) -> TypeGuard[Any]:
    """Whether a value is a finite number above zero."""
    return finite(value) and value > 0


def rounded(value: float, digits: int = 5) -> float:
    """A number with few digits: what a chart can show, in fewer bytes.

    >>> rounded(3.14159265, 3), rounded(123456.7, 3), rounded(0.0)
    (3.14, 123000.0, 0.0)
    """
    made = float(f"{value:.{digits}g}")
    return made if math.isfinite(made) else value  # rounded up, the largest numbers are infinite


def readable(value: float) -> str:
    """A number in a sentence: three digits at least, and no exponent.

    >>> readable(5472.3), readable(43.27), readable(0.00123)
    ('5,472', '43.3', '0.00123')
    """
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def thinned(
    xs: Sequence[float], ys: Sequence[float], buckets: int = BUCKETS
) -> list[tuple[float, float, float, float, int]]:
    """At most `buckets` of (x, smallest, mean, largest, count) in equal parts of the x axis; values are finite.

    Every extreme is in one of them. `xs` need not be sorted.

    >>> thinned([0, 1, 2, 3, 10], [5.0, 1.0, 9.0, 2.0, 4.0], buckets=2)
    [(1.5, 1.0, 4.25, 9.0, 4), (10.0, 4.0, 4.0, 4.0, 1)]
    """
    low, high = min(xs), max(xs)
    width = (high - low) / buckets or 1.0
    found: dict[int, list[float]] = {}
    for x, y in zip(xs, ys, strict=True):
        at = min(buckets - 1, int((x - low) / width))
        if (part := found.get(at)) is None:
            found[at] = [x, y, y, y, 1]
        else:
            n = part[4] = part[4] + 1
            part[0] += x
            part[1] = min(part[1], y)
            part[2] += y / n - part[2] / n  # a sum of large values would not be finite
            part[3] = max(part[3], y)
    return [(x / n, small, mean, large, int(n)) for _, (x, small, mean, large, n) in sorted(found.items())]


def strides(steps: Sequence[float], launches: Sequence[float]) -> dict[float, float]:
    """How many steps each launch has one value of: not every step is recorded, or measured.

    >>> strides([0, 10, 20, 40, 41, 42], [1, 1, 1, 1, 2, 2])
    {1: 10, 2: 1}
    """
    found: dict[float, list[float]] = {}
    for (before, launch), (step, same) in pairwise(zip(steps, launches, strict=True)):
        if launch == same and step > before:
            found.setdefault(launch, []).append(step - before)
    return {launch: mode(differences) for launch, differences in found.items()}


def time_unit(seconds: float) -> tuple[str, float]:
    """The unit in which a span of time has a readable number, and its length in seconds.

    >>> time_unit(45), time_unit(10_000), time_unit(10**6)
    (('seconds', 1.0), ('hours', 3600.0), ('days', 86400.0))
    """
    for name, length in (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 2 * length:
            return name, length
    return "seconds", 1.0


def byte_unit(size: float) -> tuple[str, float]:
    """The unit in which a number of bytes is readable, and its size in bytes.

    >>> byte_unit(3 * 2**30)
    ('GiB', 1073741824.0)
    """
    for name, length in (("TiB", 2.0**40), ("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10)):
        if size >= 2 * length or (name == "GiB" and size >= length):
            return name, length
    return "bytes", 1.0
