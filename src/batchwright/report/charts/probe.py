"""What a probe measured: throughput against the micro batch, and what a step spends its time on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .spec import (
    DASH,
    HEIGHT,
    Document,
    Spec,
    drawn,
    fills,
    finite,
    frame,
    positive,
    readable,
    rounded,
    series,
    short_axis,
    sizes_axis,
)


@drawn
def throughput(probe: Document) -> Spec | None:
    """Measured samples per second with their 95% intervals, the fit, the knee, and the first size that fails."""
    rows = _speeds(probe)
    if not rows:
        return None
    top = max(row["high"] for row in rows)
    names = {"measured, with 95% interval": "blue"}
    measured = next(iter(names))
    for row in rows:
        row["series"] = measured
    layers: list[Spec] = [
        {
            "data": {"values": rows},
            "mark": {"type": "rule", "strokeWidth": 2},
            "encoding": {
                "y": _rate("low"),
                "y2": {"field": "high"},
                "tooltip": _SPEED_TOOLTIP,
                "color": {"value": "@blue"},
            },
        }
    ]
    fit = _fit(probe, rows)
    if fit:
        names["predicted by the fit t = a + b × B"] = "orange"
    looks = series(names, shapes=("circle", "stroke")[: len(names)], dashes=([1, 0], DASH)[: len(names)])
    if fit:
        label = list(names)[-1]
        layers.insert(0, {
            "data": {"values": [{**row, "series": label} for row in fit]},
            "mark": {"type": "line", "strokeWidth": 1.75},
            "encoding": {"y": _rate("rate"), "color": looks["color"], "strokeDash": looks["strokeDash"]},
        })  # fmt: skip
    layers.append(
        {
            "data": {"values": rows},
            "mark": {"type": "point", "filled": True, "size": 70, "opacity": 1},
            "encoding": {"y": _rate("rate"), "tooltip": _SPEED_TOOLTIP, **looks},
        }
    )
    sizes = [row["size"] for row in rows]
    failing = probe.get("first_failing_micro_batch_size")
    if positive(failing):
        sizes.append(failing)
        layers += _failing(failing)
    knee, best = probe.get("saturating_micro_batch_size"), probe.get("recommended_micro_batch_size")
    marks = {size: "knee" for size in [knee] if positive(size)}
    if positive(best):
        marks[best] = "knee, recommended" if best == knee else "recommended"
    by_size = {row["size"]: row for row in rows}
    middle = (rows[0]["size"] * max(sizes)) ** 0.5
    for right in (False, True):  # a label begins or ends at its point, so that it stays inside
        labels = [
            {"size": s, "rate": by_size[s]["high"], "text": f"{text}: {s}"}
            for s, text in marks.items()
            if s in by_size and (s > middle) is right
        ]
        align = {"align": "right", "dx": 4} if right else {"align": "left", "dx": -4}
        layers.append(
            {
                "data": {"values": labels},
                "mark": {"type": "text", "dy": -12, "fontWeight": "bold", **align},
                "encoding": {"y": _rate("rate"), "text": {"field": "text"}, "color": {"value": "@text"}},
            }
        )
    peak = max(rows, key=lambda row: row["rate"])
    text = f"{readable(peak['rate'])} samples/s at micro batch {peak['size']}, the best of {len(rows)} measured"
    if positive(knee):
        text += f"; 90% of it from {knee} on (the knee)"
    if positive(failing):
        found = next(
            (t for t in probe["trials"] if t.get("micro_batch_size") == failing and t.get("status") != "fits"), {}
        )
        cause = f" ({found['status']})" if found.get("status") else ""
        text += f"; {failing} does not fit" if found.get("status") == "oom" else f"; {failing} failed{cause}"
    encoding = {
        "x": sizes_axis(sizes),
        "y": {"type": "quantitative", "scale": {"domain": [0, top * 1.15], "nice": False}},
    }
    return frame(
        "Throughput", text, f"Throughput against micro batch size: {text}.",
        height=HEIGHT, encoding=encoding, layer=layers,
    )  # fmt: skip


_SPEED_TOOLTIP = [
    {"field": "size", "type": "quantitative", "title": "micro batch"},
    {"field": "rate", "type": "quantitative", "title": "samples/s", "format": ",.4~g"},
    {"field": "low", "type": "quantitative", "title": "at least", "format": ",.4~g"},
    {"field": "high", "type": "quantitative", "title": "at most", "format": ",.4~g"},
]


def _rate(field: str) -> Spec:
    return {"field": field, "type": "quantitative", "axis": short_axis("samples per second")}


def _speeds(probe: Document) -> list[dict[str, Any]]:
    """One row per size whose speed was measured: as in the fit, without the later comparison at one of them."""
    found: dict[int, dict[str, Any]] = {}
    for trial in probe.get("trials") or ():
        size, rate, timing = trial.get("micro_batch_size"), trial.get("samples_per_second"), trial.get("timing") or {}
        again = size in found and trial.get("contrasts")
        if trial.get("status") != "fits" or again or not (positive(size) and positive(rate)):
            continue
        middle, low, high = timing.get("seconds"), timing.get("low"), timing.get("high")
        known = positive(middle) and positive(low) and positive(high)
        found[size] = {
            "size": size,
            "rate": rounded(rate),
            "low": rounded(rate * middle / high if known else rate),
            "high": rounded(rate * middle / low if known else rate),
        }
    return [found[size] for size in sorted(found)]


def _fit(probe: Document, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Throughput by t = a + b × B, from the smallest to the largest measured size; nothing from fewer than three."""
    curve = probe.get("curve") or {}
    fixed, each = curve.get("fixed_seconds"), curve.get("per_sample_seconds")
    if len(rows) < 3 or not finite(fixed) or not finite(each) or fixed + each <= 0:
        return []
    # At the measured sizes a step of a rank is timed; its rate may be of several ranks.
    ranks = probe.get("ranks") or 1
    low, high = rows[0]["size"], rows[-1]["size"]
    sizes = [low * (high / low) ** (i / 40) for i in range(41)]
    return [{"size": rounded(s), "rate": rounded(ranks * s / (fixed + each * s))} for s in sizes]


