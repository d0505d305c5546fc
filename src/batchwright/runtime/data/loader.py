"""The loader: one torch DataLoader for all stages of a run, which reads along the global order.

Its workers get positions, one micro batch at a time. If the batch grows, a step has more micro batches, and no worker
restarts. Prefetched batches are not trained yet, so the loader has no state to save.
"""

from __future__ import annotations

import atexit
import signal
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from time import perf_counter
from typing import Any, cast
from weakref import ref

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data import default_collate as _untyped_collate  # pyright: ignore[reportUnknownVariableType]
from torch.utils.data._utils import signal_handling

from batchwright.core.batch.loading import share
from batchwright.core.errors import PlanError
from batchwright.runtime.device import Pinnable, pinned
from batchwright.runtime.ranks import discover
from batchwright.runtime.state import generators

from .hosts import LoadingHosts, load_batches
from .order import LARGEST_POSITION, GlobalOrder, Ints
from .readers import Exchange, ReadingHosts, Request
from .reading import MapDataset, Reader
from .rows import pack
from .sampler import Slice, StepSampler

# Arguments of torch's DataLoader that the global order replaces.
_REPLACED = ("batch_sampler", "batch_size", "collate_fn", "drop_last", "in_order", "sampler", "shuffle")
# The order takes 150 µs for one id and 230 µs for this many (measured), so small steps are computed together.
_AHEAD = 4096
# Ids of one share that are computed together, at most: 8 MiB.
_MOST_AHEAD = 1 << 20
# Rows of one request of a reading host, at most.
_MOST_ROWS = 256
READ_TIMEOUT = 300.0
"""Seconds without rows from a reading host, after which it counts as hanging."""
READ_RETRIES = 3

default_collate = cast("Callable[[list[Any]], Any]", _untyped_collate)


@dataclass(frozen=True, kw_only=True)
class Micro(Slice):
    """One micro batch of one step on this rank: a `Slice` with its dataset ids and its collated data."""

    ids: Ints = field(compare=False)
    """Dataset ids of the rows, in the order of `positions`."""
    data: Any = field(compare=False, repr=False)
    """What `collate` returned for the samples."""


