"""Functions for the ranks of the checkpoint tests: save with one strategy, load with another."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parent))  # the helpers beside this file, under any import mode

from loop_tasks import Net

from batchwright.runtime.loop.process import ThisProcess, wrapped
from batchwright.runtime.state import tensors
from batchwright.runtime.state.checkpoint import Checkpoints


def built(strategy: str, seed: int, steps: int) -> tuple[Any, Any, ThisProcess]:
    """A model and its optimizer after some steps with equal gradients on all ranks."""
    group = dist.new_group(backend="gloo") if dist.get_world_size() > 1 else None
    process = ThisProcess(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), group, False)
    torch.manual_seed(seed)
    model = wrapped(Net(0.0, 24), strategy, process)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (seed + 1))
    for _ in range(steps):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer, process


def state(model: Any, optimizer: Any) -> dict[str, Any]:
    """The whole state: unsharded tensors, and options."""
    parts, rest = tensors.split(model, (optimizer,))
    whole = {p: (t.full_tensor() if isinstance(t, DTensor) else t).detach().numpy().copy() for p, t in parts.items()}
    return {**whole, **rest}


def save_as(rank: int, directory: str, strategy: str, asynchronous: bool = False) -> dict[str, Any]:
    model, optimizer, process = built(strategy, 0, 3)
    checkpoints = Checkpoints(directory, group=process.control, asynchronous=asynchronous)
    before = state(model, optimizer)
    checkpoints.save(model, optimizer, step=3, position=24)
    with torch.no_grad():  # as training does after an asynchronous save has begun
        for p in model.parameters():
            p.add_(1.0)
    checkpoints.wait()
    return before


def load_as(rank: int, directory: str, strategy: str) -> dict[str, Any]:
    model, optimizer, process = built(strategy, 1, 0)
    checkpoints = Checkpoints(directory, group=process.control)
    saved = checkpoints.newest()
    assert saved is not None and saved.position == 24
    checkpoints.load(saved, model, optimizer)
    return state(model, optimizer)


def fail_on_one_rank(rank: int, directory: str) -> list[str]:
    """The disk of rank 1 is full: every rank raises the error, and no file is left."""
    import errno

    model, optimizer, process = built("ddp", 0, 1)
    checkpoints = Checkpoints(directory, group=process.control)
    checkpoints.save(model, optimizer, step=1, position=8)
    write = tensors._HashingStream.write

    def full(self: Any, data: Any) -> int:
        if rank == 1:
            self.fault = OSError(errno.ENOSPC, "No space left on device")
            raise self.fault
        return write(self, data)

    tensors._HashingStream.write = full
    try:
        checkpoints.save(model, optimizer, step=2, position=16)
    except Exception as error:
        dist.barrier()
        saved = checkpoints.newest()
        assert saved is not None
        return [type(error).__name__, str(error), saved.name, *sorted(p.name for p in Path(directory).iterdir())]
    return ["saved"]
