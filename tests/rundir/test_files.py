"""The files of a run: written whole, read while they grow, never through a symbolic link."""

from __future__ import annotations

import errno
import json
import os

import pytest

from batchwright.core.errors import EnvironmentFault, RunError
from batchwright.rundir import atomic
from batchwright.rundir.fence import Fence
from batchwright.rundir.files import JsonLines, create_once, digest_of, find_object, read_json, write_fault, write_json
from batchwright.rundir.status import last_seen


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "plan.json"
    write_json(path, {"step": 1})

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_json(path, {"step": 2})
    assert read_json(path) == {"step": 1} and [p.name for p in tmp_path.iterdir()] == ["plan.json"]


def test_a_link_is_replaced_by_a_write_and_refused_for_appending(tmp_path):
    (tmp_path / "victim").touch()
    link = tmp_path / "status.json"
    link.symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="does not write through links"), open(link, "a", opener=atomic.no_follow):
        pass
    atomic.write(link, "new")
    assert not link.is_symlink() and link.read_text() == "new" and (tmp_path / "victim").read_text() == ""


def test_json_that_is_missing_or_damaged_is_named_or_none(tmp_path):
    path = tmp_path / "launch.json"
    with pytest.raises(RunError, match=r"launch\.json is missing"):
        read_json(path)
    path.write_text('{"launch": ')
    with pytest.raises(RunError, match=r"launch\.json cannot be read"):
        read_json(path)
    assert find_object(path) is None and find_object(tmp_path / "none.json") is None
    path.write_text("[3]")
    assert find_object(path) is None and read_json(path) == [3]


@pytest.mark.parametrize("levels", [65, 400, 100_000])  # 400: parsed by json, but too deep to be encoded again
@pytest.mark.parametrize("left, right", ["[]", ('{"a":', "}")])
def test_json_that_is_nested_too_deeply_is_damaged(tmp_path, levels, left, right):
    path = tmp_path / "outcome.json"
    path.write_text(left * levels + "1" + right * levels)
    with pytest.raises(RunError, match="nested too deeply"):
        read_json(path)
    assert find_object(path) is None


def test_json_of_64_levels_or_with_many_brackets_is_read(tmp_path):
    path = tmp_path / "outcome.json"
    for value in ({"a": [[{}, []]] * 100}, json.loads('{"a":' * 63 + "[]" + "}" * 63)):
        write_json(path, value)
        assert read_json(path) == value


def test_text_that_utf8_cannot_encode_is_written(tmp_path):
    name = os.fsdecode(b"caf\xe9.py")  # a file name in Latin-1
    write_json(tmp_path / "status.json", {"message": f"{name} …"})
    assert read_json(tmp_path / "status.json") == {"message": f"{name} …"}


def test_a_file_is_created_once_also_if_the_answer_was_lost(tmp_path, monkeypatch):
    link = os.link

    def lost(complete, path) -> None:
        link(complete, path)
        raise FileExistsError(path)  # NFS: the request was repeated and found our own file

    monkeypatch.setattr(os, "link", lost)
    assert create_once(tmp_path / "claim.json", {"job": "1"})
    monkeypatch.setattr(os, "link", link)
    assert not create_once(tmp_path / "claim.json", {"job": "2"})
    assert json.loads((tmp_path / "claim.json").read_text()) == {"job": "1"}
    assert [p.name for p in tmp_path.iterdir()] == ["claim.json"]


def test_without_hard_links_a_file_is_created_once_too(tmp_path, monkeypatch):
    def refused(complete, path) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refused)
    assert create_once(tmp_path / "claim.json", {"job": "1"}, mode=0o600)
    assert not create_once(tmp_path / "claim.json", {"job": "2"}, mode=0o600)
    assert read_json(tmp_path / "claim.json") == {"job": "1"}
    assert (tmp_path / "claim.json").stat().st_mode & 0o077 == 0
    assert [p.name for p in tmp_path.iterdir()] == ["claim.json"]


