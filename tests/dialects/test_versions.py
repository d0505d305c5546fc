"""Keys that only some versions of a framework have, and findings that depend on one key."""

from __future__ import annotations

import pytest

from batchwright.dialects.checking import check, equation
from batchwright.dialects.reading import job
from tests.dialects.configurations import causes, checked, reading

OLD = {"training.local_batch_size": 8, "training.seq_len": 1024}
NEW = {"training.num_tokens_per_microbatch_per_dp_rank": 8192, "training.max_context_length": 1024}


@pytest.mark.parametrize(
    ("name", "keys", "wrong"),
    [
        ("torchtitan@2026-08-20", OLD, set(OLD)),
        ("torchtitan@0.3", NEW, set(NEW)),
        ("torchtitan@0.3", OLD, set()),
        ("torchtitan@2026-08-20", NEW, set()),
        ("torchtitan", OLD | NEW, set(NEW)),  # names of two versions
        ("torchtitan@0.3", {"training.batch_size": 1}, {"training.batch_size"}),
        ("torchtitan", {"training.batch_size": 1, "training.seq_len": 1024}, set()),
        ("openrlhf@0.11", {"rollout_batch_size": 128}, {"rollout_batch_size"}),
        ("openrlhf@0.9", {"rollout.batch_size": 128}, {"rollout.batch_size"}),
        ("openrlhf", {"rollout_batch_size": 128}, set()),
        ("nemo@2", {"model.micro_batch_size": 4, "trainer.devices": 8}, {"model.micro_batch_size"}),
        ("nemo@1", {"data.micro_batch_size": 4, "trainer.devices": 8}, {"data.micro_batch_size"}),
        ("llama-factory@0", {"global_batch_size": 64}, {"global_batch_size"}),
        ("llama-factory", {"global_batch_size": 64}, set()),
        ("megatron-lm@0.17", {"step_batch_size_schedule": "0:8 1M:16", "seq_length": 8}, {"step_batch_size_schedule"}),
    ],
)
def test_a_key_of_another_version_is_an_error(name, keys, wrong):
    world = {} if name.startswith(("nemo", "openrlhf")) else {"devices": 8}
    found = [f for f in checked(keys, name, **world).findings if f.cause == "unknown-key"]
    assert {f.key for f in found} == wrong and all(f.severity == "error" for f in found)


def test_names_of_two_versions_are_said():
    [said, _] = [f.message for f in checked(OLD | NEW, devices=8).findings if f.cause == "unknown-key"]
    assert "it came with 2026.8.20" in said and "training.local_batch_size is a key of other versions" in said


@pytest.mark.parametrize(
    ("more", "batch"),
    [
        ({}, "8 = 1 micro × 1 accumulation × 8"),
        ({"training.tensor_parallel_degree": 2}, "4 = 1 micro × 1 accumulation × 4"),
        ({"training.data_parallel_shard_degree": 8, "training.data_parallel_replicate_degree": 1}, "8 = 1 micro × 1"),
        # By default a batch is cut into as many pieces as there are stages.
        ({"training.batch_size": 8, "experimental.pipeline_parallel_degree": 4}, "16 = 2 micro × 4 accumulation × 2"),
        ({"training.batch_size": 8, "experimental.pipeline_parallel_degree": 4,
          "experimental.pipeline_parallel_microbatches": 8}, "16 = 1 micro × 8 accumulation × 2"),
    ],
)  # fmt: skip
def test_torchtitan_before_its_first_release(more, batch):
    report = checked({"training.batch_size": 1, "training.seq_len": 8192, "training.steps": 1000} | more, devices=8)
    assert report.ok and report.reading.dialect.name == "torchtitan"
    assert equation(report.job).startswith(batch), equation(report.job)


