"""The loop with hosts that read for others: the same weights, any number of readers after a restart, kills of each kind."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # the helpers beside this file, under any import mode

from loop_runs import Launch, final, launch, launches, progress, ramp, status

from batchwright.core.errors import ConfigError
from batchwright.runtime.loop.events import read_events
from batchwright.runtime.loop.settings import Settings
from batchwright.runtime.state.audit import audit
from tests.runtime.data.sources.server import serving

pytestmark = [pytest.mark.torch, pytest.mark.slow]
SIZE = 100  # samples of the dataset: 192 are almost two epochs


def options(directory: Path, **changes) -> dict:
    made = {"directory": str(directory), "micro_batch_size": 2, "allow_ragged": True, "checkpoint_every": 32}
    made |= {"ranks_per_host": 1}
    return {**made, **changes}


def until(condition, seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_weights_do_not_depend_on_who_reads(tmp_path) -> None:
    """Bit by bit, with dropout, a ramp, ragged shares, evaluations and fillers."""
    extra = {"evaluate_every": 64, "evaluation_samples": 10}
    kinds = {"dropout": 0.2, "size": SIZE + 10}
    cases = {"all": {}, "two": {"loading_hosts": 2, "read_ahead": 3, "num_workers": 2}, "one": {"loading_hosts": [2]}}
    for name, case in cases.items():
        assert launch(3, ramp(), options(tmp_path / name, **extra, **case), **kinds) == [0, 0, 0]
    weights = {name: final(tmp_path / name) for name in cases}
    for name in ("two", "one"):
        assert [key for key in weights["all"] if not torch.equal(weights["all"][key], weights[name][key])] == []
        said = status(tmp_path / name)["loading"]
        readers = 1 + (name == "two")
        assert (said["hosts"], said["loading_hosts"], said["readers"]) == (3, readers, readers)
        assert (said["rows_read"], said["rows_trained"], said["read_amplification"]) == (192, 192, 1.0)
        assert status(tmp_path / name)["evaluation_loss"] == pytest.approx(status(tmp_path / "all")["evaluation_loss"])
    events = read_events(tmp_path / "two")
    waits = [event["wait_seconds"] for event in events if event["kind"] == "step"]
    assert all(wait >= 0 for wait in waits) and sum(waits) == pytest.approx(said_wait(events))


def test_only_one_rank_reads_what_identifies_the_dataset(tmp_path) -> None:
    """With hosts that read for others, the others do not open the dataset at all."""
    for name, options_, reading in (("all", {}, {0, 1, 2}), ("one", {"loading_hosts": [2]}, {2})):
        (tmp_path / name).mkdir()
        made = options(tmp_path / name / "run", **options_)
        assert launch(3, ramp(), made, size=SIZE, seen=str(tmp_path / name)) == [0, 0, 0]
        asked = {
            int(path.stem.split("-")[1]): path.read_text().split() for path in (tmp_path / name).glob("rank-*.txt")
        }
        assert set(asked) == reading
        rows = sum(what != "len" for said in asked.values() for what in said)
        # 8 samples, read twice: a dataset may draw, and then it cannot be recognised.
        assert rows - status(tmp_path / name / "run")["loading"]["rows_read"] == 16


def said_wait(events: list[dict]) -> float:
    return next(event["wait_seconds"] for event in events if event["kind"] == "stop")


def go_on(tmp_path: Path, chain: tuple[tuple[int, int], ...]) -> None:
    """Launches on other numbers of ranks and readers, each from a position in mid-epoch."""
    ends = (80, 128, 192)  # ends of steps: 8 to sample 32, then 16 to 96, then 32
    for (ranks, readers), end in zip(chain, ends, strict=True):
        made = options(tmp_path, loading_hosts=readers, read_ahead=2, end_sample=end if end < 192 else None)
        assert launch(ranks, ramp(), made, size=SIZE) in ([0] * ranks, [75])
    found = audit(tmp_path)
    assert (found.ok, found.samples, found.gaps, found.repeats) == (True, 192, 0, 0), found.findings
    assert found.ids_checked and found.launches == 3
    said = [json.loads((tmp_path / "status" / f"launch-{n:05d}.json").read_text())["loading"] for n in range(3)]
    assert [one["loading_hosts"] for one in said] == [readers for _, readers in chain]
    assert [one["rows_read"] for one in said] == [one["rows_trained"] for one in said]


def test_a_run_goes_on_with_other_readers_and_ranks(tmp_path) -> None:
    go_on(tmp_path, ((4, 4), (1, 1), (3, 2)))


@pytest.mark.rounds
def test_a_run_goes_on_with_8_then_3_then_5_readers(tmp_path) -> None:
    go_on(tmp_path, ((8, 8), (3, 3), (5, 5)))


def test_a_reader_and_a_trainer_are_killed_and_no_sample_is_lost(tmp_path) -> None:
    made = options(tmp_path, loading_hosts=1, checkpoint_every=16)
    for victim in (0, 1):  # the only reader, then a rank that does not read
        before = launches(tmp_path)
        running = Launch(2, ramp(), made, {"size": SIZE, "pause": 0.02})
        until(lambda before=before: launches(tmp_path) > before and progress(tmp_path) >= 16)
        running.kill(victim)
        codes = running.wait()  # the other rank fails by itself
        assert codes[victim] == -9 and codes[1 - victim] not in (0, -9)
    assert launch(2, ramp(), made, size=SIZE) == [0, 0]
    found = audit(tmp_path)
    assert (found.ok, found.samples, found.gaps, found.repeats) == (True, 192, 0, 0), found.findings
    assert found.ids_checked and found.launches == 3


def test_a_server_that_fails_and_a_reader_that_is_killed_lose_no_sample(tmp_path) -> None:
    """Every range of the file fails, is cut off, is dropped and is too short before it arrives; the only reader is killed."""
    rows = {"a.jsonl": "".join(f'{{"i": {i}}}\n' for i in range(SIZE)).encode()}
    made = options(tmp_path / "run", loading_hosts=1, checkpoint_every=16)
    with serving(rows, lambda n, again: [500, "truncate", "drop", "short", None][again % 5]) as server:
        task = {"url": f"{server.url}/a.jsonl", "index_folder": str(tmp_path), "size": SIZE}
        running = Launch(2, ramp(), made, {**task, "pause": 0.02})
        until(lambda: progress(tmp_path / "run") >= 16)
        running.kill(0)
        codes = running.wait()
        assert codes[0] == -9 and codes[1] not in (0, -9)
        assert launch(2, ramp(), made, **task) == [0, 0]
        assert len(server.gets) > 3 * 192
    found = audit(tmp_path / "run")
    assert (found.ok, found.samples, found.gaps, found.repeats) == (True, 192, 0, 0), found.findings
    assert found.ids_checked and found.launches == 2
    said = status(tmp_path / "run")["loading"]
    assert said["rows_read"] == said["rows_trained"]  # the source tries again by itself
    assert launch(2, ramp(), options(tmp_path / "local", checkpoint_every=16), size=SIZE) == [0, 0]
    expected, weights = final(tmp_path / "local"), final(tmp_path / "run")
    assert [key for key in expected if not torch.equal(expected[key], weights[key])] == []


def test_settings_of_reading_hosts_are_checked() -> None:
    wrong = (
        {"loading_hosts": 0},
        {"loading_hosts": (0, -1)},
        {"read_ahead": 2},
        {"read_timeout": 0.0},
        {"open_timeout": 0.0},
        {"read_timeout": 1e10},
        {"open_timeout": float("inf")},
        {"open_timeout": "long"},
        {"read_retries": -1},
    )
    for changes in wrong:
        with pytest.raises(ConfigError, match=next(iter(changes))):
            Settings(directory="", **changes)
    assert Settings(directory="", loading_hosts=[1, 2]).loading_hosts == (1, 2)
