"""Reinforcement learning: where the time of one round goes, process by process, and the reward of all rounds."""

from __future__ import annotations

import math
from typing import Any

from .spec import BUCKETS, HEIGHT, Document, Spec, drawn, fills, finite, frame, rounded, samples_axis, thinned

# What a process does -> the role of its colour, and how opaque. A wait is light, since nothing happens in it.
_KINDS = {
    "rollout": ("blue", 0.7),
    "train": ("orange", 0.75),
    "update": ("green", 0.4),
    "publish": ("purple", 1.0),
    "wait": ("grid", 1.0),
}
_BAR = 34  # pixels for each process


@drawn
def round_times(run: Document) -> Spec | None:
    """The last round: rollout, training, updates and waiting, one row for each process."""
    last: Any = run.get("last") or {}
    given: Any = last.get("spans")
    spans = [span for span in given if _is_span(span)] if isinstance(given, list) else []  # pyright: ignore[reportUnknownVariableType]
    if not spans or not finite(last.get("round")):
        return None
    end = max(float(last["seconds"]) if finite(last.get("seconds")) else 0.0, *(span[3] for span in spans))
    rows = [
        {"process": process, "kind": kind, "begin": rounded(max(0.0, begin), 6), "end": rounded(stop, 6)}
        for process, kind, begin, stop in spans
        if stop > 0
    ]
    kinds = [kind for kind in _KINDS if any(row["kind"] == kind for row in rows)]
    processes = sorted({row["process"] for row in rows}, key=lambda name: (not name.startswith("rollout"), name))
    busy = {kind: sum(row["end"] - row["begin"] for row in rows if row["kind"] == kind) for kind in kinds}
    text = f"round {int(last['round']) + 1:,} took {end:.3g} s: " + ", ".join(f"{k} {s:.3g} s" for k, s in busy.items())
    encoding = {
        "x": {
            "field": "begin", "type": "quantitative", "axis": {"title": "seconds"},
            "scale": {"domain": [0, end], "nice": False},
        },
        "x2": {"field": "end"},
        "y": {"field": "process", "type": "nominal", "sort": processes, "axis": {"title": None}},
        **fills("kind", {kind: _KINDS[kind] for kind in kinds}),
        "tooltip": [
            {"field": "process", "type": "nominal"},
            {"field": "kind", "type": "nominal"},
            {"field": "begin", "type": "quantitative", "title": "begins (s)"},
            {"field": "end", "type": "quantitative", "title": "ends (s)"},
        ],
    }  # fmt: skip
    mark = {"type": "bar", "height": 20, "stroke": "@background", "strokeWidth": 0.5}
    return frame(
        "One round",
        text,
        f"One round, process by process: {text}.",
        height=_BAR * len(processes),
        data={"values": rows},
        mark=mark,
        encoding=encoding,
    )


@drawn
def reward(run: Document) -> Spec | None:
    """The mean reward of every round against the prompts that were trained."""
    columns = run["rounds"]
    known = [
        (x, y)
        for x, y in zip(columns["samples"], columns["reward"], strict=True)
        if math.isfinite(x) and math.isfinite(y)
    ]
    if not known:
        return None
    xs, ys = [x for x, _ in known], [y for _, y in known]
    many = len(known) > BUCKETS
    points = [(x, y) for x, y, *_ in thinned(xs, ys, BUCKETS)] if many else known
    rows = [{"prompts": rounded(x, 7), "reward": rounded(y)} for x, y in points]
    text = f"{len(ys):,} rounds: {ys[0]:.3g} at first, {ys[-1]:.3g} at last, largest {max(ys):.3g}"
    return frame(
        "Mean reward of a round",
        text + ("; drawn as means of several" if many else ""),
        f"Mean reward of a round against prompts: {text}.",
        height=HEIGHT,
        data={"values": rows},
        mark={"type": "line", "strokeWidth": 1.75, "color": "@blue", "point": len(rows) == 1 and {"filled": True}},
        encoding={
            "x": samples_axis(xs[-1], field="prompts", title="prompts"),
            "y": {"field": "reward", "type": "quantitative", "axis": {"title": "reward"}, "scale": {"zero": False}},
        },
    )


def _is_span(span: Any) -> bool:
    """Whether an entry of an event is a span: a damaged line may hold anything."""
    if not isinstance(span, (list, tuple)) or len(span) != 4:  # pyright: ignore[reportUnknownArgumentType]
        return False
    process, kind, begin, end = span
    return isinstance(process, str) and kind in _KINDS and finite(begin) and finite(end) and end >= begin
