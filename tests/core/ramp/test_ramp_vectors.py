"""Test vectors from the ramps of other systems. Where those crash or miscount, the test states batchwright's result."""

from __future__ import annotations

import dataclasses
import json
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import pytest

from batchwright.core.batch.equation import Unknowns, solve
from batchwright.core.errors import PlanError, ScheduleError
from batchwright.core.ramp.recipes import RECIPES, recipe
from batchwright.core.ramp.rules import Constant, Linear, PerDevice, Thresholds, compare, parse_thresholds
from batchwright.core.ramp.schedule import Rule, Schedule

VECTORS: dict[str, Any] = json.loads((Path(__file__).parents[2] / "vectors" / "ramp.json").read_text())
# Node counts, elasticity and learning rates are tested in tests/core/nodes and test_learning_rate.py.
ELSEWHERE = {
    "_about",
    "launcher_node_schedule",
    "launcher_table_condition",
    "deepspeed_elasticity",
    "lr_scaling",
}
TESTED_HERE = {
    "megatron_constant",
    "megatron_constant_lifecycle",
    "megatron_linear",
    "megatron_linear_float_boundary",
    "megatron_linear_float_survey",
    "megatron_linear_trajectories",
    "megatron_step_parse",
    "megatron_step_update",
    "megatron_step_rules",
    "megatron_train_iters",
    "nemo_consumed_sample_drift",
    "nemo_boundary_step_floor",
    "maxtext",
    "levanter",
    "olmo_core",
    "olmo_core_validation",
    "internevo",
    "published_schedules",
}


def each(key: str) -> pytest.MarkDecorator:
    entries = VECTORS[key]
    return pytest.mark.parametrize("entry", entries, ids=[f"{key}-{i}" for i in range(len(entries))])


def size_at(rule: Rule, consumed: int, sequence_length: int | None = None) -> int:
    """The size of the next step of a run that has consumed this many samples."""
    if not consumed:
        return rule.compile().segments[0].global_batch_size
    past = Constant(consumed, sequence_length).compile().until(consumed)
    return past.continued(consumed, rule).segments[1].global_batch_size


def accumulation(batch: int, entry: dict[str, Any]) -> int:
    return solve(Unknowns(batch, entry["mbs"], None, entry["dp"]))[0].accumulation_steps


def runs(schedule: Schedule) -> list[list[int | None]]:
    return [[s.global_batch_size, s.steps] for s in schedule.segments]


def first_steps(schedule: Schedule, steps: int, start: int = 0) -> list[list[int]]:
    sizes = (schedule.at_step(step).global_batch_size for step in range(start, start + steps))
    return [[size, len(list(group))] for size, group in groupby(sizes)]


def test_no_vector_is_left_out():
    assert TESTED_HERE | ELSEWHERE == set(VECTORS)


@each("megatron_constant")
def test_megatron_constant(entry: dict[str, Any]):
    batch, expect = entry["gbs"], entry["expect"]
    assert size_at(Constant(batch), 10**9) == batch
    if expect.get("running") == batch:
        assert accumulation(batch, entry) == expect["num_microbatches"]
        return
    # Upstream asserts, or runs a smaller batch than it reports; batchwright raises an error with the nearest values.
    with pytest.raises(PlanError) as caught:
        accumulation(batch, entry)
    if "running" in expect:
        assert expect["running"] in caught.value.nearest


def test_megatron_constant_lifecycle():
    twice, reconfigured = VECTORS["megatron_constant_lifecycle"]
    assert twice["expect"] == "AssertionError"  # upstream keeps one calculator per process; ours are plain values
    first, second = Constant(32).compile(), Constant(32).compile()
    assert first == second
    after = first.continued(320, Constant(16))
    assert after.at_step(9).global_batch_size == 32
    assert after.at_step(10).global_batch_size == reconfigured["expect"]["global"]
    assert accumulation(16, {"mbs": 8, "dp": 2}) == reconfigured["expect"]["num_microbatches"]


