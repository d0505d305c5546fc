"""A task whose memory on the device is known: each sample keeps 1 MiB of activations."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from batchwright.runtime.task import Task

WIDTH = 1 << 18  # floats: 1 MiB


class Data:
    def __len__(self) -> int:
        return 1000

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.tensor([float(i % 7)])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x * self.scale)  # keeps its input: WIDTH floats per sample


def task(there: bool = False) -> Task:
    """`there`: the samples are on the device already."""
    data: Any = Data()
    if there:
        data = [data[i].to(torch.accelerator.current_accelerator()) for i in range(100)]
    return Task(
        model=Model,
        dataset=data,
        loss=lambda model, batch: (model(batch).square().mean(1).sum(), len(batch)),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    )
