"""The loader: one torch DataLoader over all stages of a run, reading along the global order.

Its workers are handed positions, micro batch by micro batch, so a batch that grows only means more of them per step:
nothing restarts. What is prefetched is not yet trained: the loader has no position of its own to save.
"""

from __future__ import annotations

import atexit
import signal
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol
from weakref import ref

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from batchwright.core.errors import PlanError, RunError
from batchwright.runtime.state import generators

from .order import LARGEST_POSITION, GlobalOrder, Ints
from .sampler import Slice, StepSampler

# What the global order decides, so no argument of the DataLoader may.
_DECIDED = ("batch_sampler", "batch_size", "drop_last", "in_order", "sampler", "shuffle")


# Asking the order takes 150 µs for one id and 230 µs for so many (measured), so small steps ask together.
_AHEAD = 4096


class MapDataset(Protocol):
    """What is asked of a dataset: `len(dataset)` and `dataset[i]`. For packed sequences, i counts packed samples."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class Micro(Slice):
    """One micro batch of one step on this rank: a `Slice` with its dataset ids and its collated data."""

    ids: Ints = field(compare=False)
    """Dataset ids of the rows, in the order of `positions`."""
    data: Any = field(compare=False, repr=False)
    """What `collate_fn` made of the samples."""


class Loader:
    """Yields this rank's micro batches, as `Micro`, for every step of the sampler's schedule. It is the loop

        for part in sampler:                                       # in `num_workers` processes, ahead of time
            ids = order.ids(part.positions)
            yield Micro(…, data=collate_fn([dataset[i] for i in ids]))

        order = GlobalOrder(len(dataset), seed=1)
        sampler = StepSampler(schedule, micro_batch_size=8, rank=rank, ranks=ranks, start=position)
        for micro in Loader(dataset, order, sampler, num_workers=4): ...

    Randomness inside `dataset[i]` (Python's `random`, numpy's global and torch's CPU generator) is seeded by (seed,
    position): an augmentation is the same at any micro batch, rank and worker count, and another in the next epoch.
    The process's own generators are put back afterwards. What is drawn in `collate_fn` goes on from the micro batch's
    last sample, and what the model draws (dropout) from its process: both do depend on the split.

    The dataset is map-style, and `dataset[i]` is called for each i (a batched `__getitems__` could not be seeded per
    sample). For packed sequences i counts the packed samples: pack first, then index.
    `pin_memory` defaults to whether there is a CUDA device; other options go to torch's DataLoader as they are.
    """

    def __init__(
        self,
        dataset: MapDataset,
        order: GlobalOrder,
        sampler: StepSampler,
        *,
        collate_fn: Callable[[list[Any]], Any] = default_collate,
        num_workers: int = 0,
        pin_memory: bool | None = None,
        **options: Any,
    ) -> None:
        _check(dataset, order, options)
        # Its own generator: starting an iteration must not draw from the one that the model's dropout uses.
        options.setdefault("generator", torch.Generator().manual_seed(order.seed % 2**63))
        options["worker_init_fn"] = _Deaf(options.get("worker_init_fn"))
        self.sampler = sampler
        self._loader: DataLoader[Any] = DataLoader(
            _Reader(dataset, order.seed, collate_fn),  # type: ignore[arg-type]
            batch_size=None,  # an index is a whole micro batch: the reader collates
            sampler=_Identified(sampler, order),
            collate_fn=_as_it_is,
            num_workers=num_workers,
            pin_memory=torch.cuda.is_available() if pin_memory is None else pin_memory,
            **options,
        )

    def __iter__(self) -> Iterator[Micro]:
        read = iter(self._loader)
        if self._loader.num_workers:
            # Workers are deaf to SIGTERM, by which Python ends what is left of them, and would be waited for forever.
            # Registered now, after multiprocessing's own end, so that it comes before it.
            at_exit = partial(_end, ref(read, lambda _: atexit.unregister(at_exit)))
            atexit.register(at_exit)
        try:
            for part, ids, data in read:
                yield Micro(part.step, part.index, part.count, part.positions, part.filler, ids=ids, data=data)
        finally:  # by whatever it ends: garbage that is collected in a cycle no longer reaches its workers
            if self._loader.num_workers and not self._loader.persistent_workers:
                _end(ref(read))


@dataclass(frozen=True)
class _Identified:
    """The sampler's slices with their dataset ids, computed for a whole share at once, or for many small ones."""

    sampler: StepSampler
    order: GlobalOrder

    def __iter__(self) -> Iterator[tuple[Slice, Ints]]:
        known, ids = range(0), np.empty(0, np.int64)
        for part in self.sampler:
            first, last = part.positions[0], part.positions[-1]
            if first not in known or last not in known:
                share = self.sampler.share(part.step)
                end = max(share.stop, last + 1, first + _AHEAD)
                known = range(first, min(end, LARGEST_POSITION + 1))
                ids = self.order.ids(known)
            at = first - known.start
            yield part, ids[at : at + len(part.positions)]