def _failing(size: int) -> list[Spec]:
    """A vertical line at the first size that failed."""
    at = {"data": {"values": [{"size": size, "text": f"{size} fails"}]}}
    return [
        {**at, "mark": {"type": "rule", "strokeWidth": 2}, "encoding": {"color": {"value": "@red"}}},
        {
            **at,
            "mark": {"type": "text", "align": "right", "dx": -6, "baseline": "bottom", "fontWeight": "bold"},
            "encoding": {"y": {"value": HEIGHT - 6}, "text": {"field": "text"}, "color": {"value": "@red"}},
        },
    ]  # fmt: skip


# The parts of a step, with the roles of their colours, and how opaque. The text on compute, the darkest, is light.
_PARTS = {"input": ("orange", 0.3), "compute": ("blue", 1.0), "synchronisation": ("green", 0.5)}


@drawn
def step_time(probe: Document) -> Spec | None:
    """The time of a step at the recommended size: waiting for input, computing, synchronising."""
    found = _contrasts(probe)
    if found is None:
        return None
    size, contrasts = found
    cached = contrasts["cached"]["seconds"]
    whole = max(cached, _seconds(contrasts, "loader") or cached)
    together = min(cached, _seconds(contrasts, "accumulate") or cached) if (probe.get("ranks") or 1) > 1 else cached
    parts = {"input": whole - cached, "compute": together, "synchronisation": cached - together}
    unit, scale = ("ms", 1e3) if whole < 1 else ("s", 1.0)
    rows: list[dict[str, Any]] = []
    start = 0.0
    for name, seconds in parts.items():
        if seconds <= 0:
            continue
        share = seconds / whole
        rows.append({
            "part": name, "from": rounded(start * scale), "to": rounded((start + seconds) * scale),
            "middle": rounded((start + seconds / 2) * scale), "time": rounded(seconds * scale, 3), "share": rounded(share, 3),
            "text": f"{name} {share:.0%}" if share >= 0.25 else f"{share:.0%}" if share >= 0.06 else "",
        })  # fmt: skip
        start += seconds
    text = ", ".join(f"{row['part']} {row['share']:.0%}" for row in rows)
    bar: Spec = {
        "mark": {"type": "bar", "height": 44, "stroke": "@background", "strokeWidth": 2},
        "encoding": {
            "x": {
                "field": "from", "type": "quantitative", "scale": {"domain": [0, rounded(whole * scale)], "nice": False},
                "axis": {"title": f"time of a step, {unit}", "grid": True},
            },
            "x2": {"field": "to"},
            **fills("part", {row["part"]: _PARTS[row["part"]] for row in rows}),
            "tooltip": [
                {"field": "part", "type": "nominal"},
                {"field": "time", "type": "quantitative", "title": unit, "format": ",.3~g"},
                {"field": "share", "type": "quantitative", "format": ".0%"},
            ],
        },
    }  # fmt: skip
    words: Spec = {
        "mark": {"type": "text", "fontWeight": "bold", "fontSize": 13},
        "encoding": {
            "x": {"field": "middle", "type": "quantitative"},
            "text": {"field": "text"},
            "color": {"condition": {"test": "datum.part == 'compute'", "value": "@background"}, "value": "@text"},
        },
    }
    subtitle = f"micro batch {size}: {text}; bottleneck: {probe.get('bottleneck') or 'unknown'}"
    return frame(
        "Time of a step", subtitle, f"The time of a step of {_time(whole)} at {subtitle}.",
        height=56, data={"values": rows}, layer=[bar, words],
    )  # fmt: skip


def _contrasts(probe: Document) -> tuple[int, Mapping[str, Any]] | None:
    """The size at which steps were compared, and their timings."""
    for trial in reversed(probe.get("trials") or ()):
        timings = trial.get("contrasts") or {}
        if _seconds(timings, "cached"):
            return trial["micro_batch_size"], timings
    return None


def _seconds(timings: Mapping[str, Any], name: str) -> float | None:
    value = (timings.get(name) or {}).get("seconds")
    return value if positive(value) else None


def _time(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
