"""Charts as text for a terminal: drawn from the rows of the same specifications, so that both show the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from shutil import get_terminal_size
from textwrap import wrap
from typing import Any

from .charts import charts_of
from .charts.spec import Document, Spec
from .plots import Bar, Series, bars, few, lines

_WIDEST, _NARROWEST = 100, 30
# The parts of a bar: neighbours differ.
_FILLS = "█▒▓░▚"
_MOST_BARS = 20  # in a longer list the middle is left out


def text_charts(kind: str, document: Document) -> list[str]:
    """The charts of a document as lines of text, as wide as the terminal; those that have nothing to draw are left out.

    The staircase of a ramp has a function of its own in `plots`: its verb draws it from objects. The charts of a plan and of a
    run of `train_rl` have no twin here: no verb draws them.
    """
    width = max(_NARROWEST, min(_WIDEST, get_terminal_size((_WIDEST, 24)).columns))
    found: list[str] = []
    for name, spec in charts_of(kind, document).items():
        if (draw := _DRAWN.get(kind, {}).get(name)) and (made := draw(spec, width)):
            found += ["", *made]
    return found


def _rows(spec: Spec, mark: str) -> list[dict[str, Any]]:
    """The rows of all layers with a mark of this type."""
    layers = [layer for layer in spec["layer"] if layer["mark"]["type"] == mark]
    return [row for layer in layers for row in layer.get("data", spec.get("data"))["values"]]


def _grouped(
    rows: Sequence[Mapping[str, Any]], x: str, y: str, part: str
) -> dict[tuple[str, Any], list[tuple[float, float]]]:
    """The points of every line, by the name of its series and the part that it is."""
    found: dict[tuple[str, Any], list[tuple[float, float]]] = {}
    for row in rows:
        found.setdefault((row["series"], row.get(part)), []).append((row[x], row[y]))
    return found


def _staircase(spec: Spec, width: int) -> list[str]:
    made = _heading(spec, width)
    for panel in spec.get("vconcat", [spec]):
        done = [
            layer for layer in panel["layer"] if layer["mark"]["type"] == "line" and "strokeDash" not in layer["mark"]
        ]
        planned = panel["layer"][0]["data"]["values"]
        drawn = [Series("planned", _stairs(planned), "planned")]
        for part in {row["part"]: None for layer in done for row in layer["data"]["values"]}:
            corners = [row for layer in done for row in layer["data"]["values"] if row["part"] == part]
            drawn.append(Series("trained", _stairs(corners), "line"))
        if failures := _rows(panel, "point"):
            drawn.append(Series("launch failed", [(row["samples"], row["value"]) for row in failures], "cross"))
        x, y = (panel["encoding"][axis] for axis in "xy")
        made += ["", *_wrapped(y["axis"]["title"], width)]
        bounds: Any = {"x": tuple(x["scale"]["domain"]), "y": tuple(y["scale"]["domain"])}
        levels = few({row["value"] for row in planned}, 10)
        made += lines(drawn, **bounds, xlabel=x["axis"]["title"] or "", width=width, height=10, levels=levels)
    return made


def _stairs(corners: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """A value holds up to the next corner."""
    points = [(corners[0]["samples"], corners[0]["value"])]
    for before, corner in pairwise(corners):
        points += [(corner["samples"], before["value"]), (corner["samples"], corner["value"])]
    return points


def _loss(spec: Spec, width: int) -> list[str]:
    x = spec["encoding"]["x"]["field"]
    drawn = [
        Series(name, points, "dots" if name.startswith("evaluation") else "line")
        for (name, _), points in _grouped(_rows(spec, "line"), x, "loss", "launch").items()
    ]
    if band := _rows(spec, "area"):
        extremes = [(row[x], row[side]) for row in band for side in ("low", "high")]
        drawn.insert(0, Series("smallest and largest", extremes, "faint"))
    low, high = spec["encoding"]["y"]["scale"]["domain"]
    if broken := [row for row in _rows(spec, "point") if "not finite" in row["series"]]:
        drawn.append(Series(broken[0]["series"], [(row[x], high) for row in broken], "cross"))
    texts = {row[x]: row["text"] for row in _rows(spec, "text")}  # those that are far enough apart
    borders = [(row[x], texts.get(row[x], "")) for row in _rows(spec, "rule")]
    return _plot(spec, drawn, width, (low, high), borders=borders)


def _noise(spec: Spec, width: int) -> list[str]:
    known = _grouped(_rows(spec, "line"), "samples", "value", "part")
    drawn = [Series(name, points, "line" if "noise" in name else "faint") for (name, _), points in known.items()]
    if band := _rows(spec, "area"):
        edges = [(row["samples"], row[side]) for row in band for side in ("low", "high")]
        drawn.insert(0, Series("95% interval", edges, "dots"))
    y = spec["layer"][0]["encoding"]["y"]
    return _plot(spec, drawn, width, tuple(y["scale"]["domain"]), decades=y["axis"]["values"])


def _node_hours(spec: Spec, width: int) -> list[str]:
    known = _grouped(spec["data"]["values"], "samples", "hours", "")
    drawn = [Series(name, points, "line" if name == "used" else "dots") for (name, _), points in known.items()]
    return _plot(spec, drawn, width, (0, max(y for one in drawn for _, y in one.points)))


def _plot(spec: Spec, drawn: list[Series], width: int, y: tuple[float, float], **more: Any) -> list[str]:
    axis = spec["encoding"]["x"]
    return [
        *_heading(spec, width),
        *lines(drawn, x=tuple(axis["scale"]["domain"]), y=y, xlabel=axis["axis"]["title"], width=width, **more),
    ]


def _speeds(spec: Spec, width: int) -> list[str]:
    measured = _rows(spec, "point")
    if len(measured) < 2:
        return []
    fit, rules, texts = _rows(spec, "line"), _rows(spec, "rule"), _rows(spec, "text")
    drawn = [
        Series("95% interval", [(row["size"], row[side]) for side in ("low", "high")]) for row in rules if "low" in row
    ]
    if fit:
        drawn.insert(0, Series(fit[0]["series"], [(row["size"], row["rate"]) for row in fit], "faint"))
    drawn.append(Series("measured", [(row["size"], row["rate"]) for row in measured], "points"))
    marks = [(row["size"], row["rate"], row["text"]) for row in texts if "rate" in row]
    borders = [(row["size"], row["text"]) for row in rules if "low" not in row]
    y = {**spec["layer"][0]["encoding"]["y"], **spec["encoding"]["y"]}
    return _by_size(spec, drawn, width, y, marks=marks, borders=borders)


def _peaks(spec: Spec, width: int) -> list[str]:
    parts = {
        name: [r for r in _rows(spec, "point") if r["series"] == name] for name in ("measured", "predicted", "failed")
    }
    limits = [layer["encoding"]["y"]["datum"] for layer in spec["layer"] if layer["mark"]["type"] == "rule"]
    # Without a limit, the peak of a command is only its memory on the host.
    if len(parts["measured"]) < 2 or not limits:
        return []
    ends = spec["encoding"]["x"]["scale"]["domain"]
    drawn = [
        Series(row["text"], [(end, at) for end in ends], "level")
        for row, at in zip(_rows(spec, "text"), limits, strict=True)
    ]
    looks = {"predicted": "dots", "measured": "points", "failed": "cross"}
    points = {name: [(row["size"], row["memory"]) for row in parts[name]] for name in looks}
    drawn += [Series("measured", points["measured"], "line")]
    names = {"predicted": "predicted (below • where equal)"}
    drawn += [Series(names.get(name, name), points[name], look) for name, look in looks.items() if points[name]]
    return _by_size(spec, drawn, width, spec["layer"][-1]["encoding"]["y"])


def _by_size(spec: Spec, drawn: list[Series], width: int, y: Spec, **more: Any) -> list[str]:
    """A plot against micro batch sizes, with the axes of the chart."""
    low, high = y["scale"]["domain"]
    made = _plot(spec, drawn, width, (low, high), sizes=spec["encoding"]["x"]["axis"]["values"], **more)
    return [*made, *_wrapped(f"up: {y['axis']['title']}", width)]


def _throughput(spec: Spec, width: int) -> list[str]:
    planned = {row["stage"]: row["rate"] for row in _rows(spec, "tick")}
    measured = {row["stage"]: row for row in _rows(spec, "bar")}
    rows: list[Bar] = []
    order = spec["encoding"]["x"]["sort"]
    for stage in order if len(order) <= _MOST_BARS else [*order[: _MOST_BARS // 2], None, *order[-_MOST_BARS // 2 :]]:
        if stage is None:
            rows.append(Bar(f"… {len(order) - _MOST_BARS} more", (), ""))
            continue
        row, expected = measured.get(stage), planned.get(stage)
        texts = [f"{row['rate']:,.4g} ({row['low']:,.4g} to {row['high']:,.4g})"] if row else ["not measured"]
        texts += [f"planned {expected:,.4g}"] if expected else []
        parts = (("█", row["rate"]),) if row else ()
        rows.append(Bar(stage.replace("|", ", "), parts, ", ".join(texts), ((expected, "┆"),) if expected else ()))
    title = "samples per second: median (quartiles)" + (", ┆ planned" if planned else "")
    return [spec["title"]["text"], *bars(rows, width=width), *_wrapped(title, width)]


def _memory(spec: Spec, width: int) -> list[str]:
    bands = spec["layer"][0]["data"]["values"]
    measured = {row["size"]: row["to"] for row in _rows(spec, "point")}
    kinds = spec["layer"][0]["encoding"]["color"]["scale"]["domain"]
    fills = dict(zip(kinds, _FILLS, strict=False))
    lines = [layer for layer in spec["layer"] if layer["mark"]["type"] == "rule"]
    limits = {layer["encoding"]["y"]["datum"]: "┆" if k else "│" for k, layer in enumerate(lines)}
    rows: list[Bar] = []
    for size in spec["encoding"]["x"]["sort"]:
        parts = [row for row in bands if row["size"] == size]
        texts = [f"{parts[-1]['to']:,.4g}"] if parts else []
        texts += [f"measured {measured[size]:,.4g}"] if size in measured else []
        marks = [*limits.items(), *([(measured[size], "◆")] if size in measured else [])]
        rows.append(
            Bar(size, [(fills[row["part"]], row["to"] - row["from"]) for row in parts], ", ".join(texts), marks)
        )
    unit = spec["layer"][0]["encoding"]["y"]["axis"]["title"]
    named = [f"{fill} {kind}" for kind, fill in fills.items()]
    named += [f"{mark} {name}" for name, mark in zip(("limit", "usable"), limits.values(), strict=False)]
    named += ["◆ measured"] if measured else []
    return [*_heading(spec, width), *bars(rows, width=width), *_wrapped(unit, width), *_legend(named, width)]


def _step_time(spec: Spec, width: int) -> list[str]:
    rows = spec["data"]["values"]
    fills = dict(zip((row["part"] for row in rows), _FILLS, strict=False))
    bar = Bar("", tuple((fills[row["part"]], row["to"] - row["from"]) for row in rows), "")
    named = [f"{fills[row['part']]} {row['part']} {row['time']:g}" for row in rows]
    unit = spec["layer"][0]["encoding"]["x"]["axis"]["title"]
    return [*_heading(spec, width), *bars([bar], width=width), *_legend([f"{unit}:", *named], width)]


def _legend(names: Sequence[str], width: int) -> list[str]:
    """Names side by side, as many in a line as fit."""
    made = [""]
    for name in names:
        if made[-1] and len(made[-1]) + len(name) + 2 > width:
            made.append("")
        made[-1] += f"  {name}"
    return made


def _heading(spec: Spec, width: int) -> list[str]:
    return [spec["title"]["text"], *_wrapped(spec["title"]["subtitle"], width)]


def _wrapped(text: str, width: int) -> list[str]:
    return wrap(text, width, initial_indent="  ", subsequent_indent="  ")


_DRAWN: dict[str, dict[str, Callable[[Spec, int], list[str]]]] = {
    "run": {
        "staircase": _staircase,
        "loss": _loss,
        "loss-by-time": _loss,
        "throughput": _throughput,
        "noise-scale": _noise,
        "node-hours": _node_hours,
    },
    "probe": {"throughput": _speeds, "memory": _peaks, "step-time": _step_time},
    "estimate": {"memory": _memory},
}
