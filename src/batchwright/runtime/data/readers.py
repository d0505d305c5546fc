"""Hosts that read for others: rows go from the ranks that read to the ranks that train on them, in the background.

Two threads of a rank, both of its own iteration:

    send      on reading hosts: takes what the loader's worker processes have read and sends each rank its rows
    receive   on every rank: asks for one load batch after the other and keeps the rows until the trainer takes them

A rank asks a reader, which may be itself, for a load batch when it has room for it, so a slow trainer holds the readers
back: at most `ROOM` load batches of its own rows wait on a rank. All messages have one order, by load batch and position.
Every sender sends and every receiver receives in that order, so the earliest message that is not sent yet can always be sent,
and nobody waits forever.

torch's gloo, what the code has to respect (all observed): threads need a process group beside that of the training; `isend`
does not copy; messages of one tag match in the order of their calls; a message larger than the receiver's buffer aborts the
process, so its size comes first; a wait that times out closes the connection, so a wait has no limit, and the trainer's own
wait has one.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from hashlib import sha256
from queue import Empty, SimpleQueue
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from batchwright.core.errors import PlanError, RunError
from batchwright.runtime.answers import Answer

from .hosts import Hosts, LoadBatch, LoadingHosts, checked
from .requests import Request
from .rows import unpack

ROOM = 2
"""Load batches of its own rows that a rank holds at most, without the one that it trains on."""
_FOREVER = timedelta(days=10_000)
# Of collectives that begin a job: their ranks may come late.
_OPENING = timedelta(days=1)
OPEN_TIMEOUT = 1740.0
"""Seconds for a reader to open its dataset, which may build an index and so read all of it; less than the supervisor's limit
for the first step."""
_STOP = -1
_ERROR = -2
_CLOSING_SECONDS = 5.0
T = TypeVar("T")
S = TypeVar("S")
# torch's annotations of its collectives are incomplete.
_gloo = cast(Any, dist)


class ReadingHosts:
    """The hosts of a job, those that read, and the gloo group over which rows are sent. Made on all ranks at once.

        hosts = ReadingHosts(2, rank=rank, ranks=ranks)
        order = GlobalOrder(hosts.length(dataset))
        for micro in Loader(dataset, order, sampler, loading_hosts=hosts): ...

    Ranks with one host name are on one host; `ranks_per_host` says otherwise: a number, or the host of every rank. `group`
    has the processes that hold different samples, in the order of their data-parallel ranks: `mesh.get_group("dp")`. By default
    these are all processes. Rows are sent over a new gloo group of the same processes. A reader whose `len(dataset)` has not
    returned after `open_timeout` seconds is named in a RunError on the others.
    """

    def __init__(
        self,
        loading_hosts: LoadingHosts,
        *,
        rank: int,
        ranks: int,
        ranks_per_host: int | Sequence[int] | None = None,
        group: dist.ProcessGroup | None = None,
        open_timeout: float = OPEN_TIMEOUT,
    ) -> None:
        self.rank, self.ranks = rank, ranks
        given = checked(loading_hosts)
        self.group: Any = None if ranks == 1 else _own_group(ranks, group)
        own = rank, socket.gethostname(), f"loading_hosts={given}, ranks_per_host={ranks_per_host}"
        everyone = self._gathered(own)
        for place, (other, _, said) in enumerate(everyone):
            # Ranks that disagree would wait for each other.
            if (other, said) != (place, own[2]):
                raise PlanError(
                    f"the ranks of loading_hosts do not agree: rank {rank} of {ranks} has {own[2][:200]}; process {place} of the "
                    f"group is rank {other} and has {said[:200]}. Give all ranks the same values, and a group in the order of "
                    "the data-parallel ranks.",
                    field="loading_hosts",
                    given=str(given)[:60],
                )
        self.names = [name for _, name, _ in everyone]
        numbers = {name: number for number, name in enumerate(dict.fromkeys(self.names))}
        by_name = [numbers[name] for name in self.names]
        self.hosts = Hosts.of(ranks, given, by_name if ranks_per_host is None else ranks_per_host)
        self.readers = self.hosts.readers
        self.reader = self.readers.index(rank) if rank in self.readers else None
        """This rank's number among the readers; None if it does not read."""
        self.iterations = 0
        self._open_timeout, self._opened = open_timeout, 0
        self.unanswered: list[tuple[Any, torch.Tensor]] = []
        """Messages that nobody waits for: their memory must stay."""

    def length(self, dataset: Any, given: Mapping[str, Any] | None = None) -> int:
        """`len(dataset)`, which only the readers ask: no other host opens the dataset. Called on all ranks at once.

        What the ranks were `given` must be the same on all: a reader sends the rows of its own order and schedule.
        """
        own = {name: repr(value) for name, value in (given or {}).items()}
        said = {name: sha256(text.encode()).digest() for name, text in own.items()}
        failure = f"{self.named(self.rank)} could not open the dataset"
        found, everyone = self._answers("len(dataset)", self.readers, lambda: len(dataset), failure, said)
        if len(set(found.values())) > 1:
            shown = ", ".join(f"{one:,} on {self.named(rank)}" for rank, one in list(found.items())[:4])
            raise RunError(f"the readers have datasets of different lengths: {shown}.", field="dataset")
        for rank, other in enumerate(everyone):
            for name in other:
                if other[name] != everyone[0][name]:
                    texts = self._gathered(own[name] if self.rank in (0, rank) else "")
                    first, second = differing(texts[0], texts[rank])
                    raise PlanError(
                        f"the ranks were given different values of {name}: {first} on {self.named(0)}, "
                        f"{second} on {self.named(rank)}. Give all ranks the same.",
                        field=name,
                    )
        return found[self.readers[0]]

    def from_first(self, what: str, question: Callable[[], T]) -> T:
        """What `question()` about the dataset returns on the first reader, on all ranks, which call this at once; its error is
        raised on all of them. `what` names it in errors.
        """
        failure = f"{self.named(self.rank)}: {what} failed"
        return self._answers(what, self.readers[:1], question, failure)[0][self.readers[0]]

    def _answers(
        self, what: str, readers: tuple[int, ...], question: Callable[[], T], failure: str, said: S | None = None
    ) -> tuple[dict[int, T], list[S]]:
        """What `question()` returns on some readers, and what every rank has `said`. An error is raised on all ranks."""
        own = Answer(question if self.rank in readers else None, failure, "dataset")
        self._await(what, readers)
        everyone: list[tuple[Any, S]] = self._gathered((own.sent, said))
        return {rank: own.heard(everyone[rank][0]) for rank in readers}, [other for _, other in everyone]

    def _await(self, what: str, readers: tuple[int, ...]) -> None:
        """Wait until some readers have answered. A collective would not say who is missing."""
        if self.group is None:
            return
        store = self.group.get_group_store()
        keys = {rank: f"batchwright/opened/{self._opened}/{rank}" for rank in readers}
        self._opened += 1
        if self.rank in keys:
            store.set(keys[self.rank], "1")
        try:
            store.wait(list(keys.values()), timedelta(seconds=self._open_timeout))
        except RuntimeError:
            late = [self.named(rank) for rank, key in keys.items() if not store.check([key])]
            if not late:  # it came this moment
                return
            more = f" and {len(late) - 4} more" if len(late) > 4 else ""
            raise RunError(
                f"{what} has not returned for {self._open_timeout:g} s on {', '.join(late[:4])}{more}: it hangs, or "
                "opening the dataset takes longer than open_timeout.",
                field="open_timeout",
                given=self._open_timeout,
            ) from None

    def _gathered(self, own: Any) -> list[Any]:
        """What every rank has given, by rank."""
        if self.group is None:
            return [own]
        everyone: list[Any] = [None] * self.ranks
        _gloo.all_gather_object(everyone, own, group=self.group)
        return everyone

    def named(self, rank: int) -> str:
        """A rank's host, for errors: `host 1 (gpu-17, rank 8)`."""
        return f"host {self.hosts.of_rank[rank]} ({self.names[rank]}, rank {rank})"


