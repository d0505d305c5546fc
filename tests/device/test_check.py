"""`check` of a model that is on a device: the same causes as on the CPU."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from batchwright.runtime.check import check
from batchwright.runtime.task import Task
from tests.device.host import SIMULATED, place

simulated = pytest.mark.skipif(not SIMULATED, reason="rounding on a real device adds notes")


def loss(kind: str, model: nn.Module, batch: torch.Tensor) -> tuple[Any, ...]:
    x = batch
    if kind == "noise":
        x = x + torch.randn_like(x)
    if kind == "unlisted draw":  # `check` fixes the first draw, and does not know the second
        x = x + 0.1 * torch.randn_like(x) + 0.1 * torch.poisson(torch.ones_like(x))
    output = model(x).squeeze(-1)
    if kind == "mean":
        return output.square().mean(), 1
    if kind == "negatives":
        return (output[:, None] - output[None]).square().sum(), len(x)
    return output.square().sum(), torch.tensor(len(x), device=x.device)


def build(device: torch.device, dropout: float) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 1)).to(device)


def causes(kind: str) -> list[list[tuple[str, str]]]:
    found = []
    rows = [torch.randn(4, generator=torch.Generator().manual_seed(i)) for i in range(8)]
    for device in (torch.device("cpu"), place()):
        task = Task(
            model=lambda device=device: build(device, 0.5 if kind == "dropout" else 0.0),
            dataset=rows,
            loss=lambda model, batch: loss(kind, model, batch),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        )
        report = check(task, global_batch_size=8, micro_batch_sizes=(1, 3))
        found.append(sorted((finding.cause, finding.severity) for finding in report.findings))
    return found


EXPECTED = {
    "sound": [],
    "mean": ["ragged-tail"],
    "negatives": ["in-batch-negatives"],
    "dropout": ["dropout"],
    "noise": ["dropout"],
    "unlisted draw": ["random-draws"],
}


@simulated
@pytest.mark.parametrize("kind", EXPECTED)
def test_the_cause_on_a_device_is_that_on_the_cpu(on_device, kind):
    here, there = on_device(causes, kind)
    assert there == here
    assert [cause for cause, _ in there] == EXPECTED[kind]
