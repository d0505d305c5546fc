"""A pipeline on real ranks gives the gradient of the whole model on the whole batch, under each of torch's schedules."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the helpers beside this file, under any import mode

import pipeline_workers as workers
from pipeline_workers import MORE_STAGES, SCHEDULES, SPLIT_BACKWARD

pytestmark = [pytest.mark.slow, pytest.mark.torch]

LIMITS = {"torch.float32": 1e-6, "torch.float64": 1e-12}


@pytest.mark.parametrize(
    ("stages", "ranks", "wrappers"),
    [
        (2, 2, ("ours",)),
        pytest.param(4, 4, ("ours",), marks=pytest.mark.rounds),
        (2, 4, ("ours", "ddp", "fsdp2")),
        pytest.param(4, 8, ("ours", "ddp", "fsdp2"), marks=pytest.mark.rounds),
    ],
)
def test_every_schedule_gives_the_gradient_of_the_whole_batch(
    run_ranks: Any, stages: int, ranks: int, wrappers: tuple[str, ...]
) -> None:
    found = run_ranks(workers.equality, ranks, stages, wrappers)
    cases = sum(1 if schedule in SPLIT_BACKWARD else len(wrappers) for schedule in SCHEDULES)
    for errors in found:
        assert len(errors) == cases * 2 * 2  # two precisions, two steps of a ramp
        wrong = {key: error for key, error in errors.items() if max(error) > LIMITS[key[2]]}
        assert not wrong


@pytest.mark.rounds
def test_other_numbers_of_stages_on_a_rank(run_ranks: Any) -> None:
    for found in run_ranks(workers.more_stages, 2):
        assert found.keys() == {*MORE_STAGES} and max(found.values()) < 1e-12, found


@pytest.mark.rounds
def test_a_step_that_ends_early_is_exact_or_dropped(run_ranks: Any) -> None:
    for found in run_ranks(workers.ended_early, 4):
        for wrapper in ("ours", "ddp", "fsdp2"):
            outcome, samples, error = found["exact", wrapper]
            assert (outcome, samples) == ("applied", 20) and error < 1e-12, wrapper
            assert found["drop", wrapper][0] == "dropped" and found["drop", wrapper][2] == 0, wrapper


@pytest.mark.rounds
def test_microbatches_inside_of_micro_batches_in_every_wrapper(run_ranks: Any) -> None:
    for found in run_ranks(workers.inner, 4):
        assert len(found) == 9 and max(found.values()) < 1e-12, found


@pytest.mark.parametrize(
    "cases",
    [
        [("1f1b", 1), ("torch-interleaved", 2), ("zbv", 2), ("dualpipev", 2)],
        pytest.param([*SCHEDULES.items(), *MORE_STAGES], marks=pytest.mark.rounds),
    ],
    ids=["some", "all"],
)
def test_evaluation_has_the_losses_of_the_whole_model_under_every_schedule(run_ranks: Any, cases: Any) -> None:
    for found in run_ranks(workers.evaluated, 2, cases):
        assert found.keys() == {*cases} and max(map(max, found.values())) < 1e-12, found


def test_the_norm_over_stages_of_other_types(run_ranks: Any) -> None:
    for found in run_ranks(workers.typed_norms, 2):
        for measured, by_hand in found.values():
            assert measured == pytest.approx(by_hand, rel=1e-2)  # bf16 has 8 bits
        assert found["half"][0] > 2**8  # its square is beyond fp16


def test_numbers_and_clipping_are_those_of_the_whole_model_on_every_rank(run_ranks: Any) -> None:
    for found in run_ranks(workers.numbers, 4):
        for style, micro_steps in (("accumulation", 8), ("inner", 8)):
            of_numbers, of_gradient, samples, steps = found[style]
            assert samples == 32 and steps == micro_steps, style
            # The balance loss is a mean over a microbatch: it is the same if microbatches are, as here.
            assert max(of_numbers, of_gradient) < 1e-12, style


def test_a_filler_has_no_weight(run_ranks: Any) -> None:
    assert max(run_ranks(workers.filled, 4)) < 1e-12


def test_a_loss_that_draws_draws_the_same_on_the_first_and_the_last_stage(run_ranks: Any) -> None:
    assert max(run_ranks(workers.masked, 2)) < 1e-12


def test_what_a_pipeline_refuses_is_refused_on_every_rank_with_the_nearest_count(run_ranks: Any) -> None:
    for found in run_ranks(workers.refusals, 2):
        assert found["1f1b"].startswith("pipeline_microbatches [2]")
        assert found["interleaved"].startswith("pipeline_microbatches [4, 6]")
        assert found["dualpipev"].startswith("pipeline_microbatches [4]")
        assert "different shapes" in found["shapes"]
        assert "DDP does not reduce them" in found["ddp"] and "FSDP2 loses some" in found["fsdp2"]
        assert found["noise"].startswith("noise") and found["scaler"].startswith("scaler")
        for wrapper in ("ddp", "fsdp2"):
            assert found[f"noise in {wrapper}"].startswith("noise"), wrapper
        assert "argument scale of the model is a tensor of 0 dimensions" in found["0 dimensions"]
        assert "argument scale of the model differs in the 2 microbatches" in found["values"]
        assert "argument scale of the model is of type ndarray" in found["types"]
        assert found["carry"].startswith("partial") and found["inner"].startswith("inner_microbatches")


def test_the_first_stage_alone_gets_what_the_loss_passes_to_the_model(run_ranks: Any) -> None:
    for found in run_ranks(workers.named, 2):
        assert len(found) == 3 and max(found.values()) < 1e-12


def test_parameters_that_no_input_reaches_have_their_gradient_under_zero_bubble(run_ranks: Any) -> None:
    for found in run_ranks(workers.apart, 2):
        assert found.keys() == set(SPLIT_BACKWARD) and max(found.values()) < 1e-12, found


def test_a_loss_draws_anew_in_every_step_and_sees_the_mode_of_the_model(run_ranks: Any) -> None:
    first, last = run_ranks(workers.drawn, 2)
    assert first == last
    # Two steps of two parts each, with different draws; the evaluation draws as the first part of step 0.
    assert [training for training, _ in first] == [False, True, True, True, True]
    assert len({number for _, number in first}) == 4
    assert not {number for _, number in first} & {number for _, number in run_ranks(workers.drawn, 2, 1)[0]}


def test_autocast_around_the_model_is_refused() -> None:
    assert "torch.autocast, which does not reach the stages" in workers.autocast(0)


def test_stages_that_reuse_names_load_on_as_many_stages_only(run_ranks: Any, tmp_path: Path) -> None:
    for same, other in run_ranks(workers.counted, 4, str(tmp_path)):
        assert same == "True"
        assert "of4.0.weight is missing there" in other and "of2.0.weight is missing here" in other, other
        assert "Nothing was loaded" in other


def test_a_buffer_of_every_stage_is_stored_once_and_loads_on_other_stages(run_ranks: Any, tmp_path: Path) -> None:
    for two, four, frequencies, equal, changed in run_ranks(workers.buffered, 2, str(tmp_path)):
        assert two == four == (True, ["frequencies"])
        assert frequencies == [[7.0, 8.0, 9.0, 10.0]] * 2 and equal
        assert "the buffer frequencies had one value in all stages that hold it, and now has 2" in changed


def test_stages_that_share_a_weight_of_the_model_are_refused(run_ranks: Any) -> None:
    for apart, one_name, two_names, counted, failed in run_ranks(workers.tied, 2):
        assert apart == counted == ""
        assert (
            "train 36 elements, and Task.model has 30: embed.weight of stage 0 and embed.weight of stage 1" in one_name
        )
        assert (
            "train 36 elements, and Task.model has 32: embed.weight of stage 0 and head.weight of stage 1" in two_names
        )
        assert "Task.model cannot be built on torch's meta device" in failed and "batchwright check" in failed
