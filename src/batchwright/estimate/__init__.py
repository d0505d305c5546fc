"""Peak memory by batch without running: torch on fake tensors, JAX compiled ahead of time. Needs no GPU.

Everything here is a prediction. The caller needs the standard library only; a process of its own loads torch or JAX.
"""

import sys
from types import ModuleType
from typing import Any

from .devices import DEVICES, Allowance, Device
from .estimate import estimate, predict_slope
from .jax_step import JaxStep
from .records import Calibration, Candidate, Estimate, FrontierRow, Length, Placement, Point, Slope

__all__ = [
    "DEVICES",
    "Allowance",
    "Calibration",
    "Candidate",
    "Device",
    "Estimate",
    "FrontierRow",
    "JaxStep",
    "Length",
    "Placement",
    "Point",
    "Slope",
    "estimate",
    "predict_slope",
]


class _EstimatePackage(ModuleType):
    """`batchwright.estimate` is this package; a call of it is a call of its function of the same name."""

    def __call__(self, *args: Any, **given: Any) -> Estimate:
        return estimate(*args, **given)


sys.modules[__name__].__class__ = _EstimatePackage
