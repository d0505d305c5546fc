"""A ramp from a start position, compared with the list of all its steps; and budgets in epochs."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

import batchwright
from batchwright.core.batch.request import read_request
from batchwright.core.codec import decode, encode
from batchwright.core.errors import ConfigError, ScheduleError
from batchwright.core.numbers import decimal, fraction
from batchwright.core.ramp.ramp import Ramp, ramp
from batchwright.core.ramp.request import RampRequest, read_ramp
from batchwright.core.ramp.schedule import LAST_STEPS, Step

STEPS = 120  # how far an open end is followed: beyond the last threshold, also in steps of one sample


@st.composite
def requests(draw: st.DrawFn) -> dict[str, object]:
    """A ramp of thresholds, with an end or without."""
    sizes = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4, unique=True).map(sorted))
    ats = [0, *sorted(draw(st.sets(st.integers(10, 90), min_size=len(sizes) - 1, max_size=len(sizes) - 1)))]
    made: dict[str, object] = {"thresholds": " ".join(f"{at}:{size}" for at, size in zip(ats, sizes, strict=True))}
    if draw(st.booleans()):
        made |= {"samples": draw(st.integers(9, 150)), "last_step": draw(st.sampled_from(LAST_STEPS))}
    return made


def made_from(wanted: dict[str, object], **more: object) -> Ramp:
    world = {"nodes": 2, "devices_per_node": 1, "sequence_length": 3, "allow_ragged": True}
    return ramp(read_request(world), read_ramp({"node_policy": "constant", **wanted, **more}))


def all_steps(made: Ramp) -> list[Step]:
    return [made.at_step(step) for step in range(made.schedule.total_steps or STEPS)]


@given(requests(), st.data())
def test_what_is_left_are_the_steps_from_the_start_on(wanted: dict[str, object], data: st.DataObject):
    whole = made_from(wanted)
    steps = all_steps(whole)
    first = data.draw(st.sampled_from(steps))
    seconds = [0.25 * (index + 1) for index in range(len(whole.schedule.segments))]
    made = made_from(wanted, start_sample=first.start_sample, stage_seconds=seconds)
    rows = made.stages()
    assert made.schedule == whole.schedule
    # The stages are those of the whole ramp with their own numbers; only the first may be a part.
    assert rows[1:] == [
        {**row, "step_seconds": seconds[row["index"]], "hours": rows[k + 1]["hours"]}
        | {"node_hours": rows[k + 1]["node_hours"]}
        for k, row in enumerate(whole.stages()[first.segment + 1 :])
    ]
    left = [step for step in steps if step.start_sample >= first.start_sample]
    for row in rows:
        own = [step for step in left if step.segment == row["index"]]
        if row["steps"] is None:
            assert (row["end_sample"], made.remaining_steps, made.remaining_samples) == (None, None, None)
            continue
        assert (row["first_step"], row["steps"]) == (own[0].step, len(own))
        assert (row["start_sample"], row["end_sample"]) == (own[0].start_sample, own[-1].end_sample)
        assert (row["start_token"], row["end_token"]) == (3 * row["start_sample"], 3 * row["end_sample"])
        assert row["hours"] == pytest.approx(len(own) * seconds[row["index"]] / 3600)
        assert row["node_hours"] == pytest.approx(2 * len(own) * seconds[row["index"]] / 3600)
    if made.schedule.total_steps is not None:
        assert made.remaining_steps == len(left)
        assert made.remaining_samples == sum(step.global_batch_size for step in left)
        assert made.placement is not None and made.placement.hours == pytest.approx(
            sum(seconds[step.segment] for step in left) / 3600
        )


@given(requests(), st.integers(1, 250))
def test_a_start_inside_a_step_or_after_the_end_names_the_nearest_boundaries(wanted: dict[str, object], start: int):
    whole = made_from(wanted)
    boundaries = [step.start_sample for step in all_steps(whole)]
    if whole.schedule.total_samples is None and start > boundaries[-1]:
        return
    if start in boundaries:
        assert made_from(wanted, start_sample=start).left[0].start_sample == start
        return
    near = [at for at in boundaries if at < start][-1:] + [at for at in boundaries if at > start][:1]
    with pytest.raises(ScheduleError) as caught:
        made_from(wanted, start_sample=start)
    assert (caught.value.field, list(caught.value.nearest)) == ("start_sample", near)
    for nearest in near:
        assert made_from(wanted, start_sample=nearest).left[0].start_sample == nearest


def test_in_python_and_as_json():
    made = batchwright.ramp(linear=(256, 128, "50M"), global_batch_size=1024, samples="100M", start_sample=50_000_768)
    assert [row["index"] for row in made.stages()] == [6]
    document = made.to_json()
    assert (document["start_sample"], document["stages"][0]["first_step"]) == (50_000_768, 103_703)
    assert document["remaining_samples"] == 49_999_232 and document["total_samples"] == 100_000_000
    assert batchwright.ramp(linear=(256, 128, "50M"), global_batch_size=1024).to_json()["start_sample"] == 0


def test_errors_and_notes_number_stages_as_the_whole_ramp_does():
    rule = {"thresholds": "0:8 80:12 200:16", "samples": 400, "start_sample": 80}
    world = {"nodes": 4, "devices_per_node": 1, "micro_batch_size": 1}
    made = batchwright.ramp(**rule, **world, node_policy="constant-work")
    assert [stage.index for stage in made.placement.stages] == [1, 2]
    assert [launch.stages for launch in made.placement.launches] == [(1,), (2,)]
    with pytest.raises(ScheduleError, match=r"ramp stage 2 of 3 \(from sample 80\)"):
        batchwright.ramp(**rule, **{**world, "micro_batch_size": 8}, node_policy="constant")
    with pytest.raises(ScheduleError, match="given for 2 stages, and the ramp has 3"):
        batchwright.ramp(**rule, **world, node_policy="constant-work", stage_seconds="1,2")


def test_learning_rates_are_those_of_the_stages_that_are_left():
    wanted = {"thresholds": "0:8 80:16", "lr": 0.5, "lr_scaling": "linear", "start_sample": 160}
    rates = batchwright.ramp(**wanted).to_json()["learning_rate"]
    assert [(rate["index"], rate["after"]) for rate in rates] == [(1, 1.0)]


def test_a_recipe_from_a_position_keeps_its_measured_times():
    made = batchwright.ramp(recipe="nemotron-4-15b", nodes=288, start_sample=97_656_960)
    assert [(stage.index, stage.nodes, stage.step_seconds) for stage in made.placement.stages] == [(2, 288, 0.64)]


# --- epochs -----------------------------------------------------------------------------------------------------------

epochs = st.fractions(Fraction(1, 1000), 50, max_denominator=1000)


@given(epochs, st.integers(1, 10_000))
def test_epochs_are_exact_or_refused_with_the_nearest(number: Fraction, size: int):
    wanted = read_ramp({"epochs": decimal(number), "dataset_size": size})
    assert wanted.epochs == number
    exact = number * size
    if exact.denominator == 1:
        assert wanted.budget() == exact
        return
    with pytest.raises(ScheduleError) as caught:
        wanted.budget()
    below, above = int(exact), int(exact) + 1
    assert [fraction(near) * size for near in caught.value.nearest] == [n for n in (below, above) if n]
    for near in caught.value.nearest:
        assert read_ramp({"epochs": near, "dataset_size": size}).budget() in (below, above)


@given(epochs, st.integers(1, 10_000))
def test_a_budget_in_epochs_is_the_one_in_samples(number: Fraction, size: int):
    samples = number * size
    if samples.denominator > 1:
        return
    rule = {"thresholds": "0:4 100:8"}
    counted = batchwright.ramp(**rule, epochs=decimal(number), dataset_size=size)
    assert counted.schedule == batchwright.ramp(**rule, samples=int(samples)).schedule
    assert any("epochs" in note for note in counted.notes)


def test_python_values():
    assert read_ramp({"epochs": 1.5, "dataset_size": 4096}).budget() == 6144
    assert read_ramp({"epochs": 0.1, "dataset_size": 10}).budget() == 1  # the decimal, not the float
    assert read_ramp({"epochs": 3, "dataset_size": "50K"}).budget() == 150_000
    assert decode(RampRequest, encode(read_ramp({"epochs": "1/3"}))) == read_ramp({"epochs": "1/3"})


@pytest.mark.parametrize(
    ("wanted", "kind", "message"),
    [
        ({"epochs": 2, "samples": 8}, ConfigError, "samples and epochs are mutually exclusive: a ramp has one budget"),
        ({"epochs": 2, "tokens": 8}, ConfigError, "tokens and epochs are mutually exclusive"),
        ({"epochs": 2, "tokens": 8, "samples": 8}, ConfigError, "samples and tokens and epochs are mutually exclusive"),
        ({"epochs": 2}, ScheduleError, "epochs=2 needs dataset_size"),
        ({"dataset_size": 2, "samples": 8}, ConfigError, "dataset_size has no effect without epochs"),
        ({"epochs": 0, "dataset_size": 2}, ConfigError, "epochs=0: must be above 0"),
        ({"epochs": "-1", "dataset_size": 2}, ConfigError, "epochs=-1: must be above 0"),
        ({"epochs": "many", "dataset_size": 2}, ConfigError, "epochs='many' is not a number"),
        ({"epochs": "1T", "dataset_size": "1T"}, ConfigError, "must be at most"),
    ],
)
def test_budgets_that_do_not_work(wanted: dict[str, object], kind: type[Exception], message: str):
    with pytest.raises(kind, match=message):
        batchwright.ramp(global_batch_size=8, **wanted)


def test_a_recipe_takes_a_budget_in_epochs():
    made = batchwright.ramp(recipe="olmo-1b-warmup", epochs=2, dataset_size=10_000_000)
    assert made.schedule.total_samples == 20_000_000
