"""Reads rows of a dataset: seeded by position, many at once where the dataset can, again after a failure.

Runs in the loader's worker processes, or in the main process without workers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any, Protocol

from torch.utils.data import get_worker_info

from batchwright.core.errors import RunError
from batchwright.runtime.state import generators

from .order import Ints
from .sampler import Slice

# Storage that does not answer now may answer later; a file that is not there will not be there.
_PASSING = (OSError, EOFError, HTTPException)
_LASTING = (FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError)
FIRST_WAIT = 0.5  # seconds before the first retry, doubled for each further one
LONGEST_WAIT = 30.0


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
    batched: bool = field(init=False)
    rows_read: int = field(default=0, init=False)
    """Rows that the dataset was asked for, again after a failure included."""

    def __post_init__(self) -> None:
        self.batched = callable(getattr(self.dataset, "__getitems__", None))
        if getattr(self.dataset, "retries_itself", False):
            self.retries = 0

    def __getitem__(self, index: tuple[Slice, Ints]) -> tuple[Slice, Ints, Any, int]:
        part, ids = index
        before = self.rows_read
        with self.own_generators():
            rows = self.rows(part.positions, ids.tolist())
            return part, ids, self.collated(rows, part.positions, ids), self.rows_read - before

    def own_generators(self) -> Any:
        """Sets the process's generators aside; a worker process uses its generators for nothing else."""
        return nullcontext() if get_worker_info() is not None else generators.put_back()

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
            rows = self._retried(lambda: self._together(ids), positions, ids)
            if generators.seen() == before:
                return rows
            self.batched = False
        return [self._row(position, id) for position, id in zip(positions, ids, strict=True)]

    def _together(self, ids: list[int]) -> list[Any]:
        self.rows_read += len(ids)
        rows = list(getattr(self.dataset, "__getitems__")(ids))  # noqa: B009
        if len(rows) != len(ids):
            raise RunError(
                f"dataset.__getitems__ returned {len(rows)} rows for {len(ids)} ids.", field="dataset", given=len(rows)
            )
        return rows

    def _row(self, position: int, id: int) -> Any:
        def read() -> Any:
            self.rows_read += 1
            generators.seed_sample(self.seed, position)
            return self.dataset[id]

        return self._retried(read, [position], [id])

    def _retried(self, read: Callable[[], Any], positions: Sequence[int], ids: list[int]) -> Any:
        wait = FIRST_WAIT
        for attempt in range(self.retries + 1):
            try:
                return read()
            except StopIteration as error:  # would end the caller's loop as if the data were complete
                raise RunError(f"{self.named(positions, ids)} raised StopIteration.") from error
            except Exception as error:
                passing = isinstance(error, _PASSING) and not isinstance(error, _LASTING)
                if not passing or attempt == self.retries:
                    again = f", {attempt + 1} times" if attempt else ""
                    error.add_note(f"batchwright: reading {self.named(positions, ids)}{again}")
                    raise
            self.pause(wait)
            wait = min(2 * wait, LONGEST_WAIT)
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
