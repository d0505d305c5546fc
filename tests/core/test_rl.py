"""prompts -> responses -> updates -> micro batches, compared with a simulation of every response."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright import RLPlan, rl
from batchwright.core.codec import decode, encode
from batchwright.core.errors import ConfigError, PlanError
from batchwright.core.rl import resized
from tests.examples import many

n = st.integers(1, 12)


@st.composite
def jobs(draw: st.DrawFn) -> dict[str, Any]:
    job = {"prompts": draw(st.integers(1, 48)), "generations": draw(st.integers(1, 8))}
    for name, values in {
        "updates": n,
        "iterations": st.integers(1, 4),
        "rounds_ahead": st.integers(0, 3),
        "data_parallel_size": n,
        "train_micro_prompts": n,
        "train_micro_responses": n,
        "rollout_micro_prompts": n,
        "micro_batch_size": n,
    }.items():
        if draw(st.booleans()):
            job[name] = draw(values)
    return job


def accepts(job: dict[str, Any]) -> bool:
    try:
        rl(**job)
    except PlanError:
        return False
    return True


@settings(deadline=None, max_examples=many(300))
@given(jobs())
def test_every_accepted_round_deals_out_every_response_once(job):
    try:
        plan = rl(**job)
    except PlanError:
        return
    responses = [(prompt, k) for prompt in range(job["prompts"]) for k in range(job["generations"])]
    assert plan.responses_per_round == len(responses)
    size = plan.responses_per_update
    updates = [responses[i : i + size] for i in range(0, len(responses), size)]
    assert len(updates) == plan.updates_per_pass
    groups = [{prompt for prompt, _ in update} for update in updates]
    assert all(len(group) == plan.prompts_per_update for group in groups)
    assert len(set.union(*groups)) == sum(map(len, groups)), "a group is split across updates"
    for update in updates:
        share = len(update) // plan.data_parallel_size
        ranks = [update[i : i + share] for i in range(0, len(update), share)]
        assert len(ranks) == plan.data_parallel_size
        for rank in ranks:
            micro = [rank[i : i + plan.train_micro_responses] for i in range(0, share, plan.train_micro_responses)]
            assert len(micro) == plan.accumulation_steps
            assert {len(part) for part in micro} == {plan.train_micro_responses}
    assert plan.rollout_micro_prompts * plan.rollout_micro_steps == plan.prompts_per_round
    assert plan.rollout_micro_responses == plan.rollout_micro_prompts * plan.generations_per_prompt
    if plan.train_micro_prompts is not None:
        assert plan.train_micro_prompts * plan.generations_per_prompt == plan.train_micro_responses


def simulated_lag(updates: int, iterations: int, ahead: int, rounds: int = 12) -> int:
    """The most updates between the policy that sampled and the policy that learns, by simulating rounds."""
    version, queue, worst = 0, [], 0
    for _ in range(rounds):
        while len(queue) < ahead + 1:
            queue.append(version)  # sampled with the current policy
        sampled = queue.pop(0)
        for _ in range(updates * iterations):
            worst = max(worst, version - sampled)
            version += 1
    return worst


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 3))
def test_the_worst_lag_equals_a_simulation(updates, iterations, ahead):
    plan = rl(prompts=12, generations=2, updates=updates, iterations=iterations, rounds_ahead=ahead)
    assert plan.updates_per_round == updates * iterations
    assert plan.worst_policy_lag_updates == simulated_lag(updates, iterations, ahead)
    assert plan.on_policy == (plan.worst_policy_lag_updates == 0)


@settings(deadline=None, max_examples=many(300))
@given(jobs())
def test_every_nearest_equals_brute_force(job):
    try:
        rl(**job)
        return
    except PlanError as error:
        if len(error.violations) > 1:
            return
        name, nearest = error.field, list(error.nearest)
    if name == "train_micro_responses" and "train_micro_prompts" in job:
        return  # one number is given twice, with different values
    wanted = job.get(name, 1)
    works = [value for value in range(1, job["prompts"] * job["generations"] + 1) if accepts({**job, name: value})]
    if not works:
        return  # another number is wrong as well: its error comes after this one
    assert nearest == [*[v for v in works if v < wanted][-1:], *[v for v in works if v > wanted][:1]]


def test_the_effective_batch_is_prompts_times_generations():
    plan = rl(prompts=32, generations=8, train_micro_prompts=4)
    assert (plan.responses_per_round, plan.responses_per_update, plan.accumulation_steps) == (256, 256, 8)
    assert (plan.on_policy, plan.worst_policy_lag_updates) == (True, 0)


@pytest.mark.parametrize("off", [None, -1, "-1", "none", "None", "null", "off"])
def test_minus_one_and_none_mean_no_micro_batching(off):
    plan = rl(prompts=32, generations=8, train_micro_prompts=off, train_micro_responses=off, rollout_micro_prompts=off)
    assert (plan.accumulation_steps, plan.train_micro_responses, plan.rollout_micro_steps) == (1, 256, 1)


def test_groups_are_never_split_across_an_update():
    with pytest.raises(PlanError) as caught:
        rl(prompts=32, generations=8, updates=5)
    assert "updates=5 would split a prompt's group of responses: 32 prompts / 5 updates = 6.40" in str(caught.value)
    assert caught.value.nearest == (4, 8)


def test_contradicting_spellings_show_the_product():
    with pytest.raises(PlanError, match="4 prompts × 8 generations = 32 responses") as caught:
        rl(prompts=32, generations=8, train_micro_prompts=4, train_micro_responses=8)
    assert caught.value.nearest == (32,)
    assert rl(prompts=32, generations=8, train_micro_prompts=4, train_micro_responses=32).accumulation_steps == 8


def test_one_error_lists_everything_that_is_wrong():
    with pytest.raises(PlanError) as caught:
        rl(prompts=32, generations=8, train_micro_responses=7, rollout_micro_prompts=5)
    assert [v.field for v in caught.value.violations] == ["train_micro_responses", "rollout_micro_prompts"]
    with pytest.raises(ConfigError) as caught:
        rl(prompts=0, generations="x", updates=-1, rounds_ahead=1.5)
    assert [v.field for v in caught.value.violations] == ["prompts", "generations", "updates", "rounds_ahead"]


def test_a_ramp_keeps_the_micro_batches_that_were_given():
    """Also those that happened to be the whole of the first stage: a larger one may not fit into memory."""
    given = resized(rl(prompts=8, generations=4, train_micro_responses=32, rollout_micro_prompts=8), 32)
    assert (given.train_micro_responses, given.accumulation_steps) == (32, 4)
    assert (given.rollout_micro_prompts, given.rollout_micro_steps) == (8, 4)
    whole = resized(rl(prompts=8, generations=4), 32)
    assert (whole.train_micro_responses, whole.rollout_micro_prompts) == (128, 32)
    assert resized(whole, 8) == rl(prompts=8, generations=4)
    assert resized(rl(prompts=8, generations=4, micro_batch_size=8), 32).accumulation_steps == 4
    with pytest.raises(PlanError, match="train_micro_responses=32 does not divide an update"):
        resized(rl(prompts=8, generations=4, train_micro_responses=32), 4)


def test_numbers_too_large_to_divide_are_refused():
    with pytest.raises(ConfigError, match="responses_per_round"):
        rl(prompts=999_999_999_989, generations=999_999_999_961, data_parallel_size=7)


def test_notes_teach_where_they_apply():
    def said(**job: Any) -> str:
        return "\n".join(rl(**{"prompts": 8, "generations": 4, **job}).notes)

    assert said() == ""
    assert "zero advantage" in said(generations=1)
    assert "cuts groups of 4 in two" in said(train_micro_responses=2, rollout_micro_prompts=2)
    assert "does not reduce the memory of generation" in said(train_micro_prompts=2)
    assert "does not reduce the memory of generation" not in said(train_micro_prompts=2, rollout_micro_prompts=2)
    assert "importance ratio" in said(updates=2)
    assert "wait up to 2 rounds" in said(rounds_ahead=2)


@settings(max_examples=many(60))
@given(jobs())
def test_every_plan_survives_json(job):
    if accepts(job):
        assert decode(RLPlan, json.loads(json.dumps(encode(rl(**job))))) == rl(**job)
