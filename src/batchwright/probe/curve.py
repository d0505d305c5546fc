"""Throughput against batch size: t = a + b × B, what each doubling gains, and where more stops being worth it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from .timing import Timing

SATURATED = 0.90  # of the best throughput: the design's definition of the saturating size
# A larger size is worth using while it is this much faster than all smaller ones (DeepSpeed's plateau, 5%).
WORTHWHILE = 0.05
_MOST_POINTS = 7


@dataclass(frozen=True)
class Gain:
    """From one measured size to the next: the sizes' ratio, the throughput's, and whether noise could explain it."""

    smaller: int
    larger: int
    ratio: float
    gain: float
    certain: bool


@dataclass(frozen=True)
class Curve:
    """The fit and the sizes that follow; `fixed_seconds` is a, `per_sample_seconds` is b."""

    fixed_seconds: float
    per_sample_seconds: float
    fit_error: float
    """The largest relative distance of a measured time from the fit."""
    gains: tuple[Gain, ...]
    best: int
    saturating: int
    predicted_saturating: int | None
    """(a/b) × 0.9/0.1: where the fit reaches 90% of its asymptote; a prediction, never recommended unmeasured."""
    largest_worthwhile: int
    noisy: bool


def sizes(largest: int, multiple_of: int = 1) -> list[int]:
    """Log-spaced sizes up to `largest`, itself included: powers of two, thinned where there are many.

    >>> sizes(83), sizes(96, 16)
    ([1, 2, 4, 16, 32, 64, 83], [16, 32, 64, 96])
    """
    units = largest // multiple_of
    found = {units}
    power = 1
    while power < units:
        # The last power is left out where it is nearly the maximum: it would tell nothing new.
        if power * 1.25 <= units:
            found.add(power)
        power *= 2
    ordered = sorted(found)
    if len(ordered) > _MOST_POINTS:  # evenly spaced among them
        last = len(ordered) - 1
        ordered = [ordered[round(i * last / (_MOST_POINTS - 1))] for i in range(_MOST_POINTS)]
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
    """The curve of measured timings by size; of one size there is nothing but itself."""
    ordered = sorted(timings)
    speed = {size: size / timings[size].seconds for size in ordered}
    best = max(ordered, key=lambda size: speed[size])
    a, b, error = fit({size: timings[size].seconds for size in ordered})
    worthwhile = ordered[0]
    for size in ordered[1:]:
        if speed[size] > speed[worthwhile] * (1 + WORTHWHILE):
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
        noisy=_noisy(list(timings.values())),
    )


def _gain(smaller: int, larger: int, timings: Mapping[int, Timing]) -> Gain:
    one, two = timings[smaller], timings[larger]
    ratio = larger / smaller
    gain = ratio * one.seconds / two.seconds
    least, most = ratio * one.low / two.high, ratio * one.high / two.low
    return Gain(smaller, larger, ratio, gain, certain=least > 1 or most < 1)


def _noisy(timings: Sequence[Timing]) -> bool:
    """Refuse to rank speeds when more than a third of the timings are no measurements."""
    return sum(t.noisy for t in timings) * 3 > len(timings)