class Loader:
    """Yields this rank's micro batches, as `Micro`, for every step of the sampler's schedule.

        for part in sampler:                                       # in `num_workers` processes, ahead of time
            ids = order.ids(part.positions)
            yield Micro(…, data=collate([dataset[i] for i in ids]))

        order = GlobalOrder(len(dataset), seed=1)
        sampler = StepSampler(schedule, micro_batch_size=8, rank=rank, ranks=ranks, start=position)
        for micro in Loader(dataset, order, sampler, num_workers=4): ...

    The generators that `dataset[i]` uses (Python's `random`, numpy's global one, torch's CPU one) are seeded by (seed,
    position): an augmentation is the same at any micro batch size, rank and worker count, and changes every epoch.
    Afterwards the process's own generators are restored. What `collate` draws is seeded by (seed, position of the micro
    batch's last sample), and what the model draws (dropout) continues in its process: both depend on the split.

    The dataset is map-style. If it has `__getitems__` (a batched read), that is called with all ids of a micro batch, as long
    as it draws nothing from the three generators: a batched read cannot be seeded per sample. One that has drawn is thrown
    away, and from then on `dataset[i]` is called for each i. For packed sequences, i counts packed samples: pack first, then
    index. `collate` defaults to torch's `default_collate`. With `pin_memory=True`, copies to a GPU need not wait; tensors
    that are there already stay there. A read that raises OSError, EOFError or HTTPException, which storage does when it is
    busy, is tried again up to `read_retries` times, unless the file is not there. Other options are passed to torch's
    DataLoader.

    With `loading_hosts` only some hosts read, and send the other ranks their rows: a count, an expansion factor (a
    `Fraction`), a list of hosts, or `ReadingHosts`. Every rank gets the same micro batches as without it. All ranks make the
    loader and iterate over it together. `ranks_per_host` defaults to what torchrun or srun says. `read_ahead` steps are read
    at once. A reader that has died or has delivered nothing for `read_timeout` seconds is named in a RunError. Rows are read
    in the background, so on a reading host `num_workers=0` starts one worker, too. Others start none.
    """

    def __init__(
        self,
        dataset: MapDataset,
        order: GlobalOrder,
        sampler: StepSampler,
        *,
        collate: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
        loading_hosts: LoadingHosts | ReadingHosts | None = None,
        ranks_per_host: int | tuple[int, ...] | None = None,
        read_ahead: int = 1,
        read_timeout: float = READ_TIMEOUT,
        read_retries: int = READ_RETRIES,
        **options: Any,
    ) -> None:
        _check(dataset, order, options)
        for name, value, least in (("read_ahead", read_ahead, 1), ("read_retries", read_retries, 0)):
            if value < least:
                raise PlanError(f"{name}={value}: must be at least {least}.", field=name, given=value, nearest=(least,))
        if loading_hosts is None and read_ahead > 1:
            raise PlanError(
                f"read_ahead={read_ahead} needs loading_hosts: without it every rank reads one micro batch after the other, and "
                "prefetch_factor says how many ahead.",
                field="read_ahead",
                given=read_ahead,
                nearest=(1,),
            )
        # The DataLoader gets its own generator: it must not draw from the one that the model's dropout uses.
        options.setdefault("generator", torch.Generator().manual_seed(order.seed % 2**63))
        options["worker_init_fn"] = _IgnoreStopSignals(options.get("worker_init_fn"))
        self.sampler = sampler
        self._rows_read = 0
        self._exchange: Exchange | None = None
        self.waited_seconds: float = 0.0
        """Seconds that this rank has waited for micro batches."""
        self._reader = Reader(dataset, order.seed, collate or default_collate, read_retries)
        self._slices = _SlicesWithIds(sampler, order)
        self._pin, self._read_ahead, self._read_timeout = pin_memory, read_ahead, read_timeout
        self._hosts: ReadingHosts | None = None
        self._requests: _Requests | None = None
        self._loader: DataLoader[Any] | None = None
        if loading_hosts is None:
            self._loader = DataLoader(
                cast("Dataset[Any]", self._reader),
                batch_size=None,  # an index is a whole micro batch: the reader collates
                sampler=self._slices,
                collate_fn=cast(Any, Pinnable) if pin_memory else _unchanged,
                num_workers=num_workers,
                pin_memory=pin_memory,
                **options,
            )
            return
        if not isinstance(loading_hosts, ReadingHosts):
            loading_hosts = ReadingHosts(
                loading_hosts,
                rank=sampler.rank,
                ranks=sampler.ranks,
                ranks_per_host=ranks_per_host or discover().local_size,
            )
        self._hosts = loading_hosts
        if loading_hosts.reader is not None:
            self._requests = _Requests(sampler, order, loading_hosts, read_ahead, max(1, num_workers))
            self._loader = DataLoader(
                cast("Dataset[Any]", _Packer(self._reader)),
                batch_size=None,
                sampler=cast(Any, self._requests),
                collate_fn=_unchanged,
                num_workers=max(1, num_workers),
                **options,
            )

    @property
    def rows_read(self) -> int:
        """Rows that this rank has asked the dataset for, for itself and for others."""
        return self._rows_read + (self._exchange.rows_read if self._exchange else 0)

    def __iter__(self) -> Iterator[Micro]:
        if self._hosts is not None:
            yield from self._received(self._hosts)
            return
        loader = self._loader
        assert loader is not None
        if not loader.num_workers and not loader.pin_memory:
            # Without workers and pinned memory the DataLoader would add 15 µs to a micro batch, and nothing else.
            read = map(self._reader.__getitem__, self._slices)
        else:
            read = iter(loader)
        with _workers_of(loader, read):
            while True:
                before = perf_counter()
                found = next(read, None)
                self.waited_seconds += perf_counter() - before
                if found is None:
                    return
                part, ids, data, rows = found
                self._rows_read += rows
                yield Micro(part.step, part.index, part.count, part.positions, part.filler, ids=ids, data=data)

    def _received(self, hosts: ReadingHosts) -> Iterator[Micro]:
        """This rank's micro batches of rows that reading hosts have read."""
        read = None if self._loader is None else iter(self._loader)
        self._rows_read = self.rows_read
        self._exchange = exchange = Exchange(
            hosts,
            lambda: load_batches(self.sampler, self._read_ahead),
            None if self._requests is None else self._requests.each(None),
            read,
            self._read_timeout,
            lambda position: self._reader.named([position], self._slices.order.ids([position]).tolist()),
        )
        rows: list[Any] = []
        last: list[Any] = []
        ended = True
        with _workers_of(self._loader, read, lambda: ended):
            try:
                for part, ids in self._slices:
                    before = perf_counter()
                    # A rank whose share is empty gets the row that its fillers repeat.
                    if not part.filler or part.positions[0] != (last[0] if last else None):
                        while len(rows) < len(part.positions):
                            rows += exchange.take()
                        last = [part.positions[-1], rows[len(part.positions) - 1]]
                        here, rows = rows[: len(part.positions)], rows[len(part.positions) :]
                    else:
                        here = last[1:]
                    with generators.put_back():
                        data = self._reader.collated(here, part.positions, ids)
                    data = pinned(data) if self._pin else data
                    self.waited_seconds += perf_counter() - before
                    yield Micro(part.step, part.index, part.count, part.positions, part.filler, ids=ids, data=data)
                exchange.complete()
            except GeneratorExit:
                ended = exchange.stop()
                raise
            except BaseException:
                ended = exchange.stop(wait=False)
                _kill_workers(read)
                raise


@contextmanager
def _workers_of(
    loader: DataLoader[Any] | None, read: Any, unused: Callable[[], bool] = lambda: True
) -> Generator[None]:
    """End the workers of an iterator when the block ends and they are unused, or when the process ends."""
    if loader is None or not loader.num_workers:
        yield
        return
    # At exit multiprocessing sends SIGTERM to the workers and waits. They ignore SIGTERM, so end them first:
    # exit functions run in reverse order, and multiprocessing has registered its own by now.
    at_exit = partial(_end_workers, ref(read, lambda _: atexit.unregister(at_exit)))
    atexit.register(at_exit)
    try:
        yield
    finally:
        # Do not leave this to garbage collection: collected in a reference cycle, the iterator may not end its workers.
        if not loader.persistent_workers and unused():
            _end_workers(ref(read))


