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
from batchwright.adapters import additive, sealed
from batchwright.adapters.adapter import Adapter
from batchwright.adapters.additive import labels_that_count, pieces, warn_of_batch_statistics
from batchwright.adapters.course import UnderRun, course, under_run
from batchwright.core.errors import ConfigError, EnvironmentFault, RunError
from batchwright.rundir.fence import Fence
from batchwright.runtime import audit
from tests.needs import needs
from tests.runtime.conftest import _run_ranks as run_ranks

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
    one.close()


@given(st.lists(st.integers(0, 5), min_size=8, max_size=8))
def test_scales_recombine_means_to_the_mean_of_the_whole(tmp_path_factory, counts):
    rows = [{"labels": torch.tensor([1] * n + [-100] * (5 - n))} for n in counts]
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


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), float("inf")])
def test_every_weight_is_a_finite_number_of_0_or_more(tmp_path, wrong):
    one = adapter(tmp_path, samples=8)
    (group,) = one.groups()
    given = iter([3.0, wrong])  # -1 and 3 add up to a number above 0
    with pytest.raises(RunError, match=rf"has the weight {wrong:g}\. It must be a finite number, 0 or more"):
        one.weigh(group, lambda batch: next(given))
    one.close()


def test_data_that_stand_in_for_others_are_their_own(tmp_path):
    """A training step may take members out of its batch: within a step, and of a step before."""
    one = adapter(tmp_path, samples=16)
    first, second = one.groups()
    labels = first[0].data["labels"]

    def weight(batch):
        return float(batch["labels"] is labels)

    assert one.weigh(first, weight)[0] == [1.0, 0.0]
    assert all(micro.data.pop("labels") is labels for micro in first)
    with pytest.raises(RunError, match="add up to 0"):
        one.weigh(second, weight)
    assert all(micro.data.pop("labels") is labels for micro in second)
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


class Local(Exception):
    """An error that no other process can load."""

    def __reduce__(self):
        raise TypeError("cannot be pickled")


def files_that_fail(rank: int, ranks: int, folder: str) -> list[tuple[str, str, str | None]]:
    """The errors of one rank, where rank 0 alone looks at the files."""
    one, found = adapter(folder, rank=rank, ranks=ranks), []
    for error in (EnvironmentFault("the disk is full.", field="disk"), Local("no such file")):

        def ask(error=error):
            raise error

        try:
            one.from_first("looking for the newest checkpoint", ask)
        except Exception as raised:
            found.append((type(raised).__name__, str(raised), getattr(raised, "field", None)))
    one.close()
    return found


def test_an_error_of_rank_0_is_raised_on_all_ranks(tmp_path):
    first, second = run_ranks(files_that_fail, 2, 2, str(tmp_path))
    assert first == [("EnvironmentFault", "the disk is full.", "disk"), ("Local", "no such file", None)]
    assert second[0] == first[0]
    said = "rank 0: looking for the newest checkpoint failed: Local: no such file"
    assert second[1] == ("RunError", said, "directory")


def opened(rank: int, ranks: int, folder: str, rows: int, seed: int) -> tuple[str, str | None]:
    """What `open` says on a rank, where rank 1 has so many rows, and this seed."""
    made = course(RAMP.compile().until(64), micro_batch_size=4, budget=never)
    one = Adapter(made, ROWS[: rows if rank else 64], rank=rank, ranks=ranks, directory=folder, seed=seed * rank)
    try:
        one.open()
    except RunError as error:
        return str(error), error.field
    one.close()
    return "", None


def test_ranks_with_other_orders_of_samples_are_refused_by_all(tmp_path):
    """They would train some samples twice, and some not at all."""
    for text, field in run_ranks(opened, 2, 2, str(tmp_path / "rows"), 60, 0):
        assert text.startswith("the ranks have datasets of different lengths: 64 on rank 0, 60 on rank 1.")
        assert field == "dataset"
    for text, field in run_ranks(opened, 2, 2, str(tmp_path / "seed"), 64, 7):
        assert text.startswith(
            "the ranks have different orders of samples: GlobalOrder(size=64, seed=0, shuffle=True) on"
        )
        assert "seed=7, shuffle=True) on rank 1." in text and field == "order"
    assert run_ranks(opened, 2, 2, str(tmp_path / "same"), 64, 0) == [("", None)] * 2
    assert not (tmp_path / "rows").exists() and not (tmp_path / "seed").exists()


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
    assert sealed.fault(tmp_path / "1-12") == "weights has 2 bytes, and had 3"
    assert sealed.fault(tmp_path / "0-16") == sealed.INTERRUPTED
    assert sealed.fault(tmp_path / "0-8") == "" and "saved without batchwright" in sealed.fault(tmp_path)
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


