"""Models by their configuration, with the real transformers and peft: `estimate --model` and `plan --model`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import batchwright
from batchwright.core.errors import ConfigError, EnvironmentFault, NothingFitsError, PlanError
from batchwright.estimate import estimate, worker
from batchwright.estimate.model import find_config
from batchwright.estimate.records import EstimateRequest

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore"),  # transformers and peft warn about themselves
]
TINY = {
    "hidden_size": 64,
    "intermediate_size": 172,
    "num_hidden_layers": 8,  # more than six: extrapolated from two and four
    "num_attention_heads": 4,
    "vocab_size": 512,
}
SIZES = {
    "7b": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32},
    "13b": {"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40, "num_attention_heads": 40},
    "70b": {
        "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
}  # fmt: skip


def written(folder: Path, **keys: object) -> str:
    config = {"model_type": "llama", "vocab_size": 32000, "max_position_embeddings": 4096, **keys}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    return written(tmp_path, **TINY)


def one(model: str, **options: object) -> int:
    """The estimated peak at one sample of 64 tokens."""
    request = EstimateRequest(
        "",
        model=find_config(model),
        sequence_lengths=(64,),
        micro_batch_sizes=(1,),
        **options,  # type: ignore[arg-type]
    )
    result = worker._checked(worker.answer("estimate", request))
    return result["points"][0]["peak_memory_bytes"]


def test_options_move_the_peak_as_their_rules_say(tiny):
    plain = one(tiny)
    assert one(tiny, precision="bf16-pure") == pytest.approx(plain / 2, rel=0.1)  # the loss is in fp32
    assert max(one(tiny, lora=4), one(tiny, optimizer="sgd")) < 0.65 * plain
    assert one(tiny, optimizer="adamw-8bit") < 0.75 * plain
    assert one(tiny, tensor_parallel=2) == pytest.approx(plain / 2, rel=0.01)
    assert one(tiny, ranks=2) < plain


@pytest.mark.usefixtures("in_process")
def test_layers_that_differ_are_walked_as_a_whole(tmp_path):
    from batchwright.estimate.models.causal_lm import alike

    same, other = tmp_path / "same", tmp_path / "other"
    same.mkdir()
    other.mkdir()
    assert alike(find_config(written(same, **TINY))) == 8
    # The last layers attend to a window: same parameters, other work.
    windows = {"layer_types": ["full_attention"] * 6 + ["sliding_attention"] * 2, "sliding_window": 8}
    path = written(other, **{**TINY, "model_type": "qwen2", "use_sliding_window": True, **windows})
    assert alike(find_config(path)) is None


@pytest.mark.usefixtures("in_process")
def test_a_model_and_memory_become_a_plan_whose_winner_was_walked_as_a_whole(tiny):
    given = {"model": tiny, "global_batch_size": 16, "devices": 2, "sequence_length": 64, "shard": False}
    made = batchwright.plan(memory_bytes=10 * 2**20, **given)
    placed = made.memory
    assert made.micro_batch_size * made.accumulation_steps * 2 == 16
    assert made.sources["max_micro_batch_size"] == placed.source == placed.candidates[0].source == "estimated"
    options = {"checkpoint_activations": placed.checkpoint_activations, "accumulation_steps": 2, "replicas": 2}
    request = EstimateRequest(
        "", model=find_config(tiny), sequence_lengths=(64,), micro_batch_sizes=(made.micro_batch_size,), **options
    )
    if made.accumulation_steps > 1:
        whole = worker.answer("estimate", request)["points"][0]
        assert placed.peak_memory_bytes == whole["peak_memory_bytes"] <= 10 * 2**20
    assert made.settings["per_device_train_batch_size"] == made.micro_batch_size
    assert made.settings["gradient_accumulation_steps"] == made.accumulation_steps
    assert json.loads(json.dumps(made.to_json()))["memory"]["candidates"]


@pytest.mark.rounds
@pytest.mark.usefixtures("in_process")
def test_where_nothing_fits_the_plan_says_what_would(tiny):
    with pytest.raises(NothingFitsError, match="nothing fits") as caught:
        batchwright.plan(
            model=tiny, global_batch_size=16, devices=2, sequence_length=64, shard=False, memory_bytes=2 * 2**20
        )
    assert "lora=16" in {r["change"] for r in caught.value.remedies}


def test_the_settings_are_those_of_the_real_training_arguments(tmp_path):
    from transformers import TrainingArguments

    from batchwright.dialects.huggingface import training_arguments

    for optimizer in ("adamw", "adamw-8bit", "sgd", "adafactor"):
        made = training_arguments(2, 8, precision="bf16", optimizer=optimizer, checkpoint_activations=True)
        read = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, **made)
        assert read.train_batch_size * read.gradient_accumulation_steps == 16 and read.gradient_checkpointing
    made = training_arguments(2, 8, checkpoint_activations=True, sharded=True)
    read = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, **made)
    assert read.fsdp_plugin_args["fsdp_version"] == 2 and read.fsdp_plugin_args["activation_checkpointing"]


def test_all_that_is_wrong_is_reported_at_once(tmp_path):
    with pytest.raises(PlanError) as caught:
        batchwright.plan(model="m", task="t.py:task", device="a100", precision="fp8", pipeline_parallel=2, devices=3)
    fields = ["device", "task", "precision", "sequence_length", "task", "pipeline_parallel", "devices"]
    assert [v.field for v in caught.value.violations] == fields
    for rank in (1, 4):
        with pytest.raises(PlanError, match=rf"optimizer=sgd needs model.*\n.*lora={rank} needs model"):
            estimate("t.py:task", optimizer="sgd", lora=rank)
    with pytest.raises(ConfigError, match=r"folder without config\.json"):
        find_config(str(tmp_path))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="no key model_type"):
        find_config(str(tmp_path))


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize(
    ("keys", "options", "field", "message"),
    [
        ({}, {"tensor_parallel": 7}, "tensor_parallel", r"must divide the heads.*attention_heads 4.*Nearest: .*=4\."),
        ({"num_key_value_heads": 2}, {"tensor_parallel": 4}, "tensor_parallel", r"key_value_heads 2\. Nearest: .*=2\."),
        ({"num_key_value_heads": 3}, {}, "model", "cannot be estimated: .*Correct the configuration"),
        ({"hidden_act": "nope"}, {}, "model", "transformers cannot build this LlamaConfig: KeyError"),
        ({"model_type": "vit"}, {}, "model", "is not a causal language model"),
    ],
)
def test_a_wrong_configuration_is_an_error_about_the_model(tmp_path, keys, options, field, message):
    keys = {**TINY, "num_hidden_layers": 2, **keys}
    with pytest.raises(PlanError, match=message) as caught:
        estimate(model=written(tmp_path, **keys), sequence_lengths=(16,), micro_batch_sizes=(1,), **options)
    assert caught.value.field == field


def test_a_name_of_the_hub_without_a_network_fails_fast_and_names_the_local_way(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(EnvironmentFault, match=r"HF_HUB_OFFLINE is set.*model=\./config\.json") as caught:
        find_config("nobody/nothing-here")
    assert caught.value.exit_code == 4
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("batchwright.estimate.model.getproxies", dict)
    with pytest.raises(EnvironmentFault, match=r"127\.0\.0\.1 cannot be reached"):
        find_config("nobody/nothing-here")


def test_a_missing_extra_is_named_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setattr("batchwright.estimate.model.find_spec", lambda name: None if name == "peft" else object())
    with pytest.raises(EnvironmentFault, match=r"needs peft.*batchwright\[hf\]"):
        find_config(written(tmp_path, **TINY), lora=8)


COMMAND = [sys.executable, "-m", "batchwright", "plan", "--json", "--sequence-length", "2048"]
PURE = ("--precision", "bf16-pure")
LORA = ("--lora", "16", *PURE, "--checkpoint-activations")


@pytest.mark.rounds
@pytest.mark.parametrize(
    ("size", "device", "devices", "micro", "steps", "options"),
    [
        ("7b", "4090", 1, 1, 32, LORA),
        ("7b", "4090", 2, 2, 8, (*LORA, "--no-shard")),
        ("13b", "h100", 1, 4, 8, LORA),
        ("70b", "h100", 8, 1, 8, (*PURE, "--optimizer", "adamw-8bit", "--checkpoint-activations", "--shard")),
    ],
)
def test_the_common_patterns_of_fine_tuning_fit(tmp_path, size, device, devices, micro, steps, options):
    model = written(tmp_path, **SIZES[size])
    world = ["--devices", str(devices), "--micro-batch-size", str(micro), "--accumulation-steps", str(steps)]
    done = subprocess.run(
        [*COMMAND, "--model", model, "--device", device, *world, *options], capture_output=True, text=True, timeout=1800
    )
    assert done.returncode == 0, done.stdout + done.stderr
    made = json.loads(done.stdout)
    assert made["global_batch_size"] == micro * steps * devices
    assert made["memory"]["peak_memory_bytes"] <= made["memory"]["usable_bytes"]
    assert made["settings"]["per_device_train_batch_size"] == micro


@pytest.mark.rounds
def test_a_7b_model_without_adapters_on_one_small_card_says_what_would_fit(tmp_path):
    model = written(tmp_path, **SIZES["7b"])
    batch = ["--device", "4090", "--micro-batch-size", "1", "--accumulation-steps", "32", "--precision", "bf16"]
    done = subprocess.run([*COMMAND, "--model", model, *batch], capture_output=True, text=True, timeout=1800)
    assert done.returncode == 3, done.stderr
    document = json.loads(done.stdout)
    fitting = {r["change"] for r in document["remedies"] if r["fits"]}
    assert "lora=16 + precision=bf16-pure" in fitting and any(c.startswith("shard + devices=") for c in fitting)
