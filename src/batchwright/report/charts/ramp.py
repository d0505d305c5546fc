"""The staircase: global batch and nodes against samples, as planned and as trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from batchwright.core.numbers import human

from .spec import DASH, HEIGHT, WIDTH, Document, Spec, drawn, finite, frame, positive, samples_axis, strides

# Steps that get their number as text; in a longer staircase only the first and the last.
_LABELLED = 12
# Steps of a line: more cannot be seen.
_MOST = 1000


@drawn
def staircase(ramp: Document, run: Document | None = None) -> Spec | None:
    """Batch and nodes of every stage of `ramp`; with a run's record, also what was trained, as a line."""
    stages = [s for s in ramp.get("stages") or () if positive(s.get("global_batch_size"))]
    if not stages:
        return None
    last = stages[-1]
    end = last["end_sample"] or max(last["start_sample"] * 5 // 4, last["start_sample"] + last["global_batch_size"])
    reached = _reached(run) if run else 0
    done = _trained_batches(run, reached) if run else []
    panels = [_panel("global batch, samples per step", "blue", _steps(stages, "global_batch_size", end), done, HEIGHT)]
    several = all(positive(s.get("nodes")) for s in stages)
    if several:
        panels.append(
            _panel("nodes", "orange", _steps(stages, "nodes", end), _trained_nodes(run, reached) if run else [], 120)
        )
        panels[0]["encoding"]["x"]["axis"] |= {"title": None, "labels": False, "ticks": False}
    if run and (failures := _failures(run)) and several:
        panels[-1]["layer"].append(_crosses(failures))
    text = f"planned: {_span(stages, 'global_batch_size')} samples per step in {len(stages)} stage{'s' * (len(stages) > 1)}"
    if several:
        text += f", on {_span(stages, 'nodes')} node{'s' * (max(s['nodes'] for s in stages) > 1)}"
    start = stages[0]["start_sample"]
    text += f", over {human(end - start)} samples" if last["end_sample"] else ", with an open end"
    text += f" from sample {human(start)} on" if start else ""
    title = "Batch size and nodes" if several else "Batch size"
    resolve = {"scale": dict.fromkeys(("color", "fill", "stroke"), "independent")}
    made = {"vconcat": panels, "spacing": 36, "resolve": resolve} if several else panels[0]
    if done:
        text += f"; trained up to sample {human(reached)}"
    found = frame(title, text, f"{title} against samples: {text}.", **made)
    if several:
        del found["width"]
    return found


def _steps(stages: Sequence[Mapping[str, Any]], key: str, end: int) -> list[dict[str, Any]]:
    """One row per height: neighbours with the same value are one step."""
    rows: list[dict[str, Any]] = []
    for stage in stages:
        if not rows or rows[-1]["value"] != stage[key]:
            rows.append({"samples": stage["start_sample"], "value": stage[key]})
    if len(rows) > _MOST:
        rows = [*rows[:: -(-len(rows) // _MOST)], rows[-1]]
    for row, following in pairwise([*rows, {"samples": end}]):
        row["until"] = following["samples"]
    return rows


def _span(stages: Sequence[Mapping[str, Any]], key: str) -> str:
    first, last = stages[0][key], stages[-1][key]
    return f"{first:,}" if all(stage[key] == first for stage in stages) else f"{first:,} to {last:,}"


def _corners(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The points of a line with steps: the start of each, and the end of the last."""
    points = [{"samples": row["samples"], "value": row["value"]} for row in rows]
    return [*points, {"samples": rows[-1]["until"], "value": rows[-1]["value"]}]


def _panel(title: str, color: str, rows: list[dict[str, Any]], done: list[dict[str, Any]], height: int) -> Spec:
    end, top = rows[-1]["until"], max(row["value"] for row in rows)
    domain = [0, max([top, *(row["value"] for row in done)]) * 1.12]
    role = f"@{color}"
    scale = {"domain": ["planned"], "range": [role]}
    legend = {
        "symbolType": "square", "symbolFillColor": role, "symbolOpacity": 0.6, "symbolDash": [2, 2], "symbolStrokeWidth": 1,
        "symbolStrokeColor": "@text",
    }  # fmt: skip
    tooltip = [
        {"field": "value", "type": "quantitative", "title": title.split(",")[0], "format": ","},
        {"field": "samples", "type": "quantitative", "title": "from sample", "format": ","},
        {"field": "until", "type": "quantitative", "title": "to sample", "format": ","},
    ]
    area: Spec = {
        "data": {"values": _corners(rows)},
        "mark": {"type": "area", "interpolate": "step-after", "fillOpacity": 0.3},
        "encoding": {
            "fill": {
                "datum": "planned",
                "type": "nominal",
                "scale": scale,
                "legend": legend if color == "blue" else None,
            }
        },
    }
    # The edge of a plan is dashed; what was trained is a solid line on it.
    edge: Spec = {
        "data": area["data"],
        "mark": {"type": "line", "interpolate": "step-after", "strokeWidth": 2, "strokeDash": DASH, "color": role},
    }
    layers: list[Spec] = [
        area,
        edge,
        {
            "data": {"values": rows},
            "mark": {"type": "rect", "fillOpacity": 0},
            "encoding": {"x2": {"field": "until"}, "y": {"datum": 0}, "y2": {"field": "value"}, "tooltip": tooltip},
        },
    ]  # fmt: skip
    if done:
        layers.append(
            {
                "data": {"values": done},
                "mark": {"type": "line", "interpolate": "step-after", "strokeWidth": 2.5},
                "encoding": {
                    "detail": {"field": "part"},
                    "stroke": {
                        "datum": "trained",
                        "type": "nominal",
                        "scale": {"domain": ["trained"], "range": [role]},
                        "legend": {"symbolType": "stroke"} if color == "blue" else None,
                    },
                },
            }
        )
    shown = rows if len(rows) <= _LABELLED else [rows[0], rows[-1]]
    for narrow in (True, False):
        # The number of a narrow step ends where the step ends: to its left, above lower steps, nothing is drawn.
        part = [row for row in shown if (row["until"] - row["samples"] < 0.15 * (end - rows[0]["samples"])) is narrow]
        at = {row["samples"]: row["until"] if narrow else (row["samples"] + row["until"]) / 2 for row in part}
        layers.append(
            {
                "data": {"values": [{**row, "at": at[row["samples"]]} for row in part]},
                "mark": {
                    "type": "text",
                    "dy": -9,
                    "fontWeight": "bold",
                    "align": "right" if narrow else "center",
                    "dx": -4 if narrow else 0,
                },
                "encoding": {
                    "x": {"field": "at", "type": "quantitative"},
                    "text": {"field": "value", "type": "quantitative", "format": ","},
                },
            }
        )
    encoding = {
        "x": samples_axis(end, rows[0]["samples"]),
        "y": {
            "field": "value",
            "type": "quantitative",
            "scale": {"domain": domain, "nice": False},
            "axis": {"title": title, "format": ",d", **({"values": list(range(top + 1))} if top < 5 else {})},
        },
    }
    return {"width": WIDTH, "height": height, "encoding": encoding, "layer": layers}


def _reached(run: Document) -> int:
    """Up to where a run is trained: its newest checkpoint or, while it runs, its last recorded step."""
    recorded = (int(samples) for samples in run["steps"]["samples"] if finite(samples))
    return max(run["consumed_samples"], max(recorded, default=0) if run["state"] == "running" else 0)


def _trained_batches(run: Document, end: int) -> list[dict[str, Any]]:
    """The batch of every trained step, as corners of a line; `part` changes where steps are missing."""
    steps = run["steps"]
    every = strides(steps["step"], steps["launch"])
    found: list[dict[str, Any]] = []
    part, reached, batch, between = 0, 0.0, 0.0, 1.0
    for launch, samples, size in zip(steps["launch"], steps["samples"], steps["global_batch_size"], strict=True):
        if not (positive(samples) and positive(size) and samples <= end):
            continue
        start, stride = max(samples - size, reached), every.get(launch, 1.0)
        missing = start - reached > (max(stride, between) - 1) * max(size, batch)
        if missing or size != batch:
            if found:
                found.append({"samples": reached, "value": batch, "part": part})
            part += missing
            found.append({"samples": start if found or missing else 0, "value": size, "part": part})
        reached, batch, between = samples, size, stride
    if found:
        # The steps between the last one that was recorded and the newest checkpoint were trained, too.
        last = end if end - reached <= (between - 1) * batch else reached
        found.append({"samples": last, "value": batch, "part": part})
    return found if len(found) <= 4 * _MOST else [*found[: -1 : -(-len(found) // (4 * _MOST))], found[-1]]


def _trained_nodes(run: Document, reached: int) -> list[dict[str, Any]]:
    """The nodes of the launches that led to the newest checkpoint, as corners of a line."""
    starts = [s for s in run["history"] if positive(s.get("nodes")) and s.get("start_sample") is not None]
    kept: list[Mapping[str, Any]] = []
    for start in starts:
        # A launch that continued from an earlier checkpoint replaces what was trained after it.
        while kept and kept[-1]["start_sample"] >= start["start_sample"]:
            kept.pop()
        kept.append(start)
    found: list[dict[str, Any]] = []
    for start, following in pairwise([*kept, {"start_sample": reached}]):
        end = min(following["start_sample"], reached)
        if end > start["start_sample"]:
            found += [{"samples": at, "value": start["nodes"], "part": 0} for at in (start["start_sample"], end)]
    return found


def _failures(run: Document) -> list[dict[str, Any]]:
    return [
        {"samples": s["position"], "value": s["nodes"], "reason": (s.get("reason") or "failed")[:120]}
        for s in run["history"]
        if s.get("outcome") == "failed" and s.get("position") is not None and positive(s.get("nodes"))
    ]


def _crosses(failures: list[dict[str, Any]]) -> Spec:
    """Where launches failed."""
    return {
        "data": {"values": failures},
        "mark": {"type": "point", "shape": "cross", "angle": 45, "size": 110, "filled": True, "opacity": 1, "yOffset": 10},
        "encoding": {
            "color": {
                "datum": "launch failed",
                "type": "nominal",
                "scale": {"domain": ["launch failed"], "range": ["@red"]},
                "legend": {"symbolType": "cross", "symbolStrokeWidth": 0, "symbolFillColor": "@red"},
            },
            "tooltip": [
                {"field": "reason", "type": "nominal"},
                {"field": "samples", "type": "quantitative", "title": "last checkpoint at sample", "format": ","},
            ],
        },
    }  # fmt: skip
