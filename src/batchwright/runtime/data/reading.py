"""Reads rows of a dataset: seeded by position, many at once where the dataset can, again after a failure.

Runs in the loader's worker processes, or in the main process without workers.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from http.client import HTTPException
from multiprocessing.sharedctypes import RawArray
from typing import Any, Protocol

from batchwright.core.errors import RunError
from batchwright.runtime.state import generators

from .order import Ints
from .sampler import Slice
from .sources.access import Access, judged

# Errors that say nothing of their reason: storage that does not answer now may answer later. What does say it: `judged`.
_PASSING = (OSError, HTTPException)
_LASTING = (NotADirectoryError, FileExistsError)


class MapDataset(Protocol):
    """What a dataset must have: `len(dataset)` and `dataset[i]`. For packed sequences, i counts packed samples.

    It may also have `__getitems__(ids) -> list`, which reads many rows at once; `describe(i) -> str`, which names the file
    and row in errors, without reading; and `retries_itself = True`, so that nobody else retries.
    """

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


@dataclass
class Reader:
    """Reads rows, and collates a micro batch of them.

    `dataset[i]` is called with the three generators seeded by (seed, position). `dataset.__getitems__` is called instead, once
    for all rows of a request, as long as it draws nothing from these generators: a request that has drawn is thrown away and
    read row by row, and so is everything after it.
    """

    dataset: MapDataset
    seed: int
    collate: Callable[[list[Any]], Any]
    retries: int = 0
    pause: Callable[[float], None] = time.sleep
    begun: Any = field(default=None, init=False)
    """Shared memory (`slots(workers)`): for each worker, the first and the last of the positions that it
    reads now, and how many rows it has asked for."""
    batched: bool = field(init=False)

    def __post_init__(self) -> None:
        self.batched = callable(getattr(self.dataset, "__getitems__", None))
        if getattr(self.dataset, "retries_itself", False):
            self.retries = 0
        self._access = Access(tries=self.retries + 1)
        self._rows_here = 0

    @property
    def rows_read(self) -> int:
        """Rows that the dataset was asked for, here and in workers, again after a failure included."""
        return self._rows_here + sum(self.begun[2::3] if self.begun is not None else ())

    def __getitem__(self, index: tuple[Slice, Ints]) -> tuple[Slice, Ints, Any]:
        part, ids = index
        with self.own_generators():
            rows = self.rows(part.positions, ids.tolist())
            return part, ids, self.collated(rows, part.positions, ids)

    def own_generators(self) -> Any:
        """Sets the process's generators aside; a worker process uses its generators for nothing else."""
        return nullcontext() if _worker() is not None else generators.put_back()

    def collated(self, rows: list[Any], positions: range, ids: Ints) -> Any:
        """One micro batch of rows, whoever has read them."""
        generators.seed_collate(self.seed, positions[-1])
        try:
            return self.collate(rows)
        except Exception as error:
            error.add_note(f"batchwright: collating sample ids {ids.tolist()}, positions {positions}")
            raise

    def rows(self, positions: Sequence[int], ids: list[int]) -> list[Any]:
        """The rows at `positions`, which have these ids."""
        if self.batched:
            before = generators.seen()
            self._begin(positions)
            rows = self._retried(lambda: self._together(ids), positions, ids)
            if generators.seen() == before:
                return rows
            self.batched = False
        return [self._row(position, id) for position, id in zip(positions, ids, strict=True)]

    def unseeded(self, positions: Sequence[int], ids: list[int]) -> list[Any]:
        """The same rows with no generator touched: for a thread beside another that draws from them."""

        def read(id: int) -> Any:
            self._count(1)
            return self.dataset[id]

        return [self._retried(partial(read, id), [at], [id]) for at, id in zip(positions, ids, strict=True)]

    def _together(self, ids: list[int]) -> list[Any]:
        self._count(len(ids))
        rows = list(getattr(self.dataset, "__getitems__")(ids))  # noqa: B009
        if len(rows) != len(ids):
            raise RunError(
                f"dataset.__getitems__ returned {len(rows)} rows for {len(ids)} ids.", field="dataset", given=len(rows)
            )
        return rows

    def _row(self, position: int, id: int) -> Any:
        def read() -> Any:
            self._count(1)
            generators.seed_sample(self.seed, position)
            return self.dataset[id]

        self._begin([position])
        return self._retried(read, [position], [id])

    def _begin(self, positions: Sequence[int]) -> None:
        if self.begun is not None and (worker := _worker()) is not None:
            self.begun[3 * worker.id], self.begun[3 * worker.id + 1] = positions[0], positions[-1]

    def _count(self, rows: int) -> None:
        """Rows that are asked for now: also those that nobody will take."""
        if self.begun is not None and (worker := _worker()) is not None:
            self.begun[3 * worker.id + 2] += rows
        else:
            self._rows_here += rows

    def _retried(self, read: Callable[[], Any], positions: Sequence[int], ids: list[int]) -> Any:
        for attempt in range(self.retries + 1):
            try:
                return read()
            except StopIteration as error:  # would end the caller's loop as if the data were complete
                raise RunError(f"{self.named(positions, ids)} raised StopIteration.") from error
            except Exception as error:
                known = judged(error)
                may_pass = isinstance(error, _PASSING) and not isinstance(error, _LASTING) if known is None else known
                if not may_pass or attempt == self.retries:
                    again = f", {attempt + 1} times" if attempt else ""
                    error.add_note(f"batchwright: reading {self.named(positions, ids)}{again}")
                    raise
            self.pause(self._access.pause(attempt + 1))
        raise AssertionError  # the loop returns or raises

    def named(self, positions: Sequence[int], ids: list[int]) -> str:
        """Rows in an error: ids, what the dataset says of them, positions."""
        describe = getattr(self.dataset, "describe", None)
        where = ""
        if callable(describe):
            try:
                where = f" ({describe(ids[0])}{' and others' * (len(ids) > 1)})"
            except Exception:
                where = ""  # the error of the read matters more
        if len(ids) == 1:
            return f"dataset[{ids[0]}]{where}, the sample at position {positions[0]:,}"
        some = ", ".join(map(str, ids[:8])) + ", …" * (len(ids) > 8)
        return f"dataset[{some}]{where}, the samples at positions {positions[0]:,} to {positions[-1]:,}"


def slots(workers: int) -> Any:
    """Shared memory for `Reader.begun`."""
    return RawArray("q", [-1, -1, 0] * workers)


def _worker() -> Any:
    """The worker of torch's DataLoader that this process is, or None; without torch it is none."""
    data = sys.modules.get("torch.utils.data")
    return data.get_worker_info() if data else None
