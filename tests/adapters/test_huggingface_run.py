"""`batchwright run` drives the example through the launches of a ramp: 1 rank, then 2, with `kill -9` in the middle."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from batchwright.runtime import audit

pytestmark = pytest.mark.torch
ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "huggingface" / "train.py"


def test_run_drives_the_example_through_its_launches(tmp_path):
    pytest.importorskip("transformers")
    directory, out = tmp_path / "run", tmp_path / "out"
    command = [
        sys.executable, "-m", "batchwright", "run", "--thresholds", "0:8 64:16", "--samples", "128", "--micro-batch-size", "4",
        "--nodes", "2", "--devices-per-node", "1", "--node-policy", "constant-work", "--dir", directory, "--retry-seconds", "0.1",
        "--env", "OMP_NUM_THREADS=1", "--env", "CUDA_VISIBLE_DEVICES=", "--json", "--",
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "{devices}", EXAMPLE, "--out", out,
    ]  # fmt: skip
    process = subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    # Kill the first launch in the middle: after its first save, at step 5 of 8, and before its end.
    killed = None
    while killed is None and process.poll() is None:
        killed = kill_after_save(directory)
        time.sleep(0.02)
    output, errors = process.communicate(timeout=900)
    assert process.returncode == 0, errors[-4000:]
    found = json.loads(output)
    assert (found["state"], found["consumed_samples"], found["restarts"]) == ("complete", 128, 1)
    launches = [json.loads(path.read_text()) for path in sorted(directory.glob("launches/*/manifest.json"))]
    assert [(x["ranks"], x["end_sample"]) for x in launches] == [(1, 64), (1, 64), (2, 128)]
    assert launches[1]["start_sample"] >= 40  # from the save, not from the start
    result = audit(directory)
    assert (result.ok, result.samples, result.gaps, result.repeats) == (True, 128, 0, 0)
    assert json.loads((out / "checkpoint-12" / "batchwright.json").read_text())["position"] == 128
    assert len(list(directory.glob("ledger/*-rank-00001.jsonl"))) == 1  # only the last launch had two ranks


def kill_after_save(directory: Path) -> int | None:
    """SIGKILL the training process of launch 1 once it has reported a save; its process id."""
    try:
        saved = json.loads((directory / "launches" / "0001" / "status.json").read_text())["consumed_samples"]
    except (OSError, ValueError):
        return None
    if not saved:
        return None
    for folder in Path("/proc").iterdir():
        try:
            environment = (folder / "environ").read_bytes().split(b"\0")
            arguments = (folder / "cmdline").read_bytes().split(b"\0")
        except (OSError, ValueError):
            continue
        mine = f"BATCHWRIGHT_RUN_DIR={directory}".encode() in environment and b"RANK=0" in environment
        if mine and any(argument.endswith(b"train.py") for argument in arguments):
            os.kill(int(folder.name), signal.SIGKILL)
            return int(folder.name)
    return None
