"""Events: written by a thread, read back over restarts, shown as a bar or as lines; trackers that fail, are slow or hang."""

from __future__ import annotations

import io
import json
import threading
import time

import pytest

from batchwright.core.errors import EnvironmentFault
from batchwright.runtime.loop import events as module
from batchwright.runtime.loop.events import Events, ProgressBar, read_events, trackers_hang

STEP = {
    "step": 3,
    "samples": 32,
    "tokens": 64.0,
    "loss": 1.5,
    "global_batch_size": 8,
    "stage": 0,
    "ranks": 2,
    "tokens_per_second": 1234.5,
}


class Kept:
    def __init__(self, fails: bool = False) -> None:
        self.seen, self.closed, self.fails = [], False, fails

    def event(self, event) -> None:
        if self.fails:
            raise OSError("no plot")
        self.seen.append(event)

    def close(self) -> None:
        self.closed = True


def test_events_reach_the_file_and_the_trackers_in_order(tmp_path):
    kept = Kept()
    events = Events(tmp_path / "events" / "launch-00002.jsonl", [Kept(fails=True), kept], launch=2)
    for step in range(1000):
        events.emit("step", step=step, samples=step * 8, loss=float("nan") if step == 5 else 1.0)
    events.close()
    events.close()
    read = read_events(tmp_path)
    steps = [e for e in read if e["kind"] == "step"]
    assert [e["step"] for e in steps] == list(range(1000)) and all(e["launch"] == 2 and e["time"] > 0 for e in steps)
    assert steps[5]["loss"] == "nan"
    assert [e["error"] for e in read if e["kind"] == "tracker"] == ["no plot"]  # it was removed
    assert len(kept.seen) == 1000 and kept.closed


def test_emit_only_appends(tmp_path):
    class Slow(Kept):
        def event(self, event) -> None:
            time.sleep(0.2)

    events = Events(tmp_path / "launch-00000.jsonl", [Slow()])
    before = time.thread_time()
    for _ in range(3):
        events.emit("step", step=1)
    assert time.thread_time() - before < 0.1  # this thread did not wait
    events.close()


def test_steps_that_a_later_launch_repeated_are_left_out(tmp_path):
    folder = tmp_path / "events"
    folder.mkdir()
    first = [{"kind": "launch", "samples": 0}, *({"kind": "step", "samples": 8 * n, "loss": 1.0} for n in (1, 2, 3))]
    (folder / "launch-00000.jsonl").write_text("".join(json.dumps(e) + "\n" for e in first) + '{"kind": "st')
    again = [{"kind": "launch", "samples": 16}, {"kind": "step", "samples": 24, "loss": 2.0}]
    (folder / "launch-00001.jsonl").write_text("".join(json.dumps(e) + "\n" for e in again))
    assert [(e["samples"], e["loss"]) for e in read_events(tmp_path) if e["kind"] == "step"] == [
        (8, 1.0),
        (16, 1.0),
        (24, 2.0),
    ]
    assert len([e for e in read_events(tmp_path, lineage=False) if e["kind"] == "step"]) == 4


def test_lines_where_there_is_no_terminal():
    stream = io.StringIO()
    progress = ProgressBar(64, stream, every=1000)
    progress.event({"kind": "launch", "launch": 1, "ranks": 2, "strategy": "ddp", "samples": 0})
    progress.event({"kind": "step", **STEP})
    progress.event({"kind": "step", **STEP, "step": 4})  # too soon after the last
    progress.event({"kind": "evaluation", "samples": 32, "loss": 1.25})
    progress.event({"kind": "stop", "samples": 64, "reason": "end"})
    progress.close()
    assert stream.getvalue().splitlines() == [
        "launch 1: 2 ranks, ddp, from sample 0",
        "step 3 · 32 of 64 samples · loss 1.5000 · batch 8 · stage 0 · 2 ranks · 1,234 tokens/s",
        "evaluation at 32 samples: loss 1.2500",
        "stopped at 64 of 64 samples: end",
    ]


def test_a_bar_on_a_terminal():
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    progress = ProgressBar(64, stream)
    progress.event({"kind": "step", **STEP})
    progress.event({"kind": "evaluation", "samples": 32, "loss": 1.25})
    progress.close()
    assert "step 3" in stream.getvalue() and "50%" in stream.getvalue() and "loss 1.2500" in stream.getvalue()


