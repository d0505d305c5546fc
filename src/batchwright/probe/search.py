"""Predict, then verify: the largest size that runs, in a handful of trials.

Memory against batch size is a maximum of straight lines with intercepts that are not negative (what lives during the
backward pass, or during the optimizer's step). So it is convex, and three things hold for measured points:

- through the origin and the largest fitting point (B, P) goes a line that memory never exceeds above B:
  B × limit / P runs for certain;
- the secant through two fitting points under-estimates memory above them: the limit it predicts is never too small,
  and exact when both points lie on the last segment;
- points on the flat segment (the optimizer is the peak) show no slope: go on to larger ones.

Then the prediction is run, and one size above it. After a miss the bracket is closed by bisection. Without peaks or a
limit, as for a command on a device that reports neither, sizes double until one fails and bisection does the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from math import isqrt

from batchwright.core.errors import NothingFitsError

from .records import Trial

START = 8  # fits most models, and is past the optimizer's flat segment of many; smaller ones are tried when it fails
TOLERANCE = 100  # the first failing size lies within 1/100 above the answer
_PATIENCE = 4
LARGEST = 1 << 24  # samples; without a cap, a job that needs no memory would never end

Run = Callable[[int, int | None], Trial]


@dataclass(frozen=True)
class Limit:
    """The largest size that ran, and the smallest above it that did not (None: the cap was reached first)."""

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
    """Search with `run(size, predicted_peak_bytes)`, which makes one trial; `slope` is bytes per sample, if known.

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
    """What is known, in units of `multiple_of` samples: `low` ran, `high` did not (or is above the cap)."""

    def __init__(self, beyond: int, exact: bool, unit: int, slope: Fraction | None) -> None:
        self.low, self.high = 0, beyond
        self.points: dict[int, int] = {}  # fitting size -> peak
        self.trials: list[Trial] = []
        self.limit: int | None = None
        self.failed_above = False
        self._exact, self._unit, self._given = exact, unit, slope
        self._first_failure: int | None = None
        self._misses = self._hits = 0  # predicted to fit and did not, in all; predicted not to fit and did, in a row

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
        spent = len(self.trials) - (self._first_failure or _PATIENCE)  # on the way up there is less to lose
        if spent >= _PATIENCE and spent % 2:
            # Predictions do not converge here (noise, many kinks): every other step halves or doubles what is left.
            guess = self._middle() if self.failed_above else max(guess, 2 * low)
        return min(max(guess, low + 1), high - 1)

    def _window(self, size: int) -> int:
        """How near above `size` a failure has to be."""
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
            # A flat segment is left by larger steps, one point alone by a size that surely runs.
            return max(safe, 4 * low) if len(self.points) > 1 else max(safe, low + max(1, low // 4))
        if predicted is None or predicted >= high:
            if not self.failed_above:
                return high - 1  # the cap is predicted to run
            if (
                predicted and self._misses == 1 and high < 4 * low
            ):  # from so near most likely the allocator's granularity
                return high - max(self._window(low), high // 50)
            # A size that is certain to run also gives a point on the last segment; where it is hardly larger, bisect.
            return safe if (safe - low) * 4 >= high - low else self._middle()
        if predicted > low:
            return predicted
        return low + (self._window(low) << min(self._hits, 30))  # verify above; further each time it still runs

    def _middle(self) -> int:
        """Half of what is left: of the size where the bracket is narrow, of its magnitude where it is wide."""
        low, high = self.low, self.high
        return isqrt(low * high) if high > 2 * low else (low + high) // 2

    def _slope(self) -> tuple[int, Fraction] | None:
        """The largest fitting size with a peak, and the slope there: measured over a wide base, or given."""
        if not self.points:
            return None
        ordered = sorted(self.points)
        last = ordered[-1]
        # The nearest point gives the steepest secant (convex), unless noise made that one flat: then a farther one does.
        base = [size for size in ordered[:-1] if size <= 0.95 * last] or ordered[:-1]
        slopes = [Fraction(self.points[last] - self.points[size], last - size) for size in base]
        measured = max(slopes, default=Fraction(0))
        # A slope that would take 10,000 times this size to fill what is left is noise on a flat segment.
        room = max(0, (self.limit or 0) - self.points[last])
        if measured * 10_000 * last < room:
            measured = Fraction(0)
        best = max(measured, self._given or Fraction(0))  # convex: the true slope ahead is at least each of them
        return (last, best) if best > 0 else None

    def _predicted_limit(self) -> int | None:
        found = self._slope()
        if found is None or self.limit is None:
            return None
        last, slope = found
        return last + int((self.limit - self.points[last]) // slope)

    def predicted_peak(self, size: int) -> int | None:
        """What the line through the measured points says of a size, in bytes."""
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
