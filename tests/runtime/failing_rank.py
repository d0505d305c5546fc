"""A task whose second rank raises while the first waits for it, with a group that cannot be destroyed, as NCCL's then."""

from __future__ import annotations

import threading

import torch
import torch.distributed as dist
from loop_tasks import task as plain

from batchwright.runtime.task import Task


def task() -> Task:
    dist.destroy_process_group = lambda group=None: threading.Event().wait()
    made = plain()
    return Task(model=made.model, dataset=made.dataset, loss=loss, optimizer=made.optimizer)


def loss(model: torch.nn.Module, batch: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    if dist.get_rank() == 1:
        raise ArithmeticError("rank 1 cannot go on")
    return model(batch[0]).sum(), batch[2].sum()
