"""What is asked for ahead: within the lag and the queue; and what of it a restart uses, drops or deletes."""

from __future__ import annotations

import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # the helpers beside this file, under any import mode

from rl_tasks import PLAN, ROUNDS, Tiny, loss, run, same, sample, task

import batchwright
from batchwright.runtime import Prompts, RLSettings, audit, train_rl
from batchwright.runtime.loop.events import read_events
from batchwright.runtime.rl.rollouts import Rollouts

RESPONSES = 8 * 4  # of a round


@pytest.mark.parametrize("place", ["thread", "process"])
def test_drop_trains_what_was_sampled_ahead(tmp_path, place):
    """The responses that are trained are those of `wait`: a round ahead, and never older."""
    expected, waited = run(tmp_path / "wait", plan={"rounds_ahead": 1})
    weights, rounds = run(tmp_path / "drop", plan={"rounds_ahead": 1}, stale="drop", rollout=place)
    assert [r.policy_lag for r in rounds] == [r.policy_lag for r in waited] == [0] + [1] * (ROUNDS - 1)
    assert same(weights, expected)
    found = audit(tmp_path / "drop")
    assert found.ok and found.responses == ROUNDS * RESPONSES
    assert found.dropped_responses == sum(r.dropped_responses for r in rounds)


def test_what_is_sampled_early_is_dropped_and_what_is_not_begun_is_skipped(tmp_path):
    """One micro batch of round 2 is begun early, by policy 1, and is not finished when policy 2 comes."""
    begun, trained = threading.Event(), threading.Event()
    policies: list[tuple[int, int]] = []

    def rollout(policy: Any, prompts: Prompts, generations: int) -> Any:
        policies.append((prompts.round, prompts.policy_version))
        if policies[-1] == (2, 1):
            begun.set()
            assert trained.wait(120)
        return sample(policy, prompts, generations)

    def slow(model: Any, responses: list[dict[str, Any]]) -> Any:
        if responses[-1]["prompt_position"] == 15:  # the last of round 1: all early micro batches are asked for
            assert begun.wait(120)
        return loss(model, responses)

    rounds: list[Any] = []

    def on_round(result: Any, model: Any) -> None:
        rounds.append(result)
        if result.round == 1:
            trained.set()

    made = replace(task(), rollout=rollout, loss=slow)
    settings = RLSettings(directory=str(tmp_path / "drop"), progress=False, stale="drop")
    train_rl(made, batchwright.rl(**PLAN), settings, rounds=4, on_round=on_round)
    assert policies.count((2, 1)) == 1 and policies.count((2, 2)) == 4
    assert rounds[2].dropped_responses == 2 * 4 and [r.policy_lag for r in rounds] == [0] * 4
    _, waited = run(tmp_path / "wait", rounds=4)
    assert [(r.reward, r.loss) for r in rounds] == [(r.reward, r.loss) for r in waited]
    assert audit(tmp_path / "drop").ok


def _most_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rounds_ahead: int, **settings: Any) -> int:
    """The most rollout micro batches that were asked for or finished and not trained, whenever something was asked."""
    waiting: list[int] = []
    ask = Rollouts._ask

    def counted(self: Rollouts, *given: Any) -> None:
        ask(self, *given)
        waiting.append(self._spans.count_from(self._position))

    monkeypatch.setattr(Rollouts, "_ask", counted)
    run(tmp_path, plan={"rounds_ahead": rounds_ahead}, **settings)
    return max(waiting)


@pytest.mark.parametrize("stale", ["wait", "drop"])
@pytest.mark.parametrize("ahead", [0, 2])
def test_the_queue_is_bounded(tmp_path, monkeypatch, stale, ahead):
    """By the four micro batches of rounds_ahead + 1 rounds, or by `queue`."""
    assert _most_waiting(tmp_path / "default", monkeypatch, ahead, stale=stale) == 4 * (ahead + 1)
    assert _most_waiting(tmp_path / "given", monkeypatch, ahead, stale=stale, queue=3) == 3