@each("megatron_linear")
def test_megatron_linear(entry: dict[str, Any]):
    triple, target, expect = (
        (entry["start"], entry["increment"], entry["rampup_samples"]),
        entry["gbs"],
        entry["expect"],
    )
    if entry["start"] > target or not entry["increment"]:
        assert expect == {"error": "AssertionError"}
        with pytest.raises(ScheduleError):
            Linear(*triple, target)
        return
    size = size_at(Linear(*triple, target), entry["consumed_samples"] or 0)
    if not entry["rampup_samples"]:  # ZeroDivisionError upstream; batchwright starts at the target, with a note
        assert expect == {"error": "ZeroDivisionError"} and size == target
        assert "0 samples" in Linear(*triple, target).compile().notes[0]
        return
    if expect.get("running") == size:
        assert (size, accumulation(size, entry)) == (expect["global"], expect["num_microbatches"])
        return
    # Upstream asserts, or with `decrease` runs 16 and reports 24; batchwright refuses the stage and names the nearest.
    assert size == expect.get("global", entry["start"])
    with pytest.raises(PlanError) as caught:
        accumulation(size, entry)
    assert expect.get("running", caught.value.nearest[0]) in caught.value.nearest


@each("megatron_linear_float_boundary")
def test_megatron_linear_is_exact_where_its_float_misses(entry: dict[str, Any]):
    rule = Linear(entry["start"], entry["increment"], entry["rampup_samples"], entry["gbs"])
    assert size_at(rule, entry["consumed_samples"]) == entry["exact_integer"]


def test_megatron_float_survey():
    survey = VECTORS["megatron_linear_float_survey"]
    wrong = set[tuple[int, int]]()
    pairs = [(n, samples) for n in range(1, 200) for samples in survey["rampup_samples"]]
    for n, samples in pairs:
        per = samples / n
        for k, switch in enumerate(Linear(1, 1, samples, target=n + 1).switches()):
            assert (switch.at * n >= k * samples) and (k == 0 or (switch.at - 1) * n < k * samples)
            # Only a whole threshold can be reached exactly, and only there is the float too small.
            if k * samples % n == 0 and switch.at <= samples and int(switch.at / per) != k:
                wrong.add((n, samples))
    assert len(pairs) == survey["pairs"]
    assert len(wrong) == survey["pairs_with_a_wrong_boundary"]


@each("megatron_linear_trajectories")
def test_megatron_linear_trajectories(entry: dict[str, Any]):
    rule = Linear(entry["start"], entry["increment"], entry["rampup_samples"], entry["gbs"])
    schedule = rule.compile().until(entry["run_until_samples"], last_step="overshoot")
    assert len(schedule.segments) == entry["stages"]
    assert runs(schedule)[:8] == entry["steps_per_stage_first8"]
    assert runs(schedule)[-2:] == entry["steps_per_stage_last2"]
    assert schedule.ramp_steps == entry["steps_before_full"]
    assert schedule.total_samples == entry["consumed_at_end"]
    for step, consumed in enumerate(entry.get("cumulative_consumed", [])[:-1]):
        assert schedule.at_step(step).start_sample == consumed


@each("megatron_step_parse")
def test_megatron_step_schedule(entry: dict[str, Any]):
    text, length, expect = entry["schedule"], entry["seq_length"], entry["expect"]
    unit = "samples" if length is None else "tokens"
    if "error" in expect:
        with pytest.raises(ScheduleError):
            parse_thresholds(text, unit, length)
        return
    if "8.5" in text:  # upstream floors to 8 without a warning
        with pytest.raises(ScheduleError) as caught:
            parse_thresholds(text, unit, length)
        assert caught.value.nearest == (8, 9)
        return
    sizes = [size for _, size in expect]
    if sizes != sorted(sizes):  # upstream accepts a falling schedule, and its trainer asserts at run time
        with pytest.raises(ScheduleError):
            parse_thresholds(text, unit, length)
    rule = parse_thresholds(text, unit, length, allow_falling=sizes != sorted(sizes))
    for (_, before), (at, size) in pairwise(expect):
        assert (size_at(rule, at - 1, length), size_at(rule, at, length)) == (before, size)
    assert size_at(rule, 0) == sizes[0] and len(rule.pairs) == len(expect)


