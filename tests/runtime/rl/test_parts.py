"""The parts of `train_rl`, one by one: arithmetic of rounds, files of responses, spans, weights, and the audit of updates."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._C._distributed_c10d import HashStore

sys.path.insert(0, str(Path(__file__).parent))  # the helpers beside this file, under any import mode

from rl_tasks import PLAN, run, task

import batchwright
from batchwright.core.errors import EnvironmentFault, PlanError, RunError
from batchwright.core.ramp.rules import Constant
from batchwright.core.rl import RLPlan
from batchwright.runtime import GlobalOrder, Prompts, RLSettings, audit, train_rl
from batchwright.runtime.loop.signals import StopSignals
from batchwright.runtime.rl.link import LAUNCH, SIGNAL, STOP, SharedWeights, load, size_of, weights_of
from batchwright.runtime.rl.ranks import Side, longest_wait, on_ranks, serve_rank, tell_failure
from batchwright.runtime.rl.record import RoundResult, round_event
from batchwright.runtime.rl.responses import Piece, Responses, Spans
from batchwright.runtime.rl.rounds import Rounds, block_prompts, micro_responses
from batchwright.runtime.rl.worker import Sampler, mailboxes
from batchwright.runtime.state.updates import Updates
from tests.examples import many


@st.composite
def plans(draw: st.DrawFn) -> RLPlan:
    small = st.integers(1, 4)
    groups, updates, micro, accumulation, ranks = (draw(small) for _ in range(5))
    generations = micro * accumulation * ranks * draw(small)
    return batchwright.rl(
        prompts=groups * updates,
        generations=generations,
        updates=updates,
        iterations=draw(small),
        rounds_ahead=draw(st.integers(0, 3)),
        data_parallel_size=ranks,
        train_micro_responses=micro,
    )


@settings(deadline=None, max_examples=many(100))
@given(plans())
def test_every_response_is_trained_once_in_every_iteration(plan):
    rounds = Rounds(plan, Constant(plan.prompts_per_round).compile(), first=3, version=7)
    step = rounds.schedule.at_step(5)
    seen: list[tuple[int, int]] = []
    updates = list(rounds.updates(step))
    assert [update.version for update in updates] == [7 + 2 * plan.updates_per_round + n for n in range(len(updates))]
    for update in updates:
        of_update: list[tuple[int, int]] = []
        for index in range(plan.accumulation_steps):
            block = block_prompts(plan, update, index)
            own = [k for rank in range(plan.data_parallel_size) for k in micro_responses(plan, index, rank)]
            places = [(update.prompts[k // plan.generations_per_prompt], k % plan.generations_per_prompt) for k in own]
            assert {position for position, _ in places} == set(block)
            of_update += places
        # A group is in one update, whole.
        assert sorted(of_update) == [(p, g) for p in update.prompts for g in range(plan.generations_per_prompt)]
        seen += of_update
    expected = [(p, g) for p in range(step.start_sample, step.end_sample) for g in range(plan.generations_per_prompt)]
    assert sorted(seen) == sorted(expected * plan.iterations)
    # The oldest policy that may sample a round gives the worst lag of the plan in its last update.
    assert updates[-1].version - rounds.oldest(5) == plan.worst_policy_lag_updates


@settings(deadline=None, max_examples=many(100))
@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9))), st.integers(0, 70))
def test_spans_are_what_a_list_of_positions_says(wanted, position):
    spans, held = Spans(), dict[int, int]()
    for number, (start, length) in enumerate(wanted):
        new = range(start, start + length)
        if not any(p in held for p in new):
            spans.add(new, number)
            held.update(dict.fromkeys(new, number))
    assert spans.at(position) == held.get(position)
    free = next(p for p in range(position, 200) if p not in held)
    gap = spans.gap(position)
    assert gap.start == free and all(p not in held for p in gap[:100])
    assert gap.stop in held or gap.stop == 2**62
    spans.forget(position)
    assert spans.count_from(0) == len({n for p, n in held.items() if p >= position})


def _prompts(first: int, count: int, version: int) -> Prompts:
    return Prompts([0] * count, range(first, first + count), [0] * count, 5, 0, version)


def _groups(count: int, value: float = 1.0) -> Any:
    return [[{"x": torch.full((n + 1,), value), "reward": value} for n in range(2)] for _ in range(count)]


def test_responses_are_stored_whole_and_without_pickles(tmp_path):
    responses = Responses(tmp_path, 0, generations=2)
    responses.adopt(lambda piece: True)
    piece = responses.write(_prompts(4, 2, 3), _groups(2))
    (one, two), _ = responses.read(piece)
    assert torch.equal(two["x"], torch.ones(2)) and one["reward"] == 1.0
    assert (two["prompt_position"], two["generation"], two["policy_version"]) == (4, 1, 3)
    with pytest.raises(RunError, match="no tensor, array, number, text"):
        responses.write(_prompts(6, 1, 3), [[{"x": {1, 2}}] * 2])
    path = responses.folder / piece.name
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(RunError, match="digest"):
        responses.read(piece)


def test_a_launch_takes_over_what_it_can_use(tmp_path):
    first = Responses(tmp_path, 0, generations=2)
    first.adopt(lambda piece: True)
    good = first.write(_prompts(4, 2, 3), _groups(2, 0.5))
    first.write(_prompts(6, 2, 4), _groups(2))  # of a policy that is lost
    first.write(_prompts(4, 1, 2), _groups(1))  # older, for the same prompt
    cut = first.write(_prompts(8, 2, 3), _groups(2))
    (first.folder / cut.name).write_bytes(b"cut off")
    second = Responses(tmp_path, 1, generations=2)
    kept, discarded = second.adopt(lambda piece: piece.version <= 3)
    assert kept == {good: 2.0} and discarded == 10
    assert second.read(good)[0][0]["reward"] == 0.5
    # A process of the first launch that still runs cannot add to the run.
    with pytest.raises(Exception, match="No such file"):
        first.write(_prompts(10, 1, 3), _groups(1))
    third = Responses(tmp_path, 2, generations=4)
    third.folder.mkdir()
    third.write(_prompts(2, 2, 3), [[{"reward": 1.0}] * 4] * 2)
    # What a checkpoint has is trained, not discarded: the kill came before its files were deleted.
    third = Responses(tmp_path, 3, generations=4)
    assert third.adopt(lambda piece: piece.positions.start >= 4, position=4) == (
        {},
        8,
    )  # another number of generations
    assert Piece.named("notes.rows") is None


def test_weights_travel_as_bytes():
    model, policy = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    model.weight.data.normal_()
    model.running_mean.normal_()
    shared = SharedWeights(size_of(model), workers=2)
    shared.publish(weights_of(model))
    assert shared.ready()
    shared.publish(weights_of(model))
    assert not shared.ready()  # both slots are in use
    load(policy, shared.take(0))
    assert all(
        torch.equal(a, b) for a, b in zip(model.state_dict().values(), policy.state_dict().values(), strict=True)
    )
    shared.rejoin(1)
    assert shared.ready()
    assert len(weights_of(model, keep=False)) == 0


def test_a_worker_that_is_to_stop_does_no_more_of_what_was_asked(tmp_path):
    made, store = task("raise", 0), HashStore()
    responses = Responses(tmp_path, 0, generations=4)
    sampler = Sampler(made, made.build_model(0), GlobalOrder(64, 0), responses, RLSettings(directory=str(tmp_path)))
    asks, answers = mailboxes(store, 0, 0)
    asks.put({"prompts": [0, 2], "version": 0, "round": 0})
    store.set(STOP, "1")
    sampler.serve(store, SharedWeights(size_of(sampler.policy), 1), 0, 0)
    assert answers.poll() is None


def test_a_worker_that_is_to_stop_takes_the_weights_that_were_sent(tmp_path):
    """In a broadcast it may have to pass them on."""
    made, store = task(), HashStore()
    settings = RLSettings(directory=str(tmp_path))
    sampler = Sampler(made, made.build_model(0), GlobalOrder(64, 0), Responses(tmp_path, 0, generations=4), settings)
    asks, answers = mailboxes(store, 0, 0)
    for message in ({"prompts": [0, 2], "version": 0, "round": 0}, {"weights": 1}, {"weights": 2}):
        asks.put(message)
    store.set(STOP, "1")
    weights, taken = SharedWeights(size_of(sampler.policy), 1), list[int]()
    weights.take = lambda worker: taken.append(worker)
    sampler.serve(store, weights, 0, 0)
    assert taken == [0, 0] and answers.poll() is None


def test_a_rollout_rank_tells_of_a_signal_before_there_is_anything_to_sample(tmp_path):
    store, signals = HashStore(), StopSignals()
    signals.received = signal.SIGTERM
    side = Side(None, 0, 1, torch.device("cpu"), store, cast(Any, None))

    def trainer() -> None:
        store.wait([SIGNAL], timedelta(seconds=60))
        tell_failure(side, RunError(f"it got signal {int(store.get(SIGNAL))}"))

    thread = threading.Thread(target=trainer)
    thread.start()
    with pytest.raises(RunError, match="it got signal 15"):
        serve_rank(task(), batchwright.rl(**PLAN), RLSettings(directory=str(tmp_path)), side, signals)
    thread.join()


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"size": 60}, "GlobalOrder(size=60, seed=0, shuffle=True)"),
        ({"seed": 1}, "GlobalOrder(size=64, seed=1, shuffle=True)"),
        ({"shuffle": False}, "GlobalOrder(size=64, seed=0, shuffle=False)"),
    ],
)
def test_a_rollout_rank_with_another_order_of_prompts_than_the_trainers_is_refused(tmp_path, other, said):
    store, order = HashStore(), {"size": 64, "seed": 0, "shuffle": True, **other}
    store.set(LAUNCH, json.dumps({"launch": 0, "conditions": "", "order": order}))
    store.set(STOP, "1")  # if nothing is refused, it samples nothing
    side = Side(None, 1, 2, torch.device("cpu"), store, cast(Any, None))
    with pytest.raises(RunError) as raised:
        serve_rank(
            task(), batchwright.rl(**PLAN), RLSettings(directory=str(tmp_path), rollout="ranks"), side, StopSignals()
        )
    own = "rank 2, which samples, has GlobalOrder(size=64, seed=0, shuffle=True)"
    assert f"{own}, and the trainers have {said}" in str(raised.value)


def test_a_collective_of_ranks_waits_for_all_that_was_asked_for():
    """Weights are taken after it, and torch's own limit is 30 minutes."""
    hour = RLSettings(directory="run", rollout="ranks", rollout_timeout=3600.0)
    assert longest_wait(8, hour).total_seconds() > 8 * 3600
    assert longest_wait(8, RLSettings(directory="run", rollout_timeout=float("inf"))).days == 365


