"""MaxText's keys give the batch of MaxText, in micro batches that all stages of a ramp share."""

from __future__ import annotations

from fractions import Fraction

import pytest

import batchwright
from tests.needs import needs

needs("jax")

RAMP = {"enable_rampup_batch_size": True, "per_device_batch_size_start": 4, "per_device_batch_size_increment": 2}


@pytest.mark.parametrize(
    ("keys", "devices", "sizes", "micro"),
    [
        ({"per_device_batch_size": 3, "gradient_accumulation_steps": 4}, 8, [96], 3),
        ({"per_device_batch_size": 0.5, "ici_tensor_parallelism": 2}, 8, [4], 1),
        ({"per_device_batch_size": 0.25, "gradient_accumulation_steps": 2, "ici_tensor_parallelism": 4}, 16, [8], 1),
        ({"per_device_batch_size": 12, **RAMP}, 8, [32, 48, 64, 80, 96], 2),
        ({"per_device_batch_size": 8, "gradient_accumulation_steps": 2, **RAMP}, 4, [32, 48, 64], 4),
    ],
)
def test_maxtext_words(keys, devices, sizes, micro):
    from batchwright.jax import maxtext

    words = maxtext(keys, samples=2000, devices=devices)
    assert [s.global_batch_size for s in words["schedule"].segments] == sizes
    assert (words["micro_batch_size"], words["loading_hosts"]) == (micro, None)
    assert all(size % micro == 0 for size in sizes)


@pytest.mark.parametrize(("factor", "hosts"), [(-1, None), (1, None), (2, Fraction(2)), (0.5, None)])
def test_the_expansion_factor_is_the_subset_that_reads(factor, hosts):
    from batchwright.jax import maxtext

    keys = {"per_device_batch_size": 2, "expansion_factor_real_data": factor}
    assert maxtext(keys, samples=64, nodes=2, devices_per_node=4)["loading_hosts"] == hosts
    assert maxtext(keys, samples=64, devices=8)["loading_hosts"] == hosts  # as with a ramp: Feed knows the hosts


def test_a_ramp_says_beforehand_where_it_compiles():
    ramp = batchwright.ramp({"per_device_batch_size": 12, **RAMP}, devices=8, samples=5000)
    assert ramp.compiles_at == (0, 1, 2, 3, 4) and ramp.shared_micro_batch_size == 2
    assert any("JAX compiles at stage 1, 2, 3, 4, 5" in note for note in ramp.notes)
    fixed = batchwright.ramp(thresholds="0:32 320:64 960:128", devices=8, samples=5000, micro_batch_size=4)
    assert fixed.compiles_at == (0,) and fixed.to_json()["compiles_at"] == [0]
    assert not any("compiles" in note for note in fixed.notes)
