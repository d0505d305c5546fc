"""Models by their configuration, with the real transformers and peft: `estimate --model` and `plan --model`."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import batchwright
from batchwright.cli.estimate import render
from batchwright.core.errors import ConfigError, EnvironmentFault, NothingFitsError, PlanError
from batchwright.estimate import estimate, worker
from batchwright.estimate.fake import FakeRuns, destroy_fake_group
from batchwright.estimate.model import find_config
from batchwright.estimate.records import EstimateRequest
from batchwright.estimate.walks import Walks

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore"),  # transformers and peft warn about themselves
]
TINY = {
    "hidden_size": 64,
    "intermediate_size": 172,
    "num_hidden_layers": 12,  # more than eight: extrapolated from three and five
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
@pytest.mark.parametrize(
    ("options", "source"),
    [
        ({}, "predicted"),
        ({"optimizer": "sgd"}, "predicted"),
        ({"optimizer": "adamw-8bit"}, "rule"),
        ({"tensor_parallel": 2}, "rule"),
        ({"lora": 2, "quantize_frozen": True}, "rule"),
    ],
)
def test_what_is_by_rule_is_marked(tiny, options, source):
    made = estimate(model=tiny, sequence_lengths=(64,), micro_batch_sizes=(1, 2), **options)
    assert {p.source for p in made.points} == {source} and made.to_json()["source"] == source
    table = [line.split() for line in render(made) if line.split()[:1] in (["1"], ["2"])]
    assert len(table) == 2 and all((row[-1] == "rule") == (source == "rule") for row in table)


@pytest.mark.usefixtures("in_process")
def test_the_frontier_ends_where_the_positions_of_the_model_end(tmp_path):
    """GPT-2 calls them n_positions."""
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "vocab_size": 128}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", **sizes}))
    made = estimate(model=str(tmp_path), memory_bytes=2**24, sequence_lengths=(16, 32))
    assert [row.sequence_length for row in made.frontier] == [16, 32, 64]


@pytest.mark.usefixtures("in_process")
def test_experts_that_cannot_be_grouped_stay_as_they_are(tmp_path):
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size_mlp": 64, "num_key_value_heads": 4}
    path = written(tmp_path, **{**TINY, "num_hidden_layers": 2, "model_type": "llama4_text", **experts})
    made = estimate(model=path, sequence_lengths=(64,), micro_batch_sizes=(1, 2))
    assert made.points[1].peak_memory_bytes > made.points[0].peak_memory_bytes
    assert not any("uniform routing" in line for line in made.assumptions)


@pytest.mark.usefixtures("in_process")
def test_the_precision_of_a_sharded_model_says_what_the_trainer_does_otherwise(tiny):
    from accelerate.utils import FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    plugin.set_mixed_precision("bf16")
    assert plugin.mixed_precision_policy.reduce_dtype is torch.bfloat16
    made = estimate(model=tiny, sequence_lengths=(64,), micro_batch_sizes=(1,), ranks=2, precision="bf16")
    assert any("reduced in fp32" in line and "reduces them in bf16 by default" in line for line in made.assumptions)


@pytest.mark.usefixtures("in_process")
def test_layers_that_differ_are_walked_as_a_whole(tmp_path):
    from batchwright.estimate.models.causal_lm import alike

    same, other = tmp_path / "same", tmp_path / "other"
    same.mkdir()
    other.mkdir()
    assert alike(find_config(written(same, **TINY))) == 12
    # The last layers attend to a window: same parameters, other work.
    windows = {"layer_types": ["full_attention"] * 10 + ["sliding_attention"] * 2, "sliding_window": 8}
    path = written(other, **{**TINY, "model_type": "qwen2", "use_sliding_window": True, **windows})
    assert alike(find_config(path)) is None


@pytest.mark.usefixtures("in_process")
def test_a_model_and_memory_become_a_plan_whose_winner_was_walked_as_a_whole(tiny):
    given = {"model": tiny, "global_batch_size": 16, "devices": 2, "sequence_length": 64, "shard": False}
    made = batchwright.plan(memory_bytes=15 * 2**20, **given)
    placed = made.memory
    assert made.micro_batch_size * made.accumulation_steps * 2 == 16
    assert made.sources["max_micro_batch_size"] == placed.source == placed.candidates[0].source == "estimated"
    options = {"checkpoint_activations": placed.checkpoint_activations, "accumulation_steps": 2, "replicas": 2}
    request = EstimateRequest(
        "", model=find_config(tiny), sequence_lengths=(64,), micro_batch_sizes=(made.micro_batch_size,), **options
    )
    assert made.accumulation_steps > 1
    whole = worker.answer("estimate", request)["points"][0]
    assert placed.peak_memory_bytes == whole["peak_memory_bytes"] <= 15 * 2**20
    assert made.settings["per_device_train_batch_size"] == made.micro_batch_size
    assert made.settings["gradient_accumulation_steps"] == made.accumulation_steps
    assert json.loads(json.dumps(made.to_json()))["memory"]["candidates"]


@pytest.mark.parametrize("ranks", [1, 8])
@pytest.mark.parametrize("recomputed", [False, True])
def test_the_line_through_few_layers_is_never_above_the_peak_of_all(tiny, ranks, recomputed):
    base = EstimateRequest("", model=find_config(tiny), sequence_lengths=(32,), ranks=ranks)
    walks = Walks(FakeRuns)
    for precision, steps, size in (("bf16", 2, 1), ("bf16-pure", 1, 2), ("bf16-pure", 2, 1)):
        request = replace(
            base, precision=precision, accumulation_steps=steps, accelerator=True, checkpoint_activations=recomputed
        )
        line = walks.point(request, size)
        assert line.source == "extrapolated"
        assert 0.99 < line.peak_memory_bytes / walks.point(request, size, whole=True).peak_memory_bytes <= 1.0
    destroy_fake_group()


def test_an_8_bit_optimizer_takes_no_shards_in_reality_and_in_the_rule(tiny, tmp_path):
    from bitsandbytes.optim import AdamW8bit
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{tmp_path / 'store'}")
    try:
        layer = fully_shard(torch.nn.Linear(128, 128), mesh=init_device_mesh("cpu", (1,)))
        layer(torch.ones(4, 128)).sum().backward()
        with pytest.raises(RuntimeError, match="DTensor"):
            AdamW8bit(layer.parameters()).step()
    finally:
        dist.destroy_process_group()
    with pytest.raises(PlanError, match="ranks=2: bitsandbytes' AdamW8bit takes no shards"):
        one(tiny, optimizer="adamw-8bit", ranks=2)


def test_the_8_bit_states_of_a_model_are_those_of_the_real_trainer(tiny, tmp_path):
    from bitsandbytes.optim import GlobalOptimManager
    from transformers import Trainer, TrainingArguments

    from batchwright.estimate.models.causal_lm import build, optimizers, read_config

    model = build(read_config(tiny, 2), torch.float32, 0, False)
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, optim="adamw_8bit", report_to=[])
    theirs = Trainer(model, arguments, train_dataset=[0]).create_optimizer()
    held = {}
    for name, optimizer in {
        "theirs": theirs,
        **{k: optimizers(k)["adamw-8bit"](model.parameters()) for k in (0, 1)},
    }.items():
        model(input_ids=torch.zeros(1, 8, dtype=torch.long), labels=torch.zeros(1, 8, dtype=torch.long)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        held[name] = {
            key: sum(state[part].nbytes for state in optimizer.state.values() if part in state)
            for key, part in {"moments": "state1", "scales": "absmax1"}.items()
        }
    GlobalOptimManager.get_instance().initialize()  # it remembers parameters of this process by their addresses
    assert held["theirs"] == held[0] == held[1] and held[0]["scales"]


@pytest.mark.usefixtures("in_process")
def test_models_of_other_kinds_are_refused_or_named(tmp_path):
    opt = {"model_type": "opt", "hidden_size": 64, "ffn_dim": 128, "word_embed_proj_dim": 64, "layerdrop": 0.1}
    bert = {"model_type": "bert", "hidden_size": 64, "architectures": ["BertForMaskedLM"], "is_decoder": True}
    small = {"vocab_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    options = {"sequence_lengths": (16,), "micro_batch_sizes": (1,)}
    assert estimate(model=written(tmp_path, **small, **opt), **options).notes == ()
    made = estimate(model=written(tmp_path, **small, **bert), **options)
    assert made.notes == (
        "The configuration names BertForMaskedLM; BertLMHeadModel, its causal language model, is estimated.",
    )
    with pytest.raises(PlanError, match="BartConfig is not a causal language model"):
        estimate(model=written(tmp_path, model_type="bart", d_model=64), **options)


@pytest.mark.usefixtures("in_process")
def test_a_search_that_ends_at_its_cap_says_so(tiny):
    made = estimate(model=tiny, sequence_lengths=(2,), memory_bytes=2**50)
    assert made.max_micro_batch_size == 2**20
    assert any("1,048,576 is the largest micro batch that is searched, not the limit" in note for note in made.notes)


@pytest.mark.usefixtures("in_process")
def test_the_frontier_ends_at_the_positions_of_the_model(tmp_path):
    tiny = written(tmp_path, **{**TINY, "num_hidden_layers": 1, "max_position_embeddings": 128})
    made = estimate(model=tiny, sequence_lengths=(16, 32), memory_bytes=2**28)
    assert [(row.sequence_length, row.source) for row in made.frontier[-2:]] == [(64, "fit"), (128, "fit")]


@pytest.mark.usefixtures("in_process")
def test_given_sizes_that_do_not_fit_are_answered_with_a_smaller_one(tmp_path):
    tiny = written(tmp_path, **{**TINY, "num_hidden_layers": 1})
    with pytest.raises(NothingFitsError, match="Use a smaller micro_batch_size, a shorter sequence"):
        estimate(model=tiny, sequence_lengths=(16,), memory_bytes=2**20, micro_batch_sizes=(1000,), lora=2)


@pytest.mark.usefixtures("in_process")
def test_changes_of_the_ranks_can_be_planned(tmp_path, capsys):
    """Ranks that are there come first, and a batch of four samples has no plan on more than four ranks."""
    tiny = written(tmp_path, **{**TINY, "num_hidden_layers": 2})
    given = {"model": tiny, "global_batch_size": 4, "devices": 2, "sequence_length": 16, "memory_bytes": 2**16}
    with pytest.raises(NothingFitsError) as caught:
        batchwright.plan(shard=False, precision="bf16-pure", progress=True, **given)
    sharded = {r["change"] for r in caught.value.remedies if "shard" in r["change"]}
    assert "shard" in sharded and not any("devices=8" in change for change in sharded)
    assert "estimated micro_batch_size 1 (recomputed, 2 micro batches): " in capsys.readouterr().err


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
    # As estimated: gradients are reduced after every micro batch, not held whole until the end of the step.
    assert read.accelerator_config.gradient_accumulation_kwargs == {"sync_each_batch": True}
    assert "accelerator_config" not in training_arguments(2, 1, sharded=True)


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
        ("70b", "h100", 8, 1, 8, (*LORA, "--shard")),
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
    said = " ".join(made["memory"]["assumptions"])
    assert "context" in said and "computed again" in said and ("LoRA of rank 16" in said or "bf16-pure" in said)
    if "--shard" in options:
        assert "reduced after every micro batch" in said
        assert made["settings"]["accelerator_config"]["gradient_accumulation_kwargs"] == {"sync_each_batch": True}


@pytest.mark.rounds
def test_a_70b_model_without_adapters_on_eight_cards_says_what_is_missing(tmp_path):
    model = written(tmp_path, **SIZES["70b"])
    batch = ["--devices", "8", "--micro-batch-size", "1", "--accumulation-steps", "8", *PURE]
    command = [*COMMAND, "--model", model, "--device", "h100", *batch, "--checkpoint-activations", "--shard"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 3, done.stderr
    fitting = {r["change"] for r in json.loads(done.stdout)["remedies"] if r["fits"]}
    assert fitting == {"lora=16", "shard + devices=16"}


@pytest.mark.rounds
def test_a_7b_model_without_adapters_on_one_small_card_says_what_would_fit(tmp_path):
    model = written(tmp_path, **SIZES["7b"])
    batch = ["--device", "4090", "--micro-batch-size", "1", "--accumulation-steps", "32", "--precision", "bf16"]
    done = subprocess.run([*COMMAND, "--model", model, *batch], capture_output=True, text=True, timeout=1800)
    assert done.returncode == 3, done.stderr
    document = json.loads(done.stdout)
    fitting = {r["change"] for r in document["remedies"] if r["fits"]}
    assert "lora=16 + precision=bf16-pure" in fitting and any(c.startswith("shard + devices=") for c in fitting)