def test_the_first_trainer_does_not_wait_for_rollout_ranks_after_another_trainer_failed():
    store = HashStore()
    (worker,) = on_ranks(Side(None, 0, 1, torch.device("cpu"), store, cast(Any, None)), size=4).each
    assert worker.ended() is None
    store.set("status", "{}")
    assert worker.ended() == "ended, because another trainer failed"


def test_a_disk_that_becomes_full_within_a_line_of_the_updates_is_an_error(tmp_path, monkeypatch):
    updates, write = Updates(tmp_path, launch=0, rank=0, generations=4), os.write
    updates.fed(0, range(8), [(range(2), 0)])
    monkeypatch.setattr(os, "write", lambda file, line: write(file, line[:-1]))
    with pytest.raises(EnvironmentFault, match=r"the record updates-\S+ could not be written .*No space left"):
        updates.applied(0, 0, range(2), dropped=0)
    updates.close()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    train_rl(task(), batchwright.rl(**PLAN), RLSettings(directory=str(folder), progress=False), rounds=3)
    return folder


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda line: line | {"hash": f"{int(line['hash'], 16) ^ 1:032x}"},
            "update 1: 32 responses, which are not the 32",
        ),
        (lambda line: line | {"responses": 31}, "31 responses, which are not the 32"),
        (lambda line: line | {"first": 9}, "update 1 has the prompts 9 to 16, and 8 is next"),
        (
            lambda line: line | {"sampled": [[8, 16, 0]]},
            "policies 0 to 0 sampled its responses, and the planned lag is 0",
        ),
        (lambda line: line | {"sampled": [[8, 16, 2]]}, "policies 2 to 2 sampled its responses"),
        (lambda line: line | {"sampled": []}, "do not have each of the prompts 8 to 16 once"),
        (lambda line: line | {"sampled": [[0, 1, 1]]}, "do not have each of the prompts 8 to 16 once"),
        (lambda line: line | {"sampled": [[8, 12, 1], [13, 16, 1]]}, "do not have each of the prompts 8 to 16 once"),
        (lambda line: line | {"sampled": [[8, 16, 1], [16, 24, 1]]}, "do not have each of the prompts 8 to 16 once"),
        (lambda line: line | {"sampled": [[8, 16, 0], [8, 16, 1]]}, "do not have each of the prompts 8 to 16 once"),
        (lambda line: line | {"sampled": None}, "sampled is not a list"),
        (lambda line: line | {"update": 7}, "update 1 has 0 lines of 1 ranks"),
        (lambda line: {"update": "x"}, "update is"),
    ],
)
def test_the_audit_of_updates_can_fail(trained, tmp_path, damage, message):
    assert audit(trained).ok
    copy = tmp_path / "copy"
    shutil.copytree(trained, copy)
    path = copy / "ledger" / "updates" / "updates-launch-00000-rank-00000.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[2] = damage(lines[2])
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = audit(copy)
    assert not found.ok and any(message in finding.message for finding in found.findings), found.findings


