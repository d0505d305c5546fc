"""`check`: the batch that a configuration means, and what is wrong with it, framework by framework."""

from __future__ import annotations

import pytest

from batchwright.core.errors import ConfigError
from batchwright.dialects import detect, framework
from batchwright.dialects.checking import CAUSES, check, equation
from batchwright.dialects.converting import convert
from batchwright.dialects.reading import job
from tests.dialects.configurations import causes, checked, reading

HF = {"output_dir": "x", "per_device_train_batch_size": 4, "gradient_accumulation_steps": 8}
DS = {"train_batch_size": 256, "train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}}
MEGATRON = {"micro_batch_size": 4, "global_batch_size": 1024, "tensor_model_parallel_size": 2, "seq_length": 4096}
BRIDGE = {"train": {"micro_batch_size": 1, "global_batch_size": 512}, "model": {"tensor_model_parallel_size": 2}}
NEMO1 = {"trainer": {"devices": 8, "num_nodes": 2}, "model": {"micro_batch_size": 4, "global_batch_size": 512}}
NEMO2 = {"trainer": {"devices": 8, "num_nodes": 2}, "data": {"micro_batch_size": 4, "global_batch_size": 512}}
MAXTEXT = {"per_device_batch_size": 2, "ici_tensor_parallelism": 4, "max_target_length": 2048}
LIGHTNING = {"seed_everything": 1, "data": {"batch_size": 8}, "trainer": {"devices": 4, "accumulate_grad_batches": 2}}
SFT = {"per_device_train_batch_size": 2, "packing": True, "gradient_accumulation_steps": 4}
GRPO = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4, "num_generations": 8, "use_vllm": True}
ACTOR = {"ppo_mini_batch_size": 128, "ppo_micro_batch_size_per_gpu": 4}
VERL = {
    "data": {"train_batch_size": 512},
    "actor_rollout_ref": {"actor": ACTOR, "rollout": {"n": 8}},
    "trainer": {"nnodes": 2, "n_gpus_per_node": 8},
}

ACCELERATE = {"compute_environment": "LOCAL", "num_processes": 8, "gradient_accumulation_steps": 4, "batch_size": 16}
TITAN = {
    "training": {
        "num_tokens_per_microbatch_per_dp_rank": 16384,
        "num_tokens_per_train_step": 2**20,
        "max_context_length": 8192,
    },
    "parallelism": {"tensor_parallel_degree": 2},
}
OLD_TITAN = {"training": {"local_batch_size": 8, "global_batch_size": 256, "seq_len": 2048}, "parallelism": {}}
STAGED = {"training": {"local_batch_size": 8, "seq_len": 2048}, "parallelism": {"pipeline_parallel_degree": 2}}
OLMO = {
    "data_loader": {"global_batch_size": 1024 * 4096},
    "train_module": {"rank_microbatch_size": 4 * 4096, "max_sequence_length": 4096},
}
GROWS = {
    "batch_sizes": [1024 * 4096, 2048 * 4096],
    "schedule": [{"value": 0, "unit": "steps"}, {"value": 11, "unit": "steps"}],
}
LEVANTER = {"trainer": {"train_batch_size": 512, "per_device_parallelism": 4, "num_train_steps": 1000}}
AXOLOTL = {"base_model": "m", "sequence_len": 4096, "micro_batch_size": 2, "gradient_accumulation_steps": 4}
FACTORY = {"stage": "sft", "template": "llama3", "per_device_train_batch_size": 1, "gradient_accumulation_steps": 8}
FACTORY1 = {"template": "llama3", "micro_batch_size": 2, "global_batch_size": 64, "cutoff_len": 2048}
NANOTRON = {
    "tokens": {"micro_batch_size": 4, "batch_accumulation_per_replica": 8, "sequence_length": 2048},
    "parallelism": {"dp": 16, "tp": 2, "pp": 1},
}
NEOX = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 8,
    "pipe_parallel_size": 2,
    "model_parallel_size": 2,
}
FOUNDRY = {
    "global_train_batch_size": 256,
    "device_train_microbatch_size": 4,
    "max_seq_len": 2048,
    "max_duration": "1000ba",
}
OPENRLHF = {
    "rollout": {"batch_size": 1024, "n_samples_per_prompt": 8},
    "train": {"batch_size": 1024, "micro_batch_size": 4},
}
FLAT = {"rollout_batch_size": 128, "n_samples_per_prompt": 8, "train_batch_size": 128, "micro_train_batch_size": 2}
NEMO_RL = {
    "grpo": {"num_prompts_per_step": 32, "num_generations_per_prompt": 16},
    "policy": {"train_global_batch_size": 512, "train_micro_batch_size": 4},
    "cluster": {"num_nodes": 1, "gpus_per_node": 8},
}


