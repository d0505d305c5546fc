"""Find the largest size that runs in few trials: predict it, then verify.

Memory against batch size is a maximum of straight lines with non-negative intercepts (memory during the backward pass,
or during the optimizer's step). So it is convex, and for measured points:

- If B is the largest size that fits and P its peak, sizes up to B × limit / P certainly run.
- The line through two fitting points is below the memory above them: the limit that it predicts is never too small, and
  exact if both points are on the last segment.
- Points on a flat segment (the optimizer's step is the peak) say nothing about the slope above: larger sizes are needed,
  but not the largest, since the next segment may be steep.

An estimate knows all segments, and lacks only what it cannot see (libraries, the allocator). The difference from a
measured peak is nearly constant, so one trial and the estimate predict the limit.

Then the predicted size is run, and the next one above it. If the prediction was wrong, the search continues between the
largest size that ran and the smallest that failed. Without peaks or a limit, as for a command on a device that reports
neither, sizes double until one fails; then bisection follows.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import isqrt

from batchwright.core.errors import NothingFitsError

from .records import Trial

START = 8  # runs with most models, and is beyond the optimizer's flat segment of many; if it fails, smaller ones follow
TOLERANCE = 100  # the first failing size is within 1/100 above the answer
LARGEST = 1 << 24  # samples; without a cap, the search for a job that needs no memory would not end

# Peaks are assumed to vary by this share between two runs of one size; by more, if a larger size had a smaller peak.
_NOISE = 0.001
# A slope is used for a prediction up to this many times the largest size that ran.
_FARTHEST = 16
# On a flat segment the size grows by this factor.
_EXPLORE = 16
_DOUBTFUL = 0.2  # a slope that is less certain than this share predicts nothing
# The constants from here on were chosen on simulated programs (tests/probe/test_search.py).
_WIDE, _STRAIGHT = 2.5, 0.75  # a slope over a gap this wide is not the last one if it is this much above the one before
_APART = 5  # two sizes show a slope if they are a fifth apart
_MISS = 3  # a prediction this many times as far as its points are apart is mostly missed by little
_PATIENCE = 9  # after this many trials, every second one bisects

Run = Callable[[int, int | None, int], Trial]


@dataclass(frozen=True)
class Limit:
    """The largest size that ran, and the smallest size above it that failed (None: the cap was reached first)."""

    largest: int
    first_failing: int | None


def find_limit(
    run: Run,
    *,
    cap: int | None = None,
    multiple_of: int = 1,
    exact: bool = False,
    shape: Mapping[int, int] | None = None,
    memory: int | None = None,
) -> Limit:
    """Search with `run(size, predicted_peak_bytes, trials_left)`, which runs one trial.

    `shape` is an estimate, as peaks of a few sizes; `memory` is the limit, if it is known before the first trial.

    >>> memory = lambda size: 100 + 7 * size
    >>> tried = []
    >>> def run(size, predicted, left):
    ...     tried.append(size)
    ...     return Trial(size, "fits" if memory(size) <= 1000 else "oom", "limit", memory(size), 1000)
    >>> find_limit(run), tried
    (Limit(largest=128, first_failing=129), [8, 128, 129])
    """
    top = (LARGEST if cap is None else cap) // multiple_of
    known = Known(top, multiple_of, exact, _Shape.of(shape, multiple_of), memory)
    trials: list[Trial] = []
    while (size := known.next_size()) is not None:
        trial = run(size * multiple_of, known.predicted_peak(size), known.trials_left(size))
        trials.append(trial)
        known = known.with_trial(size, trial.fits, trial.peak_memory_bytes, trial.limit_bytes)
    if not known.low:
        raise _nothing_fits(trials, multiple_of)
    return Limit(known.low * multiple_of, known.high * multiple_of if known.fails else None)


@dataclass(frozen=True)
class _Shape:
    """Estimated peaks as straight lines between a few sizes; beyond the last one the last line continues."""

    sizes: tuple[float, ...]
    peaks: tuple[float, ...]

    @classmethod
    def of(cls, points: Mapping[int, int] | None, unit: int) -> _Shape | None:
        """None if there are too few points, or they do not grow."""
        ordered = sorted((points or {}).items())
        if len(ordered) < 2 or ordered[-1][1] <= ordered[-2][1]:
            return None
        return cls(tuple(size / unit for size, _ in ordered), tuple(float(peak) for _, peak in ordered))

    def at(self, size: float) -> float:
        """The estimated peak of a size."""
        right = min(max(1, bisect_left(self.sizes, size)), len(self.sizes) - 1)
        (x, y), (x2, y2) = ((self.sizes[i], self.peaks[i]) for i in (right - 1, right))
        return y + (y2 - y) / (x2 - x) * (size - x)


@dataclass(frozen=True)
class Known:
    """All that is known after some trials, in units of `unit` samples. `low` ran; `high` failed or is above the cap."""

    top: int
    unit: int = 1
    exact: bool = False
    shape: _Shape | None = None
    limit: int | None = None
    points: Mapping[int, int] = field(default_factory=dict[int, int])
    """Fitting size -> peak."""
    low: int = 0
    fails: tuple[int, ...] = ()
    """Sizes that failed, in the order of the trials."""
    trials: int = 0
    bounds: int = 0
    """How many trials in a row ran although the prediction was that they fail."""

    @property
    def high(self) -> int:
        """The smallest size that failed, or the first above the cap."""
        return min(self.fails, default=self.top + 1)

    def with_trial(self, size: int, fits: bool, peak: int | None, limit: int | None) -> Known:
        """What is known after one more trial."""
        predicted = self._predicted()
        now = replace(self, trials=self.trials + 1, limit=limit or self.limit)
        if not fits:
            return replace(now, fails=(*self.fails, size))
        beyond = predicted is not None and size > predicted
        points = {**self.points, size: peak} if peak else self.points
        return replace(now, low=max(self.low, size), points=points, bounds=self.bounds + 1 if beyond else 0)

    def next_size(self) -> int | None:
        """The size of the next trial; None when the answer is known."""
        low, high = self.low, self.high
        if not self.trials:
            return self._first()
        if high - low <= (self._window() if self.fails else 1):
            return None
        guess = self._guess()
        if self.fails and self.trials >= _PATIENCE and self.trials % 2:
            guess = self._middle()  # predictions do not converge (noise, many segments)
        return min(max(guess, low + 1), high - 1)

    def predicted_peak(self, size: int) -> int | None:
        """The peak of a size by what is known."""
        line = self._line()
        return None if line is None else int(line.at(size))

    def trials_left(self, size: int) -> int:
        """How many trials follow that of `size`, if each of them ends as predicted."""
        known, left = self, -1
        at: int | None = size
        while at is not None and left < 20:
            line = known._line()
            if line is None or known.limit is None:
                # A prediction needs another point; then two trials verify it.
                return left + (3 if not known.fails else max(3, (known.high - known.low).bit_length() - 1))
            peak = int(line.at(at))
            known = known.with_trial(at, peak <= known.limit, peak, known.limit)
            left, at = left + 1, known.next_size()
        return left

    def _first(self) -> int:
        """The first size: by an estimate where half of the room is used, so that activations are the peak."""
        start = START / self.unit
        if self.shape and self.limit:
            least = self.shape.at(1)
            start = self._solve(lambda size: self.shape.at(size) if self.shape else 0.0, (least + self.limit) / 2, 0)
        return max(1, min(self.top, round(start)))

    def _window(self) -> int:
        """How far above `low` the first failure may be."""
        return 1 if self.exact else max(1, self.low * self.unit // TOLERANCE // self.unit)

    def _guess(self) -> int:
        low, high, limit, window = self.low, self.high, self.limit, self._window()
        if not low:
            return high // 2 if high <= START else max(1, high // 4)
        if limit is None or low not in self.points:
            return self._middle() if self.fails else low * 2
        if self.fails and high - low <= 2 * window:
            return (low + high) // 2  # either answer ends the search
        line, predicted = self._line(), self._predicted()
        safe = max(low, low * limit // self.points[low])
        if len(self.points) == 1 and self.fails and not self.shape and safe > low + low // _APART:
            return safe  # a second point, for a slope
        if line is None or predicted is None:  # flat, as far as is known
            return int(safe ** (2 / 3) * high ** (1 / 3)) if self.fails else max(safe, low * _EXPLORE)
        if predicted - low < window:
            return low + (window << min(self.bounds, 30))  # verify; further each time a size still runs
        if line.vague and not self.fails:
            return min(_between(safe, predicted), _FARTHEST * low)
        if line.bent and predicted > low + low // 10:  # the slope may still grow; a size that certainly runs shows it
            return safe if safe > low + low // _APART else _between(safe, min(predicted, high))
        if self.fails and predicted > high - window:
            # A miss: a small one, if it is near to the points of the line.
            near = predicted - high <= window // 2 and high - low <= _MISS * line.reach
            least = high - 1 if self.exact else -(-high * TOLERANCE // (TOLERANCE + 1))
            if line.shape:
                return max(self._middle(), high - (high - least << (len(self.fails) - 1)))
            return least if near else max(safe, self._middle())
        return predicted if line.shape or self.fails else min(predicted, max(safe, _FARTHEST * low))

    def _middle(self) -> int:
        """The middle of what ran and what failed."""
        return _between(self.low, self.high)

    def _line(self) -> _Line | None:
        """How peaks go on above the largest fitting size; None if no slope is known."""
        if not self.points:
            return None
        shape, last = self.shape, max(self.points)
        over = {size: peak - (shape.at(size) if shape else 0.0) for size, peak in self.points.items()}
        noise = self._noise() * self.points[last]
        # Of all chords to the last point, the one that is certainly the steepest: memory is convex, and far points have
        # less noise.
        chords = [((over[last] - over[b]) / (last - b), noise / (last - b), b) for b in over if b != last]
        slope, doubt, base = max(chords, key=lambda c: c[0] - c[1], default=(0.0, 0.0, 0))
        if shape is not None:
            return _Line(last, over[last], slope if abs(slope) > doubt else 0.0, last, False, False, shape)
        if slope <= doubt:
            return None
        before = [(over[base] - over[b]) / (base - b) for b in over if b < base]
        alone = last > _WIDE * base and not any(base < b < last for b in over)
        bent = alone and bool(before) and max(before) + noise / base < _STRAIGHT * slope
        return _Line(last, over[last], slope, last - base, bent, doubt > _DOUBTFUL * slope, None)

    def _noise(self) -> float:
        """The share by which peaks vary: peaks that fall with the size show more than is assumed."""
        peaks = [self.points[size] for size in sorted(self.points)]
        drops = [(one - two) / one for one, two in pairwise(peaks)]
        return max([_NOISE, *(2 * drop for drop in drops)])

    def _predicted(self) -> int | None:
        """The largest size whose predicted peak is within the limit."""
        line = self._line()
        if line is None or self.limit is None:
            return None
        return self._solve(line.at, self.limit, line.last)

    def _solve(self, peak: Callable[[float], float], limit: float, low: int) -> int:
        """The largest size from `low` on, up to the cap, with a peak within the limit."""
        high = self.top + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if peak(middle) <= limit else (low, middle)
        return low


@dataclass(frozen=True)
class _Line:
    """A peak is `over` at `last`, plus `slope` for every further size, plus the shape's peak if there is a shape."""

    last: int
    over: float
    slope: float
    reach: int
    """The distance of the points that the slope comes from."""
    bent: bool
    """Whether the slope is probably smaller than that of the last segment."""
    vague: bool
    """Whether noise may be a large part of the slope."""
    shape: _Shape | None

    def at(self, size: float) -> float:
        return self.over + self.slope * (size - self.last) + (self.shape.at(size) if self.shape else 0.0)


def _between(low: int, high: int) -> int:
    """The middle: arithmetic if they are near, geometric if they are not."""
    return isqrt(low * high) if high > 4 * low else (low + high) // 2


def _nothing_fits(trials: list[Trial], multiple_of: int) -> NothingFitsError:
    last = min(trials, key=lambda t: t.micro_batch_size)
    tried = ", ".join(str(t.micro_batch_size) for t in trials)
    within = f" within {last.limit_bytes:,} bytes" if last.limit_bytes else ""
    what = "timed out" if last.status == "timeout" else "ran out of memory"
    remedy = (
        f"Nearest: sizes below {multiple_of}, without --multiple-of."
        if multiple_of > 1
        else "Nearest: more --timeout."
        if last.status == "timeout"
        else "Nearest: more memory, shorter sequences, activation checkpointing, or a smaller optimizer state."
    )
    return NothingFitsError(
        f"nothing fits: micro_batch_size={last.micro_batch_size} {what}{within} ({last.reason}). Tried {tried}. {remedy}",
        field="micro_batch_size",
        given=last.micro_batch_size,
    )
