"""The ramp compared with simulations that have no segments and take one step after another."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from fractions import Fraction
from itertools import groupby, pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from batchwright.core.codec import decode, encode
from batchwright.core.errors import ScheduleError
from batchwright.core.numbers import fraction
from batchwright.core.ramp.rules import (
    MOST_STAGES,
    Compared,
    Constant,
    Doubling,
    Linear,
    PerDevice,
    Thresholds,
    compare,
    parse_thresholds,
)
from batchwright.core.ramp.schedule import LAST_STEPS, Rule, Schedule, Segment, Step, Switch, walk

STEPS = 100  # how far a simulation walks

# --- strategies -------------------------------------------------------------------------------------------------------


@st.composite
def linears(draw: st.DrawFn) -> Linear:
    start, increment, n = draw(st.integers(1, 40)), draw(st.integers(1, 20)), draw(st.integers(0, 12))
    return Linear(start, increment, draw(st.integers(0, 2000)), target=start + increment * n)


@st.composite
def per_devices(draw: st.DrawFn) -> PerDevice:
    devices, accumulation = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    lanes = devices * accumulation
    start, increment, n = draw(st.integers(1, 40)), draw(st.integers(1, 20)), draw(st.integers(0, 12))
    return PerDevice(
        Fraction(start, lanes),
        Fraction(increment, lanes),
        Fraction(start + increment * n, lanes),
        draw(st.integers(0, 2000)),
        devices,
        accumulation,
    )


@st.composite
def thresholds(draw: st.DrawFn, unit: str | None = None) -> Thresholds:
    unit = unit or draw(st.sampled_from(("samples", "tokens", "steps")))
    gaps = draw(st.lists(st.integers(1, 60), max_size=6))
    sizes = draw(st.lists(st.integers(1, 50), min_size=len(gaps) + 1, max_size=len(gaps) + 1))
    lengths = draw(st.lists(st.integers(1, 30), min_size=len(sizes), max_size=len(sizes)))
    length = draw(st.sampled_from((lengths[0], tuple(lengths))))
    ats, at = [0], 0
    for gap, own in zip(gaps, lengths, strict=False):
        # A stage of fewer tokens than a sequence is refused (tested below), so stages here are longer.
        at += gap + (max(own, lengths[0]) if unit == "tokens" else 0)
        ats.append(at)
    return Thresholds(tuple(zip(ats, sizes, strict=True)), unit, length, allow_falling=True)  # type: ignore[arg-type]


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Any schedule: with or without a budget, continued or not, with or without a shortened step in its past."""
    schedule = draw(linears() | per_devices() | thresholds()).compile()
    if draw(st.booleans()):
        schedule = schedule.until(draw(st.integers(300, 900)), last_step=draw(st.sampled_from(LAST_STEPS)))
    if draw(st.booleans()):
        last = (schedule.total_steps or 60) - 1
        at = schedule.at_step(draw(st.integers(0, last)))
        position = at.end_sample if draw(st.booleans()) else at.start_sample
        schedule = schedule.continued(position, draw(linears() | per_devices() | thresholds("samples")))
    return schedule


# --- independent simulations ------------------------------------------------------------------------------------------


