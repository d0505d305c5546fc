"""Peak memory against the micro batch: what it consists of by an estimate, what a probe measured, and the limit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from batchwright.core.numbers import format_bytes

from .spec import HEIGHT, Document, Spec, byte_unit, drawn, frame, positive, rounded, series, sizes_axis

# Parts of a peak in the order of the stack, with the roles of their colours, and how opaque: neighbours differ in grey, too.
_PARTS = {"parameters": "blue", "gradients": "sky", "optimizer": "green", "activations": "orange", "other": "purple"}
_OPACITY = {"parameters": 0.95, "gradients": 0.45, "optimizer": 0.8, "activations": 0.45, "other": 0.9}


@drawn
def memory(document: Document) -> Spec | None:
    """Of an estimate or a plan with one: a stack of parts; of a probe: measured peaks beside the predicted ones."""
    if document.get("points"):
        return _stacked(document, document["points"])
    if document.get("trials"):
        return _measured(document)
    placed = document.get("memory")
    if isinstance(placed, dict) and placed.get("breakdown"):
        point = {"micro_batch_size": document["micro_batch_size"], "sequence_length": None, **placed}
        return _stacked(placed, [point])
    return None


def _stacked(document: Document, points: list[dict[str, Any]]) -> Spec | None:
    points = [p for p in points if positive(p.get("peak_memory_bytes")) and p.get("breakdown")]
    if not points:
        return None
    limit, usable = document.get("memory_bytes"), document.get("usable_bytes")
    trial = document.get("calibration") or {}
    peaks = [p["peak_memory_bytes"] for p in points]
    # A limit far above all peaks would leave bars that cannot be seen; the text names it.
    drawn_limit = limit if positive(limit) and limit <= 8 * max(peaks) else 0
    unit, scale = byte_unit(max([*peaks, drawn_limit]))
    several = len({p["sequence_length"] for p in points}) > 1
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
    top = max([*peaks, drawn_limit, trial.get("measured_bytes") or 0]) / scale
    layers: list[Spec] = [
        {
            "data": {"values": rows},
            "mark": {
                "type": "bar", "stroke": "@text", "strokeDash": [4, 3], "strokeWidth": 1, "width": {"band": 0.62},
            },
            "encoding": {
                "y": {
                    "field": "from", "type": "quantitative", "scale": {"domain": [0, rounded(top * 1.1)], "nice": False},
                    "axis": {"title": f"peak memory of a device, {unit} (predicted)"},
                },
                "y2": {"field": "to"},
                "color": {
                    "field": "part", "type": "ordinal",
                    "scale": {"domain": kinds, "range": [f"@{_PARTS[kind]}" for kind in kinds]},
                    "legend": {
                        "symbolType": "square", "symbolDash": [2, 2], "symbolStrokeColor": "@text", "symbolStrokeWidth": 1,
                    },
                },
                "opacity": {
                    "field": "part", "type": "ordinal",
                    "scale": {"domain": kinds, "range": [_OPACITY[kind] for kind in kinds]},
                },
                "tooltip": [
                    {"field": "size", "type": "nominal", "title": "micro batch"},
                    {"field": "part", "type": "nominal"},
                    {"field": "bytes", "type": "nominal", "title": "predicted"},
                ],
            },
        }
    ]  # fmt: skip
    if drawn_limit:
        device = (document.get("device") or {}).get("name") if isinstance(document.get("device"), dict) else None
        layers += _line(drawn_limit / scale, f"{device or 'memory'}: {format_bytes(limit)}", [1, 0])
        if positive(usable) and usable < drawn_limit * 0.995:
            layers += _line(usable / scale, f"usable: {format_bytes(usable)}", [4, 3], below=True)
    if positive(trial.get("measured_bytes")) and str(trial.get("micro_batch_size")) in order:
        layers.append({
            "data": {"values": [{"size": str(trial["micro_batch_size"]), "to": rounded(trial["measured_bytes"] / scale)}]},
            "mark": {"type": "point", "filled": True, "size": 90, "opacity": 1},
            "encoding": {
                "y": {"field": "to", "type": "quantitative"},
                "shape": {
                    "datum": "measured on this CPU", "type": "nominal",
                    "scale": {"domain": ["measured on this CPU"], "range": ["diamond"]},
                },
                "color": {"value": "@text"},
            },
        })  # fmt: skip
    largest = points[-1]
    text = f"predicted {format_bytes(largest['peak_memory_bytes'])} at micro batch {largest['micro_batch_size']}"
    if positive(limit):
        text += f", of {format_bytes(limit)}"
    if positive(document.get("max_micro_batch_size")):
        text += f"; largest that fits: {document['max_micro_batch_size']} (predicted)"
    axis = {
        "title": "micro batch size × sequence length" if several else "micro batch size, samples",
        "labelAngle": 0,
        "labelOverlap": True,
    }
    encoding = {"x": {"field": "size", "type": "ordinal", "sort": order, "axis": axis}}
    return frame(
        "Memory, predicted", text, f"Predicted peak memory against micro batch size: {text}.",
        height=HEIGHT, encoding=encoding, layer=layers,
    )  # fmt: skip


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


def _measured(probe: Document) -> Spec | None:
    trials = [t for t in probe["trials"] if t.get("purpose") == "limit" and positive(t.get("micro_batch_size"))]
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
    names = {"measured": "blue"} | ({"predicted": "orange"} if predicted else {}) | ({"failed": "red"} if full else {})
    top = max([*measured.values(), *predicted.values(), limit if positive(limit) else 0]) / scale

    def row(name: str, size: int, value: float, text: str) -> dict[str, Any]:
        return {"series": name, "size": size, "memory": rounded(value / scale), "text": text}

    lines = [row("measured", s, v, f"{format_bytes(v)} measured") for s, v in sorted(measured.items())]
    lines += [row("predicted", s, v, f"{format_bytes(v)} predicted") for s, v in sorted(predicted.items())]
    crosses = [
        row("failed", s, limit if positive(limit) else top * scale, f"{s}: {t.get('cause') or t.get('status')}")
        for s, t in sorted(full.items())
    ]
    shapes, dashes = ["circle", "square", "cross"][: len(names)], [[1, 0], [6, 4], [1, 0]][: len(names)]
    y = {
        "field": "memory", "type": "quantitative", "scale": {"domain": [0, rounded(top * 1.12)], "nice": False},
        "axis": {"title": f"peak memory, {unit}"},
    }  # fmt: skip
    looks = series(names, shapes, dashes)
    tooltip = [{"field": "size", "type": "quantitative", "title": "micro batch"}, {"field": "text", "type": "nominal"}]
    layers: list[Spec] = [
        {
            "data": {"values": lines},
            "mark": {"type": "line", "strokeWidth": 1.75},
            "encoding": {"y": y, "color": looks["color"], "strokeDash": looks["strokeDash"]},
        },
        {
            "data": {"values": lines},
            "transform": [{"filter": "datum.series == 'measured'"}],
            "mark": {"type": "point", "filled": True, "size": 70, "opacity": 1},
            "encoding": {"y": y, "tooltip": tooltip, "color": looks["color"], "shape": looks["shape"]},
        },
        {
            "data": {"values": lines},
            "transform": [{"filter": "datum.series == 'predicted'"}],
            "mark": {"type": "point", "fill": "@background", "size": 60, "opacity": 1, "strokeWidth": 2},
            "encoding": {"y": y, "tooltip": tooltip, "color": looks["color"], "shape": looks["shape"]},
        },
        {
            "data": {"values": crosses},
            "mark": {"type": "point", "filled": True, "size": 110, "angle": 45, "opacity": 1},
            "encoding": {"y": y, "tooltip": tooltip, "color": looks["color"], "shape": looks["shape"]},
        },
    ]
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
