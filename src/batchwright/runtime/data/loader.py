"""The loader: one torch DataLoader for all stages of a run, which reads along the global order.

Its workers get positions, one micro batch at a time. If the batch grows, a step has more micro batches, and no worker
restarts. Prefetched batches are not trained yet, so the loader has no state to save.
"""

from __future__ import annotations

import atexit
import signal
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, cast
from weakref import ref

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info
from torch.utils.data import default_collate as _untyped_collate  # pyright: ignore[reportUnknownVariableType]

from batchwright.core.errors import PlanError, RunError
from batchwright.runtime.device import Pinnable
from batchwright.runtime.state import generators

from .order import LARGEST_POSITION, GlobalOrder, Ints
from .sampler import Slice, StepSampler

# Arguments of torch's DataLoader that the global order replaces.
_REPLACED = ("batch_sampler", "batch_size", "collate_fn", "drop_last", "in_order", "sampler", "shuffle")
# The order takes 150 µs for one id and 230 µs for this many (measured), so small steps are computed together.
_AHEAD = 4096
# Ids of one share that are computed together, at most: 8 MiB.
_MOST_AHEAD = 1 << 20

default_collate = cast("Callable[[list[Any]], Any]", _untyped_collate)


class MapDataset(Protocol):
    """What a dataset must have: `len(dataset)` and `dataset[i]`. For packed sequences, i counts packed samples."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


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
    Afterwards the process's own generators are restored. Random numbers drawn in `collate` continue from the micro
    batch's last sample, and those of the model (dropout) from its process: both depend on the split.

    The dataset is map-style, and `dataset[i]` is called for each i (a batched `__getitems__` could not be seeded per
    sample). For packed sequences, i counts packed samples: pack first, then index.
    `collate` defaults to torch's `default_collate`. With `pin_memory=True`, copies to a GPU need not wait; tensors that are
    there already stay there. Other options are passed to torch's DataLoader.
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
        **options: Any,
    ) -> None:
        _check(dataset, order, options)
        # The DataLoader gets its own generator: it must not draw from the one that the model's dropout uses.
        options.setdefault("generator", torch.Generator().manual_seed(order.seed % 2**63))
        options["worker_init_fn"] = _IgnoreStopSignals(options.get("worker_init_fn"))
        self.sampler = sampler
        self._reader = Reader(dataset, order.seed, collate or default_collate)
        self._slices = _SlicesWithIds(sampler, order)
        self._loader: DataLoader[Any] = DataLoader(
            cast("Dataset[Any]", self._reader),
            batch_size=None,  # an index is a whole micro batch: the reader collates
            sampler=self._slices,
            collate_fn=cast(Any, Pinnable) if pin_memory else _unchanged,
            num_workers=num_workers,
            pin_memory=pin_memory,
            **options,
        )

    def __iter__(self) -> Iterator[Micro]:
        if not self._loader.num_workers and not self._loader.pin_memory:
            # Without workers and pinned memory the DataLoader would add 15 µs to a micro batch, and nothing else.
            read = map(self._reader.__getitem__, self._slices)
        else:
            read = iter(self._loader)
        if self._loader.num_workers:
            # At exit multiprocessing sends SIGTERM to the workers and waits. They ignore SIGTERM, so end them first:
            # exit functions run in reverse order, and multiprocessing has registered its own by now.
            at_exit = partial(_end_workers, ref(read, lambda _: atexit.unregister(at_exit)))
            atexit.register(at_exit)
        try:
            for part, ids, data in read:
                yield Micro(part.step, part.index, part.count, part.positions, part.filler, ids=ids, data=data)
        finally:
            # Do not leave this to garbage collection: collected in a reference cycle, the iterator may not end its workers.
            if self._loader.num_workers and not self._loader.persistent_workers:
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
class Reader:
    """Runs in the workers: reads and collates one micro batch."""

    dataset: MapDataset
    seed: int
    collate: Callable[[list[Any]], Any]

    def __getitem__(self, index: tuple[Slice, Ints]) -> tuple[Slice, Ints, Any]:
        part, ids = index
        # A worker process uses its generators for nothing else.
        with nullcontext() if get_worker_info() is not None else generators.put_back():
            rows = [self._row(position, id) for position, id in zip(part.positions, ids.tolist(), strict=True)]
            try:
                return part, ids, self.collate(rows)
            except Exception as error:
                error.add_note(f"batchwright: collating sample ids {ids.tolist()}, positions {part.positions}")
                raise

    def _row(self, position: int, id: int) -> Any:
        generators.seed_sample(self.seed, position)
        try:
            return self.dataset[id]
        except StopIteration as error:  # would end the caller's loop as if the data were complete
            raise RunError(f"dataset[{id}] raised StopIteration (position {position:,}).") from error
        except Exception as error:
            error.add_note(f"batchwright: reading dataset[{id}], the sample at position {position:,}")
            raise


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