@dataclass(frozen=True)
class _SlicesWithIds:
    """The sampler's slices with their dataset ids, computed for a share, a part of a large one, or many small ones at once."""

    sampler: StepSampler
    order: GlobalOrder

    def __iter__(self) -> Iterator[tuple[Slice, Ints]]:
        known, ids = range(0), np.empty(0, np.int64)
        for part in self.sampler:
            first, last = part.positions[0], part.positions[-1]
            if first not in known or last not in known:
                share = self.sampler.share(part.step)
                end = max(min(share.stop, first + _MOST_AHEAD), last + 1, first + _AHEAD)
                known = range(first, min(end, LARGEST_POSITION + 1))
                ids = self.order.ids(known)
            at = first - known.start
            yield part, ids[at : at + len(part.positions)]


@dataclass(frozen=True)
class _Requests:
    """What this rank reads for all ranks: its rows of every load batch, in at least as many requests as it has workers."""

    sampler: StepSampler
    order: GlobalOrder
    hosts: ReadingHosts
    read_ahead: int
    parts: int

    def __iter__(self) -> Iterator[Request]:
        return self.each(self.order.ids)

    def each(self, ids: Callable[[range], Ints] | None) -> Iterator[Request]:
        """The requests; without `ids` they have none."""
        reader, readers, ranks = self.hosts.reader, len(self.hosts.readers), self.hosts.ranks
        assert reader is not None
        for batch in load_batches(self.sampler, self.read_ahead):
            own = batch.read_by(reader, readers)
            known: list[int] = ids(own).tolist() if ids and own else []
            parts = max(self.parts, -(-len(own) // _MOST_ROWS))
            for part in filter(None, (share(own, i, parts) for i in range(parts))):
                here = known[part.start - own.start : part.stop - own.start]
                yield Request(batch, part, here, batch.served(part, ranks))


@dataclass(frozen=True)
class _Packer:
    """Runs in the workers of a reading host: reads a request and packs the rows of each rank."""

    reader: Reader

    def __getitem__(self, request: Request) -> tuple[torch.Tensor, list[int], int]:
        before = self.reader.rows_read
        with self.reader.own_generators():
            rows = self.reader.rows(request.positions, request.ids)
        first = request.positions.start
        blocks = [
            pack([rows[position - first] for part in parts for position in part]) for parts in request.served.values()
        ]
        edges = [0, *accumulate(map(len, blocks))]
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks), edges, self.reader.rows_read - before


@dataclass(frozen=True)
class _IgnoreStopSignals:
    """Initialises a worker. Signals that stop a job also reach its workers, but the main process still needs them."""

    then: Callable[[int], None] | None

    def __call__(self, worker: int) -> None:
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        if self.then is not None:
            self.then(worker)


def _end_workers(iterator: ref[Any]) -> None:
    """End the workers of an iterator that is still referenced, for example by a traceback."""
    if (held := iterator()) is not None:
        held.__del__()  # torch ends the workers there; a second call is allowed


def _kill_workers(iterator: Any) -> None:
    """Kill the workers of an iterator after a failure: one may hang in a read, and workers ignore SIGTERM."""
    if iterator is None:
        return
    # torch's handler of SIGCHLD would raise in the middle of anything.
    cast(Any, signal_handling)._remove_worker_pids(id(iterator))
    iterator._worker_pids_set, iterator._shutdown = False, True
    for worker in iterator._workers:
        worker.kill()
    for queue in iterator._index_queues:
        queue.cancel_join_thread()
        queue.close()


def _unchanged(data: Any) -> Any:
    return data


def _check(dataset: Any, order: GlobalOrder, options: dict[str, Any]) -> None:
    kind = type(dataset).__name__
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise PlanError(
            f"dataset={kind} is a stream: it cannot return the sample at a given position, so a run could not resume "
            "exactly. Use a map-style dataset with len(dataset) and dataset[i]; for example, write the stream to indexed "
            "files once.",
            field="dataset",
            given=kind,
        )
    if len(dataset) != order.size:
        raise PlanError(
            f"the order has size={order.size:,} samples, but len(dataset) is {len(dataset):,}: "
            f"{abs(len(dataset) - order.size):,} samples would be {'left out' if len(dataset) > order.size else 'missing'}. "
            f"Nearest: GlobalOrder({len(dataset)}, seed={order.seed}).",
            field="size",
            given=order.size,
            nearest=[len(dataset)],
        )
    for name in _REPLACED:
        if name in options:
            reason = "the global order and the schedule decide which samples come when. Set GlobalOrder or StepSampler instead."
            raise PlanError(
                f"{name}={options[name]!r} is not an option of Loader: "
                + ("use collate." if name == "collate_fn" else reason),
                field=name,
                given=options[name],
            )