@each("megatron_step_update")
def test_megatron_step_schedule_update(entry: dict[str, Any]):
    expect = entry["expect"]
    size = size_at(parse_thresholds(entry["schedule"]), entry["consumed_samples"])
    assert size == expect.get("global", size)
    quantum = entry["mbs"] * entry["dp"]
    if "error" not in expect and size == expect["num_microbatches"] * quantum:
        assert accumulation(size, entry) == expect["num_microbatches"]
        return
    # Upstream floors to 0 microbatches, or runs 16 and counts 24. batchwright refuses a stage that does not divide.
    with pytest.raises(PlanError):
        accumulation(size, entry)


def test_megatron_step_rules():
    decrease, ignored = VECTORS["megatron_step_rules"]
    assert decrease["expect"] == "ValueError"  # batchwright has no such option: a schedule never rounds
    assert not any("decrease" in field.name for field in dataclasses.fields(Thresholds))
    # Core >= 0.18 ignores the triple after one warning and runs 32 from the first step. batchwright runs the ramp.
    assert ignored["expect"]["global"] == 32
    assert Linear(16, 8, 96, target=32).compile().at_step(0).global_batch_size == 16


@each("megatron_train_iters")
def test_megatron_train_samples_to_steps(entry: dict[str, Any]):
    """Upstream counts the same run in three ways. Here: shorten or overshoot (its step form), drop (constant)."""
    budget = entry["train_samples"]
    linear, step = Linear(16, 16, 96, target=32).compile(), parse_thresholds("0:16 96:32").compile()
    assert linear == step
    assert linear.until(budget).total_steps == entry["step_0_16_96_32"]
    assert linear.until(budget).total_samples == budget
    assert linear.until(budget, last_step="overshoot").total_steps == entry["step_0_16_96_32"]
    assert Constant(32).compile().until(budget, last_step="drop").total_steps == entry["constant_32"]
    dropped, upstream = linear.until(budget, last_step="drop").total_steps, entry["linear_16_16_96_to_32"]
    # Its linear form drops, too, but first walks to one step after the ramp (128 here): before that it counts one too many.
    assert upstream == (dropped if budget >= 128 else dropped + 1)


@pytest.mark.parametrize("nemo, drift", [("nemo1_stop_at_boundary", "replays"), ("nemo2_stop_at_boundary", "skips")])
def test_nemo_drifts_at_every_restart_and_we_do_not(nemo: str, drift: str):
    vector = VECTORS["nemo_consumed_sample_drift"]
    config = vector["config"]
    for before, after in pairwise(vector[nemo]):
        assert (after["read"][0] < before["read"][1]) == (drift == "replays")
        assert after["read"][0] == before["saved"] != before["read"][1]
    rule = Linear(config["start"], config["increment"], config["rampup_samples"], config["gbs"])
    schedule = whole = rule.compile()
    for segment in whole.segments[1:]:  # one launch per stage: stop before the first step of the next, then continue
        schedule = schedule.continued(segment.start_sample, rule)
        assert schedule.at_sample(segment.start_sample).step == segment.first_step
    assert schedule.segments == whole.segments
    assert runs(schedule) == [[16, 10], [32, 5], [48, 4], [64, None]]


