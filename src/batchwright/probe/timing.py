"""Step times with what can be said of them: warm-up left out, a median with its interval, and how contended it was."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median, stdev

# Half the interval's width over the median above which a time is no measurement (assumption: doubling gains of
# interest are 5-100%, so an uncertainty of 15% on each side would hide most of them).
NOISY = 0.15
# The share of all processors that other programs used meanwhile, above which a time is remarked upon (assumption).
CONTENDED = 0.2


@dataclass(frozen=True)
class Timing:
    """Seconds of a step: the median of `steps` of them, an interval around it, and the processor's part.

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
    """The share of all processors that other programs used meanwhile; None where the kernel does not say."""
    switches: int | None = None
    """Involuntary context switches while measuring."""

    @property
    def noise(self) -> float:
        """Half the interval's width, as a share of the median."""
        return (self.high - self.low) / 2 / self.seconds if self.seconds else math.inf

    @property
    def noisy(self) -> bool:
        """Whether nothing should be concluded from it."""
        return self.noise > NOISY or self.steps < 3

    def merged(self, other: Timing) -> Timing:
        """Both as one: the middle of the two, and an interval that holds both."""
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
        """The timing of consecutive steps: the warm-up is detected and left out."""
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
    """How many first steps are slower than all that follows: at least one, at most half.

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
