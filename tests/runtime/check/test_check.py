"""`check` passes correct tasks, and finds every planted fault."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from batchwright.core.errors import PlanError, RunError
from batchwright.core.ramp.rules import Thresholds
from batchwright.runtime.check import CheckReport, check, default_sizes
from batchwright.runtime.check.gradients import Rig, Variant, relative_error
from batchwright.runtime.check.names import CAUSES
from batchwright.runtime.task import load_task

sys.path.insert(0, str(Path(__file__).parent))  # the helpers beside this file, under any import mode

import check_tasks

FILE = str(Path(check_tasks.__file__))
PLANTED = {
    "mean_with_count": {"scaled-by-accumulation"},
    "token_mean_with_count": {"scaled-by-accumulation", "mean-of-means"},
    "sum_without_weight": {"scaled-by-accumulation"},
    "mean_of_means": {"mean-of-means"},
    "mean_times_rows": {"mean-of-means"},
    "padded_weight": {"mean-of-means"},
    "ragged_tail": {"ragged-tail"},
    "auxiliary_in_sum": {"auxiliary-scaled"},
    "auxiliary_as_sum": {"auxiliary-scaled"},
    "auxiliary_statistic_in_sum": {"auxiliary-scaled"},
    "batch_norm": {"batch-norm"},
    "batch_norm_flat": {"batch-norm"},
    "functional_batch_norm": {"batch-norm"},
    "batch_norm_and_mean": {"batch-norm", "scaled-by-accumulation"},
    "contrastive": {"in-batch-negatives"},
    "pairs": {"in-batch-negatives"},
    "unmasked_padding": {"padding"},
    "dropout_and_mean": {"mean-of-means"},
    "keeps_state": {"keeps-state"},
    "single_precision_only": {"scaled-by-accumulation"},
    "masked_by_numpy": {"random-draws"},
    "noisy_by_python": {"random-draws"},
    "wrong_at_odd_sizes": {"unexplained"},
    "refuses_twins": {"unexplained"},
}
CORRECT = {
    "cnn": set(),
    "transformer": set(),
    "sequence_weighted": set(),
    "auxiliary": set(),
    "unseeded": set(),
    "fused_head": set(),
    "with_dropout": {"dropout"},
    "checkpointed": {"dropout"},
    "checkpointed_reentrant": {"dropout"},
    "noisy": {"dropout"},
    "masked_in_collate": {"dropout"},
    "balance_statistic": {"auxiliary-per-micro-batch"},
    "autocast": {"precision"},
}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(name: str, **options) -> CheckReport:
    return check(getattr(check_tasks, name)(), **options)


def causes(report: CheckReport, severity: str) -> set[str]:
    return {f.cause for f in report.findings if f.severity == severity}


def worst(report: CheckReport) -> float:
    return max(s.relative_error for s in report.splits if s.relative_error is not None)


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found_and_named(name):
    report = run(name)
    assert not report.ok
    assert causes(report, "error") == PLANTED[name]
    assert worst(report) > 1e-3


@pytest.mark.parametrize("name", CORRECT)
def test_a_correct_task_passes_with_notes_only(name):
    report = run(name)
    assert report.ok
    assert causes(report, "error") == set()
    assert causes(report, "note") == CORRECT[name]
    if not CORRECT[name]:
        assert worst(report) < 1e-6


def test_the_numbers_of_a_scale_are_the_accumulation_steps():
    report = run("mean_with_count", global_batch_size=12, micro_batch_sizes=(3, 6))
    assert [round(s.relative_error or 0, 3) for s in report.splits] == [3.0, 1.0]  # K - 1
    assert "4× the full batch's at 4 micro batches of 3" in report.findings[0].message
    shrunk = run("sum_without_weight", global_batch_size=12, micro_batch_sizes=(3,))
    assert shrunk.splits[0].relative_error == pytest.approx(0.75)
    assert "0.25× the full batch's" in shrunk.findings[0].message


def test_errors_are_split_by_module_and_sum_to_the_whole():
    report = run("auxiliary_in_sum")
    groups = report.splits[0].groups
    assert next(iter(groups)) == "router"
    assert sum(e * e for e in groups.values()) ** 0.5 == pytest.approx(report.splits[0].relative_error, rel=1e-3)


def test_batch_norm_that_cannot_run_a_single_sample_is_a_finding_not_a_crash():
    report = run("batch_norm_flat", micro_batch_sizes=(1, 8))
    assert report.splits[0].relative_error is None
    assert "Micro batches of 1 cannot be normalised" in report.findings[0].message


def test_batch_norm_that_can_run_no_micro_batch_is_a_finding_on_several_ranks_too():
    report = run(
        "batch_norm_flat", micro_batch_sizes=(1,), ranks=2, source=(f"{check_tasks.__file__}:batch_norm_flat", {})
    )
    assert "Micro batches of 1 cannot be normalised" in report.findings[0].message


def test_ranks_that_could_not_be_compared_are_a_note():
    """A cause that is allowed leaves no error, so the note is all that says it."""
    source = f"{check_tasks.__file__}:batch_norm_flat", {}
    report = run("batch_norm_flat", micro_batch_sizes=(1, 8), ranks=16, source=source, allow=("batch-norm",))
    assert report.ok and {split.ranks for split in report.splits} == {1}
    assert any(note.startswith("Nothing was compared on 16 ranks: the task runs none of") for note in report.notes)


def test_a_cause_can_be_allowed():
    report = run("batch_norm", allow=("batch-norm",))
    assert report.ok
    assert causes(report, "note") == {"batch-norm"}


def test_a_cause_to_allow_has_to_be_one():
    with pytest.raises(PlanError, match=r"allow='batchnorm' is not a cause.* Nearest: batch-norm") as caught:
        run("batch_norm", allow=("dropout", "batchnorm"))
    assert caught.value.nearest[0] == "batch-norm"
    page = (Path(__file__).parents[3] / "docs" / "check.md").read_text(encoding="utf-8")
    assert all(f"| `{cause}`" in page or f", `{cause}` |" in page for cause in CAUSES)


@pytest.mark.parametrize(("name", "steps", "notes"), [("bf16", 128, {"precision"}), ("fp16", 512, set())])
def test_a_half_precision_accumulator_is_a_note_at_few_steps_and_an_error_at_many(name, steps, notes):
    """fp16 has three more bits, so it allows four times the steps."""
    few = run(name, global_batch_size=4)
    many = run(name, global_batch_size=steps, micro_batch_sizes=(1,))
    wide = run(name, global_batch_size=steps, micro_batch_sizes=(1,), accumulate_dtype=torch.float32)
    assert causes(few, "note") == {f"{name}-accumulator"} | notes
    assert f"{name}-accumulator" in causes(many, "error")
    assert causes(wide, "error") == set()
    assert worst(wide) < worst(many)


def test_findings_without_a_known_cause_show_their_numbers():
    (collate,), (seeds,) = run("masked_by_numpy").findings, run("noisy_by_python").findings
    assert "collating the same samples twice gives different tensors" in collate.message
    assert "differs by 0.065 between two seeds" in seeds.message
    (odd,), twins = run("wrong_at_odd_sizes").findings, run("refuses_twins")
    assert "off by 0.9 at 6 micro batches of 3" in odd.message and "most of it in head" in odd.message
    assert "16× the full batch's along it" in twins.findings[0].message
    assert "could not be run: the task failed" in twins.notes[0] and "a sample came twice" in twins.notes[0]


def test_a_rate_that_counts_steps_is_a_note_and_under_a_ramp_an_error():
    ramp = Thresholds(((0, 8), (800, 16))).compile()
    assert causes(run("scheduled"), "note") == {"step-counted-schedule"}
    report = run("scheduled", ramp=ramp, lr_horizon_steps=1000, budget_samples=16_000)
    assert causes(report, "error") == {"step-counted-schedule"}
    assert "ends at sample 15,200, 800 before the budget of 16,000" in report.findings[0].message
    assert run("cnn", ramp=ramp).ok


def test_fp64_is_as_exact_as_promised():
    rig = Rig(check_tasks.transformer(), 13)
    variant = Variant(random=False, exact=True)
    reference = rig.reference(variant)
    assert max(relative_error(rig.split(variant, micro), reference) for micro in (1, 5, 13)) < 1e-12


def test_a_failure_of_the_task_is_a_run_error_whose_cause_begins_in_its_file():
    with pytest.raises(RunError, match="in one micro batch: RuntimeError") as caught:
        run("broken")
    assert caught.value.__cause__.__traceback__.tb_frame.f_code.co_filename == FILE
    with pytest.raises(RunError, match="in micro batches of 1: ValueError: one is not enough"):
        run("broken_at_one")


def test_impossible_requests_are_refused_together():
    with pytest.raises(PlanError) as caught:
        run("cnn", global_batch_size=4, micro_batch_sizes=(2, 8), ranks=2)
    assert [v.field for v in caught.value.violations] == ["micro_batch_size", "source"]
    assert caught.value.nearest == (4,)


@pytest.mark.parametrize("size", range(1, 20))
def test_default_sizes_are_single_ragged_half_and_whole(size):
    sizes = default_sizes(size)
    assert sizes[0] == 1 and sizes[-1] == size
    assert size < 3 or any(size % m for m in sizes)


def test_ranks_give_the_same_gradient():
    target = f"{FILE}:unseeded"
    report = check(load_task(target), ranks=2, source=(target, {}), micro_batch_sizes=(3, 16), global_batch_size=16)
    several = [(s.micro_batch_size, s.accumulation_steps) for s in report.splits if s.ranks == 2]
    assert several == [(3, 3), (8, 1)]
    assert report.ok and worst(report) < 1e-6


@pytest.mark.rounds
def test_a_loss_that_reduces_over_ranks_itself_is_found():
    target = f"{FILE}:rank_reduced"
    report = check(load_task(target), ranks=2, source=(target, {}), micro_batch_sizes=(8,))
    assert causes(report, "error") == {"rank-dependent"}
    assert report.splits[-1].relative_error == pytest.approx(0.5, rel=1e-3)


def test_a_rank_that_fails_is_shown_with_its_own_traceback():
    target = f"{FILE}:auxiliary"  # reads model.balance, which the DDP wrapper does not have
    with pytest.raises(RunError, match="no attribute 'balance'") as caught:
        check(load_task(target), ranks=2, source=(target, {}), micro_batch_sizes=(8,))
    assert "check/ranks.py" not in str(caught.value)
