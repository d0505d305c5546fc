"""Byte ranges of files, local or remote: merged, at most a few at a time, tried again, and never short.

Remote files are read through fsspec. Connections belong to one process: after a fork or in a spawned worker they are
opened again.
"""

from __future__ import annotations

import asyncio
import ctypes
import io
import mmap
import os
import stat
import sys
import time
import weakref
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from random import SystemRandom
from typing import Any, BinaryIO, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from batchwright.core.errors import MissingExtraError, PlanError, RunError
from batchwright.rundir import atomic

from .access import Access, Attempts, Reads, Truncated, shown

# File systems of fsspec by process, protocol and options. None is ever dropped: in a forked worker, fsspec would wait a second
# for the thread of the parent to close each of the parent's connections.
_systems: dict[tuple[int, str, str], Any] = {}
# Modules of fsspec's libraries that draw from `random` while a file is read: for pauses, the order of waiting requests, the
# renewal of credentials. The state of `random` belongs to the user, as in access.py.
_DRAWING = ("aiohttp.connector", "botocore.utils", "gcsfs.retry", "google.auth._exponential_backoff")
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_ssize_t)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_MAP_FAILED = ctypes.c_void_p(-1).value


class Span(NamedTuple):
    """Bytes `start` to `end` (exclusive) of a file; `row` is named in errors."""

    url: str
    start: int
    end: int
    row: int | str


class Stat(NamedTuple):
    """The size of a file, and a text that changes with its content: etag, or time of the last change."""

    size: int
    version: str


@dataclass(frozen=True)
class Request:
    """One read: bytes `start` to `end`, which hold the spans with these indexes."""

    url: str
    start: int
    end: int
    spans: tuple[int, ...]


def merge(spans: Sequence[Span], gap: int, largest: int) -> list[Request]:
    """Join spans of one file that are at most `gap` bytes apart into requests of at most `largest` bytes.

    >>> spans = [Span("a", 30, 40, 1), Span("a", 0, 10, 0), Span("a", 12, 20, 2)]
    >>> [(r.start, r.end, r.spans) for r in merge(spans, gap=2, largest=100)]
    [(0, 20, (1, 2)), (30, 40, (0,))]
    """
    requests: list[Request] = []
    order = sorted((i for i, s in enumerate(spans) if s.end > s.start), key=lambda i: spans[i][:3])
    held: list[int] = []
    start = end = 0
    for i in order:
        span = spans[i]
        joined = held and spans[held[0]].url == span.url and span.start - end <= gap
        # A span inside what is read already costs nothing more.
        if joined and (span.end <= end or span.end - start <= largest):
            held.append(i)
            end = max(end, span.end)
            continue
        if held:
            requests.append(Request(spans[held[0]].url, start, end, tuple(held)))
        held, start, end = [i], span.start, span.end
    if held:
        requests.append(Request(spans[held[0]].url, start, end, tuple(held)))
    return requests


