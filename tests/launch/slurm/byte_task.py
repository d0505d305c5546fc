"""A small model for the real loop: regression on numbers that depend on the sample only."""

import torch

from batchwright.runtime import Task


class Numbers(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 448

    def __getitem__(self, index: int):
        x = torch.sin(torch.arange(8) * (index + 1.0))
        return x, x.sum() + 0.1 * index


def task() -> Task:
    def loss(model, batch):
        x, y = batch
        return ((model(x).squeeze(-1) - y) ** 2).sum(), x.shape[0]

    return Task(
        model=lambda: torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)),
        dataset=Numbers(),
        loss=loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
    )
