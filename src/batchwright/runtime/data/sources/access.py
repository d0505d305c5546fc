"""How files are read: the limits of a request, which failures are tried again, and what reading has cost."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from random import SystemRandom
from typing import Any

from batchwright.core.errors import PlanError, RunError, Violation, raise_violations

# Reading this much at an assumed 100 MB/s takes 0.7 ms, far less than a request to another machine.
MERGE_GAP = 64 * 1024
# A connection slower than this counts as hanging (an assumption): it is added to the time-out of large requests.
SLOWEST = 1024 * 1024
# Not `random`: its state belongs to the user, whose augmentations must not depend on failures.
_jitter = SystemRandom()

# Answers of HTTP that are worth another try: time-outs, too many requests. All 5xx are, too.
_TRANSIENT_STATUS = (408, 425, 429)
# Exceptions of aiohttp, botocore and requests by name, so that none of them is imported: broken connections and bodies.
_TRANSIENT_NAMES = {
    "ClientConnectionError",
    "ClientPayloadError",
    "HTTPClientError",
    "IncompleteRead",
    "IncompleteReadError",
    "ResponseStreamingError",
    "SSLEOFError",
    "SSLZeroReturnError",
    "ServerDisconnectedError",
}
# An SSLError is a wrong certificate or a connection that broke: its cause says which.
_PERMANENT_NAMES = {"ClientConnectorCertificateError", "SSLCertVerificationError", "InvalidURL"}
_TRANSIENT_ERRNO = {
    errno.EAGAIN,
    errno.EBUSY,
    errno.EHOSTUNREACH,
    errno.EINTR,
    errno.EIO,
    errno.ENETUNREACH,
    errno.EPIPE,
    errno.ESTALE,
    errno.ETIMEDOUT,
}


@dataclass(frozen=True)
class Access:
    """How a source reads its files: tries, time-outs, merged requests, connections.

    A read that fails for a reason that may pass (HTTP 5xx, 429 and 408, a broken connection, a body that is too short, a
    time-out) is tried again, after a random pause that doubles each time. Others (404, 403, …) fail at once.

    >>> Access(tries=3).longest_wait(0)  # seconds: three time-outs and two pauses
    181.5
    """

    tries: int = 5
    """Tries of one request in all, at least 1."""
    first_pause: float = 0.5
    """Longest pause after the first failure, in seconds; each pause is half to all of its limit, by chance."""
    longest_pause: float = 30.0
    """Limit of every later pause, in seconds."""
    timeout: float = 60.0
    """Longest time of one try, in seconds, plus one second per MiB requested."""
    connections: int = 4
    """Requests of one process that run at the same time, at most."""
    merge_gap: int = MERGE_GAP
    """Rows that are at most so many bytes apart are read in one request; 0 merges neighbours only."""
    largest_request: int = 32 * 1024 * 1024
    """Rows are not merged beyond so many bytes; a longer row is read in one request."""
    storage_options: Mapping[str, Any] = field(default_factory=dict[str, Any], repr=False)
    """What fsspec gets: credentials, an endpoint, headers."""

    def __post_init__(self) -> None:
        lowest = {"tries": 1, "connections": 1, "merge_gap": 0, "largest_request": 1}
        found = [
            Violation(
                f"{name}={getattr(self, name)!r} must be a whole number of at least {low}.",
                name,
                getattr(self, name),
                (low,),
            )
            for name, low in lowest.items()
            if not isinstance(getattr(self, name), int) or getattr(self, name) < low
        ]
        found += [
            Violation(f"{name}={getattr(self, name)!r} must be a number of seconds above 0.", name, getattr(self, name))
            for name in ("timeout", "first_pause", "longest_pause")
            if not 0 < getattr(self, name) < float("inf")
        ]
        raise_violations(PlanError, found)

    def pause(self, failures: int) -> float:
        """Seconds to wait after so many failures."""
        return min(self.longest_pause, self.first_pause * 2.0 ** min(failures - 1, 60)) * _jitter.uniform(0.5, 1)

    def seconds(self, size: int) -> float:
        """The time-out of a request of `size` bytes."""
        return self.timeout + size / SLOWEST

    def longest_wait(self, size: int) -> float:
        """Seconds after which a request of `size` bytes has returned or failed, at most."""
        pauses = (min(self.longest_pause, self.first_pause * 2.0 ** min(k, 60)) for k in range(self.tries - 1))
        return self.tries * self.seconds(size) + sum(pauses)


class Reads:
    """What a source has read in this process. Loader workers count for themselves.

    Indexes and metadata are counted in `requests` and `bytes` too. Over an epoch, `bytes` divided by the size of the files
    is the read amplification. Memory-mapped files are not requested: only `rows` counts.
    """

    rows: int
    """Rows that were returned."""
    requests: int
    """Requests that were sent, also those that failed."""
    bytes: int
    """Bytes that arrived and were complete."""
    retries: int
    """Requests that repeated a failed one."""
    seconds: float
    """Time that callers waited for reads, pauses included."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.rows = self.requests = self.bytes = self.retries = 0
        self.seconds = 0.0

    def add(self, *, rows: int = 0, requests: int = 0, bytes: int = 0, retries: int = 0, seconds: float = 0.0) -> None:
        """Add to the counts, from any thread."""
        with self._lock:
            self.rows += rows
            self.requests += requests
            self.bytes += bytes
            self.retries += retries
            self.seconds += seconds

    def record(self) -> dict[str, int | float]:
        """The counts as a dictionary."""
        with self._lock:
            return {name: getattr(self, name) for name in ("rows", "requests", "bytes", "retries", "seconds")}

    def __repr__(self) -> str:
        return f"Reads({', '.join(f'{k}={round(v, 3)}' for k, v in self.record().items())})"

    def __reduce__(self) -> tuple[type[Reads], tuple[()]]:
        return Reads, ()  # a copy in another process starts at 0


