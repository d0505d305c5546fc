"""`convert`: round trips between all frameworks, and what is said where one cannot express what another says."""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from batchwright.core.errors import ConfigError, PlanError
from batchwright.core.ramp.rules import Doubling, Linear, Thresholds
from batchwright.dialects import framework, frameworks
from batchwright.dialects.converting import DIFFERS, EXACT, NOT_EXPRESSIBLE, compare, convert, read_back
from batchwright.dialects.reading import job
from batchwright.dialects.record import NEWEST, Job, Reading, parse_version
from tests.dialects.configurations import reading
from tests.examples import many

TRAIN = [(d, v) for d in frameworks("train") for v in (NEWEST, *map(parse_version, d.versions[:-1]))]
ROUNDS = [(d, v) for d in frameworks("rl") for v in (NEWEST, *map(parse_version, d.versions[:-1]))]
names = {(d.name, v): f"{d.name}@{v[0] if v != NEWEST else 'newest'}" for d, v in (*TRAIN, *ROUNDS)}
small = st.integers(1, 8)
EQUATION = ("global_batch_size", "micro_batch_size", "accumulation_steps", "data_parallel_size")


def shown(pair) -> str:
    return names[pair[0].name, pair[1]]


@st.composite
def jobs(draw, ramps: bool = False) -> Job:
    """A batch on nodes of eight devices, whole and valid."""
    micro, steps, nodes, length = draw(small), draw(small), draw(st.integers(1, 4)), draw(st.sampled_from([1024, 2048]))
    replica = dict.fromkeys(("tensor_parallel", "pipeline_parallel", "context_parallel"), 1)
    if draw(st.booleans()):  # not every framework splits a replica
        replica["tensor_parallel"] = draw(st.sampled_from([1, 2]))
        replica["context_parallel"] = draw(st.sampled_from([1, 2]))
        if draw(st.booleans()) and not ramps:
            replica["pipeline_parallel"], steps = 2, 2 * steps
    devices = 8 * nodes
    ranks = devices // prod(replica.values())
    batch = micro * steps * ranks
    numbers = {
        "global_batch_size": batch,
        "micro_batch_size": micro,
        "accumulation_steps": steps,
        "data_parallel_size": ranks,
        "devices": devices,
        "nodes": nodes,
        "devices_per_node": 8,
        "sequence_length": length,
        **{name: size for name, size in replica.items() if size > 1},
    }
    rule = schedule = None
    if ramps:
        quantum = micro * ranks
        rule = draw(
            st.sampled_from(_rules(quantum, draw(st.integers(1, 5)), draw(st.integers(2, 50)), length, devices))
        )
        schedule = rule.compile()
        last = schedule.segments[-1].global_batch_size
        numbers |= {"global_batch_size": last, "accumulation_steps": last // quantum}
    return Job("train", numbers, rule, schedule, {"warmup": draw(st.integers(1, 5)), "save": 7})


def _rules(quantum: int, times: int, every: int, length: int, devices: int) -> list:
    return [
        Linear(quantum, quantum, every * quantum * times, quantum * (times + 1), length),
        Thresholds(tuple((k * every * quantum, quantum * 2**k) for k in range(times + 1)), "samples", length),
        Thresholds(tuple((k * every * length * 3, quantum * (k + 1)) for k in range(times + 1)), "tokens", length),
        Thresholds(tuple((k * every, quantum * 2**k) for k in range(times + 1)), "steps", length),
        Doubling(quantum, quantum * 2**times, every * quantum, "samples", length),
    ]


def written(made: Job, pair) -> Reading | None:
    """A job as a configuration of a framework, or None if the framework cannot express it exactly."""
    dialect, version = pair
    try:
        back = read_back(dialect.write(made, version), dialect, version, made)
        again = job(back)
    except (ConfigError, PlanError):
        return None
    return None if compare(made, again, dialect) else back


@pytest.mark.parametrize("pair", TRAIN, ids=shown)
@settings(deadline=None, suppress_health_check=[HealthCheck.filter_too_much], max_examples=many(80))
@given(made=jobs())
def test_a_configuration_survives_the_way_to_core_and_back(pair, made):
    back = written(made, pair)
    assume(back is not None)
    again = convert(back, *pair)
    assert again.status == EXACT
    assert job(read_back(again.keys, *pair, made)).numbers == job(back).numbers


@pytest.mark.parametrize("first", TRAIN, ids=shown)
@settings(deadline=None, suppress_health_check=[HealthCheck.filter_too_much], max_examples=many(160))
@given(made=st.one_of(jobs(), jobs(ramps=True)), second=st.sampled_from(TRAIN))
def test_every_pair_round_trips_where_the_first_leg_is_exact(first, made, second):
    source = written(made, first)
    assume(source is not None)
    try:
        there = convert(source, *second)
        if there.status != EXACT:
            assert there.differences and all(difference.message for difference in there.differences)
            return
        back = convert(read_back(there.keys, *second, there.job), *first)
    except ConfigError as wrong:
        assert wrong.field == "sequence_length"  # one of them counts tokens, and the other has no key for it
        return
    assert back.status == EXACT, back.differences
    ours, theirs = job(source), back.job
    assert {n: ours.get(n) for n in EQUATION} == {n: theirs.get(n) for n in EQUATION}
    assert (ours.schedule is None) == (theirs.schedule is None)
    if ours.schedule is not None:
        assert _shape(ours.schedule) == _shape(theirs.schedule)


def _shape(schedule):
    return [(s.first_step, s.start_sample, s.global_batch_size) for s in schedule.segments]


def test_a_plain_batch_is_the_same_in_every_pair():
    numbers = {
        "global_batch_size": 64, "micro_batch_size": 2, "accumulation_steps": 4, "data_parallel_size": 8, "devices": 8,
        "nodes": 1, "devices_per_node": 8, "sequence_length": 1024,
    }  # fmt: skip
    plain = Job("train", numbers)
    asks: set[tuple[str, str]] = set()
    for first in TRAIN:
        source = written(plain, first)
        assert source is not None, shown(first)
        for second in TRAIN:
            try:
                made = convert(source, *second)
            except ConfigError as wrong:
                assert wrong.field == "sequence_length"
                asks.add((shown(first), shown(second)))
            else:
                assert made.status == EXACT, (shown(first), shown(second), made.differences)
    # These have no key for the length of a sample, and those count tokens.
    without = {shown(pair) for pair in TRAIN if "sequence_length" not in job(written(plain, pair)).numbers}
    tokens = {shown(pair) for pair in TRAIN if pair[0].name == "olmo-core" or shown(pair) == "torchtitan@newest"}
    assert asks == {(one, other) for one in without for other in tokens}


EVERY_RAMP = ["megatron-lm", "levanter"]


@pytest.mark.parametrize("name", EVERY_RAMP)
@settings(deadline=None, suppress_health_check=[HealthCheck.filter_too_much], max_examples=many(100))
@given(made=jobs(ramps=True))
def test_thresholds_in_tokens_and_steps_express_every_ramp(name, made):
    if name == "levanter":
        assume("pipeline_parallel" not in made.numbers and "context_parallel" not in made.numbers)
    assert written(made, (framework(name), NEWEST)) is not None


@st.composite
def rounds(draw) -> Job:
    micro, steps, ranks, group, updates = (draw(st.integers(1, 4)) for _ in range(5))
    responses = micro * steps * ranks
    group = group + 1
    prompts = responses * updates  # a multiple of the updates, whatever the group
    made = {
        "prompts": prompts,
        "generations": group,
        "updates": updates,
        "iterations": draw(st.integers(1, 3)),
        "data_parallel_size": ranks,
        "devices": ranks,
        "train_micro_responses": micro * group,
    }
    return Job("rl", made)


@pytest.mark.parametrize("first", ROUNDS, ids=shown)
@settings(deadline=None, suppress_health_check=[HealthCheck.filter_too_much], max_examples=many(80))
@given(made=rounds(), second=st.sampled_from(ROUNDS))
def test_rounds_of_rl_round_trip(first, made, second):
    source = written(made, first)
    assume(source is not None)
    there = convert(source, *second)
    if there.status == EXACT:
        back = convert(read_back(there.keys, *second, there.job), *first)
        assert back.status == EXACT, back.differences
        assert compare(job(source), back.job, first[0]) == []


TRIPLE = {
    "micro_batch_size": 4,
    "global_batch_size": 2048,
    "rampup_batch_size": [256, 256, 10_000_000],
    "seq_length": 4096,
}


def converted(to: str, keys=TRIPLE, source="megatron-lm@0.17", **world):
    name, _, version = to.partition("@")
    target = framework(name)
    return convert(reading(keys, source, **world), target, parse_version(version) if version else NEWEST)


def test_a_triple_becomes_thresholds_in_tokens_and_back():
    made = converted("megatron-lm@0.18", devices=64)
    assert made.status == EXACT and "global_batch_size" not in made.keys
    assert made.keys["step_batch_size_schedule"].startswith("0:256 5851430912:512 11702857728:768")
    schedule = job(read_back(made.keys, made.target, made.version, made.job)).schedule
    assert schedule.ramp_steps == 14_470


def test_maxtexts_ramp_and_the_triple_differ_by_the_steps_that_are_published():
    made = converted("maxtext", keys={**TRIPLE, "micro_batch_size": 8}, devices=256)
    [ramp] = [d for d in made.differences if d.what == "ramp"]
    assert ramp.status == DIFFERS
    assert "starts at step 14,470, and at 14,475 in MaxText: 5 steps later" in ramp.message
    maxtext = {
        "per_device_batch_size": 8, "enable_rampup_batch_size": True, "per_device_batch_size_start": 1,
        "per_device_batch_size_increment": 1, "global_rampup_samples": 10_000_000,
    }  # fmt: skip
    back = converted("nemo@1", maxtext, "maxtext", devices=256)
    assert back.keys["model.rampup_batch_size"] == [256, 256, 10_000_000]
    assert back.status == DIFFERS and "5 steps earlier" in back.differences[-1].message
    assert back.keys["model.micro_batch_size"] == 1  # what the first stage has on a rank
    steps = converted("levanter", maxtext, "maxtext", devices=256)  # the same stages, since it counts steps
    assert [d.what for d in steps.differences] == ["micro_batch_size", "accumulation_steps"]


@pytest.mark.parametrize("to", ["huggingface", "deepspeed", "megatron-bridge", "composer", "gpt-neox", "nanotron"])
def test_a_ramp_that_the_target_does_not_have_is_not_expressible(to):
    made = converted(to, devices=64)
    [ramp] = [d for d in made.differences if d.what == "ramp"]
    assert made.status == NOT_EXPRESSIBLE and "2048 from the first step, not 256" in ramp.message


def test_olmo_grows_by_whole_factors_only():
    assert converted("olmo-core", devices=64).status == NOT_EXPRESSIBLE
    doubling = {**TRIPLE, "step_batch_size_schedule": "0:256 2B:512 8B:1024"}
    del doubling["rampup_batch_size"], doubling["global_batch_size"]
    made = converted("olmo-core", doubling, "megatron-lm", devices=64)
    [ramp] = made.differences
    assert ramp.status == DIFFERS and "1 step later" in ramp.message  # it waits for an even number of batches


def test_what_is_left_out_is_said():
    keys = {
        "per_device_batch_size": 2,
        "expansion_factor_real_data": 2,
        "max_target_length": 2048,
        "checkpoint_period": 50,
    }
    made = converted("huggingface", keys, "maxtext", devices=8, nodes=2)
    assert made.status == EXACT and made.keys["save_steps"] == 50
    assert set(made.left_out) == {"expansion_factor=2", "sequence_length=2048"}
    flags = {**TRIPLE, "calculate_per_token_loss": True, "train_samples": 2048 * 100}
    del flags["rampup_batch_size"]
    made = converted("huggingface", flags, devices=64)
    assert [d.what for d in made.differences] == [
        "calculate_per_token_loss"
    ] and "samples=204800 (100 steps)" in made.left_out


def test_a_replica_that_the_target_cannot_split_is_not_expressible_and_keeps_its_ranks():
    made = converted("deepspeed", {**TRIPLE, "tensor_model_parallel_size": 4, "rampup_batch_size": None}, devices=64)
    assert [d.what for d in made.differences] == ["tensor_parallel"]
    assert made.keys == {
        "train_batch_size": 2048,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 32,
    }


def test_a_pipeline_of_maxtext_becomes_megatrons_microbatches():
    keys = {
        "per_device_batch_size": 4, "gradient_accumulation_steps": 2, "ici_pipeline_parallelism": 4,
        "num_pipeline_microbatches": 8, "num_pipeline_repeats": 1,
    }  # fmt: skip
    made = converted("megatron-lm", keys, "maxtext", devices=16)
    assert (made.status, made.keys["micro_batch_size"], made.keys["global_batch_size"]) == (EXACT, 2, 128)


def test_devices_that_are_needed_and_not_known_are_asked_for():
    keys = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 8}
    with pytest.raises(ConfigError, match=r"global_batch_size is not known\. Give devices"):
        converted("megatron-lm", keys, "huggingface")
    assert converted("deepspeed", keys, "huggingface").keys == {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 8,
    }


