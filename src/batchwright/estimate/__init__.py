"""Peak memory by batch without running: torch on fake tensors, JAX compiled ahead of time. Needs no GPU.

Everything here is a prediction. This side is the standard library only; torch or JAX is loaded in a process of its own.
"""

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
