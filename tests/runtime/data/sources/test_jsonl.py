"""Lines of hostile files, and the index: built once, kept, built anew when the file changes."""

from __future__ import annotations

import json
import multiprocessing
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.core.errors import PlanError, RunError
from batchwright.runtime import JsonLines
from batchwright.runtime.data.sources import jsonl
from tests.runtime.data.sources.server import serving


def rows(tmp_path, body: bytes) -> list:
    (tmp_path / "a.jsonl").write_bytes(body)
    return list(JsonLines(tmp_path / "a.jsonl"))


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"", []),
        (b"\n\n \n", []),
        (b"1", [1]),
        (b"1\n2", [1, 2]),
        (b"1\r\n2\r\n", [1, 2]),
        (b"\xef\xbb\xbf1\n2\n", [1, 2]),
        (b"\xef\xbb\xbf\n1\n", [1]),
        (b"\xef\xbb\xbf", []),
        (b"\n\n1\n\n \t\r\n2\n\n", [1, 2]),
        (b"  1\n\t2", [1, 2]),
        ('"é\u2028"\n"\\n"\n'.encode(), ["é\u2028", "\n"]),  # a line separator of Unicode ends no line
    ],
)
def test_lines(body, expected, tmp_path):
    assert rows(tmp_path, body) == expected


line = st.one_of(st.sampled_from([b"", b" ", b"\t \r", b"\r"]), st.integers(0, 999).map(lambda i: b" %d" % i))


@given(st.lists(line), st.booleans(), st.booleans(), st.integers(1, 9))
def test_lines_are_found_at_any_size_of_chunks(tmp_path_factory, lines, ended, marked, chunk):
    body = (b"\xef\xbb\xbf" if marked else b"") + b"\n".join(lines) + (b"\n" if ended and lines else b"")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jsonl, "_CHUNK", chunk + 3)  # a mark is not cut
        found = rows(tmp_path_factory.mktemp("lines"), body)
    assert found == [int(one) for one in lines if one.strip()]


def test_a_line_of_50_megabytes(tmp_path):
    long = "x" * 50_000_000
    (tmp_path / "a.jsonl").write_text(f'1\n"{long}"\n3\n')
    source = JsonLines(tmp_path / "a.jsonl")
    assert len(source) == 3
    assert source.__getitems__([2, 1, 0]) == [3, long, 1]


@pytest.mark.parametrize(
    ("body", "row", "message"),
    [
        (b'{"a": 1}\n\n\n{"a": ?}\n', 1, r"line 4 \(bytes 11 to 19, row 1\).* at byte 17: "),
        (b'{"a": 1}\n{"a": 1\n', 1, r"line 2 \(bytes 9 to 16, row 1\) is not valid JSON, at byte 16"),
        (b"\xef\xbb\xbf\r\n\r\n  nope\r\n", 0, r"line 3 \(bytes 9 to 13, row 0\).*begins with b'nope'"),
        (b'1\n"\xff"\n', 1, r"line 2 .*at byte 3"),
        (b"[" * 100_000, 0, "line 1 .*recursion"),
    ],
)
def test_invalid_json_names_file_line_and_offset(body, row, message, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(body)
    source = JsonLines(tmp_path / "a.jsonl")
    with pytest.raises(RunError, match=rf"(?s){tmp_path}/a\.jsonl, {message}"):
        source[row]


@pytest.mark.parametrize("head", [b"\x1f\x8b\x08", b"\x28\xb5\x2f\xfd", b"\xff\xfe1\0", b"PAR1"])
def test_files_without_lines_are_refused(head, tmp_path):
    with pytest.raises(PlanError, match="Convert it once"):
        rows(tmp_path, head + b"....")


def test_a_parser_of_the_user(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"1\r\n2")
    assert list(JsonLines(tmp_path / "a.jsonl", parse=bytes)) == [b"1", b"2"]


def test_the_index_is_built_once_and_anew_when_the_file_changes(tmp_path):
    path, index = tmp_path / "a.jsonl", tmp_path / "a.jsonl.rows"
    path.write_bytes(b"1\n2\n")
    first = JsonLines(path)
    assert (len(first), first.reads.bytes) == (2, 4)
    again = JsonLines(path)
    assert (len(again), again.reads.bytes) == (2, 0)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl", "a.jsonl.rows"]
    path.write_bytes(b"1\n23")
    os.utime(path, ns=(1, 1))
    assert list(JsonLines(path)) == [1, 23]
    whole = index.read_bytes()
    for damaged in (b"", whole[:-1], whole + b"\0", whole[:10], b"{}" + whole[2:], b"[1]\n", b"\xff" * len(whole)):
        index.write_bytes(damaged)
        assert list(JsonLines(path)) == [1, 23]
        assert index.read_bytes() == whole
    index.unlink()
    os.mkfifo(index)  # not opened: it would block
    assert list(JsonLines(path)) == [1, 23]


def test_the_index_goes_to_a_cache_if_the_folder_cannot_be_written(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    data = tmp_path / "data"
    data.mkdir()
    (data / "a.jsonl").write_bytes(b"1\n2\n")
    (data / "a.jsonl.rows.lock").mkdir()  # root may write anywhere, but not into a folder as a file
    assert len(JsonLines(data / "a.jsonl")) == 2
    assert len(list((tmp_path / "home/.cache/batchwright/rows").glob("*.rows"))) == 1
    again = JsonLines(data / "a.jsonl")
    assert (len(again), again.reads.bytes) == (2, 0)
    (tmp_path / "file").write_bytes(b"")
    nowhere = JsonLines(data / "a.jsonl", index_folder=tmp_path / "file" / "folder")
    assert list(nowhere) == [1, 2]


def test_a_remote_index_follows_the_etag(tmp_path):
    with serving({"a.jsonl": b"1\n2\n"}) as server:
        url = f"{server.url}/a.jsonl"
        assert list(JsonLines(url, index_folder=tmp_path)) == [1, 2]
        again = JsonLines(url, index_folder=tmp_path)
        assert (len(again), again.reads.bytes) == (2, 0)
        server.files["a.jsonl"], server.versions["a.jsonl"] = b"123\n", '"2"'
        assert list(JsonLines(url, index_folder=tmp_path)) == [123]
        server.versions["a.jsonl"] = ""  # without a version nothing is kept
        kept = {p: p.read_bytes() for p in tmp_path.iterdir()}
        assert list(JsonLines(url, index_folder=tmp_path)) == [123]
        assert {p: p.read_bytes() for p in tmp_path.iterdir()} == kept


def _length(url, folder, out):
    source = JsonLines(url, index_folder=folder)
    out.put((len(source), source.reads.bytes))


def test_processes_that_start_together_build_one_index(tmp_path):
    body = b"".join(json.dumps(i).encode() + b"\n" for i in range(1000))
    with serving({"a.jsonl": body}, latency=0.2) as server:
        context = multiprocessing.get_context("spawn")
        out = context.Queue()
        started = [context.Process(target=_length, args=(f"{server.url}/a.jsonl", tmp_path, out)) for _ in range(2)]
        for process in started:
            process.start()
        found = [out.get(timeout=60) for _ in started]
        for process in started:
            process.join()
    assert sorted(found) == [(1000, 0), (1000, len(body))]
    assert [p.suffix for p in tmp_path.iterdir()] == [".rows"]