def test_training_and_reinforcement_learning_do_not_convert_into_each_other():
    made = converted("verl", {"per_device_train_batch_size": 4}, "huggingface", devices=8)
    assert made.status == NOT_EXPRESSIBLE and not made.keys


def test_every_framework_of_the_list_reads_and_writes():
    assert len({d.name for d in frameworks()}) == 22
    for dialect in frameworks():
        assert dialect.write and dialect.source and dialect.title


UPDATES = {
    "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_generations": 8, "steps_per_generation": 8,
    "num_iterations": 2, "max_steps": 800, "save_steps": 100,
}  # fmt: skip


def test_steps_of_reinforcement_learning_become_rounds_and_updates_again():
    made = convert(reading(UPDATES, "trl-grpo", devices=8), framework("verl"))
    assert (made.keys["trainer.total_training_steps"], made.job.updates_of_a_round) == (100, 8)
    assert made.keys["trainer.save_freq"] == 12  # 100 / 8 = 12.5
    assert [(d.what, d.status) for d in made.differences] == [("trainer.save_freq", DIFFERS)]
    back = convert(reading(dict(made.keys), "verl"), framework("trl-grpo"))
    assert {key: back.keys[key] for key in UPDATES} == UPDATES | {"save_steps": 96}
    again = convert(
        reading({**UPDATES, "num_iterations": 1, "save_steps": 400}, "trl-grpo", devices=8), framework("nemo-rl")
    )
    assert again.keys["grpo.max_num_steps"] == 200 and again.status == EXACT