# What published files say about the batch: the keys and the numbers, and where they are from.
PUBLISHED = {
    # pytorch/torchtitan 0011fb905e, train_configs/llama3_8b.toml: "a preset for 64 A100 GPUs"
    "torchtitan, 2024": (
        {"training": {"batch_size": 1, "seq_len": 8192, "warmup_steps": 200, "steps": 1000, "tensor_parallel_degree": 1,
                      "data_parallel_replicate_degree": 1, "data_parallel_shard_degree": -1},
         "experimental": {"pipeline_parallel_degree": 1}, "checkpoint": {"interval": 500}, "metrics": {"log_freq": 10}},
        64, "torchtitan", "64 = 1 micro × 1 accumulation × 64 data-parallel"),
    # pytorch/torchtitan 25079f1153, configs/llama3_8b-8xb200-8k.toml
    "torchtitan, 2025": (
        {"training": {"local_batch_size": 3, "seq_len": 8192, "steps": 1000}, "lr_scheduler": {"warmup_steps": 200},
         "parallelism": {"data_parallel_replicate_degree": 1, "data_parallel_shard_degree": 8, "tensor_parallel_degree": 1}},
        8, "torchtitan", "24 = 3 micro × 1 accumulation × 8 data-parallel"),
    # EleutherAI/gpt-neox 01447b9561, configs/pythia/1-4B.yml: "trained on 64 gpus"; Pythia's batch is 1024
    "Pythia 1.4B": (
        {"pipe_parallel_size": 1, "model_parallel_size": 1, "seq_length": 2048, "train_micro_batch_size_per_gpu": 16,
         "zero_optimization": {"stage": 1}, "train_iters": 143000, "lr_decay_iters": 143000, "checkpoint_factor": 1000,
         "eval_interval": 40000, "steps_per_print": 10},
        64, "gpt-neox", "1024 = 16 micro × 1 accumulation × 64 data-parallel"),
    # mosaicml/llm-foundry 15fb4ffaa6, scripts/train/yamls/pretrain/mpt-7b.yaml
    "MPT-7B": (
        {"max_seq_len": 2048, "scheduler": {"t_warmup": "100ba"}, "max_duration": "63900ba", "eval_interval": "5000ba",
         "global_train_batch_size": 1024, "device_train_microbatch_size": 8, "device_eval_batch_size": 8},
        64, "composer", "1024 = 8 micro × 2 accumulation × 64 data-parallel"),
    # axolotl-ai-cloud/axolotl 107c67ae5a, examples/llama-3/lora-8b.yml
    "Axolotl, Llama 3": (
        {"base_model": "m", "output_dir": "o", "sequence_len": 4096, "sample_packing": True, "gradient_accumulation_steps": 4,
         "micro_batch_size": 2, "logging_steps": 1, "warmup_ratio": 0.1, "evals_per_epoch": 4, "saves_per_epoch": 1},
        8, "axolotl", "64 = 2 micro × 4 accumulation × 8 data-parallel"),
    # hiyouga/LLaMA-Factory 13d252fa78, examples/train_lora/llama3_lora_sft.yaml
    "LLaMA-Factory, Llama 3": (
        {"stage": "sft", "template": "t", "cutoff_len": 2048, "output_dir": "o", "logging_steps": 10, "save_steps": 500,
         "per_device_train_batch_size": 1, "gradient_accumulation_steps": 8, "num_train_epochs": 3.0, "warmup_ratio": 0.1},
        8, "llama-factory", "64 = 1 micro × 8 accumulation × 8 data-parallel"),
    # NVIDIA/NeMo 000763d0c6, examples/nlp/language_modeling/conf/megatron_gpt_config.yaml
    "NeMo 1, GPT": (
        {"trainer": {"devices": 1, "num_nodes": 1, "max_steps": 100000, "log_every_n_steps": 10, "val_check_interval": 100,
                     "accumulate_grad_batches": 1, "limit_val_batches": 50},
         "exp_manager": {"name": "n"},
         "model": {"micro_batch_size": 4, "global_batch_size": 8, "tensor_model_parallel_size": 1, "encoder_seq_length": 512,
                   "pipeline_model_parallel_size": 1, "data": {"seq_length": 512}, "optim": {"sched": {"warmup_steps": 500}}}},
        None, "nemo", "8 = 4 micro × 2 accumulation × 1 data-parallel"),
    # NVIDIA-NeMo/RL 00294d9baa, examples/configs/grpo_math_1B.yaml: packed, so micro batches are not counted in responses
    "NeMo-RL, GRPO": (
        {"grpo": {"num_prompts_per_step": 32, "num_generations_per_prompt": 16, "max_num_steps": 1000000, "val_period": 10,
                  "val_batch_size": 256, "async_grpo": {"enabled": False, "max_trajectory_age_steps": 1}},
         "policy": {"train_global_batch_size": 512, "train_micro_batch_size": 4, "generation_batch_size": 32,
                    "logprob_batch_size": 4, "dtensor_cfg": {"tensor_parallel_size": 1, "context_parallel_size": 1},
                    "dynamic_batching": {"enabled": False}, "sequence_packing": {"enabled": True}},
         "cluster": {"gpus_per_node": 1, "num_nodes": 1}},
        None, "nemo-rl",
        "512 responses per update = 32 prompts × 16 generations; a round has 32 prompts and 1 update, on 1 rank"),
}  # fmt: skip


