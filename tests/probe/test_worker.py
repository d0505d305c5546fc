"""The worker's step, in this process, without a limit."""

from __future__ import annotations

import resource
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

import torch

from batchwright.probe.worker import Worker

pytestmark = pytest.mark.torch


@pytest.fixture
def worker():
    made = object.__new__(Worker)
    made.spec = {"steps": 2, "micro_steps": 2, "seconds": 0.0, "contrasts": False, "workers": 0}
    made.size, made.device, made.result = 3, torch.device("cpu"), {}
    made.ranks = SimpleNamespace(rank=0, size=1)
    made.model = torch.nn.Linear(4, 1)
    made.optimizer = torch.optim.AdamW(made.model.parameters())
    made.task = SimpleNamespace(example_batch=lambda size: torch.ones(size, 4), loss_of=loss_of)
    made.stage = lambda doing: None
    SEEN.clear()
    SEEN.append(made.optimizer)
    return made


def test_a_limit_trial_accumulates_and_has_the_optimizers_state(worker):
    worker._limit()
    assert SEEN[1:] == [(False, False), (False, True), (True, True)]


@pytest.mark.parametrize("micro_steps", [1, 2])
def test_a_trial_of_speed_needs_the_memory_of_a_limit_trial(worker, micro_steps):
    """If the job accumulates: gradients and the optimizer's state exist during a forward pass."""
    worker.spec["micro_steps"] = micro_steps
    worker._throughput()
    assert ((True, True) in SEEN[1:]) == (micro_steps > 1)
    assert SEEN[-1] == (False, True), "the steps that are timed do not accumulate"


def test_a_task_with_an_example_batch_needs_no_dataset(worker):
    worker.spec["contrasts"] = True
    worker._throughput()
    assert worker.result["contrasts"].keys() == {"cached", "accumulate"}


@pytest.mark.parametrize("memory", [None, 2**30])
def test_what_the_limit_depends_on_without_a_budget(worker, memory):
    worker.spec |= {"memory": memory, "host_memory": 2**34}
    before = resource.getrlimit(resource.RLIMIT_AS)
    free = worker.room()
    try:
        resource.setrlimit(resource.RLIMIT_AS, (2**46, before[1]))
        limited = worker.room()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert (limited == free) == (memory is not None)
    worker.spec["host_memory"] = 2**33
    assert (worker.room() == free) == (memory is not None)


SEEN: list = []


def loss_of(model, batch):
    SEEN.append((model.weight.grad is not None, bool(SEEN[0].state)))
    return model(batch).sum(), len(batch), None
