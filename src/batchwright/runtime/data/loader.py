"""The loader: one torch DataLoader for all stages of a run, which reads along the global order.

Its workers get positions, one micro batch at a time. If the batch grows, a step has more micro batches, and no worker
restarts. Prefetched batches are not trained yet, so the loader has no state to save.
"""

from __future__ import annotations

import atexit
import signal
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import wait
from threading import TIMEOUT_MAX
from time import perf_counter
from typing import Any, cast
from weakref import ref

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data import default_collate as _untyped_collate  # pyright: ignore[reportUnknownVariableType]
from torch.utils.data._utils import signal_handling

from batchwright.core.errors import PlanError, RunError
from batchwright.runtime.device import Pinnable, pinned
from batchwright.runtime.state import generators

from .hosts import LoadingHosts, load_batches
from .order import LARGEST_POSITION, GlobalOrder, Ints
from .readers import Exchange, ReadingHosts
from .reading import MapDataset, Reader, slots
from .requests import Packer, Requests
from .rows import pack, unpack
from .sampler import Slice, StepSampler

# Arguments of torch's DataLoader that the global order replaces.
_REPLACED = ("batch_sampler", "batch_size", "collate_fn", "drop_last", "in_order", "sampler", "shuffle")
# The order takes 150 µs for one id and 230 µs for this many (measured), so small steps are computed together.
_AHEAD = 4096
# Ids of one share that are computed together, at most: 8 MiB.
_MOST_AHEAD = 1 << 20
# A reading host looks so often whether its workers live.
_LOOK_SECONDS = 1.0
READ_TIMEOUT = 540.0
"""Seconds without rows from a reading host, after which it counts as hanging.

More than all tries of the largest request of a source (`Access().longest_wait`), so that its own error comes first; less than
the supervisor's limit for a step."""
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
    loader and iterate over it together. Ranks with one host name are on one host, unless `ranks_per_host` says otherwise.
    `read_ahead` steps are read at once. A reader that has died or has delivered nothing for `read_timeout` seconds is named in
    a RunError. Rows are read in the background, so on a reading host `num_workers=0` starts one worker, too. Others start none,
    and do not open the dataset: even its length is asked on reading hosts only. `collate` runs in the training process of each
    rank, since rows of several readers meet there: put costly work, such as decoding, into `dataset[i]`.
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
        ranks_per_host: int | Sequence[int] | None = None,
        read_ahead: int = 1,
        read_timeout: float = READ_TIMEOUT,
        read_retries: int = READ_RETRIES,
        **options: Any,
    ) -> None:
        _check(dataset, options, reading=loading_hosts is not None)
        if not 0 < read_timeout <= TIMEOUT_MAX:
            raise PlanError(
                f"read_timeout={read_timeout}: must be above 0 and at most {TIMEOUT_MAX:,.0f}, in seconds.",
                field="read_timeout",
                given=read_timeout,
                nearest=(TIMEOUT_MAX if read_timeout > TIMEOUT_MAX else READ_TIMEOUT,),
            )
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
        self.waited_seconds: float = 0.0
        """Seconds that this rank has waited for micro batches."""
        self._reader = Reader(dataset, order.seed, collate or default_collate, read_retries)
        self._slices = _SlicesWithIds(sampler, order)
        self._pin, self._read_ahead, self._read_timeout = pin_memory, read_ahead, read_timeout
        self._hosts: ReadingHosts | None = None
        self._requests: Requests | None = None
        self._loader: DataLoader[Any] | None = None
        if loading_hosts is None:
            _check_length(len(dataset), order)
            if num_workers:
                self._reader.begun = slots(num_workers)
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
                loading_hosts, rank=sampler.rank, ranks=sampler.ranks, ranks_per_host=ranks_per_host
            )
        if (loading_hosts.rank, loading_hosts.ranks) != (sampler.rank, sampler.ranks):
            raise PlanError(
                f"loading_hosts is rank {loading_hosts.rank} of {loading_hosts.ranks}, and sampler is rank {sampler.rank} of "
                f"{sampler.ranks}: this rank would get the rows of another one. Give both the same rank and ranks.",
                field="loading_hosts",
                given=loading_hosts.rank,
                nearest=(sampler.rank,),
            )
        self._hosts = loading_hosts
        shared = {"order": order, "schedule": sampler.schedule, "start": sampler.start, "read_ahead": read_ahead}
        _check_length(loading_hosts.length(dataset, shared), order)
        if loading_hosts.reader is not None:
            workers = max(1, num_workers)
            self._reader.begun = slots(workers)
            self._requests = Requests(sampler, order, loading_hosts, read_ahead, workers, self._reader.batched)
            self._loader = DataLoader(
                cast("Dataset[Any]", Packer(self._reader)),
                batch_size=None,
                sampler=cast(Any, self._requests),
                collate_fn=_unchanged,
                num_workers=workers,
                timeout=min(_LOOK_SECONDS, read_timeout / 20),
                **options,
            )

    @property
    def rows_read(self) -> int:
        """Rows that this rank has asked the dataset for, for itself and for others."""
        return self._reader.rows_read

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
                part, ids, data = found
                yield Micro(part.step, part.index, part.count, part.positions, part.filler, ids=ids, data=data)

    def _received(self, hosts: ReadingHosts) -> Iterator[Micro]:
        """This rank's micro batches of rows that reading hosts have read."""
        read = None if self._loader is None else iter(self._loader)
        if read is not None:
            _unwatch(read)
        exchange = Exchange(
            hosts,
            lambda: load_batches(self.sampler, self._read_ahead),
            None if self._requests is None else self._requests.issued(),
            None if read is None else self._blocks(read),
            self._read_timeout,
            lambda position: self._named(range(position, position + 1)),
            lambda: self._under_way([]),
        )
        rows: list[Any] = []
        again: list[Any] = []
        ended = True
        with _workers_of(self._loader, read, lambda: ended):
            try:
                for part, ids in self._slices:
                    before = perf_counter()
                    if part.filler and again:
                        here, again = again, []
                    else:
                        # A rank whose share is empty gets the row that its filler repeats.
                        while len(rows) < len(part.positions):
                            rows += exchange.take()
                        here, rows = rows[: len(part.positions)], rows[len(part.positions) :]
                        if not part.filler and part.index + 1 < part.count:
                            # The filler after the last micro batch repeats a row as it was: `collate` may change its rows.
                            last = part.positions[-1] + 1 == self.sampler.share(part.step).stop
                            again = unpack(pack(here[-1:])) if last else []
                    with generators.put_back():
                        data = self._reader.collated(here, part.positions, ids)
                    data = pinned(data) if self._pin else data
                    self.waited_seconds += perf_counter() - before
                    yield Micro(part.step, part.index, part.count, part.positions, part.filler, ids=ids, data=data)
                exchange.complete()
            except GeneratorExit:
                ended = exchange.stop()
                raise
            except BaseException as error:
                ended = False
                exchange.fail(error)
                _kill_workers(read)
                raise

    def _blocks(self, read: Any) -> Iterator[tuple[torch.Tensor, list[int]]]:
        """What the workers of a reading host deliver. One that has died or hangs is named, with the rows that it reads."""
        # A little less than the time after which the ranks that wait would name the host alone.
        limit = 0.9 * self._read_timeout
        begun, seen = perf_counter(), self._reader.begun[:]
        assert self._requests is not None
        while True:
            try:
                block, edges = next(read)
                self._requests.arrived(edges[-1])
                yield block, edges
            except StopIteration:
                return
            except Exception as error:
                # A pipe that is closed belongs to a worker that will be seen dead in a moment.
                closed = isinstance(error, (OSError, EOFError))
                ended = wait([worker.sentinel for worker in read._workers], _LOOK_SECONDS if closed else 0)
                dead = [number for number, worker in enumerate(read._workers) if worker.sentinel in ended]
                if seen != self._reader.begun[:]:  # slow, but a further row was begun
                    begun, seen = perf_counter(), self._reader.begun[:]
                waited = perf_counter() - begun
                if not dead and waited < limit and str(error).startswith("DataLoader timed out"):
                    continue
                if dead:
                    read._workers[dead[0]].join(_LOOK_SECONDS)
                    what = f"worker {dead[0]} of the reader has died (exit code {read._workers[dead[0]].exitcode})"
                elif waited >= limit:
                    what = f"a read has not returned for {waited:.1f} s"
                else:
                    raise
                raise RunError(f"{what}: {self._under_way(dead)}", field="dataset") from error
            begun = perf_counter()

    def _under_way(self, workers: list[int]) -> str:
        """The rows that workers were reading last; without workers, those of all."""
        begun = self._reader.begun
        spans = [(begun[3 * worker], begun[3 * worker + 1]) for worker in workers or range(len(begun) // 3)]
        return "; ".join(self._named(range(first, last + 1)) for first, last in spans if first >= 0) or "no row yet"

    def _named(self, positions: range) -> str:
        return self._reader.named(positions, self._slices.order.ids(positions).tolist())


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


def _unwatch(iterator: Any) -> None:
    """torch's handler of SIGCHLD would raise in the middle of anything. The thread that reads finds dead workers itself."""
    cast(Any, signal_handling)._remove_worker_pids(id(iterator))
    iterator._worker_pids_set = False


def _kill_workers(iterator: Any) -> None:
    """Kill the workers of an iterator after a failure: one may hang in a read, and workers ignore SIGTERM."""
    if iterator is None:
        return
    iterator._shutdown = True
    for worker in iterator._workers:
        worker.kill()
    for queue in iterator._index_queues:
        queue.cancel_join_thread()
        queue.close()


def _unchanged(data: Any) -> Any:
    return data


def _check_length(length: int, order: GlobalOrder) -> None:
    if length != order.size:
        raise PlanError(
            f"the order has size={order.size:,} samples, but len(dataset) is {length:,}: "
            f"{abs(length - order.size):,} samples would be {'left out' if length > order.size else 'missing'}. "
            f"Nearest: GlobalOrder({length}, seed={order.seed}).",
            field="size",
            given=order.size,
            nearest=[length],
        )


def _check(dataset: Any, options: dict[str, Any], *, reading: bool) -> None:
    kind = type(dataset).__name__
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise PlanError(
            f"dataset={kind} is a stream: it cannot return the sample at a given position, so a run could not resume "
            "exactly. Use a map-style dataset with len(dataset) and dataset[i]; for example, write the stream to indexed "
            "files once.",
            field="dataset",
            given=kind,
        )
    for name in ("timeout", "persistent_workers"):
        if reading and options.get(name):
            raise PlanError(
                f"{name}={options[name]!r} cannot be combined with loading_hosts: "
                + ("use read_timeout." if name == "timeout" else "its workers end with an iteration."),
                field=name,
                given=options[name],
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
