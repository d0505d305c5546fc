"""The noise scale on a problem where it is known, and the error of the textbook formula."""

from __future__ import annotations

import math
from statistics import fmean

import numpy as np
import pytest
import torch
from torch import nn

from batchwright.core.errors import PlanError
from batchwright.runtime.data.windows import windows
from batchwright.runtime.step.accumulate import accumulate
from batchwright.runtime.step.noise import NoiseScale, NoiseTerms, unequal_batches

DIMENSIONS, SIGNAL, TRACE = 32, 1.0, 300.0  # |G|², tr(Σ): so B = 300 units of weight
TRUE = TRACE / SIGNAL


def two_batches(small: float, large: float, small_square: float, large_square: float) -> NoiseTerms:
    """The textbook formula, from |g|² at two batch sizes; correct only for batches of equal weight."""
    return NoiseTerms(
        trace=(small_square - large_square) / (1 / small - 1 / large),
        signal=(large * large_square - small * small_square) / (large - small),
    )


def simulated(steps: int, weights: np.ndarray, seed: int = 0) -> tuple[NoiseScale, list[NoiseTerms]]:
    """Sum gradients with a known mean and covariance; also the textbook terms, from means of micro batches."""
    random = np.random.default_rng(seed)
    mean = np.full(DIMENSIONS, math.sqrt(SIGNAL / DIMENSIONS))
    noise, textbook = NoiseScale(window=steps), []
    total = weights.sum()
    for _ in range(steps):
        spread = np.sqrt(TRACE / DIMENSIONS * weights)[:, None] * random.standard_normal((len(weights), DIMENSIONS))
        sums = weights[:, None] * mean + spread
        sum_square, squares = float(np.square(sums.sum(0)).sum()), np.square(sums).sum(1)
        noise.observe(total, sum_square, float(squares.sum()), float(np.square(weights).sum()))
        small = float((squares / weights**2).mean())
        textbook.append(two_batches(total / len(weights), total, small, sum_square / total**2))
    return noise, textbook


def lognormal(count: int) -> np.ndarray:
    return np.exp(4 + np.random.default_rng(1).standard_normal(count))


def test_within_two_percent_of_the_truth_with_uneven_micro_batches() -> None:
    noise, textbook = simulated(20_000, lognormal(16))
    found = noise.estimate()
    assert found.noise_scale is not None and found.low is not None and found.high is not None
    assert abs(found.noise_scale / TRUE - 1) < 0.02, found
    assert found.low < TRUE < found.high
    standard = fmean(t.trace for t in textbook) / fmean(t.signal for t in textbook)
    assert standard / TRUE > 1.2 or standard < 0, standard  # the textbook formula is far off


def test_equals_the_textbook_when_micro_batches_are_equal() -> None:
    assert two_batches(small=1, large=4, small_square=5.0, large_square=2.0) == NoiseTerms(trace=4.0, signal=1.0)
    noise, textbook = simulated(20, np.full(8, 64.0))
    for ours, standard in zip(noise.terms, textbook, strict=True):
        assert ours.trace == pytest.approx(standard.trace)
        assert ours.signal == pytest.approx(standard.signal)


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    answers = [simulated(40, lognormal(16), seed)[0].estimate() for seed in range(200)]
    bounded = [a for a in answers if a.low is not None and a.high is not None]
    covered = sum(a.low < TRUE < a.high for a in bounded)  # type: ignore[operator]
    assert len(bounded) == 200
    assert 0.89 <= covered / len(bounded) <= 0.99


def test_too_little_data_gives_a_reason() -> None:
    noise, _ = simulated(7 + 1, lognormal(16))
    assert noise.estimate().steps == 8
    noise.terms.pop()
    assert noise.estimate().reason == "not enough data: 7 steps measured, 8 are needed"
    drowned = NoiseScale()
    random = np.random.default_rng(0)
    for _ in range(50):  # no signal at all
        sums = random.standard_normal((4, DIMENSIONS))
        drowned.observe(4, float(np.square(sums.sum(0)).sum()), float(np.square(sums).sum()), 4)
    answer = drowned.estimate()
    assert answer.noise_scale is None and "is not distinguishable from zero" in (answer.reason or "")
    assert answer.trace is not None  # the noise itself is known well


def test_one_micro_batch_gives_no_terms() -> None:
    assert unequal_batches(weight=8, sum_square=3, square_sum=3, weight_square_sum=64) is None
    assert unequal_batches(weight=8, sum_square=math.inf, square_sum=3, weight_square_sum=32) is None
    noise = NoiseScale()
    noise.observe(8, 3, 3, 64)
    assert not noise.terms


def test_options_are_checked_together() -> None:
    with pytest.raises(PlanError) as caught:
        NoiseScale(window=2, every=0, confidence=95)
    assert [v.field for v in caught.value.violations] == ["window", "every", "confidence"]


def test_through_the_step_on_a_known_problem() -> None:
    """A linear model on Gaussian inputs: the gradient of a sample is its input, so |G|² and tr(Σ) are the inputs'.

    512 dimensions and 500 measured steps give a standard error of about 0.3%, so 2% is a real bound.
    """
    torch.manual_seed(0)
    steps, parts, width, mean, spread = 1000, [1, 2, 3, 5, 8, 13], 512, 1.5, 3.0
    model = nn.Linear(width, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    noise = NoiseScale(window=steps, every=2)
    batches = (mean + spread * torch.randn(size, width) for size in parts * steps)
    for step in accumulate(windows(batches, len(parts)), model, noise=noise, loss_scale=0.25):
        for micro in step:
            step.backward(model(micro.data).sum(), len(micro.data))
        step.apply(optimizer)
    found, true = noise.estimate(), spread**2 / mean**2
    assert found.steps == steps // 2
    assert found.noise_scale is not None and found.low is not None and found.high is not None
    assert abs(found.noise_scale / true - 1) < 0.02, found
    assert found.high - found.low < 0.02 * true
