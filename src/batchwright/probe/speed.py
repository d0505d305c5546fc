"""How fast each size is and why it is not faster: step times, throughput against batch size, the bottleneck.

- A step time is a median with an interval, without the warm-up.
- The curve fits t = a + b × B, and says what each larger size gains.
- Three comparisons name the bottleneck: the real loader against a cached batch (waiting for input); on several ranks,
  accumulating against stepping (mostly synchronisation); the fit's constant a against b × B (fixed overhead per step).

If the interval of a share contains its threshold, that share decides nothing. The verdict is then `too-noisy`, unless
another share is clearly above its threshold.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean, median, stdev

# Half the interval's width over the median, above which a time is too noisy to use (assumption: the gains of interest
# are 5-100% per doubling, so an uncertainty of 15% on each side would hide most of them).
NOISY = 0.15
# The share of all processors that other programs used during a measurement, above which a note says so (assumption).
CONTENDED = 0.2
# The saturating size is the smallest one with this share of the best throughput (docs/design.md).
SATURATED = 0.90
# A larger size is worth using while it is this much faster than all smaller ones (DeepSpeed's plateau, 5%).
WORTHWHILE = 0.05
_MOST_SIZES = 7
# Shares of a step above which a cause is the bottleneck (assumption; DL4J#8130 proposed to warn at 30% of waiting).
INPUT, SYNCHRONISATION, OVERHEAD = 0.15, 0.20, 0.30
# How far the times may lie from t = a + bB before its constant means nothing (measured: 12% on a quiet machine).
TRUSTED_FIT = 0.25


@dataclass(frozen=True)
class Timing:
    """Seconds of a step: the median of `steps` of them, an interval around it, and the processor time.

    >>> Timing.of([9.0, 1.0, 1.1, 1.0, 0.9, 1.0, 1.0]).warmup
    1
    """

    seconds: float
    low: float
    high: float
    variation: float
    steps: int
    warmup: int
    cpu_seconds: float | None = None
    contention: float | None = None
    """The share of all processors that other programs used; None where the system does not report it."""
    switches: int | None = None
    """Involuntary context switches during the measurement."""

    @property
    def noise(self) -> float:
        """Half the interval's width, as a share of the median."""
        return (self.high - self.low) / 2 / self.seconds if self.seconds else math.inf

    @property
    def noisy(self) -> bool:
        """Whether it is too noisy to conclude anything from it."""
        return self.noise > NOISY or self.steps < 3

    def merged(self, other: Timing) -> Timing:
        """Two timings as one: the mean of both, and an interval that contains both."""
        return replace(
            self,
            seconds=(self.seconds + other.seconds) / 2,
            low=min(self.low, other.low),
            high=max(self.high, other.high),
            variation=max(self.variation, other.variation),
            steps=self.steps + other.steps,
            contention=max(self.contention or 0.0, other.contention or 0.0),
        )

    @classmethod
    def of(
        cls,
        times: Sequence[float],
        cpu: Sequence[float] = (),
        *,
        contention: float | None = None,
        switches: int | None = None,
    ) -> Timing:
        """The timing of consecutive steps; the warm-up is detected and left out."""
        skip = warmup(times)
        kept = list(times[skip:])
        low, high = interval(kept)
        return cls(
            seconds=median(kept),
            low=low,
            high=high,
            variation=stdev(kept) / fmean(kept) if len(kept) > 1 else 0.0,
            steps=len(kept),
            warmup=skip,
            cpu_seconds=median(cpu[skip:]) if cpu else None,
            contention=contention,
            switches=switches,
        )