def differing(one: str, other: str) -> tuple[str, str]:
    """Two texts, at most 200 characters of each: of long ones, the beginning and what is around their first difference.

    >>> differing("a" * 500 + "b", "a" * 500 + "c")[0] == "a" * 40 + " … " + "a" * 40 + "b"
    True
    """
    pairs = enumerate(zip(one, other, strict=False))
    same = next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))
    if same < 100:
        return one[:200], other[:200]
    first, second = (f"{text[:40]} … {text[same - 40 : same + 110]}" for text in (one, other))
    return first, second


def _own_group(ranks: int, group: dist.ProcessGroup | None) -> Any:
    """A gloo group of the same processes, beside those of the training."""
    there = dist.get_world_size(group) if dist.is_initialized() else 1
    if there != ranks:
        raise PlanError(
            f"loading_hosts needs a process group of the {ranks} data-parallel ranks, and {'group' if group else 'the job'} has "
            f"{there} processes. Pass ReadingHosts(group=…): the processes that hold different samples, in the order of their "
            'data-parallel ranks, such as mesh.get_group("dp").',
            field="group",
        )
    members = dist.get_process_group_ranks(group)
    # Other processes, such as those of the same mesh, make groups of their own.
    return _gloo.new_group(
        members, backend="gloo", timeout=_OPENING, use_local_synchronization=group is not None, sort_ranks=False
    )


