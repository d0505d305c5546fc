"""Scripted workers and small real tasks."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest

from batchwright.probe.records import read_request
from batchwright.processes.start import GuardedProcess

HEADER = """
import json, os, signal, sys, time
spec = json.load(open(sys.argv[1]))
size, mode = spec["micro_batch_size"], spec["mode"]
IDENTITY = {"optimizer": "AdamW", "device": "cpu (test)", "precision": "float32"}
TIMING = {"seconds": 0.1, "low": 0.099, "high": 0.101, "variation": 0.01, "steps": 9, "warmup": 1}
RESULT = {}  # is in every result

def say(**result):
    path = spec["result"] + ".0"
    json.dump(RESULT | result, open(path + ".part", "w"))
    os.replace(path + ".part", path)

def fits(peak=None, **more):
    seconds = 0.01 + 0.001 * size
    timing = TIMING | {"seconds": seconds, "low": seconds * 0.99, "high": seconds * 1.01}
    contrasts = {"cached": timing, "loader": timing, "accumulate": timing} if spec["contrasts"] else None
    say(**{"status": "done", "identity": IDENTITY, "peak_memory_bytes": peak or 1000 + 10 * size, "limit_bytes": 2000,
           "timing": timing if mode == "throughput" else None, "contrasts": contrasts} | more)
    sys.exit(0)

def oom(kind="host-oom"):
    say(status="failed", identity=IDENTITY, kind=kind, reason="scripted", limit_bytes=2000)
    sys.exit(1)

def hang(doing="forward of step 0"):
    say(status="running", identity=IDENTITY, stage=3, doing=doing)
    hang_now()

def hang_now():
    print("hangs", flush=True)
    time.sleep(10**9)
"""


@pytest.fixture
def hangs_end(monkeypatch):
    """A worker that says it hangs is ended at once, as at its timeout: with a short one, a slow machine fails the test."""
    watch = GuardedProcess.watch

    def ended(self, timeout, **options):
        return watch(self, timeout, on_line=lambda line, when: line == "hangs", **options)

    monkeypatch.setattr(GuardedProcess, "watch", ended)


@pytest.fixture
def scripted(tmp_path):
    """`scripted(code, **options)` is a request whose worker runs `code`, which can use `size`, `mode`, `fits()`, `oom()`."""

    def make(code: str, **options):
        worker = tmp_path / "worker.py"
        worker.write_text(HEADER + textwrap.dedent(code))
        task = tmp_path / "task.py"
        task.write_text("def task(): ...\n")
        given = {"directory": tmp_path / "journal", "timeout": 600.0, "throughput": False} | options
        return read_request(f"{task}:task", worker=(sys.executable, "-S", str(worker)), **given)

    return make


TASK = """
import torch
from torch import nn
from batchwright.runtime.task import Task

class Data:
    def __len__(self):
        return 64
    def __getitem__(self, i):
        return torch.full((4096, 64), float(i % 7))

def net():
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))

def task(optimizer="AdamW"):
    return Task(
        model=net,
        dataset=Data(),
        loss=lambda model, x: (model(x).square().sum(), x.numel()),
        optimizer=lambda params: getattr(torch.optim, optimizer)(params, lr=1e-3),
    )

def broken():
    def loss(model, x):
        raise ValueError("the user's own mistake")
    return Task(model=net, dataset=Data(), loss=loss, optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
"""


@pytest.fixture
def task_file(tmp_path) -> Path:
    """A small real task: few weights and wide activations, so that memory grows by some MiB per sample."""
    path = tmp_path / "tiny.py"
    path.write_text(TASK)
    return path
