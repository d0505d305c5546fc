"""Pipeline schedules: a simulation of the stages, brute force over the valid numbers, and the cost."""

from __future__ import annotations

from fractions import Fraction
from math import sqrt

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.core.batch.pipeline import SCHEDULES, PipelineRule
from batchwright.core.errors import PlanError
from tests.examples import many

stages, microbatches = st.integers(1, 8), st.integers(1, 24)


def simulate(orders: list[list[tuple[str, int]]]) -> Fraction:
    """The idle share when every stage does its work in the given order, one unit of time each.

    A forward waits for the stage before it, a backward for the stage behind it (and for its own forward at the last).
    """
    p = len(orders)
    done: dict[tuple[str, int, int], int] = {}
    clock, at = [0] * p, [0] * p
    while any(at[s] < len(orders[s]) for s in range(p)):
        moved = False
        for s in range(p):
            while at[s] < len(orders[s]):
                kind, m = orders[s][at[s]]
                needs = (kind, s - 1, m) if kind == "F" else (kind, s + 1, m)
                if kind == "F" and s == 0:
                    ready = 0
                elif kind == "B" and s == p - 1:
                    ready = done.get(("F", s, m))
                else:
                    ready = done.get((needs[0], needs[1], m))
                if ready is None:
                    break
                clock[s] = max(clock[s], ready) + 1
                done[kind, s, m] = clock[s]
                at[s] += 1
                moved = True
        assert moved, "the schedule is stuck"
    total = max(clock)
    work = len(orders[0])
    return Fraction(total - work, total)


def gpipe(p: int, m: int) -> list[list[tuple[str, int]]]:
    return [[("F", i) for i in range(m)] + [("B", i) for i in range(m)] for _ in range(p)]


def one_forward_one_backward(p: int, m: int) -> list[list[tuple[str, int]]]:
    orders: list[list[tuple[str, int]]] = []
    for s in range(p):
        warm = min(m, p - 1 - s)
        order = [("F", i) for i in range(warm)]
        for i in range(m - warm):
            order += [("F", warm + i), ("B", i)]
        orders.append(order + [("B", i) for i in range(m - warm, m)])
    return orders


@settings(deadline=None, max_examples=many(60))
@given(stages, microbatches)
def test_gpipe_and_1f1b_idle_as_long_as_a_simulation_of_them(p, m):
    assert PipelineRule("gpipe", p).bubble(m) == simulate(gpipe(p, m))
    assert PipelineRule("1f1b", p).bubble(m) == simulate(one_forward_one_backward(p, m))


def simulate_zero_bubble(p: int, m: int) -> Fraction:
    """The idle share of ZB1P, unit by unit of time: F, B (input) and W (weights) of every stage and microbatch.

    A stage does a backward if one is ready, else a forward if fewer than p - stage microbatches wait for their backward,
    else a W.
    """
    done: dict[tuple[str, int, int], int] = {}  # when it ended
    counts = [{"F": 0, "B": 0, "W": 0} for _ in range(p)]
    now = 0
    while any(count["W"] < m for count in counts):
        for s, count in enumerate(counts):
            forward, backward = count["F"], count["B"]
            above = ("B", s + 1, backward) if s < p - 1 else ("F", s, backward)
            if backward < m and done.get(above, now + 1) <= now:
                kind = "B"
            elif (
                forward < m
                and forward - backward < p - s
                and (s == 0 or done.get(("F", s - 1, forward), now + 1) <= now)
            ):
                kind = "F"
            elif count["W"] < backward:
                kind = "W"
            else:
                continue
            done[kind, s, count[kind]] = now + 1
            count[kind] += 1
        now += 1
    return Fraction(now - 3 * m, now)


@settings(deadline=None, max_examples=many(100))
@given(stages, microbatches)
def test_zero_bubble_idles_as_long_as_a_simulation_of_it(p, m):
    assert PipelineRule("zero-bubble", p).bubble(m) == simulate_zero_bubble(p, m)


def test_zero_bubble_with_fewer_microbatches_than_stages():
    assert simulate_zero_bubble(2, 1) == Fraction(2, 5)
    assert PipelineRule("zero-bubble", 2).bubble(1) == Fraction(2, 5)


@given(stages, st.integers(1, 4), microbatches, st.booleans())
def test_bubbles_equal_the_documented_formulas(p, v, m, delayed):
    d = 2 if delayed else 1
    assert PipelineRule("interleaved", p, v).bubble(m) == Fraction(p - 1, v * m + p - 1)
    assert PipelineRule("circular", p, v, delayed=delayed).bubble(m) == Fraction(d * (p - 1), v * m + d * (p - 1))
    waits = p - 1 + max(0, p - m)
    assert PipelineRule("zero-bubble", p).bubble(m) == Fraction(waits, 3 * m + waits)
    one = PipelineRule("1f1b", p)
    assert PipelineRule("interleaved", p, v).bubble(m) <= one.bubble(m)
    if m >= p:  # the idle time (not its share) is 1/v with v virtual stages, and 1/3 with zero-bubble
        zero = PipelineRule("zero-bubble", p)
        assert zero.bubble(m) / (1 - zero.bubble(m)) == Fraction(p - 1, 3 * m)


