"""Find the largest size that runs in few trials: predict it, then verify.

Memory against batch size is a maximum of straight lines with non-negative intercepts (memory during the backward pass,
or during the optimizer's step). So it is convex: from the largest size B that ran with a peak of P, sizes up to
B × limit / P certainly run, and the line through two sizes that ran never predicts too small a limit. Its prediction is
exact if both sizes are on the last segment. A size that runs tells its peak; one that fails tells nothing else. So the
search has three parts:

1. Find a size on the last segment. Points on a flat segment (the optimizer's step is the peak) say nothing about the
   slope above, so this is bisection on a logarithmic scale.
2. Find the last slope. A line may span the end of a segment if its two sizes are far apart, or if the points below
   the two show no earlier one. Then a size between the certain one and the predicted one follows: it most likely runs.
3. Verify: the predicted size runs, and one within 1% above it fails. If the prediction is missed by little, noise is
   the likely reason, and the next size is near the failure, but not nearer than the trials that are left can close up.

An estimate knows all segments, and lacks only what it cannot see (libraries, the allocator). The difference from a
measured peak is nearly constant, so one trial and the estimate predict the limit: the search begins with part 3. An estimate
may be far off (samples that are longer than the ones it has seen, kernels with workspaces). Once a trial shows that, the
search goes on without it, and trials that it has cost before the first size ran do not count.

Some programs are not convex: with a loss in chunks, memory grows more slowly from some size on. Then sizes above the
prediction run, and the line through the two largest counts.

A search that is not exact ends after a bounded number of trials, with the sizes that it has. Without peaks or a limit,
as for a command on a device that reports neither, sizes double until one fails; then bisection follows, without a bound.
The same holds if a size fails that must run by its peak: then something else than this memory is the limit.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from batchwright.core.errors import NothingFitsError

from .records import Trial

START = 8  # runs with most models, and is beyond the optimizer's flat segment of many; if it fails, smaller ones follow
TOLERANCE = 100  # the first failing size is within 1/100 above the answer
# Trials of a search that is not exact, with an estimate and without one. Few searches need more to come within TOLERANCE.
MOST_ESTIMATED, MOST = 5, 8
LARGEST = 1 << 24  # samples; without a cap, the search for a job that needs no memory would not end

# Chosen on simulated programs (tests/probe/test_search.py).
_NOISE = 0.002  # peaks are assumed to vary by this share between two runs of one size
_EXPLAINED = 0.95  # peaks do not explain failures below this share of the size that must run: bisection follows
# An estimate counts no more if a size fails below this share of the predicted limit, if a trial moves that limit by more, or
# if its slope is less than this share of the measured one, or the reverse.
_FAR = 0.75
_SPREAD = 1.125  # times the smallest size that ran: a line from nearer sizes may be noise
_STRAIGHT = 0.9  # two slopes are of one segment if the smaller one is at least this share of the other
_USUAL = 1 << 14  # samples; few programs have a larger limit
_FARTHEST = 4  # a slope is used up to this many times the largest size that ran; above, a segment may end
_NEAR = 2  # between two sizes, one less than this many times the other, a segment seldom ends
_APART = 2.25  # a size that certainly runs shows a slope if it is this many times the largest that ran
# How far to go from the largest size that certainly runs towards the smallest that may not, on a logarithmic scale: less
# than half, if a failure would tell less than a peak.
_SHORT = 0.36

Run = Callable[[int, int | None, int], Trial]


@dataclass(frozen=True)
class Limit:
    """The largest size that ran, and the smallest size above it that failed (None: the cap was reached first)."""

    largest: int
    first_failing: int | None
    ended_early: bool = field(default=False, repr=False)
    """Whether the trials were used up before the two were within the tolerance."""
    refuted: bool = field(default=False, repr=False)
    """Whether an estimate was far off, so that the search went on without it."""


def find_limit(
    run: Run,
    *,
    cap: int | None = None,
    multiple_of: int = 1,
    exact: bool = False,
    shape: Mapping[int, int] | None = None,
    memory: int | None = None,
    stored: Iterable[int] = (),
) -> Limit:
    """Search with `run(size, predicted_peak_bytes, trials_left)`, which runs one trial.

    `shape` is an estimate, as peaks of a few sizes; `memory` is the limit, if it is known before the first trial.
    `stored` are sizes whose trials cost nothing, in the order in which they ran: they come first.

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

    def after(size: int) -> Known:
        trial = run(size * multiple_of, known.predicted_peak(size), known.trials_left(size))
        trials.append(trial)
        return known.with_trial(size, trial.fits, trial.peak_memory_bytes, trial.limit_bytes)

    for size in stored:
        if size % multiple_of == 0 and known.low < size // multiple_of < known.high:
            known = after(size // multiple_of)
    while (size := known.next_size()) is not None:
        known = after(size)
    if not known.low:
        raise _nothing_fits(trials, multiple_of)
    first_failing = known.high * multiple_of if known.fails else None
    early = not known.is_answered()
    return Limit(known.low * multiple_of, first_failing, ended_early=early, refuted=known.refuted)


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

    @property
    def slope(self) -> float:
        """The slope of the last line, which is that of the backward."""
        return (self.peaks[-1] - self.peaks[-2]) / (self.sizes[-1] - self.sizes[-2])

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
    """How many trials in a row ran although they were near the predicted limit or above it."""
    misses: int = 0
    """How many trials in a row failed."""
    refuted: bool = False
    """Whether there was an estimate, which trials have shown to be far off."""
    lost: int = 0
    """Trials that a refuted estimate has cost before the first size ran: they do not count."""

    @property
    def high(self) -> int:
        """The smallest size that failed, or the first above the cap."""
        return min(self.fails, default=self.top + 1)

    def with_trial(self, size: int, fits: bool, peak: int | None, limit: int | None) -> Known:
        """What is known after one more trial."""
        predicted = self._predicted()
        now = replace(self, trials=self.trials + 1, limit=limit or self.limit)
        if fits:
            bound = predicted is not None and size >= predicted - self._window() // 2
            points = {**self.points, size: peak} if peak else self.points
            bounds = self.bounds + 1 if bound else 0
            now = replace(now, low=max(self.low, size), points=points, bounds=bounds, misses=0)
        else:
            now = replace(now, fails=(*self.fails, size), misses=self.misses + 1)
        if now._refutes(predicted):
            now = replace(now, shape=None, refuted=True)
        return replace(now, lost=now.trials) if now.refuted and not now.low else now

    def _refutes(self, before: int | None) -> bool:
        """Whether the estimate is far off: by the limit that was predicted before the last trial, or by its slope."""
        if self.shape is None or self.limit is None:
            return False
        if before is None:  # no size had run
            before = self._solve(self.shape.at, self.limit, 0)
        if self.high < _FAR * before or before < _FAR * (self._predicted() or 0):
            return True
        slope, line = self.shape.slope, self._line()
        found = slope + (line.slope if line and max(self.points) > _SPREAD * min(self.points) else 0.0)
        return min(slope, found) < _FAR * max(slope, found)

    def is_answered(self) -> bool:
        """Whether the first failure is within the tolerance above the largest size that ran, or that is the cap."""
        return self.high - self.low <= (self._window() if self.fails else 1)

    def next_size(self) -> int | None:
        """The size of the next trial; None when the search ends."""
        if not self.trials:
            return self._first()
        if self.is_answered() or (self.low and self.fails and self._later() < 0):
            return None
        guess = self._guess()
        if self.fails and self.trials > MOST and self.trials % 2:
            guess = self._middle()  # predictions do not converge (noise, many segments)
        return min(max(guess, self.low + 1), self.high - 1)

    def predicted_peak(self, size: int) -> int | None:
        """The peak of a size by what is known."""
        line = self._line()
        return None if line is None else int(line.at(size))

    def trials_left(self, size: int) -> int:
        """How many trials follow that of `size`, if each of them ends as predicted."""
        known, left, later = self, -1, max(0, self._later())
        at: int | None = size
        while at is not None and left < min(20, later):
            line = known._line()
            if line is None or known.limit is None:
                # A prediction needs another point; then two trials verify it.
                more = max(3, (known.high - known.low).bit_length() - 1) if known.fails else 3
                return min(left + more, later)
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

    def _later(self) -> int:
        """How many trials may follow the next one; without a prediction, or for an exact answer, there is no bound."""
        if self.exact or not self._predicts():
            return LARGEST
        return (MOST_ESTIMATED if self.shape else MOST + self.lost) - self.trials - 1

    def _predicts(self) -> bool:
        """Whether peaks and the limit explain what ran and what failed: no size failed that must run by its peak."""
        if not self.limit or self.low not in self.points:
            return False
        return not self.fails or self.high >= _EXPLAINED * self.low * self.limit / self.points[self.low]

    def _window(self) -> int:
        """How far above `low` the first failure may be."""
        return 1 if self.exact else max(1, self.low * self.unit // TOLERANCE // self.unit)

    def _guess(self) -> int:
        low, high, limit = self.low, self.high, self.limit
        if not low:
            return high // 2 if high <= START else max(1, high // 4)
        if limit is None or not self._predicts():
            return self._middle() if self.fails else low * _FARTHEST
        if self.fails and high - low <= 2 * self._window():
            return (low + high) // 2  # either answer ends the search
        line, predicted = self._line(), self._predicted()
        safe = max(low, low * limit // self.points[low])
        return self._beyond(safe) if line is None or predicted is None else self._towards(line, predicted, safe)

    def _beyond(self, safe: int) -> int:
        """A size that may show a slope: no slope is known, and sizes up to `safe` certainly run."""
        low, high = self.low, self.high
        if not self.fails:
            if len(self.points) == 1:
                return max(safe, _FARTHEST**2 * low)
            return self._or_cap(_between(safe, max(_USUAL // self.unit, _FARTHEST**2 * safe)))
        alone = len(self.points) == 1 and len(self.fails) > 1
        return safe if alone or safe >= _APART * low else _between(safe, high, _SHORT)

    def _towards(self, line: _Line, predicted: int, safe: int) -> int:
        """The predicted limit, one beside it that verifies it, or one before it if the line may be that of another segment."""
        low, high, window, later = self.low, self.high, self._window(), self._later()
        again = max(0, self.bounds - 1)
        verify = low + (window << min(again, max(0, later)))  # further each time a size still runs
        if not self.fails and later <= 0 and (again or predicted - low >= window):
            return predicted + 16 * window  # the last trial, and none has failed: this one does, whatever the noise
        if predicted - low < window:
            return verify
        if line.certain or predicted - safe <= 4 * window:  # the limit is between the two
            # Half of the tolerance below the prediction, so that noise in either direction leaves the limit above it.
            aim = max(verify, predicted if line.shape else predicted - window // 2)
            if not self.fails or aim <= high - window:
                return aim if line.shape or self.fails else min(aim, max(safe, _FARTHEST * low))
            if line.shape and len(self.points) == 1:  # the estimate grows too slowly: a second point shows by how much
                return max(safe, high - (high - low) // 4) if len(self.fails) == 1 else self._middle()
            if high <= _NEAR * safe and (line.shape or predicted - high < 2 * window):  # missed by little
                below = 1 if self.exact else max(1, high // (TOLERANCE + 1))
                return max(safe, self._middle(), high - (below << min(max(0, self.misses - 1), later)))
        if self.misses > 2:
            return self._middle()  # what certainly runs may not run: peaks do not explain the failures
        size = _between(safe, min(predicted, high), 0.5 if line.certain else _SHORT)
        return size if self.fails or predicted < high else self._or_cap(size)

    def _or_cap(self, size: int) -> int:
        """The cap itself, if it is not far above the size."""
        return self.top if self.top < _FARTHEST * size else size

    def _middle(self) -> int:
        """The middle of what ran and what failed."""
        return _between(self.low, self.high) if self.high > 4 * self.low else (self.low + self.high) // 2

    def _line(self) -> _Line | None:
        """How peaks go on above the largest fitting size; None if no slope is known."""
        if not self.points:
            return None
        shape, last = self.shape, max(self.points)
        over = {size: peak - (shape.at(size) if shape else 0.0) for size, peak in self.points.items()}
        slope, doubt, base = self._chord(over, last)
        if shape is not None:
            return _Line(last, over[last], slope if abs(slope) > doubt else 0.0, True, shape)
        if slope <= doubt:
            return None
        near = max(size for size in over if size < last)
        flat, doubt = (over[last] - over[near]) / (last - near), _NOISE * over[last] / (last - near)
        if doubt < flat < slope / 2 - 3 * doubt:  # not convex: a loss in chunks needs no more from some size on
            return _Line(last, over[last], flat, True, None)
        # One segment if its two sizes are near, or if a third one is on it. If smaller sizes are on one segment that ends at
        # the base or above it, the line spans that end.
        before, doubt, start = self._chord(over, base)
        third = before >= _STRAIGHT * slope or any(base < size < last for size in over)
        ends = start > 0 and (before <= doubt or self._chord(over, start)[0] >= _STRAIGHT * before)
        return _Line(last, over[last], slope, third or not (ends or last > (_NEAR if start else _APART) * base), None)

    def _chord(self, peaks: Mapping[int, float], last: int) -> tuple[float, float, int]:
        """Of all lines from a smaller size to `last`, the one that is certainly the steepest: slope, its doubt, the size.

        Memory is convex, so the steepest is nearest to what follows; a line from a far size has less noise.
        """
        noise = _NOISE * self.points.get(last, 0)
        lines = [((peaks[last] - peaks[b]) / (last - b), noise / (last - b), b) for b in peaks if b < last]
        return max(lines, key=lambda line: line[0] - line[1], default=(0.0, 0.0, 0))

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
    certain: bool
    """Whether the slope is probably that of the last segment."""
    shape: _Shape | None

    def at(self, size: float) -> float:
        return self.over + self.slope * (size - self.last) + (self.shape.at(size) if self.shape else 0.0)


def _between(low: int, high: int, share: float = 0.5) -> int:
    """The size at a share of the way from `low` to `high` on a logarithmic scale."""
    return int(low ** (1 - share) * high**share)


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
