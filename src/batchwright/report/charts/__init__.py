"""Charts: each is a function from a document to a Vega-Lite specification; None where there is nothing to draw."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from .memory import memory as memory
from .noise import noise_scale as noise_scale
from .plan import split as split
from .probe import step_time as step_time
from .probe import throughput as throughput
from .ramp import staircase as staircase
from .rl import reward as reward
from .rl import round_times as round_times
from .run import loss as loss
from .run import node_hours as node_hours
from .run import stage_throughput as stage_throughput
from .spec import Document, Spec


def _of_run(run: Document, *, theme: str) -> Spec | None:
    return staircase(run["plan"], run, theme=theme)


def _of_estimate(estimate: Document, *, theme: str) -> Spec | None:
    return memory(estimate, estimate.get("probe"), theme=theme)


# The charts of every kind of document, by their names in files and pages, the most important one first.
CHARTS: dict[str, dict[str, Callable[..., Spec | None]]] = {
    "plan": {"split": split, "memory": memory},
    "ramp": {"staircase": staircase},
    "probe": {"throughput": throughput, "memory": memory, "step-time": step_time},
    "pipeline": {},
    "estimate": {"memory": _of_estimate},
    "run": {
        "staircase": _of_run,
        "loss": loss,
        "loss-by-time": partial(loss, against="time"),
        "throughput": stage_throughput,
        "noise-scale": noise_scale,
        "node-hours": node_hours,
    },
    "rl": {"round": round_times, "reward": reward},
}


def charts_of(kind: str, document: Document, theme: str = "light") -> dict[str, Spec]:
    """All charts of a document that have something to show, by name."""
    made = {name: draw(document, theme=theme) for name, draw in CHARTS[kind].items()}
    return {name: spec for name, spec in made.items() if spec is not None}


def chart_of(kind: str, document: Document, name: str | None = None, theme: str = "light") -> dict[str, Any] | None:
    """The chart with this name; without one, all charts of the document below each other. None without any."""
    from batchwright.core.errors import ConfigError

    if name is not None:
        if name not in CHARTS[kind]:
            known = f"Known: {', '.join(CHARTS[kind])}" if CHARTS[kind] else "It has none: its numbers are a table"
            raise ConfigError(
                f"name={name!r} is not a chart of a {kind}. {known}.",
                field="name",
                given=name,
                nearest=[*CHARTS[kind]],
            )
        return CHARTS[kind][name](document, theme=theme)
    found = list(charts_of(kind, document, theme).values())
    if len(found) < 2:
        return found[0] if found else None
    views = [{key: value for key, value in spec.items() if key not in ("$schema", "config")} for spec in found]
    scales = {"resolve": {"scale": dict.fromkeys(("color", "shape", "strokeDash", "fill", "stroke"), "independent")}}
    return {"$schema": found[0]["$schema"], "config": found[0]["config"], "vconcat": views, "spacing": 48, **scales}
