"""The search on simulated memory: exact, only measured sizes within the cap, few trials where prediction works."""

from __future__ import annotations

import random
from pathlib import Path
from statistics import mean, median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.core.errors import NothingFitsError
from batchwright.probe.records import Trial
from batchwright.probe.search import MOST, MOST_ESTIMATED, find_limit

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

    def run(self, size, predicted, left):
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
def test_the_first_failure_is_within_one_percent_or_the_trials_are_used_up(lines, limit, granularity):
    limit = max(limit, 100 * granularity if granularity > 1 else 1)  # else peaks do not explain failures: no bound
    machine = Machine(lines, limit, granularity)
    found = search(machine)
    if found and found.first_failing is not None:
        assert found.largest <= machine.largest() < found.first_failing
        assert found.ended_early == (not is_within(found))
        assert not found.ended_early or len(machine.tried) >= MOST
        assert {found.largest, found.first_failing} <= set(machine.tried)
        # A search ends with a size that failed: if none of the first eight did, it goes on until one does.
        assert len(machine.tried) <= MOST or all(machine.memory(size) <= limit for size in machine.tried[:MOST])


def is_within(found):
    return found.first_failing - found.largest <= max(1, found.largest // 100)


@given(st.integers(0, 10**6), st.integers(1, 10**4), LIMITS, st.booleans())
def test_one_line_takes_at_most_six_trials(constant, slope, limit, exact):
    # The first two points show the slope, because the constant is at most ten thousand times as large.
    machine = Machine([(min(constant, 10**4 * slope), slope)], limit)
    search(machine, exact=exact)
    assert len(machine.tried) <= 6


def program(seed: int, noise: float = 0.0) -> Machine:
    """A random training program: the backward's line, mostly the optimizer's flat one, sometimes one between them."""
    draw = random.Random(seed)
    limit = int(2 ** draw.uniform(28, 35))
    constant = draw.uniform(0.02, 0.9) * limit
    slope = (limit - constant) / 2 ** draw.uniform(1, 14.3)
    lines = [(constant, slope)]
    if draw.random() < 0.6:
        flat = constant + draw.uniform(0, 0.5) * (limit - constant)
        lines.append((flat, slope * draw.choice([0, 0, 0.001, 0.02])))
    if draw.random() < 0.3:
        lines.append((constant + draw.uniform(0, 0.2) * (limit - constant), slope * draw.uniform(0.2, 0.9)))
    return Noisy([(int(a), int(b)) for a, b in lines], limit, noise, seed)


class Noisy(Machine):
    """Peaks vary by up to `noise` of themselves."""

    def __init__(self, lines, limit, noise, seed):
        super().__init__(lines, limit)
        self.noise, self.seed = noise, seed

    def memory(self, size):
        return int(super().memory(size) * (1 + self.noise * random.Random(f"{self.seed} {size}").uniform(-1, 1)))

    def shape(self, over, error):
        """An estimate: it lacks `over` bytes, and its slope is wrong by a share of `error`."""
        steepest = max(slope for _, slope in self.lines)
        sizes = {1, 8, max(1, self.largest() // 2), self.largest(), self.largest() + 1}
        return {b: int(Machine.memory(self, b) - over + error * steepest * b) for b in sizes}

    def far_off(self, times):
        """An estimate whose slopes are `times` too small; below 1, they are too large."""
        most = self.largest()
        sizes = {1, 8, most // 2, most, most + 1, int(most * times), int(most * times) + 1} - {0}
        return {b: int(max(a + slope / times * b for a, slope in self.lines)) for b in sizes}


def count_trials(seeds, noise=0.0, wrong=None, times=None):
    """The number of trials of each program, and the share of programs whose first failure is within 1%."""
    counts, within = [], 0
    for seed in seeds:
        machine, draw = program(seed, noise), random.Random(-seed)
        shape = None
        if wrong is not None:  # an estimate: the slope may be wrong by this share
            shape = machine.shape(draw.uniform(0, 0.1) * machine.lines[0][0], draw.uniform(-wrong, wrong))
        if times is not None:
            shape = machine.far_off(times)
        found = search(machine, shape=shape, memory=machine.limit)
        if found and found.first_failing:
            assert found.ended_early == (not is_within(found))
            assert found.largest < found.first_failing
            assert noise or found.largest <= machine.largest() < found.first_failing
        counts.append(len(machine.tried))
        within += not (found and found.ended_early)
    return counts, within / len(counts)


def test_with_an_estimate_random_programs_take_at_most_five_trials():
    """The estimate may lack a tenth of the constant, and its slope may be wrong by 2% (a real one was wrong by 11%)."""
    counts, within = count_trials(range(300), wrong=0.02)
    assert max(counts) <= MOST_ESTIMATED and within == 1
    assert median(counts) <= 4
    noisy, within = count_trials(range(300), noise=0.005, wrong=0.02)
    assert max(noisy) <= MOST_ESTIMATED and within >= 0.95
    counts, within = count_trials(range(300), wrong=0.25)
    assert max(counts) <= MOST_ESTIMATED and within >= 0.99


@pytest.mark.parametrize("times", [1 / 10, 1 / 4, 1 / 2, 1.5, 2, 4, 10, 40])
def test_an_estimate_that_is_far_off_leaves_the_answer_as_good_as_without_one(times):
    counts, lost, within = [], [], 0
    for seed in range(300):
        machine = program(seed)
        found = search(machine, shape=machine.far_off(times), memory=machine.limit)
        if found is None:
            continue
        first = next(at for at, size in enumerate(machine.tried) if machine.memory(size) <= machine.limit)
        within += not found.ended_early
        counts.append(len(machine.tried))
        lost.append(first if found.refuted else 0)
        assert found.first_failing is None or found.largest <= machine.largest() < found.first_failing
        assert found.refuted or len(machine.tried) <= MOST_ESTIMATED
    assert within >= 0.95 * len(counts)
    assert all(count <= MOST + before for count, before in zip(counts, lost, strict=True)) and max(lost) <= 4


@pytest.mark.parametrize(("noise", "least"), [(0.0, 0.97), (0.001, 0.95), (0.005, 0.87)])
def test_without_an_estimate_random_programs_take_at_most_eight_trials(noise, least):
    """docs/probe.md has the shares of 6,000 others."""
    counts, within = count_trials(range(300), noise)
    assert max(counts) <= MOST and within >= least
    assert noise or median(counts) <= 6


def documented() -> list[list[str]]:
    """The rows of the tables in docs/probe.md that begin with what an estimate or a peak is."""
    page = (Path(__file__).parents[2] / "docs" / "probe.md").read_text(encoding="utf-8")
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line.startswith("|")]


OTHERS = 10**6  # seeds from here on were not used to develop the search


@pytest.mark.rounds
def test_the_shares_in_the_docs():
    """Both tables of docs/probe.md, computed again."""
    rows = documented()
    begin = next(at for at, row in enumerate(rows) if row[0].startswith("peaks vary from run to run"))
    for vary, within, below in rows[begin + 2 : begin + 5]:
        noise, far, ended = float(vary.rstrip("%")) / 100, 0, 0
        for seed in range(OTHERS, OTHERS + 6000):
            machine = program(seed, noise)
            found = search(machine, memory=machine.limit)
            ended += bool(found and found.ended_early)
            far += bool(found and found.largest < 0.95 * machine.largest())
        assert (within, below) == (f"{1 - ended / 6000:.1%}", f"{far / 6000:.1%}"), vary
    begin = next(at for at, row in enumerate(rows) if row[0].startswith("the slope of the estimate"))
    for what, count, vary, within, trials in rows[begin + 2 : begin + 10]:
        seeds, noise = range(OTHERS, OTHERS + int(count.replace(",", ""))), float(vary.rstrip("%")) / 100
        number = float(what.removeprefix("wrong by up to ").split("%")[0].split()[0])
        if "wrong" in what:
            counts, share = count_trials(seeds, noise, wrong=number / 100)
        else:
            counts, share = count_trials(seeds, noise, times=number if "small" in what else 1 / number)
        assert (within, trials) == (f"{share:.1%}", f"{mean(counts):.1f} ({max(counts)})"), what


def test_a_search_that_ends_early_continues_if_it_is_exact():
    """The stored trials come first; an exact search has no bound."""
    first, again, same = program(20), program(20), program(20)
    found = search(first)
    assert found.ended_early and len(first.tried) == MOST
    exact = search(again, exact=True, stored=first.tried)
    assert again.tried[:MOST] == first.tried and len(again.tried) > MOST
    assert exact.largest == again.largest() == exact.first_failing - 1 and not exact.ended_early
    assert search(same, stored=first.tried) == found and same.tried == first.tried, "no further trial"


@pytest.mark.parametrize("largest", [40, 100])
def test_failures_that_peaks_do_not_explain_are_bisected(largest):
    """By their peaks, sizes up to 1500 would run: nothing can be predicted, so there is no bound."""
    tried = []

    def run(size, predicted, left):
        tried.append(size)
        fits = size <= largest
        return Trial(size, "fits" if fits else "oom", "limit", 500 + size if fits else None, 2000)

    found = find_limit(run)
    assert (found.largest, found.first_failing) == (largest, largest + 1)
    assert len(tried) <= 13


def test_without_peaks_no_size_is_above_four_times_the_limit():
    """docs/probe.md has the trials of 2,000."""
    counts = []
    for seed in range(300):
        machine = Machine([(0, 1)], int(2 ** random.Random(seed).uniform(1, 14.3)), peaks=False)
        found = find_limit(machine.run)
        assert found.largest <= machine.limit < found.first_failing and is_within(found)
        assert max(machine.tried) <= max(8, 4 * machine.limit)
        counts.append(len(machine.tried))
    assert median(counts) <= 11 and max(counts) <= 16


def test_stored_sizes_that_do_not_apply_are_left_out():
    machine = Machine([(100, 7)], 1000)
    found = find_limit(machine.run, cap=100, multiple_of=8, stored=[12, 64, 48, 104])
    assert machine.tried[0] == 64 and {12, 48, 104}.isdisjoint(machine.tried)
    assert (found.largest, found.first_failing) == (96, None)


def test_an_optimizer_bound_program_takes_at_most_seven():
    """A four-layer MLP, 1024 wide, under 1 GiB: to 340 samples the optimizer's step is the peak."""
    machine = Machine([(86 * 2**20, 40), (70 * 2**20, 54_000)], 2**30)
    found = find_limit(machine.run)
    assert found.largest <= machine.largest() < found.first_failing
    assert len(machine.tried) <= 7
    assert max(machine.tried) < 4 * machine.largest(), "a slope near zero is no reason for the largest size"


def test_a_program_whose_memory_grows_more_slowly_from_some_size_on_takes_at_most_eight():
    """TRL's sft.py with a loss in chunks of 4,096 tokens, 128 per sample: peaks in MiB, as measured under 3 GiB."""

    class Chunked(Machine):
        def memory(self, size):
            return int(2**20 * (2175 + 25.6 * min(size, 32) + 2.75 * max(0, size - 32)))

    machine = Chunked([], 3 * 2**30)
    found = find_limit(machine.run, multiple_of=4)
    assert (found.largest, found.first_failing, found.ended_early) == (60, 64, False)
    assert len(machine.tried) <= MOST


@pytest.mark.parametrize(
    ("constant", "flat", "slope", "limit"),
    [
        (900 * 2**20, 940 * 2**20, 11 * 2**20, 2 * 2**30),  # nanoGPT's size with its imports
        (2_300 * 2**20, 2_420 * 2**20, 30 * 2**20, 4 * 2**30),  # run_clm.py with its imports
    ],
)
def test_programs_of_the_size_of_nanogpt_and_run_clm_take_at_most_eight(constant, flat, slope, limit):
    for noise in (0.0, 0.001):
        machine = Noisy([(constant, slope), (flat, 0)], limit, noise, 1)
        find_limit(machine.run)
        assert len(machine.tried) <= 8


def test_the_trials_that_are_left_are_counted_down_to_zero():
    """Also after a miss: here the estimate's slope is 10% too small."""
    machine, left = Machine([(84 * 2**20, 8_135_000)], 768 * 2**20), []

    def run(size, predicted, remaining):
        left.append(remaining)
        return machine.run(size, predicted, remaining)

    find_limit(run, shape={b: 7_300_000 * b for b in (1, 8, 80)}, memory=machine.limit)
    assert left[-1] == 0
    assert all(abs(said - (len(left) - 1 - at)) <= 2 for at, said in enumerate(left))


def test_the_trials_that_are_left_are_never_negative_nor_above_the_bound():
    for seed in range(100):
        for noise in (0.0, 0.005):
            machine, left = program(seed, noise), []

            def run(size, predicted, remaining, machine=machine, left=left):
                left.append(remaining)
                return machine.run(size, predicted, remaining)

            found = find_limit(run)
            assert all(0 <= said <= MOST - 1 - at for at, said in enumerate(left))
            assert not found.ended_early or left[-1] == 0


def test_nothing_fits_says_what_was_tried():
    machine = Machine([(100, 1)], 50)
    with pytest.raises(NothingFitsError, match=r"micro_batch_size=1 ran out of memory.*Tried 8, 4, 2, 1") as caught:
        find_limit(machine.run)
    assert caught.value.exit_code == 3


def test_a_timeout_bounds_the_search_like_a_failure():
    def run(size, predicted, left):
        return Trial(size, "fits" if size <= 20 else "timeout", "limit")

    assert find_limit(run, exact=True).largest == 20
