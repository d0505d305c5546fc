"""Parquet: rows are read by row groups, through pyarrow."""

from __future__ import annotations

import threading
from collections import OrderedDict, defaultdict
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np

from batchwright.core.errors import MissingExtraError, PlanError, RunError, did_you_mean

from .access import Access, shown
from .source import Int64s, Place, Source
from .store import RangeFile


class Parquet(Source):
    """Parquet files with the same columns, as one source; a row is a dictionary of Python values.

        rows = Parquet(["s3://bucket/0.parquet", "s3://bucket/1.parquet"], columns=["text"])

    Parquet can only be read by row groups: for one row, its whole row group is read and decoded, in the selected columns.
    Rows of one request that lie in one row group share it, and the last `cached_row_groups` stay in memory. In a random
    order most rows need a row group of their own: write small row groups (`row_group_size=256`), and see `source.reads`.
    """

    def __init__(
        self,
        path: str | Path | Sequence[str | Path],
        *,
        columns: Sequence[str] | None = None,
        cached_row_groups: int = 2,
        access: Access | None = None,
    ) -> None:
        super().__init__(path, access)
        self.columns = None if columns is None else list(columns)
        if cached_row_groups < 0:
            raise PlanError(
                f"cached_row_groups={cached_row_groups} must be at least 0.",
                field="cached_row_groups",
                given=cached_row_groups,
                nearest=(0,),
            )
        self.cached_row_groups = cached_row_groups

    @cached_property
    def _opened(self) -> list[tuple[RangeFile, Any]]:
        """Each file, and as pyarrow's ParquetFile; the footer is read once."""
        try:
            import pyarrow.parquet as pq  # pyright: ignore[reportMissingTypeStubs]
        except ImportError as error:
            raise MissingExtraError(
                "Parquet needs the package pyarrow, which is not installed: pip install 'batchwright[data]'.",
                field="extra",
                given="pyarrow",
                nearest=("batchwright[data]",),
            ) from error
        opened: list[tuple[RangeFile, Any]] = []
        for url, stat in zip(self.files, self._stats, strict=True):
            file = self._store.file(url, stat.size, "its footer")
            with self._named(file, url):
                opened.append((file, cast(Any, pq).ParquetFile(file, pre_buffer=True)))
            self._check_columns(url, opened[0][1].schema_arrow, opened[-1][1].schema_arrow)
        return opened

    def _check_columns(self, url: str, first: Any, schema: Any) -> None:
        names = cast("list[str]", schema.names)
        for name in self.columns or ():
            if name not in names:
                near = get_close_matches(name, names, 3)
                raise PlanError(
                    f"{shown(url)} has no column {name!r}: it has {', '.join(names)}.{did_you_mean(near)}",
                    field="columns",
                    given=name,
                    nearest=near,
                )
        chosen = self.columns or cast("list[str]", first.names)
        differing = [n for n in chosen if n not in names or first.field(n).type != schema.field(n).type]
        extra = [n for n in names if n not in first.names] if self.columns is None else []
        if differing or extra:
            raise PlanError(
                f"{shown(url)} has other columns than {shown(self.files[0])}: {', '.join([*differing, *extra])}. "
                "Files of one source have the same names and types; columns= selects the common ones.",
                field="columns",
                given=shown(url),
            )

    @cached_property
    def _group_ends(self) -> list[Int64s]:
        """For each file, the number of rows up to the end of each row group."""
        counts = [[f.metadata.row_group(g).num_rows for g in range(f.num_row_groups)] for _, f in self._opened]
        return [np.cumsum(c, dtype=np.int64) for c in counts]

    def _count(self, file: int) -> int:
        return int(self._opened[file][1].metadata.num_rows)

    def _rows(self, places: Sequence[Place]) -> list[Any]:
        groups: defaultdict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
        for at, place in enumerate(places):
            ends = self._group_ends[place.file]
            group = int(np.searchsorted(ends, place.row, side="right"))
            groups[place.file, group].append((at, place.row - (int(ends[group - 1]) if group else 0)))
        rows: list[Any] = [None] * len(places)
        # What is in memory first: reading the others may push it out.
        for key in sorted(groups, key=lambda k: (k not in self._cache, k)):
            table = self._group(*key, row=places[groups[key][0][0]].number)
            taken = table.take([row for _, row in groups[key]]).to_pylist()
            for (at, _), value in zip(groups[key], taken, strict=True):
                rows[at] = value
        return rows

    @cached_property
    def _cache(self) -> OrderedDict[tuple[int, int], Any]:
        return OrderedDict()

    @cached_property
    def _lock(self) -> Any:
        return threading.RLock()

    def _group(self, file: int, group: int, row: int) -> Any:
        """A row group as a table, from memory or read."""
        with self._lock:
            key = file, group
            if key in self._cache:
                self._cache.move_to_end(key)
                return self._cache[key]
            raw, opened = self._opened[file]
            raw.what = f"row group {group:,}, row {row:,}"
            with self._named(raw, self.files[file]):
                # One thread: rows are few, and loader workers are the parallel part.
                table = opened.read_row_group(group, columns=self.columns, use_threads=False)
            self._cache[key] = table
            while len(self._cache) > self.cached_row_groups:
                self._cache.popitem(last=False)
            return table

    @contextmanager
    def _named(self, file: RangeFile, url: str) -> Generator[None]:
        """Errors of pyarrow get the file and the part."""
        import pyarrow as pa  # pyright: ignore[reportMissingTypeStubs]

        try:
            yield
        except (cast(Any, pa).ArrowException, OSError) as error:
            raise RunError(f"{shown(url)} ({file.what}) cannot be read as Parquet: {error}", field="path") from error
