"""`check` of a pipeline: stages that are the model, and stages that are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchwright.core.batch.pipeline import PipelineRule
from batchwright.runtime.check import check
from batchwright.runtime.task import load_task

pytestmark = pytest.mark.torch
TASK = f"{Path(__file__).with_name('staged.py')}:task"


@pytest.mark.parametrize(
    ("args", "cause"),
    [
        ({"wrong": True}, "pipeline-stages"),
        pytest.param({"tied": True}, "pipeline-stages", marks=pytest.mark.rounds),
        pytest.param({"tied": "alias"}, "pipeline-stages", marks=pytest.mark.rounds),
        pytest.param({}, None, marks=pytest.mark.rounds),
    ],
    ids=["wrong", "tied", "alias", "right"],
)
def test_stages_are_compared_with_the_whole_model(args, cause):
    source = (TASK, args)
    report = check(
        load_task(*source),
        global_batch_size=8,
        micro_batch_sizes=(2,),
        source=source,
        pipeline=PipelineRule("torch-1f1b", 2),
    )
    assert [f.cause for f in report.findings if f.severity == "error"] == ([cause] if cause else [])
    whole, staged = report.splits
    assert (whole.pipeline_parallel, staged.pipeline_parallel, staged.accumulation_steps) == (1, 2, 4)
    assert whole.relative_error < 1e-5 and (staged.relative_error < 1e-5) == (cause is None)


@pytest.mark.rounds
def test_a_traced_model_is_split_for_every_micro_batch_size():
    source = (TASK, {"traced": True})
    rule = PipelineRule("torch-1f1b", 2)
    report = check(load_task(*source), global_batch_size=8, micro_batch_sizes=(1, 2, 4), source=source, pipeline=rule)
    staged = [split for split in report.splits if split.pipeline_parallel == 2]
    assert report.ok and [split.micro_batch_size for split in staged] == [1, 2, 4]
    assert max(split.relative_error for split in staged) < 1e-5
