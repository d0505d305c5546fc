"""Peak memory against the micro batch: what it consists of by an estimate, what a probe measured, and the limit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from batchwright.core.numbers import format_bytes

from .spec import DASH, HEIGHT, Document, Spec, byte_unit, drawn, fills, frame, positive, rounded, series, sizes_axis

# Parts of a peak in the order of the stack, with the roles of their colours, and how opaque.
_PARTS = {
    "parameters": ("blue", 0.9), "gradients": ("sky", 1.0), "optimizer": ("green", 0.2), "activations": ("orange", 0.95),
    "other": ("purple", 0.4),
}  # fmt: skip


@drawn
def memory(document: Document, probe: Document | None = None) -> Spec | None:
    """Of an estimate or a plan with one: a stack of parts, beside it what a `probe` of the same task measured; of a probe:
    measured peaks beside the predicted ones."""
    if document.get("points"):
        return _stacked(document, document["points"], probe)
    if document.get("trials"):
        return _measured(document)
    placed = document.get("memory")
    if isinstance(placed, dict) and placed.get("breakdown"):
        point = {"micro_batch_size": document["micro_batch_size"], "sequence_length": None, **placed}
        return _stacked(placed, [point])
    return None


def _stacked(document: Document, points: list[dict[str, Any]], probe: Document | None = None) -> Spec | None:
    points = [p for p in points if positive(p.get("peak_memory_bytes")) and p.get("breakdown")]
    if not points:
        return None
    limit, usable = document.get("memory_bytes"), document.get("usable_bytes")
    several = len({p["sequence_length"] for p in points}) > 1
    measured = _beside(document, probe if not several else None)
    peaks = [p["peak_memory_bytes"] for p in points]
    # A limit far above all peaks would leave bars that cannot be seen; the text names it.
    drawn_limit = limit if positive(limit) and limit <= 8 * max(peaks) else 0
    unit, scale = byte_unit(max([*peaks, drawn_limit]))
    parts = [_parts(p["breakdown"]) for p in points]
    kinds = [kind for kind in _PARTS if any(part[kind] for part in parts)]
    rows: list[dict[str, Any]] = []
    for p, part in zip(points, parts, strict=True):
        label = f"{p['micro_batch_size']} × {p['sequence_length']}" if several else str(p["micro_batch_size"])
        at = 0.0
        for kind in kinds:
            to = at + part[kind] / scale
            row = {
                "size": label,
                "part": kind,
                "from": rounded(at),
                "to": rounded(to),
                "bytes": format_bytes(part[kind]),
            }
            rows.append(row)
            at = to
    order = list(dict.fromkeys(row["size"] for row in rows))
    found = [(str(size), peak, how) for how, peaks_of in measured.items() for size, peak in sorted(peaks_of.items())]
    if probe is not None and not several:
        order = sorted({*order, *(size for size, _, _ in found)}, key=int)
    found = [row for row in found if row[0] in order]
    top = max([*peaks, drawn_limit, *(peak for _, peak, _ in found)]) / scale
    layers: list[Spec] = [
        {
            "data": {"values": rows},
            "mark": {"type": "bar", "width": {"band": 0.62}},
            "encoding": {
                "y": {
                    "field": "from", "type": "quantitative", "scale": {"domain": [0, rounded(top * 1.1)], "nice": False},
                    "axis": {"title": f"peak memory of a device, {unit} ({'bars: ' if found else ''}predicted)"},
                },
                "y2": {"field": "to"},
                **fills(
                    "part", {kind: _PARTS[kind] for kind in kinds},
                    symbolDash=[2, 2], symbolStrokeColor="@text", symbolStrokeWidth=1,
                ),
            },
        },
        {
            # The edges of the parts, which are as dark on a light part.
            "data": {"values": rows},
            "mark": {
                "type": "bar", "fillOpacity": 0, "stroke": "@text", "strokeDash": [4, 3], "strokeWidth": 1,
                "width": {"band": 0.62},
            },
            "encoding": {
                "y": {"field": "from", "type": "quantitative"}, "y2": {"field": "to"}, "detail": {"field": "part"},
                "tooltip": [
                    {"field": "size", "type": "nominal", "title": "micro batch"},
                    {"field": "part", "type": "nominal"},
                    {"field": "bytes", "type": "nominal", "title": "predicted"},
                ],
            },
        },
    ]  # fmt: skip
    if drawn_limit:
        device = (document.get("device") or {}).get("name") if isinstance(document.get("device"), dict) else None
        layers += _line(drawn_limit / scale, f"{device or 'memory'}: {format_bytes(limit)}", [1, 0])
        if positive(usable) and usable < drawn_limit * 0.995:
            layers += _line(usable / scale, f"usable: {format_bytes(usable)}", [4, 3], below=True)
    if found:
        names = list(dict.fromkeys(how for _, _, how in found))
        shown = [{"size": s, "to": rounded(v / scale), "series": how, "bytes": format_bytes(v)} for s, v, how in found]
        layers.append({
            "data": {"values": shown},
            "mark": {"type": "point", "filled": True, "size": 90, "opacity": 1, "stroke": "@background", "strokeWidth": 1},
            "encoding": {
                "y": {"field": "to", "type": "quantitative"},
                "shape": {
                    "field": "series", "type": "nominal",
                    "scale": {"domain": names, "range": [_SHAPES[how] for how in names]},
                    "legend": {"symbolFillColor": "@text", "symbolStrokeWidth": 0},
                },
                "color": {"value": "@text"},
                "tooltip": [
                    {"field": "size", "type": "nominal", "title": "micro batch"},
                    {"field": "series", "type": "nominal", "title": "how"},
                    {"field": "bytes", "type": "nominal", "title": "measured"},
                ],
            },
        })  # fmt: skip
    largest = points[-1]
    text = f"predicted {format_bytes(largest['peak_memory_bytes'])} at micro batch {largest['micro_batch_size']}"
    if positive(limit):
        text += f", of {format_bytes(limit)}"
    if positive(document.get("max_micro_batch_size")):
        text += f"; largest that fits: {document['max_micro_batch_size']} (predicted)"
    if by_probe := measured.get(_PROBED):
        text += f"; measured {format_bytes(by_probe[max(by_probe)])} at {max(by_probe)}"
        if target := (probe or {}).get("target"):
            text += f" (probe of {target if len(target) <= 60 else '…' + target[-60:]})"
    title = "Memory, predicted and measured" if by_probe else "Memory, predicted"
    axis = {
        "title": "micro batch size × sequence length" if several else "micro batch size, samples",
        "labelAngle": 0,
        "labelOverlap": True,
    }
    encoding = {"x": {"field": "size", "type": "ordinal", "sort": order, "axis": axis}}
    return frame(
        title, text, f"{title}, against micro batch size: {text}.",
        height=HEIGHT, encoding=encoding, layer=layers,
    )  # fmt: skip


# What measured a peak that is drawn beside the stack, and its shape.
_TRIED, _PROBED = "measured on this CPU", "measured by the probe"
_SHAPES = {_TRIED: "diamond", _PROBED: "circle"}


def _beside(estimate: Document, probe: Document | None) -> dict[str, dict[int, int]]:
    """Measured peaks by size: of the real trial of an estimate, and of a probe."""
    trial = estimate.get("calibration") or {}
    found: dict[str, dict[int, int]] = {}
    if positive(trial.get("measured_bytes")):
        found[_TRIED] = {trial["micro_batch_size"]: trial["measured_bytes"]}
    if probe is not None:
        found[_PROBED] = {t["micro_batch_size"]: t["peak_memory_bytes"] for t in _limits(probe) if _ran(t)}
    return found


def _limits(probe: Document) -> list[Mapping[str, Any]]:
    """The trials that look for the largest size."""
    return [t for t in probe["trials"] if t.get("purpose") == "limit" and positive(t.get("micro_batch_size"))]


def _parts(breakdown: Mapping[str, int]) -> dict[str, int]:
    """The parts of a peak; all that have no colour of their own are `other`."""
    found = {kind: breakdown.get(kind, 0) for kind in _PARTS}
    found["other"] += sum(size for kind, size in breakdown.items() if kind not in _PARTS)
    return found


def _line(at: float, text: str, dash: list[int], *, below: bool = False) -> list[Spec]:
    """A horizontal line with its name: a limit."""
    y = {"datum": rounded(at), "type": "quantitative"}
    return [
        {
            "data": {"values": [{}]},
            "mark": {"type": "rule", "strokeWidth": 2, "strokeDash": dash, "color": "@red"},
            "encoding": {"y": y, "x": {"value": 0}, "x2": {"value": "width"}},
        },
        {
            "data": {"values": [{"text": text}]},
            "mark": {"type": "text", "align": "left", "dx": 4, "dy": 10 if below else -8, "color": "@red", "fontWeight": "bold"},
            "encoding": {"y": y, "x": {"value": 0}, "text": {"field": "text"}},
        },
    ]  # fmt: skip


# The colour, fill, shape and dash of every series of a probe: what is predicted is hollow and dashed.
_LOOKS = {
    "measured": ("blue", "@blue", "circle", [1, 0]),
    "predicted": ("orange", "@background", "square", DASH),
    "failed": ("red", "@red", "cross", [1, 0]),
}


def _measured(probe: Document) -> Spec | None:
    trials = _limits(probe)
    measured = {t["micro_batch_size"]: t["peak_memory_bytes"] for t in trials if _ran(t)}
    predicted = {
        t["micro_batch_size"]: t["predicted_peak_memory_bytes"]
        for t in trials
        if positive(t.get("predicted_peak_memory_bytes"))
    }
    failed = {t["micro_batch_size"]: t for t in trials if t.get("status") != "fits"}
    # Only what ran out of memory reached the limit; the text names what failed otherwise.
    full = {size: t for size, t in failed.items() if t.get("status") == "oom"}
    limit = probe.get("memory_bytes")
    if not measured:
        return None
    unit, scale = byte_unit(max([*measured.values(), limit if positive(limit) else 0]))
    kept = [name for name, values in (("measured", measured), ("predicted", predicted), ("failed", full)) if values]
    names = {name: _LOOKS[name][0] for name in kept}
    top = max([*measured.values(), *predicted.values(), limit if positive(limit) else 0]) / scale

    def row(name: str, size: int, value: float, text: str) -> dict[str, Any]:
        return {"series": name, "size": size, "memory": rounded(value / scale), "text": text}

    lines = [row("measured", s, v, f"{format_bytes(v)} measured") for s, v in sorted(measured.items())]
    guesses = [row("predicted", s, v, f"{format_bytes(v)} predicted") for s, v in sorted(predicted.items())]
    crosses = [
        row("failed", s, limit if positive(limit) else top * scale, f"{s}: {t.get('cause') or t.get('status')}")
        for s, t in sorted(full.items())
    ]
    _, inside, shapes, _ = zip(*(_LOOKS[name] for name in kept), strict=True)
    y = {
        "field": "memory", "type": "quantitative", "scale": {"domain": [0, rounded(top * 1.12)], "nice": False},
        "axis": {"title": f"peak memory, {unit}"},
    }  # fmt: skip
    looks = series(names, shapes)
    looks["fill"] = {**looks["color"], "scale": {"domain": kept, "range": list(inside)}}
    tooltip = [{"field": "size", "type": "quantitative", "title": "micro batch"}, {"field": "text", "type": "nominal"}]
    layers: list[Spec] = []
    for name, values in (("measured", lines), ("predicted", guesses)):
        color, _, _, dash = _LOOKS[name]
        layers.append({
            "data": {"values": values},
            "mark": {"type": "line", "strokeWidth": 1.75, "color": f"@{color}", "strokeDash": dash},
            "encoding": {"y": y},
        })  # fmt: skip
    # What was measured is drawn on what was predicted: both are at one place where a prediction is right.
    for values, mark in (
        (guesses, {"size": 150, "strokeWidth": 2}),
        (lines, {"size": 50, "strokeWidth": 2}),
        (crosses, {"size": 110, "strokeWidth": 0, "angle": 45}),
    ):
        layers.append({
            "data": {"values": values},
            "mark": {"type": "point", "opacity": 1, **mark},
            "encoding": {"y": y, "tooltip": tooltip, **looks},
        })  # fmt: skip
    if positive(limit):
        layers = [*_line(limit / scale, f"limit: {format_bytes(limit)}", [1, 0]), *layers]
    most = probe.get("max_micro_batch_size")
    text = f"largest that ran: {most}" + (f", {format_bytes(measured[most])}" if most in measured else "")
    if positive(limit):
        text += f" of {format_bytes(limit)}"
    if failed:
        smallest = min(failed)
        cause = f" ({failed[smallest].get('status')})" if smallest not in full else ""
        text += f"; smallest that failed: {smallest}{cause}"
    return frame(
        "Memory", text, f"Peak memory against micro batch size: {text}.",
        height=HEIGHT, encoding={"x": sizes_axis([*measured, *predicted, *full])}, layer=layers,
    )  # fmt: skip


def _ran(trial: Document) -> bool:
    return trial.get("status") == "fits" and positive(trial.get("peak_memory_bytes"))
