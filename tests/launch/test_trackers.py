"""`run --tracker` with the real packages: a ramp of two launches on one and two ranks is one run in each of them."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec

import pytest

from batchwright.cli import main
from batchwright.rundir.trackers import TRACKERS
from tests import tracked

from .conftest import TASK

pytest.importorskip("torch")
pytestmark = pytest.mark.torch


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of TensorBoard
def test_all_launches_of_a_ramp_are_one_run_in_every_tracker(run, monkeypatch):
    folder = run.directory.parent
    for name, value in tracked.variables(folder).items():
        monkeypatch.setenv(name, value)
    tracked.needs("wandb")
    installed = [name for name in TRACKERS if find_spec(name)]
    flags = [word for name in installed for word in ("--tracker", name)]
    place = (TASK, "--thresholds", "0:8 64:16", "--dir", str(run.directory), "--arg", "size=96")
    fixed = "--epochs 1.5 --nodes 2 --devices-per-node 1 --node-policy constant-work --max-retries 0".split()
    code, _, err = run(*place, *fixed, *flags)
    assert code == 0, err
    assert "the tracker" not in err, err
    assert run.status()["consumed_samples"] == 144  # 1.5 × 96
    nodes = [(step, 1 if step < 8 else 2) for step in range(13)]
    samples = [(step, 8 * (step + 1) if step < 8 else 64 + 16 * (step - 7)) for step in range(13)]
    found = {"tensorboard": [tracked.tensorboard(run.directory)]}
    if "mlflow" in installed:
        [(about, points)] = tracked.mlflow(folder)
        assert about["params"]["dataset_size"] == "96" and about["status"] == 3  # FINISHED
        found["mlflow"] = [points]
    if "trackio" in installed:
        found["trackio"] = [points for _, points in tracked.trackio(folder)]
    if "wandb" in installed:
        launches = tracked.wandb(run.directory)
        assert len({name for name, _ in launches}) == 1 and len(launches) == 2  # rank 1 of the second tracks nothing
        found["wandb"] = [{key: launches[0][1][key] + launches[1][1][key] for key in launches[0][1]}]
    for name, runs in found.items():
        assert len(runs) == 1, name
        assert runs[0]["train/nodes"] == nodes, name
        assert runs[0]["train/samples"] == samples, name
        assert [step for step, _ in runs[0]["train/loss"]] == [*range(13)], name
    run.assert_nothing_left()


def test_a_tracker_that_fails_is_shown_and_the_run_completes(run, monkeypatch):
    tracked.needs("wandb")
    for name, value in {**tracked.variables(run.directory.parent), "WANDB_MODE": "online"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("NETRC", "/dev/null")
    code, _, err = run(*run.task("--tracker", "wandb", "--max-retries", "0", ramp="0:8", samples=32, nodes=1))
    assert code == 0, err
    assert "the tracker wandb failed: " in err and "API key" in err and "The run continues." in err


FIXED = ("--samples", "8", "--global-batch-size", "8", "--dir", "made")


def ask(capsys, *argv: str) -> tuple[int | str | None, str]:
    with pytest.raises(SystemExit) as ended:
        main(["run", *argv])
    return ended.value.code, capsys.readouterr().err


def test_a_missing_package_is_found_before_anything_starts(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "wandb", None)
    code, err = ask(capsys, TASK, *FIXED, "--tracker", "wandb")
    assert code == 4 and "pip install wandb" in err
    assert not (tmp_path / "made").exists()


def test_a_command_records_itself(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code, err = ask(capsys, *FIXED, "--tracker", "tensorboard", "--", "true")
    assert code == 2 and "--tracker=tensorboard needs a task" in err


def test_an_unknown_tracker_names_the_known_ones(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code, err = ask(capsys, TASK, *FIXED, "--tracker", "wandbb")
    assert code == 2 and "--tracker='wandbb' is not one of tensorboard, wandb, mlflow, trackio." in err


@pytest.mark.parametrize("given", ["tensorboard", ["tensorboard", "wandb", "tensorboard"]])
def test_trackers_in_a_file_reach_the_loop(given, tmp_path):
    from batchwright.core.batch.request import read_request
    from batchwright.core.ramp.request import read_ramp
    from batchwright.launch.directory import RunDirectory
    from batchwright.launch.plan import build
    from batchwright.launch.settings import read_options
    from batchwright.launch.work import TaskWork
    from batchwright.runtime.loop.settings import read_spec

    world = read_request({"global_batch_size": 8, "nodes": 1, "devices_per_node": 1})
    plan, _ = build(world, read_ramp({"samples": 8}), read_options({"tracker": given}), target=TASK)
    directory = RunDirectory(tmp_path / "run")
    TaskWork(directory, plan).prepare(plan.launches[0], 1, 0)
    settings = read_spec(tmp_path / "run" / "launches" / "0001" / "spec.json").settings
    assert settings.tracker == (("tensorboard",) if isinstance(given, str) else ("tensorboard", "wandb"))
    assert settings.nodes == 1
    assert json.loads((tmp_path / "run" / "launches" / "0001" / "spec.json").read_text())["settings"]["tracker"]
