"""A task whose rank 1 raises while rank 0 waits for it. As with NCCL, destroying the group then never returns."""

from __future__ import annotations

import atexit
import threading

import torch
import torch.distributed as dist

from batchwright.runtime.task import Task


def task() -> Task:
    from loop_tasks import task as plain  # beside this file

    def wait(group: object = None) -> None:
        threading.Event().wait()

    dist.destroy_process_group = wait
    atexit.register(wait)
    made = plain()
    return Task(model=made.model, dataset=made.dataset, loss=loss, optimizer=made.optimizer)


def loss(model: torch.nn.Module, batch: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    if dist.get_rank() == 1:
        raise ArithmeticError("rank 1 fails")
    return model(batch[0]).sum(), batch[2].sum()
