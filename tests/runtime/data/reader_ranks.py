"""What runs in the ranks of the tests of reading hosts."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Iterable
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import default_collate

from batchwright.core.ramp.rules import Constant, Linear
from batchwright.core.ramp.schedule import Schedule
from batchwright.runtime.data.loader import Loader, Micro
from batchwright.runtime.data.order import GlobalOrder
from batchwright.runtime.data.readers import ReadingHosts
from batchwright.runtime.data.sampler import StepSampler
from batchwright.runtime.ranks import data_parallel


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
    """Draws random numbers, which must not depend on who has read the rows; and changes its rows, as many do."""
    drawn = random.random(), float(np.random.rand()), float(torch.rand(()))
    return {"texts": [item.pop("text") for item in items], "rows": default_collate(items), "drawn": drawn}


def digest(micros: Iterable[Micro]) -> str:
    """One hash of all that a rank trains on, in order."""
    made = hashlib.blake2b(digest_size=16)
    for m in micros:
        made.update(repr((m.step, m.index, m.count, m.positions, m.filler, m.ids.tolist())).encode())
        made.update(content(m.data))
    return made.hexdigest()


def content(data: Any) -> bytes:
    """All bytes of a micro batch: the text of a tensor has four digits."""
    if isinstance(data, torch.Tensor):
        return f"{data.dtype} {tuple(data.shape)}".encode() + data.numpy().tobytes()
    if isinstance(data, dict):
        return b"".join(key.encode() + content(data[key]) for key in data)
    if isinstance(data, (list, tuple)):
        return b"".join([str(len(data)).encode(), *map(content, data)])
    return repr(data).encode()


def sampler(rank: int, ranks: int, micro: int = 3, start: int = 0) -> StepSampler:
    return StepSampler(ramp(), micro, rank, ranks, start, allow_ragged=True)


def sequences(rank: int, ranks: int, cases: list[dict[str, Any]]) -> list[tuple[str, int]]:
    """The hash of this rank's sequence and the rows it read, for every case; the first one has no reading hosts."""
    torch.manual_seed(rank)
    before = torch.get_rng_state()
    found = []
    for case in cases:
        options = {"dataset": Noisy(), "collate": drawing_collate, "ranks_per_host": 1, **case}
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


def slow_trainer(rank: int, ranks: int, readers: int, counted: str) -> tuple[int, int]:
    """How many rows were read while no rank trains, and after all have trained."""
    hosts = ReadingHosts(readers, rank=rank, ranks=ranks, ranks_per_host=1)
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


class Opened(Batched):
    """Writes down the ranks that ask for its length or a row; its length can be another one on rank 1, or fail there."""

    def __init__(self, path: str, second: int | None = 50) -> None:
        super().__init__()
        self.path, self.second, self.rank = path, second, dist.get_rank()

    def _note(self, what: str) -> None:
        with open(self.path, "a") as file:
            file.write(f"{what} on {self.rank}\n")

    def __getitem__(self, i: int) -> torch.Tensor:
        self._note("row")
        return super().__getitem__(i)

    def __len__(self) -> int:
        self._note("length")
        if dist.get_rank() == 1 and self.second is None:
            raise OSError("no such bucket")
        return 50 if dist.get_rank() == 0 else self.second or 0


def opened(rank: int, ranks: int, path: str) -> int:
    """A loader of which rank 0 reads; how many rows this rank got."""
    hosts = ReadingHosts(1, rank=rank, ranks=ranks, ranks_per_host=1)
    dataset = Opened(path)
    order = GlobalOrder(hosts.length(dataset), seed=11)
    return sum(len(micro.ids) for micro in Loader(dataset, order, sampler(rank, ranks), loading_hosts=hosts))


class Hanging(Batched):
    """Its length is never known on rank 1."""

    def __len__(self) -> int:
        if dist.get_rank() == 1:
            time.sleep(3600)
        return 50


def hanging_length(rank: int, ranks: int) -> str:
    """What the other ranks say of a reader that does not open its dataset; that one ends with the process."""
    hosts = ReadingHosts(2, rank=rank, ranks=ranks, ranks_per_host=1, open_timeout=1.0)
    if rank == 1:
        threading.Thread(target=hosts.length, args=(Hanging(),), daemon=True).start()
        return ""
    try:
        return str(hosts.length(Hanging()))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def lengths(rank: int, ranks: int, path: str, second: int | None) -> str:
    try:
        return str(ReadingHosts(2, rank=rank, ranks=ranks, ranks_per_host=1).length(Opened(path, second)))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def asked_of_the_first(rank: int, ranks: int, error: Exception) -> tuple[str, str, str | None, str]:
    """The error of a question to the reader, rank 1, as every rank gets it: its class, text, field and notes."""

    def question() -> None:
        raise error

    try:
        ReadingHosts([1], rank=rank, ranks=ranks, ranks_per_host=1).from_first("reading samples", question)
    except Exception as found:
        return type(found).__name__, str(found), getattr(found, "field", None), "".join(getattr(found, "__notes__", []))
    return "", "", None, ""


