"""Keys in any spelling, from several places: which wins, which contradict, which are misspelt."""

from __future__ import annotations

import pytest

import batchwright
from batchwright.core.batch.request import READERS
from batchwright.core.errors import ConfigError
from batchwright.dialects import Given, detect, dialects, flatten, is_foreign, resolve


def test_the_stronger_level_wins_and_keeps_its_origin():
    entries = [
        ("micro_batch_size", Given(1, "file: micro_batch_size", 0)),
        ("data.micro_batch_size", Given(2, "data.micro_batch_size=2", 1)),
        ("micro_batch_size", Given(3, "--micro-batch-size", 2)),
    ]
    for order in (entries, entries[::-1], [entries[1], entries[2], entries[0]]):
        assert resolve(order).fields["micro_batch_size"] == Given(3, "--micro-batch-size", 2)


def test_the_same_level_may_repeat_but_not_differ():
    assert resolve([("nodes", Given(2)), ("trainer.num_nodes", Given("2"))]).fields["nodes"].value == 2
    with pytest.raises(ConfigError, match=r"nodes has two different values: 2 \(as a value\) and 3 \(as a value\)"):
        resolve([("nodes", Given(2)), ("trainer.num_nodes", Given(3))])


def test_unknown_keys_are_all_named_with_what_was_meant():
    with pytest.raises(ConfigError) as caught:
        resolve(
            [("micro_batchsize", Given(1)), ("quantum_entanglement", Given(2)), ("data.global_batch_siz", Given(3))]
        )
    fields = [v.field for v in caught.value.violations]
    assert fields == ["micro_batchsize", "quantum_entanglement", "data.global_batch_siz"]
    assert "Did you mean micro_batch_size" in caught.value.violations[0].message
    assert caught.value.violations[1].nearest == ()
    assert "data.global_batch_size" in caught.value.violations[2].nearest


def test_among_foreign_keys_only_a_misspelt_one_is_refused():
    read = resolve([("optimizer.lr", Given(1)), ("nodes", Given(2))], lenient=True)
    assert read.ignored == ("optimizer.lr",)
    with pytest.raises(ConfigError, match=r"Did you mean data\.micro_batch_size"):
        resolve([("data.micro_batch_sise", Given(1))], lenient=True)


def test_nested_mappings_become_dotted_keys():
    assert flatten({"data": {"a": {"b": 1}}, 3: None, "x.y": 2}) == {"data.a.b": 1, "3": None, "x.y": 2}
    p = batchwright.plan({"data": {"micro_batch_size": 4}, "trainer": {"num_nodes": 2, "devices": 8}})
    assert p.global_batch_size == 64


@pytest.mark.parametrize("dialect", dialects(), ids=lambda d: d.name)
def test_every_key_of_every_dialect_leads_to_a_field_of_ours(dialect):
    from batchwright.core.ramp.request import RAMP_READERS
    from batchwright.dialects.record import PARALLEL_FIELDS, RL_FIELDS, WORLD_FIELDS

    fields = {*RL_FIELDS, *WORLD_FIELDS, *PARALLEL_FIELDS} if dialect.kind == "rl" else {*READERS, *RAMP_READERS}
    assert dialect.title and dialect.common <= {*dialect.keys, *dialect.special}
    for key, ours in dialect.keys.items():
        assert ours in fields
        assert key in dialect.common or is_foreign(key, dialect.kind)
        if dialect.kind == "train" and ours in READERS:
            assert resolve([(key, Given(1))], framework=dialect).fields[ours].value == 1
    for default in dialect.defaults:
        assert dialect.reads(default)
    assert set(dialect.steps.values()) <= {"budget", "warmup", "decay", "save", "eval", "log"}


def test_own_names_are_not_foreign():
    assert not is_foreign("nodes")
    assert not is_foreign("batch.micro_batch_size")


@pytest.mark.parametrize("key", ["model.name", "model.text.encoder_seq_length", "model.vision.micro_batch_size"])
def test_a_key_that_is_close_to_another_frameworks_is_not_misspelt(key):
    nemo = [("model.micro_batch_size", Given(2)), ("model.global_batch_size", Given(2048)), (key, Given("gpt"))]
    assert resolve(nemo, lenient=True).ignored == (key,)
    assert resolve([*nemo, ("trainer.devices", Given(8))], lenient=True).fields["devices_per_node"].value == 8


def test_a_misspelt_key_of_the_used_framework_is_refused():
    nemo = [("model.global_batch_size", Given(2048)), ("model.micro_batch_sise", Given(2))]
    with pytest.raises(ConfigError, match=r"Did you mean model\.micro_batch_size"):
        resolve(nemo, lenient=True)
    maxtext = [("per_device_batch_size", Given(2)), ("model_nam", Given("default"))]
    with pytest.raises(ConfigError, match="Did you mean model_name"):
        resolve(maxtext, lenient=True)


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("torchrun run_train.py", "huggingface"),
        ("/opt/nemo/bin/python train.py", "huggingface"),
        ("python /data/verl.runs/pretrain_adapter.py", "huggingface"),
        ("nemo train.py", "huggingface"),  # a program of this name, and no key of NeMo
        ("python grpo.py", "trl-grpo"),
        ("trl grpo", "trl-grpo"),
    ],
)
def test_a_program_is_a_whole_word(line, name):
    dialect, _ = detect(["per_device_train_batch_size"], line.split())
    assert dialect is not None and dialect.name == name


def test_a_program_alone_shows_its_framework():
    dialect, by = detect(["learning_rate"], ["python", "-m", "verl.trainer.main_ppo"])
    assert dialect is not None and (dialect.name, by) == ("verl", ["verl.trainer.main_ppo"])


def test_the_keys_of_grpo_together_are_those_of_trl():
    keys = [
        "output_dir",
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "num_generations",
        "logging_steps",
    ]
    keys += ["save_steps", "lr_scheduler_type", "beta", "max_prompt_length"]
    names = [one and one.name for one, _ in (detect(keys), detect([key for key in keys if key != "num_generations"]))]
    assert names == ["trl-grpo", "huggingface"]
