"""A task for runs in a pipeline: a Sequential that is cut into stages. `slow`: seconds per micro batch."""

from __future__ import annotations

import time

import torch
from torch import nn

from batchwright.runtime.task import Task


def task(slow: float = 0.0, size: int = 4096, width: int = 8) -> Task:
    torch.manual_seed(7)
    xs = torch.randn(size, 4)
    ys = torch.sin(xs.sum(1, keepdim=True))

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, float]:
        x, y = batch
        time.sleep(slow)
        return ((model(x) - y) ** 2).sum(), float(len(x))

    layers = [nn.Linear(4, width), *(nn.Linear(width, width) for _ in range(3)), nn.Linear(width, 1)]
    return Task(
        model=lambda: nn.Sequential(*layers),
        dataset=[(x, y) for x, y in zip(xs, ys, strict=True)],
        loss=loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=0.01),
    )
