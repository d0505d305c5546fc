"""Lines through estimated peaks: the largest batch under a limit, the slope, the (batch, sequence length) frontier.

Peak memory is a maximum of straight lines in the batch (backward, or the optimizer's step), so it is convex: a line
through two points is never above the peaks beyond them, and never below the peaks between them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from .records import MOST, FrontierFit, FrontierRow, Point, Slope

Peak = Callable[[int], int]
# With fake tensors two slopes of one segment are equal; a tenth of a percent allows for rounding up.
SAME_SLOPE = 1e-3
# On a flat segment the line says nothing about the next one: a guess is at most so many times the largest that fits.
FARTHEST = 16
# Two runs for each time that the largest range is halved, and some until a batch fails.
RUNS = 2 * MOST.bit_length() + 6
# Above this error the three coefficients do not describe the model, and no length is predicted from them.
WORST_FIT = 0.05


def largest(peak: Peak, limit: int, *, most: int = MOST, convex: bool = True, runs: int = RUNS) -> int:
    """The largest batch whose peak is within the limit; 0 if there is none.

    Convex: follow the line through the two largest that fit, and the chord to the smallest that does not. Otherwise
    (a compiler plans every shape separately) search until neighbours differ. A chord meets the limit too early, after a flat
    segment by far; so at least every second run halves what is left.

    >>> largest(lambda b: max(100, 20 + 7 * b), limit=720)
    100
    """
    known: dict[int, int] = {}

    def fits(size: int) -> bool:
        known[size] = peak(size)
        return known[size] <= limit

    if not fits(1):
        return 0
    low, high = 1, most + 1
    guess, slow = min(8, most), False
    for _ in range(runs):
        if low + 1 == high:
            break
        left = high - low
        if fits(guess):
            low = guess
        else:
            high = guess
        slow = not slow and 2 * (high - low) > left
        fitting = sorted(b for b in known if b <= low)[-2:]
        beyond = solve(known, fitting, limit) if len(fitting) == 2 else most
        if convex and beyond <= low:
            break  # the line is a lower bound: low + 1 is above the limit
        if high in known:
            chord = solve(known, (low, high), limit)
            guess = chord if chord > low and not slow else min(beyond, (low + high) // 2)
        else:
            guess = min(beyond, FARTHEST * low)
        guess = max(low + 1, min(guess, high - 1))
    return low


def solve(known: Mapping[int, int], sizes: Sequence[int], limit: int) -> int:
    """Where the line through two known sizes meets the limit."""
    first, second = sizes
    rise = known[second] - known[first]
    if rise <= 0:
        return MOST
    return first + (limit - known[first]) * (second - first) // rise


def settle(
    peak: Peak,
    bound: Callable[[int], bool] = lambda size: True,
    *,
    most: int = 2**16,
    tolerance: float = SAME_SLOPE,
) -> Slope:
    """Double the batch until activations are the peak (`bound`) and the slope no longer changes.

    The slope alone is not enough: while the optimizer's step is the peak, it does not change either.

    >>> settle(lambda b: max(100, 20 + 7 * b), lambda b: b > 11).bytes_per_sample
    7.0
    """
    peaks = {1: peak(1), 2: peak(2)}
    slope = line(peaks)
    size = 2
    while size < most:
        size *= 2
        peaks[size] = peak(size)
        before, slope = slope, line(peaks)
        settled = abs(slope.bytes_per_sample - before.bytes_per_sample) <= tolerance * slope.bytes_per_sample
        if settled and slope.bytes_per_sample > 0 and bound(slope.micro_batch_sizes[0]):
            break
    return slope


def line(peaks: dict[int, int]) -> Slope:
    """The line through the two largest sizes."""
    low, high = sorted(peaks)[-2:]
    slope = (peaks[high] - peaks[low]) / (high - low)
    return Slope(slope, peaks[high] - slope * high, (low, high))


def three_coefficients(lines: Mapping[int, Slope], points: Iterable[Point]) -> FrontierFit | None:
    """peak = c + a·B·T + b·B·T² from the lines at two or more lengths; None if there are fewer.

    Two runs make a line, two lines give a and b (a slope divided by its length is a + b·T), so four runs are enough. The
    fit is to the slopes and not to the peaks: what does not grow with the batch may grow with the length (positions).

    >>> lines = {t: Slope(3 * t + t * t, 1000, (1, 2)) for t in (4, 8)}
    >>> three_coefficients(lines, [])
    FrontierFit(constant=1000, linear=3.0, quadratic=1.0, error=0.0)
    """
    if len(lines) < 2:
        return None
    rates = [(t, slope.bytes_per_sample / t) for t, slope in lines.items()]
    mean_t, mean_rate = (sum(column) / len(rates) for column in zip(*rates, strict=True))
    quadratic = sum((t - mean_t) * (r - mean_rate) for t, r in rates) / sum((t - mean_t) ** 2 for t, _ in rates)
    quadratic = max(quadratic, 0.0)  # a value below zero is rounding, and wrong when extrapolated
    linear = mean_rate - quadratic * mean_t
    constant = max(slope.base_bytes for slope in lines.values())
    errors = [0.0]
    for p in points:
        size, t = p.micro_batch_size, p.sequence_length or 0
        if t in lines and size >= lines[t].micro_batch_sizes[0]:
            predicted = constant + size * (linear * t + quadratic * t * t)
            errors.append(abs(predicted - p.peak_memory_bytes) / p.peak_memory_bytes)
    return FrontierFit(constant, linear, quadratic, max(errors))


def frontier(fit: FrontierFit, limit: int, known: dict[int, int], *, more: int = 6) -> tuple[FrontierRow, ...]:
    """The largest batch by sequence length: estimated at the given lengths, from the fit at 2, 4, … times the longest.

    >>> [(r.sequence_length, r.max_micro_batch_size, r.source)
    ...  for r in frontier(FrontierFit(0, 10, 0, 0), 4000, {100: 4}, more=3)]
    [(100, 4, 'estimated'), (200, 2, 'fit'), (400, 1, 'fit'), (800, 0, 'fit')]
    """
    rows = [FrontierRow(t, known[t], "estimated") for t in sorted(known)]
    for _ in range(more):
        if rows[-1].max_micro_batch_size < 1:
            break
        t = rows[-1].sequence_length * 2
        each = fit.linear * t + fit.quadratic * t * t
        rows.append(FrontierRow(t, max(0, int((limit - fit.constant) // each)) if each > 0 else MOST, "fit"))
    return tuple(rows)