def chosen(model, loss, weights, samples, collate=torch.stack, **given):
    """What the test of the loss decides on one rank, and what it warns of."""
    told = []
    settings = {"half": False, "largest": lambda values: values, "warn": told.append, **given}
    found = additive.test(model, loss, weights, lambda all: pieces(samples, all, collate), **settings)
    return found, told


def test_a_loss_over_pairs_does_not_add_up():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5))
    rows = list(torch.randn(8, 4))

    def mean(x):
        return model(x).square().mean()

    def contrastive(x):
        return torch.nn.functional.cross_entropy(model(x) @ x.T, torch.arange(len(x)))

    assert chosen(model, mean, [len], rows[:7]) == (len, [])
    assert model[1].training and all(p.grad is None for p in model.parameters())
    for wrong in (contrastive, lambda x: mean(x) * len(x), lambda x: mean(x) * torch.nan):
        with pytest.raises(
            RunError, match=r"Either weight= is not .* counts 4 and 4 in .*in-batch negatives.* is a sum"
        ):
            chosen(model, wrong, [len], rows)


def near_zero(kind):
    """A model with 4 samples of 3, 9, 2 and 10 tokens, and a loss that is right, and near 0: terms cancel, or all vanish."""
    model, lengths = torch.nn.Linear(8, 16), (3, 9, 2, 10)
    scores = torch.randn(24)
    scores = (
        (scores - scores.mean()) / scores.std()
        if kind == "policy gradient"
        else torch.tensor([1.0, -1.0]).repeat_interleave(12)
    )
    with torch.no_grad():
        model.bias[0] = {"policy gradient": 0.0, "critic": 100.0, "memorised": 13.5}[kind]

    def loss(batch):
        logits = model(batch["x"])
        if kind == "policy gradient":  # its ratio is 1, and the mean of the normalised scores is 0
            logs = logits.log_softmax(1)[:, 0]
            return -(batch["scores"] * (logs - logs.detach()).exp()).mean()
        if kind == "critic":
            return (batch["scores"] * logits[:, 0]).mean()
        # Kernels round differently where the shape is another one.
        logits = logits + (len(logits) > 12) * logits.detach().abs() * torch.finfo(torch.float32).eps
        return torch.nn.functional.cross_entropy(logits, batch["labels"])

    parts = zip(torch.randn(24, 8).split(lengths), scores.split(lengths), strict=True)
    samples = [{"x": x, "scores": own, "labels": torch.zeros(len(x), dtype=torch.long)} for x, own in parts]
    return model, loss, samples


@pytest.mark.parametrize("kind", ["policy gradient", "critic", "memorised"])
def test_rounding_is_not_refused_where_a_loss_is_nearly_0(kind):
    right = labels_that_count(shifted=False)

    def collate(rows):
        return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}

    for seed in range(20):
        torch.manual_seed(seed)
        model, loss, samples = near_zero(kind)
        assert chosen(model, loss, [right], samples, collate)[0] is right
        with pytest.raises(RunError, match="does not add up"):  # a wrong weight is seen there, too
            chosen(
                model, loss, [lambda batch: len(batch["labels"]) ** 0.5 + batch["scores"][0] ** 2], samples[:3], collate
            )


def test_a_wrong_weight_is_seen_in_the_gradient_where_all_losses_are_equal():
    model = torch.nn.Linear(4, 16)
    with torch.no_grad():
        model.weight.zero_(), model.bias.zero_()  # a new model: every token's loss is log 16
    samples = [{"tokens": torch.randn(n, 4), "labels": torch.randint(0, 16, (n,))} for n in (3, 9)]

    def collate(rows):
        return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}

    def mean(batch):
        return torch.nn.functional.cross_entropy(model(batch["tokens"]), batch["labels"])

    with pytest.raises(
        RunError, match=r"it is 0\.00% away.*its gradient [1-9]\d\.\d\d%.*It fits a mean over labels that are not -100"
    ):
        chosen(model, mean, [lambda batch: 1], samples, collate)
    right = labels_that_count(shifted=False)
    assert chosen(model, mean, [right], samples, collate) == (right, [])


