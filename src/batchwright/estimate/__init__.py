"""Peak memory by batch without running: torch on fake tensors, JAX compiled ahead of time. Needs no GPU.

Everything here is a prediction. This side is the standard library only; torch or JAX is loaded in a process of its own.
"""

import sys
from types import ModuleType
from typing import Any

from .devices import DEVICES, Device
from .estimate import estimate, predict_slope
from .jax_step import JaxStep
from .records import Calibration, Estimate, FrontierRow, Length, Point, Slope

__all__ = [
    "DEVICES",
    "Calibration",
    "Device",
    "Estimate",
    "FrontierRow",
    "JaxStep",
    "Length",
    "Point",
    "Slope",
    "estimate",
    "predict_slope",
]


class _Room(ModuleType):
    """`batchwright.estimate` is this package, and it can be called: it stands for its function of the same name."""

    def __call__(self, *args: Any, **given: Any) -> Estimate:
        return estimate(*args, **given)


sys.modules[__name__].__class__ = _Room
