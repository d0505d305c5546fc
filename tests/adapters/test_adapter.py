"""The part that all adapters share, without a framework: groups, weights, the run's files, complete checkpoints."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import batchwright
from batchwright.adapters import sealed
from batchwright.adapters.adapter import Adapter
from batchwright.adapters.additive import (
    difference,
    gradient_difference,
    labels_that_count,
    refuse,
    warn_of_batch_statistics,
    without_draws,
)
from batchwright.adapters.course import UnderRun, course, under_run
from batchwright.core.errors import ConfigError, EnvironmentFault, RunError
from batchwright.rundir.fence import Fence
from batchwright.runtime import audit
from tests.needs import needs

pytestmark = pytest.mark.torch

RAMP = batchwright.Thresholds([(0, 8), (16, 16)])
ROWS = [{"labels": torch.tensor([i, i])} for i in range(64)]


def never(schedule):
    raise AssertionError("the schedule has an end")


def adapter(directory, *, start=None, samples=64, rank=0, ranks=1, micro=4, run=None, rows=ROWS):
    made = course(RAMP.compile().until(samples), micro_batch_size=micro, budget=never)
    found = Adapter(made, rows, rank=rank, ranks=ranks, directory=directory, run=run)
    found.open(start)
    return found


def weight(batch):
    return float(batch["labels"].numel())


def train(one, steps=99):
    ids = []
    for group in one.groups():
        one.weigh(group, weight)
        one.applied(group)
        ids.append([i for micro in group for i in micro.ids.tolist()])
        steps -= 1
        if not steps:
            break
    return ids


def test_a_group_is_one_optimizer_step(tmp_path):
    one = adapter(tmp_path)
    groups = list(one.groups())
    assert [[len(micro.ids) for micro in group] for group in groups] == [[4, 4], [4, 4], *[[4] * 4] * 3]
    assert [group.step.start_sample for group in groups] == [0, 8, 16, 32, 48]
    assert groups[0].to("cpu")[0].data is groups[0][0].data
    one.close()


@given(st.lists(st.integers(0, 5), min_size=8, max_size=8))
def test_scales_recombine_means_to_the_mean_of_the_whole(tmp_path_factory, counts):
    rows = [{"labels": torch.tensor([1.0] * n + [-100.0] * (5 - n))} for n in counts]
    one = adapter(tmp_path_factory.mktemp("s"), samples=8, rows=rows, micro=2)
    (group,) = one.groups()
    count = labels_that_count(shifted=False)
    if not sum(counts):
        with pytest.raises(RunError, match="step 0 has no gradient: the weights of its 8 samples add up to 0"):
            one.weigh(group, count)
    else:
        own = [count(micro.data) for micro in group]
        scales, stop = one.weigh(group, count)
        assert scales == [pytest.approx(w / sum(counts)) for w in own] and not stop
        assert all(count(micro.data) for micro in group)  # none is run without weight
    one.close()


def test_stop_and_resume_are_audited_and_a_run_cannot_change_its_past(tmp_path):
    one = adapter(tmp_path)
    first = train(one, steps=3)
    one.before_save()
    one.saved()
    state = one.state()
    train(one, steps=1)  # lost: not saved
    one.close()
    two = adapter(tmp_path, start=state, micro=8)
    rest = train(two)
    two.before_save()
    two.saved()
    two.close()
    assert two.done and sorted(i for step in first + rest for i in step) == list(range(64))
    found = audit(tmp_path)
    assert (found.ok, found.samples, found.gaps, found.repeats, found.discarded_samples) == (True, 64, 0, 0, 16)
    with pytest.raises(RunError, match="step 3, sample 32; in this schedule that sample is at step 2"):
        made = course(batchwright.Constant(16).compile().until(64), micro_batch_size=4, budget=never)
        Adapter(made, ROWS, rank=0, ranks=1, directory=tmp_path).open(state)
    with pytest.raises(RunError, match="another order"):
        Adapter(one.course, ROWS, rank=0, ranks=1, directory=tmp_path, seed=7).open(state)
    with pytest.raises(RunError, match="has no position"):
        Adapter(one.course, ROWS, rank=0, ranks=1, directory=tmp_path).open({})


def test_only_the_launch_of_the_fence_saves(tmp_path):
    old, new = adapter(tmp_path), adapter(tmp_path)
    assert (old.launch, new.launch) == (0, 1)
    with pytest.raises(RunError, match="launch 0 does not save"):
        old.before_save()
    new.before_save()
    old.close(), new.close()


def test_the_stop_signal_of_the_run_and_sigterm_ask_to_stop(tmp_path, monkeypatch):
    told = {"RUN_DIR": tmp_path, "STATUS_FILE": tmp_path / "s", "LAUNCH": 3, "START_SAMPLE": 0, "END_SAMPLE": 64}
    for name, value in told.items():
        monkeypatch.setenv(f"BATCHWRIGHT_{name}", str(value))
    usual = under_run()
    assert usual and usual.stop_signal == signal.SIGTERM
    monkeypatch.setenv("BATCHWRIGHT_STOP_SIGNAL", "SIGUSR2")
    batchwright.run(
        ["true"], thresholds="0:8 16:16", samples=64, micro_batch_size=4, devices=1, dir=tmp_path, progress=False,
        max_retries=0,
    )  # fmt: skip
    before = [signal.getsignal(number) for number in (signal.SIGUSR2, signal.SIGTERM)]
    for launch, number in ((3, signal.SIGUSR2), (4, signal.SIGTERM)):
        monkeypatch.setenv("BATCHWRIGHT_LAUNCH", str(launch))
        one = adapter(tmp_path, run=under_run())
        group = next(iter(one.groups()))
        assert one.weigh(group, weight)[1] is False
        one.listen()  # a second time: the first handlers are those that come back
        os.kill(os.getpid(), number)
        assert one.weigh(group, weight)[1] is True
        one.close()
        assert [signal.getsignal(number) for number in (signal.SIGUSR2, signal.SIGTERM)] == before


def test_under_run_the_plan_decides_and_the_position_is_reported(tmp_path):
    done = batchwright.run(
        ["true"], thresholds="0:8 16:16", samples=64, micro_batch_size=4, devices=1, dir=tmp_path / "r", progress=False,
        max_retries=0,
    )  # fmt: skip
    assert done.state == "failed"  # it reported nothing, and left a plan
    Fence(tmp_path / "r", 7).claim()
    run = UnderRun(tmp_path / "r", 7, tmp_path / "status.json", 0, 32)
    made = course(None, micro_batch_size=99, budget=never, run=run)
    assert (made.steps, made.samples, made.micro_batch_sizes) == (5, 64, (4, 4))
    assert course(RAMP.compile().until(64), micro_batch_size=1, budget=never, run=run) == made
    with pytest.raises(ConfigError, match="Leave schedule out"):
        course(RAMP.compile().until(48), micro_batch_size=1, budget=never, run=run)
    one = Adapter(made, ROWS, rank=0, ranks=1, directory="elsewhere", run=run)
    one.open()
    assert json.loads(run.status_file.read_text())["consumed_samples"] == 0
    assert len(train(one)) == 3 and one.done and one.position == 32
    one.before_save()
    one.saved()
    one.close()
    assert json.loads(run.status_file.read_text())["consumed_samples"] == 32
    assert audit(tmp_path / "r").samples == 32
    with pytest.raises(RunError, match="continues at sample 32, but no complete checkpoint"):
        Adapter(
            made, ROWS, rank=0, ranks=1, directory="", run=UnderRun(tmp_path / "r", 8, run.status_file, 32, 64)
        ).open()


def test_a_course_comes_from_a_plan_or_a_ramp():
    plan = batchwright.plan(global_batch_size=32, micro_batch_size=4, devices=2)
    assert course(plan, micro_batch_size=1, budget=lambda s: 96).micro_batch_sizes == (4,)
    ramp = batchwright.ramp(thresholds="0:8 16:16", samples=64, micro_batch_size=4, devices=1)
    assert course(ramp, micro_batch_size=1, budget=never).micro_batch_sizes == (4, 4)
    # A ramp with a past has stages for the rest only; the framework's micro batch stands for what was trained.
    placed = ramp.placement
    assert placed
    rest = replace(
        ramp, placement=replace(placed, stages=tuple(replace(s, micro_batch_size=8) for s in placed.stages[1:]))
    )
    assert course(rest, micro_batch_size=2, budget=never).micro_batch_sizes == (2, 8)
    for stages in (placed.stages[:1], (replace(placed.stages[0], index=1),)):
        with pytest.raises(
            ConfigError, match="segment 1 of the schedule has the global batch 16 from sample 16 on, but"
        ):
            course(replace(ramp, placement=replace(placed, stages=stages)), micro_batch_size=1, budget=never)
    with pytest.raises(ConfigError, match="under batchwright run only"):
        course(None, micro_batch_size=1, budget=never)


def test_numbers_of_the_environment_are_checked():
    with pytest.raises(EnvironmentFault, match="BATCHWRIGHT_LAUNCH='x'"):
        under_run({"BATCHWRIGHT_STATUS_FILE": "s", "BATCHWRIGHT_LAUNCH": "x"})
    told = {f"BATCHWRIGHT_{name}": "0" for name in ("STATUS_FILE", "LAUNCH", "START_SAMPLE", "END_SAMPLE")}
    with pytest.raises(EnvironmentFault, match="BATCHWRIGHT_STOP_SIGNAL='SIGNONE': must be the name of a signal"):
        under_run({**told, "BATCHWRIGHT_STOP_SIGNAL": "SIGNONE"})


def test_in_ci_a_missing_framework_is_a_failure(monkeypatch):
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="no_such_framework is not installed"):
        needs("no_such_framework")
    monkeypatch.delenv("CI")
    with pytest.raises(pytest.skip.Exception):
        needs("no_such_framework")
    needs("torch")


def test_only_a_sealed_checkpoint_counts(tmp_path: Path):
    for launch, position in ((0, 8), (0, 16), (1, 12)):
        folder = tmp_path / f"{launch}-{position}"
        folder.mkdir()
        (folder / "weights").write_bytes(b"123")
        sealed.seal(folder, {"launch": launch, "position": position})
    found = sealed.newest(tmp_path.iterdir())
    assert found and found[1]["position"] == 12
    (tmp_path / "1-12" / "weights").write_bytes(b"12")  # cut off
    sealed.unseal(tmp_path / "0-16")
    found = sealed.newest(tmp_path.iterdir())
    assert found and found[1]["position"] == 8
    assert sealed.newest([]) is None
    for launch, position in ((1, 12), (1, 8), (2, 4)):
        sealed.seal(tmp_path / "1-12", {"launch": 1, "position": 12})
        (tmp_path / f"{launch}-{position}").mkdir(exist_ok=True)
        sealed.seal(tmp_path / f"{launch}-{position}", {"launch": launch, "position": position})
    # By launch and position, whatever the times; what is incomplete stays, and so does the best.
    sealed.rotate(tmp_path.iterdir(), 2, {tmp_path / "2-4", tmp_path / "0-8"})
    assert {folder.name for folder in tmp_path.iterdir()} == {"0-16", "0-8", "2-4"}
    sealed.rotate(tmp_path.iterdir(), None, {tmp_path / "2-4"})
    sealed.rotate(tmp_path.iterdir(), 1, {tmp_path / "2-4"})
    assert {folder.name for folder in tmp_path.iterdir()} == {"0-16", "2-4"}


def test_a_loss_over_pairs_does_not_add_up():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5)).double()
    rows = torch.randn(8, 4, dtype=torch.float64)

    def mean(x):
        return float(model(x).square().mean())

    def contrastive(x):
        return float(torch.nn.functional.cross_entropy(model(x) @ x.T, torch.arange(len(x))))

    with without_draws(model):
        assert difference(mean, len, rows, (rows[:3], rows[3:])) < 1e-12
        assert difference(contrastive, len, rows, (rows[:4], rows[4:])) > 1e-2
    assert model[1].training
    with pytest.raises(RunError, match="in-batch negatives"):
        refuse(0.5, 1e-3)
    with pytest.raises(RunError):
        refuse(float("nan"), 1e-3)
    with pytest.raises(RunError, match=r"its gradient 30\.00%"):
        refuse(0.0, 1e-3, 0.3)


def test_a_wrong_weight_is_seen_in_the_gradient_where_all_losses_are_equal():
    model = torch.nn.Linear(4, 16)
    with torch.no_grad():
        model.weight.zero_(), model.bias.zero_()  # a new model: every token's loss is log 16
    tokens, labels = torch.randn(12, 4), torch.randint(0, 16, (12,))

    def mean(rows):
        return torch.nn.functional.cross_entropy(model(tokens[rows]), labels[rows])

    whole, parts = range(12), (range(3), range(3, 12))  # two rows, of 3 and of 9 tokens
    with without_draws(model):
        by_rows = difference(lambda rows: float(mean(rows)), lambda rows: 1, whole, parts)
        assert by_rows < 1e-6  # the loss alone cannot see it
        assert gradient_difference(model, mean, lambda rows: 1, whole, parts) > 0.1
        assert gradient_difference(model, mean, len, whole, parts) < 1e-5
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("flat", [False, True])
def test_halves_of_a_collator_that_draws_have_the_same_masks(tmp_path, flat):
    def collate(rows):
        labels = torch.stack([row["labels"] for row in rows])
        labels = torch.where(torch.rand(labels.shape) < 0.5, labels, -100)
        return {"labels": labels.flatten()} if flat else {"labels": labels}

    one = adapter(tmp_path)
    group = next(iter(one.groups(collate)))
    found = one.halves(group[0], collate)
    if flat:  # which label belongs to which row is not known
        assert found is None
    else:
        assert found and torch.equal(torch.cat([half["labels"] for half in found]), group[0].data["labels"])
    again = one.halves(group[0])  # a collator that does not draw: read again
    assert again and torch.cat([half["labels"] for half in again])[:, 0].tolist() == group[0].ids.tolist()
    one.close()


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    def saved(directory, steps):
        one = adapter(directory)
        train(one, steps=steps)
        one.before_save()
        one.saved()
        one.close()
        return one.state()

    state = saved(tmp_path / "a", 3)
    with pytest.raises(RunError, match=r"saved by launch 0 at sample 32, and this is launch 0 of .*b: .*there is none"):
        adapter(tmp_path / "b", start=state)
    saved(tmp_path / "c", 2)
    with pytest.raises(RunError, match="there it has samples 0 to 16"):
        adapter(tmp_path / "c", start=state)

    def under(launch, start):
        return UnderRun(tmp_path / "a", launch, tmp_path / "status.json", start, 64)

    with pytest.raises(RunError, match="saved by launch 9 at sample 32, and this is launch 1"):
        adapter("", start={**state, "launch": 9}, run=under(1, 0))
    with pytest.raises(RunError, match="continues at sample 48, but the newest complete checkpoint is at sample 32"):
        adapter("", start=state, run=under(1, 48))
    one = adapter("", start=state, run=under(1, 16))  # it was killed between the save and its report
    assert one.position == 32
    one.close()


def test_layers_that_normalise_over_the_micro_batch_are_named():
    model, told = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)), list[str]()
    warn_of_batch_statistics(model, told.append)
    assert len(told) == 1 and "1 BatchNorm layer(s), such as '1'" in told[0]
    model[1].eval()  # its statistics are constants
    warn_of_batch_statistics(model, told.append)
    warn_of_batch_statistics(torch.nn.LayerNorm(4), told.append)
    assert len(told) == 1