@pytest.mark.parametrize(
    ("keys", "world", "name", "batch"),
    [
        (ACCELERATE, {}, "accelerate", "512 = 16 micro × 4 accumulation × 8 data-parallel"),
        (ACCELERATE | {"split_batches": True}, {}, "accelerate", "64 = 2 micro × 4 accumulation × 8 data-parallel"),
        # As accelerate 1.15 does (data_loader.py: prepare_data_loader): ranks of a tensor-parallel group share their data.
        (ACCELERATE | {"split_batches": True, "batch_size": 64,
                       "parallelism_config": {"parallelism_config_tp_size": 2}}, {}, "accelerate",
         "256 = 16 micro × 4 accumulation × 4 data-parallel"),
        (TITAN, {"devices": 16}, "torchtitan", "128 = 2 micro × 8 accumulation × 8 data-parallel"),
        (OLD_TITAN, {"devices": 8}, "torchtitan", "256 = 8 micro × 4 accumulation × 8 data-parallel"),
        (STAGED, {"devices": 8}, "torchtitan", "32 = 1 micro × 8 accumulation × 4 data-parallel"),
        (OLMO, {"devices": 64}, "olmo-core", "1024 = 4 micro × 4 accumulation × 64 data-parallel"),
        (OLMO | {"trainer": {"callbacks": {"batch_size_scheduler": GROWS}}}, {"devices": 64}, "olmo-core",
         "2048 = 4 micro × 8 accumulation × 64 data-parallel, grown from 1024 in 2 stages"),
        (LEVANTER, {"devices": 32}, "levanter", "512 = 4 micro × 4 accumulation × 32 data-parallel"),
        (LEVANTER | {"trainer": {"train_batch_size": [{"start": 0, "value": 128}, {"start": 100, "value": 256}],
                                 "num_train_steps": 5}}, {"devices": 32}, "levanter",
         "256 = 8 micro × 1 accumulation × 32 data-parallel, grown from 128 in 2 stages"),
        (AXOLOTL, {"devices": 8}, "axolotl", "64 = 2 micro × 4 accumulation × 8 data-parallel"),
        ({"base_model": "m", "micro_batch_size": 2, "batch_size": 8}, {"devices": 4}, "axolotl",
         "32 = 2 micro × 4 accumulation × 4 data-parallel"),
        (FACTORY, {"devices": 4}, "llama-factory", "32 = 1 micro × 8 accumulation × 4 data-parallel"),
        (FACTORY1, {"devices": 8}, "llama-factory", "64 = 2 micro × 4 accumulation × 8 data-parallel"),
        (NANOTRON, {}, "nanotron", "512 = 4 micro × 8 accumulation × 16 data-parallel"),
        (NEOX, {"devices": 32}, "gpt-neox", "256 = 4 micro × 8 accumulation × 8 data-parallel"),
        (FOUNDRY, {"devices": 16}, "composer", "256 = 4 micro × 4 accumulation × 16 data-parallel"),
        (OPENRLHF, {}, "openrlhf",
         "1024 responses per update = 4 micro × 32 accumulation × 8 data-parallel = "
         "128 prompts × 8 generations; a round has 1024 prompts and 8 updates, on 8 ranks"),
        (FLAT, {"devices": 4}, "openrlhf",
         "128 responses per update = 2 micro × 16 accumulation × 4 data-parallel = "
         "16 prompts × 8 generations; a round has 128 prompts and 8 updates, on 4 ranks"),
        (NEMO_RL, {}, "nemo-rl",
         "512 responses per update = 4 micro × 16 accumulation × 8 data-parallel = "
         "32 prompts × 16 generations; a round has 32 prompts and 1 update, on 8 ranks"),
        (HF, {"devices": 8}, "huggingface", "256 = 4 micro × 8 accumulation × 8 data-parallel"),
        (HF, {}, "huggingface", "global batch = 4 micro × 8 accumulation × data-parallel; the number of devices is not given"),
        (DS, {"devices": 16}, "deepspeed", "256 = 4 micro × 4 accumulation × 16 data-parallel"),
        (MEGATRON, {"nodes": 4, "devices_per_node": 8}, "megatron-lm", "1024 = 4 micro × 16 accumulation × 16 data-parallel"),
        (BRIDGE, {"devices": 16}, "megatron-bridge", "512 = 1 micro × 64 accumulation × 8 data-parallel"),
        (NEMO1, {}, "nemo", "512 = 4 micro × 8 accumulation × 16 data-parallel"),
        (NEMO2, {}, "nemo", "512 = 4 micro × 8 accumulation × 16 data-parallel"),
        (MAXTEXT, {"devices": 64}, "maxtext", "128 = 8 micro × 1 accumulation × 16 data-parallel"),
        (LIGHTNING, {}, "lightning", "64 = 8 micro × 2 accumulation × 4 data-parallel"),
        (SFT, {"devices": 2}, "trl", "16 = 2 micro × 4 accumulation × 2 data-parallel"),
        (GRPO, {"devices": 4}, "trl-grpo",
         "128 responses per update = 8 micro × 4 accumulation × 4 data-parallel = "
         "16 prompts × 8 generations; a round has 16 prompts and 1 update, on 4 ranks"),
        (VERL, {}, "verl",
         "1024 responses per update = 4 micro × 16 accumulation × 16 data-parallel = "
         "128 prompts × 8 generations; a round has 512 prompts and 4 updates, on 16 ranks"),
    ],
)  # fmt: skip
def test_the_framework_is_detected_and_the_batch_is_said(keys, world, name, batch):
    report = checked(keys, **world)
    assert report.reading.dialect.name == name and report.reading.detected_by
    assert report.job is not None and equation(report.job) == batch
    assert report.ok


