"""A task with equal layers, for pipelines: each stage of a split takes as long as the others."""

from __future__ import annotations

import time
from dataclasses import replace

import torch
from torch import nn

from batchwright.runtime.task import Task


def task(width: int = 256, layers: int = 8, length: int = 16) -> Task:
    rows = [torch.randn(length, width, generator=torch.Generator().manual_seed(i)) for i in range(64)]
    return Task(
        model=lambda: nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))),
        dataset=rows,
        loss=lambda model, batch: (model(batch).square().mean(-1).sum(), batch.shape[0] * batch.shape[1]),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
    )


class Reads(nn.Module):
    """Blocks that use the number of samples, as attention does: torch's tracer splits it for one number."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = hidden + block(hidden).view(hidden.shape[0], -1, 2, hidden.shape[2] // 2).flatten(2)
        return hidden


def traced() -> Task:
    """A loss that is weighted by samples, of 16 tokens each."""
    made = task(width=8)
    return replace(made, model=lambda: Reads(8), loss=lambda model, batch: (model(batch).square().sum(), len(batch)))


class _Sleeps(torch.autograd.Function):
    """Takes a time forward and twice that time backward, on any machine."""

    @staticmethod
    def forward(ctx, hidden: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return hidden.clone()

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return gradient, None


class Sleeping(nn.Module):
    """A layer that takes `seconds` × the share of 8 samples that a microbatch has, and a fixed time beside it."""

    def __init__(self, seconds: float, fixed: float) -> None:
        super().__init__()
        self.scale, self.seconds, self.fixed = nn.Parameter(torch.ones(())), seconds, fixed

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return _Sleeps.apply(hidden * self.scale, self.fixed + self.seconds * len(hidden) / 8)


def sleeping(seconds: float = 0.2, fixed: float = 0.0) -> Task:
    """Two equal layers. A pass of 8 samples through one of them takes 3 × `seconds`."""
    return Task(
        model=lambda: nn.Sequential(Sleeping(seconds, fixed), Sleeping(seconds, fixed)),
        dataset=[torch.full((16, 1), float(i)) for i in range(64)],
        loss=lambda model, batch: (model(batch).sum(), batch.numel()),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.0),
    )
