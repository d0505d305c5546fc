"""Learning rates of a ramp, and horizons that do not depend on it."""

from __future__ import annotations

import json
from math import isclose
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.core.errors import ScheduleError
from batchwright.core.ramp.learning_rate import (
    DECAYS,
    RULES,
    SampleSchedule,
    check_horizon,
    scale,
    stage_rates,
    suggested_rule,
)
from batchwright.core.ramp.schedule import Segment
from tests.examples import many

DEEPSPEED, OLMO = json.loads((Path(__file__).parents[2] / "vectors" / "ramp.json").read_text())["lr_scaling"]
RAMP = (Segment(0, 0, 256, 100), Segment(100, 25_600, 512, 100), Segment(200, 76_800, 1024, None))


@pytest.mark.parametrize("rule", RULES)
def test_deepspeed_vector(rule):
    found = scale(rule, DEEPSPEED["base_lr"], DEEPSPEED["base_batch"], DEEPSPEED["batch"])
    assert isclose(found, DEEPSPEED[rule], rel_tol=1e-15)


def test_olmo_vector_and_the_rule_it_suggests():
    assert scale("sqrt", 1.0, 1, OLMO["ratio"]) == OLMO["factor"]
    assert {suggested_rule(name).rule for name in OLMO["optimizers_allowed"]} == {"sqrt"}


def test_suggestions_are_text_and_change_nothing():
    assert suggested_rule("torch.optim.SGD").rule == "linear" and "Goyal" in suggested_rule("SGD").reason
    assert suggested_rule("RMSprop").rule == "sqrt"
    assert suggested_rule("Lion").rule == "none" and "Lion" in suggested_rule("Lion").reason


def test_all_violations_of_a_scaling_request():
    with pytest.raises(ScheduleError, match="is not one of none, sqrt, linear") as caught:
        scale("cubic", 0.0, 0, -1)
    assert [v.field for v in caught.value.violations] == ["lr_scaling", "base_lr", "base_batch", "batch"]


def test_table_before_and_after_each_stage():
    rows = stage_rates(RAMP, "linear", 1e-3)
    assert [(row.before, row.after, row.factor) for row in rows] == [
        (1e-3, 1e-3, 1.0),
        (1e-3, 2e-3, 2.0),
        (2e-3, 4e-3, 4.0),
    ]
    assert [(row.index, row.first_step, row.start_sample) for row in rows] == [
        (0, 0, 0),
        (1, 100, 25_600),
        (2, 200, 76_800),
    ]
    assert [row.after for row in stage_rates(RAMP, "linear", 4e-3, base_batch=1024)] == [1e-3, 2e-3, 4e-3]
    assert {row.after for row in stage_rates(RAMP, "none", 1e-3)} == {1e-3}


@pytest.mark.parametrize("decay", DECAYS)
def test_schedule_by_samples(decay):
    schedule = SampleSchedule(peak_lr=1.0, end_sample=1000, warmup_samples=200, decay=decay, min_lr=0.1)
    assert (schedule.at(0), schedule.at(100), schedule.at(200)) == (0.0, 0.5, 1.0)
    assert schedule.at(600) == (1.0 if decay == "constant" else pytest.approx(0.55))
    assert schedule.at(1000) == schedule.at(5000) == (1.0 if decay == "constant" else 0.1)
    assert schedule.at(200, factor=2.0) == 2.0


@settings(max_examples=many(100), deadline=None)
@given(sample=st.integers(0, 2000), decay=st.sampled_from(DECAYS), warmup=st.integers(0, 1000))
def test_schedule_stays_between_its_bounds_and_only_falls_after_the_warm_up(sample, decay, warmup):
    schedule = SampleSchedule(peak_lr=3.0, end_sample=1000, warmup_samples=warmup, decay=decay, min_lr=0.5)
    assert 0 <= schedule.at(sample) <= 3.0
    if sample >= warmup:
        assert 0.5 <= schedule.at(sample + 1) <= schedule.at(sample)


def test_schedule_checks_its_parameters():
    with pytest.raises(ScheduleError) as caught:
        SampleSchedule(peak_lr=1.0, end_sample=100, warmup_samples=200, decay="stairs", min_lr=2.0)
    assert [v.field for v in caught.value.violations] == ["decay", "warmup_samples", "min_lr"]
    assert caught.value.violations[1].nearest == (100,)


def test_horizon_in_samples_ends_at_the_budget():
    check = check_horizon(RAMP, 1_000_000, samples=1_000_000)
    assert check.ok and check.off_by_samples == 0 and "ends at the budget of 1M samples" in check.message


def test_horizon_in_steps_misses_under_a_ramp():
    # 1,024,000 / 1024 = 1000 steps, counted as if every step were full: the ramp's 200 steps hold 76,800 samples only.
    check = check_horizon(RAMP, 1_024_000, steps=1000)
    assert not check.ok
    assert check.ends_at_sample == 76_800 + 800 * 1024 and check.off_by_samples == 76_800 - 200 * 1024
    assert "ends at sample 896,000, 128,000 before the budget of 1,024,000 (12.5%)" in check.message
    late = check_horizon(RAMP, 76_800, steps=201)
    assert late.off_by_samples == 1024 and "1,024 after the budget" in late.message


@settings(max_examples=many(200), deadline=None)
@given(
    stages=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 5)), min_size=1, max_size=4),
    open_end=st.booleans(),
    steps=st.integers(0, 30),
)
def test_sample_after_steps_equals_a_walk(stages, open_end, steps):
    segments, sizes, sample = [], [], 0
    for batch, count in stages:
        segments.append(Segment(len(sizes), sample, batch, count))
        sizes += [batch] * count
        sample += batch * count
    if open_end:
        last = segments[-1]
        segments[-1] = Segment(last.first_step, last.start_sample, last.global_batch_size, None)
    walked = sum((sizes + [sizes[-1]] * 30)[:steps])
    assert check_horizon(segments, 1, steps=steps).ends_at_sample == walked


def test_shortened_last_step_ends_at_the_budget():
    assert check_horizon([Segment(0, 0, 256, 10, shortfall=60)], 2500, steps=10).ok


def test_horizon_is_counted_one_way():
    for both in ({}, {"samples": 1, "steps": 1}):
        with pytest.raises(ScheduleError, match="needs exactly one of samples and steps"):
            check_horizon(RAMP, 100, **both)
