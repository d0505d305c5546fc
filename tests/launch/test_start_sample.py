"""`run --start-sample`: a run that goes on where another program has stopped."""

from __future__ import annotations

import json
import os
import signal

import pytest

from batchwright.dialects.positions import grain_position
from batchwright.runtime.state.audit import audit

from .conftest import TASK


def test_where_a_run_begins_is_shown_and_checked(run):
    place = (TASK, "--thresholds", "0:8 64:16", "--samples", "192", "--nodes", "2", "--devices-per-node", "1")
    code, out, err = run(*place, "--node-policy", "constant-work", "--start-sample", "96", "--dry-run")
    assert code == 0, err
    said = " ".join(out.split())
    assert (
        "begins at sample 96, step 10: the samples before it were trained elsewhere, in the order of this run" in said
    )
    assert "launch 1: 2 nodes × 1 = 2 ranks, samples 96 to 192" in said and "launch 2" not in said
    for flags, message in (
        (("--start-sample", "100"), "--start-sample=100 is inside a step: step 10 owns samples 96 to 112"),
        (("--start-sample", "192"), "nothing is left"),
    ):
        code, _, err = run(*place, *flags, "--dry-run")
        assert code == 2 and message in err, err
    code, _, err = run("--samples", "64", "--global-batch-size", "8", "--start-sample", "8", "--dry-run", "--", "true")
    assert code == 2 and "--start-sample=8 is for tasks" in err, err


@pytest.mark.torch
def test_a_run_goes_on_from_positions_of_grain_through_a_kill_before_its_first_checkpoint(run):
    start = grain_position([json.dumps({"next_index": 8})] * 4)  # tests/dialects compares this with grain itself
    assert start == 32
    flags = ("--micro-batch-size", "2", "--checkpoint-samples", "48", "--start-sample", str(start))
    flags += ("task.settings.shuffle=false", "--loading-hosts", "1")
    run.start(*run.task(*flags, ramp="0:16", samples=144, nodes=2, args=("slow=0.05", "size=100")))
    run.until(lambda: run.position() >= 48)
    os.kill(run.rank_pid(1), signal.SIGKILL)
    code, _, err = run.finish()
    assert code == 0, err
    found = audit(run.directory)
    assert (found.ok, found.samples, found.gaps, found.repeats, found.ids_checked) == (True, 144 - 32, 0, 0, True)
    assert "samples 0 to 32 were trained elsewhere: the run began at sample 32." in found.notes
    document = run.status()
    assert document["consumed_samples"] == 144 and document["history"][0]["start_sample"] == 32
    header = json.loads(min((run.directory / "ledger").iterdir()).read_text().splitlines()[0])
    assert header["first_sample"] == header["position"] == 32 and header["step"] == 2
    assert header["order"]["shuffle"] is False
    code, _, err = run.resume("--samples", "176", "--loading-hosts", "2")  # other readers, and a longer run
    assert code == 0, err
    assert audit(run.directory).samples == 176 - 32 and audit(run.directory).ok
    code, _, err = run.resume("--start-sample", "48")
    assert code == 2 and "--start-sample=48 is for a new run" in err, err