class Exchange:
    """One iteration on one rank: its two threads, and the rows that have arrived.

    `requests` and `reads` are None on ranks that do not read; `reads` yields, for every request, the block of packed rows
    and where each rank's part of it begins. `row` names the row at a position, `under_way` the rows that this rank's
    workers read now.
    """

    def __init__(
        self,
        hosts: ReadingHosts,
        batches: Callable[[], Iterator[LoadBatch]],
        requests: Iterator[Request] | None,
        reads: Iterator[tuple[torch.Tensor, list[int]]] | None,
        timeout: float,
        row: Callable[[int], str],
        under_way: Callable[[], str],
    ) -> None:
        self._hosts, self._batches, self._requests, self._reads = hosts, batches, requests, reads
        self._timeout, self._row, self._under_way = timeout, row, under_way
        self._tag = 2 * hosts.iterations
        hosts.iterations += 1
        self._arrived: SimpleQueue[tuple[list[Any], bool] | BaseException | None] = SimpleQueue()
        self._own: SimpleQueue[tuple[int, int, torch.Tensor] | None] = SimpleQueue()
        self._own_asks: SimpleQueue[int] = SimpleQueue()
        self._room = threading.Semaphore(ROOM)
        self._stopped = False
        self._failure: str | None = None
        self._awaited: tuple[int, int] | None = None
        self._threads = [threading.Thread(target=self._receive, name="batchwright-receive", daemon=True)]
        if reads is not None:
            self._threads.append(threading.Thread(target=self._send, name="batchwright-send", daemon=True))
        for thread in self._threads:
            thread.start()

    def take(self) -> list[Any]:
        """The next rows of this rank, in the order of their positions."""
        try:
            found = self._arrived.get(timeout=self._timeout)
        except Empty:
            raise RunError(self._late(), field="read_timeout", given=self._timeout) from None
        if found is None:
            raise RunError("the rows ended before the schedule did.")
        if isinstance(found, BaseException):
            raise found
        rows, last = found
        if last:
            self._room.release()
        return rows

    def complete(self) -> None:
        """Wait until every rank has the rows that this rank has read for it."""
        for thread in self._threads:
            thread.join()

    def stop(self) -> bool:
        """Ask for no more rows; False if a thread still runs.

        A read or a message under way may outlast this: the thread ends after it, or with the process.
        """
        self._end()
        for thread in self._threads:
            thread.join(_CLOSING_SECONDS)
        return not any(thread.is_alive() for thread in self._threads)

    def fail(self, error: BaseException) -> None:
        """This rank has failed and reads no more: ranks that wait for its rows are told why."""
        self._failure = f"this rank has failed: {type(error).__name__}: {error}"
        self._end()

    def _end(self) -> None:
        self._stopped = True
        self._room.release()
        self._own_asks.put(_STOP)

    def _late(self) -> str:
        if self._awaited is None:
            return f"no rows arrived for {self._timeout:g} s, and no reader was asked for any."
        rank, position = self._awaited
        reading = f" Its workers read {self._under_way()}." if rank == self._hosts.rank else ""
        return (
            f"{self._hosts.named(rank)} has delivered no rows for {self._timeout:g} s, from {self._row(position)} on: it "
            "hangs, or a read takes longer than read_timeout. No row was skipped: the run continues at the last checkpoint."
            f"{reading}"
        )

    # -- threads

    def _receive(self) -> None:
        hosts = self._hosts
        try:
            for batch in self._batches():
                self._room.acquire()
                if self._stopped:
                    break
                self._own_asks.put(batch.number)
                needed = batch.needed(hosts.rank, hosts.ranks)
                positions = (position for part in needed for position in part)
                sources = batch.sources(hosts.rank, hosts.ranks, len(hosts.readers))
                self._awaited = hosts.readers[next(iter(sources))], needed[0][0]
                asked: list[tuple[Any, torch.Tensor]] = []
                for reader in sources:
                    if hosts.readers[reader] != hosts.rank:
                        ask = torch.tensor([batch.number, batch.span.start, batch.span.stop])
                        asked.append((self._post("isend", ask, hosts.readers[reader], 1), ask))
                left = sum(sources.values())
                for reader, rows in sources.items():
                    while rows:
                        first = next(positions)
                        self._awaited = hosts.readers[reader], first
                        count, block = self._next(hosts.readers[reader], first)
                        rows, left = rows - count, left - count
                        for _ in range(count - 1):
                            next(positions)
                        self._arrived.put((unpack(block), not left))
                self._awaited = None
                for work, _ in asked:
                    work.wait(_FOREVER)
            if self._stopped:
                for rank in hosts.readers:
                    if rank != hosts.rank:
                        ask = torch.tensor([_STOP, 0, 0])
                        hosts.unanswered.append((self._post("isend", ask, rank, 1), ask))
        except BaseException as error:
            self._arrived.put(error)
        else:
            self._arrived.put(None)
        finally:
            self._own_asks.put(_STOP)

    def _next(self, rank: int, first: int) -> tuple[int, torch.Tensor]:
        """The next message of a reader: how many rows, and the block that has them."""
        if rank == self._hosts.rank:
            own = self._own.get()
            if own is None:
                raise RunError("reading ended before the schedule did.")
            begin, count, block = own
        else:
            head = torch.empty(3, dtype=torch.int64)
            block = torch.empty(0, dtype=torch.uint8)
            try:
                self._post("irecv", head, rank, 0).wait(_FOREVER)
                begin, count, size = (int(number) for number in head)
                block = torch.empty(size, dtype=torch.uint8)
                self._post("irecv", block, rank, 0).wait(_FOREVER)
            except RuntimeError as error:
                raise RunError(
                    f"{self._hosts.named(rank)} has gone. It was to deliver rows from {self._row(first)} on. No row was "
                    f"skipped: the run continues at the last checkpoint. gloo says: {str(error)[:200]}",
                    field="loading_hosts",
                ) from None
            if begin == _ERROR:
                raise RunError(
                    f"{self._hosts.named(rank)} could not read the rows from {self._row(first)} on: "
                    f"{block.numpy().tobytes().decode(errors='replace')}",
                    field="loading_hosts",
                )
        if begin != first:
            raise RunError(
                f"{self._hosts.named(rank)} has sent the rows from position {begin:,} on, and those from {first:,} on are due: "
                "the ranks do not follow the same schedule, position and loading_hosts.",
                field="loading_hosts",
            )
        return count, block

    def _send(self) -> None:
        hosts, gone = self._hosts, set[int]()
        asked: dict[int, int] = {}
        under_way: list[tuple[Any, Any]] = []
        request = None
        sent, idle = 0, 0
        assert self._requests is not None and self._reads is not None
        try:
            for request in self._requests:
                block, edges = next(self._reads)
                if idle != request.batch.number:
                    if self._stopped and not sent:  # nobody wanted anything of the batch before
                        return
                    idle, sent = request.batch.number, 0
                earlier, under_way = under_way, []
                for at, end, (rank, parts) in zip(edges[:-1], edges[1:], request.served.items(), strict=True):
                    count = sum(map(len, parts))
                    if not self._wanted(rank, request.batch, asked, gone):
                        continue
                    sent += 1
                    if rank == hosts.rank:
                        self._own.put((parts[0][0], count, block[at:end]))
                    else:
                        head = torch.tensor([parts[0][0], count, end - at])
                        under_way.append((self._post("isend", head, rank, 0), head))
                        under_way.append((self._post("isend", block[at:end], rank, 0), block))
                for work, _ in earlier:
                    work.wait(_FOREVER)
            for work, _ in under_way:
                work.wait(_FOREVER)
        except BaseException as error:
            if request is not None:
                self._tell(request, self._failure or str(error) or type(error).__name__, asked, gone)
            self._arrived.put(error)
        finally:
            self._own.put(None)

    def _wanted(self, rank: int, batch: LoadBatch, asked: dict[int, int], gone: set[int]) -> bool:
        """Wait until a rank asks for a load batch; False if it has stopped."""
        if rank in gone:
            return False
        if rank == self._hosts.rank:
            while asked.get(rank, -1) < batch.number:
                asked[rank] = self._own_asks.get()
                if asked[rank] == _STOP:
                    gone.add(rank)
                    return False
            return True
        if asked.get(rank, -1) < batch.number:
            ask = torch.empty(3, dtype=torch.int64)
            try:
                self._post("irecv", ask, rank, 1).wait(_FOREVER)
            except RuntimeError as error:
                raise RunError(
                    f"{self._hosts.named(rank)} has gone, before it asked for load batch {batch.number:,}. gloo says: "
                    f"{str(error)[:200]}",
                    field="loading_hosts",
                ) from None
            number, start, stop = (int(one) for one in ask)
            if number == _STOP:
                gone.add(rank)
                return False
            asked[rank] = number
            if (number, range(start, stop)) != (batch.number, batch.span):
                raise RunError(
                    f"{self._hosts.named(rank)} asks for load batch {number:,} with positions {start:,} to {stop:,}, and "
                    f"{self._hosts.named(self._hosts.rank)} reads load batch {batch.number:,} with {batch.span.start:,} to "
                    f"{batch.span.stop:,}: give all ranks the same schedule, start and read_ahead.",
                    field="read_ahead",
                )
        return True

    def _tell(self, request: Request, reason: str, asked: dict[int, int], gone: set[int]) -> None:
        """Tell every rank that waits for rows of this load batch why they do not come."""
        hosts = self._hosts
        rows = request.batch.read_by(hosts.reader or 0, len(hosts.readers))
        text = torch.frombuffer(bytearray(reason[-4000:].encode(errors="backslashreplace")), dtype=torch.uint8)
        try:
            for rank in request.batch.served(range(request.positions.start, rows.stop), hosts.ranks):
                if rank != hosts.rank and self._wanted(rank, request.batch, asked, gone):
                    head = torch.tensor([_ERROR, 0, len(text)])
                    self._post("isend", head, rank, 0).wait(_FOREVER)
                    self._post("isend", text, rank, 0).wait(_FOREVER)
        except (RuntimeError, RunError):  # a rank that has gone needs no explanation
            pass

    def _post(self, name: str, tensor: torch.Tensor, rank: int, kind: int) -> Any:
        """Begin a message to or from a rank; kind 0: rows, 1: requests for them."""
        other = {"group_dst" if name == "isend" else "group_src": rank}
        return getattr(_gloo, name)(tensor, group=self._hosts.group, tag=self._tag + kind, **other)
