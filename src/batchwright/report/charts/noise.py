"""The gradient noise scale that a run measured, with its interval, beside the batch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from batchwright.core.numbers import human

from .spec import (
    BUCKETS,
    HEIGHT,
    Document,
    Spec,
    drawn,
    finite,
    frame,
    positive,
    readable,
    rounded,
    samples_axis,
    series,
    short_axis,
    strides,
    thinned,
)


@drawn
def noise_scale(run: Document) -> Spec | None:
    """The gradient noise scale with its 95% interval, beside the batch in the same unit; both axes of values are logarithmic."""
    steps = run["steps"]
    columns = (
        "step",
        "launch",
        "samples",
        "noise_scale",
        "noise_low",
        "noise_high",
        "tokens_per_second",
        "step_seconds",
    )
    table = list(zip(*(steps[name] for name in columns), strict=True))
    known = [row[:6] for row in table if positive(row[2]) and positive(row[3])]
    if not known:
        return None
    name, band, batch = "noise scale", "95% interval", "global batch in the same unit"
    rows = _noise_rows(known)
    sizes: list[dict[str, Any]] = []
    for _, _, samples, *_, rate, seconds in table:
        if positive(rate) and positive(seconds) and positive(samples):
            sizes.append({"samples": samples, "value": rounded(rate * seconds)})
    sizes = [
        {"samples": rounded(x, 7), "value": rounded(mean)}
        for x, _, mean, _, _ in (thinned([r["samples"] for r in sizes], [r["value"] for r in sizes], 200) if sizes else ())
    ]  # fmt: skip
    values = [v for row in [*rows, *sizes] for k, v in row.items() if k in ("value", "low", "high") and positive(v)]
    bottom = rounded(min(values) / 1.3)
    banded = [{**row, "low": max(row["low"], bottom)} for row in rows if finite(row["low"]) and positive(row["high"])]
    alone = Counter(row["part"] for row in rows)
    y = {
        "type": "quantitative", "scale": {"type": "log", "domain": [bottom, max(values) * 1.3], "nice": False},
        "axis": short_axis("weight in the loss, such as tokens; logarithmic", values=_decades(values)),
    }  # fmt: skip
    looks = series({name: "blue", batch: "text"})
    looks["color"]["legend"] = {"symbolType": "stroke"}
    layers: list[Spec] = [
        {
            "data": {"values": banded},
            "mark": {"type": "area", "opacity": 0.25},
            "encoding": {
                "detail": {"field": "part"},
                "y": {**y, "field": "low"}, "y2": {"field": "high"},
                "fill": {
                    "datum": band, "type": "nominal", "scale": {"domain": [band], "range": ["@blue"]},
                    "legend": {"symbolType": "square", "symbolStrokeWidth": 0, "symbolOpacity": 0.25},
                },
            },
        },
        {
            "data": {"values": [{**row, "series": batch} for row in sizes]},
            "mark": {"type": "line", "interpolate": "step", "strokeWidth": 1.25},
            "encoding": {"y": {**y, "field": "value"}, **looks},
        },
        {
            "data": {"values": [{**row, "series": name} for row in rows if len(rows) < 40 or alone[row["part"]] == 1]},
            "mark": {"type": "point", "filled": True, "opacity": 1},
            "encoding": {"y": {**y, "field": "value"}, **looks},
        },
        {
            "data": {"values": [{**row, "series": name} for row in rows]},
            "mark": {"type": "line"},
            "encoding": {
                "y": {**y, "field": "value"},
                "detail": {"field": "part"},
                **looks,
                "tooltip": [
                    {"field": field, "type": "quantitative", "format": ",.4~g"} for field in ("samples", "value", "low", "high")
                ],
            },
        },
    ]  # fmt: skip
    _, _, samples, value, low, high = known[-1]
    text = f"{readable(value)} at sample {human(int(samples))}"
    if finite(low) and finite(high):
        text += f" (95% interval {readable(low)} to {readable(high)})"
    end = max(row[2] for row in table if positive(row[2]))
    encoding = {"x": samples_axis(end)}
    return frame(
        "Gradient noise scale", text, f"Gradient noise scale against samples: {text}.",
        height=HEIGHT, encoding=encoding, layer=layers,
    )  # fmt: skip


def _noise_rows(known: list[tuple[float, ...]]) -> list[dict[str, Any]]:
    """Every estimate, or of many the mean and the widest interval; `part` changes where estimates are missing."""
    every = strides([row[0] for row in known], [row[1] for row in known])
    parts = [[known[0]]]
    for before, row in pairwise(known):
        if row[0] - before[0] > max(every.get(before[1], 1.0), every.get(row[1], 1.0)):
            parts.append([])
        parts[-1].append(row)
    rows: list[dict[str, Any]] = []
    for part, members in enumerate(parts):
        _, _, xs, values, lows, highs = zip(*members, strict=True)
        points: Iterable[tuple[float, float, float, float]] = zip(xs, values, lows, highs, strict=True)
        if len(known) > BUCKETS:
            buckets = max(1, BUCKETS * len(members) // len(known))
            # An estimate without an interval does not widen that of its neighbours.
            low, middle, high = (
                thinned(xs, [own if finite(own) else value for own, value in zip(column, values, strict=True)], buckets)
                for column in (lows, values, highs)
            )
            points = [(m[0], m[2], a[1], b[3]) for a, m, b in zip(low, middle, high, strict=True)]
        for x, value, a, b in points:
            interval = {name: rounded(v) if finite(v) else None for name, v in (("low", a), ("high", b))}
            rows.append({"samples": rounded(x, 7), "value": rounded(value), **interval, "part": part})
    return rows


def _decades(values: list[float]) -> list[float]:
    """Labels of a logarithmic axis: powers of ten, and 2 and 5 times these if there are few."""
    low, high = math.floor(math.log10(min(values) / 1.3)), math.ceil(math.log10(max(values) * 1.3))
    factors = (1,) if high - low > 4 else (1, 3) if high - low > 2 else (1, 2, 5)
    return [factor * 10.0**power for power in range(low, high + 1) for factor in factors]
