"""`train_rl`: the same updates wherever and whenever responses are sampled, exactly once through kills, and clear errors."""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # the helpers beside this file, under any import mode

from rl_runs import children, kill, start, wait_for
from rl_tasks import PLAN, ROUNDS, Tiny, loss, prepare, run, same, sample, task

import batchwright
from batchwright.core.errors import ConfigError, PlanError, RunError
from batchwright.core.ramp.rules import Constant, Thresholds
from batchwright.runtime import GlobalOrder, Prompts, RLSettings, audit, train_rl
from batchwright.runtime.loop.events import read_events
from batchwright.runtime.rl.rollouts import Rollouts
from batchwright.runtime.state.generators import set_seeds


def _adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.05)


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5)


def unsplit(
    rounds: int = ROUNDS, prompts: int = 8, generations: int = 4, loss: Any = loss, optimizer: Any = _adam
) -> dict[str, torch.Tensor]:
    """The same training, written down plainly: sample the round, one backward, one step."""
    order = GlobalOrder(64, 0)
    set_seeds(0)
    model = Tiny()
    optimizer = optimizer(model.parameters())
    for number in range(rounds):
        positions = range(number * prompts, (number + 1) * prompts)
        ids = order.ids(positions).tolist()
        with torch.no_grad():
            made = Prompts([i % 8 for i in ids], positions, ids, 0, number, number)
            groups = sample(model, made, generations)
        total, weight = loss(model, [response for group in groups for response in prepare(group)])
        optimizer.zero_grad()
        (total / weight).backward()
        optimizer.step()
    return dict(model.state_dict())


@pytest.mark.parametrize("micro", [1, 2, 32])
def test_the_gradient_is_the_unsplit_one(tmp_path, micro):
    weights, _ = run(tmp_path, plan={"train_micro_responses": micro, "rollout_micro_prompts": 2})
    for name, value in unsplit().items():
        torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-5)


def _by_sample(model: torch.nn.Module, responses: list[dict[str, Any]]) -> tuple[torch.Tensor, int]:
    """Every response counts equally, whatever its length."""
    parts = [loss(model, [one]) for one in responses]
    return torch.stack([total / weight for total, weight in parts]).sum(), len(parts)


@pytest.mark.parametrize("micro", [1, 8])
def test_the_gradient_of_a_loss_weighted_by_samples_is_the_unsplit_one(tmp_path, micro):
    made = replace(task(), loss=_by_sample, optimizer=_sgd)
    weights, _ = run(tmp_path, plan={"train_micro_responses": micro}, made=made, rounds=3)
    for name, value in unsplit(3, loss=_by_sample, optimizer=_sgd).items():
        torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-5)
    by_token = unsplit(3, optimizer=_sgd)
    assert any(not torch.allclose(weights[name], by_token[name], rtol=1e-3, atol=1e-4) for name in weights)


def _fails_in_round_2(error: Exception, most: int = 0) -> Any:
    """A loss that raises in round 2, for micro batches of more than `most` responses."""

    def failing(model: torch.nn.Module, responses: list[dict[str, Any]]) -> tuple[torch.Tensor, float]:
        if responses[0]["policy_version"] == 2 and len(responses) > most:
            raise error
        return loss(model, responses)

    return failing


def test_a_training_step_out_of_memory_shrinks_no_group(tmp_path):
    """The run ends with the error; with smaller micro batches it continues, with the responses that were sampled."""
    made = replace(task(), loss=_fails_in_round_2(torch.OutOfMemoryError("CUDA out of memory"), most=4))
    with pytest.raises(torch.OutOfMemoryError):
        run(tmp_path, made=made, checkpoint_every=8, overlap=False)
    weights, rounds = run(tmp_path, made=made, plan={"train_micro_responses": 4}, checkpoint_every=8)
    assert [r.responses for r in rounds] == [32] * 4
    found = audit(tmp_path)
    assert found.ok and found.samples == 48 and found.responses == 192
    kept = [event["kept_prompts"] for event in read_events(tmp_path) if event["kind"] == "rollout"]
    assert kept == [0, 8]
    for name, value in unsplit().items():
        torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-5)