def test_a_ramp_that_the_version_ignores_is_not_converted():
    made = convert(reading(TRIPLE, "megatron-lm", devices=64), framework("nemo"))
    assert made.job.schedule is None and "data.rampup_batch_size" not in made.keys and made.status == EXACT
    assert any("--from megatron-lm@0.17" in note for note in made.notes)


def test_a_ramp_of_maxtext_with_accumulation_is_not_called_exact():
    keys = {
        "per_device_batch_size": 4, "enable_rampup_batch_size": True, "per_device_batch_size_start": 2,
        "per_device_batch_size_increment": 1, "global_rampup_samples": 1000, "gradient_accumulation_steps": 4,
    }  # fmt: skip
    made = convert(reading(keys, "maxtext", devices=8), framework("nemo"))
    assert ("ramp-with-accumulation", DIFFERS) in [(d.what, d.status) for d in made.differences]


def test_a_key_that_changes_the_gradient_is_written_or_a_difference():
    keys = {"micro_batch_size": 2, "global_batch_size": 32, "calculate_per_token_loss": True}
    source = reading(keys, "megatron-lm", devices=8)
    bridge, nemo = (convert(source, framework(name)) for name in ("megatron-bridge", "nemo"))
    assert bridge.keys["model.calculate_per_token_loss"] is True and bridge.status == EXACT
    assert [(d.what, d.status) for d in nemo.differences] == [("calculate_per_token_loss", DIFFERS)]