def hosts_by_name(rank: int, ranks: int, names: list[str]) -> tuple[tuple[int, ...], tuple[int, ...], str]:
    """The hosts of ranks whose machines have these names."""
    socket.gethostname = lambda: names[rank]
    found = ReadingHosts(2, rank=rank, ranks=ranks)
    return found.hosts.of_rank, found.readers, found.named(ranks - 1)


def mesh_sequences(rank: int, ranks: int) -> tuple[int, str, str, int]:
    """Two data-parallel ranks of two tensor-parallel processes each, which use the groups of the mesh while rows travel."""
    mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("dp", "tp"))
    at, size = data_parallel(mesh, "dp")
    order = GlobalOrder(50, seed=11)
    plain = digest(Loader(Noisy(), order, sampler(at, size)))
    hosts = ReadingHosts(1, rank=at, ranks=size, group=mesh.get_group("dp"))
    loader = Loader(Noisy(), order, sampler(at, size), loading_hosts=hosts)
    seen = []
    for micro in loader:
        seen.append(micro)
        for name in ("dp", "tp"):
            dist.all_reduce(torch.ones(1000), group=mesh.get_group(name))
    return at, plain, digest(seen), loader.rows_read


class Ends(Source):
    """A row that ends the process that reads it."""

    def __getitem__(self, i: int) -> torch.Tensor:
        if i == self.bad:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.tensor([i])


class Strange(Batched):
    """A row whose error is no valid text, or one that cannot be unpickled where it is trained on."""

    def __init__(self, pickled: bool) -> None:
        super().__init__()
        self.pickled = pickled

    def __getitem__(self, i: int) -> Any:
        if i != 7:
            return torch.tensor([i])
        if self.pickled:
            return Unpicklable()
        raise ValueError("a file called \udcff")


class Unpicklable:
    def __reduce__(self) -> Any:
        return int, ("no number",)


def hanging_parse(line: bytes) -> Any:
    if line == b"7":
        time.sleep(3600)
    return int(line)


def failing(rank: int, ranks: int, dataset: Any, options: dict[str, Any], of_rank: dict[int, dict[str, Any]]) -> str:
    """The error that a rank gets."""
    options = {"loading_hosts": 1, "ranks_per_host": 1, **options, **of_rank.get(rank, {})}
    order = GlobalOrder(50, options.pop("seed", 11), options.pop("shuffle", True))
    steps = StepSampler(options.pop("schedule", ramp()), 3, rank, ranks, options.pop("start", 0), allow_ragged=True)
    try:
        loader = Loader(dataset, order, steps, **options)
        digest(loader)
    except Exception as error:
        return f"{type(error).__name__}: {error} {' '.join(getattr(error, '__notes__', []))}"
    return "no error"


def crossed(rank: int, ranks: int) -> str:
    """The error of ranks that iterate over two loaders with the same hosts in another order."""
    hosts, order = ReadingHosts(1, rank=rank, ranks=ranks, ranks_per_host=1), GlobalOrder(50, 11)
    steps = [StepSampler(ramp(), 3, rank, ranks, start, allow_ragged=True) for start in (0, 4)]
    loaders = [Loader(Batched(), order, one, loading_hosts=hosts) for one in steps]
    try:
        digest(loaders[rank])
    except Exception as error:
        return str(error)
    return "no error"


class Held(Source):
    """A row that is not there until a file is."""

    def __init__(self, bad: int, path: str) -> None:
        super().__init__(bad=-1)
        self.held, self.path = bad, path

    def __getitem__(self, i: int) -> torch.Tensor:
        while i == self.held and not os.path.exists(self.path):
            time.sleep(0.05)
        return torch.tensor([i])


def waiting(rank: int, ranks: int, path: str) -> str:
    """The error of rank 1, whose rows do not come until it has said so."""
    found = failing(rank, ranks, Held(7, path), {}, {0: {"read_timeout": 600.0}, 1: {"read_timeout": 1.0}})
    if rank == 1:
        open(path, "w").close()
    return found


def killed(rank: int, store: str, victim: int, to: Any) -> None:
    """One of two ranks kills itself in mid-iteration; the other sends its error, which has to come by itself."""
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    multiprocessing.set_start_method("fork", force=True)
    steps = StepSampler(Constant(4).compile(), 2, rank, 2)
    options: dict[str, Any] = {"loading_hosts": 1, "ranks_per_host": 1, "read_timeout": 600}
    try:
        for number, _ in enumerate(Loader(Source(bad=-1), GlobalOrder(50), steps, **options)):
            if rank == victim and number == 3:
                os.kill(os.getpid(), signal.SIGKILL)
    except Exception as error:
        to.send(str(error))
    os._exit(0)
