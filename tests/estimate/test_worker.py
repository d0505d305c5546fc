"""The estimating process: the caller loads no framework, and the process never outlives the caller."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from batchwright.core.batch.request import BatchRequest
from batchwright.core.errors import RunError
from batchwright.estimate import worker
from batchwright.estimate.records import ChoiceRequest, EstimateRequest
from batchwright.processes.start import GuardedProcess

COMMAND = [sys.executable, "-m", "batchwright", "estimate"]


@pytest.mark.torch
def test_one_document_on_stdout_calibrated_and_no_torch_in_the_caller(tasks):
    code = (
        "import sys\nfrom batchwright.cli import main\n"
        "try: main(sys.argv[1:])\nfinally: sys.stderr.write('HEAVY ' + ' '.join({'torch', 'jax', 'numpy'} & set(sys.modules)))"
    )
    arguments = [
        "estimate",
        f"{tasks}:small",
        "--memory",
        "1GiB",
        "--micro-batch-size",
        "4096,8192",
        "--calibrate",
        "--json",
    ]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    trial = document["calibration"]
    assert trial["measured_bytes"] == trial["estimated_bytes"] + trial["difference_bytes"] > 2**20
    assert document["max_micro_batch_size"] == 8192 and document["device"] is None
    assert [p["micro_batch_size"] for p in document["points"]] == [4096, 8192]
    assert done.stderr.endswith("HEAVY ") and "estimated micro_batch_size 4096" in done.stderr


def _blocked(folder: Path, module: str) -> dict[str, str]:
    (folder / f"{module}.py").write_text(f"raise ModuleNotFoundError(\"No module named '{module}'\", name='{module}')")
    return {**os.environ, "PYTHONPATH": str(folder)}


@pytest.mark.parametrize(
    ("module", "source"),
    [("torch", "def task(): ..."), ("jax", "from batchwright.estimate import JaxStep\ndef task(): ...")],
)
def test_a_missing_framework_names_its_extra(tmp_path, module, source):
    (tmp_path / "train.py").write_text(source)
    blocked = _blocked(tmp_path, module)
    done = subprocess.run(
        [*COMMAND, str(tmp_path / "train.py"), "--json"], capture_output=True, text=True, env=blocked, timeout=600
    )
    assert done.returncode == 4, done.stderr
    error = json.loads(done.stdout)["error"]
    assert error["type"] == "MissingExtraError" and f"batchwright[{module}]" in error["message"]


def test_a_timeout_is_an_error_that_names_it(tasks):
    request = EstimateRequest(f"{tasks}:sleeps", {"pid_file": os.devnull})
    with pytest.raises(RunError, match=r"did not finish within 0\.2 s"):
        worker.run("estimate", request, timeout=0.2)
    with pytest.raises(RunError, match=r"^plan did not finish within 0\.2 s\. Give a micro batch"):
        worker.run("choose", ChoiceRequest(BatchRequest(), request), timeout=0.2)


@pytest.mark.torch
def test_a_timeout_ends_the_process(tasks, tmp_path, monkeypatch):
    file, watch = tmp_path / "pid", GuardedProcess.watch

    def from_its_start_on(child, timeout, **options):
        _wait_for(lambda: file.exists() and file.read_text())
        return watch(child, timeout, **options)

    monkeypatch.setattr(GuardedProcess, "watch", from_its_start_on)
    with pytest.raises(RunError, match="did not finish within 0"):
        worker.run("estimate", EstimateRequest(f"{tasks}:sleeps", {"pid_file": str(file)}), timeout=0.2)
    assert _wait_for(lambda: _ended(int(file.read_text())))


@pytest.mark.torch
@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel to end the child with its parent")
def test_the_process_ends_with_a_killed_caller(tasks, tmp_path):
    file = tmp_path / "pid"
    caller = subprocess.Popen([*COMMAND, f"{tasks}:sleeps", "--arg", f"pid_file={file}"], stderr=subprocess.DEVNULL)
    try:
        pid = int(_wait_for(lambda: file.exists() and file.read_text()))
    finally:
        os.kill(caller.pid, signal.SIGKILL)
        caller.wait()
    assert _wait_for(lambda: _ended(pid))


def _ended(pid):
    try:
        return "Z" in Path(f"/proc/{pid}/stat").read_text().split()[2]
    except OSError:  # it may end between opening and reading, too
        return True


def _wait_for(condition, seconds=600):
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "the condition did not become true"
        time.sleep(0.05)
    return value


def test_a_bug_in_the_estimating_process_is_shown_where_it_is():
    bug = {"type": "bug", "message": "KeyError: 'x'", "traceback": "Traceback (most recent call last):\n  line\n"}
    with pytest.raises(RuntimeError, match="in the estimating process: KeyError: 'x'") as caught:
        worker._checked({"error": bug})
    assert caught.value.__notes__ == ["Traceback (most recent call last):\n  line"]


def test_an_end_without_a_result_is_reported(monkeypatch, tmp_path):
    killer = tmp_path / "python"
    killer.write_text("#!/bin/sh\nkill -9 $$\n")
    killer.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(killer))
    with pytest.raises(
        RunError, match="ended without a result: killed by SIGKILL, as the kernel's out-of-memory killer does"
    ):
        worker.run("estimate", EstimateRequest("x.py:task"), timeout=600)
