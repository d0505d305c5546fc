"""A pipeline schedule as a picture: what each rank computes when."""

from __future__ import annotations

from .spec import Document, Spec, drawn, fills, frame

# What is computed -> its name in the legend, the role of its colour, and how opaque: the text on it can be read.
_KINDS = {
    "F": ("forward", ("blue", 0.65)),
    "B": ("backward", ("orange", 0.25)),
    "I": ("backward for inputs", ("orange", 0.25)),
    "W": ("backward for weights", ("green", 0.45)),
}


@drawn
def timeline(schedule: Document) -> Spec | None:
    """A row for each rank, a box for each forward and backward with its microbatch; what is empty is idle.

    `actions` are lists of (rank, kind, microbatch, start, end); `idle_share` is the share of all rows that is empty.
    """
    actions = schedule.get("actions") or []
    if not actions:
        return None
    present = {kind: _KINDS[kind] for kind in _KINDS if any(action[1] == kind for action in actions)}
    values = [
        {"rank": f"rank {rank}", "series": present[kind][0], "text": str(m + 1), "start": start, "end": end}
        for rank, kind, m, start, end in actions
    ]
    ranks = sorted({value["rank"] for value in values})
    last = max(value["end"] for value in values)
    title = f"{schedule['schedule']}: {schedule['stages']} ranks, {schedule['microbatches']} microbatches"
    idle = f"{schedule['idle_share']:.0%} idle"
    encoding = {
        "x": {
            "field": "start",
            "type": "quantitative",
            "scale": {"domain": [0, last], "nice": False},
            "axis": {"title": "time, in forwards of one microbatch on one rank", "grid": False},
        },
        "y": {
            "field": "rank",
            "type": "ordinal",
            "sort": ranks,
            "axis": {"title": None, "ticks": False, "domain": False},
        },
    }
    layers = [
        {
            "mark": {"type": "bar", "stroke": "@background", "strokeWidth": 2, "height": {"band": 0.9}},
            "encoding": {"x2": {"field": "end"}, **fills("series", dict(present.values()))},
        },
        {
            "transform": [{"calculate": "(datum.start + datum.end) / 2", "as": "middle"}],
            "mark": {"type": "text", "color": "@text"},
            "encoding": {"x": {**encoding["x"], "field": "middle"}, "text": {"field": "text"}},
        },
    ]
    return frame(
        title, f"{idle}: the empty part of the rows", f"{title}, {idle}.",
        height=34 * len(ranks), data={"values": values}, encoding=encoding, layer=layers,
    )  # fmt: skip
