"""A small task for the tests of the loop: a sample is a function of its id, dropout shows the state of generators."""

from __future__ import annotations

import time

import torch
from torch import nn

from batchwright.runtime.task import Task


class Numbers:
    """Sample i is eight random numbers with seed i, and a target; the target of the sample `spike` is infinite."""

    def __init__(self, size: int, pause: float = 0.0, spike: int | None = None) -> None:
        self.size, self.pause, self.spike = size, pause, spike

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if self.pause:
            time.sleep(self.pause)
        generator = torch.Generator().manual_seed(i)
        x = torch.randn(8, generator=generator)
        y = x[:3].sum() + 0.1 * torch.randn((), generator=generator)
        return x, y if i != self.spike else y + torch.inf, torch.tensor(1 + i % 3)


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


def task(
    size: int = 256,
    dropout: float = 0.0,
    width: int = 16,
    pause: float = 0.0,
    lr: float = 1e-2,
    spike: int | None = None,
    half: bool = False,
) -> Task:
    """A regression with weights of 1 to 3 per sample, like documents of different lengths; `half`: in bf16."""
    kind = torch.bfloat16 if half else torch.float32

    def loss(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        x, y, weight = batch
        return ((model(x.to(kind)) - y) ** 2 * weight).sum(), weight.sum()

    return Task(
        model=lambda: Net(dropout, width).to(kind),
        dataset=Numbers(size, pause, spike),
        loss=loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=lr),
    )
