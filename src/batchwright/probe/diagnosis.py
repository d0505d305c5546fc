"""Why a step is not faster: three contrasts, each with its uncertainty, said in words with what to do.

1. Real loader against a cached batch: the difference is waiting for input.
2. Accumulate-only against stepping, on several ranks: the difference is mostly synchronisation.
3. The fit's constant against B: fixed overhead per step, or saturation.

A share whose interval lies across the threshold is not decided: the verdict is `too-noisy`, unless another one is sure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .curve import Curve
from .timing import Timing

# Shares of a step from which on a cause is the bottleneck (assumption; DL4J#8130 proposed to warn at 30% of waiting).
INPUT, SYNCHRONISATION, OVERHEAD = 0.15, 0.20, 0.30
# How far the times may lie from t = a + bB before its constant means nothing (measured: 12% on a quiet machine).
TRUSTED_FIT = 0.25


@dataclass(frozen=True)
class Share:
    """A part of a step's time, between `low` and `high` as far as noise allows to say."""

    value: float
    low: float
    high: float

    def above(self, threshold: float) -> bool | None:
        """Whether it is above the threshold; None when that cannot be said."""
        return True if self.low > threshold else False if self.high < threshold else None


@dataclass(frozen=True)
class Diagnosis:
    """The bottleneck, the shares it rests on, and the words for it."""

    bottleneck: str
    """none | input | synchronisation | overhead | too-noisy"""
    words: str
    input: Share | None = None
    synchronisation: Share | None = None
    overhead: Share | None = None


def difference(slow: Timing, fast: Timing) -> Share:
    """The part of `slow` that `fast` does without.

    >>> difference(Timing.of([2.0] * 9), Timing.of([1.0] * 9)).value
    0.5
    """
    return Share(
        value=max(0.0, 1 - fast.seconds / slow.seconds),
        low=max(0.0, 1 - fast.high / slow.low),
        high=max(0.0, 1 - fast.low / slow.high),
    )


def diagnose(contrasts: Mapping[str, Timing], curve: Curve | None, size: int, ranks: int) -> Diagnosis:
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
    return Diagnosis(name, _words(name, sure.get(name), undecided, size), waiting, together, fixed)


def _overhead(curve: Curve | None, size: int) -> Share | None:
    if curve is None or len(curve.gains) < 2:  # two points fit any line
        return None
    total = curve.fixed_seconds + curve.per_sample_seconds * size
    value = curve.fixed_seconds / total if total else 0.0
    # The fit's own error is its uncertainty; a fit that does not hold says nothing either way.
    slack = curve.fit_error if curve.fit_error <= TRUSTED_FIT and not curve.noisy else 1.0
    return Share(value, max(0.0, value - slack), min(1.0, value + slack))


def _words(name: str, share: Share | None, undecided: list[str], size: int) -> str:
    part = f"{share.value:.0%}" if share else ""
    if name == "input":
        return (
            f"{part} of a step waits for data: a cached batch is that much faster than the loader. "
            "More loader workers (--workers), cheaper decoding or data nearer to the host; a larger batch will not help."
        )
    if name == "synchronisation":
        return (
            f"{part} of a step is spent between ranks. Accumulate more micro batches per step, use larger ones, or a "
            "faster link; check that gradients are reduced once per step."
        )
    if name == "overhead":
        return (
            f"{part} of a step does not depend on the batch at micro_batch_size {size}: launches, Python, the "
            "optimizer. A larger micro batch is nearly free; where memory forbids it, compile or fuse."
        )
    if name == "too-noisy":
        about = f"about {' and '.join(undecided)} " if undecided else ""
        return f"the times vary too much for a verdict {about}here. Probe on a quiet machine, or with more --seconds."
    return "none stands out: time goes with the batch, so throughput is saturated."
