"""Hosts that read for others: rows go from the ranks that read to the ranks that train on them, behind the training.

Two threads of a rank, both of its own iteration:

    send      on reading hosts: takes what the loader's worker processes have read and sends each rank its rows
    receive   on every rank: asks for one load batch after the other and keeps the rows until the trainer takes them

A rank asks a reader for a load batch when it has room for it, so a slow trainer holds the readers back: at most `ROOM` load
batches of its own rows wait on a rank. All messages have one order, by load batch and position. Every sender sends and every
receiver receives in that order, so the earliest message that is not sent yet can always be sent, and nobody waits forever.

torch's gloo, what the code has to respect (all observed): a thread needs a process group of its own; `isend` does not copy;
messages of one tag match in the order of their calls; a message larger than the receiver's buffer aborts the process, so
its size comes first; a wait that times out closes the connection, so a wait has no limit, and the trainer's own wait has one.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import Any, cast

import torch
import torch.distributed as dist

from batchwright.core.errors import PlanError, RunError

from .hosts import Hosts, LoadBatch, LoadingHosts
from .rows import unpack

ROOM = 2
"""Load batches of its own rows that a rank holds at most, without the one that it trains on."""
_FOREVER = timedelta(days=10_000)
_STOP = -1
_ERROR = -2
_NAME_BYTES = 64
_CLOSING_SECONDS = 5.0
# torch's annotations of its collectives are incomplete.
_gloo = cast(Any, dist)


class ReadingHosts:
    """The hosts of a job, those that read, and the gloo group over which rows are sent. Made on all ranks at once.

        hosts = ReadingHosts(2, rank=rank, ranks=ranks, ranks_per_host=8)
        for micro in Loader(dataset, order, sampler, loading_hosts=hosts): ...

    `group` has one process per data-parallel rank, in their order; by default a new group of all processes.
    """

    def __init__(
        self,
        loading_hosts: LoadingHosts,
        *,
        rank: int,
        ranks: int,
        ranks_per_host: int | tuple[int, ...] | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.hosts = Hosts.of(ranks, loading_hosts, ranks_per_host)
        self.rank, self.ranks, self.readers = rank, ranks, self.hosts.readers
        self.reader = self.readers.index(rank) if rank in self.readers else None
        """This rank's number among the readers; None if it does not read."""
        self.iterations = 0
        self.unanswered: list[tuple[Any, torch.Tensor]] = []
        """Messages that nobody waits for: their memory must stay."""
        self.names = [socket.gethostname()] * ranks
        self.group: Any = None
        if ranks == 1:
            return
        there = dist.get_world_size() if dist.is_initialized() else 1
        if group is None and there != ranks:
            raise PlanError(
                f"loading_hosts needs a process group of the {ranks} data-parallel ranks, and the job has {there} processes. "
                "Pass group: the processes that hold different samples, in the order of their data-parallel ranks.",
                field="group",
            )
        self.group = group or _gloo.new_group(backend="gloo")
        self._meet()

    def _meet(self) -> None:
        """Exchange names, and compare what every rank was given: ranks that disagree would wait for each other."""
        name = socket.gethostname().encode()[:_NAME_BYTES]
        own = torch.zeros(_NAME_BYTES + 8 * len(self.readers), dtype=torch.uint8)
        own[: len(name)] = torch.frombuffer(bytearray(name), dtype=torch.uint8)
        own[_NAME_BYTES:] = torch.tensor(self.readers, dtype=torch.int64).view(torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.ranks)]
        _gloo.all_gather(sizes, torch.tensor([len(self.readers)]), group=self.group)
        all_ = [torch.zeros_like(own) for _ in range(self.ranks)]
        if len({int(size) for size in sizes}) == 1:
            _gloo.all_gather(all_, own, group=self.group)
        for rank, (size, other) in enumerate(zip(sizes, all_, strict=True)):
            if int(size) != len(self.readers) or not torch.equal(other[_NAME_BYTES:], own[_NAME_BYTES:]):
                raise PlanError(
                    f"loading_hosts differs between ranks: rank {self.rank} has {len(self.readers)} readers, rank {rank} has "
                    f"{int(size)}, or others. Give all ranks the same loading_hosts and ranks_per_host.",
                    field="loading_hosts",
                    given=len(self.readers),
                )
            self.names[rank] = other[:_NAME_BYTES].numpy().tobytes().rstrip(b"\0").decode(errors="replace")

    def named(self, rank: int) -> str:
        """A rank's host, for errors: `host 1 (gpu-17, rank 8)`."""
        return f"host {self.hosts.of_rank[rank]} ({self.names[rank]}, rank {rank})"


