"""The tutorial as a reader would follow it: its script, its repair, its commands, Ctrl-C, and the report."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.torch
PAGE = (Path(__file__).parents[2] / "docs" / "tutorial.md").read_text(encoding="utf-8")
SCRIPT, TASK, REPAIRED = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = re.findall(r"^```sh\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture
def shell(tmp_path: Path):
    """Run one command of the page, in a folder of its own."""
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}

    def run(command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
        )

    run.environment = environment  # type: ignore[attr-defined]
    return run


def test_every_step_of_the_tutorial_does_what_the_page_says(shell, tmp_path):
    check, probe, plan, train, resume, ledger, report = COMMANDS
    script = tmp_path / "train.py"
    script.write_text(SCRIPT + "\n\n" + TASK, encoding="utf-8")
    found = shell(check)
    assert found.returncode == 5 and "error: mean-of-means" in found.stdout, found.stderr

    old = re.search(r"^def loss\(.*?(?=^def )", SCRIPT, re.MULTILINE | re.DOTALL)
    assert old is not None
    whole = (
        SCRIPT.replace(old[0], REPAIRED + "\n\n")
        + "\n\n"
        + TASK.replace("loss=lambda m, b: (loss(m, b), 1)", "loss=loss")
    )
    script.write_text(whole, encoding="utf-8")
    found = shell(check)
    assert found.returncode == 0 and found.stdout.startswith("ok: the split does not change the gradient"), found.stdout

    found = shell(probe)
    assert found.returncode == 0, found.stderr
    assert json.loads((tmp_path / "probe.json").read_text())["max_micro_batch_size"] == 64
    found = shell(plan)
    assert found.stdout.startswith("128 = 64 micro × 1 accumulation × 2 data-parallel"), found.stdout + found.stderr

    # Ctrl-C after the first steps.
    events = tmp_path / "runs" / "first" / "events" / "launch-00001.jsonl"
    with subprocess.Popen(["bash", "-c", "exec " + train], cwd=tmp_path, env=shell.environment) as running:
        while running.poll() is None and not (events.exists() and '"kind": "step"' in events.read_text()):
            time.sleep(0.05)
        running.send_signal(signal.SIGINT)
    assert running.returncode == 130
    state = json.loads(shell("batchwright run --status runs/first --json").stdout)
    assert state["state"] == "stopped" and 0 < state["consumed_samples"] < 12_000
    found = shell(resume)
    assert found.returncode == 0 and found.stdout.startswith("complete: 12,000 of 12,000 samples"), found.stderr
    assert shell(ledger).stdout.startswith("ok")
    found = shell(report)
    assert found.returncode == 0, found.stderr
    assert (tmp_path / "report.html").stat().st_size > 100_000
