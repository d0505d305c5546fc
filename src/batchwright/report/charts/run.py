"""What a run did: loss, throughput of each stage, node-hours. All of it is measured, unless a legend says planned.

A run's record (`launch/history.py`) has its steps as columns, its plan, its launches and its evaluations.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_right
from collections.abc import Mapping
from itertools import pairwise
from statistics import quantiles
from typing import Any

from batchwright.core.numbers import short

from .spec import (
    BUCKETS,
    DASH,
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
    short_axis,
    thinned,
    time_unit,
)  # fmt: skip

# Stages that get their batch as text; boundaries that hide no line; bars that can be told apart.
_LABELLED, _MOST_LINES, _MOST_STAGES = 12, 40, 200


@drawn
def loss(run: Document, against: str = "samples") -> Spec | None:
    """The loss of every step against `samples` or `time`, with stage boundaries; above 600 steps a mean and its extremes."""
    axis = _Axis.of(run, against)
    if axis is None:
        return None
    columns = zip(axis.values, run["steps"]["loss"], run["steps"]["launch"], strict=True)
    known = [(x, y, int(n) if math.isfinite(n) else 0) for x, y, n in columns if math.isfinite(x)]
    good = [row for row in known if math.isfinite(row[1])]
    bad = [x for x, y, _ in known if not math.isfinite(y)]
    evaluated = [
        {axis.field: x, "loss": rounded(e["loss"]), "series": "evaluation loss"}
        for e in run.get("evaluations") or ()
        if finite(e.get("loss")) and (x := axis.of_event(e)) is not None
    ]
    many = len(good) > BUCKETS
    rows, most = _loss_rows(axis, good, many)
    training = f"training loss, mean of up to {most:,} steps" if many else "training loss"
    rows = [{**row, "series": training} for row in rows]
    broken = f"not finite: {len(bad):,} step{'s' * (len(bad) > 1)}"
    found = {training: good, "evaluation loss": evaluated, broken: bad}
    names = [name for name, values in found.items() if values]
    roles = dict(zip(found, (("blue", "stroke"), ("orange", "circle"), ("red", "triangle-up")), strict=True))
    looks = {
        channel: {
            "field": "series", "type": "nominal",
            "scale": {"domain": names, "range": [f"{at}{roles[name][part]}" for name in names]},
        }
        for part, (channel, at) in enumerate((("color", "@"), ("shape", "")))
    }  # fmt: skip
    y = {"field": "loss", "type": "quantitative", "axis": {"title": "loss"}}
    lines = {"y": y, "tooltip": axis.tooltip("loss"), "color": looks["color"]}
    layers = axis.boundaries()
    if good:
        if many:
            layers.append({
                "data": {"values": rows},
                "mark": {"type": "area", "fillOpacity": 0.3, "stroke": "@blue", "strokeWidth": 0.75, "strokeOpacity": 0.6},
                "encoding": {
                    "y": {**y, "field": "low"}, "y2": {"field": "high"}, "detail": {"field": "launch"},
                    "fill": {
                        "datum": "smallest to largest", "type": "nominal",
                        "scale": {"domain": ["smallest to largest"], "range": ["@blue"]},
                        "legend": {"symbolType": "square", "symbolStrokeWidth": 0, "symbolOpacity": 0.3},
                    },
                },
            })  # fmt: skip
        mark = {"type": "line", "strokeWidth": 1.75, "point": len(rows) == 1 and {"filled": True}}
        layers.append({"data": {"values": rows}, "mark": mark, "encoding": {**lines, "detail": {"field": "launch"}}})
    if evaluated:
        points = {"type": "point", "filled": True, "size": 60, "opacity": 1}
        layers.append({"data": {"values": evaluated}, "mark": {"type": "line", "strokeWidth": 1.5}, "encoding": lines})
        layers.append({"data": {"values": evaluated}, "mark": points, "encoding": {**lines, **looks}})
    if bad:
        counts = thinned(bad, [0.0] * len(bad), 200)
        layers.append({
            "data": {"values": [{axis.field: rounded(x, 7), "series": broken, "steps": n} for x, _, _, _, n in counts]},
            "mark": {"type": "point", "filled": True, "size": 70, "opacity": 1, "yOffset": 6},
            "encoding": {
                "y": {"value": 0},
                "tooltip": [{"field": "steps", "type": "quantitative", "title": "steps whose loss is not finite"}],
                **looks,
            },
        })  # fmt: skip
    values = [y for _, y, _ in good] or [0.0, 1.0]
    low, high = min(values), max(values)
    seen = [*values, *(row["loss"] for row in evaluated)] if good else [row["loss"] for row in evaluated] or values
    bottom, top = min(seen), max(seen)
    span = (top - bottom) or abs(top) or 1.0
    axis.end = max([axis.end, *(row[axis.field] for row in evaluated)])
    text = f"{len(known):,} recorded step{'s' * (len(known) > 1)}"
    if good:
        text += f": {values[0]:.4g} at first, {values[-1]:.4g} at last, smallest {low:.4g}, largest {high:.4g}"
    if bad:
        text += f"; not finite in {len(bad):,}"
    most = sys.float_info.max
    domain = [max(-most, bottom - 0.04 * span), min(most, top + 0.06 * span)]
    scale = {"domain": domain, "nice": False, "zero": False}
    encoding = {"x": axis.encoding(), "y": {"type": "quantitative", "scale": scale}}
    return frame(
        f"Loss against {against}",
        text,
        f"Loss against {against}: {text}.",
        height=HEIGHT,
        encoding=encoding,
        layer=layers,
    )


def _loss_rows(axis: _Axis, good: list[tuple[float, float, int]], many: bool) -> tuple[list[dict[str, Any]], int]:
    """Every step, or the mean and the extremes of many, and of how many at most; against time, a line ends with its launch."""
    parts: dict[int, list[tuple[float, float, int]]] = {0: good}
    if axis.field != "samples":
        parts = {}
        for row in good:
            parts.setdefault(row[2], []).append(row)
    rows: list[dict[str, Any]] = []
    most = 1
    for launch, part in parts.items():
        if not part:
            continue
        xs, ys, _ = zip(*part, strict=True)
        points = (
            thinned(xs, ys, max(1, BUCKETS * len(part) // len(good))) if many else [(x, y, y, y, 1) for x, y, _ in part]
        )
        for x, small, mean, large, count in points:
            most = max(most, count)
            row = {axis.field: rounded(x, 7), "loss": rounded(mean), "launch": launch}
            rows.append(row | ({"low": rounded(small), "high": rounded(large)} if many else {}))
    return rows, most


class _Axis:
    """Positions of steps and events on an axis of samples, or of time since the first event."""

    def __init__(self, run: Document, field: str, values: list[float], start: float, unit: str, scale: float) -> None:
        self.run, self.field, self.values, self._start = run, field, values, start
        self._unit, self._scale = unit, scale
        self.end = max(v for v in values if finite(v))

    @classmethod
    def of(cls, run: Document, against: str) -> _Axis | None:
        """None without a step."""
        column = run["steps"]["samples" if against == "samples" else "time"]
        known = [v for v in column if math.isfinite(v)]
        if not known:
            return None
        if against == "samples":
            return cls(run, "samples", list(column), 0.0, "samples", 1.0)
        first = min([*known, *(s["started"] for s in run["history"] if positive(s.get("started")))])
        unit, scale = time_unit(max(known) - first)
        return cls(run, "at", [(v - first) / scale for v in column], first, unit, scale)

    def of_event(self, event: Mapping[str, Any]) -> float | None:
        value = event.get("samples" if self.field == "samples" else "time")
        return rounded((value - self._start) / self._scale, 7) if finite(value) else None

    def encoding(self) -> Spec:
        if self.field == "samples":
            return samples_axis(self.end)
        scale = {"domain": [0, rounded(self.end or 1.0)], "nice": False}
        axis = {"title": f"{self._unit} since the start, pauses included"}
        return {"field": "at", "type": "quantitative", "scale": scale, "axis": axis}

    def tooltip(self, value: str) -> list[Spec]:
        name = "samples" if self.field == "samples" else self._unit
        return [
            {"field": "series", "type": "nominal", "title": "value"},
            {"field": value, "type": "quantitative", "format": ".5~g"},
            {"field": self.field, "type": "quantitative", "title": name, "format": ",.6~g"},
        ]

    def boundaries(self) -> list[Spec]:
        """A vertical line where each stage but the first begins, with its batch; only the lines if there are many."""
        pairs = zip(self.run["steps"]["samples"], self.values, strict=True)
        known = sorted((samples, x) for samples, x in pairs if math.isfinite(samples) and math.isfinite(x))
        begun = [
            stage
            for before, stage in pairwise(self.run["plan"]["stages"])
            if stage["global_batch_size"] != before["global_batch_size"]
            and known
            and stage["start_sample"] < known[-1][0]
        ]
        if not begun or len(begun) > _MOST_LINES:
            return []
        rows: list[dict[str, Any]] = []
        for stage in begun:
            start = stage["start_sample"]
            at = start if self.field == "samples" else known[bisect_right(known, (start, math.inf))][1]
            rows.append({self.field: rounded(at, 7), "text": f"{stage['global_batch_size']:,}"})
        # A text needs a tenth of the axis.
        labels = rows[:1]
        for row in rows[1:]:
            if row[self.field] - labels[-1][self.field] >= self.end / 10:
                labels.append(row)
        lines: list[Spec] = [
            {
                "data": {"values": rows},
                "mark": {"type": "rule", "strokeDash": [2, 3], "strokeWidth": 1},
                "encoding": {"color": {"value": "@muted"}, "x": {"field": self.field, "type": "quantitative"}},
            }
        ]
        if len(rows) <= _LABELLED:
            lines.append(
                {
                    "data": {"values": labels},
                    "mark": {"type": "text", "align": "left", "dx": 4, "baseline": "top", "fontSize": 11},
                    "encoding": {"y": {"value": 0}, "text": {"field": "text"}, "color": {"value": "@muted"}},
                }
            )
        return lines


@drawn
def stage_throughput(run: Document) -> Spec | None:
    """Samples per second of each stage: the median of its steps with their quartiles, beside what was planned."""
    steps = run["steps"]
    speeds: dict[int, list[float]] = {}
    launch = None
    columns = zip(steps["stage"], steps["launch"], steps["samples_per_second"], strict=True)
    for stage, number, speed in columns:
        # The first step of a launch contains its warm-up.
        if number == launch and positive(speed) and math.isfinite(stage):
            speeds.setdefault(int(stage), []).append(speed)
        launch = number
    rows: list[dict[str, Any]] = []
    planned: list[dict[str, Any]] = []
    order: list[str] = []
    measured = "measured: median and quartiles"
    for index, stage in enumerate(run["plan"]["stages"]):
        values = speeds.get(stage.get("index", index))
        expected = stage["global_batch_size"] / stage["step_seconds"] if positive(stage.get("step_seconds")) else None
        if not values and expected is None:
            continue
        nodes = stage.get("nodes")
        label = f"batch {stage['global_batch_size']:,}" + (f"|{nodes} node{'s' * (nodes != 1)}" if nodes else "")
        label = f"stage {index + 1}|{label}"
        order.append(label)
        if values:
            low, middle, high = quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
            rows.append({
                "stage": label, "rate": rounded(middle), "low": rounded(low), "high": rounded(high), "series": measured,
                "steps": len(values), "text": short(middle, 3),
            })  # fmt: skip
        if expected is not None:
            planned.append({"stage": label, "rate": rounded(expected), "series": "planned"})
    if not rows:
        return None
    kept = set(order[:: -(-len(order) // _MOST_STAGES)])
    rows, planned = ([row for row in part if row["stage"] in kept] for part in (rows, planned))
    order = [label for label in order if label in kept]
    few = len(order) <= _LABELLED
    top = max(row["high"] for row in [*rows, *({"high": p["rate"]} for p in planned)])
    names = {measured: "blue"} | ({"planned": "orange"} if planned else {})
    y = {"type": "quantitative", "scale": {"domain": [0, rounded(top * 1.15)], "nice": False}}
    axis = {"axis": short_axis("samples per second")}
    tooltip = [
        {"field": "rate", "type": "quantitative", "title": "samples/s (median)", "format": ",.4~g"},
        {"field": "low", "type": "quantitative", "title": "lower quartile", "format": ",.4~g"},
        {"field": "high", "type": "quantitative", "title": "upper quartile", "format": ",.4~g"},
        {"field": "steps", "type": "quantitative", "format": ","},
    ]
    layers: list[Spec] = [
        {
            "data": {"values": rows},
            "mark": {"type": "bar", "fillOpacity": 0.35, "width": {"band": 0.55}},
            "encoding": {"y": {**y, **axis, "field": "rate"}, "tooltip": tooltip},
        },
        {
            "data": {"values": rows},
            "mark": {"type": "rule", "strokeWidth": 2.5},
            "encoding": {"y": {**y, **axis, "field": "low"}, "y2": {"field": "high"}},
        },
        {
            "data": {"values": planned},
            "mark": {
                "type": "tick",
                "thickness": 1,
                "strokeDash": [6, 4],
                "strokeWidth": 2,
                "width": {"band": 0.75},
                "filled": False,
            },
            "encoding": {"y": {**y, **axis, "field": "rate"}},
        },
        {
            "data": {"values": rows},
            "mark": {"type": "text", "dy": -10, "fontWeight": "bold"},
            "encoding": {
                "y": {**y, **axis, "field": "high"},
                "text": {"field": "text"},
                "color": {"value": "@text"},
            },
        },
    ]
    text = ", ".join(readable(row["rate"]) for row in rows) + " samples/s"
    if not few:
        slowest, fastest = (readable(pick(row["rate"] for row in rows)) for pick in (min, max))
        text = f"{slowest} to {fastest} samples/s in {len(rows):,} stages"
        layers.pop()  # numbers above the bars would be too close
    encoding = {
        "x": {
            "field": "stage", "type": "ordinal", "sort": order,
            "axis": {
                "title": None if few else "stage", "labelAngle": 0, "ticks": False, "labelOverlap": "greedy",
                "labelExpr": "split(datum.label, '|')" if few else "slice(split(datum.label, '|')[0], 6)",
            },
        },
        "color": {
            "field": "series", "type": "nominal",
            "scale": {"domain": list(names), "range": [f"@{role}" for role in names.values()]},
            "legend": {"symbolType": "square", "symbolStrokeWidth": 0},
        },
    }  # fmt: skip
    return frame(
        "Throughput by stage", text, f"Throughput by stage: {text}.", height=HEIGHT, encoding=encoding, layer=layers
    )


@drawn
def node_hours(run: Document) -> Spec | None:
    """Node-hours that all launches used, against samples, beside the plan's; a failed launch costs hours and no samples."""
    used: list[dict[str, Any]] = []
    total = 0.0
    for start in run["history"]:
        nodes, seconds, first, last = (start.get(k) for k in ("nodes", "seconds", "start_sample", "position"))
        if not (positive(nodes) and finite(seconds) and finite(first)):
            continue
        used.append({"samples": first, "hours": total})
        total += nodes * max(0.0, seconds) / 3600
        used.append({"samples": last if finite(last) else first, "hours": total})
    if not total:
        return None
    stages = run["plan"]["stages"]
    # What is before the first launch was trained elsewhere.
    begin = next((launch["start_sample"] for launch in run["plan"]["launches"]), 0)
    planned: list[dict[str, Any]] = [{"samples": begin, "hours": 0.0}]
    for stage in stages:
        first, last = stage["start_sample"], stage["end_sample"]
        if last is not None and last <= begin:
            continue
        if last is None or not finite(stage.get("node_hours")):
            planned = []
            break
        hours = stage["node_hours"] * (last - max(first, begin)) / (last - first)
        planned.append({"samples": last, "hours": planned[-1]["hours"] + hours})
    most = max([total, *(row["hours"] for row in planned)])
    unit, scale = next(
        ((u, s) for u, s in (("node-hours", 1.0), ("node-minutes", 60.0)) if most * s >= 1), ("node-seconds", 3600.0)
    )
    names = {"used": "blue"} | ({"planned": "orange"} if planned else {})
    rows = [{**row, "series": name} for name, part in (("used", used), ("planned", planned)) for row in part]
    for order, row in enumerate(rows):
        row |= {"hours": rounded(row["hours"] * scale), "order": order}
    shared = {"field": "series", "type": "nominal"}
    encoding = {
        "x": samples_axis(max(row["samples"] for row in rows)),
        "y": {"field": "hours", "type": "quantitative", "axis": short_axis(f"{unit}, all launches")},
        "color": {
            **shared,
            "scale": {"domain": list(names), "range": [f"@{role}" for role in names.values()]},
            "legend": {"symbolType": "stroke"} if planned else None,
        },
        "strokeDash": {
            **shared,
            "scale": {"domain": list(names), "range": [[1, 0], DASH][: len(names)]},
            **({} if planned else {"legend": None}),
        },
        # A launch that continues from an earlier checkpoint goes back.
        "order": {"field": "order", "type": "quantitative"},
        "tooltip": [
            {"field": "series", "type": "nominal"},
            {"field": "samples", "type": "quantitative", "format": ","},
            {"field": "hours", "type": "quantitative", "title": unit, "format": ",.4~g"},
        ],
    }
    layers: list[Spec] = [
        {"mark": {"type": "line", "interpolate": "linear"}},
        {
            "transform": [{"filter": "datum.series == 'used'"}],
            "mark": {"type": "point", "filled": True, "size": 45, "opacity": 1},
        },
    ]
    text = f"{readable(total * scale)} {unit} used"
    if planned:
        part = f"from sample {begin:,} on" if begin else "for the whole run"
        text += f", {readable(planned[-1]['hours'] * scale)} planned {part}, without restarts"
    elif any(finite(stage.get("node_hours")) for stage in stages) and run.get("replanned"):
        text += "; the plan was changed during the run, so its hours cannot be compared"
    else:
        text += "; the plan has no step times to compare with"
    return frame(
        "Node-hours", text, f"Node-hours against samples: {text}.",
        height=200, data={"values": rows}, encoding=encoding, layer=layers,
    )  # fmt: skip