def test_files_that_no_restart_can_use_are_deleted_after_their_round(tmp_path):
    """Without a checkpoint, only those of policy 0 can be used: round 0, and what is ahead. The rest is counted if it is lost."""
    files: list[int] = []

    def look(result: Any, *_: Any) -> None:
        files.append(len(list((tmp_path / "rollouts").glob("*/*.rows"))))
        if result.round == 8:
            raise RuntimeError("killed")

    settings = RLSettings(directory=str(tmp_path), progress=False)
    with pytest.raises(RuntimeError):
        train_rl(task(), batchwright.rl(**PLAN), settings, rounds=12, on_round=look)
    assert max(files) <= 2 * 4
    found = audit(tmp_path)
    assert found.ok and found.samples == 0
    weights, _ = run(tmp_path, rounds=12)
    assert same(weights, run(tmp_path.with_name("whole"), rounds=12)[0])
    (first, second) = (event for event in read_events(tmp_path) if event["kind"] == "rollout")
    assert first["kept_prompts"] == 0 and second["kept_prompts"] == 8
    # Eight trained rounds of lost policies, and what was finished of the next.
    assert 8 * RESPONSES <= second["discarded_responses"] <= 9 * RESPONSES
    found = audit(tmp_path)
    assert found.ok and found.samples == 96 and found.discarded_responses == second["discarded_responses"]


def test_the_lag_of_an_update_is_the_worst_of_its_micro_steps(tmp_path):
    # The queue holds three of four micro batches of the next round: the fourth is sampled by a newer policy.
    _, rounds = run(tmp_path, plan={"rounds_ahead": 1}, queue=3)
    updates = [event["policy_lag"] for event in read_events(tmp_path) if event["kind"] == "update"]
    assert updates == [r.policy_lag for r in rounds] and max(updates) == 1


def test_the_last_policy_is_sent_to_nobody(tmp_path, monkeypatch):
    published: list[int] = []
    publish = Rollouts.publish
    monkeypatch.setattr(Rollouts, "publish", lambda self, v, b: (published.append(v), publish(self, v, b)))
    run(tmp_path)
    assert published == list(range(ROUNDS))


def _until_it_fails(folder: Path, round: int, **settings: Any) -> None:
    """A run whose training fails in a round, all responses of which are finished."""

    def failing(model: Any, responses: list[dict[str, Any]]) -> Any:
        if responses[0]["policy_version"] == round:
            raise RuntimeError("stopped")
        return loss(model, responses)

    with pytest.raises(RuntimeError, match="stopped"):
        run(folder, made=replace(task(), loss=failing), overlap=False, **settings)


class Other(Tiny):
    """A model of the same shape with other first weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.nn.init.zeros_(self.out.weight)


@pytest.mark.parametrize(
    ("changed", "settings"),
    [({"dataset": [7] * 64}, {}), ({}, {"shuffle": False}), ({"model": Other}, {})],
    ids=["dataset", "order", "model"],
)
def test_responses_made_for_something_else_are_not_trained(tmp_path, changed, settings):
    """Before the first checkpoint nothing else compares the two launches."""
    _until_it_fails(tmp_path / "run", 0)
    made = replace(task(), **changed)
    weights, _ = run(tmp_path / "run", made=made, **settings)
    assert same(weights, run(tmp_path / "new", made=made, **settings)[0])
    (_, second) = (event for event in read_events(tmp_path / "run") if event["kind"] == "rollout")
    assert (second["kept_prompts"], second["discarded_responses"]) == (0, RESPONSES)
    assert audit(tmp_path / "run").ok


def test_responses_of_a_dataset_that_was_replaced_are_not_trained(tmp_path):
    _until_it_fails(tmp_path, 2, checkpoint_every=8)
    digits: set[int] = set()

    def seen(model: Any, responses: list[dict[str, Any]]) -> Any:
        digits.update(response["digit"] for response in responses)
        return loss(model, responses)

    run(tmp_path, made=replace(task(), dataset=[7] * 64, loss=seen), checkpoint_every=8, accept_changes=True)
    assert digits == {7} and audit(tmp_path).ok


def test_the_same_launch_again_trains_what_is_finished(tmp_path):
    """The same conditions: with a checkpoint, and without one."""
    for round, every in ((0, None), (2, 8)):
        folder = tmp_path / str(round)
        _until_it_fails(folder, round, checkpoint_every=every)
        weights, _ = run(folder, checkpoint_every=every)
        assert same(weights, run(folder.with_name(f"whole{round}"))[0])
        (_, second) = (event for event in read_events(folder) if event["kind"] == "rollout")
        assert (second["kept_prompts"], second["discarded_responses"]) == (8, 0)