class Store:
    """Reads the files of one source."""

    def __init__(self, access: Access) -> None:
        self.access = access
        self.reads = Reads()

    def stat(self, urls: Sequence[str]) -> list[Stat]:
        """Size and version of each file."""
        remote = [url for url in urls if local_path(url) is None]
        found = dict(zip(remote, self._run([self._remote_stat(url) for url in remote]), strict=True)) if remote else {}
        return [found[url] if url in found else self._local_stat(url) for url in urls]

    def read(self, spans: Sequence[Span]) -> list[bytes]:
        """The bytes of each span, in the given order."""
        begun = time.monotonic()
        requests = merge(spans, self.access.merge_gap, self.access.largest_request)
        remote = [r for r in requests if local_path(r.url) is None]
        found = dict(zip(remote, self._run([self._fetch(r, spans) for r in remote]), strict=True)) if remote else {}
        parts: list[bytes] = [b""] * len(spans)
        for request in requests:
            body = found.pop(request, None) or self._pread(request, spans)
            for i in request.spans:
                parts[i] = body[spans[i].start - request.start : spans[i].end - request.start]
        self.reads.add(seconds=time.monotonic() - begun)
        return parts

    def file(self, url: str, size: int, what: str) -> RangeFile:
        """The file as a Python file that reads ranges."""
        return RangeFile(self, url, size, what)

    # Local files

    def _local_stat(self, url: str) -> Stat:
        try:
            found = os.stat(local_path(url) or url)
            if not stat.S_ISREG(found.st_mode):
                raise OSError("it is not a regular file")
        except OSError as error:
            raise PlanError(f"cannot read {url}: {error.strerror or error}.", field="path", given=url) from error
        return Stat(found.st_size, f"{found.st_mtime_ns}")

    def _pread(self, request: Request, spans: Sequence[Span]) -> bytes:
        attempts = Attempts(self.access, self.reads, request.url, lambda: _what(request, spans))
        while True:
            try:
                descriptor = atomic.regular(cast(str, local_path(request.url)))
                try:
                    body = _read_all(descriptor, request.start, request.end)
                finally:
                    os.close(descriptor)
                break
            except OSError as error:
                time.sleep(attempts.failed(error))
        self.reads.add(bytes=len(body))
        return body

    # Remote files

    def system(self, url: str) -> Any:
        """The fsspec file system of a URL, opened in this process."""
        protocol = url.split("://", 1)[0]
        options = dict(self.access.storage_options)
        key = os.getpid(), protocol, repr(sorted(options.items()))
        if key not in _systems:
            fsspec = _fsspec(url)
            if protocol in ("http", "https"):
                # A server that compresses what it sends cannot send a range of the file.
                options["headers"] = {"Accept-Encoding": "identity", **(options.get("headers") or {})}
            if protocol in ("s3", "s3a"):
                # botocore would try again by itself, and draw its pauses from `random`. `_attempt` tries again.
                config = {"retries": {"total_max_attempts": 1}}
                options["config_kwargs"] = {**config, **(options.get("config_kwargs") or {})}
            try:
                _systems.setdefault(key, fsspec.filesystem(protocol, skip_instance_cache=True, **options))
            except ImportError as error:
                raise _missing(url, error) from error
            except ValueError as error:
                raise PlanError(f"cannot read {shown(url)}: {error}.", field="path", given=shown(url)) from error
            for module in filter(None, map(sys.modules.get, _DRAWING)):
                cast(Any, module).random = SystemRandom()
        return _systems[key]

    def _run(self, work: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
        """Run coroutines on fsspec's thread, `connections` at a time. The first error ends the others."""
        try:
            asyn = import_module("fsspec.asyn")
        except ImportError as error:
            for one in work:
                one.close()
            raise _missing("a remote file", error) from error

        async def all_of() -> list[Any]:
            gate = asyncio.Semaphore(self.access.connections)

            async def gated(one: Coroutine[Any, Any, Any]) -> Any:
                async with gate:
                    return await one

            tasks = [asyncio.ensure_future(gated(one)) for one in work]
            try:
                return await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                for one in work:
                    one.close()  # those that never began

        return asyn.sync(asyn.get_loop(), all_of)

    async def _attempt(
        self, url: str, size: int, what: Callable[[], str], call: Callable[[], Coroutine[Any, Any, Any]]
    ) -> Any:
        """Await `call` until it succeeds, within the limits of `access`."""
        attempts = Attempts(self.access, self.reads, url, what)
        while True:
            try:
                return await asyncio.wait_for(call(), self.access.seconds(size))
            except Exception as error:
                if isinstance(error, RunError | PlanError | MissingExtraError):
                    raise
                pause = attempts.failed(error)
            await asyncio.sleep(pause)

    async def _remote_stat(self, url: str) -> Stat:
        system = self.system(url)

        async def info() -> Any:
            found = await (system._info(url) if system.async_impl else asyncio.to_thread(system.info, url))
            if found.get("size") is None:
                raise RunError(
                    f"{shown(url)}: the server does not say how long the file is, so parts of it cannot be read. Copy the file "
                    "to a server that answers with Content-Length.",
                    field="path",
                )
            return found

        found = await self._attempt(url, 0, lambda: f"asking for the size of {url}", info)
        keys = ("ETag", "etag", "generation", "Last-Modified", "LastModified", "mtime", "updated", "last_modified")
        return Stat(int(found["size"]), next((str(found[key]) for key in keys if found.get(key)), ""))

    async def _fetch(self, request: Request, spans: Sequence[Span]) -> bytes:
        system, size = self.system(request.url), request.end - request.start

        async def ranged() -> bytes:
            # By name: file systems differ in the order of their parameters.
            read = system._cat_file if system.async_impl else partial(asyncio.to_thread, system.cat_file)
            body = await read(request.url, start=request.start, end=request.end)
            if len(body) < size:
                raise Truncated(f"{len(body):,} of {size:,} bytes arrived")
            if len(body) > size:
                raise OSError(f"{len(body):,} bytes arrived instead of {size:,}: the server ignores ranges")
            return bytes(body)

        body = await self._attempt(request.url, size, lambda: _what(request, spans), ranged)
        self.reads.add(bytes=size)
        return body


class RangeFile(io.RawIOBase):
    """A file for libraries that want one, such as pyarrow and tarfile. Every read is a request of the store."""

    def __init__(self, store: Store, url: str, size: int, what: str) -> None:
        self._store, self._url, self._size, self._at = store, url, size, 0
        self.what = what  # named in errors

    def readable(self) -> bool:
        """Always."""
        return True

    def seekable(self) -> bool:
        """Always."""
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        """Move to a byte."""
        self._at = max(0, offset + (0, self._at, self._size)[whence])
        return self._at

    def tell(self) -> int:
        """The byte that is read next."""
        return self._at

    def size(self) -> int:
        """The length of the file."""
        return self._size

    def readinto(self, buffer: Any, /) -> int:
        """Fill the buffer, less at the end of the file."""
        view = memoryview(buffer).cast("B")
        end = min(self._size, self._at + len(view))
        if end <= self._at:
            return 0
        body = self._store.read([Span(self._url, self._at, end, self.what)])[0]
        view[: len(body)] = body
        self._at = end
        return len(body)


def local_path(url: str) -> str | None:
    """The path of a local file; None for a remote one.

    >>> local_path("file:///data/a.jsonl"), local_path("data/a.jsonl"), local_path("s3://bucket/a.jsonl")
    ('/data/a.jsonl', 'data/a.jsonl', None)
    """
    if "://" not in url:
        return url
    return url.removeprefix("file://") if url.startswith("file://") else None


def paths(given: str | Path | Sequence[str | Path]) -> tuple[str, ...]:
    """One path or several, as text."""
    several = (given,) if isinstance(given, str | Path) else tuple(given)
    if not several:
        raise PlanError("the source has no files: give at least one path or URL.", field="path", given="[]")
    return tuple(os.fspath(one) for one in several)


def mapped(file: BinaryIO) -> npt.NDArray[np.uint8]:
    """The bytes of an open local file that is not empty, memory-mapped to be read. They stay when the file is closed.

    numpy's memmap and Python's mmap keep a descriptor for each file, and a process may often have no more than 1,024.
    """
    size = os.fstat(file.fileno()).st_size
    at = _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
    if at == _MAP_FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), file.name)
    body = (ctypes.c_uint8 * size).from_address(at)
    weakref.finalize(body, _libc.munmap, at, size).atexit = False
    found = np.frombuffer(cast(Any, body), np.uint8)
    found.flags.writeable = False
    return found


