"""The loop on the stages of a pipeline: the weights, losses and checkpoints of the whole model on one rank."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the helpers beside this file, under any import mode

from loop_runs import launch, losses, ramp, status

from batchwright.core.errors import PlanError
from batchwright.runtime.loop.events import read_events
from batchwright.runtime.loop.process import joined
from batchwright.runtime.state import tensors
from batchwright.runtime.state.audit import audit
from batchwright.runtime.state.checkpoint import Checkpoints

pytestmark = [pytest.mark.slow, pytest.mark.torch]

COMMON = {"micro_batch_size": 2, "evaluation_samples": 20, "evaluate_every": 96, "max_norm": 1.0}


def trained(directory: Path, ranks: int, task: dict[str, Any], **settings: Any) -> tuple[dict[str, Any], Any]:
    assert launch(ranks, ramp(), {"directory": str(directory), **COMMON, **settings}, size=300, **task) == [0] * ranks
    saved = Checkpoints(directory / "checkpoints").newest()
    assert saved is not None
    return tensors.read(saved.path / "tensors"), saved


READS_SIZE = {"reads_size": True}
INNER = {"inner_microbatches": 2, "pipeline_schedule": "gpipe"}


def twice(schedule: str) -> dict[str, Any]:
    return {"pipeline_schedule": schedule, "virtual_stages": 2}


@pytest.mark.parametrize(
    ("ranks", "task", "settings"),
    [
        pytest.param(4, READS_SIZE, {}, id="ddp"),
        pytest.param(2, {"blocks": 4}, twice("zbv"), id="zbv"),
        pytest.param(2, {"stages": {}}, {}, id="task-stage"),
        pytest.param(4, {}, {"strategy": "fsdp2"}, id="fsdp2", marks=pytest.mark.rounds),
        pytest.param(4, {}, {"pipeline_schedule": "zero-bubble"}, id="zero-bubble", marks=pytest.mark.rounds),
        pytest.param(2, {}, {"noise_every": 1}, id="noise", marks=pytest.mark.rounds),
        pytest.param(4, READS_SIZE, INNER, id="inner", marks=pytest.mark.rounds),
        pytest.param(2, {"stages": {"opaque": True}}, twice("interleaved"), id="opaque", marks=pytest.mark.rounds),
        pytest.param(2, {"blocks": 4}, twice("interleaved"), id="interleaved", marks=pytest.mark.rounds),
        pytest.param(2, {"blocks": 4}, twice("looped-bfs"), id="looped-bfs", marks=pytest.mark.rounds),
        pytest.param(2, {"blocks": 4}, twice("dualpipev"), id="dualpipev", marks=pytest.mark.rounds),
    ],
)
def test_a_model_in_stages_trains_as_the_whole_model(tmp_path, ranks, task, settings):
    """Two ranks of a pipeline; a ramp of three stages, clipping and evaluation. A model with a ModuleList is split by torch's
    tracer, others are built in stages."""
    whole, one = trained(tmp_path / "whole", 1, task, strategy="none")
    staged, saved = trained(tmp_path / "staged", ranks, task, pipeline_parallel=2, **settings)
    (start,) = [event for event in read_events(tmp_path / "staged") if event["kind"] == "launch"]
    assert any("batchwright check" in note for note in start["notes"]) == ("opaque" in task.get("stages", ()))
    assert staged.keys() == whole.keys()
    assert max(float((staged[name] - whole[name]).abs().max()) for name in whole) < 1e-6
    assert saved.state["evaluation_loss"] == pytest.approx(one.state["evaluation_loss"], rel=1e-6)
    assert losses(tmp_path / "staged") == pytest.approx(losses(tmp_path / "whole"), rel=1e-5)
    assert saved.state["fingerprint"]["model"] == one.state["fingerprint"]["model"]
    found = audit(tmp_path / "staged")
    assert found.ok and found.ids_checked and found.samples == 192
    # The first and the last stage read; in these schedules one rank has both.
    replicas = ranks // 2
    readers = replicas if settings.get("pipeline_schedule") in ("zbv", "dualpipev") else ranks
    said = status(tmp_path / "staged")["loading"]
    assert (said["readers"], said["rows_read"], said["rows_trained"]) == (readers, 192 * readers // replicas, 192)
    assert len(list((tmp_path / "staged" / "ledger").iterdir())) == ranks // 2  # one for each data-parallel rank


@pytest.mark.parametrize(
    ("task", "settings", "message"),
    [
        (
            READS_SIZE,
            {"evaluation_samples": 21},
            "evaluation_samples=21: torch's tracer splits the model for micro batches of 2",
        ),
        (
            {"stages": {"tied": True}},
            {},
            "into.weight of stage 0 and out.weight of stage 1 are one weight in Task.model",
        ),
    ],
    ids=["evaluation", "tied"],
)
def test_what_a_pipeline_would_do_wrong_is_refused_before_a_step(tmp_path, capsys, task, settings, message):
    given = {"directory": str(tmp_path / "run"), **COMMON, "pipeline_parallel": 2, **settings}
    assert 0 not in launch(2, ramp(), given, size=300, **task)
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_stages_that_do_not_divide_the_ranks_are_refused_with_the_nearest(monkeypatch):
    for name, value in {"RANK": 0, "WORLD_SIZE": 12, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 12}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(PlanError, match=r"12 / 5 = 2.40\. Nearest: 4 or 6") as caught, joined("cpu", "ddp", 5):
        pass
    assert caught.value.nearest == (4, 6)


@pytest.mark.rounds
def test_what_a_loss_draws_depends_on_the_seed_of_the_run(tmp_path):
    """The order and the first weights do not: the samples are not shuffled, and the stages fill their weights by name."""
    found = []
    for run, seed in enumerate((1, 1, 2)):
        task = {"stages": {}, "masked": True}
        trained(tmp_path / str(run), 2, task, pipeline_parallel=2, seed=seed, shuffle=False)
        found.append(losses(tmp_path / str(run)))
    assert found[0] == found[1] and found[0][0] != found[2][0]
