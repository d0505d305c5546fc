"""Trainers and samplers as ranks of a torchrun job: what one process trains, through kills, signals, hangs and failures."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the helpers beside this file, under any import mode

from rl_runs import start, wait_for
from rl_tasks import ROUNDS, run

from batchwright.core.ramp.rules import Thresholds
from batchwright.runtime import audit
from batchwright.runtime.loop.events import read_events

RAMP = {"stages": [[0, 4], [8, 8]], "end": 40}


def ranks(folder: Path, plan: dict[str, Any], workers: int, **settings: Any) -> dict[str, Any]:
    return {
        "settings": {
            "directory": str(folder / "run"), "rollout": "ranks", "rollout_workers": workers, "checkpoint_every": 8, **settings
        },
        "plan": plan,
        "rounds": ROUNDS,
    }  # fmt: skip


def record(folder: Path, launch: int = 0) -> Path:
    """The updates of the first trainer: a header, and a line for each."""
    return folder / "run" / "ledger" / "updates" / f"updates-launch-{launch:05d}-rank-00000.jsonl"


def output(folder: Path) -> str:
    return (folder / "output.log").read_text()


def kill(folder: Path, *victims: int) -> None:
    for victim in victims:
        os.kill(int((folder / "run" / f"pid-{victim}").read_text()), signal.SIGKILL)


def assert_trained(folder: Path, expected: dict[str, Any], prompts: int, launches: int = 1) -> None:
    """Every prompt once, and the weights of one process, up to the order of sums."""
    found = audit(folder / "run")
    assert found.ok and found.samples == prompts and found.responses == 4 * prompts, found
    assert found.launches == launches
    weights = json.loads((folder / "run" / "weights.json").read_text())
    for name, value in expected.items():
        np.testing.assert_allclose(weights[name], value.double().flatten().tolist(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "victims",
    [(1,), *(pytest.param(v, marks=pytest.mark.rounds) for v in ((0,), (2,), (0, 1, 2)))],
    ids=["trainer", "first trainer", "sampler", "all"],
)
def test_trainers_and_samplers_as_ranks(tmp_path, victims):
    """Two trainers and one sampler under torchrun train what one process trains; a killed rank costs no prompt. Both
    trainers get the same numbers of a round, and both are drawn."""
    expected, _ = run(tmp_path / "whole")
    spec = ranks(tmp_path, {"data_parallel_size": 2}, 1)
    spec["task"] = {"pause": 0.05}
    killed = start(tmp_path, spec, ranks=3)
    wait_for(record(tmp_path), 3, killed)
    kill(tmp_path, *victims)
    assert killed.wait(120) != 0
    process = start(tmp_path, spec, ranks=3)
    assert process.wait(180) == 0, output(tmp_path)
    assert_trained(tmp_path, expected, 48, launches=2)
    first, second = (json.loads((tmp_path / "run" / f"rounds-{rank}.json").read_text()) for rank in (0, 1))
    assert first == second and all(one["reward"] is not None for one in first)
    assert first[-1]["rollout_seconds"] > 0  # the responses of the first round may be those of the launch before
    events = [event for event in read_events(tmp_path / "run") if event["kind"] == "round"]
    processes = {process for event in events for process, *_ in event["spans"]}
    assert processes == {"trainer 0", "trainer 1", "rollout 0"}


@pytest.mark.rounds
@pytest.mark.parametrize(("trainers", "workers", "strategy"), [(1, 2, "auto"), (2, 1, "fsdp2"), (2, 2, "ddp")])
def test_other_numbers_of_ranks(tmp_path, trainers, workers, strategy):
    expected, _ = run(tmp_path / "whole")
    spec = ranks(tmp_path, {"data_parallel_size": trainers}, workers, strategy=strategy)
    process = start(tmp_path, spec, ranks=trainers + workers)
    assert process.wait(180) == 0, output(tmp_path)
    assert_trained(tmp_path, expected, 48)


@pytest.mark.rounds
def test_a_prompt_ramp_on_ranks_through_a_kill(tmp_path):
    """Killed in the second stage, whose rounds are larger."""
    schedule = Thresholds(tuple(map(tuple, RAMP["stages"]))).compile().until(RAMP["end"])
    expected, _ = run(tmp_path / "whole", schedule=schedule)
    spec = ranks(tmp_path, {"data_parallel_size": 2}, 1) | {"ramp": RAMP, "task": {"pause": 0.05}}
    killed = start(tmp_path, spec, ranks=3)
    wait_for(record(tmp_path), 1 + 3, killed)
    kill(tmp_path, 0, 1, 2)
    assert killed.wait(120) != 0
    assert start(tmp_path, spec, ranks=3).wait(180) == 0, output(tmp_path)
    assert_trained(tmp_path, expected, 40, launches=2)


def test_a_rollout_that_fails_on_a_rank_ends_all_ranks(tmp_path):
    spec = ranks(tmp_path, {}, 1)
    spec["task"] = {"fault": "raise", "at": 21}
    process = start(tmp_path, spec, ranks=2)
    assert process.wait(180) != 0
    message = "RLTask.rollout failed for the prompts at positions 20 to 22: ValueError: no such token"
    assert message in output(tmp_path)
    assert audit(tmp_path / "run").ok


@pytest.mark.rounds
def test_a_rollout_rank_that_hangs_is_an_error_and_nothing_is_lost(tmp_path):
    expected, _ = run(tmp_path / "whole")
    spec = ranks(tmp_path, {}, 1, rollout_timeout=5.0)
    spec["task"] = {"fault": "hang", "at": 21}
    process = start(tmp_path, spec, ranks=2)
    assert process.wait(180) != 0
    assert "rollout 0 has not answered for 5 s (rollout_timeout)" in output(tmp_path)
    del spec["task"]
    assert start(tmp_path, spec, ranks=2).wait(180) == 0, output(tmp_path)
    assert_trained(tmp_path, expected, 48, launches=2)


def test_a_trainer_that_fails_before_it_trains_ends_the_rollout_ranks(tmp_path):
    """The sampler is told why: it waits for no signal of the launcher."""
    spec = ranks(tmp_path, {}, 1, dataset_size=5)
    process = start(tmp_path, spec, ranks=2)
    assert process.wait(180) != 0
    # Both ranks have raised it, the sampler from what the trainer told.
    assert output(tmp_path).count("PlanError: dataset_size=5, but the task has 64 samples to train") == 2


def test_a_rollout_rank_with_another_dataset_samples_nothing(tmp_path):
    spec = ranks(tmp_path, {}, 1)
    spec["task"] = {"shorter": 4}
    process = start(tmp_path, spec, ranks=2)
    assert process.wait(180) != 0
    assert "RunError: rank 1, which samples, has GlobalOrder(size=60, seed=0, shuffle=True)" in output(tmp_path)
    assert not list((tmp_path / "run" / "rollouts").glob("**/*.*"))


def test_a_signal_to_a_rollout_rank_stops_the_run_and_the_call_before_it_does_not(tmp_path):
    directory = tmp_path / "run"
    spec = ranks(tmp_path, {}, 1)
    spec["task"], spec["before"] = {"pause": 0.05}, str(tmp_path / "before")
    process = start(tmp_path, spec, ranks=2)
    wait_for(record(tmp_path), 2, process)
    os.kill(int((directory / "pid-1").read_text()), signal.SIGTERM)
    assert process.wait(120) == 0, output(tmp_path)
    assert json.loads((tmp_path / "before" / "status.json").read_text())["state"] == "complete"
    status = json.loads((directory / "status.json").read_text())
    assert status["reason"] == "signal" and 0 < status["position"] < 48 and audit(directory).ok


@pytest.mark.rounds
@pytest.mark.parametrize("rank", [0, 2])
def test_a_signal_ends_many_rollout_ranks_in_order(tmp_path, rank):
    """gloo's broadcast is a tree: a rollout rank that left before it took its weights would take others with it."""
    spec = ranks(tmp_path, {}, 4)
    spec["rounds"], spec["task"] = 500, {"pause": 0.01}
    process = start(tmp_path, spec, ranks=5)
    wait_for(record(tmp_path), 3, process)
    os.kill(int((tmp_path / "run" / f"pid-{rank}").read_text()), signal.SIGTERM)
    assert process.wait(180) == 0, output(tmp_path)
    assert "Connection closed" not in output(tmp_path)
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert status["reason"] == "signal" and audit(tmp_path / "run").ok