def test_smaller_rounds_after_a_restart_keep_to_the_planned_lag(tmp_path):
    """Files of the larger rounds reach into a round that needs a newer policy."""
    made = replace(task(), loss=_fails_in_round_2(ValueError("no")))
    with pytest.raises(ValueError, match="no"):
        run(tmp_path, plan={"rollout_micro_prompts": 8}, made=made, checkpoint_every=8, overlap=False)
    smaller = {"prompts": 4, "rollout_micro_prompts": 4}
    _, rounds = run(tmp_path, plan=smaller, schedule=Constant(4).compile().until(32), checkpoint_every=8)
    assert {(r.prompts, r.policy_lag) for r in rounds} == {(4, 0)}
    found = audit(tmp_path)
    assert found.ok and found.samples == 32, found.findings


def test_what_is_known_of_trained_responses_is_forgotten_without_a_checkpoint(tmp_path, monkeypatch):
    made: list[Rollouts] = []
    left: list[int] = []

    def remembered(*given: Any) -> Rollouts:
        made.append(Rollouts(*given))
        return made[0]

    monkeypatch.setattr("batchwright.runtime.rl.train.Rollouts", remembered)
    settings = RLSettings(directory=str(tmp_path), progress=False)
    train_rl(
        task(), batchwright.rl(**PLAN), settings, rounds=ROUNDS,
        on_round=lambda *_: left.append(made[0]._spans.count_from(0) + len(made[0]._rewards)),
    )  # fmt: skip
    assert max(left) <= 2 * 4  # the four micro batches of the round ahead, asked for and finished


@pytest.mark.parametrize("plan", [{}, {"updates": 2, "iterations": 2, "rounds_ahead": 1}], ids=["on-policy", "ahead"])
def test_the_same_bits_wherever_and_whenever_responses_are_sampled(tmp_path, plan):
    first, rounds = run(tmp_path / "thread", plan=plan)
    cases = {
        "alone": {"overlap": False},
        "process": {"rollout": "process"},
        "processes": {"rollout": "process", "rollout_workers": 2},
        "processes-alone": {"rollout": "process", "overlap": False, "rollout_workers": 2},
    }
    for name, settings in cases.items():
        weights, again = run(tmp_path / name, plan=plan, **settings)
        assert same(first, weights), name
        assert [(r.reward, r.policy_lag, r.loss) for r in again] == [(r.reward, r.policy_lag, r.loss) for r in rounds]
    worst = batchwright.rl(**{**PLAN, **plan}).worst_policy_lag_updates
    assert max(r.policy_lag for r in rounds) == worst
    found = audit(tmp_path / "processes")
    assert found.ok and found.samples == 48 and found.policy_lag == worst
    assert (found.updates, found.responses) == ((6, 192) if not plan else (24, 384))


def test_a_prompt_ramp(tmp_path):
    schedule = Thresholds(((0, 4), (8, 8))).compile().until(40)
    _, rounds = run(tmp_path, schedule=schedule, rollout="process")
    assert [(r.first_prompt, r.prompts) for r in rounds] == [(0, 4), (4, 4), (8, 8), (16, 8), (24, 8), (32, 8)]
    found = audit(tmp_path)
    assert found.ok and found.samples == 40 and found.responses == 160


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_prompt_ramp_that_is_interrupted(tmp_path, ahead):
    """In its second stage, between two checkpoints: each prompt once, and on-policy the same weights."""
    schedule, plan = Thresholds(((0, 4), (8, 8))).compile().until(40), batchwright.rl(**PLAN, rounds_ahead=ahead)
    expected, _ = run(tmp_path / "whole", schedule=schedule)

    def stop(result: Any, *_: Any) -> None:
        if result.round == 3:
            raise RuntimeError("stopped")

    settings = RLSettings(directory=str(tmp_path / "run"), progress=False, checkpoint_every=12)
    with pytest.raises(RuntimeError, match="stopped"):
        train_rl(task(), plan, settings, schedule=schedule, on_round=stop)
    weights, rounds = run(tmp_path / "run", plan={"rounds_ahead": ahead}, schedule=schedule, checkpoint_every=12)
    assert [(r.first_prompt, r.prompts) for r in rounds] == [(16, 8), (24, 8), (32, 8)]
    assert ahead or same(weights, expected)
    found = audit(tmp_path / "run")
    assert found.ok and found.samples == 40 and found.responses == 160 and found.launches == 2