def test_the_audit_of_a_run_without_its_updates_fails(trained, tmp_path):
    """A checkpoint counts updates, so there must be a record of them."""
    shutil.copytree(trained, tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy" / "ledger" / "updates")
    found = audit(tmp_path / "copy")
    assert not found.ok and "its updates have no header" in found.findings[0].message


def test_the_audit_of_updates_is_of_the_responses_that_were_read(tmp_path, monkeypatch):
    """A response that is trained twice, in the place of another, is found: the files say which one it is."""
    read = Responses.read

    def twice(self: Responses, piece: Piece) -> Any:
        groups = read(self, piece)
        if 9 in piece.positions:
            groups[piece.positions.index(9)][2] = groups[piece.positions.index(9)][1]
        return groups

    monkeypatch.setattr(Responses, "read", twice)
    run(tmp_path, rounds=3)
    (finding,) = audit(tmp_path).findings
    assert "update 1: 32 responses, which are not the 32 of prompts 8 to 16" in finding.message


def test_check_ledger_proves_a_run(trained, tmp_path):
    def check(folder: Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "batchwright", "check", "--ledger", str(folder)]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    done = check(trained)
    numbers = dict(line.split() for line in done.stdout.splitlines()[2:])
    assert done.returncode == 0 and done.stdout.startswith("ok\n")
    assert (numbers["samples"], numbers["updates"], numbers["responses"]) == ("24", "3", "96")
    shutil.copytree(trained, tmp_path / "copy")
    path = tmp_path / "copy" / "ledger" / "updates" / "updates-launch-00000-rank-00000.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    done = check(tmp_path / "copy")
    assert done.returncode != 0 and "update 2 has 0 lines of 1 ranks" in done.stdout + done.stderr


def test_the_report_counts_rounds_that_were_not_logged_and_every_iteration(tmp_path):
    run(tmp_path / "run", plan={"updates": 2, "iterations": 2}, rounds=10, log_every=5)
    batchwright.report(tmp_path / "run", markdown=tmp_path / "report.md")
    page = (tmp_path / "report.md").read_text()
    assert "10 rounds, 80 prompts, 640 responses" in page and "2 logged" in page


def test_the_spans_of_a_round_are_few_and_leave_out_no_process():
    spans: list[Any] = []
    for number in range(250):  # a trainer that waits as long as it trains, and two workers, of which one never pauses
        begin = number * 0.04
        spans += [("trainer 0", "wait", begin, begin + 0.02), ("trainer 0", "train", begin + 0.02, begin + 0.04)]
        spans += [("rollout 0", "rollout", begin, begin + 0.02), ("rollout 1", "rollout", begin, begin + 0.04)]
    made = RoundResult(0, 0, 1, 1, 0, 1, 0, 0.0, None, 10.0, 10.0, 5.0, 5.0)
    found = round_event(made, 0.0, spans)["spans"]
    assert len(found) <= 400
    by_process = {name: [span for span in found if span[0] == name] for name in ("trainer 0", "rollout 0", "rollout 1")}
    assert by_process["rollout 1"] == [["rollout 1", "rollout", 0.0, 10.0]]
    for own in by_process.values():
        assert own[0][2] < 0.1 and own[-1][3] > 9.9
        assert all(one[3] <= two[2] + 1e-6 for one, two in itertools.pairwise(own))
    few = [("trainer 0", "train", 0.0, 1.0), ("trainer 0", "wait", 1.0, 1.001), ("trainer 0", "train", 1.001, 2.0)]
    assert round_event(made, 0.0, few)["spans"] == [["trainer 0", "train", 0.0, 2.0]]


def test_the_report_of_a_run(trained, tmp_path):
    batchwright.report(trained, output=tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "One round" in page and "Mean reward of a round" in page and "The batch that was really used" in page


def test_a_plan_for_another_number_of_prompts():
    plan = batchwright.rl(**PLAN)
    rounds = Rounds(plan, Constant(8).compile())
    assert rounds.plan_of(4).rollout_micro_steps == 2 and rounds.plan_of(8) is plan
    with pytest.raises(PlanError, match="does not divide"):
        rounds.plan_of(3)
