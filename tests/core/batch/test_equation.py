"""Solving the equation, compared with all possible splits."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.core.batch.equation import MOST_ALTERNATIVES, Split, Unknowns, solve
from batchwright.core.batch.pipeline import PipelineRule
from batchwright.core.errors import PlanError
from tests.examples import many

small = st.integers(1, 12)
maybe = st.none() | small


def every_split(batch: int) -> list[Split]:
    return [
        Split(m, a, batch // (m * a))
        for m, a in product(range(1, batch + 1), repeat=2)
        if batch % m == 0 and batch // m % a == 0
    ]


def allowed(given: Unknowns) -> list[Split]:
    """Every valid choice, by brute force."""
    return [
        s
        for s in every_split(given.global_batch_size or 0)
        if given.micro_batch_size in (None, s.micro_batch_size)
        and given.accumulation_steps in (None, s.accumulation_steps)
        and given.data_parallel_size in (None, s.data_parallel_size)
        and s.micro_batch_size <= (given.max_micro_batch_size or s.micro_batch_size)
        and (given.data_parallel_size is not None or s.data_parallel_size % given.rank_step == 0)
        and (given.pipeline is None or given.pipeline.refusal(s.accumulation_steps) is None)
    ]


@settings(deadline=None, max_examples=many(200))
@given(st.integers(1, 96), maybe, maybe, maybe, maybe, st.sampled_from([1, 1, 2, 3, 4]))
def test_every_split_is_found_and_the_best_is_first(batch, micro, steps, ranks, limit, rank_step):
    given_ = Unknowns(batch, micro, steps, ranks, limit, rank_step)
    expected = allowed(given_)
    try:
        found = solve(given_)
    except PlanError:
        assert expected == []
        return
    # the largest micro batch that fits first, then the least accumulation
    assert list(found) == sorted(expected, key=lambda s: (-s.micro_batch_size, s.accumulation_steps))


@settings(deadline=None, max_examples=many(100))
@given(
    st.integers(1, 96), maybe, maybe, st.integers(1, 4), maybe, st.integers(2, 4), st.sampled_from(["1f1b", "circular"])
)
def test_a_pipeline_ranks_by_its_cost_and_allows_only_its_own(batch, micro, steps, ranks, limit, stages, schedule):
    rule = PipelineRule(schedule, stages)
    given_ = Unknowns(batch, micro, steps, ranks, limit, pipeline=rule, sequence_length=512)
    expected = allowed(given_)
    try:
        found = solve(given_)
    except PlanError:
        assert expected == []
        return
    assert set(found) == set(expected)
    costs = [rule.cost(s.accumulation_steps, batch // ranks * 512) for s in found]
    assert costs == sorted(costs)


def test_the_whole_message_of_a_batch_that_does_not_divide():
    with pytest.raises(PlanError) as caught:
        solve(Unknowns(1000, 3, None, 64))
    assert str(caught.value).startswith(
        "global_batch_size=1000 is not a whole number of accumulation steps: micro_batch_size 3 × data_parallel_size 64 = "
        "192, and 1000 / 192 = 5.21. Nearest: 960 (5 steps) or 1152 (6 steps)."
    )
    assert (caught.value.field, caught.value.given, caught.value.nearest) == ("global_batch_size", 1000, (960, 1152))


def test_a_contradiction_shows_the_product_and_every_way_out():
    with pytest.raises(PlanError) as caught:
        solve(Unknowns(64, 4, 8, 4))
    assert (
        "global_batch_size=64 contradicts micro_batch_size 4 × accumulation_steps 8 × data_parallel_size 4 = 128"
        in str(caught.value)
    )
    assert "micro_batch_size=2, or accumulation_steps=4, or data_parallel_size=2" in str(caught.value)
    assert caught.value.nearest == (128,)


def test_an_error_names_a_number_that_fits():
    with pytest.raises(PlanError) as caught:
        solve(Unknowns(64, 16, None, 2, max_micro_batch_size=5))
    assert (caught.value.field, caught.value.nearest) == ("micro_batch_size", (4,))
    with pytest.raises(PlanError) as caught:
        solve(Unknowns(64, None, 2, 2, max_micro_batch_size=5))  # 16 per micro batch, derived
    assert (caught.value.field, caught.value.nearest) == ("accumulation_steps", (8,))
    assert "max_micro_batch_size=5" in str(caught.value)


def test_without_numbers_the_error_says_what_to_give():
    with pytest.raises(
        PlanError, match=r"Not enough is known to plan a batch: nothing is known\. Give global_batch_size"
    ):
        solve(Unknowns(None, None, None, None))
    with pytest.raises(PlanError, match="only data_parallel_size=8 is known"):
        solve(Unknowns(None, None, None, 8))


def test_no_global_batch_takes_one_accumulation_step_or_a_full_pipeline():
    assert solve(Unknowns(None, 4, None, 2)) == (Split(4, 1, 2),)
    assert solve(Unknowns(None, None, None, 2, max_micro_batch_size=4)) == (Split(4, 1, 2),)
    assert solve(Unknowns(None, 4, None, 2, pipeline=PipelineRule("circular", 4, delayed=True))) == (Split(4, 8, 2),)
    assert solve(Unknowns(None, 4, None, None, rank_step=6)) == (Split(4, 1, 6),)


def test_alternatives_are_bounded():
    assert len(solve(Unknowns(963_761_198_400, None, None, None))) == MOST_ALTERNATIVES
