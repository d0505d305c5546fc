"""A task that starts fast: a small model on fixed samples. `slow`: seconds per micro batch."""

from __future__ import annotations

import os
import time

import torch
from torch import nn

from batchwright.runtime.task import Task


def task(slow: float = 0.0, hang: str = "", size: int = 4096, width: int = 8, oom_above: int = 0) -> Task:
    torch.manual_seed(7)
    xs = torch.randn(size, 4)
    ys = torch.sin(xs.sum(1, keepdim=True))

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, float]:
        x, y = batch
        if slow:
            time.sleep(slow)
        # `hang` is a file with a rank in it: that rank hangs in its loss while the file exists.
        if hang and os.path.exists(hang) and open(hang).read().strip() == os.environ.get("RANK"):
            while os.path.exists(hang):
                time.sleep(0.05)
        if oom_above and len(x) > oom_above:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return ((model(x) - y) ** 2).sum(), float(len(x))

    return Task(
        model=lambda: nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1)),
        dataset=[(x, y) for x, y in zip(xs, ys, strict=True)],
        loss=loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=0.01),
    )
