"""`batchwright.run`: the verb in Python, with values instead of flags."""

from __future__ import annotations

import pytest

import batchwright

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
        (["true"], {"resume": "runs/x"}, "target, .*thresholds.* cannot be changed with resume"),
    ],
)
def test_what_is_wrong_is_refused_before_anything_starts(target, given, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(batchwright.ConfigError, match=message):
        batchwright.run(target, **{**RAMP, **given})
    assert list(tmp_path.iterdir()) == []
