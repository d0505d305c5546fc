"""The rule that every framework has in its own words: the global batch is a whole number of micro batches on every rank."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.dialects.configurations import checked
from tests.examples import many

LENGTH = 64
# The keys of the micro batch and of the global one, and in which units they count.
PAIRS = {
    "megatron-lm": ("micro_batch_size", "global_batch_size", 1),
    "megatron-bridge": ("train.micro_batch_size", "train.global_batch_size", 1),
    "nemo@1": ("model.micro_batch_size", "model.global_batch_size", 1),
    "nemo@2": ("data.micro_batch_size", "data.global_batch_size", 1),
    "deepspeed": ("train_micro_batch_size_per_gpu", "train_batch_size", 1),
    "gpt-neox": ("train_micro_batch_size_per_gpu", "train_batch_size", 1),
    "levanter": ("trainer.per_device_parallelism", "trainer.train_batch_size", 1),
    "llama-factory@1": ("micro_batch_size", "global_batch_size", 1),
    "torchtitan@0.3": ("training.local_batch_size", "training.global_batch_size", 1),
    "torchtitan": ("training.num_tokens_per_microbatch_per_dp_rank", "training.num_tokens_per_train_step", LENGTH),
    "olmo-core": ("train_module.rank_microbatch_size", "data_loader.global_batch_size", LENGTH),
}
LENGTHS = {"torchtitan": "training.max_context_length", "olmo-core": "train_module.max_sequence_length"}


@pytest.mark.parametrize("name", PAIRS)
@settings(deadline=None, max_examples=many(120))
@given(micro=st.integers(1, 12), ranks=st.integers(1, 16), batch=st.integers(1, 400))
def test_a_batch_divides_or_is_an_error_whose_nearest_values_divide(name, micro, ranks, batch):
    small, large, unit = PAIRS[name]
    keys = {small: micro * unit, large: batch * unit} | ({LENGTHS[name]: LENGTH} if name in LENGTHS else {})
    report = checked(keys, name, devices=ranks)
    assert report.ok == (batch % (micro * ranks) == 0)
    if report.ok:
        assert report.job.get("accumulation_steps") == batch // (micro * ranks)
        return
    [wrong] = [finding for finding in report.findings if finding.severity == "error"]
    assert wrong.cause == "batch" and wrong.nearest
    for near in wrong.nearest:  # in samples
        assert near % (micro * ranks) == 0
        assert checked(keys | {large: near * unit}, name, devices=ranks).ok


@settings(deadline=None, max_examples=many(200))
@given(
    micro=st.sampled_from([1, 2, 4, 8]),
    steps=st.sampled_from([1, 2, 4]),
    group=st.integers(2, 12),
    world=st.sampled_from([1, 2, 4, 8]),
)
def test_trl_needs_whole_groups_in_a_generation_batch(micro, steps, group, world):
    keys = {"per_device_train_batch_size": micro, "gradient_accumulation_steps": steps, "num_generations": group}
    report = checked(keys, "trl-grpo", devices=world)
    assert report.ok == (micro * steps * world % group == 0)


@settings(deadline=None, max_examples=many(200))
@given(
    prompts=st.integers(1, 64),
    mini=st.integers(1, 64),
    micro=st.integers(1, 8),
    group=st.integers(1, 8),
    gpus=st.sampled_from([1, 2, 4, 8]),
)
def test_verl_needs_whole_updates_and_whole_micro_batches(prompts, mini, micro, group, gpus):
    actor = {"ppo_mini_batch_size": mini, "ppo_micro_batch_size_per_gpu": micro}
    keys = {
        "data": {"train_batch_size": prompts},
        "actor_rollout_ref": {"actor": actor, "rollout": {"n": group}},
        "trainer": {"nnodes": 1, "n_gpus_per_node": gpus},
    }
    whole = prompts % mini == 0 and mini * group % gpus == 0 and mini * group // gpus % micro == 0
    assert checked(keys, "verl").ok == whole