class Request:
    """One request of a reader: neighbouring positions of a load batch, and the positions of them that each rank needs."""

    __slots__ = ("batch", "ids", "positions", "served")

    def __init__(self, batch: LoadBatch, positions: range, ids: list[int], served: dict[int, list[range]]) -> None:
        self.batch, self.positions, self.ids, self.served = batch, positions, ids, served


class Exchange:
    """One iteration on one rank: its two threads, and the rows that have arrived.

    `requests` and `reads` are None on ranks that do not read; `reads` yields, for every request, the block of packed rows,
    where each rank's part of it begins, and how many rows were read. `row` names the row at a position.
    """

    def __init__(
        self,
        hosts: ReadingHosts,
        batches: Callable[[], Iterator[LoadBatch]],
        requests: Iterator[Request] | None,
        reads: Iterator[tuple[torch.Tensor, list[int], int]] | None,
        timeout: float,
        row: Callable[[int], str],
    ) -> None:
        self._hosts, self._batches, self._requests, self._reads = hosts, batches, requests, reads
        self._timeout, self._row = timeout, row
        self._tag = 2 * hosts.iterations
        hosts.iterations += 1
        self._arrived: SimpleQueue[tuple[list[Any], bool] | BaseException | None] = SimpleQueue()
        self._own: SimpleQueue[tuple[int, int, torch.Tensor] | None] = SimpleQueue()
        self._room = threading.Semaphore(ROOM)
        self._stopped = False
        self._awaited: tuple[int, int] | None = None
        self.rows_read = 0
        self.waited_seconds = 0.0
        self._threads = [threading.Thread(target=self._receive, name="batchwright-receive", daemon=True)]
        if reads is not None:
            self._threads.append(threading.Thread(target=self._send, name="batchwright-send", daemon=True))
        for thread in self._threads:
            thread.start()

    def take(self) -> list[Any]:
        """The next rows of this rank, in the order of their positions."""
        before = perf_counter()
        try:
            found = self._arrived.get(timeout=self._timeout)
        except Empty:
            raise RunError(self._late(), field="read_timeout", given=self._timeout) from None
        finally:
            self.waited_seconds += perf_counter() - before
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

    def stop(self, wait: bool = True) -> bool:
        """Ask for no more rows; False if a thread still runs.

        A read or a message under way may outlast this: the thread ends after it, or with the process.
        """
        self._stopped = True
        self._room.release()
        for thread in self._threads:
            thread.join(_CLOSING_SECONDS if wait else 0)
        return not any(thread.is_alive() for thread in self._threads)

    def _late(self) -> str:
        if self._awaited is None:
            return f"no rows arrived for {self._timeout:g} s, and no reader was asked for any."
        rank, position = self._awaited
        return (
            f"{self._hosts.named(rank)} has delivered no rows for {self._timeout:g} s, from {self._row(position)} on: it "
            "hangs, or a read takes longer than read_timeout. No row was skipped: the run continues at the last checkpoint."
        )

    # -- threads

    def _receive(self) -> None:
        hosts = self._hosts
        try:
            for batch in self._batches():
                self._room.acquire()
                if self._stopped:
                    break
                needed = batch.needed(hosts.rank, hosts.ranks)
                positions = (position for part in needed for position in part)
                sources = batch.sources(hosts.rank, hosts.ranks, len(hosts.readers))
                self._awaited = hosts.readers[next(iter(sources))], needed[0][0]
                asked: list[tuple[Any, torch.Tensor]] = []
                for reader in sources:
                    if hosts.readers[reader] != hosts.rank:
                        number = torch.tensor([batch.number])
                        asked.append((self._post("isend", number, hosts.readers[reader], 1), number))
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
                        number = torch.tensor([_STOP])
                        hosts.unanswered.append((self._post("isend", number, rank, 1), number))
        except BaseException as error:
            self._arrived.put(error)
        else:
            self._arrived.put(None)

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
                block, edges, read = next(self._reads)
                self.rows_read += read
                if idle != request.batch.number:
                    if self._stopped and not sent:  # nobody wanted anything of the batch before
                        return
                    idle, sent = request.batch.number, 0
                earlier, under_way = under_way, []
                for at, end, (rank, parts) in zip(edges[:-1], edges[1:], request.served.items(), strict=True):
                    count = sum(map(len, parts))
                    if rank == hosts.rank:
                        self._own.put((parts[0][0], count, block[at:end]))
                        sent += not self._stopped
                    elif self._wanted(rank, request.batch.number, asked, gone):
                        sent += 1
                        head = torch.tensor([parts[0][0], count, end - at])
                        under_way.append((self._post("isend", head, rank, 0), head))
                        under_way.append((self._post("isend", block[at:end], rank, 0), block))
                for work, _ in earlier:
                    work.wait(_FOREVER)
            for work, _ in under_way:
                work.wait(_FOREVER)
        except BaseException as error:
            if request is not None:
                self._tell(request, str(error) or type(error).__name__, asked, gone)
            self._arrived.put(error)
        finally:
            self._own.put(None)

    def _wanted(self, rank: int, number: int, asked: dict[int, int], gone: set[int]) -> bool:
        """Wait until a rank asks for a load batch; False if it has stopped."""
        if rank in gone:
            return False
        if asked.get(rank, -1) < number:
            answer = torch.empty(1, dtype=torch.int64)
            try:
                self._post("irecv", answer, rank, 1).wait(_FOREVER)
            except RuntimeError as error:
                raise RunError(
                    f"{self._hosts.named(rank)} has gone, before it asked for load batch {number:,}. gloo says: "
                    f"{str(error)[:200]}",
                    field="loading_hosts",
                ) from None
            if int(answer) == _STOP:
                gone.add(rank)
                return False
            asked[rank] = int(answer)
        return True

    def _tell(self, request: Request, reason: str, asked: dict[int, int], gone: set[int]) -> None:
        """Tell every rank that waits for rows of this load batch why they do not come."""
        hosts = self._hosts
        rows = request.batch.read_by(hosts.reader or 0, len(hosts.readers))
        text = torch.frombuffer(bytearray(reason[-4000:].encode()), dtype=torch.uint8)
        try:
            for rank in request.batch.served(range(request.positions.start, rows.stop), hosts.ranks):
                if rank != hosts.rank and self._wanted(rank, request.batch.number, asked, gone):
                    head = torch.tensor([_ERROR, 0, len(text)])
                    self._post("isend", head, rank, 0).wait(_FOREVER)
                    self._post("isend", text, rank, 0).wait(_FOREVER)
        except (RuntimeError, RunError):  # a rank that has gone needs no explanation
            pass

    def _post(self, name: str, tensor: torch.Tensor, rank: int, kind: int) -> Any:
        """Begin a message to or from a rank; kind 0: rows, 1: requests for them."""
        other = {"group_dst" if name == "isend" else "group_src": rank}
        return getattr(_gloo, name)(tensor, group=self._hosts.group, tag=self._tag + kind, **other)
