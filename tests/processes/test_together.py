"""The ranks of one small job: the rank at fault is named, and none outlives its caller."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from batchwright.core.errors import RunError
from batchwright.processes.together import run_ranks

# Rank 1 fails; rank 0 fails when it sees that, and ends before it.
FAULT = """
import sys, time
from pathlib import Path
folder, rank = Path(sys.argv[1]).parent, int(sys.argv[2])
if rank == 1:
    print("the loss is wrong", flush=True)
    (folder / "failed").touch()
    while not (folder / "rank0.log").stat().st_size:
        time.sleep(0.001)
    time.sleep(0.2)
    raise SystemExit(1)
while not (folder / "failed").exists():
    time.sleep(0.001)
time.sleep(0.05)  # times of files are a few milliseconds apart at least
print("connection closed by peer", flush=True)
raise SystemExit(1)
"""
HANGS = """
import os, sys, time
from pathlib import Path
(Path(sys.argv[1]).parent / f"pid{sys.argv[2]}").write_text(str(os.getpid()))
time.sleep(600)
"""
ENDS = """
import atexit, os, sys
from pathlib import Path
from batchwright.core.errors import PlanError
from batchwright.processes.together import run_rank

def main(spec, rank):
    if Path(spec).exists() and rank == 1:
        raise PlanError("the batch is wrong") from ValueError("label 17")
    print("done")

atexit.register(os.abort)  # as gloo's threads may, when the interpreter is shut down
run_rank(main)
"""
CALLER = """
import sys
from pathlib import Path
from batchwright.processes.together import run_ranks
run_ranks("ranks_that_hang", Path(sys.argv[1]), 2, timeout=600, field="ranks")
"""


def test_the_rank_at_fault_is_shown_and_not_one_that_lost_its_connection(tmp_path, monkeypatch):
    (tmp_path / "ranks_of_which_one_fails.py").write_text(FAULT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(RunError, match=r"^rank 1 of 2 failed \(exit code 1\)\. Its output:\nthe loss is wrong$"):
        run_ranks("ranks_of_which_one_fails", tmp_path / "spec", 2, timeout=600, field="ranks")


def test_a_rank_ends_without_shutting_the_interpreter_down(tmp_path, monkeypatch):
    (tmp_path / "ranks_that_abort_late.py").write_text(ENDS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    run_ranks("ranks_that_abort_late", tmp_path / "spec", 2, timeout=600, field="ranks")
    assert (tmp_path / "rank0.log").read_text() == "done\n"
    (tmp_path / "spec").touch()
    with pytest.raises(
        RunError, match=r"(?s)^rank 1 of 2 failed \(exit code 2\).*ValueError: label 17\nerror: the batch is w"
    ):
        run_ranks("ranks_that_abort_late", tmp_path / "spec", 2, timeout=600, field="ranks")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_ranks_end_with_their_caller(tmp_path, number):
    (tmp_path / "ranks_that_hang.py").write_text(HANGS)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    caller = subprocess.Popen([sys.executable, "-c", CALLER, str(tmp_path / "spec")], env=environment)
    files = [tmp_path / f"pid{rank}" for rank in (0, 1)]
    try:
        until(lambda: all(file.exists() and file.read_text() for file in files))
    finally:
        caller.send_signal(number)
        caller.wait()
    until(lambda: all(ended(file.read_text()) for file in files))


def until(condition) -> None:
    deadline = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def ended(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True
