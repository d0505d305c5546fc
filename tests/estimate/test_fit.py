"""Lines, limits and frontiers of invented peaks."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from batchwright.estimate.fit import frontier, largest, line, settle, three_coefficients
from batchwright.estimate.records import FrontierFit, Point

lines = st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 10**4)), min_size=1, max_size=3)


# The chord from a flat segment, little below the limit, to the next one is nearly flat, too.
@example([(10**6, 1), (0, 1000)], 1_002_000)
@example([(999_000, 1), (0, 3), (-500_000, 10)], 1_000_000)
@given(lines, st.integers(1, 10**7))
def test_the_largest_equals_a_plain_search_when_peaks_are_a_maximum_of_lines(parts, limit):
    def peak(size):
        return max(base + slope * size for base, slope in parts)

    expected = min((limit - base) // slope for base, slope in parts)
    assert largest(peak, limit) == max(0, min(expected, 2**20))


@given(st.integers(1, 10**9), st.integers(1, 10**6), st.integers(1, 10**5), st.integers(0, 10**9))
def test_the_largest_is_found_however_little_the_limit_is_above_a_flat_segment(flat, base, slope, room):
    """The optimizer's step is the peak of small batches: a constant. The limit is `room` above it."""
    runs = []

    def peak(size):
        runs.append(size)
        return max(flat, min(base, flat) + slope * size)

    expected = (flat + room - min(base, flat)) // slope
    assert largest(peak, flat + room) == max(0, min(expected, 2**20)) or peak(1) > flat + room
    assert len(runs) <= 49


def test_few_runs_are_enough_for_two_segments():
    runs = []

    def peak(size):
        runs.append(size)
        return max(30_000, 10_000 + 37 * size)

    assert largest(peak, 1_000_000) == (1_000_000 - 10_000) // 37
    assert len(runs) <= 6


def test_the_largest_is_found_when_peaks_vary():
    def peak(size):
        return 100 * size + (150 if size % 3 == 0 else 0)

    found = largest(peak, 5000, convex=False)
    assert peak(found) <= 5000 < peak(found + 1)


def test_no_limit_is_made_up_when_the_batch_costs_nothing():
    assert largest(lambda size: 10, 100, most=1000) == 1000
    assert largest(lambda size: 10, 100, most=1) == 1
    assert largest(lambda size: 10, 5) == 0


def test_the_slope_is_taken_past_the_optimizers_peak():
    slope = settle(lambda size: max(1000 + size, 100 + 50 * size), lambda size: size > 20)
    assert (slope.bytes_per_sample, slope.base_bytes) == (50, 100)
    assert slope.predict(1000) == 50_100
    assert line({1: 10, 2: 20, 4: 60}).micro_batch_sizes == (2, 4)


def fitted(peak, sizes=(2, 4), lengths=(64, 128)):
    points = [Point(b, t, round(peak(b, t)), {}) for t in lengths for b in sizes]
    lines = {
        t: line({p.micro_batch_size: p.peak_memory_bytes for p in points if p.sequence_length == t}) for t in lengths
    }
    return three_coefficients(lines, points)


def test_three_coefficients_from_four_runs_predict_far_lengths():
    def peak(b, t):
        return 5e7 + 66_000 * b * t + 64 * b * t * t

    fit = fitted(peak)
    assert fit is not None and fit.error < 1e-6
    assert fit.constant + fit.linear * 16 * 2048 + fit.quadratic * 16 * 2048**2 == pytest.approx(
        peak(16, 2048), rel=1e-6
    )


def test_what_grows_with_the_length_alone_does_not_change_the_fit():
    fit = fitted(lambda b, t: 1e8 + 5e4 * t + 66_000 * b * t, sizes=(64, 128))
    assert fit is not None and fit.quadratic == pytest.approx(0, abs=1e-6) and fit.linear == pytest.approx(66_000)


def test_one_length_determines_nothing():
    assert fitted(lambda b, t: b * t, lengths=(64,)) is None


def test_a_negative_quadratic_coefficient_is_not_extrapolated():
    fit = fitted(lambda b, t: 1e6 + 1000 * b * t - 0.5 * b * t * t)
    assert fit is not None and fit.quadratic == 0 and 0 < fit.error < 0.05


def test_the_frontier_ends_where_nothing_fits():
    rows = frontier(FrontierFit(100, 1, 0.01, 0.0), 10_000, {64: 60})
    assert rows[0].source == "estimated" and rows[0].max_micro_batch_size == 60
    assert rows[-1].max_micro_batch_size == 0 and all(r.source == "fit" for r in rows[1:])


def test_on_a_flat_segment_sizes_grow_by_sixteen_at_most():
    asked = []

    def peak(size):
        asked.append(size)
        return max(1000, size)

    assert largest(peak, 5000) == 5000
    assert max(asked) < 16 * 5000
