"""Timings, curves and verdicts for known numbers."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.probe.prober import known_peak
from batchwright.probe.speed import Timing, analyse, diagnose, fit, interval, sizes, warmup


def steady(seconds, noise=0.01, steps=20, seed=0):
    draw = random.Random(seed)
    return Timing.of([seconds * 3, *(seconds * (1 + draw.uniform(-noise, noise)) for _ in range(steps))])


def curve_of(a, b, noise=0.01):
    return analyse({size: steady(a + b * size, noise, seed=size) for size in (1, 2, 4, 8, 16, 32, 64)})


@given(st.integers(1, 1 << 20), st.sampled_from([1, 8, 48]))
def test_sizes_are_few_rising_multiples_up_to_the_largest(largest, multiple_of):
    largest = max(largest, multiple_of) // multiple_of * multiple_of
    found = sizes(largest, multiple_of)
    assert found == sorted(set(found))
    assert len(found) <= 7
    assert found[-1] == largest
    assert all(size % multiple_of == 0 for size in found)


@given(st.floats(0, 1), st.floats(0.001, 1))
def test_the_fit_finds_its_line(a, b):
    found_a, found_b, error = fit({size: a + b * size for size in (1, 2, 4, 8, 16)})
    assert abs(found_a - a) < 1e-6 * (1 + a)
    assert abs(found_b - b) < 1e-6 * (1 + b)
    assert error < 1e-6


def test_the_interval_holds_the_median_and_narrows_with_steps():
    draw = random.Random(1)
    few, many = ([draw.gauss(1, 0.1) for _ in range(n)] for n in (9, 400))
    width = [high - low for low, high in (interval(few), interval(many))]
    assert width[1] < width[0] / 2


def test_warm_up_is_left_out():
    times = [5.0, 2.0, 1.2, *[1.0, 1.01, 0.99] * 5]
    assert warmup(times) == 3
    assert abs(Timing.of(times).seconds - 1.0) < 0.02


def test_a_gain_that_noise_explains_is_not_worthwhile():
    wide = Timing(1.0, 0.5, 1.5, 0.3, 9, 1)
    assert analyse({1: wide, 2: Timing(1.8, 1.0, 2.6, 0.3, 9, 1)}).largest_worthwhile == 1
    assert analyse({1: wide, 8: Timing(1.8, 1.0, 2.6, 0.3, 9, 1)}).largest_worthwhile == 8


def test_the_knee_is_measured_and_predicted():
    curve = curve_of(a=0.0053, b=0.000856)  # the research's fit: 90% of the asymptote at 56
    assert curve.predicted_saturating in range(50, 62)
    assert curve.saturating in (16, 32, 64)
    assert curve.best == 64
    assert not curve.noisy


def test_bottlenecks():
    flat = curve_of(a=0.001, b=0.01)
    same = {"cached": steady(1.0), "loader": steady(1.01), "accumulate": steady(0.97)}
    assert diagnose(same, flat, 64, ranks=1).bottleneck == "none"
    slow_loader = same | {"loader": steady(2.0)}
    found = diagnose(slow_loader, flat, 64, ranks=1)
    assert found.bottleneck == "input"
    assert "50% of a step waits for data" in found.text
    slow_sync = same | {"accumulate": steady(0.5)}
    assert diagnose(slow_sync, flat, 64, ranks=4).bottleneck == "synchronisation"
    assert diagnose(slow_sync, flat, 64, ranks=1).bottleneck == "none"  # one rank: that is the optimizer
    assert diagnose(same, curve_of(a=1.0, b=0.001), 64, ranks=1).bottleneck == "overhead"


def test_noise_is_refused_but_a_clear_case_is_not():
    wild = curve_of(a=0.001, b=0.01, noise=0.9)
    assert wild.noisy
    noisy = {"cached": steady(1.0, 0.5, steps=5), "loader": steady(1.1, 0.5, steps=5), "accumulate": steady(1.0)}
    assert diagnose(noisy, wild, 64, ranks=1).bottleneck == "too-noisy"
    clear = {"cached": steady(1.0, 0.5), "loader": steady(50.0, 0.5), "accumulate": steady(1.0)}
    assert diagnose(clear, wild, 64, ranks=1).bottleneck == "input"


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA GB200", 2500),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA L40S", 362),
        ("AMD Instinct MI250X", 191.5),  # torch's device is one of its two dies
        # Other cards, and parts of one, with the name of one in theirs.
        ("NVIDIA L40", None),
        ("NVIDIA RTX A4000", None),
        ("NVIDIA RTX A1000 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA T400 4GB", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
    ],
)
def test_the_peak_of_a_card_is_not_that_of_another(device, peak):
    assert known_peak(device, "bfloat16") == peak
