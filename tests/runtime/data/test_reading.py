"""How rows are read: seeded by position or many at once, again after a failure; and how they travel between processes."""

from __future__ import annotations

import collections
import http.client
import random
import socket
import ssl
import threading
from email.message import Message
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.error import HTTPError, URLError

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.core.errors import PlanError, RunError
from batchwright.core.ramp.rules import Constant
from batchwright.runtime.data import reading
from batchwright.runtime.data.loader import Loader
from batchwright.runtime.data.order import GlobalOrder
from batchwright.runtime.data.reading import Reader
from batchwright.runtime.data.rows import pack, unpack
from batchwright.runtime.data.sampler import StepSampler
from batchwright.runtime.loop.evaluate import Part
from tests.examples import many

from .reader_ranks import Batched, Noisy

pytestmark = pytest.mark.torch
Pair = collections.namedtuple("Pair", "left right")


def loader(dataset: Any, **options: Any) -> Loader:
    sampler = StepSampler(Constant(10).compile().until(100), 5)
    return Loader(dataset, GlobalOrder(len(dataset), seed=2), sampler, **{"collate": list, **options})


class BatchedNoisy(Noisy):
    """Offers a batched read, which draws."""

    def __getitems__(self, ids: list[int]) -> list[Any]:
        return [self[i] for i in ids]


def test_a_batched_read_is_used_while_it_draws_nothing(tmp_path) -> None:
    counted = tmp_path / "reads"
    made = loader(Batched(str(counted)))
    rows = [int(row[0]) for micro in made for row in micro.data]
    assert rows == GlobalOrder(50, seed=2).ids(range(100)).tolist()
    assert counted.read_text().split() == ["5"] * 20 and made.rows_read == 100


def test_a_batched_read_that_draws_is_read_again_row_by_row() -> None:
    single, batched = loader(Noisy()), loader(BatchedNoisy())
    assert repr([m.data for m in single]) == repr([m.data for m in batched])
    assert (single.rows_read, batched.rows_read) == (100, 105)  # the first micro batch twice, which is counted


@pytest.mark.slow
@pytest.mark.parametrize("reading", [{}, {"loading_hosts": 1}])
def test_rows_that_workers_read_ahead_are_counted_where_the_dataset_is_called(tmp_path, reading) -> None:
    counted = tmp_path / "reads"
    made = loader(Batched(str(counted)), num_workers=2, prefetch_factor=4, **reading)
    iterator = iter(made)
    next(iterator)
    iterator.close()  # type: ignore[attr-defined]
    assert made.rows_read == sum(map(int, counted.read_text().split())) > 10


def test_a_part_of_a_dataset_offers_what_the_dataset_offers() -> None:
    part = Part(Batched(), 10, 20)
    assert [int(row[0]) for row in part.__getitems__([0, 3])] == [10, 13]
    assert not hasattr(Part(Noisy(), 10, 20), "__getitems__") and not hasattr(Part(Noisy(), 10, 20), "describe")


class Flaky(Noisy):
    """Draws, fails `times` times, then returns what it drew first."""

    def __init__(self, times: int, error: Exception) -> None:
        self.left, self.error = times, error

    def __getitem__(self, i: int) -> Any:
        drawn = random.random()
        if self.left:
            self.left -= 1
            raise self.error
        return drawn


@pytest.mark.parametrize(
    "error",
    [
        ConnectionResetError("gone"),
        TimeoutError(),
        EOFError(),
        http.client.IncompleteRead(b""),
        http.client.BadStatusLine("?"),
        OSError("the file system is busy"),
        ssl.SSLEOFError("EOF occurred in violation of protocol"),
        HTTPError("http://127.0.0.1/", 503, "", Message(), None),
    ],
)
def test_a_read_that_fails_is_repeated_with_the_same_draws(error: Exception) -> None:
    waits: list[float] = []
    flaky = Reader(Flaky(3, error), 0, list, retries=3, pause=waits.append)
    assert flaky.rows([7], [1]) == Reader(Flaky(0, error), 0, list).rows([7], [1])
    # By chance, so that a thousand ranks do not come back at once.
    assert (
        all(most / 2 <= wait <= most for wait, most in zip(waits, (0.5, 1.0, 2.0), strict=True))
        and flaky.rows_read == 4
    )
    with pytest.raises(type(error)) as caught:
        Reader(Flaky(4, error), 0, list, retries=3, pause=waits.append).rows([7], [1])
    assert "reading dataset[1], the sample at position 7, 4 times" in caught.value.__notes__[0]


def http_error(status: int) -> HTTPError:
    return HTTPError("http://127.0.0.1/", status, "", Message(), None)


