"""A task that stops itself, evaluates slowly, saves slowly or has a loss of NaN, as its arguments say."""

from __future__ import annotations

import os
import signal
import time

import torch
from torch import nn

from batchwright.runtime.task import Task


class Slow(nn.Linear):
    """Takes `seconds` to be saved."""

    seconds = 0.0

    def _save_to_state_dict(self, *args: object) -> None:
        time.sleep(self.seconds)
        super()._save_to_state_dict(*args)


def task(freeze: str = "", evaluation: float = 0.0, save: float = 0.0, nan: int = 0) -> Task:
    torch.manual_seed(7)
    xs = torch.randn(4096, 4)
    calls = iter(range(10**9))

    def build() -> nn.Module:
        model = Slow(4, 1)
        model.seconds = save
        return model

    def loss(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, float]:
        if not model.training:
            time.sleep(evaluation)
        elif next(calls) and freeze and not os.path.exists(freeze):  # the second step
            open(freeze, "w").close()
            os.kill(os.getpid(), signal.SIGSTOP)
        return (model(x) ** 2).sum() * (float("nan") if nan else 1.0), float(len(x))

    return Task(model=build, dataset=list(xs), loss=loss, optimizer=lambda params: torch.optim.SGD(params, lr=1e-3))