@pytest.mark.parametrize("extra", [2, 200])
def test_what_is_refused_is_little_more_than_rounding(extra):
    """A weight that is wrong by 2 of 12 labels, and by 2 of about 1,000: the gradient is wrong by 2e-4 of its norm."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 16)
    samples = [{"tokens": torch.randn(n, 4), "labels": torch.randint(0, 16, (n,))} for n in (extra, 4 * extra)]

    def collate(rows):
        return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}

    def mean(batch):
        return torch.nn.functional.cross_entropy(model(batch["tokens"]), batch["labels"])

    right = labels_that_count(shifted=False)
    assert chosen(model, mean, [right], samples, collate)[0] is right
    with pytest.raises(RunError, match="does not add up") as refused:
        chosen(model, mean, [lambda batch: right(batch) + 1], samples, collate)
    assert extra == 2 or refused.value.given < 1e-3
    near, _ = chosen(model, mean, [lambda batch: right(batch) + 1e-6], samples, collate)  # rounding
    assert near is not right


@pytest.mark.parametrize("lengths", [(3, 9), (5, 5), (6,)])
@pytest.mark.parametrize("new", [False, True])
@pytest.mark.parametrize("compare", [False, True])
@pytest.mark.parametrize("shift", [0, 1])
def test_the_default_weight_is_the_one_that_fits(shift, compare, new, lengths):
    """Also where rows are equally long, where a micro batch is one sample, and where all losses are equal."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(8, 4), torch.nn.Linear(4, 8))
    if new:
        torch.nn.init.zeros_(model[1].weight), torch.nn.init.zeros_(model[1].bias)
    weights = labels_that_count(shifted=False), labels_that_count(shifted=True)
    samples = [torch.randint(0, 8, (n,)) for n in lengths]

    def collate(rows):
        pad = torch.nn.utils.rnn.pad_sequence
        return {"ids": pad(rows, batch_first=True), "labels": pad(rows, batch_first=True, padding_value=-100)}

    def loss(batch):
        logits = model(batch["ids"])[:, : -1 if shift else None]
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, shift:].flatten())

    found, told = chosen(model, loss, weights, samples, collate, compare=compare)
    assert weights.index(found) == shift
    assert len(told) == (compare and len(lengths) == 1)


def test_small_gradients_of_fp16_do_not_vanish(monkeypatch):
    """As those of a softmax over many classes, and of a mean over many labels: below the smallest number of fp16."""
    torch.manual_seed(0)
    model, samples = torch.nn.Linear(4, 1, bias=False).half(), list(torch.randn(7, 4).half())

    def mean(batch):
        return (model(batch).float() ** 2).mean() * 1e-7

    assert chosen(model, mean, [len], samples)[0] is len
    monkeypatch.setattr(additive, "_AGAINST_UNDERFLOW", 1.0)
    with pytest.raises(RunError, match=r"its gradient [1-9]\d\.\d\d%"):
        chosen(model, mean, [len], samples)


def test_a_quantised_model_computes_in_half_precision():
    """Its weights are bytes, and every other parameter may be in fp32: bitsandbytes, as for QLoRA."""
    needs("bitsandbytes")
    import bitsandbytes

    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 64), bitsandbytes.nn.Linear4bit(64, 64, compute_dtype=torch.bfloat16), torch.nn.Linear(64, 1)
    )  # fmt: skip
    model[1].requires_grad_(False)
    model.to("cpu")  # quantises
    assert {p.dtype for p in model.parameters()} == {torch.float32, torch.uint8}
    samples = list(torch.randn(7, 64))
    assert chosen(model, lambda x: model(x).square().mean(), [len], samples)[0] is len
    with pytest.raises(RunError, match="does not add up"):
        chosen(model, lambda x: model(x).square().sum(), [len], samples)