class Truncated(OSError):
    """A body that is shorter than the range that was asked for."""


class Attempts:
    """The failures of one request: says how long to pause, or raises the error that names them all."""

    def __init__(self, access: Access, reads: Reads, url: str, what: Callable[[], str]) -> None:
        self.access, self.reads, self.url, self.what = access, reads, url, what
        self.failures: list[str] = []
        self._begun = time.monotonic()
        reads.add(requests=1)

    def failed(self, error: Exception) -> float:
        """Record a failure. Returns the seconds to pause before the next try, or raises RunError."""
        now = time.monotonic()
        self.failures.append(f"try {len(self.failures) + 1} ({now - self._begun:.1f} s): {describe(error)}")
        again = is_transient(error)
        if not again or len(self.failures) >= self.access.tries:
            listed = "; ".join(self.failures)
            end = (
                f"Access(tries={self.access.tries}, timeout={self.access.timeout:g}) is the limit."
                if again
                else ("This does not pass with time, so it was not tried again.")
            )
            message = f"{self.what()} failed: {listed}. {end}".replace(self.url, shown(self.url))
            raise RunError(message, field="source") from error
        pause = self.access.pause(len(self.failures))
        self._begun = now + pause
        self.reads.add(requests=1, retries=1)
        return pause


def shown(url: str) -> str:
    """A URL as errors name it: without a password and without the query, which may be a signature.

    >>> shown("https://me:word@host/a.jsonl?signature=1"), shown("data/a?.jsonl")
    ('https://host/a.jsonl?…', 'data/a?.jsonl')
    """
    if "://" not in url:
        return url
    protocol, rest = url.split("://", 1)
    host, slash, path = rest.partition("/")
    path, query, _ = path.partition("?") if protocol in ("http", "https") else (path, "", "")
    return f"{protocol}://{host.rpartition('@')[2]}{slash}{path}{'?…' if query else ''}"


def describe(error: BaseException) -> str:
    """An exception in a few words, with its HTTP status where that is what failed."""
    if isinstance(error, TimeoutError) and not str(error):
        return "no answer within the time-out"
    status = next((_status(one) for one in _chain(error) if _judge(one) is not None), None)
    if isinstance(error, FileNotFoundError) and is_transient(error) and error.__cause__ is not None:
        return describe(error.__cause__)
    text = " ".join(str(error).split())[:300]
    return f"HTTP {status} ({type(error).__name__})" if status else f"{type(error).__name__}: {text}"


def is_transient(error: BaseException) -> bool:
    """Whether another try may succeed: what the first exception that is known says, from the error to its causes.

    >>> is_transient(TimeoutError()), is_transient(ConnectionResetError()), is_transient(FileNotFoundError())
    (True, True, False)
    """
    return judged(error) or False


def judged(error: BaseException) -> bool | None:
    """As `is_transient`; None if no exception is known."""
    known = [one for each in _chain(error) if (one := _judge(each)) is not None]
    # fsspec's HTTP says "file not found" also when the server is busy. The cause knows better.
    return known[-1 if isinstance(error, FileNotFoundError) else 0] if known else None


def _judge(error: BaseException) -> bool | None:
    """Whether this exception, without its causes, may pass; None if it says nothing."""
    names = {kind.__name__ for kind in type(error).__mro__}
    if names & _PERMANENT_NAMES or isinstance(error, FileNotFoundError | PermissionError | IsADirectoryError):
        return False
    # Before the status: the cause of a body that ends early is an error 400 of aiohttp's own.
    if names & _TRANSIENT_NAMES or isinstance(error, TimeoutError | ConnectionError | Truncated | EOFError):
        return True
    if (status := _status(error)) is not None:
        return status >= 500 or status in _TRANSIENT_STATUS
    return True if isinstance(error, OSError) and error.errno in _TRANSIENT_ERRNO else None


def _status(error: BaseException) -> int | None:
    """The HTTP status that an exception of aiohttp, gcsfs or botocore carries."""
    response: Any = getattr(error, "response", None)
    found: Any = (
        getattr(error, "status", None) or getattr(error, "code", None) or getattr(response, "status_code", None)
    )
    if isinstance(response, Mapping):
        found = response.get("ResponseMetadata", {}).get("HTTPStatusCode")  # pyright: ignore
    return int(found) if isinstance(found, int | str) and str(found).isdigit() and 400 <= int(found) < 600 else None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An exception and what caused it. fsspec's libraries replace their exceptions by OSError."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