def warmup(times: Sequence[float]) -> int:
    """How many of the first steps are slower than the rest: at least one, at most half.

    >>> warmup([5.0, 2.0, 1.0, 1.1, 1.0, 1.05]), warmup([1.0, 1.0, 1.0, 1.0])
    (2, 1)
    """
    if len(times) < 3:
        return max(0, len(times) - 1)
    settled = median(times[len(times) // 2 :])
    spread = median(abs(t - settled) for t in times[len(times) // 2 :])
    for first in range(1, len(times) // 2 + 1):
        # 1.05: lazy initialisation that costs less than 5% does not matter; 3 deviations: it is not noise either.
        if times[first] <= max(1.05 * settled, settled + 3 * spread):
            return first
    return len(times) // 2


def interval(values: Sequence[float]) -> tuple[float, float]:
    """A distribution-free 95% interval of the median, from order statistics; all the values when they are few.

    >>> interval([3.0, 1.0, 2.0])
    (1.0, 3.0)
    """
    ordered = sorted(values)
    n = len(ordered)
    reach = 0.98 * math.sqrt(n)  # 1.96 × sqrt(n × 0.5 × 0.5)
    low = max(0, math.floor(n / 2 - reach))
    high = min(n - 1, math.ceil(n / 2 + reach) - 1 if n > 1 else 0)
    return ordered[low], ordered[max(high, low)]


# The curve.


@dataclass(frozen=True)
class Gain:
    """From one measured size to the next: the ratio of the sizes, the ratio of throughput, and whether noise could explain it."""

    smaller: int
    larger: int
    ratio: float
    gain: float
    certain: bool


@dataclass(frozen=True)
class Curve:
    """The fit and the sizes that follow from it; `fixed_seconds` is a, `per_sample_seconds` is b."""

    fixed_seconds: float
    per_sample_seconds: float
    fit_error: float
    """The largest relative distance of a measured time from the fit."""
    gains: tuple[Gain, ...]
    best: int
    saturating: int
    predicted_saturating: int | None
    """(a/b) × 0.9/0.1: where the fit reaches 90% of its asymptote. A prediction, so it is never recommended."""
    largest_worthwhile: int
    noisy: bool


def sizes(largest: int, multiple_of: int = 1) -> list[int]:
    """The sizes to measure: powers of two up to `largest`, and `largest`; at most seven.

    >>> sizes(83), sizes(96, 16)
    ([1, 2, 4, 16, 32, 64, 83], [16, 32, 64, 96])
    """
    units = largest // multiple_of
    found = {units}
    power = 1
    while power < units:
        # A power that is nearly the maximum would show nothing new.
        if power * 1.25 <= units:
            found.add(power)
        power *= 2
    ordered = sorted(found)
    if len(ordered) > _MOST_SIZES:
        last = len(ordered) - 1
        ordered = [ordered[round(i * last / (_MOST_SIZES - 1))] for i in range(_MOST_SIZES)]
    return [unit * multiple_of for unit in ordered]


def fit(times: Mapping[int, float]) -> tuple[float, float, float]:
    """a, b and the largest relative error of t = a + b × B: least squares on relative errors, neither below zero.

    >>> a, b, error = fit({1: 3.0, 2: 5.0, 4: 9.0})
    >>> round(a, 6), round(b, 6), round(error, 6)
    (1.0, 2.0, 0.0)
    """
    points = [(float(size), t, 1 / t**2) for size, t in times.items()]
    weight = sum(w for *_, w in points)
    mean_x = sum(w * x for x, _, w in points) / weight
    mean_t = sum(w * t for _, t, w in points) / weight
    square = sum(w * (x - mean_x) ** 2 for x, _, w in points)
    b = sum(w * (x - mean_x) * (t - mean_t) for x, t, w in points) / square if square else mean_t / mean_x
    a = mean_t - b * mean_x
    if a < 0:
        a, b = 0.0, sum(w * x * t for x, t, w in points) / sum(w * x * x for x, _, w in points)
    elif b < 0:
        a, b = mean_t, 0.0
    return a, b, max(abs(a + b * x - t) / t for x, t, _ in points)


def analyse(timings: Mapping[int, Timing]) -> Curve:
    """The curve of timings by size."""
    ordered = sorted(timings)
    speed = {size: size / timings[size].seconds for size in ordered}
    best = max(ordered, key=lambda size: speed[size])
    a, b, error = fit({size: timings[size].seconds for size in ordered})
    worthwhile = ordered[0]
    for size in ordered[1:]:
        # Noise alone must not explain the gain: the slowest step of the interval is still faster per sample.
        surely = size / timings[size].high > worthwhile / timings[worthwhile].low
        if surely and speed[size] > speed[worthwhile] * (1 + WORTHWHILE):
            worthwhile = size
    return Curve(
        fixed_seconds=a,
        per_sample_seconds=b,
        fit_error=error,
        gains=tuple(_gain(smaller, larger, timings) for smaller, larger in pairwise(ordered)),
        best=best,
        saturating=next(size for size in ordered if speed[size] >= SATURATED * speed[best]),
        predicted_saturating=max(1, round(a / b * SATURATED / (1 - SATURATED))) if b and len(ordered) > 1 else None,
        largest_worthwhile=worthwhile,
        # More than a third of the timings are too noisy: a note says so, and the bottleneck is `too-noisy` unless it is clear.
        noisy=sum(t.noisy for t in timings.values()) * 3 > len(timings),
    )


def _gain(smaller: int, larger: int, timings: Mapping[int, Timing]) -> Gain:
    one, two = timings[smaller], timings[larger]
    ratio = larger / smaller
    gain = ratio * one.seconds / two.seconds
    least, most = ratio * one.low / two.high, ratio * one.high / two.low
    return Gain(smaller, larger, ratio, gain, certain=least > 1 or most < 1)


# The bottleneck.


@dataclass(frozen=True)
class Share:
    """A part of a step's time; the noise allows any value between `low` and `high`."""

    value: float
    low: float
    high: float

    def above(self, threshold: float) -> bool | None:
        """Whether it is above the threshold; None when the noise does not allow an answer."""
        return True if self.low > threshold else False if self.high < threshold else None


@dataclass(frozen=True)
class StepDiagnosis:
    """The bottleneck of a step, the shares that show it, and an explanation with a remedy."""

    bottleneck: str
    """none | input | synchronisation | overhead | too-noisy"""
    text: str
    input: Share | None = None
    synchronisation: Share | None = None
    overhead: Share | None = None


def difference(slow: Timing, fast: Timing) -> Share:
    """The part of `slow` that `fast` does not need.

    >>> difference(Timing.of([2.0] * 9), Timing.of([1.0] * 9)).value
    0.5
    """
    return Share(
        value=max(0.0, 1 - fast.seconds / slow.seconds),
        low=max(0.0, 1 - fast.high / slow.low),
        high=max(0.0, 1 - fast.low / slow.high),
    )


def diagnose(contrasts: Mapping[str, Timing], curve: Curve | None, size: int, ranks: int) -> StepDiagnosis:
    """The bottleneck at `size`."""
    cached = contrasts.get("cached")
    loader, accumulate = contrasts.get("loader"), contrasts.get("accumulate")
    waiting = difference(loader, cached) if loader and cached else None
    together = difference(cached, accumulate) if ranks > 1 and cached and accumulate else None
    fixed = _overhead(curve, size)
    shares = {"input": (waiting, INPUT), "synchronisation": (together, SYNCHRONISATION), "overhead": (fixed, OVERHEAD)}
    sure = {name: share for name, (share, least) in shares.items() if share and share.above(least)}
    undecided = [name for name, (share, least) in shares.items() if share and share.above(least) is None]
    if sure:
        name = max(sure, key=lambda n: sure[n].value)
    elif undecided or curve is None or curve.noisy:
        name = "too-noisy"
    else:
        name = "none"
    return StepDiagnosis(name, _explanation(name, sure.get(name), undecided, size), waiting, together, fixed)


def _overhead(curve: Curve | None, size: int) -> Share | None:
    if curve is None or len(curve.gains) < 2:  # two points fit any line
        return None
    total = curve.fixed_seconds + curve.per_sample_seconds * size
    value = curve.fixed_seconds / total if total else 0.0
    # The fit's error is the uncertainty; a bad fit shows nothing in either direction.
    slack = curve.fit_error if curve.fit_error <= TRUSTED_FIT and not curve.noisy else 1.0
    return Share(value, max(0.0, value - slack), min(1.0, value + slack))


def _explanation(name: str, share: Share | None, undecided: list[str], size: int) -> str:
    part = f"{share.value:.0%}" if share else ""
    if name == "input":
        return (
            f"{part} of a step waits for data: a step on a cached batch is that much faster than one on the loader's. "
            "Use more loader workers (--workers), cheaper decoding or faster storage; a larger batch will not help."
        )
    if name == "synchronisation":
        return (
            f"{part} of a step is spent on communication between ranks. Accumulate more micro batches per step, use "
            "larger ones or a faster network; check that gradients are reduced once per step."
        )
    if name == "overhead":
        return (
            f"{part} of a step does not depend on the batch at micro_batch_size {size}: kernel launches, Python, the "
            "optimizer. A larger micro batch costs little time; if memory does not allow it, compile or fuse."
        )
    if name == "too-noisy":
        about = f"about {' and '.join(undecided)} " if undecided else ""
        return f"the times vary too much for a verdict {about}here. Probe on a quiet machine, or with more --seconds."
    return "no single cause: the time of a step grows with the batch, so throughput is saturated."