@pytest.mark.parametrize(
    ("keys", "name", "world", "cause", "said"),
    [
        (ACCELERATE | {"split_batches": True, "batch_size": 20}, None, {}, "!value", "Nearest: 16 or 24"),
        ({"compute_environment": "LOCAL", "num_processes": 8}, None, {}, "missing-key", "give batch_size=N"),
        (TITAN | {"training": {**TITAN["training"], "num_tokens_per_train_step": 2**20 + 8192}}, None, {"devices": 16},
         "!batch", "129"),
        (TITAN | {"training": {"num_tokens_per_microbatch_per_dp_rank": 10000, "max_context_length": 8192}}, None, {},
         "!value", "Nearest: 8192 or 16384"),
        (STAGED | {"parallelism": {"pipeline_parallel_degree": 2, "pipeline_parallel_microbatch_size": 3}}, None,
         {"devices": 8}, "!value", "Nearest: 2 or 4"),
        (OLMO | {"train_module": {"rank_microbatch_size": 5000, "max_sequence_length": 4096}}, None, {}, "!value",
         "Nearest: 4096 or 8192"),
        (OLMO | {"trainer": {"callbacks": {"batch_size_scheduler": {"batch_sizes": [4096, 3 * 2048], "schedule": [
            {"value": 0, "unit": "steps"}, {"value": 9, "unit": "steps"}]}}}}, None, {}, "!value", "by a whole factor"),
        (OLMO | {"trainer": {"callbacks": {"batch_size_scheduler": GROWS}}}, None, {}, "changes-the-batch", "square root"),
        (LEVANTER | {"trainer": {"train_batch_size": 500, "per_device_parallelism": 4, "num_train_steps": 9}}, None,
         {"devices": 32}, "!batch", "Nearest: 384 (3 steps) or 512 (4 steps)"),
        ({"trainer": {"train_batch_size": -1, "num_train_steps": 9}}, None, {}, "!missing-key", "both -1"),
        (AXOLOTL | {"batch_size": 8}, None, {}, "!excluded-key", "refuses both"),
        ({"base_model": "m", "batch_size": 9, "micro_batch_size": 2}, None, {}, "!value", "Nearest: 8 or 10"),
        (AXOLOTL | {"sample_packing": True, "context_parallel_size": 2}, None, {}, "!excluded-key", "requires 1"),
        (AXOLOTL | {"rl": "grpo", "trl": {"num_generations": 6}}, None, {}, "!splits-a-group", "gradient_accumulation_steps=3"),
        (FACTORY | {"average_tokens_across_devices": False}, None, {}, "mean-of-means", "own number of tokens"),
        (FACTORY1 | {"global_batch_size": 60}, None, {"devices": 8}, "!batch", "Nearest: 48 (3 steps) or 64 (4 steps)"),
        (NANOTRON | {"tokens": {"micro_batch_size": 4}}, None, {}, "!missing-key", "no default"),
        (NEOX | {"train_batch_size": 100}, None, {"devices": 32}, "!batch", "contradicts"),
        (FOUNDRY | {"global_train_batch_size": 250}, None, {"devices": 16}, "!value", "Nearest: 240 or 256"),
        (FOUNDRY | {"device_train_microbatch_size": "auto"}, None, {"devices": 16}, "changes-the-batch", "is auto"),
        (FOUNDRY, None, {"devices": 16}, "counts-steps", "max_duration=1000ba (256,000 samples)"),
        (OPENRLHF | {"train": {"batch_size": 1000}}, None, {}, "!value", "Nearest: 512 or 1024"),
        (FLAT | {"advantage_estimator": "rloo", "n_samples_per_prompt": 1}, None, {}, "!one-generation", "every advantage is 0"),
        (FLAT | {"vllm_generate_batch_size": 256}, None, {}, "!excluded-key", "needs asynchronous training"),
        (NEMO_RL | {"policy": {"train_global_batch_size": 500, "train_micro_batch_size": 4}}, None, {}, "!value", "512 / 500"),
        (NEMO_RL | {"policy": {**NEMO_RL["policy"], "logprob_batch_size": 8, "dtensor_cfg": {"tensor_parallel_size": 4}}}, None,
         {}, "!excluded-key", "must equal"),
        (DS | {"gradient_accumulation_steps": 3}, None, {"devices": 16}, "!batch", "contradicts"),
        ({"zero_optimization": {"stage": 1}, "gradient_accumulation_steps": 2}, "deepspeed", {}, "!missing-key", "needs one"),
        (DS | {"elasticity": {"enabled": True}}, "deepspeed@0.19.7", {"devices": 16}, "!excluded-key", "ignore_non_elastic"),
        (DS | {"elasticity": {"enabled": True}}, None, {"devices": 16}, "!unknown-key", "0.19.8 and later refuse it"),
        (DS | {"gradient_accumulation_steps": 4}, None, {"devices": 16}, "mean-of-means", "micro batches' means"),
        (HF | {"per_gpu_train_batch_size": 4}, None, {}, "!ignored-key", "Write per_device_train_batch_size=4"),
        (HF | {"auto_find_batch_size": True}, None, {}, "changes-the-batch", "smaller after out-of-memory"),
        (HF | {"average_tokens_across_devices": False}, None, {}, "mean-of-means", "its own number of tokens"),
        (HF, "huggingface@4.53", {}, "mean-of-means", "the default before 4.54"),
        (HF | {"per_device_train_batch_sise": 4}, None, {}, "!misspelt-key", "Did you mean per_device_train_batch_size"),
        (HF | {"gradient_accumulation_steps": "many"}, None, {}, "!value", "is not a number"),
        (HF | {"warmup_steps": 500}, None, {"devices": 8}, "counts-steps", "warmup_steps=500 (128,000 samples)"),
        (MEGATRON | {"global_batch_size": 1000}, None, {"devices": 32}, "!batch", "Nearest: 960 (15 steps) or 1024 (16"),
        (MEGATRON | {"rampup_batch_size": "256 128 1M"}, None, {}, "!ignored-key", '--step-batch-size-schedule "0:256'),
        (MEGATRON | {"rampup_batch_size": "256 128 1M", "lr_warmup_iters": 100}, "megatron@0.17", {"devices": 32},
         "counts-steps", "lr_warmup_iters=100 ends at sample 25,600"),
        (MEGATRON | {"rampup_batch_size": [96, 32, 10**6]}, "megatron-lm@0.17",
         {"devices": 32}, "!stage", "96"),
        ({"micro_batch_size": 4, "global_batch_size": 88, "rampup_batch_size": "32 8 9384"}, "megatron-lm@0.17", {},
         "float-boundary", "at sample 9,384 it is still at the batch before 88"),
        (MEGATRON | {"step_batch_size_schedule": "0:256 1M:1024"}, None, {}, "!excluded-key", "raises ValueError"),
        ({**MEGATRON, "step_batch_size_schedule": "0:256 1M:1024"}, "megatron@0.17", {}, "!unknown-key", "before 0.18"),
        (MEGATRON, None, {"devices": 32}, "mean-of-means", "calculate_per_token_loss is false"),
        (BRIDGE | {"train": {**BRIDGE["train"], "rampup_batch_size": [128, 128, 10**6]}}, None, {"devices": 16},
         "!ignored-key", "the batch is 512 from the first step"),
        (BRIDGE | {"train": {**BRIDGE["train"], "rampup_batch_size": [128, 128, 10**6], "train_samples": 10**7}}, None,
         {}, "!excluded-key", "train.train_iters"),
        (BRIDGE | {"train": {**BRIDGE["train"], "step_batch_size_schedule": "0:1"}}, None, {}, "!ignored-key", "not pass on"),
        (NEMO2 | {"trainer": {"devices": 8, "accumulate_grad_batches": 4}}, None, {}, "!accumulates-twice", "must be 1"),
        (MAXTEXT | {"enable_rampup_batch_size": True, "ici_pipeline_parallelism": 2}, None, {"devices": 64},
         "!ramp-with-pipeline", "do not work together"),
        (MAXTEXT | {"per_device_batch_size_start": 1}, None, {"devices": 64}, "ignored-key", "enable_rampup_batch_size=true"),
        (MAXTEXT | {"per_device_batch_size": 0.3}, None, {"devices": 64}, "!value", "Nearest: 0.25 or 0.5"),
        (LIGHTNING | {"trainer": {"accumulate_grad_batches": 2, "callbacks": [
            {"class_path": "lightning.pytorch.callbacks.GradientAccumulationScheduler"}]}}, None, {}, "!excluded-key", "refuses"),
        (LIGHTNING, None, {}, "mean-of-means", "Lightning divides"),
        (GRPO | {"num_generations": 7}, None, {"devices": 4}, "!value", "128 / 7 = 18.29 prompts. Nearest: 4 or 8"),
        (GRPO | {"generation_batch_size": 100}, None, {"devices": 4}, "!value", "Nearest: 96 or 128"),
        (GRPO | {"generation_batch_size": 128, "steps_per_generation": 4}, None, {}, "!value", "exclude each other"),
        (GRPO | {"steps_per_generation": 6}, None, {"devices": 4}, "!value", "learns from two rounds"),
        (GRPO | {"auto_find_batch_size": True}, None, {}, "!excluded-key", "split groups"),
        (GRPO | {"num_generations": 1}, None, {}, "!one-generation", "at least 2"),
        (VERL | {"data": {"train_batch_size": 500}}, None, {}, "!value", "500 / 128"),
        (VERL | {"trainer": {"nnodes": 3, "n_gpus_per_node": 8}}, None, {}, "!batch", "1024 / 24"),
        (VERL | {"actor_rollout_ref": {"actor": {"ppo_mini_batch_size": 128}}}, None, {}, "!missing-key", "needs one of them"),
        (VERL | {"actor_rollout_ref": {"actor": {**ACTOR, "use_dynamic_bsz": True}}}, None, {}, "ignored-key", "no effect"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_found_and_said(keys, name, world, cause, said):
    report = checked(keys, name, **world)
    assert cause in causes(report)
    assert any(said in f.message for f in report.findings if f.cause == cause.lstrip("!"))
    assert report.ok == (not any(one.startswith("!") for one in causes(report)))
    assert {f.cause for f in report.findings} <= set(CAUSES)


def test_a_neox_file_is_not_taken_for_one_of_deepspeed():
    zero = {f"setting_{n}": n for n in range(20)}
    keys = NEOX | {
        "zero_optimization": zero,
        "fp16": {"enabled": True},
        "steps_per_print": 10,
        "vocab_file": "x",
        "train_iters": 9,
    }
    assert reading(keys).dialect.name == "gpt-neox"


def test_keys_of_no_concern_are_passed_over_and_counted():
    report = checked(HF | {f"key_{n}": n for n in range(300)}, devices=8)
    assert report.ok and len(report.reading.passed_over) == 301  # with output_dir


def test_what_did_not_change_with_the_batch():
    before = reading(HF | {"warmup_steps": 2000, "save_steps": 500, "logging_steps": 10}, devices=8)
    after = reading(
        HF | {"gradient_accumulation_steps": 32, "warmup_steps": 2000, "save_steps": 125, "logging_steps": 10},
        devices=8,
    )
    found = [f for f in check(after, before).findings if f.cause == "not-changed-with-the-batch"]
    assert [(f.key, f.nearest, f.severity) for f in found] == [("warmup_steps", (500,), "error")]
    assert "512,000 samples became 2,048,000. Nearest: 500 (512,000 samples)." in found[0].message
    assert check(after, before, allow=["not-changed-with-the-batch"]).ok
    assert check(before, before).ok


def test_keys_of_no_framework_are_an_error_that_lists_the_frameworks():
    with pytest.raises(ConfigError, match="belong to no framework"):
        checked({"a": 1, "b": {"c": 2}})
    with pytest.raises(ConfigError, match="is not a framework"):
        checked(HF, "nothing")


@pytest.mark.parametrize(
    ("keys", "name"),
    [
        ({"micro_batch_size": 2, "pipeline_model_parallel_size": 4, "seq_length": 4096}, "megatron-lm"),
        ({"train": {"micro_batch_size": 2}, "model": {"pipeline_model_parallel_size": 4}}, "megatron-bridge"),
        ({"train_micro_batch_size_per_gpu": 2, "pipe_parallel_size": 4}, "gpt-neox"),
        ({"training.local_batch_size": 4, "parallelism.pipeline_parallel_degree": 4}, "torchtitan"),
    ],
)
def test_without_a_batch_a_pipeline_has_one_micro_batch(keys, name):
    report = checked(keys, name, devices=8)
    expected = "8 = 1 micro × 4 accumulation × 2 data-parallel" if name == "torchtitan" else ONCE
    assert report.job is not None and equation(report.job) == expected


ONCE = "4 = 2 micro × 1 accumulation × 2 data-parallel"


def test_deepspeed_accumulates_once():
    assert equation(job(reading({"train_micro_batch_size_per_gpu": 2}, "deepspeed", devices=8))).startswith(
        "16 = 2 micro × 1"
    )


def test_a_key_has_the_meaning_of_the_framework_it_was_found_for():
    assert not any("NeMo" in note for note in reading(LIGHTNING).notes)


def test_a_ramp_that_is_ignored_has_one_finding_and_no_stages():
    triple = {**MEGATRON, "rampup_batch_size": [100, 77, 10**6]}  # stages that fit no ranks
    report = checked(triple, devices=16)
    assert [f.cause for f in report.findings if f.severity == "error"] == ["ignored-key"]
    assert report.job is not None and equation(report.job) == "1024 = 4 micro × 32 accumulation × 8 data-parallel"


def test_one_update_of_one_rank_is_singular():
    made = job(reading({"per_device_train_batch_size": 8, "num_generations": 8}, "trl-grpo", devices=1))
    assert equation(made).endswith("= 1 prompt × 8 generations; a round has 1 prompt and 1 update, on 1 rank")


@pytest.mark.parametrize(
    ("keys", "batch"),
    [
        ({"megatron_lm_config": {"megatron_lm_tp_degree": 2, "megatron_lm_num_micro_batches": 4}}, "64 = 4 micro × 4"),
        ({"parallelism_config": {"parallelism_config_tp_size": 2, "parallelism_config_cp_size": 2}}, "8 = 4 micro × 1"),
    ],
)
def test_accelerate_splits_replicas_and_steps(keys, batch):
    report = checked({"compute_environment": "LOCAL", "num_processes": 8, "batch_size": 4, **keys})
    assert report.job is not None and equation(report.job).startswith(f"{batch} accumulation")


def test_megatrons_batch_of_evaluation():
    """megatron-core 0.19.2, training/arguments.py: a multiple of eval_micro_batch_size × ranks."""
    keys = {"micro_batch_size": 4, "global_batch_size": 64, "train_iters": 10}
    for more, nearest in (
        ({"eval_global_batch_size": 24}, (0, 32)),
        ({"eval_global_batch_size": 24, "eval_micro_batch_size": 3}, ()),
        ({"eval_micro_batch_size": 3}, (48, 72)),  # the global batch, by default
        ({"eval_micro_batch_size": 2}, ()),
        # A schedule: Megatron takes one micro batch of each rank.
        ({"eval_micro_batch_size": 3, "step_batch_size_schedule": "0:64 1M:128", "seq_length": 8}, (24, 48)),
    ):
        given = {k: v for k, v in (keys | more).items() if not (k == "global_batch_size" and "seq_length" in more)}
        found = [f for f in checked(given, "megatron-lm", devices=8).findings if f.cause == "eval-batch"]
        assert [f.nearest for f in found] == ([nearest[nearest[0] == 0 :]] if nearest else []), (more, found)
    assert "eval-batch" not in {f.cause for f in checked(keys | {"eval_global_batch_size": 24}, "megatron-lm").findings}


def test_a_default_that_changed_between_versions_is_said_and_converted():
    keys = {"per_device_train_batch_size": 4}
    old, new = (reading(keys, f"huggingface@{version}", devices=8) for version in ("4.53", "4.54"))
    assert "average_tokens_across_devices" in {f.key for f in check(old).findings}
    assert "average_tokens_across_devices" not in {f.key for f in check(new).findings}
    name, key = framework("huggingface"), "average_tokens_across_devices"
    assert convert(old, name).keys[key] is False  # the newest would average
    assert convert(new, name, (4, 53)).keys[key] is True
    assert key not in convert(old, name, (4, 53)).keys and key not in convert(new, name).keys


def test_axolotls_grpo_needs_a_group_for_each_gpu():
    keys = {"base_model": "m", "rl": "grpo", "micro_batch_size": 4, "gradient_accumulation_steps": 2}
    keys |= {"trl": {"num_generations": 4}}
    assert checked(keys, "axolotl", devices=2).ok
    report = checked(keys, "axolotl", devices=3)
    assert [f.nearest for f in report.findings if f.severity == "error"] == [("gradient_accumulation_steps=3",)]
    assert checked(keys | {"gradient_accumulation_steps": 3}, "axolotl", devices=3).ok
    assert checked(keys, "axolotl").ok  # the number of GPUs is not known


def test_axolotls_old_key_of_context_parallelism_counts_without_the_new_one():
    """As axolotl 0.19.0 does (utils/schemas/validation.py: check_context_parallel_size)."""
    new, old = "context_parallel_size", "sequence_parallel_degree"
    for keys, ranks in (({old: 4}, 2), ({old: 4, new: 0}, 2), ({old: 4, new: 2}, 4), ({old: 0, new: 2}, 4)):
        report = checked(AXOLOTL | keys, "axolotl", devices=8)
        assert report.job.get("data_parallel_size") == ranks, keys
        [found] = [f for f in report.findings if f.cause == "deprecated-key"]
        assert found.key == old and new in found.message
    assert "deprecated-key" not in causes(checked(AXOLOTL | {new: 2}, "axolotl", devices=8))
    report = checked(AXOLOTL | {old: 2, "sample_packing": True}, "axolotl", devices=8)
    [found] = [f for f in report.findings if f.cause == "excluded-key"]
    assert f"{old}=2" in found.message


TITAN_PIPELINE = {"training.seq_len": 2048, "parallelism.pipeline_parallel_degree": 4}


@pytest.mark.parametrize(
    ("schedule", "pieces", "said"),
    [
        (None, 4, None),
        (None, 3, "torch's 1F1B needs at least as many microbatches as the 4 stages, not 3"),
        ("gpipe", 3, None),
        ("Interleaved1F1B", 8, None),
        ("Interleaved1F1B", 9, "torch-interleaved needs equal rounds"),
        ("InterleavedZeroBubble", 9, "zero-bubble needs equal rounds"),
        ("LoopedBFS", 3, None),
        ("ZBVZeroBubble", 3, None),
        ("DualPipeV", 7, "dualpipev needs at least 2 × 4 = 8 microbatches, not 7"),
        ("PipelineScheduleMulti", 3, None),
        (None, 1, "torch's 1F1B needs at least as many microbatches as the 4 stages, not 1"),
        ("Interleaved_1F1B", 8, "parallelism.pipeline_parallel_schedule=Interleaved_1F1B is not a schedule of torch"),
        ("FlexibleInterleaved1F1B", 8, "FlexibleInterleaved1F1B is not a schedule of torch"),  # torch 2.13
        ("1F2B", 8, "parallelism.pipeline_parallel_schedule=1F2B is not a schedule of torch. They are: 1F1B, Inter"),
    ],
)
def test_the_schedules_of_torchtitan_have_torchs_rules(schedule, pieces, said):
    """The names and the default of torchtitan 0.3.0 (config/configs.py, distributed/pipeline_parallel.py)."""
    keys = TITAN_PIPELINE | ({} if schedule is None else {"parallelism.pipeline_parallel_schedule": schedule})
    new = {"training.num_tokens_per_microbatch_per_dp_rank": 2048, "training.max_context_length": 2048}
    new |= {"parallelism.num_pp_microbatches": pieces} | {k: v for k, v in keys.items() if k != "training.seq_len"}
    for one in (keys | {"training.local_batch_size": pieces}, new):
        report = checked(one, "torchtitan", devices=8)
        errors = [f.message for f in report.findings if f.severity == "error"]
        assert (errors == []) if said is None else (said in errors[0]), errors
        if said is None:
            made = convert(report.reading, framework("torchtitan"), report.reading.version)
            assert not any("pipeline_schedule=" in line and schedule is None for line in made.left_out)
            assert schedule in (None, "PipelineScheduleMulti") or made.status == "exact"
            shown = str(made.keys.get("parallelism.pipeline_parallel_schedule", schedule))
            assert shown.lower() == str(schedule).lower()


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"training.local_batch_size": 8, "parallelism.pipeline_parallel_microbatch_size": 4},
         "parallelism.pipeline_parallel_microbatch_size=4 makes 2 microbatches: torch's 1F1B needs at least as many "
         "microbatches as the 4 stages, not 2. Nearest: 2."),
        ({"training.local_batch_size": 3, "parallelism.pipeline_parallel_microbatch_size": 1},
         "training.local_batch_size=3 makes 3 microbatches: torch's 1F1B needs at least as many microbatches as the 4 "
         "stages, not 3. Nearest: 4."),
        ({"training.local_batch_size": 9, "parallelism.pipeline_parallel_schedule": "Interleaved1F1B"},
         "training.local_batch_size=9 makes 9 microbatches: torch-interleaved needs equal rounds: 9 mod (9 // 4) = 1. "
         "Nearest: 8 or 10."),
        ({"training.num_tokens_per_microbatch_per_dp_rank": 4096, "training.max_context_length": 2048},
         "parallelism.num_pp_microbatches=1 (torchtitan's default): torch's 1F1B needs at least as many microbatches as "
         "the 4 stages, not 1. Nearest: 4."),
        ({"training.batch_size": 8, "experimental.pipeline_parallel_microbatches": 2},
         "experimental.pipeline_parallel_microbatches=2: torch's 1F1B needs at least as many microbatches as the 4 stages, "
         "not 2. Nearest: 4."),
    ],
)  # fmt: skip
def test_what_a_schedule_refuses_has_the_nearest_value_of_the_key_that_is_wrong(keys, said):
    degree = "experimental" if "training.batch_size" in keys else "parallelism"
    report = checked(keys | {f"{degree}.pipeline_parallel_degree": 4}, "torchtitan", devices=64)
    assert said in [f.message for f in report.findings]