def simulate_linear(rule: Linear) -> Iterator[int]:
    consumed, n = 0, (rule.target - rule.start) // rule.increment
    while True:
        level = n if consumed >= rule.samples else min(n, consumed * n // rule.samples)
        size = rule.start + rule.increment * level
        yield size
        consumed += size


def simulate_per_device(rule: PerDevice) -> Iterator[int]:
    """MaxText's manager: a counter per stage, set back to zero with every increment."""
    size, end = Fraction(rule.start), Fraction(rule.end)
    share = Fraction(rule.samples) / ((end - size) / Fraction(rule.increment)) if size < end else Fraction(0)
    if not share:
        size = end
    counted = 0
    while True:
        batch = size * rule.devices * rule.accumulation_steps
        assert batch.denominator == 1
        yield int(batch)
        counted += int(batch)
        if size < end and counted >= share:
            size, counted = size + Fraction(rule.increment), 0


def simulate_thresholds(rule: Thresholds) -> Iterator[int]:
    lengths = rule.sequence_length if isinstance(rule.sequence_length, tuple) else (rule.sequence_length,) * 99
    stage = step = samples = tokens = 0
    while True:
        while stage + 1 < len(rule.pairs):
            at = rule.pairs[stage + 1][0]
            reached = {
                "steps": step >= at,
                "samples": samples >= at,
                # The sample that holds the token at the threshold, or a later one, comes next.
                "tokens": tokens + lengths[stage] > at,
            }
            if not reached[rule.unit]:
                break
            stage += 1
        size = rule.pairs[stage][1]
        yield size
        step, samples, tokens = step + 1, samples + size, tokens + size * lengths[stage]


def take(sizes: Iterator[int], steps: int = STEPS) -> list[int]:
    return [size for size, _ in zip(sizes, range(steps), strict=False)]


def sizes_of(schedule: Schedule, steps: int = STEPS) -> list[int]:
    return [schedule.at_step(step).global_batch_size for step in range(steps)]


def boundaries(schedule: Schedule, limit: int = STEPS) -> list[Step]:
    """Every step by a linear scan over the segments."""
    found: list[Step] = []
    sample = 0
    for index, s in enumerate(schedule.segments):
        for k in range(limit if s.steps is None else s.steps):
            size = s.global_batch_size - (s.shortfall if k + 1 == s.steps else 0)
            found.append(Step(len(found), sample, size, index))
            sample += size
    return found


# --- rules ------------------------------------------------------------------------------------------------------------


@given(linears())
def test_linear_equals_a_simulation(rule: Linear):
    assert sizes_of(rule.compile()) == take(simulate_linear(rule))


@given(per_devices())
def test_per_device_equals_a_simulation(rule: PerDevice):
    assert sizes_of(rule.compile()) == take(simulate_per_device(rule))
    assert rule.samples_per_increment * rule.num_increments == (rule.samples if rule.num_increments else 0)


@given(thresholds())
def test_thresholds_equal_a_simulation(rule: Thresholds):
    assert sizes_of(rule.compile()) == take(simulate_thresholds(rule))


@given(st.integers(1, 20), st.integers(0, 6), st.integers(1, 400), st.sampled_from(("samples", "steps")))
def test_doubling_equals_a_simulation(start: int, times: int, every: int, unit: str):
    rule = Doubling(start, start * 2**times, every, unit)  # type: ignore[arg-type]
    consumed, expected = 0, list[int]()
    for step in range(STEPS):
        position = step if unit == "steps" else consumed
        expected.append(start * 2 ** min(times, position // every))
        consumed += expected[-1]
    assert sizes_of(rule.compile()) == expected


def test_falling_ramp_when_asked():
    rule = Linear(32, 8, 96, target=16, allow_falling=True)
    assert [(s.global_batch_size, s.start_sample) for s in rule.compile().segments] == [(32, 0), (24, 64), (16, 112)]


def test_start_equal_to_target_is_one_stage_without_a_note():
    for rule in (Linear(32, 7, 100, target=32), Linear(32, 7, 0, target=32), PerDevice(4, 1, 4, 15, devices=8)):
        schedule = rule.compile()
        assert schedule == Constant(32).compile() and not schedule.notes


def test_no_ramp_samples_go_straight_to_the_target_with_a_note():
    schedule = Linear(16, 8, 0, target=32).compile()
    assert schedule.segments == Constant(32).compile().segments
    assert schedule.notes == ("The ramp has 0 samples: the run starts at its target, 32, not at 16.",)


def test_stages_that_one_step_skips_are_noted():
    schedule = Linear(100, 100, 10, target=1000).compile()
    assert [(s.global_batch_size, s.steps) for s in schedule.segments] == [(100, 1), (1000, None)]
    assert schedule.notes == (
        "One step skips the stages of 200 from 2 samples, 300 from 3 samples, 400 from 4 samples and 5 more.",
    )


@given(linears() | per_devices() | thresholds())
def test_every_stage_is_a_segment_or_a_note(rule: Rule):
    schedule = rule.compile()
    missing = len(rule.switches()) - len(schedule.segments)
    assert (missing > 0) == any("One step skips" in note for note in schedule.notes)


# --- lookups ----------------------------------------------------------------------------------------------------------


@given(schedules())
def test_segments_partition_the_samples(schedule: Schedule):
    assert (schedule.segments[0].first_step, schedule.segments[0].start_sample) == (0, 0)
    for before, after in pairwise(schedule.segments):
        assert (before.end_step, before.end_sample) == (after.first_step, after.start_sample)
    steps = boundaries(schedule)
    assert all(before.end_sample == after.start_sample for before, after in pairwise(steps))
    assert all(step.global_batch_size > 0 for step in steps)
    if schedule.total_steps is not None:
        assert schedule.total_steps == len(steps) and schedule.total_samples == steps[-1].end_sample


@given(schedules())
def test_lookup_by_step_equals_a_linear_scan(schedule: Schedule):
    for step in boundaries(schedule):
        assert schedule.at_step(step.step) == step


@given(schedules())
def test_lookup_by_sample_inverts_the_lookup_by_step(schedule: Schedule):
    for step in boundaries(schedule, 20):
        for sample in {step.start_sample, step.end_sample - 1, (step.start_sample + step.end_sample) // 2}:
            if sample < step.end_sample:
                assert schedule.at_sample(sample) == step


@given(thresholds("tokens"), st.integers(0, 5000))
def test_the_sample_of_a_token(rule: Thresholds, token: int):
    schedule = rule.compile()
    sample = schedule.sample_at_token(token)
    segment = schedule.segments[schedule.at_sample(sample).segment]
    first = segment.start_token + (sample - segment.start_sample) * segment.sequence_length
    assert first <= token < first + segment.sequence_length


@given(schedules())
def test_tokens_are_counted_segment_by_segment(schedule: Schedule):
    total: int | None = 0
    for segment in schedule.segments:
        assert segment.start_token == total
        known = None not in (total, segment.sequence_length, segment.samples)
        total = total + segment.samples * segment.sequence_length if known else None  # type: ignore[operator]
        assert segment.end_token == total
    assert schedule.total_tokens == total


@given(schedules())
def test_outside_the_schedule_is_an_error_with_the_nearest(schedule: Schedule):
    for lookup, end in ((schedule.at_step, schedule.total_steps), (schedule.at_sample, schedule.total_samples)):
        with pytest.raises(ScheduleError) as caught:
            lookup(-1)
        assert caught.value.nearest == (0,)
        if end is not None:
            with pytest.raises(ScheduleError) as caught:
                lookup(end)
            assert caught.value.nearest == (end - 1,) and lookup(end - 1)


def test_ten_thousand_stages_and_a_trillion_samples():
    began = time.perf_counter()
    ramp = Linear(1, 1, 10**12, target=10_001).compile()
    assert len(ramp.segments) == 10_001 and ramp.segments[-1].start_sample >= 10**12
    for k in range(10_000):
        sample = k * 10**8 + k
        step = ramp.at_sample(sample)
        assert step.start_sample <= sample < step.end_sample and ramp.at_step(step.step) == step
    assert len(PerDevice(1, 1, 10_001, 10**12, devices=1).compile().segments) == 10_001
    run = ramp.until(10**12 * 15)
    assert run.at_step(run.total_steps - 1).end_sample == 10**12 * 15
    assert time.perf_counter() - began < 5  # 0.15 s when it was written: this only detects a walk over the steps


# --- budgets ----------------------------------------------------------------------------------------------------------


@given(linears() | per_devices() | thresholds(), st.integers(1, 1000), st.sampled_from(LAST_STEPS))
def test_budget_equals_a_simulation(rule: Rule, budget: int, policy: str):
    steps, consumed = 0, 0
    schedule = rule.compile()
    while True:
        left, size = budget - consumed, schedule.at_step(steps).global_batch_size
        if left <= 0 or (left < size and policy == "drop"):
            break
        steps, consumed = steps + 1, consumed + (min(size, left) if policy == "shorten" else size)
    if not steps:
        with pytest.raises(ScheduleError) as caught:
            rule.compile().until(budget, last_step=policy)  # type: ignore[arg-type]
        assert caught.value.nearest == (rule.compile().at_step(0).global_batch_size,)
        return
    run = rule.compile().until(budget, last_step=policy)  # type: ignore[arg-type]
    assert (run.total_steps, run.total_samples) == (steps, consumed)
    assert (run.samples, run.last_step) == (budget, policy)
    assert (run.ending is None) == (consumed == budget and not run.segments[-1].shortfall)


@given(thresholds("tokens"), st.integers(30, 5000))
def test_budget_in_tokens_is_never_overspent(rule: Thresholds, tokens: int):
    run = rule.compile().until(tokens=tokens)
    assert 0 <= tokens - run.total_tokens < 30 and run.total_tokens > 0


@given(schedules(), st.integers(1, 900), st.sampled_from(LAST_STEPS))
def test_a_budget_never_changes_what_comes_before_it(schedule: Schedule, budget: int, policy: str):
    assume(schedule.total_samples is None or budget <= schedule.total_samples)
    assume(policy != "drop" or budget >= schedule.at_step(0).end_sample)
    run = schedule.until(budget, last_step=policy)  # type: ignore[arg-type]
    assert run.total_steps and run.total_steps > 0
    for step in range(run.total_steps - 1):
        assert run.at_step(step) == schedule.at_step(step)
    if policy == "shorten":
        assert run.total_samples == budget
    elif policy == "overshoot":
        assert run.total_samples == schedule.at_sample(budget - 1).end_sample
    else:
        assert run.total_samples == (
            budget if budget == schedule.total_samples else schedule.at_sample(budget).start_sample
        )


@given(schedules(), st.integers(1, 900), st.sampled_from(LAST_STEPS))
def test_the_same_budget_twice_is_the_same_budget(schedule: Schedule, budget: int, policy: str):
    assume(schedule.total_samples is None or budget <= schedule.total_samples)
    assume(policy != "drop" or budget >= schedule.at_step(0).end_sample)
    run = schedule.until(budget, last_step=policy)  # type: ignore[arg-type]
    assert run.until(budget, last_step=policy) == run  # type: ignore[arg-type]


def test_the_ending_as_text():
    run = Constant(32).compile()
    assert run.ending is None and run.until(256).ending is None
    assert run.until(250, last_step="drop").ending == "The last 26 samples are dropped."
    assert run.until(250, last_step="overshoot").ending == "The last step overshoots by 6."


@pytest.mark.parametrize(
    "arguments, nearest",
    [
        ({}, ()),
        ({"samples": 1, "tokens": 1}, ()),
        ({"samples": 0}, (1,)),
        ({"samples": -5}, (1,)),
        ({"tokens": 2047}, (2048,)),
        ({"samples": 10, "last_step": "round"}, LAST_STEPS),
        ({"samples": 31, "last_step": "drop"}, (32,)),
    ],
)
def test_budgets_that_do_not_work(arguments: dict[str, int], nearest: tuple[object, ...]):
    with pytest.raises(ScheduleError) as caught:
        Constant(32, sequence_length=2048).compile().until(**arguments)  # type: ignore[arg-type]
    assert caught.value.nearest == nearest


def test_a_budget_is_not_extended_because_its_last_step_is_history():
    run = Constant(32).compile().until(250)
    with pytest.raises(ScheduleError) as caught:
        run.until(300)
    assert caught.value.nearest == (250,)
    longer = run.continued(250, Constant(32)).until(300)
    assert [longer.at_step(step).global_batch_size for step in (6, 7, 8, 9)] == [32, 26, 32, 18]
    assert longer.until(240, last_step="overshoot").total_samples == 250  # a shortened step stays short


def test_tokens_need_a_sequence_length():
    with pytest.raises(ScheduleError) as caught:
        Constant(32).compile().until(tokens=10**6)
    assert caught.value.field == "sequence_length"
    with pytest.raises(ScheduleError) as caught:
        Schedule((Segment(0, 0, 32, None, 4096),)).sample_at_token(1)  # made by hand, without a start_token
    assert caught.value.field == "sequence_length"
    with pytest.raises(ScheduleError) as caught:
        Constant(32).compile().continued(320, Thresholds(((0, 8),), "tokens", 4096))
    assert caught.value.field == "sequence_length"


# --- history ----------------------------------------------------------------------------------------------------------


@given(schedules(), st.data())
def test_continued_keeps_the_past_and_reads_the_new_rule_by_absolute_position(schedule: Schedule, data: st.DataObject):
    last = (schedule.total_steps or 60) - 1
    boundary = schedule.at_step(data.draw(st.integers(0, last)))
    position, first = boundary.start_sample, boundary.step
    rule = data.draw(linears() | thresholds("samples") | thresholds("steps"))
    after = schedule.continued(position, rule)
    for step in range(first):
        assert (after.at_step(step).start_sample, after.at_step(step).global_batch_size) == (
            schedule.at_step(step).start_sample,
            schedule.at_step(step).global_batch_size,
        )
    sample = position
    for step in range(first, min(after.total_steps or first + 60, first + 60)):
        at = step if rule.unit == "steps" else sample
        expected = [s.global_batch_size for s in rule.switches() if s.at <= at][-1]
        found = after.at_step(step)
        shortened = step + 1 == after.total_steps and after.segments[-1].shortfall
        assert found.start_sample == sample and found.global_batch_size == expected - shortened
        sample = found.end_sample


@given(schedules(), st.data())
def test_a_schedule_continued_with_itself_is_itself(schedule: Schedule, data: st.DataObject):
    boundary = schedule.at_step(data.draw(st.integers(0, (schedule.total_steps or 60) - 1)))
    assert schedule.continued(boundary.start_sample, schedule) == schedule


@given(schedules(), linears() | thresholds(), st.none() | st.integers(300, 900), st.data())
def test_continuing_repeatedly_adds_no_segments(past: Schedule, rule: Rule, budget: int | None, data: st.DataObject):
    new = rule.compile() if budget is None else rule.compile().until(budget)
    at = past.at_step(data.draw(st.integers(0, (past.total_steps or 60) - 1)))
    assume(new.total_samples is None or at.start_sample < new.total_samples)
    joined = past.continued(at.start_sample, new)
    later = joined.at_step(data.draw(st.integers(at.step, (joined.total_steps or at.step + 60) - 1)))
    assert joined.continued(later.start_sample, new).segments == joined.segments


def test_a_run_that_is_extended_keeps_its_segments():
    rule = Thresholds(((0, 8), (80, 16)))
    short, long = rule.compile().until(200), rule.compile().until(300)
    assert short.continued(96, long) == long and short.continued(40, rule).segments == short.segments
    # A step that the old end shortened stays, and so do the steps before it.
    assert [s.steps for s in short.continued(200, long).segments] == [10, 8, 7]


def test_the_ramp_ends_with_the_first_step_of_the_final_batch():
    assert Thresholds(((0, 32), (100, 32))).compile().ramp_steps == 0
    assert Thresholds(((0, 16), (96, 32), (160, 32))).compile().ramp_steps == 6
    assert Thresholds(((0, 32), (96, 16), (160, 32)), allow_falling=True).compile().ramp_steps == 7
    assert Constant(32).compile().until(250).continued(250, Constant(32)).ramp_steps == 0


def test_what_was_dropped_is_still_the_budget_of_a_smaller_batch():
    run = Constant(32).compile().until(250, last_step="drop")
    assert run.total_samples == 224 and run.until(250, last_step="drop") == run
    assert run.until(230, last_step="drop").total_samples == 224
    smaller = run.continued(224, Constant(16))
    assert (smaller.samples, smaller.total_samples) == (250, 240)
    assert run.continued(224, Constant(32)) == run  # a step of 32 would not fit


@given(schedules(), st.integers(0, 200))
def test_continuing_inside_a_step_names_the_boundaries_around_it(schedule: Schedule, position: int):
    assume(schedule.total_samples is None or position < schedule.total_samples)
    starts = [step.start_sample for step in boundaries(schedule, 202)] + [schedule.total_samples or 10**9]
    if position in starts:
        assert schedule.continued(position, Constant(1)).at_sample(position).start_sample == position
        return
    with pytest.raises(ScheduleError) as caught:
        schedule.continued(position, Constant(1))
    below, above = max(s for s in starts if s < position), min(s for s in starts if s > position)
    assert caught.value.nearest == (below, above)
    assert all(schedule.continued(n, Constant(1)) for n in caught.value.nearest)


def test_segments_before_the_position_are_the_same_objects():
    run = Linear(16, 16, 480, target=64).compile()
    after = run.continued(run.segments[2].start_sample, Constant(7))
    assert after.segments[:2] == run.segments[:2] and len(after.segments) == 3
    assert all(a is b for a, b in zip(after.segments[:2], run.segments[:2], strict=True))


def test_thresholds_in_tokens_count_the_tokens_of_the_past():
    run = (
        Constant(10, sequence_length=100)
        .compile()
        .continued(50, Thresholds(((0, 10), (10_000, 20)), "tokens", sequence_length=200))
    )
    # 50 samples of 100 tokens are 5,000; the other 5,000 are 25 samples of 200: three steps of 10.
    assert [(s.global_batch_size, s.start_sample, s.start_token) for s in run.segments] == [
        (10, 0, 0),
        (10, 50, 5_000),
        (20, 80, 11_000),
    ]


def test_a_budget_stays_until_it_is_spent():
    run = Constant(32).compile().until(250)
    assert run.continued(64, Constant(16)).total_samples == 250
    assert run.continued(250, Constant(16)).total_samples is None
    assert run.continued(64, Constant(16).compile().until(100, last_step="drop")).total_samples == 96
    with pytest.raises(ScheduleError) as caught:
        run.continued(128, Constant(16).compile().until(100))
    assert caught.value.nearest == (96,)
    with pytest.raises(ScheduleError) as caught:
        run.continued(251, Constant(16))
    assert caught.value.field == "position"


# --- comparing --------------------------------------------------------------------------------------------------------


def test_compare_names_sizes_that_only_one_schedule_has():
    rows = compare(parse_thresholds("0:8 80:16").compile(), parse_thresholds("0:8 40:12 88:16").compile().until(200))
    assert rows == (Compared(8, 10, 5), Compared(12, 0, 4), Compared(16, None, 7))
    assert [row.difference for row in rows] == [-5, 4, None]


# --- errors -----------------------------------------------------------------------------------------------------------


def refused(make: Callable[[], object]) -> ScheduleError:
    with pytest.raises(ScheduleError) as caught:
        make()
    json.dumps(caught.value.record())  # every field survives --json
    return caught.value


@given(st.integers(1, 60), st.integers(1, 200), st.integers(1, 300))
def test_nearest_increments_by_brute_force(start: int, increment: int, span: int):
    assume(span % increment)
    error = refused(lambda: Linear(start, increment, 1000, target=start + span))
    fit = [n for n in range(1, span + 1) if span % n == 0]
    expected = [
        max((n for n in fit if n < increment), default=None),
        min((n for n in fit if n > increment), default=None),
    ]
    assert list(error.nearest) == [n for n in expected if n is not None]
    assert (error.field, error.given) == ("increment", increment)
    assert all(Linear(start, n, 1000, target=start + span) for n in error.nearest)


@given(st.integers(1, 6), st.integers(1, 60), st.integers(1, 200), st.integers(1, 120))
def test_nearest_increments_per_device_by_brute_force(devices: int, start: int, increment: int, span: int):
    assume(span % increment)

    def ramp(by: object) -> PerDevice:
        return PerDevice(Fraction(start, devices), by, Fraction(start + span, devices), 100, devices)  # type: ignore[arg-type]

    error = refused(lambda: ramp(Fraction(increment, devices)))
    fit = [n for n in range(1, span + 1) if span % n == 0]
    expected = [
        max((n for n in fit if n < increment), default=None),
        min((n for n in fit if n > increment), default=None),
    ]
    assert [fraction(n) * devices for n in error.nearest] == [n for n in expected if n is not None]
    assert all(ramp(n).compile() for n in error.nearest)


@given(st.integers(1, 50), st.integers(1, 5000))
def test_nearest_doublings_by_brute_force(start: int, target: int):
    reachable = [start * 2**k for k in range(14)]
    assume(target not in reachable and target > start)
    error = refused(lambda: Doubling(start, target, every=100))
    assert error.nearest == (max(n for n in reachable if n < target), min(n for n in reachable if n > target))


@given(st.integers(2, 50), st.integers(0, 200), st.integers(1, 60))
def test_nearest_threshold_in_tokens_by_brute_force(length: int, at: int, gap: int):
    def works(after: int) -> bool:
        pairs = ((0, 8), (length + at, 16), (after, 32))
        try:
            return bool(Thresholds(pairs, "tokens", length))
        except ScheduleError:
            return False

    after = length + at + gap
    assert works(after) == (after // length > (length + at) // length)  # Megatron's own rule
    if not works(after):
        error = refused(lambda: Thresholds(((0, 8), (length + at, 16), (after, 32)), "tokens", length))
        assert error.nearest == (next(n for n in range(after, after + 100) if works(n)),)


def test_too_many_stages_name_the_smallest_increment_that_works():
    span = 2 * MOST_STAGES
    error = refused(lambda: Linear(1, 1, 10**9, target=1 + span))
    assert error.nearest == (4,)  # 2 would make 100,001 stages
    assert Linear(1, 4, 10**9, target=1 + span).num_increments == span // 4
    error = refused(lambda: PerDevice(0.5, 0.5, 0.5 + span // 2, 10**9, devices=2))
    assert error.nearest == (2,)
    assert PerDevice(0.5, 2, 0.5 + span // 2, 10**9, devices=2).num_increments == span // 4


@pytest.mark.parametrize(
    "make, field, nearest",
    [
        (lambda: Constant(0), "global_batch_size", (1,)),
        (lambda: Constant(8.0), "global_batch_size", ()),  # type: ignore[arg-type]
        (lambda: Constant(True), "global_batch_size", ()),
        (lambda: Constant(8, sequence_length=0), "sequence_length", (1,)),
        (lambda: Linear(-1, 8, 96, 32), "start", (1,)),
        (lambda: Linear(16, 0, 96, 32), "increment", (1,)),
        (lambda: Linear(16, 8, -1, 32), "samples", (0,)),
        (lambda: Linear(64, 8, 96, 32), "start", (32,)),
        (lambda: PerDevice(0, 1, 4, 15, 1), "start", ()),
        (lambda: PerDevice("x", 1, 4, 15, 1), "start", ()),
        (lambda: PerDevice(1, 1, 4, 15, 0), "devices", (1,)),
        (lambda: PerDevice(4, 1, 1, 15, 1), "start", (1,)),
        (lambda: PerDevice(0.25, 0.5, 2.25, 15, 2), "start", (0.5,)),
        (lambda: PerDevice("1/4", 1, "5/4", 15, 3), "start", ("1/3",)),
        (lambda: Doubling(64, 32, 10), "start", (32,)),
        (lambda: Doubling(8, 16, 0), "every", (1,)),
        (lambda: Doubling(8, 16, 10, "tokens"), "sequence_length", ()),
        (lambda: Doubling(8, 16, 10, "tokens", 4096), "every", (4096,)),
        (lambda: Doubling(8, 16, 10, "weeks"), "unit", ("samples", "tokens", "steps")),  # type: ignore[arg-type]
        (lambda: Linear(1, 1, 10**16, 2), "samples", (10**15,)),
        (lambda: PerDevice("1e999", 1, 4, 15, 1), "start", ()),
        (lambda: Thresholds(((0, 8), (5, 16), (4, 32)), "tokens", 3), "threshold", (6,)),
        (lambda: Thresholds(()), "thresholds", ()),
        (lambda: Thresholds(((0, 8),), "epochs"), "unit", ("samples", "tokens", "steps")),  # type: ignore[arg-type]
        (lambda: Thresholds(((5, 8),)), "threshold", (0,)),
        (lambda: Thresholds(((0, 8), (5, 16), (5, 32))), "threshold", (6,)),
        (lambda: Thresholds(((0, 8), (9, 4))), "global_batch_size", (8,)),
        (lambda: Thresholds(((0, 8), (9, 16)), sequence_length=(1, 2, 3)), "sequence_length", ()),
        (lambda: Thresholds(((0, 8),), "tokens"), "sequence_length", ()),
        (lambda: parse_thresholds("0:8.5"), "global_batch_size", (8, 9)),
        (lambda: parse_thresholds("0:8 x:9"), "threshold", ()),
        (lambda: parse_thresholds("0=8"), "thresholds", ()),
        (lambda: Schedule(()), "segments", ()),
        (lambda: Schedule((Segment(1, 0, 8, None),)), "segments", ()),
        (lambda: Schedule((Segment(0, 0, 8, 0),)), "segments", ()),
        (lambda: Schedule((Segment(0, 0, 8, 1, shortfall=8),)), "segments", ()),
        (lambda: Schedule((Segment(0, 0, 8, None), Segment(1, 8, 8, None))), "segments", ()),
    ],
)
def test_errors_are_typed(make: Callable[[], object], field: str, nearest: tuple[object, ...]):
    error = refused(make)
    assert (error.field, error.nearest) == (field, nearest)


def test_all_violations_are_collected():
    error = refused(lambda: Linear(0, -1, -5, 0, sequence_length=0))
    assert [v.field for v in error.violations] == ["start", "increment", "target", "samples", "sequence_length"]
    error = refused(lambda: Linear(40, 7, 96, 32))
    assert [v.field for v in error.violations] == ["start", "increment"]
    error = refused(lambda: parse_thresholds("0:8.5 x:9 12"))
    assert [v.given for v in error.violations] == ["8.5", "x", "12"]
    error = refused(lambda: parse_thresholds("5:32 7:16 7:8"))
    assert len(error.violations) == 3  # the first threshold, a fall, a duplicate


def test_an_error_reads_in_three_parts():
    error = refused(lambda: Linear(256, 100, 50_000_000, target=1024))
    assert str(error) == (
        "increment=100 does not divide the ramp: target 1024 − start 256 = 768, and 768 / 100 = 7.68. "
        "Nearest: 96 (8 increments) or 128 (6 increments)."
    )


# --- records ----------------------------------------------------------------------------------------------------------


@given(schedules() | linears() | per_devices() | thresholds() | st.builds(Constant, st.integers(1, 99)))
def test_json_round_trip(value: Schedule | Rule):
    assert decode(type(value), json.loads(json.dumps(encode(value)))) == value


def test_json_round_trip_of_the_small_records():
    for value in (Doubling(8, 16, 10**6, "tokens", 4096), Step(0, 0, 8, 0), Switch(0, 8, None), Compared(8, 1, None)):
        assert decode(type(value), json.loads(json.dumps(encode(value)))) == value


def test_a_per_device_size_is_the_decimal_it_prints_as():
    ramp = PerDevice(0.1, 0.1, 1.0, 100, devices=100)
    assert ramp.num_increments == 9
    assert [size for size, _ in groupby(sizes_of(ramp.compile(), 20))] == list(range(10, 101, 10))


def test_walk_after_a_past_skips_what_is_past_without_a_note():
    past = (Segment(0, 0, 50, 2),)
    segments, notes = walk((Switch(0, 8), Switch(60, 16), Switch(90, 32)), "samples", past)
    assert [(s.first_step, s.start_sample, s.global_batch_size) for s in segments] == [(2, 100, 32)] and not notes
