"""`batchwright run` drives examples/lightning/train.py through a ramp: one rank, then two, with a kill in the middle."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import batchwright
from batchwright.runtime import audit

pytestmark = pytest.mark.torch
HERE = Path(__file__).parent
SCRIPT = HERE.parents[1] / "examples" / "lightning" / "train.py"


def run(folder: Path, place: str, **options: Any) -> Any:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "{devices}"]
    return batchwright.run(
        [*torchrun, str(HERE / "lit_run.py"), place, str(SCRIPT), "--out", "{run_dir}/lightning", "--save-every", "2"],
        thresholds="0:8 64:16",
        samples=128,
        micro_batch_size=4,
        nodes=2,
        devices_per_node=1,
        node_policy="constant-work",
        dir=str(folder),
        progress=False,
        retry_seconds=0,
        environment={"OMP_NUM_THREADS": "1"},
        **options,
    )


def checked(folder: Path) -> Any:
    found = audit(folder)
    assert (found.ok, found.samples, found.gaps, found.repeats) == (True, 128, 0, 0), found
    return found


def test_a_ramp_over_two_launches_survives_a_kill_in_the_middle_of_a_save(tmp_path):
    status = run(tmp_path / "run", "write@32")
    assert (status.state, status.consumed_samples, status.restarts) == ("complete", 128, 1)
    found = checked(tmp_path / "run")
    assert found.discarded_samples == 16  # last.ckpt is complete at 16
    assert found.launches == 3
    second_ranks = [path.name for path in (tmp_path / "run" / "ledger").glob("*-rank-00001.jsonl")]
    assert second_ranks == ["launch-00003-rank-00001.jsonl"]  # the last launch has two ranks
    assert not list((tmp_path / "run" / "lightning").glob(".*.part"))  # the half of a file was removed by the next save


@pytest.mark.rounds
def test_a_kill_between_the_two_files_of_a_save(tmp_path):
    status = run(tmp_path / "run", "save@96")
    assert (status.state, status.consumed_samples, status.restarts) == ("complete", 128, 1)
    found = checked(tmp_path / "run")
    assert found.discarded_samples == 32  # last.ckpt is the boundary's, at 64: the save at 96 does not count
    ledger = (tmp_path / "run" / "ledger" / "launch-00003-rank-00000.jsonl").read_text(encoding="utf-8")
    assert json.loads(ledger.splitlines()[0])["position"] == 64


@pytest.mark.rounds
def test_a_request_to_stop_saves_and_the_run_continues(tmp_path):
    status = run(tmp_path / "run", "stop@48")
    # A launch that stops before its boundary is started again: that is a restart, whatever ended it.
    assert (status.state, status.consumed_samples, status.restarts) == ("complete", 128, 1)
    found = checked(tmp_path / "run")
    assert (found.discarded_samples, found.launches) == (0, 3)
    ledger = (tmp_path / "run" / "ledger" / "launch-00002-rank-00000.jsonl").read_text(encoding="utf-8")
    assert (
        json.loads(ledger.splitlines()[0])["position"] == 56
    )  # no regular save: the ranks agree on it in the next step