def _read_all(descriptor: int, start: int, end: int) -> bytes:
    body = os.pread(descriptor, end - start, start)
    if len(body) == end - start:
        return body
    parts, at = [body], start + len(body)
    while at < end:  # a read returns at most 2 GiB
        part = os.pread(descriptor, end - at, at)
        if not part:
            raise OSError(f"the file ends at byte {at:,}: it has become shorter")
        parts.append(part)
        at += len(part)
    return b"".join(parts)


def _what(request: Request, spans: Sequence[Span]) -> str:
    """What a request is, for errors."""
    rows = list(
        dict.fromkeys(
            f"{spans[i].row:,}" if isinstance(spans[i].row, int) else str(spans[i].row) for i in request.spans
        )
    )
    more = f" and {len(rows) - 3:,} more" if len(rows) > 3 else ""
    word = "" if isinstance(spans[request.spans[0]].row, str) else "row " if len(rows) == 1 else "rows "
    return f"reading bytes {request.start:,} to {request.end:,} of {request.url} ({word}{', '.join(rows[:3])}{more})"


def _fsspec(url: str) -> Any:
    try:
        import fsspec  # pyright: ignore[reportMissingTypeStubs]
    except ImportError as error:
        raise _missing(url, error) from error
    return cast(Any, fsspec)


def _missing(url: str, error: ImportError) -> MissingExtraError:
    return MissingExtraError(
        f"{shown(url)} needs a package that is not installed ({error}): pip install 'batchwright[data]'.",
        field="extra",
        given=error.name,
        nearest=("batchwright[data]",),
    )
