"""`run --epochs`: the length of the dataset comes from the task, which a process of its own loads."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from batchwright.core.batch.request import BatchRequest, read_request
from batchwright.core.errors import ConfigError, PlanError, RunError, ScheduleError
from batchwright.core.ramp.request import read_ramp
from batchwright.launch.dataset import dataset_size
from batchwright.launch.plan import build
from batchwright.launch.records import Options, RunPlan
from batchwright.launch.resume import replan
from batchwright.launch.settings import read_options
from batchwright.runtime.loop.settings import Settings
from batchwright.runtime.loop.train import train
from batchwright.runtime.task import load_task

from .conftest import TASK

pytestmark = pytest.mark.torch
WORLD = {"global_batch_size": 8, "nodes": 1, "devices_per_node": 1}


def planned(wanted: dict[str, object], options: Options | None = None, **arguments: object) -> RunPlan:
    made, _ = build(
        read_request(WORLD), read_ramp(wanted), options or Options(), target=TASK, arguments={"size": 96, **arguments}
    )
    return made


def test_the_task_tells_its_length_without_the_samples_that_are_held_out():
    plan = planned({"epochs": 2}, read_options({"settings": {"evaluation_samples": 16}}))
    assert plan.total_samples == 160
    assert plan.ramp is not None and plan.ramp.dataset_size == 80
    # Another number of epochs does not ask again; the size stays that of the run.
    longer = replan(plan, BatchRequest(), {"epochs": "2.5"}, position=80)
    assert longer.total_samples == 200
    # Samples replace epochs.
    assert replan(longer, BatchRequest(), {"samples": 176}, position=80).total_samples == 176
    with pytest.raises(PlanError, match="not before the end of the new schedule, which ends at sample 80"):
        replan(plan, BatchRequest(), {"epochs": 1}, position=80)


def test_a_given_length_is_taken_and_the_loop_checks_it(tmp_path):
    plan = planned({"epochs": 2, "dataset_size": 48})  # no task is loaded
    assert plan.total_samples == 96
    settings = Settings(directory=str(tmp_path / "run"), micro_batch_size=8, dataset_size=48, progress=False)
    with pytest.raises(PlanError, match="dataset_size=48, but the task has 96 samples to train") as caught:
        train(load_task(TASK, {"size": 96}), plan.schedule, settings)
    assert caught.value.nearest == (96,)


def test_nothing_is_left_to_train():
    options = read_options({"settings": {"evaluation_samples": 96}})
    with pytest.raises(PlanError, match="evaluation_samples=96 leaves nothing to train: the dataset has 96 samples"):
        planned({"epochs": 2}, options)


def test_a_task_that_fails_is_reported_with_its_traceback(tmp_path, capfd):
    file = tmp_path / "broken.py"
    file.write_text("def task():\n    raise LookupError('no shards')\n")
    with pytest.raises(RunError, match=r"broken.py:task failed: LookupError: no shards"):
        dataset_size(f"{file}:task", {}, Options())
    assert "raise LookupError('no shards')" in capfd.readouterr().err


def test_a_task_that_ends_its_process_is_an_error(tmp_path):
    file = tmp_path / "ends.py"
    file.write_text("import os\ndef task():\n    os._exit(3)\n")
    with pytest.raises(RunError, match=r"the task could not be loaded: exit status 3. Or give dataset_size"):
        dataset_size(f"{file}:task", {}, Options())


def test_what_is_wrong_is_refused_before_a_task_is_loaded(monkeypatch):
    monkeypatch.setattr("batchwright.launch.plan.dataset_size", lambda *_: pytest.fail("loaded"))
    with pytest.raises(ConfigError, match="samples and epochs are mutually exclusive"):
        planned({"epochs": 2, "samples": 8})
    with pytest.raises(ScheduleError, match="start_sample=8: nothing is left, since the ramp ends at sample 8"):
        planned({"samples": 8, "start_sample": 8})
    with pytest.raises(PlanError, match="epochs=2 needs dataset_size"):
        build(read_request(WORLD), read_ramp({"epochs": 2}), Options(), command=("true",))
