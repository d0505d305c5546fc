"""The ramp that `batchwright.ramp` returns: that of `core`, which may not import charts, with its chart."""

from __future__ import annotations

from dataclasses import dataclass

from .core.ramp import ramp
from .report.notebook import Shown


@dataclass(frozen=True)
class Ramp(ramp.Ramp, Shown):
    """A schedule, the nodes and cost of each stage, and its learning rate; `chart` draws it."""

    kind = "ramp"
