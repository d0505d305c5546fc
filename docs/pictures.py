"""Writes docs/pictures/*.svg: the charts that README and docs show, light and dark.

    python docs/pictures.py

The ramps are computed. The pipelines are torch's own order of actions (tests/runtime/step/pipeline_orders.py writes it). The
probe, the estimate and the run were made once by the verbs and flags that `docs/report.md` names. Their records are beside the
pictures. `pictures()` returns every file; a test compares them with the folder.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import batchwright
from batchwright.report.charts import charts_of
from batchwright.report.charts.pipeline import timeline
from batchwright.report.render import svg

FOLDER = Path(__file__).with_name("pictures")
# The ramp of GPT-3 5B that NeMo's documentation shows, on the nodes that its launcher gives each stage.
GPT3_5B = {
    "linear": "256,256,10M", "global_batch_size": 2048, "micro_batch_size": 4, "nodes": 16, "devices_per_node": 8,
    "samples": "20M",
}  # fmt: skip


def records() -> dict[str, tuple[str, Any, tuple[str, ...]]]:
    """Name -> kind, document, and the charts of it that are shown."""
    return {
        "gpt3-5b": ("ramp", batchwright.ramp(**GPT3_5B).to_json(), ("staircase",)),
        "probe": ("probe", _stored("probe"), ("throughput", "memory")),
        "estimate": ("estimate", _stored("estimate"), ("memory",)),
        "run": ("run", _stored("run"), ("staircase", "loss")),
    }


def _stored(name: str) -> Any:
    """A record; NaN, which JSON does not have, is null in it."""
    document = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    for column in document.get("steps", {}).values():
        column[:] = [float("nan") if value is None else value for value in column]
    return document


def pictures() -> dict[str, str]:
    """File name -> SVG."""
    found: dict[str, str] = {}
    for name, (kind, document, shown) in records().items():
        for theme in ("light", "dark"):
            drawn = charts_of(kind, document, theme)
            found |= {f"{name}-{chart}-{theme}.svg": svg(drawn[chart]) + "\n" for chart in shown}
    for name, document in _stored("pipeline").items():
        for theme in ("light", "dark"):
            found[f"pipeline-{name}-{theme}.svg"] = svg(timeline(document, theme=theme) or {}) + "\n"
    return found


if __name__ == "__main__":
    for name, text in pictures().items():
        path = FOLDER / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(f"wrote docs/pictures/{name}")
