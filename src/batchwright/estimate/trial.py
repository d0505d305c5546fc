"""One real run on this machine's CPU: the peak the kernel saw, beside which an estimate can be put."""

from __future__ import annotations

from pathlib import Path

from batchwright.core.errors import EnvironmentFault

from .records import Request

_STATUS = Path("/proc/self/status")


def memory_status() -> dict[str, int]:
    """The kernel's memory figures of this process, in bytes."""
    if not _STATUS.exists():
        raise EnvironmentFault("--calibrate reads /proc/self/status, and this system has none: it needs Linux.")
    lines = (line.split() for line in _STATUS.read_text().splitlines() if line.startswith("Vm"))
    return {words[0][:-1]: int(words[1]) * 1024 for words in lines}


def measure(request: Request) -> int:
    """Peak resident bytes of two steps at the request's one size, above what the process had after its imports."""
    import torch

    from batchwright.runtime.task import load_task

    from .batches import collated
    from .steps import checkpoint_blocks, run_steps

    torch.set_num_threads(1)  # every thread has scratch memory of its own
    args = dict(request.args)
    if request.sequence_lengths:
        args["sequence_length"] = request.sequence_lengths[0]
    before = memory_status()["VmRSS"]
    task = load_task(request.task, args)
    model = task.build_model(seed=0)
    if request.checkpoint_activations:
        checkpoint_blocks(model)
    optimizer = task.optimizer(model.parameters())
    batch = collated(task, request.micro_batch_sizes[0])
    run_steps(
        task, lambda b: task.loss_of(model, b), model, optimizer, batch,
        precision=request.precision, accumulation_steps=request.accumulation_steps,
    )  # fmt: skip
    return memory_status()["VmHWM"] - before
