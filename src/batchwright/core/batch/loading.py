"""Which hosts read the batch, how many rows each reads, and which stored shards each host continues with.

A host is one reading process. The factor is all hosts / reading hosts:

    factor > 1       a subset reads. The assembled array has global × factor rows, the real ones first, so the readers
                     are hosts 0, 1, …; rows of hosts that do not read are placeholders and are never trained on
    factor = 1       every host reads its share
    0 < factor < 1   fewer hosts continue from the shards that hosts / factor of them stored; the load batch is the
                     global batch

This does not change the order of samples: reading hosts only partition a step's span (see the concepts page).
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from batchwright.core.errors import PlanError


def share(span: range, part: int, parts: int) -> range:
    """Part `part` of `span` in `parts` contiguous parts; the lengths of two parts differ by at most one.

    >>> [share(range(100, 110), part, 4) for part in range(4)]
    [range(100, 103), range(103, 106), range(106, 108), range(108, 110)]
    """
    length, longer = divmod(len(span), parts)
    start = part * length + min(part, longer)
    return span[start : start + length + (part < longer)]


def part_of(span: range, position: int, parts: int) -> int:
    """The part of `span` that has `position`: the inverse of `share`.

    >>> [part_of(range(100, 110), position, 4) for position in range(100, 110)]
    [0, 0, 0, 1, 1, 1, 2, 2, 3, 3]
    """
    length, longer = divmod(len(span), parts)
    at = position - span.start
    if at < longer * (length + 1):
        return at // (length + 1)
    return longer + (at - longer * (length + 1)) // length


@dataclass(frozen=True)
class Loading:
    """The loading part of a plan; `rows_per_loading_host` is a list if the shares are uneven."""

    load_batch_size: int
    hosts: int
    loading_hosts: int
    expansion_factor: Fraction
    rows_per_loading_host: int | tuple[int, ...]
    placeholder_rows: int
    rows_read: int
    read_amplification: float
    read_ahead: int = 1
    stored_shards: int | None = None
    shards_per_host: int | tuple[int, ...] | None = None

    def reads(self, host: int) -> bool:
        """Whether this host reads."""
        return host < self.loading_hosts

    def rows(self, host: int) -> range:
        """The rows of a step's batch that this host reads.

        >>> [len(loading(10, hosts=8, loading_hosts=4).rows(h)) for h in range(8)]
        [3, 3, 2, 2, 0, 0, 0, 0]
        """
        total = self.load_batch_size - self.placeholder_rows
        return share(range(total), host, self.loading_hosts) if self.reads(host) else range(total, total)

    def shards(self, host: int) -> range:
        """The stored shards that this host continues with: host, host + hosts, …

        >>> list(loading(512, hosts=128, expansion_factor=Fraction(1, 2)).shards(3))
        [3, 131]
        """
        return range(host, self.stored_shards or 0, self.hosts)


def loading(
    global_batch_size: int,
    *,
    hosts: int,
    expansion_factor: Fraction | None = None,
    loading_hosts: int | None = None,
    stored_hosts: int | None = None,
    equal_rows: bool = False,
    read_ahead: int = 1,
) -> Loading:
    """The loading of a batch, from a factor or from numbers of hosts; the factor need not be whole.

    `equal_rows` is for loaders that need the same number of rows from every reader (arrays made of equal local
    parts): each then reads the largest share, and `read_amplification` counts the rows beyond the batch. `read_ahead` is the
    number of steps whose rows are read at once.

    >>> loading(512, hosts=8, expansion_factor=Fraction(2)).load_batch_size
    1024
    """
    given = {"expansion_factor": expansion_factor, "loading_hosts": loading_hosts, "stored_hosts": stored_hosts}
    named = [name for name, value in given.items() if value is not None]
    if len(named) > 1:
        raise PlanError(
            f"{' and '.join(named)} are mutually exclusive.",
            field=named[1],
            given=given[named[1]],
        )
    if expansion_factor is not None and expansion_factor <= 0:
        raise PlanError(
            f"expansion_factor={expansion_factor} must be above zero: it is all hosts / reading hosts.",
            field="expansion_factor",
            given=str(expansion_factor),
            nearest=(1,),
        )
    if loading_hosts is not None:
        if loading_hosts > hosts:
            raise PlanError(
                f"loading_hosts={loading_hosts} is more than the {hosts} hosts. Nearest: {hosts}. To continue "
                f"from the shards of {loading_hosts} hosts, give stored_hosts={loading_hosts}.",
                field="loading_hosts",
                given=loading_hosts,
                nearest=(hosts,),
            )
        expansion_factor = Fraction(hosts, loading_hosts)
    if stored_hosts is not None:
        if stored_hosts < hosts:
            raise PlanError(
                f"stored_hosts={stored_hosts} is fewer than the {hosts} hosts, so {hosts - stored_hosts} of "
                f"them have no shard to continue from. Nearest: {hosts}, or loading_hosts={stored_hosts}.",
                field="stored_hosts",
                given=stored_hosts,
                nearest=(hosts,),
            )
        expansion_factor = Fraction(hosts, stored_hosts)
    factor = Fraction(1) if expansion_factor is None else expansion_factor
    readers = hosts / max(Fraction(1), factor)
    if readers.denominator != 1:
        raise PlanError(
            f"expansion_factor={factor} does not give a whole number of reading hosts: {hosts} / {factor} = "
            f"{float(readers):.2f}. Nearest: {_factors(hosts, readers)}.",
            field="expansion_factor",
            given=str(factor),
            nearest=[str(Fraction(hosts, n)) for n in (readers.__floor__(), readers.__ceil__()) if n],
        )
    shards = hosts / factor if factor < 1 else None
    if shards is not None and shards.denominator != 1:
        raise PlanError(
            f"expansion_factor={factor} does not give a whole number of storing hosts: {hosts} / {factor} = "
            f"{float(shards):.2f}. Nearest: {_factors(hosts, shards)}.",
            field="expansion_factor",
            given=str(factor),
            nearest=[str(Fraction(hosts, n)) for n in (shards.__floor__(), shards.__ceil__()) if n],
        )
    real = global_batch_size * read_ahead
    load = (real * max(Fraction(1), factor)).__ceil__()
    rows = _shares(real, int(readers))
    if equal_rows and not isinstance(rows, int):
        rows = rows[0]
    rows_read = rows * int(readers) if isinstance(rows, int) else real
    return Loading(
        load_batch_size=load,
        hosts=hosts,
        loading_hosts=int(readers),
        expansion_factor=factor,
        rows_per_loading_host=rows,
        placeholder_rows=load - real,
        rows_read=rows_read,
        read_amplification=rows_read / real,
        read_ahead=read_ahead,
        stored_shards=None if shards is None else int(shards),
        shards_per_host=None if shards is None else _shares(int(shards), hosts),
    )


def readers_on(hosts: int, loading_hosts: int | None, expansion_factor: Fraction | None) -> int | None:
    """How many of `hosts` read in a stage of a run, whose stages have other numbers of hosts; None: not asked for.

    A count is the most that read; a factor is rounded up. Neither changes which samples are trained.

    >>> [readers_on(hosts, 2, None) for hosts in (1, 2, 4)], [readers_on(hosts, None, Fraction(2)) for hosts in (1, 3, 4)]
    ([1, 2, 2], [1, 2, 2])
    """
    if loading_hosts is not None:
        return min(loading_hosts, hosts)
    if expansion_factor in (None, 1):
        return None
    return max(1, (hosts / expansion_factor).__ceil__())


RESERVE = 2  # readers take at most this part of a step


@dataclass(frozen=True)
class Storage:
    """What the model of docs/data.md assumes of the storage, the network and a reading host."""

    request_rows: int = 1
    """Rows of one request. 1: rows in random order of files; 256: rows that lie together, or a store that takes many ids."""
    workers: int = 8
    """Of a reading host: `num_workers`. A worker reads up to 256 rows at a time."""
    connections: int = 4
    """Requests of a worker at the same time, at most (`Access.connections`)."""
    request_seconds: float = 0.1
    """Until the first byte of an answer; assumed, of an object store."""
    stream_bytes: float = 50e6
    """Bytes per second of one connection; assumed, of an object store."""
    send_bytes: float = 1e9
    """Bytes per second that a host sends; assumed, of a network of 10 Gbit/s."""

    @property
    def at_once(self) -> int:
        """Requests of a reading host at the same time, at most.

        >>> Storage().at_once, Storage(request_rows=256).at_once
        (32, 8)
        """
        return self.workers * min(self.connections, -(-_READ_AT_ONCE // self.request_rows))


_READ_AT_ONCE = 256
MANY_ROWS = Storage(request_rows=_READ_AT_ONCE)


@dataclass(frozen=True)
class ReaderLoad:
    """What one step costs with a number of reading hosts, by the model of docs/data.md."""

    loading_hosts: int
    connections: int
    read_seconds: float
    send_seconds: float
    sent_bytes: float
    """Per reading host and step."""


def reader_load(
    rows: int, row_bytes: float, hosts: int, loading_hosts: int, storage: Storage | None = None
) -> ReaderLoad:
    """The model: each reader reads its rows in requests over several connections, and sends what it does not keep.

    >>> reader_load(4096, 16384, hosts=1000, loading_hosts=8).connections
    256
    """
    storage = storage or Storage()
    own = -(-rows // loading_hosts)
    connections = min(storage.at_once, own)
    each = -(-own // connections)  # rows over one connection
    requests = -(-each // storage.request_rows)
    read = requests * storage.request_seconds + each * row_bytes / storage.stream_bytes
    sent = own * row_bytes * (1 - loading_hosts / hosts)
    return ReaderLoad(loading_hosts, loading_hosts * connections, read, sent / storage.send_bytes, sent)


def enough_readers(
    rows: int, row_bytes: float, hosts: int, step_seconds: float, storage: Storage | None = None
) -> ReaderLoad | None:
    """The fewest reading hosts that read and send a step's rows in half of a step; None if all hosts are too few.

    >>> [enough_readers(4096, 16384, 1000, 2.0, storage).loading_hosts for storage in (Storage(), MANY_ROWS)]
    [15, 1]
    """
    low, high = 1, hosts + 1
    while low < high:
        middle = (low + high) // 2
        load = reader_load(rows, row_bytes, hosts, min(middle, hosts), storage)
        if max(load.read_seconds, load.send_seconds) * RESERVE <= step_seconds:
            high = middle
        else:
            low = middle + 1
    return reader_load(rows, row_bytes, hosts, low, storage) if low <= hosts else None


def _shares(total: int, parts: int) -> int | tuple[int, ...]:
    each, extra = divmod(total, parts)
    return each if not extra else (each + 1,) * extra + (each,) * (parts - extra)


def _factors(hosts: int, wanted: Fraction) -> str:
    return " or ".join(
        f"{Fraction(hosts, n)} ({n} host{'s' * (n > 1)})" for n in (wanted.__floor__(), wanted.__ceil__()) if n
    )
