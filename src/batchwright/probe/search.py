"""Find the largest size that runs in few trials: predict it, then verify.

Memory against batch size is a maximum of straight lines with non-negative intercepts (memory during the backward pass,
or during the optimizer's step). So it is convex, and for measured points:

- If B is the largest size that fits and P its peak, sizes up to B × limit / P certainly run.
- The line through two fitting points is below the memory above them: the limit that it predicts is never too small, and
  exact if both points are on the last segment.
- Points on the flat segment (the optimizer's step is the peak) show no slope: larger sizes are needed.

Then the predicted size is run, and the next one above it. If the prediction was wrong, bisection follows. Without peaks
or a limit, as for a command on a device that reports neither, sizes double until one fails; then bisection follows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from math import isqrt

from batchwright.core.errors import NothingFitsError

from .records import Trial

START = 8  # runs with most models, and is beyond the optimizer's flat segment of many; if it fails, smaller ones follow
TOLERANCE = 100  # the first failing size is within 1/100 above the answer
_PREDICTIONS = 4  # after this many trials, every second one ignores the prediction
LARGEST = 1 << 24  # samples; without a cap, the search for a job that needs no memory would not end

Run = Callable[[int, int | None], Trial]


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
    start: int = START,
    slope: float | None = None,
) -> Limit:
    """Search with `run(size, predicted_peak_bytes)`, which runs one trial; `slope` is bytes per sample, if known.

    >>> memory = lambda size: 100 + 7 * size
    >>> tried = []
    >>> def run(size, predicted):
    ...     tried.append(size)
    ...     return Trial(size, "fits" if memory(size) <= 1000 else "oom", "limit", memory(size), 1000)
    >>> find_limit(run), tried
    (Limit(largest=128, first_failing=129), [8, 51, 128, 129])
    """
    top = (LARGEST if cap is None else cap) // multiple_of
    search = _Search(top + 1, exact, multiple_of, None if slope is None else Fraction(slope) * multiple_of)
    guess: int | None = max(1, min(top, round(start / multiple_of)))
    while guess is not None:
        predicted = search.predicted_peak(guess)
        trial = run(guess * multiple_of, predicted)
        search.learn(guess, trial)
        guess = search.next_guess()
    if not search.low:
        raise _nothing_fits(search, multiple_of)
    failing = search.high * multiple_of if search.high <= top or search.failed_above else None
    return Limit(search.low * multiple_of, failing)


class _Search:
    """What is known, in units of `multiple_of` samples: `low` ran, `high` failed (or is above the cap)."""

    def __init__(self, beyond: int, exact: bool, unit: int, slope: Fraction | None) -> None:
        self.low, self.high = 0, beyond
        self.points: dict[int, int] = {}  # fitting size -> peak
        self.trials: list[Trial] = []
        self.limit: int | None = None
        self.failed_above = False
        self._exact, self._unit, self._given = exact, unit, slope
        self._first_failure: int | None = None
        self._misses = self._hits = 0  # predicted to fit but failed (total); predicted to fail but fitted (in a row)

    def learn(self, size: int, trial: Trial) -> None:
        self.trials.append(trial)
        self.limit = trial.limit_bytes or self.limit
        predicted = self._predicted_limit()
        if trial.fits:
            self._hits = self._hits + 1 if predicted is not None and size > predicted else 0
            self.low = max(self.low, size)
            if trial.peak_memory_bytes:
                self.points[size] = trial.peak_memory_bytes
        else:
            self._misses += predicted is not None and size <= predicted
            self.high, self.failed_above = min(self.high, size), True
            self._first_failure = self._first_failure or len(self.trials)

    def next_guess(self) -> int | None:
        low, high = self.low, self.high
        if high - low <= self._window(low) if self.failed_above else high - low <= 1:
            return None
        guess = self._guess()
        spent = len(self.trials) - (
            self._first_failure or _PREDICTIONS
        )  # before the first failure, more predictions are allowed
        if spent >= _PREDICTIONS and spent % 2:
            # Predictions do not converge (noise, many segments): every second step bisects or doubles.
            guess = self._middle() if self.failed_above else max(guess, 2 * low)
        return min(max(guess, low + 1), high - 1)

    def _window(self, size: int) -> int:
        """How far above `size` the first failure may be."""
        return 1 if self._exact else max(1, size * self._unit // TOLERANCE // self._unit)

    def _guess(self) -> int:
        low, high, limit = self.low, self.high, self.limit
        if not low:
            return high // 2
        if limit is None or low not in self.points:
            return self._middle() if self.failed_above else low * 2
        predicted = self._predicted_limit()
        safe = low * limit // self.points[low] if self.points[low] else low * 2
        if predicted is None and not self.failed_above:
            # On a flat segment take larger steps; after one point, a size that certainly runs.
            return max(safe, 4 * low) if len(self.points) > 1 else max(safe, low + max(1, low // 4))
        if predicted is None or predicted >= high:
            if not self.failed_above:
                return high - 1  # the cap is predicted to run
            # So near to the prediction, the allocator's granularity is the most likely reason.
            if predicted and self._misses == 1 and high < 4 * low:
                return high - max(self._window(low), high // 50)
            # A size that certainly runs also gives a point on the last segment; if it is hardly larger, bisect.
            return safe if (safe - low) * 4 >= high - low else self._middle()
        if predicted > low:
            return predicted
        return low + (self._window(low) << min(self._hits, 30))  # verify above; further each time a size still runs

    def _middle(self) -> int:
        """The middle of low and high: arithmetic if they are near, geometric if they are not."""
        low, high = self.low, self.high
        return isqrt(low * high) if high > 2 * low else (low + high) // 2

    def _slope(self) -> tuple[int, Fraction] | None:
        """The largest fitting size with a peak, and the slope there: measured over a wide range, or given."""
        if not self.points:
            return None
        ordered = sorted(self.points)
        last = ordered[-1]
        # The nearest point gives the steepest line (convex), unless noise made it flat: then a farther one does.
        base = [size for size in ordered[:-1] if size <= 0.95 * last] or ordered[:-1]
        slopes = [Fraction(self.points[last] - self.points[size], last - size) for size in base]
        measured = max(slopes, default=Fraction(0))
        # If filling the rest would take 10,000 times this size, the slope is noise on a flat segment.
        room = max(0, (self.limit or 0) - self.points[last])
        if measured * 10_000 * last < room:
            measured = Fraction(0)
        best = max(measured, self._given or Fraction(0))  # convex: the slope above is at least each of them
        return (last, best) if best > 0 else None

    def _predicted_limit(self) -> int | None:
        found = self._slope()
        if found is None or self.limit is None:
            return None
        last, slope = found
        return last + int((self.limit - self.points[last]) // slope)

    def predicted_peak(self, size: int) -> int | None:
        """The peak of a size by the line through the measured points, in bytes."""
        found = self._slope()
        return (
            None if found is None or self.limit is None else int(self.points[found[0]] + found[1] * (size - found[0]))
        )


def _nothing_fits(search: _Search, multiple_of: int) -> NothingFitsError:
    trials = search.trials
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