def refused_certificate() -> Exception:
    error = URLError("SSL")
    error.__cause__ = ssl.SSLCertVerificationError("certificate verify failed")
    return error


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError("no file"),
        NotADirectoryError(),
        ValueError("a bug"),
        PermissionError(),
        http_error(404),
        http_error(403),
        refused_certificate(),
    ],
)
def test_what_will_not_pass_is_not_repeated(error: Exception) -> None:
    waits: list[float] = []
    with pytest.raises(type(error)):
        Reader(Flaky(1, error), 0, list, retries=3, pause=waits.append).rows([7], [1])
    assert waits == []


def test_a_dataset_that_retries_by_itself_is_left_alone() -> None:
    flaky = Flaky(1, OSError())
    flaky.retries_itself = True  # type: ignore[attr-defined]
    with pytest.raises(OSError):
        Reader(flaky, 0, list, retries=3).rows([7], [1])


def test_a_batched_read_must_return_every_row() -> None:
    class Short(Batched):
        def __getitems__(self, ids: list[int]) -> list[Any]:
            return []

    with pytest.raises(RunError, match="returned 0 rows for 5 ids"):
        list(loader(Short()))


def test_options_are_checked() -> None:
    for wrong in ({"read_ahead": 0}, {"read_retries": -1}, {"read_ahead": 2}):
        with pytest.raises(PlanError, match=next(iter(wrong))):
            loader(Noisy(), **wrong)


# -- a server that fails


class Server(BaseHTTPRequestHandler):
    """Row i is 64 bytes of i. Every third request fails: an error, a cut answer, a dropped connection, a late answer."""

    count = 0

    def do_GET(self) -> None:
        kind = type(self)
        kind.count += 1
        row = bytes([int(self.path[1:])]) * 64
        failure = kind.count // 3 % 4 if kind.count % 3 == 0 else None
        if failure == 0:
            self.send_error(503)
            return
        if failure == 1:
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        if failure == 2:
            threading.Event().wait(0.05)
        self.send_response(200)
        self.send_header("Content-Length", "64")
        self.end_headers()
        self.wfile.write(row[:20] if failure == 3 else row)

    def log_message(self, *_: Any) -> None:
        pass


class Web:
    """Rows of the server."""

    def __init__(self, port: int) -> None:
        self.port = port

    def __len__(self) -> int:
        return 50

    def __getitem__(self, i: int) -> bytes:
        from urllib.request import urlopen

        with urlopen(f"http://127.0.0.1:{self.port}/{i}", timeout=30) as answer:
            return answer.read()


def test_rows_of_a_server_that_fails_every_third_request(monkeypatch) -> None:
    monkeypatch.setattr(reading, "Access", partial(reading.Access, first_pause=0.001))
    Server.count = 0
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            made = loader(Web(server.server_port))
            rows = [row for micro in made for row in micro.data]
        finally:
            server.shutdown()
            thread.join()
    assert rows == [bytes([i]) * 64 for i in GlobalOrder(50, seed=2).ids(range(100)).tolist()]
    assert made.rows_read == Server.count > 120


# -- rows as bytes

_LEAF = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.binary(max_size=5),
    st.builds(
        lambda shape, kind: torch.arange(int(np.prod(shape))).reshape(shape).to(kind),
        st.lists(st.integers(0, 3), max_size=3),
        st.sampled_from([torch.float32, torch.int64, torch.bfloat16, torch.bool, torch.complex64]),
    ),
    st.builds(
        lambda shape, kind: np.arange(int(np.prod(shape))).reshape(shape).astype(kind),
        st.lists(st.integers(0, 3), max_size=3),
        st.sampled_from(["<f4", ">i2", "?", "<u8"]),
    ),
    st.sampled_from([np.float32(1.5), np.int64(3), Pair(1, "a"), {1: 2}, {3}]),
)
_ROW = st.recursive(
    _LEAF,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.text(max_size=3), inner, max_size=3),
    ),
    max_leaves=6,
)


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and bool((one == other).all())
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return repr(one) == repr(other)  # NaN


@settings(deadline=None, max_examples=many(300))
@given(st.lists(_ROW, max_size=5), st.integers(1, 3))
def test_rows_come_back_as_they_were(rows: list[Any], times: int) -> None:
    assert same(unpack(pack(rows * times)), rows * times)


def test_plain_rows_are_not_pickled(monkeypatch) -> None:
    rows = [{"x": torch.ones(3, requires_grad=True)[1:], "y": (np.arange(3)[::-1], b"a", "b", 1, None)}] * 3
    block = pack(rows)
    monkeypatch.setattr("pickle.loads", lambda *_: pytest.fail("pickled"))
    back = unpack(block)
    assert same(back, [{"x": torch.ones(2), "y": (np.arange(3)[::-1], b"a", "b", 1, None)}] * 3)
    assert b"\x80\x05" not in block.numpy().tobytes()  # a pickle's first bytes
