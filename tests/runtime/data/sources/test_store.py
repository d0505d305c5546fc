"""Requests are merged and never change what is read; the limits of `Access` are checked."""

from __future__ import annotations

import pickle
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.core.errors import MissingExtraError, PlanError, RunError
from batchwright.runtime import TokenFile
from batchwright.runtime.data.sources.access import Access, Reads, is_transient
from batchwright.runtime.data.sources.store import Span, Store, merge

BODY = random.Random(1).randbytes(2000)
bounds = st.tuples(st.integers(0, 2000), st.integers(0, 2000)).map(sorted)


@given(st.lists(st.tuples(st.sampled_from("ab"), bounds)), st.integers(0, 300), st.integers(1, 500))
def test_requests_cover_every_span_once_and_keep_to_their_limits(given, gap, largest):
    spans = [Span(url, start, end, 0) for url, (start, end) in given]
    requests = merge(spans, gap, largest)
    held = [i for request in requests for i in request.spans]
    assert sorted(held) == [i for i, s in enumerate(spans) if s.end > s.start]
    for request in requests:
        inside = [spans[i] for i in request.spans]
        assert {s.url for s in inside} == {request.url}
        assert (min(s.start for s in inside), max(s.end for s in inside)) == (request.start, request.end)
        longest = max(s.end - s.start for s in inside)
        assert request.end - request.start <= max(largest, longest)
        covered = set().union(*(range(s.start, s.end) for s in inside))
        start = None
        for x in range(request.start, request.end + 1):
            if x < request.end and x not in covered:
                start = x if start is None else start
            elif start is not None:
                assert x - start <= gap
                start = None


@given(st.lists(bounds), st.integers(0, 300), st.integers(1, 500))
def test_reading_is_slicing(tmp_path_factory, given, gap, largest):
    path = tmp_path_factory.getbasetemp() / "body"
    if not path.exists():
        path.write_bytes(BODY)
    store = Store(Access(merge_gap=gap, largest_request=largest))
    read = store.read([Span(str(path), start, end, 0) for start, end in given])
    assert read == [BODY[start:end] for start, end in given]
    assert store.reads.bytes >= len(set().union(*(range(a, b) for a, b in given)))


def test_a_local_file_that_became_shorter_is_never_a_short_row(tmp_path):
    (tmp_path / "a").write_bytes(b"12345")
    with pytest.raises(RunError, match=r"bytes 2 to 9 of .*/a \(row 7\) failed: .*the file ends at byte 5"):
        Store(Access()).read([Span(str(tmp_path / "a"), 2, 9, 7)])


def test_a_token_file_that_became_empty_is_named(tmp_path):
    path = tmp_path / "a.npy"
    np.save(path, np.arange(100, dtype="<i4"))
    tokens = TokenFile(path, sequence_length=10)
    assert len(tokens) == 10
    path.write_bytes(b"")
    with pytest.raises(RunError, match=r"/a\.npy has become empty") as raised:
        tokens[0]
    assert raised.value.field == "path"


@pytest.mark.parametrize(
    "wrong", [{"tries": 0}, {"timeout": 0}, {"connections": 0}, {"merge_gap": -1}, {"longest_pause": float("nan")}]
)
def test_limits_that_cannot_be_are_refused_by_name(wrong):
    with pytest.raises(PlanError) as raised:
        Access(**wrong)
    assert raised.value.field == next(iter(wrong))


def test_pauses_double_up_to_a_limit_and_leave_the_random_state_alone():
    state = random.getstate()
    access = Access(first_pause=1, longest_pause=5)
    for failures, limit in ((1, 1), (2, 2), (3, 4), (4, 5), (1000, 5)):
        assert all(limit / 2 <= access.pause(failures) <= limit for _ in range(50))
    assert len({access.pause(1) for _ in range(10)}) > 1
    assert random.getstate() == state


def test_what_may_pass_and_what_may_not():
    class Answer(Exception):
        def __init__(self, status):
            self.status = status

    assert all(is_transient(Answer(status)) for status in (500, 502, 503, 504, 429, 408))
    assert not any(is_transient(Answer(status)) for status in (400, 401, 403, 404, 416))
    wrapped = OSError("replaced")
    wrapped.__cause__ = Answer(403)
    assert not is_transient(wrapped)
    wrapped.__cause__ = ConnectionResetError()
    assert is_transient(wrapped)
    assert not is_transient(ValueError()) and not is_transient(PermissionError())


def test_counts_start_anew_in_another_process():
    reads = Reads()
    reads.add(rows=3, bytes=5)
    assert pickle.loads(pickle.dumps(reads)).record() == Reads().record()
    assert "rows=3" in repr(reads)


def test_a_package_that_is_missing_is_named_with_its_extra(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "fsspec", None)
    monkeypatch.setitem(sys.modules, "fsspec.asyn", None)
    with pytest.raises(MissingExtraError, match=r"batchwright\[data\]"):
        Store(Access()).stat(["http://127.0.0.1/a"])
    with pytest.raises(PlanError, match="cannot read"):
        monkeypatch.undo()
        Store(Access()).system("nothing://a")
