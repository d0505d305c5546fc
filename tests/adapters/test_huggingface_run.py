"""`batchwright run` drives the example through the launches of a ramp: 1 rank, then 2, with a SIGKILL in the middle."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

import batchwright
from batchwright.runtime import audit

pytestmark = pytest.mark.torch
HERE = Path(__file__).parent
EXAMPLE = HERE.parents[1] / "examples" / "huggingface" / "train.py"


def test_run_drives_the_example_through_its_launches(tmp_path):
    if not os.environ.get("CI"):  # there it must be installed
        pytest.importorskip("transformers")
    directory, out = tmp_path / "run", tmp_path / "out"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "{devices}"]
    status = batchwright.run(
        [*torchrun, str(HERE / "hf_run.py"), "48", str(EXAMPLE), "--out", str(out)],
        thresholds="0:8 64:16",
        samples=128,
        micro_batch_size=4,
        nodes=2,
        devices_per_node=1,
        node_policy="constant-work",
        dir=str(directory),
        progress=False,
        retry_seconds=0,
        env=("OMP_NUM_THREADS=1", "CUDA_VISIBLE_DEVICES="),
    )
    assert (status.state, status.consumed_samples, status.restarts) == ("complete", 128, 1)
    launches = [json.loads(path.read_text()) for path in sorted(directory.glob("launches/*/manifest.json"))]
    # It saves every 5 steps: killed at 48, it continues from 40.
    assert [(x["ranks"], x["start_sample"], x["end_sample"]) for x in launches] == [
        (1, 0, 64),
        (1, 40, 64),
        (2, 64, 128),
    ]
    result = audit(directory)
    assert (result.ok, result.samples, result.gaps, result.repeats, result.discarded_samples) == (True, 128, 0, 0, 8)
    assert json.loads((out / "checkpoint-12" / "batchwright.json").read_text())["position"] == 128
    assert len(list(directory.glob("ledger/*-rank-00001.jsonl"))) == 1  # only the last launch had two ranks