def test_nemo_floors_the_boundary_step_and_we_refuse_it():
    for row in VECTORS["nemo_boundary_step_floor"]["rows"]:
        given = Unknowns(row["to_gbs"], 4, None, row["micro_times_dp"] // 4)
        if row["samples_actually_processed"] == row["samples_counted"]:
            assert solve(given)[0].accumulation_steps == row["num_microbatches"]
            continue
        with pytest.raises(PlanError) as caught:
            solve(given)
        assert row["samples_actually_processed"] in caught.value.nearest


@each("maxtext")
def test_maxtext(entry: dict[str, Any]):
    def rule() -> PerDevice:
        return PerDevice(
            entry["per_device_start"],
            entry["per_device_increment"],
            entry["per_device_end"],
            entry["global_rampup_samples"],
            entry["devices"],
        )

    expect, resume = entry["expect"], max(0, entry["resume_step"])
    if not entry["per_device_increment"]:  # ZeroDivisionError upstream
        with pytest.raises(ScheduleError) as caught:
            rule()
        assert caught.value.field == "increment"
    elif entry["per_device_start"] == entry["per_device_end"]:  # ValueError upstream; one stage is a schedule too
        assert runs(rule().compile()) == [[4, None]]
    elif entry["per_device_start"] == 0.1:  # ValueError upstream by float modulo; 0.1 to 1.0 by 0.1 is 9 increments
        assert rule().num_increments == 9
        assert [s.global_batch_size for s in rule().compile().segments] == list(range(10, 101, 10))
    elif not entry["global_rampup_samples"]:
        # Upstream reports 0 ramp-up steps and then takes 3. batchwright starts at the end size, with a note.
        assert runs(rule().compile()) == [[4, None]] and rule().compile().notes
        assert rule().compile().ramp_steps == expect["total_rampup_steps"] == 0
    else:
        schedule = rule().compile()
        assert first_steps(schedule, entry["steps"], resume) == expect["sizes"]
        assert schedule.ramp_steps == expect["total_rampup_steps"]


def test_maxtext_and_megatron_differ_by_five_steps_on_the_same_numbers():
    linear = Linear(256, 256, 10_000_000, target=2048).compile()
    maxtext = PerDevice(1, 1, 8, samples=10_000_000, devices=256).compile()
    rows = compare(linear, maxtext)
    assert [row.first_steps for row in rows] == [5581, 2790, 1861, 1395, 1116, 930, 797, None]
    assert [row.second_steps for row in rows] == [5581, 2791, 1861, 1396, 1117, 931, 798, None]
    assert (linear.ramp_steps, maxtext.ramp_steps) == (14_470, 14_475)


def test_levanter():
    vector = VECTORS["levanter"]
    schedule = Thresholds(tuple((at, size) for at, size in vector["schedule"]), unit="steps").compile()
    for case in vector["cases"]:
        step = schedule.at_step(case["step"])
        assert (step.global_batch_size, step.start_sample) == (case["batch_size"], case["offset"])
    for case in vector["inverse"]:
        assert schedule.at_sample(case["offset"]).step == case["step"]
    # Its value_at_step returned the first segment forever: it had two lookups, and one was untested.
    wrong = vector["value_at_step_defect"]["steps_to_value"]
    assert {step: schedule.at_step(int(step)).global_batch_size for step in wrong} == {
        **wrong,
        "1000": 64,
        "100000": 128,
    }


@each("olmo_core")
def test_olmo_core_waits_for_alignment_and_we_switch_at_the_threshold(entry: dict[str, Any]):
    pairs = tuple(zip(entry["starts"], entry["batch_sizes"], strict=True))
    schedule = Thresholds(pairs, entry["unit"], sequence_length=1).compile()
    starts = [0]
    for _, steps in entry["sizes"]:
        starts.append(starts[-1] + steps)
    sample = 0
    for (size, steps), upstream, segment in zip(entry["sizes"], starts, schedule.segments, strict=False):
        assert sample % size == 0 and segment.global_batch_size == size
        assert segment.first_step <= upstream  # upstream may be later: it waits for batches that align
        sample += size * steps
    for (at, size), segment in zip(pairs, schedule.segments, strict=True):
        assert segment.first_step == at or entry["unit"] == "tokens"
        assert at <= segment.start_sample < at + size or entry["unit"] == "steps"


@each("olmo_core_validation")
def test_olmo_core_validation(entry: dict[str, Any]):
    pairs = tuple(zip(entry["starts"], entry["batch_sizes"], strict=True))
    if "integer factor" in entry["expect"] or "duplicate size" in entry["expect"]:
        falling = "decrease" in entry["expect"]
        if falling:
            with pytest.raises(ScheduleError, match="falls"):  # unless allow_falling is given
                Thresholds(pairs, "steps")
        # Any ratio is valid here: a step owns a span of the sample order and need not align with the past.
        schedule = Thresholds(pairs, "steps", allow_falling=falling).compile()
        assert [s.global_batch_size for s in schedule.segments] == entry["batch_sizes"]
        return
    with pytest.raises(ScheduleError) as caught:
        Thresholds(pairs, "steps")
    assert caught.value.field == "threshold"


def test_internevo_triple_means_steps_between_increments():
    example = VECTORS["internevo"]["example"]
    start, increment, every = example["triple"]
    stages = (example["batch"] - start) // increment + 1
    rule = Thresholds(tuple((k * every, start + k * increment) for k in range(stages)), unit="steps")
    assert first_steps(rule.compile(), 20) == example["steps"]


PUBLISHED = {entry["model"]: entry for entry in VECTORS["published_schedules"]}
NO_RECIPE = {"GPT-3 175B", "DeepSeek-V2"}


def test_every_published_schedule_has_a_recipe_or_a_reason():
    assert {r.title.replace(" size", "") for r in RECIPES} | NO_RECIPE == set(PUBLISHED)
    # GPT-3's numbers are from memory, not checked, and its first batch is not a whole number of sequences.
    assert "not re-checked" in PUBLISHED["GPT-3 175B"]["confirmed"] and PUBLISHED["GPT-3 175B"]["start"] % 2048
    v2 = PUBLISHED["DeepSeek-V2"]  # its steps are not published; V3's recipe already shows such a ramp
    samples = int(v2["over_tokens"]) // v2["seq"]
    assert Linear(v2["start"], 768, samples, v2["final"]).compile().segments[-1].global_batch_size == v2["final"]


@pytest.mark.parametrize("name", ["mt-nlg-530b", "deepseek-v3"])
def test_published_ramps_over_tokens(name: str):
    ramp, entry = recipe(name), PUBLISHED[recipe(name).title]
    assert isinstance(ramp.rule, Linear) and ramp.sequence_length == entry["seq"]
    assert (ramp.rule.start, ramp.rule.target) == (entry["start"], entry["final"])
    assert ramp.rule.increment == entry.get("increment", 768)
    assert ramp.rule.samples == int(entry["over_tokens"]) // entry["seq"]
    assert "increment" in entry or "not published" in ramp.notes[0]


def test_published_bloom():
    entry, rule = PUBLISHED["BLOOM 176B"], recipe("bloom-176b").rule
    assert rule == Linear(*entry["rampup"], target=entry["final"], sequence_length=entry["seq"])


def test_published_palm():
    entry, schedule = PUBLISHED["PaLM 540B"], recipe("palm-540b").schedule()
    assert [[s.first_step, s.global_batch_size] for s in schedule.segments] == entry["steps"]
    assert schedule.total_steps == entry["end_step"]


def test_published_llama():
    entry, ramp = PUBLISHED["Llama 3 405B"], recipe("llama-3-405b")
    assert list(ramp.sequence_length) == entry["seq_by_stage"]
    assert isinstance(ramp.rule, Thresholds)
    for (at, size), (token, tokens), length in zip(
        ramp.rule.pairs, entry["thresholds_tokens"], entry["seq_by_stage"], strict=True
    ):
        assert at == token
        assert size == round(tokens / length) != tokens / length  # the nearest whole size, with a note
        assert str(tokens / length) in ramp.notes[0]


def test_published_nemotron():
    entry, ramp = PUBLISHED["Nemotron-4 15B"], recipe("nemotron-4-15b")
    for stage, published, segment in zip(ramp.stages, entry["stages"], ramp.schedule().segments, strict=True):
        assert stage.global_batch_size == published["gbs"] == segment.global_batch_size
        assert stage.data_parallel_size == published["dp"] == published["gbs"] // ramp.samples_per_replica
        assert stage.nodes * ramp.devices_per_node == published["gpus"] == published["dp"] * ramp.tensor_parallel
        assert (stage.tokens, stage.iteration_seconds) == (published["tokens"], published["iter_s"])
        days = segment.steps * stage.iteration_seconds / 86_400
        assert abs(days - stage.days) < 0.06 and stage.days == published["days"]
    assert ramp.tokens == sum(stage["tokens"] for stage in entry["stages"])


def test_published_olmo():
    entry, rule = PUBLISHED["OLMo 1B batch warm-up"], recipe("olmo-1b-warmup").rule
    assert isinstance(rule, Thresholds)
    assert [[at, size] for at, size in rule.pairs] == entry["thresholds_tokens"]
