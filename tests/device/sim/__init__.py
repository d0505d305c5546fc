"""A simulated accelerator, `sim`: its tensors hold CPU data, and it is as strict as CUDA is.

- Tensors of two devices in one operation raise an error; numbers (tensors without dimensions) and copies may mix.
- Autograd runs its backward pass in a thread of the device, as on every accelerator.
- Memory has a budget (`torch.OutOfMemoryError`), a limit per process and peaks.
- It has a generator of its own, pinned memory, and a backend of collectives (`simccl`) that takes its tensors only.
- Each wait of the host for the device is counted with the line of batchwright that caused it. What a copy to the host
  that does not wait has not yet delivered is NaN, or the largest number, until the host waits.

Not simulated: a second device in one process, streams that run at the same time, the speed.

It uses torch's Python backend (PrivateUse1), which is private and experimental, and was written for torch 2.13.

    memory.py        the budget, the peaks, the counted waits, what is not delivered yet
    tensor.py        the tensor, its operations, copies between devices
    module.py        `torch.sim`, the module of the device, as strict as `torch.cuda`
    collectives.py   `simccl`
    patches.py       places in torch that know only backends written in C++
"""

from __future__ import annotations

NAME = "sim"
