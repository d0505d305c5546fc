"""The simulated device itself: it must be as strict as a real one, or the other tests here show nothing."""

from __future__ import annotations

import gc
import math
import threading

import pytest

pytest.importorskip("torch")

import torch

from tests.device.host import SIMULATED, place, waits

pytestmark = pytest.mark.skipif(not SIMULATED, reason="these are about the simulated device")
MIB = 2**20


def mixed() -> list[str]:
    here, there = torch.ones(2), torch.ones(2, device=place())
    refused = {
        "add": lambda: there + here,
        "matmul": lambda: there @ here,
        "in place on the CPU": lambda: here.add_(there.sum()),
        "stack": lambda: torch.stack([there.sum(), here.sum()]),
        "cat": lambda: torch.cat([there, here]),
        "foreach": lambda: torch._foreach_add_([there], [here]),
        "where": lambda: torch.where(there > 0, here, there),
        "numpy": lambda: there.numpy(),
        "pin": lambda: there.pin_memory(),
        "CPU generator": lambda: torch.rand(2, device=place(), generator=torch.Generator()),
    }
    passed = []
    for name, operation in refused.items():
        try:
            operation()
            passed.append(name)
        except (RuntimeError, TypeError):
            pass
    allowed = [there + here.sum(), there * 2, there[torch.tensor([0])], there.copy_(here), here.copy_(there)]
    assert [t.tolist() for t in allowed] == [[3.0, 3.0], [2.0, 2.0], [1.0], [1.0, 1.0], [1.0, 1.0]]
    return passed


def test_two_devices_in_one_operation_are_refused(on_device):
    assert on_device(mixed) == []


def budget() -> tuple[str, int, int]:
    module = torch.get_device_module(place())
    module.set_per_process_memory_fraction(16 * MIB / module.mem_get_info()[1], place())
    kept = torch.empty(10 * MIB, dtype=torch.uint8, device=place())
    view = kept[:5]  # of the same memory
    try:
        torch.empty(7 * MIB, dtype=torch.uint8, device=place())
        said = "nothing"
    except torch.OutOfMemoryError as error:
        said = str(error)
    del kept
    held = module.memory_allocated()
    del view
    return said, held, module.memory_allocated()


def test_memory_has_a_budget_and_is_given_back(on_device):
    said, held, after = on_device(budget)
    assert said.startswith("CUDA out of memory. Tried to allocate 7.00 MiB") and held - after == 10 * MIB


def counted() -> list[int]:
    x = torch.ones(3, device=place())
    cases = {
        "kernels": lambda: (x + 1).sum().mul_(2),
        "item": lambda: x.sum().item(),
        "tolist": lambda: x.tolist(),
        "if": lambda: bool(x.sum() > 0),
        "cpu": lambda: x.cpu(),
        "to the device": lambda: torch.tensor([1.0], device=place()),
        "pinned": lambda: torch.ones(3).pin_memory().to(place(), non_blocking=True),
        "pageable": lambda: torch.ones(3).copy_(x, non_blocking=True),
        "later": lambda: x.to("cpu", non_blocking=True),
        "synchronize": lambda: torch.accelerator.synchronize(),
    }
    found = []
    for case in cases.values():
        waits()
        case()
        found.append(sum(waits().values()))
    return found


def test_each_wait_of_the_host_is_counted(on_device):
    assert on_device(counted) == [0, 1, 1, 1, 1, 1, 0, 1, 0, 1]


def late() -> list[list[float]]:
    x = torch.ones(1, device=place())
    copy = x.to("cpu", non_blocking=True)
    x += 1  # in the order of the device's work: after the copy
    before = copy.tolist()
    torch.accelerator.synchronize()
    return [before, copy.tolist()]


def test_a_copy_that_does_not_wait_has_not_arrived(on_device):
    before, after = on_device(late)
    assert math.isnan(before[0]) and after == [1.0]


class Mixed(torch.autograd.Function):
    """Adds a tensor of the CPU to the gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient + torch.ones(2)


def errors_in_backward() -> list[str]:
    module, said = torch.get_device_module(place()), []
    gc.collect()  # what earlier tests left would be freed in between, and leave room
    x = torch.ones(MIB, device=place(), requires_grad=True)
    limit = module.memory_allocated() + 12 * MIB  # two results of the forward pass, and then no more
    for limited in (True, False):
        module.set_per_process_memory_fraction(limit / module.mem_get_info()[1] if limited else 1.0, place())
        try:
            loss = (
                torch.sin(x * 2).sum()
                if limited
                else Mixed.apply(torch.ones(2, device=place(), requires_grad=True)).sum()
            )
            loss.backward()
        except (torch.OutOfMemoryError, RuntimeError) as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def test_errors_of_the_backward_pass_are_raised(on_device):
    memory, mixed = on_device(errors_in_backward)
    assert memory.startswith("OutOfMemoryError") and mixed.startswith("RuntimeError: Expected all tensors")


def generator() -> bool:
    torch.manual_seed(3)
    torch.rand(100)  # the CPU's own
    first = torch.rand(4, device=place()).tolist()
    torch.manual_seed(3)
    return (
        first
        == torch.rand(4, device=place()).tolist()
        == torch.rand(4, generator=torch.Generator().manual_seed(3)).tolist()
    )


def test_the_device_has_a_generator_of_its_own(on_device):
    assert on_device(generator)


def thread() -> bool:
    seen = []
    x = torch.ones(1, device=place(), requires_grad=True)
    y = x * 2
    y.register_hook(lambda gradient: seen.append(threading.get_ident()))
    y.sum().backward()
    return seen != [threading.get_ident()]


def test_backward_runs_in_another_thread(on_device):
    assert on_device(thread)
