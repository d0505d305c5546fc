"""`batchwright.run`: the verb in Python, with values instead of flags."""

from __future__ import annotations

import ctypes
import io
import subprocess

import pytest

import batchwright
from batchwright.core.batch.request import read_request
from batchwright.core.ramp.request import read_ramp
from batchwright.launch.directory import RunDirectory
from batchwright.launch.plan import begin, build
from batchwright.launch.records import Options
from batchwright.launch.show import LineDisplay
from batchwright.launch.supervisor import supervise

from .conftest import TRAINER

RAMP = {"thresholds": "0:8 16:16", "samples": 64, "micro_batch_size": 8, "nodes": 1, "devices_per_node": 1}


def test_a_command_runs_to_its_end_and_a_complete_run_can_be_resumed(tmp_path, capfd):
    directory = str(tmp_path / "run")
    made = batchwright.run(TRAINER, **RAMP, dir=directory, retry_seconds=0, progress=False)
    assert (made.state, made.consumed_samples, made.starts, made.directory) == ("complete", 64, 2, directory)
    assert capfd.readouterr().err == ""
    with pytest.raises(batchwright.ConfigError, match="already holds a run"):
        batchwright.run(TRAINER, **RAMP, dir=directory)
    assert batchwright.run(resume=directory, max_retries=1, progress=False).state == "complete"


def test_a_run_that_fails_returns_why(tmp_path):
    made = batchwright.run(["false"], **RAMP, dir=str(tmp_path / "run"), max_retries=0, progress=False)
    assert made.state == "failed"
    assert "exited with 1" in (made.reason or "")


@pytest.mark.parametrize(
    ("target", "given", "message"),
    [
        (None, {}, "neither given"),
        (["true"], {"max_retries": "few"}, "max_retries"),
        (["true"], {"nodez": 2}, "nodes"),
        (["true"], {"resume": "runs/x"}, "target cannot be changed with resume"),
    ],
)
def test_what_is_wrong_is_refused_before_anything_starts(target, given, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(batchwright.ConfigError, match=message):
        batchwright.run(target, **{**RAMP, **given})
    assert list(tmp_path.iterdir()) == []


def test_the_children_of_the_program_that_calls_it_are_left_alone(tmp_path):
    """Also those that it starts during the run, and its orphans go where they went before."""
    libc, before, after = ctypes.CDLL(None), ctypes.c_int(-1), ctypes.c_int(-1)
    libc.prctl(37, ctypes.byref(before))  # PR_GET_CHILD_SUBREAPER
    started: list[subprocess.Popen[bytes]] = []

    class Own(LineDisplay):
        def launched(self, plan, manifest):
            started.append(subprocess.Popen(["sleep", "600"], start_new_session=True))

    directory = RunDirectory(tmp_path / "run")
    wanted = {key: RAMP[key] for key in ("thresholds", "samples")}
    world = {key: RAMP[key] for key in ("micro_batch_size", "nodes", "devices_per_node")}
    plan, _ = build(read_request(world), read_ramp(wanted), Options(retry_seconds=0), command=TRAINER)
    begin(directory, plan)
    try:
        assert supervise(directory, plan, Own(io.StringIO())) == "complete"
        libc.prctl(37, ctypes.byref(after))
        assert after.value == before.value
        assert len(started) == 2 and all(child.poll() is None for child in started)
    finally:
        directory.unlock()
        for child in started:
            child.kill()
            child.wait()
