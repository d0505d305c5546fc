"""What counts as a stall: a process that stops, not one that compiles, evaluates or saves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from batchwright.launch.directory import RunDirectory
from batchwright.launch.records import Manifest
from batchwright.launch.work import LoopFollower

pytestmark = pytest.mark.torch

HERE = Path(__file__).resolve().parent


def stalling(run, *flags: str, args: tuple[str, ...], samples: int = 64) -> tuple[str, ...]:
    """The arguments for a run of stalling.py."""
    made = run.task("--json", *flags, ramp="0:16", samples=samples, nodes=1, args=args)
    return (f"{HERE / 'stalling.py'}:task", *made[1:])


def test_a_process_that_stops_right_after_its_first_step_has_the_limit_of_a_step(run):
    """Its thread that writes events stops, too: the first step must be on disk before."""
    arguments = stalling(
        run, "--stall-seconds", "3", "--start-seconds", "3000", args=(f"freeze={run.directory}.frozen",)
    )
    code, out, err = run(*arguments)
    assert code == 0, err
    assert "is stopped" in err and json.loads(out)["ledger"]["ok"], err
    Path(f"{run.directory}.frozen").unlink()


def test_an_evaluation_and_a_save_may_take_longer_than_the_limit(run):
    settings = ("task.settings.evaluation_samples=512", "task.settings.evaluate_every=32")
    arguments = stalling(
        run, *settings, "--stall-seconds", "12", "--max-retries", "0", args=("evaluation=0.5", "save=15"), samples=32
    )
    code, out, err = run(*arguments)
    assert code == 0 and "no progress" not in err, err
    assert json.loads(out)["ledger"]["ok"]


def test_what_the_loop_says_is_progress(tmp_path):
    events = tmp_path / "events" / "launch-00001.jsonl"
    events.parent.mkdir()
    manifest = Manifest(1, 0, 1, 1, 0, 64, (), {}, "", 0.0)
    follower = LoopFollower(RunDirectory(tmp_path), manifest)
    seen = []
    for number, kind in enumerate(
        (
            "launch",
            "step",
            "evaluating",
            "evaluating",
            "evaluation",
            "saving",
            "tracker",
            "save",
            "nonfinite",
            "tracker",
        )
    ):
        line = {"kind": kind, "time": float(number), "samples": 8, "loss": 1.0, "load_seconds": 0.0}
        with open(events, "a") as file:
            file.write(json.dumps(line) + "\n")
        seen.append(follower.read())
    assert len(set(map(repr, seen))) == len(seen)  # every event is a change
    assert [p.saving for p in seen] == [False] * 5 + [True, True, False, False, False]
    assert [p.nonfinite for p in seen] == [False] * 8 + [True, True]


def test_a_loss_that_stays_nonfinite_ends_the_run_after_one_retry_and_is_in_the_summary(run):
    arguments = stalling(run, "--stop-after-nonfinite", "2", "--checkpoint-samples", "16", args=("nan=1",), samples=256)
    code, out, err = run(*arguments)
    assert code == 5, err
    document = json.loads(out)
    assert document["state"] == "failed" and "not finite in 2 steps in a row" in err
    assert len(document["history"]) == 2 and document["nonfinite_steps"] == 2
    code, out, _ = run("--status", str(run.directory))
    assert "loss not finite in 2 steps" in out
