"""Hosts that read for others: connections and rows per second at a storage with a limit, and what sending rows costs.

    python benchmarks/bench_readers.py [--rounds 5] [--steps 6]

Four ranks on this machine, each as a host of its own, read 64 rows of 64 KiB per step. The storage is an HTTP server in a
process of its own that answers after 20 ms and refuses connections above a limit; a refused request is repeated after 20 ms.
All contenders run in turn, round after round, in the same processes; numbers are medians over rounds, ratios medians of the
rounds' quotients with the smallest and largest. The last table is for local rows in memory and a training step that keeps an
accelerator, not the CPU, busy for 50 ms: a sleep.
"""

from __future__ import annotations

import argparse
import gc
import os
import resource
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice
from multiprocessing import get_context, set_start_method
from statistics import median
from typing import Any, ClassVar
from urllib.error import HTTPError
from urllib.request import urlopen

RANKS, BATCH, ROW = 4, 64, 64 * 1024
LATENCY, LIMIT = 0.020, 2
STEP = 0.050


class Storage(BaseHTTPRequestHandler):
    """GET /1,2,3 gives three rows. At most `limit` requests at a time; GET /limit/N sets it, and returns the counts."""

    lock = threading.Lock()
    limit, now = 10**6, 0
    counts: ClassVar[dict[str, int]] = {"peak": 0, "served": 0, "refused": 0, "rows": 0}

    def do_GET(self) -> None:
        kind, path = type(self), self.path[1:]
        if path.startswith("limit/"):
            text = " ".join(str(number) for number in kind.counts.values()).encode()
            quiet = 0
            while quiet < 10:  # workers of the contender before may still read ahead
                time.sleep(0.02)
                quiet = 0 if kind.now else quiet + 1
            kind.limit, kind.counts = int(path[6:]), dict.fromkeys(kind.counts, 0)
            self._answer(text)
            return
        with kind.lock:
            refused = kind.now >= kind.limit
            kind.counts["refused" if refused else "served"] += 1
            kind.counts["rows"] += 0 if refused else path.count(",") + 1
            kind.now += not refused
            kind.counts["peak"] = max(kind.counts["peak"], kind.now)
        if refused:
            self.send_error(503)
            return
        time.sleep(LATENCY)
        self._answer(bytes(ROW) * len(path.split(",")))
        with kind.lock:
            kind.now -= 1

    def _answer(self, data: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


def serve(port: Any) -> None:
    ThreadingHTTPServer.request_queue_size = 128
    server = ThreadingHTTPServer(("127.0.0.1", 0), Storage)
    port.send(server.server_port)
    server.serve_forever()


class Remote:
    """Rows of the storage."""

    def __init__(self, port: int, batched: bool) -> None:
        self.port = port
        if batched:
            self.__getitems__ = self.rows

    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, i: int) -> Any:
        return self.rows([i])[0]

    def rows(self, ids: list[int]) -> list[Any]:
        import torch

        while True:
            try:
                with urlopen(f"http://127.0.0.1:{self.port}/{','.join(map(str, ids))}", timeout=60) as answer:
                    data = bytearray(answer.read())
                break
            except HTTPError:
                time.sleep(LATENCY)
        return [torch.frombuffer(data, dtype=torch.uint8, count=ROW, offset=i * ROW) for i in range(len(ids))]


class Local:
    """Rows in memory."""

    def __init__(self) -> None:
        import torch

        self.data = torch.zeros(1024, ROW, dtype=torch.uint8)

    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, i: int) -> Any:
        return self.data[i % 1024]


