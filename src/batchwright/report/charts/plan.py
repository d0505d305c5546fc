"""The equation as a picture: every rank's micro batches in one optimizer step."""

from __future__ import annotations

from .spec import Document, Spec, drawn, frame, positive

# More rows and columns than these cannot be told apart.
_MOST = 16


@drawn
def split(plan: Document) -> Spec | None:
    """One optimizer step: a row per data-parallel rank, a column per accumulation step, a micro batch in each cell."""
    names = ("global_batch_size", "micro_batch_size", "accumulation_steps", "data_parallel_size")
    if not all(positive(plan.get(name)) for name in names):
        return None
    _, micro, steps, ranks = (plan[name] for name in names)
    rows, columns = _shown(ranks), _shown(steps)
    cells = [
        {"rank": f"{r}", "step": f"{s}", "text": "…" if "…" in (f"{r}", f"{s}") else f"{micro}"} for r in rows for s in columns
    ]  # fmt: skip
    text = equation(plan)

    def axis(title: str) -> Spec:
        return {"title": title, "labelAngle": 0, "ticks": False, "domain": False, "labelOverlap": False}

    encoding = {
        "x": {
            "field": "step",
            "type": "ordinal",
            "sort": columns,
            "axis": {**axis("accumulation step"), "orient": "top"},
        },
        "y": {
            "field": "rank",
            "type": "ordinal",
            "sort": rows,
            "axis": {**axis("rank"), "minExtent": 30, "titleX": -30},
        },
    }
    layers = [
        {"mark": {"type": "rect", "fill": "@blue", "fillOpacity": 0.25, "stroke": "@background", "strokeWidth": 3}},
        {"mark": {"type": "text", "color": "@text"}, "encoding": {"text": {"field": "text"}}},
    ]
    return frame(
        "The global batch", text, f"One optimizer step: {text}.",
        height=22 * len(rows), data={"values": cells}, encoding=encoding, layer=layers,
    )  # fmt: skip


def equation(plan: Document) -> str:
    """A plan in one line."""
    ragged = " (ragged: shares differ by one sample)" if plan.get("ragged") else ""
    return (
        f"{plan['global_batch_size']:,} = {plan['micro_batch_size']:,} micro × {plan['accumulation_steps']:,} accumulation × "
        f"{plan['data_parallel_size']:,} data-parallel{ragged}"
    )


def _shown(count: int) -> list[str]:
    """1 to `count`, with the middle left out where there are many."""
    if count <= _MOST:
        return [str(i) for i in range(1, count + 1)]
    return [*(str(i) for i in range(1, _MOST - 1)), "…", f"{count:,}"]