@dataclass(frozen=True)
class _Reader:
    """Runs in the workers: reads and collates one micro batch."""

    dataset: MapDataset
    seed: int
    collate_fn: Callable[[list[Any]], Any]

    def __getitem__(self, index: tuple[Slice, Ints]) -> tuple[Slice, Ints, Any]:
        part, ids = index
        # A worker has no other use for its generators.
        with nullcontext() if get_worker_info() is not None else generators.put_back():
            rows = [self._row(position, id) for position, id in zip(part.positions, ids.tolist(), strict=True)]
            try:
                return part, ids, self.collate_fn(rows)
            except Exception as error:
                error.add_note(f"batchwright: collating sample ids {ids.tolist()}, positions {part.positions}")
                raise

    def _row(self, position: int, id: int) -> Any:
        generators.seed_sample(self.seed, position)
        try:
            return self.dataset[id]
        except StopIteration as error:  # would end the loop above as if the data were complete
            raise RunError(f"dataset[{id}] raised StopIteration (position {position:,}).") from error
        except Exception as error:
            error.add_note(f"batchwright: reading dataset[{id}], the sample at position {position:,}")
            raise


@dataclass(frozen=True)
class _Deaf:
    """A worker's first act: signals that ask a job to stop reach it as well, but the main process still needs it."""

    then: Callable[[int], None] | None

    def __call__(self, worker: int) -> None:
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        if self.then is not None:
            self.then(worker)


def _end(iterator: ref[Any]) -> None:
    """End the workers of an iteration that is still held, as by the traceback of what a sample raised."""
    if (held := iterator()) is not None:
        held.__del__()  # torch's own way: it asks them to end, and may be called twice


def _as_it_is(data: Any) -> Any:
    return data


def _check(dataset: Any, order: GlobalOrder, options: dict[str, Any]) -> None:
    kind = type(dataset).__name__
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise PlanError(
            f"dataset={kind} can only be streamed: which sample stands at position P cannot be asked of it, so a run "
            "could not continue exactly. Needed: a map-style dataset with len(dataset) and dataset[i], for example the "
            "stream written to indexed files once.",
            field="dataset",
            given=kind,
        )
    if len(dataset) != order.size:
        raise PlanError(
            f"the order is over size={order.size:,} samples, but len(dataset) is {len(dataset):,}: "
            f"{abs(len(dataset) - order.size):,} samples would be {'left out' if len(dataset) > order.size else 'missing'}. "
            f"Nearest: GlobalOrder({len(dataset)}, seed={order.seed}).",
            field="size",
            given=order.size,
            nearest=[len(dataset)],
        )
    for name in _DECIDED:
        if name in options:
            raise PlanError(
                f"{name}={options[name]!r} is not the DataLoader's to decide here: the global order and the schedule say "
                "which samples come when. Leave it out, and set it on GlobalOrder or StepSampler.",
                field=name,
                given=options[name],
            )
