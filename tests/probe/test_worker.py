"""The worker's step, in this process, without a limit."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

import torch

from batchwright.probe.worker import Worker

pytestmark = pytest.mark.torch


def test_a_limit_trial_accumulates_and_has_the_optimizers_state():
    worker = object.__new__(Worker)
    worker.spec = {"steps": 2, "micro_steps": 2}
    worker.size, worker.device = 3, torch.device("cpu")
    worker.model = torch.nn.Linear(4, 1)
    worker.optimizer = torch.optim.AdamW(worker.model.parameters())
    worker.task = SimpleNamespace(example_batch=lambda size: torch.ones(size, 4), loss_of=loss_of)
    worker.stage = lambda doing: None
    SEEN.clear()
    SEEN.append(worker.optimizer)
    worker._limit()
    assert SEEN[1:] == [(False, False), (False, True), (True, True)]


SEEN: list = []


def loss_of(model, batch):
    SEEN.append((model.weight.grad is not None, bool(SEEN[0].state)))
    return model(batch).sum(), len(batch), None
