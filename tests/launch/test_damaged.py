"""A run directory whose files are damaged: an error that names the file, or a state without the lost part."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from batchwright.core.batch.request import BatchRequest
from batchwright.core.errors import ConfigError, EnvironmentFault
from batchwright.core.ramp.request import read_ramp
from batchwright.launch.directory import RunDirectory
from batchwright.launch.plan import begin, build
from batchwright.launch.records import Options
from batchwright.launch.status import status
from batchwright.rundir import names


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    request = BatchRequest(nodes=2, devices_per_node=1, max_micro_batch_size=8)
    wanted = read_ramp({"thresholds": "0:8 64:16", "samples": "512", "node_policy": "constant-work"})
    plan, _ = build(request, wanted, Options(), command=["train", "{end_sample}"])
    made = RunDirectory(tmp_path / "run")
    begin(made, plan)
    made.unlock()
    return made


def changed(run: RunDirectory, value: Any, *keys: Any) -> None:
    """Change one value of the plan."""
    path = run.path / "plan.json"
    document = json.loads(path.read_text())
    holder = document
    for key in keys[:-1]:
        holder = holder[key]
    holder[keys[-1]] = value
    path.write_text(json.dumps(document))


@pytest.mark.parametrize(
    ("value", "keys", "message"),
    [
        ("x", ("stages", 0, "nodes"), r"stages\[0\].nodes is 'x', not int"),
        (0, ("devices_per_node",), "below 1"),
        (10**30, ("schedule", "samples"), "64 bits"),
        ([], ("stages",), "stages do not follow each other from sample 0 to 512"),
        (80, ("launches", 0, "end_sample"), "launches do not follow each other"),
        (7, ("launches", 1, "index"), "launches are not in order"),
        ([5], ("launches", 1, "stages"), "stages that do not exist"),
        (None, ("schedule", "segments", 1, "steps"), "the schedule has no end"),
        ("other", ("kind",), "kind is 'other'"),
        (["train", "\ud800"], ("command",), "a character that no process can get"),
        ({"A": "b\0"}, ("options", "environment"), "not the name of a variable"),
        ("SIGNOTHING", ("options", "stop_signal"), "is not a signal"),
        (float("nan"), ("options", "grace_seconds"), "not a finite number"),
    ],
)
def test_a_damaged_plan_names_the_value(run, value, keys, message):
    changed(run, value, *keys)
    with pytest.raises(ConfigError, match=rf"(?s)plan\.json is damaged: .*{message}"):
        run.plan()


def test_a_plan_that_is_a_fifo_does_not_block(run):
    (run.path / "plan.json").unlink()
    os.mkfifo(run.path / "plan.json")
    with pytest.raises(EnvironmentFault, match=r"plan\.json cannot be read: it is not a regular file"):
        run.plan()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_the_plan_of_another_user_is_not_permitted_rather_than_missing(run):
    for folder in (run.path, *run.path.parents[:3]):  # pytest's own folders are for root only
        folder.chmod(0o755)
    child = os.fork()
    if not child:
        try:
            os.setuid(65534)
            run.plan()
        except EnvironmentFault as error:
            os._exit(0 if "plan.json cannot be read: Permission denied" in str(error) else 3)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_lock_that_is_a_fifo_neither_blocks_nor_locks(run):
    (run.path / "lock").unlink()
    os.mkfifo(run.path / "lock")
    assert run.supervisor() is None
    with pytest.raises(EnvironmentFault, match="lock cannot be used: it is not a regular file"):
        run.lock()


def test_folders_that_no_supervisor_named_are_no_launches(run):
    for name in ("0001", "\u00b2", "\u0663", "9" * 200, "1e3"):
        (run.path / "launches" / name).mkdir(parents=True)
        (run.path / "launches" / name / "manifest.json").write_text("{}")
    assert run.numbers() == [1]
    assert status(run).starts == 1


@pytest.mark.parametrize("failure", ["text", [1], {"reason": [1], "advice": "\ud800"}, {"reason": {}}])
def test_an_outcome_with_other_types_still_has_a_state(run, failure):
    (run.path / names.OUTCOME).write_text(json.dumps({"state": "failed", "failure": failure}))
    assert status(run).state == "failed"


def test_a_launch_with_a_damaged_manifest_is_shown_without_numbers(run):
    launch = run.path / "launches" / "0001"
    launch.mkdir(parents=True)
    (launch / "manifest.json").write_text(json.dumps({"number": 1, "launch": "x"}))
    (launch / "ending.json").write_text(json.dumps({"number": 1, "outcome": 5, "position": 64, "ended": 0}))
    (start,) = status(run).starts_list
    assert (start["launch"], start["outcome"]) == (None, None)
