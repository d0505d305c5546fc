"""Processes that have a device, in which the cases of these tests run.

The device's thread of autograd and `fork` do not go together, so a case runs in a process that was spawned. Importing
torch takes seconds, so one process runs all cases of a session. It uses the simulated device, or with
BATCHWRIGHT_DEVICE=real the accelerator that torch finds; then results are compared within a tolerance.
"""

from __future__ import annotations

import os
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from multiprocessing import get_context, set_start_method
from multiprocessing.connection import wait
from typing import Any

from batchwright.launch.ports import free_port

SIMULATED = os.environ.get("BATCHWRIGHT_DEVICE") != "real"
TIMEOUT = 120.0
_ports: list[int] = []


class CaseFailed(AssertionError):
    """A case failed in its process; the text is its traceback."""


class Hosts:
    """`ranks` processes; `hosts(function, *args)` gives the result of `function(*args)` of each."""

    def __init__(self, ranks: int) -> None:
        context = get_context("spawn")
        pipes = [context.Pipe() for _ in range(ranks)]
        self.pipes = [ours for ours, _ in pipes]
        self.processes = [context.Process(target=_serve, args=(r, ranks, pipes[r][1])) for r in range(ranks)]
        for process, (_, theirs) in zip(self.processes, pipes, strict=True):
            process.start()
            theirs.close()

    def __call__(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        ports = list({free_port() for _ in range(16)})  # more than the groups of a case
        for pipe in self.pipes:
            pipe.send((function, args, ports))
        waiting, answers = dict(enumerate(self.pipes)), dict[int, Any]()
        while waiting:
            ready = wait(list(waiting.values()), TIMEOUT)
            for rank, pipe in [(r, p) for r, p in waiting.items() if p in ready]:
                del waiting[rank]
                ok, answers[rank] = pipe.recv() if pipe.poll() else (False, "no answer")
                if not ok:
                    if len(self.pipes) > 1:  # the other ranks may wait for this one forever
                        self.end()
                    raise CaseFailed(f"rank {rank} failed:\n{answers[rank]}")
            if not ready:
                self.end()
                raise CaseFailed(f"ranks {sorted(waiting)} did not finish within {TIMEOUT:g} s")
        return [answers[rank] for rank in sorted(answers)]

    @property
    def alive(self) -> bool:
        return all(process.is_alive() for process in self.processes)

    def end(self) -> None:
        """End the processes."""
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join()


def _serve(rank: int, ranks: int, pipe: Any) -> None:
    if SIMULATED:
        warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")  # of our tasks, on any device
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    set_start_method("fork", force=True)  # for workers of a loader, as in a process that nothing spawned
    if SIMULATED:
        from tests.device.sim.patches import install

        install()
    while True:
        try:
            function, args, _ports[:] = pipe.recv()
        except EOFError:
            return
        if ranks > 1:
            names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
            os.environ.update(zip(names, (str(rank), str(rank), str(ranks), str(ranks)), strict=True))
            os.environ.update(MASTER_ADDR="127.0.0.1")
            fresh_port()
        try:
            reset()
            answer = function(*args)
            if dist.is_initialized():
                dist.destroy_process_group()
            pipe.send((True, answer))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
            if dist.is_initialized():
                os._exit(1)


def fresh_port() -> None:
    """Let the next group of a case meet elsewhere: a rank must not find the store of the group before."""
    if _ports:
        os.environ["MASTER_PORT"] = str(_ports.pop())


def reset() -> None:
    """The device as in a new process: no limit, no peak, no waits, a seeded generator."""
    import torch

    torch.manual_seed(0)
    if SIMULATED:
        from tests.device.sim.memory import device

        device.limit, device.peak, device.used_once = device.total, device.used, False
        device.waits.clear()
    else:
        torch.get_device_module(place()).set_per_process_memory_fraction(1.0, place())


def place() -> Any:
    """The device of the cases."""
    import torch

    return torch.device(torch.accelerator.current_accelerator().type, 0)


def waits() -> Counter[str]:
    """How often the host has waited for the simulated device, by line; counting starts again."""
    from tests.device.sim.memory import device

    found = Counter(device.waits)
    device.waits.clear()
    return found


def same(found: Any, expected: Any, exact: bool = True) -> bool:
    """Equal values, bit by bit on the simulated device: numbers and tensors in dicts, lists and tuples."""
    import torch

    exact = exact and SIMULATED
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(same(found[key], expected[key], exact) for key in expected)
    if isinstance(expected, (list, tuple)):
        return len(found) == len(expected) and all(same(*pair, exact) for pair in zip(found, expected, strict=True))
    if isinstance(expected, torch.Tensor):
        rtol = 1e-3 if expected.dtype not in (torch.bfloat16, torch.float16) else 2e-2
        found, expected = found.cpu().double(), expected.cpu().double()
        return torch.equal(found, expected) if exact else torch.allclose(found, expected, rtol=rtol, atol=1e-5)
    if isinstance(expected, float) and not exact:
        return abs(found - expected) <= 1e-5 + 1e-3 * abs(expected)
    return bool(found == expected)