@pytest.mark.parametrize("file", PUBLISHED)
def test_published_configurations_are_read_and_right(file):
    keys, devices, name, batch = PUBLISHED[file]
    report = check(reading(keys, **({} if devices is None else {"devices": devices})))
    assert report.reading.dialect.name == name and report.ok, report.findings
    assert equation(report.job) == batch


SCHEDULER = [{"class_path": "lightning.pytorch.callbacks.GradientAccumulationScheduler"}]
LIGHTNING = {"seed_everything": 1, "data.batch_size": 8, "trainer.devices": 4}
VERL = {
    "data.train_batch_size": 64,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 64,
    "actor_rollout_ref.actor.ppo_micro_batch_size": 32,
}


@pytest.mark.parametrize(
    ("name", "keys", "without", "cause"),
    [
        ("lightning", LIGHTNING | {"trainer.accumulate_grad_batches": 2, "trainer.val_check_interval": 100},
         "trainer.val_check_interval", "counts-micro-steps"),
        ("axolotl", {"base_model": "m", "micro_batch_size": 2, "batch_size": 8}, "batch_size", "deprecated-key"),
        ("verl", VERL, "actor_rollout_ref.actor.ppo_micro_batch_size", "deprecated-key"),
        ("lightning", LIGHTNING | {"trainer.callbacks": SCHEDULER}, "trainer.callbacks", "grows-by-epoch"),
        ("accelerate", {"compute_environment": "L", "num_processes": 4, "batch_size": 8}, "batch_size", "padded-batch"),
        ("maxtext", {"per_device_batch_size": 2, "gradient_accumulation_steps": 4}, "gradient_accumulation_steps",
         "rows-of-a-micro-batch"),
    ],
)  # fmt: skip
def test_findings_that_depend_on_one_key(name, keys, without, cause):
    assert cause in causes(checked(keys, name))
    assert cause not in causes(checked({key: value for key, value in keys.items() if key != without}, name))


def test_every_key_that_counts_the_first_batch_is_named():
    keys = {"micro_batch_size": 2, "seq_length": 8, "step_batch_size_schedule": "0:64 1M:128"}
    iters = {"lr_decay_iters": 100, "lr_warmup_iters": 10}
    found = [
        f for f in checked(keys | iters, "megatron-lm", devices=8).findings if f.cause == "steps-of-the-first-batch"
    ]
    assert {f.key for f in found} == set(iters)


def test_a_misspelt_key_is_not_passed_over_too():
    keys = {"micro_batch_size": 2, "global_batch_size": 64, "lr_warmup_sample": 10, "bf16": True}
    report = checked(keys, "megatron-lm", devices=8)
    assert "!misspelt-key" in causes(report) and report.reading.passed_over == ("bf16",)


def test_the_nearest_interval_has_its_unit():
    keys = {"global_train_batch_size": 64, "device_train_microbatch_size": 4, "save_interval": "100ba"}
    before, after = (reading(keys | {"global_train_batch_size": size}, devices=8) for size in (64, 128))
    [found] = [f for f in check(after, before).findings if f.cause == "not-changed-with-the-batch"]
    assert found.nearest == ("50ba",) and "save_interval=100ba is as before" in found.message
    assert job(after).steps["save"] == 100
