"""What all sources share: rows by index, one or many at a time, over one file or several.

A source is opened on first use and keeps what it found. A copy in another process opens it again and refuses files that
have changed in between: their rows would not be the same.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from batchwright.core.errors import RunError

from .access import Access, Reads, shown
from .store import Span, Stat, Store, paths

Int64s = npt.NDArray[np.int64]


class Place(NamedTuple):
    """A row: its file, its number in that file, and its number in the source."""

    file: int
    row: int
    number: int


def locate(indexes: Sequence[int], ends: Int64s, name: str) -> list[Place]:
    """The place of each row, if file k has the rows up to `ends[k]`. Negative indexes count from the end.

    >>> locate([0, 4, -1], np.array([3, 3, 5]), "x")
    [Place(file=0, row=0, number=0), Place(file=2, row=1, number=4), Place(file=2, row=1, number=4)]
    """
    size = int(ends[-1])
    numbers = [operator.index(i) for i in indexes]
    for number in numbers:
        if not -size <= number < size:
            raise IndexError(f"row {number:,} of {name}: there are {size:,} rows")
    wanted = np.array(numbers, np.int64)
    wanted[wanted < 0] += size
    files = np.searchsorted(ends, wanted, side="right")
    rows = wanted - np.concatenate(([0], ends))[files]
    return [Place(*place) for place in zip(files.tolist(), rows.tolist(), wanted.tolist(), strict=True)]


class Source(ABC):
    """A map-style dataset over files: `len(source)`, `source[i]`, and `source.__getitems__([i, j, …])` in one go."""

    retries_itself = True  # the loader does not retry as well

    def __init__(self, path: str | Path | Sequence[str | Path], access: Access | None) -> None:
        self.files: tuple[str, ...] = paths(path)
        self.access = access or Access()
        self._store = Store(self.access)
        self._seen: list[Stat] | None = None

    @property
    def reads(self) -> Reads:
        """What this source has read in this process: rows, requests, bytes, retries, seconds."""
        return self._store.reads

    @cached_property
    def _ends(self) -> Int64s:
        """For each file, the number of rows up to its end."""
        return np.cumsum([self._count(file) for file in range(len(self.files))], dtype=np.int64)

    @cached_property
    def _stats(self) -> list[Stat]:
        """Size and version of each file, the same in every process."""
        found = self._store.stat(self._watched())
        for url, old, new in zip(self._watched(), self._seen or found, found, strict=True):
            if old != new:
                raise RunError(
                    f"{shown(url)} has changed since the source was opened: {old.size:,} bytes then (version "
                    f"{old.version or '-'}), {new.size:,} now (version {new.version or '-'}). "
                    "Open the source anew in the main process.",
                    field="path",
                )
        self._seen = found
        return found

    def __getstate__(self) -> dict[str, Any]:
        opened = {
            name for kind in type(self).__mro__ for name, v in vars(kind).items() if isinstance(v, cached_property)
        }
        return {name: value for name, value in self.__dict__.items() if name not in opened}

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int, /) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indexes: Sequence[int], /) -> list[Any]:
        """The rows at `indexes`, in that order. Rows that lie close together are read in one request."""
        rows = self._rows(locate(indexes, self._ends, shown(self.files[0])))
        self.reads.add(rows=len(rows))
        return rows

    def describe(self, index: int) -> str:
        """The file and the row in it, for errors. Nothing is opened for that: else only the files are named."""
        if "_ends" not in self.__dict__:
            return repr(self)
        [place] = locate([index], self._ends, shown(self.files[0]))
        return f"row {place.row:,} of {shown(self.files[place.file])}"

    def _watched(self) -> Sequence[str]:
        """The files whose size and version are looked up when the source is opened."""
        return self.files

    @abstractmethod
    def _count(self, file: int) -> int:
        """Number of rows in a file."""

    @abstractmethod
    def _rows(self, places: Sequence[Place]) -> list[Any]:
        """The rows at some places."""

    def __repr__(self) -> str:
        first, *others = self.files
        return f"{type(self).__name__}({shown(first)!r}{f' and {len(others):,} more' if others else ''})"


class SpanSource(Source):
    """A source whose rows are byte ranges."""

    @abstractmethod
    def _span(self, place: Place) -> tuple[int, int]:
        """The bytes of a row."""

    @abstractmethod
    def _decode(self, body: bytes, place: Place) -> Any:
        """The row that these bytes hold. Called once for each row, so that no two rows share an object."""

    def _rows(self, places: Sequence[Place]) -> list[Any]:
        spans = [Span(self.files[p.file], *self._span(p), p.number) for p in places]
        return [self._decode(body, place) for body, place in zip(self._store.read(spans), places, strict=True)]