def test_a_tracker_that_fails_to_close_does_not_fail_the_run(tmp_path):
    class Stuck(Kept):
        def close(self) -> None:
            raise OSError("no room")

    kept = Kept()
    events = Events(tmp_path / "events" / "launch-00000.jsonl", [Stuck(), kept])
    events.emit("step", step=1, samples=8)
    events.close()
    assert kept.closed and [e.get("error") for e in read_events(tmp_path)] == [None, "no room"]


class Hanging(Kept):
    """Waits in `event`, or in `close`, until it is released."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.released = where, threading.Event()

    def event(self, event) -> None:
        if self.where == "event":
            self.released.wait()
        super().event(event)

    def close(self) -> None:
        if self.where == "close":
            self.released.wait()
        super().close()


@pytest.mark.parametrize("where", ["event", "close"])
def test_a_tracker_that_hangs_delays_neither_the_file_nor_others_nor_the_end(tmp_path, where):
    hanging, kept = Hanging(where), Kept()
    events = Events(tmp_path / "events" / "launch-00000.jsonl", [hanging, kept])
    for step in range(3):
        events.emit("step", step=step, samples=8 * step)
    while len(kept.seen) < 3 or len(read_events(tmp_path)) < 3:  # without `now`: the thread of the file wrote it
        time.sleep(0.01)
    assert not trackers_hang()
    events.close(seconds=0.1)
    assert trackers_hang() and kept.closed
    assert [e["error"] for e in read_events(tmp_path) if e["kind"] == "tracker"] == [
        "it did not close within 0.1 s; what it has not sent is lost"
    ]
    hanging.released.set()
    while trackers_hang():
        time.sleep(0.01)
    assert len(hanging.seen) == 3 and hanging.closed


def test_a_slow_tracker_misses_the_oldest_events_and_a_line_says_how_many(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_MOST_WAITING", 10)
    hanging, kept = Hanging("event"), Kept()
    events = Events(tmp_path / "events" / "launch-00000.jsonl", [hanging, kept])
    events.emit("step", now=True, step=0, samples=0)
    while events._feeds[0]._waiting:  # until the thread has taken the first
        time.sleep(0.01)
    for step in range(1, 31):
        events.emit("step", now=True, step=step, samples=step)
        while len(kept.seen) < step:
            time.sleep(0.001)
    hanging.released.set()
    events.close()
    assert [e["step"] for e in hanging.seen] == [0, *range(21, 31)]
    assert len(kept.seen) == 31
    assert [(e["tracker"], e["error"]) for e in read_events(tmp_path) if e["kind"] == "tracker"] == [
        ("Hanging", "it is slower than the run, and has missed 20 events")
    ]


def test_a_tracker_that_exits_is_one_that_failed(tmp_path):
    class Exits(Kept):
        name = "exits"

        def event(self, event) -> None:
            raise SystemExit

    events = Events(tmp_path / "events" / "launch-00000.jsonl", [Exits()])
    events.emit("step", step=0, samples=0)
    events.close()
    assert [(e["tracker"], e["error"]) for e in read_events(tmp_path)[1:]] == [("exits", "SystemExit")]


def test_events_that_cannot_be_written_are_an_error(tmp_path):
    (tmp_path / "events").write_text("a file")
    with pytest.raises(EnvironmentFault, match="the events could not be written to"):
        Events(tmp_path / "events" / "launch-00000.jsonl")


def test_events_are_not_written_through_a_link(tmp_path):
    (tmp_path / "victim").touch()
    (tmp_path / "events.jsonl").symlink_to(tmp_path / "victim")
    with pytest.raises(EnvironmentFault, match="does not write through links"):
        Events(tmp_path / "events.jsonl")
    assert (tmp_path / "victim").read_text() == ""


def test_damaged_lines_are_no_events(tmp_path):
    (tmp_path / "events").mkdir()
    good = b'{"kind": "step", "samples": 8}'
    bad = (b"[]", b"{}", b'{"kind": 3}', b'{"kind": "step", "samples": "8"}', b'{"kind": "launch", "samples": null}')
    (tmp_path / "events" / "launch-00000.jsonl").write_bytes(b"\n".join([*bad, good, b"\xff", b""]))
    (tmp_path / "events" / "launch-00001.jsonl").write_bytes(b'{"kind": "launch"}\n')
    assert read_events(tmp_path, lineage=False) == [{"kind": "step", "samples": 8}, {"kind": "launch"}]
    assert read_events(tmp_path) == [{"kind": "launch"}]