def test_a_ramp_that_does_not_divide_is_refused_before_anything_starts(tmp_path):
    schedule = Thresholds(((0, 3), (9, 8))).compile().until(41)
    with pytest.raises(PlanError, match=r"rounds of 3 prompts, from round 0 on: .*rollout_micro_prompts=2"):
        run(tmp_path / "run", schedule=schedule)
    assert not (tmp_path / "run").exists()


def test_settings_that_have_no_meaning_are_refused(tmp_path):
    with pytest.raises(ConfigError) as caught:
        RLSettings(
            directory=str(tmp_path), micro_batch_size=4, rollout="fork", rollout_workers=0, queue=0, stale="keep"
        )
    assert {v.field for v in caught.value.violations} == {
        "micro_batch_size",
        "rollout",
        "rollout_workers",
        "queue",
        "stale",
    }
    with pytest.raises(ConfigError) as caught:
        RLSettings(directory=str(tmp_path), rollout="process", rollout_threads=2, pipeline_parallel=2)
    assert {v.field for v in caught.value.violations} == {"rollout_threads", "pipeline_parallel"}
    others = {"pipeline_schedule": "gpipe", "virtual_stages": 2, "inner_microbatches": 2, "evaluation_batch_size": 4}
    others |= {"ranks_per_host": 2, "read_timeout": 60.0, "open_timeout": 60.0}
    with pytest.raises(ConfigError) as caught:
        RLSettings(directory=str(tmp_path), **others)
    assert {v.field for v in caught.value.violations} == others.keys()


@pytest.mark.parametrize("place", ["thread", "process"])
def test_a_model_is_sharded_over_ranks_only(tmp_path, place):
    with pytest.raises(ConfigError, match=r"strategy='fsdp2' needs rollout='ranks'.*Nearest: strategy 'none'"):
        RLSettings(directory=str(tmp_path), rollout=place, strategy="fsdp2")


def test_a_loss_that_is_not_finite_is_named_by_its_update(tmp_path):
    def broken(model: torch.nn.Module, responses: list[dict[str, Any]]) -> tuple[torch.Tensor, float]:
        total, weight = loss(model, responses)
        return total * (float("nan") if 12 in {one["prompt_position"] for one in responses} else 1.0), weight

    where = r"nan in update 3, of round 1, which has the prompts at positions 12 to 16"
    with pytest.raises(RunError, match=f"not finite in 1 step: {where}"):
        run(tmp_path, made=replace(task(), loss=broken), plan={"updates": 2}, stop_after_nonfinite=1)


def test_on_step_gets_the_position_after_its_prompts(tmp_path):
    ends: list[int] = []
    settings = RLSettings(directory=str(tmp_path), progress=False)
    plan = batchwright.rl(**PLAN, updates=2, iterations=2)
    train_rl(task(), plan, settings, rounds=2, on_step=lambda result, *_: ends.append(result.end_sample))
    assert ends == [4, 8, 4, 8, 12, 16, 12, 16]


class Flaky(list[int]):
    """A dataset whose first read fails, as storage does at times."""

    failed = 0

    def __getitem__(self, index: Any) -> Any:
        if sys._getframe(1).f_code.co_name == "read" and not self.failed:
            self.failed += 1
            raise ConnectionResetError("reset by peer")
        return super().__getitem__(index)


@pytest.mark.parametrize("place", ["thread", "process"])
def test_a_read_that_fails_is_tried_again(tmp_path, place):
    expected, _ = run(tmp_path / "whole", rounds=2)
    made = replace(task(), dataset=Flaky(task().dataset))
    weights, _ = run(tmp_path / place, made=made, rollout=place, rounds=2)
    assert same(weights, expected) and made.dataset.failed == (place == "thread")  # a process has its own copy
    with pytest.raises(RunError, match="reading for the prompts at positions 0 to 2 failed"):
        run(tmp_path / "never", made=replace(made, dataset=Flaky(made.dataset)), rollout=place, read_retries=0)


def test_several_trainers_need_ranks(tmp_path):
    with pytest.raises(PlanError, match="data_parallel_size=2, and the ranks that train are 1"):
        run(tmp_path, plan={"data_parallel_size": 2})


