"""The search on simulated memory: exact, only measured sizes within the cap, few trials where prediction works."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.core.errors import NothingFitsError
from batchwright.probe.records import Trial
from batchwright.probe.search import find_limit

LINES = st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**4)), min_size=1, max_size=4).filter(
    lambda lines: any(slope for _, slope in lines)
)
LIMITS = st.integers(1, 3 * 10**7)


class Machine:
    """A machine whose memory is the largest of some lines, rounded up to its allocator's granularity."""

    def __init__(self, lines, limit, granularity=1, peaks=True):
        self.lines, self.limit, self.granularity, self.peaks = lines, limit, granularity, peaks
        self.tried: list[int] = []

    def memory(self, size):
        most = max(a + b * size for a, b in self.lines)
        return -(-most // self.granularity) * self.granularity

    def largest(self, cap=None, multiple_of=1):
        low, high = 0, (1 << 24 if cap is None else cap) // multiple_of + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.memory(middle * multiple_of) <= self.limit else (low, middle)
        return low * multiple_of

    def run(self, size, predicted):
        assert size >= 1
        assert size not in self.tried, "a size is tried once"
        self.tried.append(size)
        peak = self.memory(size)
        fits = peak <= self.limit
        known = self.peaks and fits
        return Trial(
            size, "fits" if fits else "oom", "limit", peak if known else None, self.limit if self.peaks else None
        )


def search(machine, **options):
    try:
        return find_limit(machine.run, **options)
    except NothingFitsError:
        return None


@given(
    LINES,
    LIMITS,
    st.sampled_from([1, 7, 4096]),
    st.booleans(),
    st.integers(1, 300) | st.none(),
    st.sampled_from([1, 8]),
)
def test_the_answer_is_exact_measured_and_below_the_cap(lines, limit, granularity, peaks, cap, multiple_of):
    if cap is not None:
        cap = max(cap, multiple_of)
    machine = Machine(lines, limit, granularity, peaks)
    found = search(machine, cap=cap, multiple_of=multiple_of, exact=True)
    truth = machine.largest(cap, multiple_of)
    assert (found.largest if found else 0) == truth
    assert all(size % multiple_of == 0 and (cap is None or size <= cap) for size in machine.tried)
    if found:
        assert found.largest in machine.tried
        if found.first_failing is None:
            assert found.largest + multiple_of > (cap or 1 << 24)
        else:
            assert found.first_failing == found.largest + multiple_of
            assert found.first_failing in machine.tried


@given(LINES, LIMITS, st.sampled_from([1, 4096]))
def test_the_first_failure_is_within_one_percent(lines, limit, granularity):
    machine = Machine(lines, limit, granularity)
    found = search(machine)
    if found and found.first_failing is not None:
        assert found.largest < found.first_failing <= found.largest + max(1, found.largest // 100)
        assert {found.largest, found.first_failing} <= set(machine.tried)


@given(st.integers(0, 10**6), st.integers(1, 10**4), LIMITS, st.booleans())
def test_one_line_takes_at_most_five_trials(constant, slope, limit, exact):
    # The first two points show the slope, because the constant is at most ten thousand times as large.
    machine = Machine([(min(constant, 10**4 * slope), slope)], limit)
    search(machine, exact=exact)
    assert len(machine.tried) <= 5


@given(LINES, LIMITS, st.booleans())
def test_with_the_right_slope_at_most_five_trials(lines, limit, exact):
    machine = Machine(lines, limit)
    largest = machine.largest()
    slope = machine.memory(largest + 1) - machine.memory(largest)
    start = machine.memory(8) + slope * (largest - 8)
    if slope <= 0 or largest >= 1 << 24 or start != machine.memory(largest):
        return  # the estimate works: its slope is that of the segment on which both the start and the limit lie
    search(machine, slope=float(slope), exact=exact)
    assert len(machine.tried) <= 4


@given(st.integers(10**5, 10**6), st.integers(0, 10**4), st.integers(1, 10**3), st.integers(10**6, 10**7))
def test_an_optimizer_bound_start_moves_on_to_larger_sizes(flat, constant, slope, limit):
    machine = Machine([(flat, 0), (constant, slope)], limit)
    found = find_limit(machine.run, exact=True)
    assert found.largest == machine.largest()
    assert len(machine.tried) <= 2 * found.largest.bit_length() + 4  # about as many as doubling and bisecting need


def test_the_good_case_takes_four():
    machine = Machine([(84 * 2**20, 8_135_000)], 768 * 2**20)
    assert find_limit(machine.run).largest == machine.largest()
    assert len(machine.tried) == 4


def test_the_estimate_saves_a_trial():
    machine = Machine([(84 * 2**20, 8_135_000)], 768 * 2**20)
    find_limit(machine.run, slope=8_135_000.0)
    assert machine.tried == [8, machine.largest(), machine.largest() + 1]


def test_nothing_fits_says_what_was_tried():
    machine = Machine([(100, 1)], 50)
    with pytest.raises(NothingFitsError, match=r"micro_batch_size=1 ran out of memory.*Tried 8, 4, 2, 1") as caught:
        find_limit(machine.run)
    assert caught.value.exit_code == 3


def test_a_timeout_bounds_the_search_like_a_failure():
    def run(size, predicted):
        return Trial(size, "fits" if size <= 20 else "timeout", "limit")

    assert find_limit(run, exact=True).largest == 20
