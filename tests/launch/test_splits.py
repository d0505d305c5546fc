"""A stage that is split again (less memory, fewer nodes) obeys the rules of the run: `plan` accepts every split that is made."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from batchwright.core.batch.pipeline import SCHEDULES
from batchwright.core.batch.plan import plan as check
from batchwright.core.batch.request import BatchRequest, resolve_ranks
from batchwright.core.errors import BatchwrightError, ConfigError, PlanError
from batchwright.core.nodes.policies import Stage
from batchwright.core.ramp.request import read_ramp
from batchwright.launch.directory import RunDirectory, write_json
from batchwright.launch.failure import memory_advice
from batchwright.launch.plan import build
from batchwright.launch.records import Options, RunPlan
from batchwright.launch.resume import refit
from batchwright.launch.slurm.elastic import legal_nodes, on_nodes

CIRCULAR = BatchRequest(
    nodes=8, devices_per_node=1, pipeline_parallel=4, pipeline_schedule="circular", micro_batch_size=3
)


def run_plan(request: BatchRequest, *batches: int, policy: str = "constant") -> RunPlan:
    thresholds = " ".join(f"{100 * batches[0] * i}:{batch}" for i, batch in enumerate(batches))
    wanted = read_ramp(
        {"thresholds": thresholds, "samples": str(100 * sum(batches)), "node_policy": policy, "allow_falling": True}
    )
    return build(request, wanted, Options(), command=["train", "{global_batch_size}"])[0]


def numbers(stage: Stage) -> tuple[int, int, int]:
    return stage.micro_batch_size, stage.accumulation_steps, stage.data_parallel_size


def assert_plan_accepts(request: BatchRequest, stage: Stage) -> None:
    micro, steps, ranks = numbers(stage)
    fixed = replace(
        request,
        nodes=stage.nodes,
        global_batch_size=stage.global_batch_size,
        micro_batch_size=micro,
        accumulation_steps=None if stage.ragged else steps,
        max_micro_batch_size=None,
    )
    made = check(fixed)
    assert (made.micro_batch_size, made.accumulation_steps, made.data_parallel_size) == (micro, steps, ranks)
    assert made.ragged == stage.ragged


def offered(advice: str) -> list[tuple[int, ...]]:
    """The splits that a memory advice names."""
    return [tuple(map(int, found)) for found in re.findall(r"(\d+) × (\d+) × (\d+)", advice)]


@st.composite
def requests(draw: st.DrawFn) -> BatchRequest:
    stages = draw(st.sampled_from([1, 2, 3, 4]))
    schedule = draw(st.sampled_from(SCHEDULES)) if stages > 1 else None
    inner = stages > 1 and draw(st.booleans())
    virtual = draw(st.integers(1, 2)) if schedule in ("interleaved", "circular") else 1
    given_micro = draw(st.booleans())
    micro = draw(st.integers(1, 12))
    return BatchRequest(
        nodes=draw(st.integers(1, 8)),
        devices_per_node=stages * draw(st.integers(1, 2)),
        pipeline_parallel=stages,
        pipeline_schedule=schedule,
        virtual_stages=virtual,
        pipeline_group=draw(st.none() | st.integers(stages, 7)) if schedule == "interleaved" else None,
        delayed_forwarding=schedule == "circular" and draw(st.booleans()),
        pipeline_style="inner" if inner else "accumulation",
        pipeline_microbatches=draw(st.none() | st.integers(stages, 12)) if inner else None,
        allow_ragged=draw(st.booleans()),
        micro_batch_size=micro if given_micro else None,
        max_micro_batch_size=None if given_micro else micro,
    )


@example(  # a limit for the second stage that the first one does not allow
    BatchRequest(
        nodes=1, devices_per_node=3, pipeline_parallel=3, pipeline_schedule="zero-bubble", max_micro_batch_size=5,
        allow_ragged=True,
    ), [19, 41], 1,
)  # fmt: skip
@given(requests(), st.lists(st.integers(1, 60), min_size=1, max_size=2), st.integers(1, 12))
def test_plan_accepts_every_split_that_is_made(request: BatchRequest, shares: list[int], limit: int):
    ranks = resolve_ranks(request) or 0
    try:  # a request that ramp or plan refuses is no run
        plan = run_plan(request, *(share * ranks for share in shares))
        for stage in plan.stages:
            assert_plan_accepts(request, stage)
    except BatchwrightError:
        assume(False)
        return

    try:
        smaller = refit(plan, limit)
    except PlanError as error:
        (nearest,) = error.violations[0].nearest
        assert isinstance(nearest, int) and nearest > limit
        with pytest.raises(PlanError):
            refit(plan, nearest - 1)
        limit = nearest
        smaller = refit(plan, limit)
    for before, after in zip(plan.stages, smaller.stages, strict=True):
        assert after.micro_batch_size <= limit
        assert after == before or after.micro_batch_size < before.micro_batch_size
        assert_plan_accepts(request, after)

    for stage in plan.stages:
        advice = memory_advice(plan, stage, "DIR")
        named = offered(advice)
        if command := re.search(r"--max-micro-batch-size (\d+)", advice):
            # The stages before it were trained: the limit need not fit them.
            assert numbers(refit(plan, int(command[1]), stage.start_sample).stages[stage.index]) == named[0]
        for made in plan.smaller(stage)[1:]:
            assert made.micro_batch_size < stage.micro_batch_size
            assert_plan_accepts(request, made)
        assert set(named) <= {numbers(made) for made in plan.smaller(stage)[1:]}

    for launch in plan.launches:
        for nodes in legal_nodes(plan, launch):
            moved = on_nodes(plan, launch, nodes)
            assert moved is not None
            for index in launch.stages:
                assert moved[0].stages[index].nodes == nodes
                assert_plan_accepts(request, moved[0].stages[index])


def test_a_circular_pipeline_gets_multiples_of_its_stages():
    """24 samples on 2 replicas of 4 stages: 2 × 6 × 2 is smaller than 3 × 4 × 2, but 6 is not a multiple of 4."""
    plan = run_plan(CIRCULAR, 24)
    stage = plan.stages[0]
    assert numbers(stage) == (3, 4, 2)
    with pytest.raises(PlanError, match="circular needs a multiple of the 4 stages: 6 / 4"):
        check(replace(CIRCULAR, global_batch_size=24, micro_batch_size=2))

    assert numbers(refit(plan, 2).stages[0]) == (1, 12, 2)
    advice = memory_advice(plan, stage, "DIR")
    assert offered(advice) == [(1, 12, 2)] and advice.endswith("--max-micro-batch-size 1")
    moved = on_nodes(plan, plan.launches[0], 4)
    assert moved is not None and numbers(moved[0].stages[0]) == (3, 8, 1)
    assert legal_nodes(plan, plan.launches[0]) == (8, 4)


def test_a_stage_that_divides_does_not_become_ragged():
    request = BatchRequest(nodes=6, devices_per_node=1, micro_batch_size=4, allow_ragged=True)
    plan = run_plan(request, 24, 28)
    assert [(numbers(stage), stage.ragged) for stage in plan.stages] == [((4, 1, 6), False), ((4, 2, 6), True)]
    smaller = refit(plan, 3)
    assert [(numbers(stage), stage.ragged) for stage in smaller.stages] == [((2, 2, 6), False), ((3, 2, 6), True)]
    assert legal_nodes(run_plan(request, 24), plan.launches[0]) == (6, 4, 3, 2, 1)


def test_where_no_split_is_valid_the_nearest_limit_is_named():
    """28 samples on 2 replicas: zero-bubble takes 7 microbatches on 4 stages, and not 14."""
    request = replace(CIRCULAR, pipeline_schedule="zero-bubble", micro_batch_size=2)
    plan = run_plan(request, 28)
    assert numbers(plan.stages[0]) == (2, 7, 2)
    with pytest.raises(PlanError) as caught:
        refit(plan, 1)
    assert str(caught.value) == (
        "max_micro_batch_size=1: stage 1 has no split that zero-bubble with 4 pipeline stages allows: global_batch_size 28 "
        "/ data_parallel_size 2 = 14 samples per rank. Nearest: 2."
    )
    assert caught.value.violations[0].nearest == (2,)
    assert "the smallest valid micro batch" in memory_advice(plan, plan.stages[0], "DIR")


def test_the_advice_is_one_that_every_stage_ahead_allows():
    request = replace(CIRCULAR, pipeline_schedule="zero-bubble", micro_batch_size=None, max_micro_batch_size=2)
    plan = run_plan(request, 32, 28, 32)
    assert [numbers(stage)[0] for stage in plan.stages] == [2, 2, 2]
    assert plan.smaller(plan.stages[0])[1:] != []
    assert "the smallest valid micro batch" in memory_advice(plan, plan.stages[0], "DIR")
    assert "--max-micro-batch-size 1" in memory_advice(plan, plan.stages[2], "DIR")
    assert numbers(refit(plan, 1, plan.stages[2].start_sample).stages[2])[0] == 1


def test_a_plan_of_an_older_version_is_read_without_its_rules(tmp_path):
    request = BatchRequest(nodes=4, devices_per_node=2, tensor_parallel=2, max_micro_batch_size=8)
    plan = run_plan(request, 32, 64)
    directory = RunDirectory(tmp_path)
    write_json(directory.path / "plan.json", plan)
    assert directory.plan() == plan
    document = json.loads((tmp_path / "plan.json").read_text())
    del document["rules"]
    (tmp_path / "plan.json").write_text(json.dumps(document))
    old = directory.plan()
    assert old.rules.replicas(4) == 4 and replace(old, rules=plan.rules) == plan
    assert refit(old, 3).stages == refit(plan, 3).stages
    for damage in ({"stages": []}, {"devices_per_node": None}, {"launches": [{"nodes": 1}]}):
        (tmp_path / "plan.json").write_text(json.dumps(document | damage))
        with pytest.raises(ConfigError, match=r"plan\.json is damaged"):
            directory.plan()
    assert legal_nodes(old, old.launches[0]) == legal_nodes(plan, plan.launches[0]) == (4, 2, 1)
