"""Trackers: the real packages, one run for all launches, and what happens if a server does not answer."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

from batchwright.core.errors import MissingExtraError, RunError
from batchwright.rundir.trackers import TRACKERS, identity, require
from batchwright.runtime.loop.events import read_events
from batchwright.runtime.loop.trackers import open_tracker
from tests import tracked
from tests.tracked import needs

pytestmark = pytest.mark.torch


def failures(run: Path) -> dict[str, str]:
    return {e["tracker"]: e["error"] for e in read_events(run, lineage=False) if e["kind"] == "tracker"}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """Killed after ten steps and an evaluation, continued from its save after five to its end after thirteen; in every
    tracker at once. The second launch evaluates after ten steps, too."""
    directory = tmp_path_factory.mktemp("tracked") / "run 1"
    names = ",".join(name for name in TRACKERS if find_spec(name))
    assert tracked.record(directory, names, 0, 0, 10, "kill") == -9
    assert tracked.record(directory, names, 1, 5, 13, "end") == 0
    assert failures(directory) == {}
    return directory


FIRST = [(step, float(step)) for step in range(13)]
AGAIN = [(step, step + 0.125) for step in range(13)]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_shows_every_step_once_as_it_was_trained_last(run):
    points = tracked.tensorboard(run)
    assert points["train/loss"] == [*FIRST[:5], *AGAIN[5:]]
    assert points["over_samples/loss"] == [((step + 1) * 8, loss) for step, loss in points["train/loss"]]
    assert points["evaluation/loss"] == [(4, 2.0), (9, 4.5625)]
    assert points["over_samples/evaluation_loss"] == [(40, 2.0), (80, 4.5625)]
    assert points["train/samples"] == [(step, (step + 1) * 8) for step in range(13)]
    assert points["launch/lost_seconds"] == [(4, 2.5)]


def every_step_once(points: list[tuple[int, float]]) -> bool:
    """What was sent before the kill stays; a tracker sends once a second, and after a save."""
    sent = max((step for step, loss in points if loss == step), default=0) + 1
    return points == [*FIRST[:sent], *AGAIN[sent:]] and sent >= 5


def test_mlflow_has_one_run_with_every_step_once(run):
    needs("mlflow")
    [(about, points)] = tracked.mlflow(run.parent)
    assert every_step_once(points["train/loss"])
    assert points["train/step"] == [(step, step) for step in range(13)]
    assert points["over_samples/global_batch_size"] == [((step + 1) * 8, 8) for step in range(13)]
    assert points["evaluation/loss"] == [(4, 2.0), (9, 4.5)]
    assert points["over_samples/evaluation_loss"] == [(40, 2.0), (80, 4.5)]
    assert points["launch/lost_seconds"] == [(9, 2.5)]
    assert about["run_name"] == "run 1" and about["params"]["total_samples"] == "104"
    assert about["status"] == 3  # FINISHED


def test_trackio_has_one_run_with_every_step_once(run):
    needs("trackio")
    [(_, points)] = tracked.trackio(run.parent)
    assert every_step_once(points["train/loss"])
    assert points["evaluation/loss"] in ([(4, 2.0), (9, 4.5)], [(4, 2.0), (9, 4.5625)])
    assert [value for _, value in points["launch/lost_seconds"]] == [2.5]


def test_wandb_continues_the_same_run(run):
    """Offline, every launch has a folder. What W&B had not written when the launch was killed is lost."""
    needs("wandb")
    stored = json.loads((run / "trackers" / "wandb.json").read_text())["id"]
    folders = tracked.wandb(run)
    assert len(folders) == 2 and folders[0][0] in ("", stored)
    name, points = folders[1]
    assert name == stored
    assert points["train/loss"] == AGAIN[5:]
    assert points["train/samples"] == [(step, (step + 1) * 8) for step in range(5, 13)]
    assert points["evaluation/loss"] == [(9, 4.5625)]
    assert points["launch/lost_seconds"] == [(10, 2.5)], "the first step that the killed launch had not trained"


def test_wandb_gets_the_lost_seconds_of_a_launch_that_trains_nothing_new(tmp_path):
    needs("wandb")
    assert tracked.record(tmp_path / "run", "wandb", 0, 0, 10, "kill") == -9
    assert tracked.record(tmp_path / "run", "wandb", 1, 5, 8, "signal") == 0
    _, points = tracked.wandb(tmp_path / "run")[1]
    assert points["train/loss"] == AGAIN[5:8] and points["launch/lost_seconds"] == [(10, 2.5)]


@pytest.mark.parametrize("name", TRACKERS)
def test_all_record_the_same_names(run, name):
    needs(name)
    read = {"mlflow": lambda: tracked.mlflow(run.parent)[0][1], "trackio": lambda: tracked.trackio(run.parent)[0][1]}
    read |= {"wandb": lambda: tracked.wandb(run)[1][1]}
    points = read[name]() if name in read else tracked.tensorboard(run)
    wanted = {"loss", "global_batch_size", "samples", "tokens", "stage", "nodes", "ranks", "noise_scale"}
    wanted |= {"samples_per_second", "tokens_per_second", "learning_rate", "grad_norm", "step"}
    assert {key for key in points if key.startswith("train/")} == {f"train/{key}" for key in wanted}


def test_servers_that_do_not_answer_delay_neither_the_events_nor_the_exit(tmp_path):
    """Port 9 of this machine refuses. W&B and MLflow try again for minutes."""
    needs("wandb")
    names = [name for name in ("wandb", "mlflow") if find_spec(name)]
    away = "http://127.0.0.1:9"
    online = {"WANDB_MODE": "online", "WANDB_BASE_URL": away, "WANDB_API_KEY": "a" * 40, "MLFLOW_TRACKING_URI": away}
    assert tracked.record(tmp_path / "run", ",".join(names), 0, 0, 10, "0.5", **online) == 0
    assert len([e for e in read_events(tmp_path / "run") if e["kind"] == "step"]) == 10
    late = "it did not close within 0.5 s; what it has not sent is lost"
    assert failures(tmp_path / "run") == dict.fromkeys(names, late)
    assert not (tmp_path / "run" / "waited").exists()  # for what W&B does when an interpreter shuts down


def test_a_tracker_that_cannot_start_is_left_out(tmp_path):
    needs("mlflow")
    assert tracked.record(tmp_path / "run", "mlflow", 0, 0, 3, "end", MLFLOW_TRACKING_URI="nowhere://x") == 0
    assert "nowhere://x" in failures(tmp_path / "run")["mlflow"]
    assert [e["launch"] for e in read_events(tmp_path / "run") if e["kind"] == "tracker"] == [0]


def test_a_trackio_that_does_not_say_how_far_it_is_cannot_start(monkeypatch, tmp_path):
    """With 0 instead, the steps of a resumed run would be recorded twice."""
    made = SimpleNamespace(init=lambda **_: SimpleNamespace(project="batchwright", name="run", id="1"))
    monkeypatch.setitem(sys.modules, "trackio", made)
    from batchwright.runtime.loop.trackers.trackio import Trackio

    with pytest.raises(AttributeError, match="_next_step"):
        Trackio(tmp_path).begin({})


def test_mlflow_without_a_server_uses_a_database_in_the_run_directory(tmp_path):
    needs("mlflow")
    run = tmp_path / "a run's 100% %41"
    assert tracked.record(run, "mlflow", 0, 0, 3, "boundary", MLFLOW_TRACKING_URI="") == 0
    assert failures(run) == {}
    import sqlite3

    with sqlite3.connect(run / "mlflow.db") as database:
        assert database.execute("select status from runs").fetchall() == [("SCHEDULED",)]
        rows = database.execute("select step, value from metrics where key = 'train/loss' order by step")
        assert rows.fetchall() == FIRST[:3]


@pytest.mark.parametrize("name", TRACKERS)
def test_a_package_that_is_not_installed_is_named(name, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, match=f"pip install {name}"):
        require([name])
    if name != "tensorboard":  # torch keeps what it has imported
        with pytest.raises(MissingExtraError, match=f"pip install {name}"):
            open_tracker(name, tmp_path)


def test_every_missing_package_is_named_at_once(monkeypatch):
    for name in ("wandb", "trackio"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError) as caught:
        require(["wandb", "trackio"])
    assert [v.given for v in caught.value.violations] == ["wandb", "trackio"]


def test_one_id_for_all_launches(tmp_path):
    assert identity(tmp_path, "wandb", lambda: "one") == ("one", False)
    assert identity(tmp_path, "wandb", lambda: "two") == ("one", True)
    assert identity(tmp_path, "mlflow", lambda: "three") == ("three", False)
    (tmp_path / "trackers" / "wandb.json").write_text("{}")
    with pytest.raises(RunError, match="holds no id"):
        identity(tmp_path, "wandb", lambda: "four")
