"""The gradient noise scale, computed from gradient norms of micro batches; plain arithmetic, no torch.

The simple noise scale is B = tr(Σ) / |G|² (McCandlish et al. 2018, arXiv 1812.06162): the batch size at which noise and
signal are equally large. The textbook estimator compares the norms of a small and a large batch and assumes micro
batches of equal weight; with the lengths of real text it is wrong by a factor of 1.2 to 6.6. The estimator here
assumes only that micro batches are independent and have the same mean. Let s_k be the *sum* gradient of micro batch k,
n_k its weight, N = Σ n_k and g = Σ s_k / N. Then

    cross = |Σ s_k|² − Σ |s_k|²              # products of different micro batches: without their own noise
    |G|²  = cross / (N² − Σ n_k²)            # unbiased for any n_k
    tr(Σ) = N · (|g|² − |G|²)                # noise per unit of weight
    B     = mean over steps of tr(Σ)  /  mean over steps of |G|²

Numerator and denominator are averaged over steps *before* the division: |G|² of one step is off by 10% to 125%, and
often negative. The unit of B is that of the weights: tokens if weights are tokens.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import NormalDist, fmean

from batchwright.core.errors import PlanError, Violation, raise_violations


@dataclass(frozen=True)
class NoiseTerms:
    """The estimates of one step: `trace` of tr(Σ), `signal` of |G|²; both are unbiased, either may be negative."""

    trace: float
    signal: float


@dataclass(frozen=True)
class NoiseEstimate:
    """The noise scale with its confidence interval; if `noise_scale` is None, `reason` says why."""

    noise_scale: float | None
    low: float | None
    high: float | None
    trace: float | None
    signal: float | None
    steps: int
    reason: str | None = None


def unequal_batches(weight: float, sum_square: float, square_sum: float, weight_square_sum: float) -> NoiseTerms | None:
    """The terms from micro batches of any weights: N, |Σ s_k|², Σ |s_k|², Σ n_k²; None for fewer than two batches.

    Two micro batches of weight 1 and 3 with sum gradients 2 and 3, in one dimension:

    >>> unequal_batches(weight=4, sum_square=25, square_sum=13, weight_square_sum=10)
    NoiseTerms(trace=-1.75, signal=2.0)
    """
    pairs = weight * weight - weight_square_sum
    if not (pairs > 1e-9 * weight * weight and math.isfinite(sum_square) and math.isfinite(square_sum)):
        return None
    signal = (sum_square - square_sum) / pairs
    return NoiseTerms(trace=weight * (sum_square / weight**2 - signal), signal=signal)


class NoiseScale:
    """The noise scale over the last `window` measured steps; pass it to an `Accumulator`, then call `estimate()`.

    Cost: every `every` steps, gradients are added into a flat buffer, one norm is computed per micro step, and the
    buffer is reduced after backward. That needs no more memory than plain accumulation, but the reduction does not
    overlap with backward; FSDP2 reduce-scatters each micro step of a measured step. In real training, use `every=10`.

    >>> noise = NoiseScale(window=50)
    >>> noise.estimate().reason
    'not enough data: 0 steps measured, 8 are needed'
    """

    # With fewer steps the variance of the terms is too uncertain: an assumption, not a measurement.
    LEAST_STEPS = 8

    def __init__(self, window: int = 200, every: int = 1, confidence: float = 0.95) -> None:
        least = self.LEAST_STEPS
        found: list[Violation] = []
        if window < least:
            found.append(Violation(f"window={window}: must be at least {least} steps.", "window", window, (least,)))
        if every < 1:
            found.append(Violation(f"every={every}: must be at least 1.", "every", every, (1,)))
        if not 0 < confidence < 1:
            message = f"confidence={confidence}: must be between 0 and 1."
            found.append(Violation(message, "confidence", confidence, (0.95,)))
        raise_violations(PlanError, found)
        self.every, self.confidence = every, confidence
        self.terms: deque[NoiseTerms] = deque(maxlen=window)

    def measures(self, step: int) -> bool:
        """Whether this step is measured."""
        return step % self.every == 0

    def observe(self, weight: float, sum_square: float, square_sum: float, weight_square_sum: float) -> None:
        """Add one step: N, |Σ s_k|², Σ |s_k|² and Σ n_k² over its micro batches on all ranks."""
        terms = unequal_batches(weight, sum_square, square_sum, weight_square_sum)
        if terms is not None and math.isfinite(terms.trace + terms.signal):  # else an overflow
            self.terms.append(terms)

    def estimate(self) -> NoiseEstimate:
        """The noise scale with Fieller's interval, which allows for an uncertain denominator."""
        n = len(self.terms)
        if n < self.LEAST_STEPS:
            reason = f"not enough data: {n} steps measured, {self.LEAST_STEPS} are needed"
            return NoiseEstimate(None, None, None, None, None, n, reason)
        traces, signals = [t.trace for t in self.terms], [t.signal for t in self.terms]
        a, b = fmean(traces), fmean(signals)
        t2 = _student(self.confidence, n - 1) ** 2
        spread = n * (n - 1) / t2  # a sum of products divided by it is t² × the (co)variance of a mean
        aa = sum((x - a) ** 2 for x in traces) / spread
        bb = sum((y - b) ** 2 for y in signals) / spread
        ab = sum((x - a) * (y - b) for x, y in zip(traces, signals, strict=True)) / spread
        # The interval is every ratio r with (a − r b)² ≤ aa − 2 r ab + r² bb. It is bounded only if b² > bb.
        if b <= 0 or b * b <= bb:
            reason = f"not enough data: |G|² = {b:.3g} ± {math.sqrt(bb):.2g} is not distinguishable from zero"
            return NoiseEstimate(None, None, None, a, b, n, reason)
        middle, width = a * b - ab, b * b - bb
        root = math.sqrt(max(0.0, middle * middle - width * (a * a - aa)))
        return NoiseEstimate(a / b, (middle - root) / width, (middle + root) / width, a, b, n)


def _student(confidence: float, freedom: int) -> float:
    """The two-sided quantile of Student's t: Cornish and Fisher's expansion, within 1% from 7 degrees of freedom on."""
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    return z + first / freedom + second / freedom**2
