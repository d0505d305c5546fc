"""A server that fails, truncates, drops connections and hangs: every row arrives whole, or an error names what failed."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from batchwright.core.errors import RunError
from batchwright.runtime import Access, JsonLines, Parquet, TarShards, TokenFile
from batchwright.runtime.data.reading import Reader
from tests.needs import needs
from tests.runtime.data.sources import made
from tests.runtime.data.sources.server import serving

ROWS = [{"i": i, "text": "x" * (i % 37)} for i in range(200)]
TARS = [{"__key__": f"{i:05}", "txt": b"y" * (i % 700)} for i in range(60)]
TOKENS = np.arange(3000, dtype=np.uint16)
BIN, IDX = made.megatron([TOKENS[i * 15 : (i + 1) * 15].astype(np.int32) for i in range(200)])
FILES = {
    "a.jsonl": made.json_lines(ROWS),
    "a.parquet": made.parquet(ROWS, 20),
    "a.tar": made.tar(TARS),
    "a.npy": made.npy(TOKENS),
    "m.bin": BIN,
    "m.idx": IDX,
}
QUICK = {"first_pause": 0.001, "longest_pause": 0.01}
ORDER = random.Random(3).sample(range(200), 200)


def batches(source, size=16):
    """All rows in a random order, a batch at a time."""
    order = [i for i in ORDER if i < len(source)]
    rows = {}
    for at in range(0, len(order), size):
        ids = order[at : at + size]
        rows.update(zip(ids, source.__getitems__(ids), strict=True))
    return [rows[i] for i in range(len(source))]


FAULTS = {
    "every third request fails": lambda n, again: 503 if n % 3 == 0 else None,
    "too many requests": lambda n, again: 429 if n % 3 == 0 else None,
    "truncated": lambda n, again: "truncate" if n % 3 == 0 else None,
    "truncated with an agreeing length": lambda n, again: "short" if n % 3 == 0 else None,
    "dropped connections": lambda n, again: "drop" if again < 3 else None,
    "everything in turn": lambda n, again: [500, "truncate", "drop", "short", None][again % 5],
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_every_row_arrives_once_and_whole(fault, tmp_path):
    state = random.getstate()
    with serving(FILES, fault) as server:
        source = JsonLines(
            f"{server.url}/a.jsonl", index_folder=tmp_path, access=Access(tries=5, merge_gap=0, connections=1, **QUICK)
        )
        assert batches(source) == ROWS
        reads = source.reads
        assert reads.rows == 200 and reads.retries > 10
        # One more asked for the size. After a dropped connection aiohttp itself asks once more.
        assert reads.requests == len(server.gets) + 1 or "drop" in {fault(1, 0), fault(1, 2)}
    assert random.getstate() == state


@pytest.mark.parametrize("name", ["parquet", "tar", "npy", "megatron"])
def test_every_format_survives(name, tmp_path):
    with serving(FILES, FAULTS["everything in turn"]) as server:
        access = Access(tries=6, connections=2, merge_gap=100, **QUICK)
        source, expected = {
            "parquet": lambda: (Parquet(f"{server.url}/a.parquet", access=access), ROWS),
            "tar": lambda: (TarShards(f"{server.url}/a.tar", index_folder=tmp_path, access=access), TARS),
            "npy": lambda: (
                TokenFile(f"{server.url}/a.npy", sequence_length=15, access=access),
                TOKENS.reshape(200, 15).tolist(),
            ),
            "megatron": lambda: (TokenFile(f"{server.url}/m", access=access), TOKENS.reshape(200, 15).tolist()),
        }[name]()
        rows = batches(source)
        assert [r.tolist() for r in rows] == expected if isinstance(source, TokenFile) else rows == expected
        assert source.reads.retries > 0


def test_after_the_last_try_the_error_names_url_bytes_row_and_every_try(tmp_path):
    with serving(FILES, lambda n, again: [None, 503, "drop", "short"][n - 1] if n < 5 else 500) as server:
        source = JsonLines(f"{server.url}/a.jsonl", index_folder=tmp_path, access=Access(tries=4, **QUICK))
        start = sum(len(json.dumps(row)) + 1 for row in ROWS[:17])
        end = start + len(json.dumps(ROWS[17])) + 1
        with pytest.raises(RunError) as raised:
            source[17]
        message = str(raised.value)
        for part in (
            f"reading bytes {start:,} to {end:,} of {server.url}/a.jsonl (row 17) failed: try 1 (",
            "HTTP 503",
            "try 2 (",
            "try 3 (",
            f"{(end - start) // 2} of {end - start} bytes arrived",
            "try 4 (",
            "HTTP 500",
            "Access(tries=4, timeout=60) is the limit",
        ):
            assert part in message, (part, message)
        assert source.reads.retries == 3
        assert source.reads.rows == 0


@pytest.mark.parametrize("status", [403, 404, 401])
def test_what_does_not_pass_is_not_tried_again(status, tmp_path):
    with serving(FILES, lambda n, again: status if n > 1 else None) as server:
        source = JsonLines(f"{server.url}/a.jsonl", index_folder=tmp_path)
        len(source)
        with pytest.raises(RunError, match="not tried again"):
            source[0]
        assert len(server.gets) == 2 and source.reads.retries == 0


def test_a_file_that_is_not_there_fails_at_once():
    with serving(FILES) as server, pytest.raises(RunError, match=r"nothing\.jsonl.*FileNotFoundError"):
        len(JsonLines(f"{server.url}/nothing.jsonl"))


@pytest.mark.parametrize("fault", [503, 429, "drop"])
def test_opening_is_tried_again_too(fault, tmp_path):
    with serving(FILES, lambda n, again: fault if n < 6 else None) as server:
        server.head_fault = lambda n: fault if n < 6 else None
        source = JsonLines(f"{server.url}/a.jsonl", index_folder=tmp_path, access=Access(tries=8, **QUICK))
        assert list(source.__getitems__(range(200))) == ROWS
        assert source.reads.retries > 0
        server.head_fault, server.fault = (lambda n: 503), lambda n, again: 503
        broken = JsonLines(f"{server.url}/a.jsonl?signature=secret", access=Access(tries=2, **QUICK))
        with pytest.raises(
            RunError, match=r"the size of http://127\S+/a\.jsonl\?… failed: try 1 .*HTTP 503.*try 2 .*HTTP 503"
        ):
            len(broken)
        with pytest.raises(RunError) as raised:
            len(broken)
        assert "secret" not in f"{raised.value} {broken!r}"


def test_s3fs_over_a_failing_server(tmp_path):
    needs("s3fs")
    state = random.getstate()
    files = {f"bucket/{name}": body for name, body in FILES.items()}
    with serving(files, FAULTS["everything in turn"]) as server:
        options = {"key": "key", "secret": "secret", "endpoint_url": server.url}
        access = Access(tries=6, timeout=20, merge_gap=100_000, storage_options=options, **QUICK)
        source = JsonLines("s3://bucket/a.jsonl", index_folder=tmp_path, access=access)
        assert source.__getitems__([5, 7, 199]) == [ROWS[5], ROWS[7], ROWS[199]]
        assert source.reads.retries > 0
        assert "secret" not in repr(access)
        server.fault = lambda n, again: 403
        with pytest.raises(RunError, match=r"s3://bucket/a\.jsonl \(row 3\) failed.*not tried again"):
            source[3]
    assert random.getstate() == state


@pytest.mark.parametrize(("protocol", "mode"), [("s3", "legacy"), ("s3", "standard"), ("s3", "adaptive"), ("gs", "")])
def test_a_library_that_tries_again_leaves_the_random_state_alone(protocol, mode, tmp_path, monkeypatch):
    needs({"s3": "s3fs", "gs": "gcsfs"}[protocol])
    if mode:
        monkeypatch.setenv("AWS_RETRY_MODE", mode)
    about = {"bucket": "bucket", "name": "a.jsonl", "size": len(FILES["a.jsonl"]), "updated": "2026-01-01T00:00:00Z"}
    files = {
        "bucket/a.jsonl": FILES["a.jsonl"],
        "storage/v1/b/bucket/o/a.jsonl": json.dumps(about).encode(),
        "download/storage/v1/b/bucket/o/a.jsonl": FILES["a.jsonl"],
    }
    with serving(files) as server:
        options = {"endpoint_url": server.url} | (
            {"key": "key", "secret": "secret", "config_kwargs": None}  # None: s3fs's own default
            if protocol == "s3"
            else {"token": "anon", "project": "project"}
        )
        source = JsonLines(
            f"{protocol}://bucket/a.jsonl",
            index_folder=tmp_path,
            access=Access(merge_gap=0, storage_options=options, **QUICK),
        )
        len(source)
        state, before = random.getstate(), len(server.gets)
        server.fault = lambda n, again: 503 if n == before + 1 else None
        reader = Reader(source, seed=1, collate=list)
        assert reader.rows(range(3), [5, 70, 199]) == [ROWS[5], ROWS[70], ROWS[199]]
        assert len(server.gets) == before + 4 and reader.rows_read == 3
        assert reader.batched and random.getstate() == state
        assert source.reads.retries == (1 if protocol == "s3" else 0)  # gcsfs has no setting for its tries


def test_a_hang_is_bounded(tmp_path):
    with serving(FILES, lambda n, again: "hang" if n > 1 else None) as server:
        source = JsonLines(f"{server.url}/a.jsonl", index_folder=tmp_path)
        len(source)  # with time enough, also on a busy machine
        source._store.access = Access(tries=2, timeout=0.2, **QUICK)
        with pytest.raises(
            RunError, match=r"try 1 .*no answer within the time-out; try 2 .*no answer within the time-out"
        ):
            source.__getitems__([0, 5, 9])
        # The source counts its tries. On a busy machine, one may have ended before the server saw it.
        assert source.reads.retries == 1 and len(server.gets) <= 3


def test_one_hanging_connection_costs_a_try(tmp_path):
    with serving(FILES, lambda n, again: "hang" if n == 2 else None) as server:
        source = JsonLines(f"{server.url}/a.jsonl", index_folder=tmp_path, access=Access(tries=20, timeout=1, **QUICK))
        assert source[3] == ROWS[3]
        assert source.reads.retries >= 1


def test_a_server_without_ranges_is_named(tmp_path):
    with serving(FILES, lambda n, again: "whole" if n > 1 else None) as server:
        source = JsonLines(f"{server.url}/a.jsonl", index_folder=tmp_path)
        with pytest.raises(RunError, match=r"bytes arrived instead of 21: the server ignores ranges.*not tried again"):
            source[0]


def test_no_more_connections_than_allowed_and_one_request_for_neighbours(tmp_path):
    with serving(FILES, latency=0.002) as server:
        source = JsonLines(f"{server.url}/a.jsonl", index_folder=tmp_path, access=Access(connections=3, merge_gap=0))
        len(source)
        before = len(server.gets)
        source.__getitems__(list(range(0, 200, 2)))  # a hundred rows with gaps
        assert len(server.gets) - before == 100
        assert server.connections <= 4  # and the one that asked for the size
        before = source.reads.requests
        assert source.__getitems__(list(range(200))) == ROWS
        assert source.reads.requests - before == 1
        far = JsonLines(f"{server.url}/a.jsonl", index_folder=tmp_path, access=Access(merge_gap=100))
        far.__getitems__(list(range(0, 200, 2)))
        assert far.reads.requests == 2  # the size, and one for all rows


def test_parquet_errors_of_the_network_keep_their_names():
    with serving(FILES, lambda n, again: 500 if n > 1 else None) as server:
        source = Parquet(f"{server.url}/a.parquet", access=Access(tries=2, **QUICK))
        assert len(source) == 200
        with pytest.raises(RunError, match=r"a\.parquet \(row group 5, row 100\) failed.*HTTP 500.*try 2"):
            source[100]