def test_a_schedule_of_torchtitan_that_a_file_gives_has_no_rule():
    """As torchtitan 0.3.0 does (distributed/pipeline_parallel.py: build_pipeline_schedule)."""
    order = "parallelism.pipeline_parallel_schedule_csv"
    keys = TITAN_PIPELINE | {"training.local_batch_size": 3, "parallelism.pipeline_parallel_schedule": "1F1B"}
    assert checked(keys | {order: "order.csv"}, "torchtitan", devices=8).ok
    assert not checked(keys | {order: ""}, "torchtitan", devices=8).ok
    made = convert(reading(keys | {order: "order.csv"}, "torchtitan", devices=8), framework("torchtitan"))
    assert f"{order}=order.csv" in made.left_out and made.status == "not expressible"
    assert [difference.what for difference in made.differences] == ["batch"]


def test_names_of_schedules_before_torchtitans_first_release():
    keys = {"training.batch_size": 8, "experimental.pipeline_parallel_degree": 4}
    for name in ("1f1b", "interleaved_1f1b", "flexible_interleaved_1f1b", "FlexibleInterleaved1F1B"):
        assert checked(keys | {"experimental.pipeline_parallel_schedule": name}, "torchtitan", devices=8).ok, name


def test_a_schedule_that_another_framework_has_no_key_for_is_left_out():
    keys = TITAN_PIPELINE | {"training.local_batch_size": 8, "parallelism.pipeline_parallel_schedule": "GPipe"}
    made = convert(reading(keys, "torchtitan", devices=8), framework("megatron-lm"))
    assert made.status == "exact" and "pipeline_schedule=gpipe" in made.left_out


