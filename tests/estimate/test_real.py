"""Estimates against real processes with fixed malloc: the slope, and the peak at eight times the batch, within 2%."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from batchwright.estimate import worker
from batchwright.estimate.records import EstimateRequest

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(("name", "size"), [("gpt", 8), pytest.param("mlp", 1024, marks=pytest.mark.rounds)])
def test_slope_and_peak_at_eight_times_the_batch_are_within_two_percent(tasks, peaks, name, size):
    sizes = (size, 8 * size)
    with ThreadPoolExecutor(2) as pool:
        trials = [EstimateRequest(f"{tasks}:{name}", micro_batch_sizes=(b,)) for b in sizes]
        results = list(pool.map(lambda t: worker.run("trial", t, timeout=300), trials))
    small, large = (r["measured_bytes"] for r in results)
    estimated = peaks(f"{tasks}:{name}", sizes)

    measured_slope = (large - small) / (7 * size)
    slope = (estimated[8 * size] - estimated[size]) / (7 * size)
    predicted = estimated[8 * size] + (small - estimated[size])  # the estimate, and one real run for the constant
    print(f"{name}: slope {slope / measured_slope - 1:+.3%}, peak {predicted / large - 1:+.3%}")
    assert slope == pytest.approx(measured_slope, rel=0.02)
    assert predicted == pytest.approx(large, rel=0.02)
