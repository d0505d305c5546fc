"""A task whose stages are built by a function; with `wrong`, the second stage has another activation than the model; with
`tied`, the first and the last stage use one weight of the model, under one name or (`alias`) two. `traced`: torch's tracer
splits a model that reads the number of its samples."""

from __future__ import annotations

import torch
from torch import nn

from batchwright.runtime.task import Task


class Stage(nn.Module):
    """Stage `index` of `stages`; the only stage of one is the whole model."""

    def __init__(self, index: int = 0, stages: int = 1, wrong: bool = False, tied: bool | str = False) -> None:
        super().__init__()
        self.first, self.last = index == 0, index == stages - 1
        self.ends = nn.Linear(4, 4) if tied and (self.first or (self.last and tied != "alias")) else None
        self.tail = nn.Linear(4, 4, bias=False) if tied == "alias" and self.last else None
        if self.tail is not None and self.ends is not None:
            self.tail.weight = self.ends.weight
        self.layers = nn.ModuleDict(
            {str(i): nn.Linear(4, 4) for i in range(4 * index // stages, 4 * (index + 1) // stages)}
        )
        self.activation = torch.sigmoid if wrong and index == 1 else torch.tanh

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.ends is not None and self.first:
            hidden = self.ends(hidden)
        for layer in self.layers.values():
            hidden = hidden + self.activation(layer(hidden))
        end = self.tail if self.tail is not None else self.ends if self.last else None
        return hidden if end is None else end(hidden)


class Traced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden)).view(hidden.shape[0], 2, 2).flatten(1)
        return hidden


def task(wrong: bool = False, tied: bool | str = False, traced: bool = False) -> Task:
    rows = [torch.randn(4, generator=torch.Generator().manual_seed(i)) for i in range(16)]
    return Task(
        model=lambda: Traced() if traced else Stage(tied=tied),
        dataset=rows,
        loss=lambda model, batch: (model(batch).square().sum(), len(batch)),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        stage=None if traced else lambda index, stages: Stage(index, stages, wrong, tied),
    )
