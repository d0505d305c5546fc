"""Torch's own schedules, without ranks: what they refuse, and how long their stages are idle in the order that they run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the helpers beside this file, under any import mode

from pipeline_orders import PICTURES, drawn, idle_share, made, order

from batchwright.core.batch.pipeline import RUN_BY_TORCH, TORCH_RULES, PipelineRule
from batchwright.core.errors import PlanError
from batchwright.core.ramp.rules import Thresholds
from batchwright.runtime.data.sampler import StepSampler
from batchwright.runtime.step.pipeline import TORCH_NAMES, check_steps

pytestmark = pytest.mark.torch

CASES = [
    ("gpipe", 1),
    ("torch-1f1b", 1),
    ("torch-interleaved", 1),
    ("torch-interleaved", 2),
    ("torch-interleaved", 3),
    ("looped-bfs", 2),
    ("looped-bfs", 3),
    ("zero-bubble", 1),
    ("zero-bubble", 2),
    ("zero-bubble", 3),
    ("zbv", 2),
    ("dualpipev", 2),
]


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.rounds)])
@pytest.mark.parametrize(("schedule", "v"), CASES)
def test_torch_refuses_what_we_refuse_and_idles_as_predicted(schedule: str, v: int, whole: bool) -> None:
    """`whole`: every number of ranks to 8 and of microbatches to 32; else those around the numbers where rules change."""
    for p in range(2, 9) if whole else (2, 3, 4, 7):
        rule = PipelineRule(schedule, p, v)
        for m in range(1, 33) if whole else (*range(1, 2 * p + 2), 4 * p):
            try:
                ranks = order(schedule, p, v, m)
            except ValueError:
                assert rule.refusal(m) is not None, (p, m)
                assert all(made(schedule, p, v, near) for near in rule.nearest(m))
                continue
            assert rule.refusal(m) is None, (p, m)
            assert idle_share(ranks, p * v) == rule.bubble(m), (p, m)


def test_every_schedule_that_torch_runs_has_rules_and_the_other_way_round() -> None:
    assert {*RUN_BY_TORCH.values()} == {*TORCH_NAMES} == {"gpipe", *TORCH_RULES} == {case[0] for case in CASES}


def refusals(rule: PipelineRule, sizes: list[int], micro: int, ranks: int = 1, inner: int | None = None) -> list[Any]:
    """What `check_steps` says of a ramp of these sizes, ten steps each: field, given, nearest."""
    thresholds = [(sum(sizes[:i]) * 10, size) for i, size in enumerate(sizes)]
    schedule = Thresholds(tuple(thresholds)).compile().until(sum(sizes) * 10)
    try:
        check_steps(rule, StepSampler(schedule, micro, 0, ranks, allow_ragged=True), inner)
    except PlanError as error:
        return [(v.field, v.given, v.nearest) for v in error.violations]
    return []


def test_every_stage_of_a_ramp_that_does_not_run_is_named_with_the_nearest_sizes() -> None:
    interleaved, one = PipelineRule("torch-interleaved", 2, 2), PipelineRule("torch-1f1b", 4)
    assert refusals(interleaved, [8, 16, 32], 4) == []
    assert refusals(interleaved, [8, 20, 28, 32], 4) == [
        ("global_batch_size", 20, (16, 24)),
        ("global_batch_size", 28, (24, 32)),
    ]
    assert refusals(one, [8, 16], 2, 2) == [("global_batch_size", 8, (16,))]
    assert refusals(one, [18], 2, 2) == [("global_batch_size", 18, (16, 20))]
    # Inside of a micro batch, its own number counts, and the field is that of the user.
    assert refusals(one, [24, 48], 12, 2, inner=3) == [("inner_microbatches", 3, (4,))]
    assert refusals(one, [24, 48], 12, 2, inner=5) == [("inner_microbatches", 5, (4, 6))]
    assert refusals(one, [24, 48], 12, 2, inner=6) == []


def test_a_run_is_checked_from_its_position_on() -> None:
    schedule = Thresholds(((0, 20), (200, 32))).compile().until(520)
    rule = PipelineRule("torch-interleaved", 2, 2)
    with pytest.raises(PlanError, match=r"global_batch_size=20 of step 0 .* Nearest: 16 or 24\."):
        check_steps(rule, StepSampler(schedule, 4, 0, 1))
    check_steps(rule, StepSampler(schedule, 4, 0, 1, 200))


def test_torch_and_megatron_differ_by_name() -> None:
    """Megatron's 1F1B runs with fewer microbatches than stages; its interleaved schedule refuses what torch's runs."""
    assert PipelineRule("1f1b", 4).refusal(2) is None and PipelineRule("torch-1f1b", 4).refusal(2)
    assert PipelineRule("interleaved", 4, 2).refusal(6) and PipelineRule("torch-interleaved", 4, 2).refusal(6) is None
    assert PipelineRule("interleaved", 4, 2).refusal(3) and PipelineRule("torch-interleaved", 4, 2).refusal(3) is None


def test_the_pictures_are_the_order_of_torch() -> None:
    assert json.loads(PICTURES.read_text()) == drawn()
