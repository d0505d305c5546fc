"""Six families of models, probed under real limits of memory; the estimate of each against what was measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from batchwright.core.numbers import parse_bytes
from batchwright.estimate import estimate
from batchwright.probe import probe
from batchwright.probe.machine import trial_environment
from tests.needs import needs

from .conftest import TASKS

pytestmark = pytest.mark.torch
HF_TASKS = TASKS.with_name("hf_tasks.py")
# Small layers and many tokens or pixels: a trial of any size takes seconds.
LLAMA = {"vocab_size": 4096, "sequence_length": 128}

FAMILIES: dict[str, tuple[Path, str, dict[str, Any]]] = {
    "convolutional net": (TASKS, "convolutional", {}),
    "GPT": (TASKS, "gpt", {"width": 64}),
    "Llama": (HF_TASKS, "llama", LLAMA),
    "ViT": (HF_TASKS, "vit", {}),
    "MoE": (HF_TASKS, "llama", {**LLAMA, "experts": 4}),
    "LoRA": (HF_TASKS, "llama", {**LLAMA, "lora": 4}),
}


# A plain training loop without the prober: a new interpreter, torch, the limit, the task's parts, two steps. Before the limit
# it imports what a trial imports: the heap that an import leaves free is 3 MiB more, and the import of transformers uses it.
PLAIN = """
import importlib.util, json, resource, sys, torch, batchwright.probe.worker
path, name, args = sys.argv[1:4]
size, budget = map(int, sys.argv[4:])
now = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmSize")) * 1024
resource.setrlimit(resource.RLIMIT_AS, (now + budget, resource.getrlimit(resource.RLIMIT_AS)[1]))
try:
    spec = importlib.util.spec_from_file_location("tasks", path)
    tasks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tasks)
    task = getattr(tasks, name)(**json.loads(args))
    model = task.model().train()
    optimizer = task.optimizer(model.parameters())
    rows = [i % len(task.dataset) for i in range(size)]
    data = iter(torch.utils.data.DataLoader(task.dataset, batch_sampler=[rows] * 9))
    for step in range(2):
        for micro in range(2):
            batch = next(data)
            total, weight = task.loss(model, batch)
            (total / weight).backward()
            del total
        optimizer.step()
        optimizer.zero_grad()
except (RuntimeError, MemoryError):
    sys.exit(3)
"""


def runs(family: str, size: int, budget: int) -> bool:
    file, name, args = FAMILIES[family]
    command = [sys.executable, "-c", PLAIN, str(file), name, json.dumps(args), str(size), str(budget)]
    environment = trial_environment(limited=True)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode in (0, 3), done.stderr
    return done.returncode == 0


def rounds(family: str, memory: str) -> Any:
    return pytest.param(family, memory, marks=pytest.mark.rounds)


@pytest.mark.parametrize(
    ("family", "memory"),
    [
        ("convolutional net", "256MiB"),
        rounds("GPT", "512MiB"),
        rounds("convolutional net", "4GiB"),
        rounds("GPT", "1GiB"),
        rounds("Llama", "512MiB"),
        rounds("Llama", "4GiB"),
        rounds("ViT", "1GiB"),
        rounds("MoE", "1GiB"),
        rounds("LoRA", "1GiB"),
    ],
)
def test_the_limit_takes_five_trials_and_is_near_the_estimate(family, memory, monkeypatch):
    file, name, args = FAMILIES[family]
    if file == HF_TASKS:
        needs("transformers")
        needs("peft")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(
        "batchwright.probe.prober._ESTIMATE_SECONDS", 1800.0
    )  # without an estimate, there are more trials
    task, budget = f"{file}:{name}", parse_bytes(memory, "memory")
    made = probe(task, args=args, memory=memory, throughput=False, dir=None, timeout=1800)
    largest, failing = made.max_micro_batch_size, made.first_failing_micro_batch_size
    tried = [(t.micro_batch_size, t.status, t.peak_memory_bytes) for t in made.trials]
    assert failing is not None and largest < failing <= max(largest + 1, largest * 1.01)
    assert {t.cause for t in made.trials if not t.fits} == {"host-oom"}
    assert len(made.trials) <= 5, tried

    estimated = estimate(task, args=args, memory_bytes=budget, accumulation_steps=2)
    line = estimated.lengths[-1].slope
    assert line is not None and estimated.max_micro_batch_size is not None
    peaks = {size: peak for size, status, peak in tried if status == "fits" and peak}
    first = min(peaks)  # one real run shows what the estimate does not see
    predicted = peaks[first] + line.bytes_per_sample * (largest - first)
    print(f"{family} {memory}: {tried}, estimated {estimated.max_micro_batch_size}, predicted {predicted:.0f}")
    assert predicted == pytest.approx(peaks[largest], rel=0.03)
    # Measured: from 0.7% to 4.1% too large. With transformers, its import takes a part of the memory, too.
    if file == TASKS:
        assert largest <= estimated.max_micro_batch_size <= 1.06 * largest


@pytest.mark.rounds
@pytest.mark.parametrize(("family", "memory"), [("convolutional net", "256MiB"), ("ViT", "512MiB")])
def test_the_limit_is_that_of_a_plain_loop(family, memory, monkeypatch):
    file, name, args = FAMILIES[family]
    if file == HF_TASKS:
        needs("transformers")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    made = probe(f"{file}:{name}", args=args, memory=memory, throughput=False, dir=None, timeout=1800)
    largest, failing, budget = (
        made.max_micro_batch_size,
        made.first_failing_micro_batch_size,
        parse_bytes(memory, "memory"),
    )
    # Within 1%, as promised. One sample of the convolutional net takes 1.1 MiB, and what two runs of the same loop need at the
    # same size was measured to differ by 0.4 MiB: at the limit itself, another program may fail by chance.
    assert failing is not None
    assert runs(family, largest * 99 // 100, budget)
    assert not runs(family, -(-failing * 101 // 100), budget)