def test_a_loss_that_cannot_be_measured_without_labels_needs_a_weight():
    model = torch.nn.Sequential(torch.nn.Embedding(8, 4), torch.nn.Linear(4, 8))

    def loss(batch):
        if not (batch["labels"][:, 1:] != -100).any():
            raise ValueError("no label")
        return torch.nn.functional.cross_entropy(
            model(batch["labels"])[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()
        )

    weights = labels_that_count(shifted=False), labels_that_count(shifted=True)

    def collate(rows):
        return {"labels": torch.stack(rows)}

    with pytest.raises(RunError, match="Pass weight="):
        chosen(model, loss, weights, [torch.arange(8)], collate)
    with pytest.raises(RunError, match="Pass weight="):  # equal lengths: both fit
        chosen(model, loss, weights, [torch.arange(8)] * 2, collate)


def test_two_samples_that_do_not_fit_into_memory_are_not_compared():
    model, told = torch.nn.Linear(4, 1), []

    def loss(batch):
        if len(batch) > 1:
            raise torch.OutOfMemoryError
        return model(batch).mean()

    def two(weights):
        return replace(pieces(list(torch.ones(2, 4)), weights, torch.stack), larger=True)

    given = {"half": False, "largest": lambda values: values, "warn": told.append}
    assert additive.test(model, loss, [len], two, **given) is len
    assert told == ["The test whether the loss adds up saw nothing: out of memory. additive=False skips the test."]
    with pytest.raises(torch.OutOfMemoryError):  # as training would
        chosen(model, loss, [len], list(torch.ones(2, 4)))


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("draw", ["mask", "permutation"])
def test_halves_of_a_collator_that_draws_have_the_same_masks(tmp_path, flat, draw):
    def collate(rows):
        labels = torch.stack([row["labels"] for row in rows])
        labels = (
            torch.where(torch.rand(labels.shape) < 0.5, labels, -100)
            if draw == "mask"
            else labels[torch.randperm(len(labels))]
        )
        return {"labels": labels.flatten()} if flat else {"labels": labels, "more": (labels, [labels])}

    one = adapter(tmp_path, micro=2)
    group = next(iter(one.groups(collate)))
    found = one.pieces(group, [lambda batch: batch["labels"].numel()], collate)
    if flat:  # which label belongs to which row is not known
        assert not found.parts and "cannot be divided by rows" in found.missing
    else:
        assert torch.equal(torch.cat([half["labels"] for _, half in found.parts]), found.whole["labels"])
        assert torch.equal(found.parts[1][1]["more"][1][0], found.whole["labels"][1:])
        assert [counted for counted, _ in found.parts] == [[2.0], [2.0]]
    again = one.pieces(group, [len], None)  # a collator that does not draw: read again
    assert torch.cat([half["labels"] for _, half in again.parts])[:, 0].tolist() == group[0].ids.tolist()
    one.close()


def test_a_single_sample_is_compared_together_with_the_next(tmp_path):
    one = adapter(tmp_path, micro=1)
    group = next(iter(one.groups()))
    found = one.pieces(group, [weight], None)
    assert found.larger and found.whole["labels"][:, 0].tolist() == [group[0].ids[0], group[1].ids[0]]
    # Data of the group have been through `before` already.
    empty = one.pieces(group, [lambda batch: 0], None, before=lambda data: 1 / 0, after=lambda data: (data, "moved"))
    assert empty.whole == (group[0].data, "moved")
    assert not empty.parts and empty.missing == "no sample of rank 0 has a weight"
    one.close()


def test_the_test_of_the_loss_leaves_the_model_and_the_generators_as_they_were():
    class Counts(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.neftune_noise_alpha = torch.nn.Linear(4, 1), 5.0
            self.register_buffer("seen", torch.zeros(()))
            self.register_buffer("queue", torch.zeros(4))
            self.register_buffer("nothing", None)

        def forward(self, x):
            self.seen += 1
            self.queue = self.queue + x.detach().sum(0)  # another tensor
            return self.linear(x) + self.neftune_noise_alpha * torch.randn(())

    model, queue = Counts(), None
    queue, state = model.queue, torch.get_rng_state()
    chosen(model, lambda x: model(x).mean(), [len], list(torch.ones(4, 4)))
    assert (float(model.seen), model.neftune_noise_alpha, model.queue is queue) == (0.0, 5.0, True)
    assert torch.equal(model.queue, torch.zeros(4)) and torch.equal(torch.get_rng_state(), state)


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
