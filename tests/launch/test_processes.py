"""The processes of a launch without torchrun: one that fails ends the others."""

from __future__ import annotations

import sys
import time

from batchwright.launch import processes

ENDING = (
    "import os, sys, time; os.environ['RANK'] == '1' and sys.exit(int(sys.argv[1])); time.sleep(float(sys.argv[2]))"
)


def start(code: int, seconds: float) -> int:
    return processes.main(2, [sys.executable, "-c", ENDING, str(code), str(seconds)])


def test_the_first_failure_is_the_exit_code_and_the_others_are_killed(monkeypatch):
    monkeypatch.setattr(processes, "SHUTDOWN_SECONDS", 0.2)
    began = time.monotonic()
    assert start(3, 500) == 3
    assert time.monotonic() - began < 400


def test_a_process_that_ends_well_waits_for_the_others():
    assert start(0, 0.5) == 0


def test_processes_know_each_other(capfd):
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    processes.main(2, [sys.executable, "-c", f"import os; print(*(os.environ[n] for n in {names}), flush=True)"])
    assert sorted(capfd.readouterr().out.splitlines()) == ["0 0 2 2 127.0.0.1", "1 1 2 2 127.0.0.1"]
