"""What runs in the ranks of the tests of reading hosts."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Iterable
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import default_collate

from batchwright.core.ramp.rules import Constant, Linear
from batchwright.core.ramp.schedule import Schedule
from batchwright.runtime.data.loader import Loader, Micro
from batchwright.runtime.data.order import GlobalOrder
from batchwright.runtime.data.readers import ReadingHosts
from batchwright.runtime.data.sampler import StepSampler


class Noisy:
    """A sample is its id and one random number of each generator, like an augmentation; and a text of its own length."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, i: int) -> dict[str, Any]:
        noise = torch.tensor([random.random(), float(np.random.rand()), float(torch.rand(()))], dtype=torch.float64)
        return {"id": i, "noise": noise, "text": "x" * (i % 3)}


class Batched:
    """Rows that draw nothing; counts its batched reads in a file, since workers read."""

    def __init__(self, counted: str | None = None) -> None:
        self.counted = counted

    def __len__(self) -> int:
        return 50

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.full((3,), i)

    def __getitems__(self, ids: list[int]) -> list[torch.Tensor]:
        if self.counted:
            with open(self.counted, "a") as file:
                file.write(f"{len(ids)}\n")
        return [self[i] for i in ids]


class Source:
    """Rows of a file that fail: `error` is raised for one id, `times` times in each process; 0: always; `hang`: it hangs."""

    def __init__(self, bad: int, times: int = 0, hang: bool = False) -> None:
        self.bad, self.times, self.hang, self.failed = bad, times, hang, 0

    def __len__(self) -> int:
        return 50

    def describe(self, i: int) -> str:
        return f"row {i} of data.bin"

    def __getitem__(self, i: int) -> torch.Tensor:
        if i == self.bad and self.hang:
            time.sleep(3600)
        if i == self.bad and (not self.times or self.failed < self.times):
            self.failed += 1
            raise ConnectionResetError("the server has closed the connection")
        return torch.tensor([i])


def ramp() -> Schedule:
    """4, 8, 12 samples per step, through 2.4 epochs of 50 samples, the last step shortened."""
    return Linear(start=4, increment=4, samples=40, target=12).compile().until(121)


def drawing_collate(items: list[Any]) -> dict[str, Any]:
    """Draws random numbers, which must not depend on who has read the rows."""
    return {"rows": default_collate(items), "drawn": (random.random(), float(np.random.rand()), float(torch.rand(())))}


def digest(micros: Iterable[Micro]) -> str:
    """One hash of all that a rank trains on, in order."""
    made = hashlib.blake2b(digest_size=16)
    for m in micros:
        made.update(repr((m.step, m.index, m.count, m.positions, m.filler, m.ids.tolist(), m.data)).encode())
    return made.hexdigest()


def sampler(rank: int, ranks: int, micro: int = 3, start: int = 0) -> StepSampler:
    return StepSampler(ramp(), micro, rank, ranks, start, allow_ragged=True)


def sequences(rank: int, ranks: int, cases: list[dict[str, Any]]) -> list[tuple[str, int]]:
    """The hash of this rank's sequence and the rows it read, for every case; the first one has no reading hosts."""
    torch.manual_seed(rank)
    before = torch.get_rng_state()
    found = []
    for case in cases:
        options = {"dataset": Noisy(), "collate": drawing_collate, **case}
        dataset = options.pop("dataset")
        loader = Loader(dataset, GlobalOrder(50, seed=11), sampler(rank, ranks), **options)
        found.append((digest(loader), loader.rows_read))
        assert torch.equal(torch.get_rng_state(), before)  # the model's generators are untouched
    return found


def abandoned(rank: int, ranks: int) -> list[tuple[str, int]]:
    """Iterations of one loader that stop early, and then a whole one."""
    hosts = ReadingHosts(1, rank=rank, ranks=ranks)
    loader = Loader(Noisy(), GlobalOrder(50, seed=11), sampler(rank, ranks), loading_hosts=hosts)
    found = []
    for steps in (1, 7, None):
        before = loader.rows_read
        found.append((digest(islice(loader, steps)), loader.rows_read - before))
        dist.barrier()
    return found


def slow_trainer(rank: int, ranks: int, counted: str) -> tuple[int, int]:
    """How many rows were read while no rank trains, and after all have trained."""
    hosts = ReadingHosts([0], rank=rank, ranks=ranks)
    loader = Loader(Batched(counted), GlobalOrder(50, seed=11), sampler(rank, ranks), loading_hosts=hosts)
    iterator = iter(loader)
    next(iterator)

    def read() -> int:
        with open(counted) as file:
            return sum(map(int, file))

    early, same = read(), 0
    while same < 20:  # until nothing is read any more
        time.sleep(0.05)
        early, same = (read(), 0) if read() != early else (early, same + 1)
    dist.barrier()
    for _ in iterator:
        pass
    dist.barrier()
    return early, read()


def failing(rank: int, ranks: int, dataset: Any, options: dict[str, Any]) -> str:
    """The error that a rank gets."""
    loader = Loader(dataset, GlobalOrder(50, seed=11), sampler(rank, ranks), loading_hosts=1, **options)
    try:
        digest(loader)
    except Exception as error:
        return f"{type(error).__name__}: {error} {' '.join(getattr(error, '__notes__', []))}"
    return "no error"


def killed(rank: int, store: str, victim: int, to: Any) -> None:
    """One of two ranks kills itself in mid-iteration; the other sends its error, which has to come by itself."""
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    multiprocessing.set_start_method("fork", force=True)
    steps = StepSampler(Constant(4).compile(), 2, rank, 2)
    try:
        for number, _ in enumerate(Loader(Source(bad=-1), GlobalOrder(50), steps, loading_hosts=1, read_timeout=600)):
            if rank == victim and number == 3:
                os.kill(os.getpid(), signal.SIGKILL)
    except Exception as error:
        to.send(str(error))
    os._exit(0)