@pytest.mark.parametrize("place", ["thread", "process"])
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("raise", r"RLTask.rollout failed for the prompts at positions 20 to 22: ValueError: no such token"),
        ("few", r"too few responses, 3, to the prompt at position 21"),
    ],
)
def test_a_rollout_that_fails_is_named_and_the_run_continues_later(tmp_path, place, fault, message):
    expected, _ = run(tmp_path / "whole")
    with pytest.raises(RunError, match=message) as caught:
        run(tmp_path / "run", made=task(fault, 21), rollout=place, checkpoint_every=8)
    if fault == "raise":
        assert "in rollout" in "".join(caught.value.__notes__)  # the user's own traceback
    weights, _ = run(tmp_path / "run", rollout=place, checkpoint_every=8)
    assert same(weights, expected)
    found = audit(tmp_path / "run")
    assert found.ok and found.samples == 48 and found.launches == 2


def test_a_thread_that_hangs_is_an_error(tmp_path):
    with pytest.raises(RunError, match=r"rollout 0 has not answered for 0.5 s .* prompts at positions 4 to 6"):
        run(tmp_path / "run", made=task("hang", 5), rollout_timeout=0.5)
    weights, _ = run(tmp_path / "run")
    assert same(weights, run(tmp_path / "whole")[0]) and audit(tmp_path / "run").ok
    (_, second) = (event for event in read_events(tmp_path / "run") if event["kind"] == "rollout")
    assert second["kept_prompts"] == 4  # the two micro batches before it


@pytest.mark.parametrize("fault", ["hang", "exit"])
def test_a_worker_process_that_hangs_or_dies_is_replaced(tmp_path, fault):
    expected, _ = run(tmp_path / "whole")
    made = task(fault, 21, marker=str(tmp_path / "once"))
    weights, _ = run(tmp_path / "run", made=made, rollout="process", rollout_timeout=3 if fault == "hang" else 600)
    assert same(weights, expected) and audit(tmp_path / "run").ok
    replaced = [event for event in read_events(tmp_path / "run") if event["kind"] == "rollout_replaced"]
    assert len(replaced) == 1 and ("SIGKILL" in replaced[0]["why"] or "3 s" in replaced[0]["why"])


def test_a_worker_process_that_always_dies_is_an_error(tmp_path):
    with pytest.raises(RunError, match=r"rollout 0 was killed by SIGKILL, 3 times .* prompts at positions 20 to 22"):
        run(tmp_path, made=task("exit", 21), rollout="process", rollout_restarts=2)


@pytest.mark.parametrize("save", [pytest.param(8, marks=pytest.mark.rounds), 16])
def test_exactly_once_through_kill_9_of_everything(tmp_path, save):
    """Finished responses are kept, those of a lost policy discarded; the end is bit-equal to a run without kills."""
    expected, _ = run(tmp_path / "whole", rounds=12)
    directory = tmp_path / "run"
    spec = {
        "settings": {"directory": str(directory), "rollout": "process", "checkpoint_every": save},
        "rounds": 12,
        # The first launch waits in the fourth round until it is killed: all of that round but its last two prompts is sampled.
        "task": {"pause": 0.02, "fault": "hang", "at": 30, "marker": str(tmp_path / "held")},
    }
    for launch, updates in enumerate((None, 4, 3)):
        process = start(tmp_path, spec)
        record = directory / "ledger" / "updates" / f"updates-launch-{launch:05d}-rank-00000.jsonl"
        if updates is None:
            wait_for(tmp_path / "held", 0, process)
            # The fourth round is asked for before the third one is saved.
            wait_for(
                directory / "checkpoints" / f"step-{24 // save * save // 8:012d}-launch-00000" / "state.json",
                0,
                process,
            )
        else:
            wait_for(record, 1 + updates, process)
        kill(process)
    process = start(tmp_path, spec)
    assert process.wait(120) == 0, (tmp_path / "output.log").read_text()
    found = audit(directory)
    assert found.ok and found.samples == 96 and found.responses == 384 and found.launches == 4, found
    weights = json.loads((directory / "weights.json").read_text())
    for name, value in expected.items():
        assert weights[name] == value.double().flatten().tolist()
    heads = [
        json.loads(path.read_text().splitlines()[0])
        for path in sorted((directory / "ledger" / "updates").glob("updates-*"))
    ]
    # After a save in every round, what the first launch has sampled of the fourth one is kept. After a save in every second
    # round, the policy of the fourth one is lost: what it has sampled is discarded, and that of the third one is kept.
    counts = heads[1]["kept_responses"], heads[1]["discarded_responses"]
    assert counts == ((24, 0) if save == 8 else (32, 24))
    assert found.discarded_responses == sum(head["discarded_responses"] for head in heads)


