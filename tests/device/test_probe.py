"""The probe on a device: its limit, its peaks, the time of a step, one rank and two."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")


from batchwright.probe.worker import Worker
from batchwright.runtime.device import OUTSIDE_ALLOCATOR, outside_allocator
from tests.device.host import SIMULATED, waits

MIB = 2**20
BUDGET = (40 if SIMULATED else 2048) * MIB  # a real allocator takes memory in blocks
TASK = f"{Path(__file__).with_name('probe_task.py')}:task"
simulated = pytest.mark.skipif(not SIMULATED, reason="of a device with known memory")


def trial(folder: str, size: int, mode: str = "limit", **changes: Any) -> dict[str, Any]:
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    spec = {
        "target": TASK,
        "args": {},
        "ranks": ranks,
        "memory": BUDGET + outside_allocator(ranks),
        "margin": 0,
        "on": None,
        "longest": False,
        "workers": 0,
        "seconds": 0.05,
        "micro_batch_size": size,
        "mode": mode,
        "limited": mode in ("limit", "evaluation"),
        "host_memory": 2**40,
        "steps": 2,
        "micro_steps": 2,
        "longest_index": None,
        "contrasts": mode == "throughput",
        "result": f"{folder}/result",
        **changes,
    }
    worker = Worker(spec)
    worker.run()
    found = json.loads(worker.path.read_text(encoding="utf-8"))
    del worker
    return found


@simulated
def test_a_limit_is_kept_and_exceeded_as_out_of_memory(on_device, tmp_path):
    """40 MiB hold the weights, a gradient, the momentum, and activations of 1 MiB per sample and copy."""
    fits = on_device(trial, str(tmp_path), 4)
    assert (fits["status"], fits["limit_bytes"], fits["outside_bytes"]) == ("done", 40 * MIB, OUTSIDE_ALLOCATOR)
    assert 4 * MIB < fits["peak_memory_bytes"] == fits["reserved_bytes"] < 40 * MIB
    assert fits["identity"]["device"] == "Simulated accelerator"
    more = on_device(trial, str(tmp_path), 5)
    assert more["peak_memory_bytes"] - fits["peak_memory_bytes"] >= 3 * MIB
    broken = on_device(trial, str(tmp_path), 64)
    assert (broken["status"], broken["kind"]) == ("failed", "device-oom")


def test_an_evaluation_trial_runs(on_device, tmp_path):
    assert on_device(trial, str(tmp_path), 8, "evaluation")["status"] == "done"


def timed(folder: str, there: bool) -> tuple[dict[str, Any], dict[str, int]]:
    found = trial(folder, 2, "throughput", args={"there": there})
    return found, dict(waits()) if SIMULATED else {}


@pytest.mark.parametrize("there", [False, True])
def test_the_time_of_a_step_ends_when_the_device_is_done(on_device, tmp_path, there):
    found, waited = on_device(timed, str(tmp_path), there)
    assert found["status"] == "done", found
    assert {"cached", "loader"} == set(found["contrasts"])
    if SIMULATED:  # a copy of the batch does not wait; each timed step is waited for
        steps = sum(t["steps"] for t in found["contrasts"].values())
        assert sum(n for line, n in waited.items() if line.startswith("synchronize in probe/worker.py")) >= steps
        copies = {line: n for line, n in waited.items() if line.startswith("copy to the device in probe/")}
        assert sum(copies.values()) <= 1, waited  # of the model, and not of a batch


@simulated
def test_a_budget_that_leaves_nothing_is_refused(on_device, tmp_path):
    found = on_device(trial, str(tmp_path), 1, "limit")
    assert found["status"] == "done"
    refused = on_device(small, str(tmp_path))
    assert refused["status"] == "invalid"
    assert "leave nothing for the job" in json.dumps(refused["error"])


def small(folder: str) -> dict[str, Any]:
    return trial(folder, 1, memory=100 * MIB)


def test_two_ranks_measure_together(on_ranks, tmp_path):
    for found in on_ranks(trial, str(tmp_path), 4):
        assert found["status"] == "done", found
        assert found["outside_bytes"] == outside_allocator(2) > OUTSIDE_ALLOCATOR
        assert 4 * MIB < found["peak_memory_bytes"] < BUDGET
    for found in on_ranks(trial, str(tmp_path), 2, "throughput"):
        assert found["status"] == "done", found


@simulated
def test_a_whole_probe_of_a_task_on_a_device(tmp_path):
    """`batchwright probe`, its server and the trials that it forks: all processes of it have the simulated device."""
    from tests.device.sim.patches import why_not

    if reason := why_not():
        pytest.skip(reason)
    root = Path(__file__).parents[2]
    path = [str(Path(__file__).with_name("site")), str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [sys.executable, "-m", "batchwright", "probe", TASK, "--memory", str(40 * MIB + OUTSIDE_ALLOCATOR)]
    done = subprocess.run(
        [*command, "--limit-only", "--max", "64", "--json", "--dir", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["device"] == "Simulated accelerator"
    assert 4 < found["max_micro_batch_size"] < found["first_failing_micro_batch_size"] <= 64
    assert {t["cause"] for t in found["trials"] if t["status"] == "oom"} == {"device-oom"}
    assert any("outside torch's allocator" in note for note in found["notes"])
