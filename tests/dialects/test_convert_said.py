"""`convert` never calls something exact that it did not convert, and drops no key unsaid."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchwright.core.errors import ConfigError, PlanError
from batchwright.dialects import flatten, framework, frameworks
from batchwright.dialects.checking import check, equation
from batchwright.dialects.converting import DIFFERS, EXACT, NOT_EXPRESSIBLE, convert
from batchwright.dialects.reading import job, steps_of
from batchwright.dialects.record import parse_version
from tests.dialects import test_check as examples
from tests.dialects.configurations import causes, reading
from tests.examples import many

OPENRLHF = {"rollout.batch_size": 64, "rollout.n_samples_per_prompt": 8, "train.batch_size": 128}


def test_a_misspelt_key_of_the_source_is_an_error():
    keys = {"per_device_train_batch_sise": 4, "gradient_accumulation_steps": 8, "output_dir": "x"}
    with pytest.raises(ConfigError, match="per_device_train_batch_sise is not a key of Hugging Face"):
        convert(reading(keys, devices=8), framework("deepspeed"))


def test_a_rule_that_the_source_breaks_is_a_difference():
    keys = {
        "data": {"micro_batch_size": 4, "global_batch_size": 64},
        "trainer": {"devices": 8, "accumulate_grad_batches": 2},
    }
    made = convert(reading(keys, "nemo"), framework("megatron-lm"))
    assert ("trainer.accumulate_grad_batches", DIFFERS) in [(d.what, d.status) for d in made.differences]


def test_stages_that_the_source_refuses_are_one_difference():
    keys = {"data": {"micro_batch_size": 8, "global_batch_size": 512, "rampup_batch_size": [64, 64, 10000]}}
    made = convert(
        reading(keys | {"trainer": {"devices": 64}}, "nemo"), framework("megatron-lm"), parse_version("0.17")
    )
    [stage] = [d for d in made.differences if d.what == "stage"]
    assert stage.status == DIFFERS and "Stages that break it: 7." in stage.message


@pytest.mark.parametrize(
    ("source", "keys", "to", "said"),
    [
        ("huggingface", {"per_device_train_batch_size": 4, "save_steps": 0.1, "warmup_steps": 0.03}, "megatron-lm",
         {"save_steps=0.1", "warmup_steps=0.03"}),
        ("composer", {"global_train_batch_size": 64, "device_train_microbatch_size": 4, "max_duration": "10ep",
                      "save_interval": "1ep"}, "huggingface", {"max_duration=10ep", "save_interval=1ep"}),
        ("megatron-lm", {"micro_batch_size": 1, "global_batch_size": 30, "decrease_batch_size_if_needed": True}, "huggingface",
         {"decrease_batch_size_if_needed=True"}),
        ("openrlhf", {**OPENRLHF, "train.micro_batch_size": 4, "train.dynamic_batch_enable": True}, "verl",
         {"train.micro_batch_size=4"}),
        ("nemo", {"data.micro_batch_size": 4, "data.global_batch_size": 64, "trainer.devices": 8,
                  "optim.lr_scheduler.warmup_steps": 50, "model.optim.sched.warmup_steps": 70}, "megatron-lm",
         {"optim.lr_scheduler.warmup_steps=50"}),
    ],
)  # fmt: skip
def test_a_key_that_is_no_whole_number_of_steps_is_said(source, keys, to, said):
    made = convert(reading(keys, source, **({} if source in ("nemo", "openrlhf") else {"devices": 8})), framework(to))
    assert said <= set(made.left_out), made.left_out


values = st.sampled_from([2, 4, 8, 64, "10ep", "5ba", 0.1, 0.5, True, "x"])
NEUTRAL = ("", "1", "1.0", "-1", "-1.0", "0", "false", "none", "null")
CASES = next(iter(examples.test_the_framework_is_detected_and_the_batch_is_said.pytestmark)).args[1]
BASES = {name: (flatten(keys), world) for keys, world, name, _ in reversed(CASES)}


@pytest.mark.parametrize("name", BASES)
@settings(deadline=None, suppress_health_check=[HealthCheck.filter_too_much], max_examples=many(40))
@given(data=st.data())
def test_no_key_is_dropped_unsaid(name, data):
    (base, world), dialect = BASES[name], framework(name)
    names = {*dialect.special, *dialect.checked, *dialect.steps, *dialect.in_samples} - set(base)
    more = data.draw(st.dictionaries(st.sampled_from(sorted(names)), values, min_size=1, max_size=3)) if names else {}
    target = data.draw(st.sampled_from(frameworks(dialect.kind)))
    source = reading(base | more, name, **world)
    try:
        made = convert(source, target)
    except PlanError:
        return  # a key that excludes another one, or devices that are not given
    texts = [*made.left_out, *made.notes, *source.passed_over, *(f"{d.what} {d.message}" for d in made.differences)]
    carried = {*source.fields} - {"round", "allow_ragged"}
    first: dict[str, int] = {}
    counted = {key for key, n in steps_of(source).items() if first.setdefault(dialect.steps[key], n) == n}
    for key, value in source.given.items():
        fields = [field for field, one in source.fields.items() if key in one.origin.replace("=", " ").split()]
        said = key in counted or key in dialect.gradient or dialect.keys.get(key) in carried or carried & set(fields)
        said = said or any(key in text for text in texts) or str(value.value).strip().lower() in NEUTRAL
        assert said, (key, value, texts)


LATE = {"micro_batch_size": 1, "global_batch_size": 88, "rampup_batch_size": [32, 8, 9384], "seq_length": 64}


def test_a_stage_that_megatrons_floats_reach_late_is_not_exact():
    old = reading(LATE, "megatron-lm@0.17", devices=8)
    made = convert(old, framework("megatron-lm"))
    assert [(d.what, d.status) for d in made.differences] == [("float-boundary", DIFFERS)]
    assert convert(old, framework("megatron-lm"), parse_version("0.17")).status == EXACT  # as late as before
    assert convert(old, framework("nemo")).status == EXACT


def test_nemo_counts_with_megatrons_floats():
    keys = {"data": {"micro_batch_size": 1, "global_batch_size": 88, "rampup_batch_size": "32,8,9384"}}
    report = check(reading(keys | {"trainer": {"devices": 8}}, "nemo"))
    assert report.ok and "float-boundary" in causes(report)
    keys = {"model": {"micro_batch_size": 1, "global_batch_size": 88, "rampup_batch_size": [32, 8, 9300]}}
    assert "float-boundary" not in causes(check(reading(keys | {"trainer": {"devices": 8}}, "nemo")))


ACTOR = "actor_rollout_ref.actor"
DYNAMIC = {
    "verl": {"data.train_batch_size": 64, f"{ACTOR}.ppo_mini_batch_size": 16, f"{ACTOR}.use_dynamic_bsz": True,
             "actor_rollout_ref.rollout.n": 8},
    "nemo-rl": {"grpo.num_prompts_per_step": 64, "grpo.num_generations_per_prompt": 8, "policy.train_global_batch_size": 128,
                "policy.train_micro_batch_size": 4, "policy.sequence_packing.enabled": True, "cluster.gpus_per_node": 8},
    "openrlhf": {**OPENRLHF, "train.dynamic_batch_enable": True},
}  # fmt: skip


@pytest.mark.parametrize("source", DYNAMIC)
@pytest.mark.parametrize("to", [d.name for d in frameworks("rl")])
def test_no_micro_batch_is_invented_where_micro_batches_are_filled_with_tokens(source, to):
    read = reading(DYNAMIC[source], source)
    assert "micro" not in equation(job(read))
    made = convert(read, framework(to))
    assert not [
        key
        for key in made.keys
        if key.endswith(("train_micro_batch_size", "micro_batch_size_per_gpu", "train.micro_batch_size"))
    ]
    if to == "maxtext-rl":
        assert made.status == NOT_EXPRESSIBLE  # it has one update per round
    else:
        assert [d.what for d in made.differences] == ["train_micro_responses"] * (source != to)


def test_no_micro_batch_is_invented_where_none_is_given():
    keys = {key: value for key, value in DYNAMIC["nemo-rl"].items() if "micro" not in key and "packing" not in key}
    made = convert(reading(keys, "nemo-rl"), framework("trl-grpo"))
    assert [(d.what, d.status) for d in made.differences] == [("train_micro_responses", DIFFERS)]


def test_the_keys_of_olmo_cores_ramp_are_not_left_out():
    scheduler = examples.GROWS | {"enabled": True}
    keys = examples.OLMO | {"trainer": {"callbacks": {"batch_size_scheduler": scheduler}}}
    made = convert(reading(keys, devices=64), framework("megatron-lm"))
    assert made.left_out == ()
    keys = keys | {"data_loader": {"global_batch_size": 512 * 4096}}
    made = convert(reading(keys, devices=64), framework("megatron-lm"))
    assert made.left_out == (f"data_loader.global_batch_size={512 * 4096}",)  # the ramp starts at another batch
