"""The requests of a reading host: which rows its workers read at once, and for whom."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from batchwright.core.batch.loading import share

from .hosts import LoadBatch, load_batches
from .order import GlobalOrder
from .reading import Reader
from .rows import pack
from .sampler import StepSampler

if TYPE_CHECKING:
    from .readers import ReadingHosts

# Rows of one request of a reading host, at most: before the size of a row is known, where rows are read one by one (so that
# a slow reader delivers often), and where many are read at once. And bytes, by the largest row of the blocks before.
_FIRST_ROWS, _SINGLE_ROWS, _MOST_ROWS = 16, 32, 256
_MOST_BYTES = 64 << 20


class Request:
    """One request of a reader: neighbouring positions of a load batch, and the positions of them that each rank needs."""

    __slots__ = ("batch", "ids", "positions", "served")

    def __init__(self, batch: LoadBatch, positions: range, ids: list[int], served: dict[int, list[range]]) -> None:
        self.batch, self.positions, self.ids, self.served = batch, positions, ids, served


@dataclass
class Requests:
    """What this rank reads for all ranks: its rows of every load batch, in at least as many requests as it has workers."""

    sampler: StepSampler
    order: GlobalOrder
    hosts: ReadingHosts
    read_ahead: int
    parts: int
    batched: bool
    """Rows are read many at once."""
    row_bytes: int = 0
    """The largest average of a block so far."""
    given: deque[Request] = field(default_factory=deque[Request])
    """Requests that the workers have, oldest first."""
    last: Request | None = None

    def __iter__(self) -> Iterator[Request]:
        self.given = deque()
        return self._each(self.given)

    def _each(self, given: deque[Request]) -> Iterator[Request]:
        reader, readers, ranks = self.hosts.reader, len(self.hosts.readers), self.hosts.ranks
        assert reader is not None
        for batch in load_batches(self.sampler, self.read_ahead):
            own = rest = batch.read_by(reader, readers)
            ids: list[int] = self.order.ids(own).tolist() if own else []
            made = 0
            while rest:
                part = share(rest, 0, max(self.parts - made, -(-len(rest) // self.limit)))
                rest, made = rest[len(part) :], made + 1
                here = ids[part.start - own.start : part.stop - own.start]
                given.append(Request(batch, part, here, batch.served(part, ranks)))
                yield given[-1]

    @property
    def limit(self) -> int:
        """Rows of the next request, at most."""
        if not self.row_bytes:
            return _FIRST_ROWS
        return max(1, min(_MOST_ROWS if self.batched else _SINGLE_ROWS, _MOST_BYTES // self.row_bytes))

    def issued(self) -> Iterator[Request]:
        """The requests in their order. The DataLoader gives the workers one before it returns the result of another."""
        given = self.given
        while given:
            self.last = given.popleft()
            yield self.last

    def arrived(self, size: int) -> None:
        """The block of the last request has `size` bytes."""
        assert self.last is not None
        rows = sum(len(part) for parts in self.last.served.values() for part in parts)
        self.row_bytes = max(self.row_bytes, -(-size // rows))


@dataclass(frozen=True)
class Packer:
    """Runs in the workers of a reading host: reads a request and packs the rows of each rank."""

    reader: Reader

    def __getitem__(self, request: Request) -> tuple[torch.Tensor, list[int]]:
        with self.reader.own_generators():
            rows = self.reader.rows(request.positions, request.ids)
        first = request.positions.start
        blocks = [
            pack([rows[position - first] for part in parts for position in part]) for parts in request.served.values()
        ]
        edges = [0, *accumulate(map(len, blocks))]
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks), edges
