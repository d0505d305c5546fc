"""A small task for the loop's tests: every sample is known by its id, dropout shows whether generators go on."""

from __future__ import annotations

import time

import torch
from torch import nn

from batchwright.runtime.task import Task


class Numbers:
    """Sample i is eight numbers drawn from i, and a target."""

    def __init__(self, size: int, pause: float = 0.0) -> None:
        self.size, self.pause = size, pause

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if self.pause:
            time.sleep(self.pause)
        generator = torch.Generator().manual_seed(i)
        x = torch.randn(8, generator=generator)
        return x, x[:3].sum() + 0.1 * torch.randn((), generator=generator), torch.tensor(1 + i % 3)


class Net(nn.Module):
    def __init__(self, dropout: float, width: int) -> None:
        super().__init__()
        self.into = nn.Linear(8, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.drop, self.out = nn.Dropout(dropout), nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.into(x))
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.out(self.drop(x)).squeeze(-1)


def task(size: int = 256, dropout: float = 0.0, width: int = 16, pause: float = 0.0, lr: float = 1e-2) -> Task:
    """A regression with weights of 1 to 3 per sample, as documents of different lengths have."""

    def loss(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        x, y, weight = batch
        return ((model(x) - y) ** 2 * weight).sum(), weight.sum()

    return Task(
        model=lambda: Net(dropout, width),
        dataset=Numbers(size, pause),
        loss=loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=lr),
    )