def test_lines_are_read_once_and_only_when_they_are_complete(tmp_path):
    path = tmp_path / "events.jsonl"
    lines = JsonLines(path)
    assert lines.new() == []
    path.write_bytes(b'{"step": 1}\n{"st')
    assert lines.new() == [{"step": 1}]
    with open(path, "ab") as file:
        file.write(b'ep": 2}\nno JSON\n{"step": 3}\n')
    assert lines.new() == [{"step": 2}, {"step": 3}]
    assert lines.new() == []


def test_only_the_newest_launch_may_write(tmp_path):
    first, second = Fence(tmp_path, 1), Fence(tmp_path, 2)
    assert Fence.current(tmp_path) is None and not first()
    assert first.claim()() and first.claim()()
    assert second.claim()() and not first()
    with pytest.raises(EnvironmentFault, match="launch=1 is too late: launch 2 has taken over") as caught:
        first.claim()
    assert caught.value.nearest == (3,) and Fence.current(tmp_path) == 2


def test_a_disk_error_says_what_was_not_written_and_what_to_do(tmp_path):
    fault = write_fault(
        OSError(errno.ENOSPC, "No space left on device"), "the status", tmp_path, "Nothing was changed."
    )
    assert isinstance(fault, EnvironmentFault)
    assert "the status could not be written" in str(fault) and "bytes are free" in str(fault)
    assert "Nothing was changed. Free some space" in str(fault)


DAMAGED = [
    b'{"kind": "step\xff"}',
    b"[1]",
    b"3",
    b"null",
    b'"text"',
    b"{",
    b"",
    b"\0" * 9,
    b"[" * 100_000,
    b"\xff\xfe{}",
]


def test_lines_that_are_no_json_objects_are_left_out(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"\n".join([b'{"step": 1}', *DAMAGED, b'{"step": 2}', b""]))
    assert JsonLines(path).new() == [{"step": 1}, {"step": 2}]
    for number, line in enumerate(DAMAGED):
        (tmp_path / f"{number}.json").write_bytes(line)
        assert find_object(tmp_path / f"{number}.json") is None


@pytest.mark.parametrize("kind", ["FIFO", "endless", "folder", "loop"])
def test_what_is_no_regular_file_is_refused_at_once(tmp_path, kind):
    path = tmp_path / "plan.json"
    make = {
        "FIFO": lambda: os.mkfifo(path),
        "endless": lambda: path.symlink_to("/dev/zero"),
        "folder": path.mkdir,
        "loop": lambda: path.symlink_to(path.name),
    }
    make[kind]()
    assert find_object(path) is None and JsonLines(path).new() == []
    with pytest.raises(RunError, match=r"plan\.json cannot be read"):
        read_json(path)
    with pytest.raises(OSError):
        digest_of(path)
    with pytest.raises(OSError), open(path, "a", opener=atomic.no_follow):
        pass


@pytest.mark.parametrize(
    "text", ["[]", "{}", '{"launch": "3"}', '{"launch": -1}', '{"launch": 1e308}', "NaN", "[" * 9999]
)
def test_a_damaged_fence_is_an_error_that_names_the_file(tmp_path, text):
    (tmp_path / "launch.json").write_text(text)
    with pytest.raises(RunError, match=r"launch\.json"):
        Fence.current(tmp_path)


@pytest.mark.parametrize(
    "times", ["text", [1], {"save_seconds": "1", "load_seconds": 1e999, "setup_seconds": 2.5}, None]
)
def test_damaged_times_of_the_launch_before_are_left_out(tmp_path, times):
    for folder in ("ledger", "events"):
        (tmp_path / folder).mkdir()
    (tmp_path / "events" / "launch-00001.jsonl").touch()
    (tmp_path / "ledger" / "launch-00001-rank-00000.jsonl").symlink_to("nowhere")
    write_json(tmp_path / "status" / "launch-00001.json", {"times": times}, allow_nan=True)
    assert last_seen(tmp_path, 2)["times"] == ({"setup_seconds": 2.5} if isinstance(times, dict) else {})
