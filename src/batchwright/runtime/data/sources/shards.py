"""Iterable datasets with known shards, by index; and which iterables cannot be read exactly."""

from __future__ import annotations

import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from functools import partial
from itertools import islice
from typing import Any, Literal

import numpy as np

from batchwright.core.errors import PlanError, RunError

from .access import Reads
from .source import Int64s, locate


class Shards:
    """Shards that can only be read from their start, with known numbers of rows, as one map-style source.

        Shards([partial(read_shard, url) for url in urls], rows=[10_000, 10_000, 7_312])

    Each shard is a function without arguments that returns its rows, the same ones in the same order every time. For one
    row its whole shard is read; the last `cached_shards` stay in memory, so shards must be small. A shard that has another
    number of rows than `rows` says is an error: the rows after it would be others.
    """

    def __init__(
        self, shards: Sequence[Callable[[], Iterable[Any]]], rows: Sequence[int], *, cached_shards: int = 2
    ) -> None:
        if len(shards) != len(rows) or not shards or min(rows) < 0:
            raise PlanError(
                f"rows has {len(rows):,} numbers for {len(shards):,} shards: every shard needs its number of rows, at least 0.",
                field="rows",
                given=str(list(rows[:10])),
            )
        if cached_shards < 0:
            raise PlanError(
                f"cached_shards={cached_shards} must be at least 0.",
                field="cached_shards",
                given=cached_shards,
                nearest=(0,),
            )
        self.shards, self.rows, self.cached_shards = list(shards), list(rows), cached_shards
        self.reads = Reads()
        self._ends: Int64s = np.cumsum(self.rows, dtype=np.int64)
        self._cache: OrderedDict[int, list[Any]] = OrderedDict()
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k != "_lock"} | {"_cache": OrderedDict[int, list[Any]]()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int, /) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indexes: Sequence[int], /) -> list[Any]:
        """The rows at `indexes`, in that order. Each shard is read once."""
        wanted: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        for at, place in enumerate(locate(indexes, self._ends, "the shards")):
            wanted[place.file].append((at, place.row))
        found: list[Any] = [None] * len(indexes)
        with self._lock:
            for shard in sorted(wanted, key=lambda s: (s not in self._cache, s)):
                rows = self._shard(shard)
                for at, row in wanted[shard]:
                    found[at] = deepcopy(rows[row])  # a row that is changed must not change the next epoch
        self.reads.add(rows=len(found))
        return found

    def describe(self, index: int) -> str:
        """The shard and the row in it, for errors."""
        [place] = locate([index], self._ends, "the shards")
        return f"row {place.row:,} of shard {place.file:,}"

    def _shard(self, shard: int) -> list[Any]:
        if shard in self._cache:
            self._cache.move_to_end(shard)
            return self._cache[shard]
        self.reads.add(requests=1)
        rows = list(islice(self.shards[shard](), self.rows[shard] + 1))  # one more shows a shard that is too long
        if len(rows) != self.rows[shard]:
            has = f"more than {self.rows[shard]:,}" if len(rows) > self.rows[shard] else f"{len(rows):,}"
            raise RunError(
                f"shard {shard:,} of {len(self.shards):,} has {has} rows, and rows[{shard}] says {self.rows[shard]:,}: the rows "
                "after it would be others. Count the shards again.",
                field="rows",
            )
        self._cache[shard] = rows
        while len(self._cache) > self.cached_shards:
            self._cache.popitem(last=False)
        return rows


def indexed(dataset: Any, *, rows: Sequence[int] | Literal["count"] | None = None, cached_shards: int = 2) -> Any:
    """A dataset whose rows can be read by index, or an error that says why this one cannot be.

    A map-style dataset (torch, Hugging Face) is returned as it is. An `IterableDataset` of Hugging Face becomes `Shards`
    if its order is fixed and `rows` has the number of rows of each of its shards; `rows="count"` reads it once to count
    them. Any other iterable is refused: nobody can say which row is at a position without reading all rows before it.
    """
    kind = f"{type(dataset).__module__.split('.')[0]}.{type(dataset).__name__}"
    if not kind.startswith("datasets.Iterable"):
        # By name, so that torch is not imported. Its streams have `__getitem__` and may have `__len__`.
        stream = any(base.__name__ == "IterableDataset" for base in type(dataset).__mro__)
        if hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__") and not stream:
            return dataset
        better = (
            "read the same tar files with TarShards"
            if kind.startswith("webdataset.")
            else "write its rows once to files that have an index (JsonLines, Parquet, TokenFile), or give Shards a function and "
            "a number of rows for each shard"
        )
        raise _inexact(kind, "its length and its order are not known", better)
    if moving := _random_parts(dataset):
        raise _inexact(
            kind,
            f"it changes the order or the number of rows as it goes, or counts them over all shards ({', '.join(moving)})",
            "pass the dataset as it was before that (the global order shuffles already; map row by row; filter, pack and write "
            "the rows once)",
        )
    count = int(dataset.num_shards)
    shards = [partial(_hf_shard, dataset, count, i) for i in range(count)]
    if rows is None:
        raise _inexact(
            kind,
            f"the numbers of rows of its {count:,} shards are not known",
            'pass rows=[…], one number for each shard, or rows="count" to read it once and count them',
        )
    counts = [sum(1 for _ in shard()) for shard in shards] if isinstance(rows, str) else rows
    return Shards(shards, counts, cached_shards=cached_shards)


def _hf_shard(dataset: Any, count: int, index: int) -> Iterable[Any]:
    return dataset.shard(num_shards=count, index=index)


def _random_parts(dataset: Any) -> list[str]:
    """Steps of a Hugging Face pipeline after which a shard, read alone, does not give the rows it gives in the whole."""
    # Shuffling moves rows between shards; taking, skipping, repeating and mixing count over all shards together. So do
    # indices, and batches have rows of neighbouring shards.
    inexact = ("Shuffle", "RandomlyCycling", "Cycling", "Take", "Skip", "Repeat", "Interleaved", "Step")
    options = ("batched", "with_indices", "drop_last_batch")
    found = [step for step in ("_shuffling", "_distributed") if getattr(dataset, step, None) is not None]
    waiting, seen = [getattr(dataset, "_ex_iterable", None)], set[int]()
    while waiting:
        part = waiting.pop()
        if part is None or id(part) in seen:
            continue
        seen.add(id(part))
        name = type(part).__name__
        if any(word in name for word in inexact):
            found.append(name)
        found += [f"{name}: {option}=True" for option in options if getattr(part, option, False)]
        waiting += [getattr(part, "ex_iterable", None), *(getattr(part, "ex_iterables", None) or ())]
    return [name.strip("_").replace("ExamplesIterable", "") for name in found]


def _inexact(kind: str, why: str, instead: str) -> PlanError:
    return PlanError(
        f"dataset={kind} cannot be read by index: {why}, so a run on another number of ranks or after a restart could "
        f"not train on the same rows. Instead, {instead}.",
        field="dataset",
        given=kind,
    )