def test_kill_9_of_a_rollout_worker(tmp_path):
    expected, _ = run(tmp_path / "whole")
    directory = tmp_path / "run"
    spec = {"settings": {"directory": str(directory), "rollout": "process"}, "rounds": ROUNDS, "task": {"pause": 0.02}}
    process = start(tmp_path, spec)
    for updates in (1, 3):
        wait_for(directory / "ledger" / "updates" / "updates-launch-00000-rank-00000.jsonl", 1 + updates, process)
        for pid in children(process.pid):
            os.kill(pid, signal.SIGKILL)
    assert process.wait(120) == 0, (tmp_path / "output.log").read_text()
    weights = json.loads((directory / "weights.json").read_text())
    assert all(weights[name] == value.double().flatten().tolist() for name, value in expected.items())
    assert audit(directory).ok


def test_a_signal_stops_after_the_round_and_the_rest_follows(tmp_path):
    expected, _ = run(tmp_path / "whole")
    directory = tmp_path / "run"
    spec = {"settings": {"directory": str(directory), "rollout": "process"}, "rounds": ROUNDS, "task": {"pause": 0.05}}
    process = start(tmp_path, spec)
    wait_for(directory / "ledger" / "updates" / "updates-launch-00000-rank-00000.jsonl", 2, process)
    process.send_signal(signal.SIGTERM)
    process.wait(120)
    status = json.loads((directory / "status.json").read_text())
    assert status["reason"] == "signal" and 0 < status["position"] < 48
    weights, _ = run(directory)
    assert same(weights, expected) and audit(directory).ok


def test_a_signal_while_the_model_is_built_stops_before_the_first_round(tmp_path):
    def slow() -> Tiny:
        os.kill(os.getpid(), signal.SIGTERM)
        return Tiny()

    settings = RLSettings(directory=str(tmp_path / "run"), progress=False)
    status = train_rl(replace(task(), model=slow), batchwright.rl(**PLAN), settings, rounds=ROUNDS)
    assert (status.reason, status.position) == ("signal", 0) and audit(tmp_path / "run").ok
    weights, _ = run(tmp_path / "run")
    assert same(weights, run(tmp_path / "whole")[0]) and audit(tmp_path / "run").samples == 48


def test_a_prepare_that_fails_names_the_prompt(tmp_path):
    def failing(group: list[dict[str, Any]]) -> Any:
        return group if group[0]["prompt_position"] < 5 else 1 / 0

    with pytest.raises(RunError, match=r"RLTask.prepare failed for the prompt at position 5: ZeroDivisionError"):
        run(tmp_path, made=replace(task(), prepare=failing, loss=lambda model, rows: (model(torch.tensor(0)).sum(), 1)))


def test_tokens_per_second_count_every_update_of_a_round(tmp_path):
    run(
        tmp_path,
        plan={"prompts": 2, "generations": 4, "rollout_micro_prompts": 1, "train_micro_responses": 4, "updates": 2},
    )
    steps = [event for event in read_events(tmp_path) if event["kind"] == "step"]
    updates = [event["weight"] for event in read_events(tmp_path) if event["kind"] == "update"]
    assert len(set(updates)) > 1  # uneven
    for number, step in enumerate(steps):
        tokens = sum(updates[2 * number : 2 * number + 2])
        assert step["tokens_per_second"] * step["step_seconds"] == pytest.approx(tokens)


def test_events_say_where_the_time_goes(tmp_path):
    run(tmp_path, rollout="process")
    events = read_events(tmp_path)
    rounds = [event for event in events if event["kind"] == "round"]
    assert [event["round"] for event in rounds] == list(range(ROUNDS))
    kinds = {(process, kind) for event in rounds for process, kind, _, _ in event["spans"]}
    assert kinds == {("trainer 0", k) for k in ("wait", "train", "update", "publish")} | {("rollout 0", "rollout")}
    assert all(event["responses"] == 32 and event["seconds"] > 0 for event in rounds)
    assert len([event for event in events if event["kind"] == "update"]) == ROUNDS