def ours(dataset: Any, rank: int, hosts: Any, workers: int = 1) -> Iterator[Any]:
    """This rank's part of each step, by batchwright; `hosts`: those that read, None for all ranks."""
    from batchwright.core.ramp.rules import Constant
    from batchwright.runtime import GlobalOrder, Loader, StepSampler

    sampler = StepSampler(Constant(BATCH).compile(), BATCH // RANKS, rank, RANKS)
    for micro in Loader(dataset, GlobalOrder(len(dataset), seed=1), sampler, num_workers=workers, loading_hosts=hosts):
        yield micro.data


def shards(dataset: Any, rank: int) -> Iterator[Any]:
    """Every rank has a shard of its own, in torch's DataLoader."""
    from torch.utils.data import DataLoader, Subset

    part = len(dataset) // RANKS
    own = Subset(dataset, range(rank * part, (rank + 1) * part))
    yield from DataLoader(own, batch_size=BATCH // RANKS, shuffle=False, num_workers=1)


def dispatched(dataset: Any, rank: int) -> Iterator[Any]:
    """Accelerate's dispatch_batches: rank 0 reads the batches of all ranks and broadcasts them."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration
    from torch.utils.data import DataLoader

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
        yield from accelerator.prepare(DataLoader(dataset, batch_size=BATCH // RANKS, num_workers=1))


def cpu() -> float:
    """CPU seconds of this process and its ended children."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def rank_main(rank: int, port: int, rendezvous: int, rounds: int, steps: int, to: Any) -> None:
    """One rank: all contenders in turn. Rank 0 sends the results."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(rendezvous), "ACCELERATE_USE_CPU": "true"}
    import torch
    import torch.distributed as dist

    from batchwright.runtime.data.readers import ReadingHosts

    set_start_method("fork", force=True)  # of the loaders' workers
    dist.init_process_group("gloo")
    one, two = (ReadingHosts(n, rank=rank, ranks=RANKS, ranks_per_host=1) for n in (1, 2))
    plain, batched, local = Remote(port, False), Remote(port, True), Local()
    Make = Callable[[], Iterable[Any]]
    remote: dict[str, tuple[Make, int]] = {}
    for label, limit in (("no limit", 10**6), (f"at most {LIMIT} connections", LIMIT)):
        remote |= {
            f"{label} | every rank its own shard, a request per row": (lambda: shards(plain, rank), limit),
            f"{label} | every rank its own shard, a request per micro batch": (lambda: shards(batched, rank), limit),
            f"{label} | every rank reads": (lambda: ours(batched, rank, None), limit),
            f"{label} | 2 of 4 hosts read": (lambda: ours(batched, rank, two), limit),
            # As many rows per request as where every rank reads, so that the difference is who reads.
            f"{label} | 2 of 4 hosts read, 2 workers each": (lambda: ours(batched, rank, two, 2), limit),
            f"{label} | 1 of 4 hosts reads": (lambda: ours(batched, rank, one), limit),
            f"{label} | Accelerate's dispatch_batches": (lambda: dispatched(batched, rank), limit),
        }
    near: dict[str, Make] = {
        "every rank its own shard, torch's DataLoader": lambda: shards(local, rank),
        "every rank reads": lambda: ours(local, rank, None),
        "1 of 4 hosts reads": lambda: ours(local, rank, one),
        "2 of 4 hosts read": lambda: ours(local, rank, two),
        "Accelerate's dispatch_batches": lambda: dispatched(local, rank),
    }
    found: dict[str, list[Any]] = {}

    def timed(make: Make, count: int, pause: float) -> tuple[float, float]:
        """Seconds per step after the first, which starts workers; and CPU seconds of all ranks per step, that included."""
        torch.set_num_threads(1)  # Accelerate sets another number
        before = torch.tensor(cpu())
        batches = iter(make())
        next(batches)
        dist.barrier()
        begun = time.perf_counter()
        for _ in islice(batches, count):
            time.sleep(pause)
            dist.barrier()  # as a gradient's all-reduce
        seconds = (time.perf_counter() - begun) / count
        getattr(batches, "close", lambda: None)()
        del batches
        gc.collect()
        dist.barrier()
        used = torch.tensor(cpu()) - before
        dist.all_reduce(used)
        return seconds, float(used) / count

    for _ in range(rounds):
        for name, (make, limit) in remote.items():
            if rank == 0:
                urlopen(f"http://127.0.0.1:{port}/limit/{limit}").read()
            dist.barrier()
            seconds, _ = timed(make, steps, 0.0)
            if rank == 0:
                counts = urlopen(f"http://127.0.0.1:{port}/limit/{limit}").read().split()
                found.setdefault(name, []).append((BATCH / seconds, *map(int, counts)))
            dist.barrier()
    for _ in range(rounds):
        for name, make in near.items():
            result = timed(make, 5 * steps, STEP)
            if rank == 0:
                found.setdefault(f"local | {name}", []).append(result)
    block, rates = torch.zeros(4 << 20, dtype=torch.uint8), []
    for _ in range(20):
        dist.barrier()
        begun = time.perf_counter()
        if rank < 2:
            (dist.send if rank == 0 else dist.recv)(block, 1 - rank, group=one.group)
        rates.append(block.nbytes / (time.perf_counter() - begun))
    if rank == 0:
        to.send((found, (*packing(), median(rates))))
    dist.barrier()
    os._exit(0)


def packing() -> tuple[float, float]:
    """Microseconds to pack and to unpack a row."""
    import torch

    from batchwright.runtime.data.rows import pack, unpack

    rows = [torch.zeros(4096, dtype=torch.int32) for _ in range(256)]
    block, times = pack(rows), ([], [])
    for _ in range(20):
        begun = time.perf_counter()
        pack(rows)
        middle = time.perf_counter()
        unpack(block)
        times[0].append(middle - begun)
        times[1].append(time.perf_counter() - middle)
    return median(times[0]) / 256 * 1e6, median(times[1]) / 256 * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6)
    given = parser.parse_args()
    context = get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    server = context.Process(target=serve, args=(sender,), daemon=True)
    server.start()
    port = receiver.recv()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        rendezvous = free.getsockname()[1]
    ranks = [
        context.Process(target=rank_main, args=(r, port, rendezvous, given.rounds, given.steps, sender))
        for r in range(RANKS)
    ]
    for rank in ranks:
        rank.start()
    found, (packed, unpacked, sent) = receiver.recv()
    for rank in ranks:
        rank.join()
    server.kill()
    print(
        "| storage | who reads | rows/s | ratio to every rank reads | rows per request | connections at once | requests per step "
        "| refused per step |\n|---|---|---|---|---|---|---|---|"
    )
    for name, rounds in found.items():
        if name.startswith("local"):
            continue
        rate, peak, served, refused, rows = (median(column) for column in zip(*rounds, strict=True))
        base = found[f"{name.partition(' | ')[0]} | every rank reads"]
        ratios = sorted(one[0] / other[0] for one, other in zip(rounds, base, strict=True))
        print(
            f"| {name} | {rate:,.0f} | {median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}) | {rows / served:.0f} "
            f"| {peak:.0f} | {served / (given.steps + 1):.1f} | {refused / (given.steps + 1):.1f} |"
        )
    print(
        f"\n| local rows, a step of {1e3 * STEP:.0f} ms | ms per step | ratio to torch | CPU ms per step, all ranks |"
    )
    print("|---|---|---|---|")
    base = [seconds for seconds, _ in found["local | every rank its own shard, torch's DataLoader"]]
    for name, rounds in found.items():
        if name.startswith("local"):
            ratios = sorted(seconds / other for (seconds, _), other in zip(rounds, base, strict=True))
            ratio = f"{median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})"
            seconds, used = (median(column) for column in zip(*rounds, strict=True))
            print(f"| {name[8:]} | {1e3 * seconds:.1f} | {ratio} | {1e3 * used:.1f} |")
    print(
        f"\nPacking a row of 16 KiB takes {packed:.1f} µs, unpacking it {unpacked:.1f} µs; 4 MiB go to another rank at "
        f"{sent / 1e9:.1f} GB/s."
    )


if __name__ == "__main__":
    main()