def test_sizes_that_another_program_fills_in_are_not_chosen():
    sizes = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
    report = checked({"train_batch_size": 64, **sizes}, "deepspeed", devices=8)
    assert report.ok and equation(report.job) == "64 = micro × accumulation × 8 data-parallel"
    report = checked({"train_batch_size": 64, **sizes, "train_micro_batch_size_per_gpu": 4}, "deepspeed", devices=8)
    assert equation(report.job) == "64 = 4 micro × 2 accumulation × 8 data-parallel"  # the equation gives it


def test_flags_of_megatron_without_a_length_or_a_parallel_size():
    keys = {"num_layers": 24, "hidden_size": 1024, "num_attention_heads": 16, "micro_batch_size": 4}
    report = checked(keys | {"global_batch_size": 32}, devices=8)
    assert report.reading.dialect.name == "megatron-lm"
    assert equation(report.job) == "32 = 4 micro × 1 accumulation × 8 data-parallel"


def test_a_programs_name_counts_less_than_keys_that_only_another_framework_reads():
    keys = {"micro_batch_size", "global_batch_size", "tensor_model_parallel_size"}
    assert detect(keys, ["axolotl"])[0].name == "megatron-lm"
    assert detect({"micro_batch_size", "output_dir"}, ["axolotl"])[0].name == "axolotl"
    assert detect({"per_device_train_batch_size", "output_dir"}, ["trl"])[0].name == "trl"