def legal(schedule: str, p: int, m: int, group: int | None, delayed: bool) -> bool:
    """The rules as the frameworks state them."""
    if schedule == "interleaved":  # Megatron: p ≤ N ≤ m; m mod N = 0 or ≥ p
        n = group or p
        return p == 1 or (p <= n <= m and (m % n == 0 or m % n >= p))
    if schedule == "circular":  # MaxText
        return m % p == 0 and (not delayed or m >= 2 * p)
    if schedule in ("zero-bubble", "torch-interleaved"):  # PyTorch
        return m % max(1, m // p) == 0
    return m >= {"torch-1f1b": p, "dualpipev": 2 * p}.get(schedule, 1)


def virtual(schedule: str, v: int) -> int:
    """The virtual stages that a schedule takes, as close to `v` as it can."""
    if schedule in ("zbv", "dualpipev"):
        return 2
    return 1 if schedule in ("gpipe", "1f1b", "torch-1f1b", "zero-bubble") else v


@settings(deadline=None, max_examples=many(200))
@given(st.sampled_from(SCHEDULES), stages, st.integers(1, 60), st.none() | st.integers(0, 6), st.booleans())
def test_legal_numbers_and_the_nearest_of_them_equal_brute_force(schedule, p, m, more, delayed):
    group = p + more if more is not None and schedule == "interleaved" else None
    delayed = delayed and schedule == "circular"
    rule = PipelineRule(schedule, p, virtual(schedule, 1), group, delayed)
    every = [n for n in range(1, 140) if legal(schedule, p, n, group, delayed)]
    assert (rule.refusal(m) is None) == (m in every)
    assert rule.refusal(0) is not None
    below, above = [n for n in every if n <= m][-1:], [n for n in every if n > m][:1]
    assert rule.nearest(m) == (*below, *above)
    assert rule.nearest(m, most=m) == tuple(below)


def test_the_recommendation_of_the_research():
    rule = PipelineRule("1f1b", 8)
    grid = range(16, 512, 16)
    assert rule.best(grid, 131_072) == 48
    assert sqrt(131_072 * 7 / 512) == pytest.approx(42.3, abs=0.05)
    # The continuous optimum is 84.7. On multiples of 16 the two neighbours are 80 and 96; on multiples of 32, 96.
    assert rule.best(range(32, 512, 32), 524_288) == 96
    assert rule.best(grid, 524_288) == 80
    assert rule.cost(80, 524_288) < rule.cost(96, 524_288) < rule.cost(64, 524_288)


@settings(deadline=None, max_examples=many(100))
@given(st.sampled_from(SCHEDULES), st.integers(2, 8), st.integers(1, 4), st.integers(8, 22))
def test_the_best_number_is_legal_and_next_to_the_continuous_optimum(schedule, p, v, log_tokens):
    v = virtual(schedule, v)
    rule, tokens = PipelineRule(schedule, p, v), 2**log_tokens
    best = rule.best(range(1, 1500), tokens)
    assert rule.refusal(best) is None
    cost = {m: rule.cost(m, tokens) for m in range(1, 1500) if rule.refusal(m) is None}
    assert cost[best] == min(cost.values())
    if schedule in ("torch-interleaved", "looped-bfs", "zbv", "dualpipev"):
        return  # with fewer microbatches than fill the stages, their idle time has another slope
    idle = Fraction(p - 1, 3) if schedule == "zero-bubble" else p - 1
    optimum = sqrt(tokens * idle / (v * 512))
    if schedule == "zero-bubble" and optimum < p:  # the idle time falls by 1/3 with every microbatch up to p
        optimum = min(p, sqrt(tokens * (2 * p - 1) / (2 * 512)))
    ordered = sorted(cost)
    below, above = [m for m in ordered if m <= optimum][-1:], [m for m in ordered if m > optimum][:1]
    assert best in below + above  # the cost falls and then rises, so only the two neighbours can be best


def test_without_a_valid_candidate_nothing_is_recommended():
    assert PipelineRule("circular", 4).best([1, 2, 3], 4096) is None


def test_what_a_schedule_does_not_have_is_refused():
    for wrong, field in (
        ({"schedule": "2f2b", "stages": 2}, "pipeline_schedule"),
        ({"schedule": "1f1b", "stages": 2, "virtual_stages": 2}, "virtual_stages"),
        ({"schedule": "zbv", "stages": 2, "virtual_stages": 1}, "virtual_stages"),
        ({"schedule": "1f1b", "stages": 2, "delayed": True}, "delayed_forwarding"),
        ({"schedule": "circular", "stages": 2, "group": 4}, "pipeline_group"),
        ({"schedule": "interleaved", "stages": 4, "group": 2}, "pipeline_group"),
    ):
        with pytest.raises(PlanError) as caught:
            PipelineRule(**wrong)
        assert caught.value.field == field
    assert caught.value.nearest == (4,)
