"""MaxText's own words for a batch and its ramp, as arguments of `Feed`.

MaxText compiles anew at every stage of its ramp, since the size per device grows. Here all stages run in micro batches that
they share, and their number grows.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import batchwright
from batchwright.core.numbers import count, fraction
from batchwright.core.ramp.rules import Constant


def maxtext(keys: Mapping[str, Any], *, samples: int | str, **world: Any) -> dict[str, Any]:
    """`schedule`, `micro_batch_size` and `loading_hosts` for `Feed`, from MaxText's keys: per_device_batch_size,
    gradient_accumulation_steps, the ramp's, expansion_factor_real_data and the mesh's. `world` is devices, or nodes and
    devices_per_node.

    >>> keys = {"per_device_batch_size": 12, "enable_rampup_batch_size": True, "per_device_batch_size_start": 4}
    >>> words = maxtext({**keys, "expansion_factor_real_data": 2}, samples=5000, devices=8)
    >>> [s.global_batch_size for s in words["schedule"].segments], words["micro_batch_size"], words["loading_hosts"]
    ([32, 48, 64, 80, 96], 2, Fraction(2, 1))
    """
    given = dict(keys)
    factor = fraction(given.pop("expansion_factor_real_data", -1), "expansion_factor_real_data")
    ramp = str(given.get("enable_rampup_batch_size", False)).lower() == "true"
    if ramp:
        made = batchwright.ramp(given, samples=samples, **world)
        schedule, micro = made.schedule, made.shared_micro_batch_size
    else:
        plan = batchwright.plan(given, **world)
        schedule, micro = (
            Constant(plan.global_batch_size).compile().until(count(samples, "samples")),
            plan.micro_batch_size,
        )
    return {"schedule": schedule, "micro_batch_size": micro, "loading_hosts": Fraction(factor) if factor > 1 else None}
