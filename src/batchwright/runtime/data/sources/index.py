"""Where the rows of a file begin: found in one pass, kept in a small file, and built anew when the file changes.

The index is a JSON line, padded to a multiple of 64 bytes, and then little-endian 64-bit integers: the bounds of the rows,
then one more list of the format's own. It lies beside a local file (`data.jsonl.rows`) if that folder can be written, else
in a folder for caches. Processes of one machine that need the same index wait for the first one.
"""

from __future__ import annotations

import fcntl
import json
import os
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from batchwright.rundir import atomic

from .access import Access
from .source import Int64s, Place, SpanSource
from .store import Stat, local_path, mapped

_SCHEMA = 1
_ALIGN = 64


@dataclass(frozen=True)
class RowIndex:
    """Row i is at bytes `bounds[i]` to `bounds[i + 1]`; `extra` belongs to the format."""

    bounds: Int64s
    extra: Int64s


class IndexedSource(SpanSource):
    """A source whose rows are found through an index, which is kept beside the file or in `index_folder`."""

    _kind: ClassVar[str]

    def __init__(
        self, path: str | Path | Sequence[str | Path], index_folder: str | Path | None, access: Access | None
    ) -> None:
        super().__init__(path, access)
        self.index_folder = index_folder

    @abstractmethod
    def _build(self, url: str, size: int) -> RowIndex:
        """Find the rows of a file."""

    @cached_property
    def _indexes(self) -> list[RowIndex]:
        return [
            find_or_build(url, stat, self._kind, self.index_folder, lambda u=url, s=stat: self._build(u, s.size))
            for url, stat in zip(self.files, self._stats, strict=True)
        ]

    def _count(self, file: int) -> int:
        return len(self._indexes[file].bounds) - 1

    def _span(self, place: Place) -> tuple[int, int]:
        bounds = self._indexes[place.file].bounds
        return int(bounds[place.row]), int(bounds[place.row + 1])


def find_or_build(
    url: str, stat: Stat, kind: str, folder: str | Path | None, build: Callable[[], RowIndex]
) -> RowIndex:
    """The index of a file: the stored one if it is of this version of the file, else a new one, which is stored."""
    # Without a version, a changed file of the same size would not be noticed: nothing is kept.
    candidates = list(_candidates(url, folder)) if stat.version else []
    expected = {"schema": _SCHEMA, "kind": kind, "size": stat.size, "version": stat.version}
    for path in candidates:
        if (found := _load(path, expected)) is not None:
            return found
    built: RowIndex | None = None
    for path in candidates:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with _one_builder(path):
                if (found := _load(path, expected)) is not None:  # another process was faster
                    return found
                built = built or build()
                _store(path, expected, built)
            return _load(path, expected) or built
        except OSError:  # the folder cannot be written: the next one
            continue
    return built or build()  # nothing can be written, so nothing is kept


def _candidates(url: str, folder: str | Path | None) -> Iterator[Path]:
    """Where an index may be, best first."""
    local = local_path(url)
    name = f"{sha256((os.path.abspath(local) if local else url).encode()).hexdigest()[:32]}.rows"
    if folder is not None:
        yield Path(folder) / name
        return
    if local is not None:
        yield Path(f"{local}.rows")
    try:
        yield Path.home() / ".cache" / "batchwright" / "rows" / name
    except RuntimeError:  # this user has no home
        return


@contextmanager
def _one_builder(path: Path) -> Generator[None]:
    """Let one process of this machine build an index. The lock is a file, and ends with the process."""
    descriptor = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError:  # a file system without locks: several processes build the same index, and one of them stays
            pass
        yield
    finally:
        Path(f"{path}.lock").unlink(missing_ok=True)
        os.close(descriptor)


def _store(path: Path, header: dict[str, Any], index: RowIndex) -> None:
    line = json.dumps(header | {"bounds": len(index.bounds), "extra": len(index.extra)}).encode()
    line += b" " * (-(len(line) + 1) % _ALIGN) + b"\n"
    body = b"".join(part.astype("<i8").tobytes() for part in (index.bounds, index.extra))
    atomic.write(path, line + body)


def _load(path: Path, expected: dict[str, Any]) -> RowIndex | None:
    """A stored index, memory-mapped; None if there is none, or not of this file and version, or damaged."""
    try:
        with open(path, "rb", opener=atomic.regular) as file:
            line = file.readline(64 * 1024)
            header = json.loads(line)
            if not isinstance(header, dict) or {key: header.get(key) for key in expected} != expected:  # pyright: ignore
                return None
            bounds, extra = int(header["bounds"]), int(header["extra"])  # pyright: ignore
            if bounds < 1 or extra < 0 or os.fstat(file.fileno()).st_size != len(line) + 8 * (bounds + extra):
                return None
            numbers = np.frombuffer(mapped(file), "<i8", offset=len(line))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if numbers[bounds - 1] > expected["size"] or numbers[0] < 0:
        return None
    return RowIndex(numbers[:bounds], numbers[bounds:])
