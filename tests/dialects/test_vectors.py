"""The frameworks' own answers, recorded by oracles.py, against what batchwright reads.

A case that batchwright refuses and the framework accepts, or the reverse, is a deliberate difference: each has a row in the
table of docs/convert.md, and here a place that says which.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from batchwright.core.errors import PlanError
from batchwright.dialects import huggingface
from batchwright.dialects.checking import check
from batchwright.dialects.reading import job
from tests.dialects.configurations import causes, checked, reading

VECTORS = Path(__file__).parents[1] / "vectors" / "frameworks"


def vectors(name: str) -> list[dict[str, Any]]:
    record = json.loads((VECTORS / f"{name}.json").read_text(encoding="utf-8"))
    assert record["package"] and record["version"] and record["made_by"] == "tests/dialects/oracles.py"
    return record["cases"]


def stages(made: Any) -> list[list[int]]:
    schedule = made.schedule
    if schedule is None:
        return [[0, made.get("global_batch_size")]]
    return [[segment.first_step, segment.global_batch_size] for segment in schedule.segments]


def test_megatrons_linear_ramp():
    """One difference on purpose: where Megatron's float division is a step late, `check` says so."""
    late = 0
    for case in vectors("megatron_linear"):
        keys = {
            "micro_batch_size": case["micro"],
            "global_batch_size": case["target"],
            "rampup_batch_size": [case["start"], case["increment"], case["samples"]],
        }
        report = checked(keys, "megatron-lm@0.16", data_parallel_size=case["ranks"])
        if "refused" in case:
            assert not report.ok, case
            continue
        if not report.ok:  # Megatron checks the stages it reaches: one that a step jumps over is never checked
            assert causes(report) & {"!stage", "!batch"}, case
            assert {size for _, size in case["result"]} < set(
                range(case["start"], case["target"] + 1, case["increment"])
            )
            continue
        if stages(report.job) != case["result"]:
            late += 1
            assert "float-boundary" in causes(report), case
    assert late >= 1  # 32, 8, 9384 to 88 is one


def test_megatrons_constant_batch():
    for case in vectors("megatron_constant"):
        keys = {"micro_batch_size": case["micro"], "global_batch_size": case["batch"]}
        keys |= {"decrease_batch_size_if_needed": case["shrink"]}
        report = checked(keys, "megatron-lm", data_parallel_size=case["ranks"])
        assert report.ok == ("result" in case), case
        if report.ok:
            made = report.job
            assert [made.get("accumulation_steps"), made.get("global_batch_size")] == case["result"], case


def test_megatrons_step_schedule():
    *cases, takes = vectors("megatron_steps")
    assert takes == {"takes_rampup_batch_size": False}  # the triple is not read any more
    for case in cases:
        keys = {"micro_batch_size": case["micro"], "seq_length": case["length"]}
        keys |= {"step_batch_size_schedule": case["schedule"]}
        report = checked(keys, "megatron-lm", data_parallel_size=case["ranks"])
        assert report.ok == ("result" in case), (case, report.findings)
        if report.ok:
            assert stages(report.job) == case["result"], case


def test_deepspeeds_three_numbers():
    names = ("global_batch_size", "micro_batch_size", "accumulation_steps")
    for case in vectors("deepspeed"):
        report = checked(case["keys"] | {"zero_optimization": {"stage": 1}}, "deepspeed", devices=case["world"])
        assert report.ok == ("result" in case), (case, report.findings)
        if report.ok:
            assert [report.job.get(name) for name in names] == case["result"], case


def test_levanters_schedule():
    for case in vectors("levanter"):
        made = job(reading({"trainer": {"train_batch_size": case["train_batch_size"]}}, "levanter"))
        for step, size, offset in case["result"]:
            if made.schedule is None:
                assert size == made.get("global_batch_size")
            else:
                at = made.schedule.at_step(step)
                assert (at.global_batch_size, at.start_sample) == (size, offset), case


def test_olmo_core_waits_for_whole_factors():
    """Its own callback and its own data loader, step by step."""
    for case in vectors("olmo_core"):
        starts = [{"value": value, "unit": case["unit"]} for value in case["starts"]]
        ramp = {"batch_sizes": case["sizes"], "schedule": starts}
        keys = {
            "data_loader": {"global_batch_size": case["sizes"][0]},
            "train_module": {"max_sequence_length": 1},
            "trainer": {"callbacks": {"batch_size_scheduler": ramp}},
        }
        try:
            made = job(reading(keys, "olmo-core"))
        except PlanError:
            assert "refused" in case, case
            continue
        assert "result" in case and stages(made) == case["result"], case


def test_llm_foundrys_micro_batches():
    for case in vectors("llm_foundry"):
        keys = {name: case[name] for name in ("global_train_batch_size", "device_train_microbatch_size")}
        report = checked(keys, "composer", devices=case["world"])
        assert report.ok == ("result" in case), (case, report.findings)
        if report.ok:
            share, micro, steps = case["result"]
            made = report.job
            assert made.get("global_batch_size") == share * case["world"]
            assert (made.get("micro_batch_size"), made.get("accumulation_steps")) == (micro, steps), case


def test_axolotls_rules():
    """One difference on purpose: a batch_size that is no multiple of the micro batch is refused, and rounded down there."""
    for case in vectors("axolotl"):
        report = checked(case["keys"] | {"base_model": "m"}, "axolotl", devices=case["gpus"])
        if "result" in case and not report.ok:
            keys = case["keys"]
            assert keys["batch_size"] % keys.get("micro_batch_size", 1), (case, report.findings)
        else:
            assert report.ok == ("result" in case), (case, report.findings)


def test_verls_rules():
    """Differences on purpose: a last mini batch that is smaller, and updates that the ranks do not divide, are refused."""
    for case in vectors("verl"):
        actor = {"ppo_mini_batch_size": case["mini"]}
        if case["micro"] is not None:
            actor["ppo_micro_batch_size"] = case["micro"]
        keys = {
            "data": {"train_batch_size": case["train"]},
            "actor_rollout_ref": {"actor": actor, "rollout": {"n": 1}},
            "trainer": {"nnodes": 1, "n_gpus_per_node": case["gpus"]},
        }
        report = check(reading(keys, "verl"))
        wrong = {f.cause for f in report.findings if f.severity == "error"} - {
            "missing-key"
        }  # the old key may be absent here
        if "refused" in case:
            assert wrong, case
        elif wrong:
            assert case["train"] % case["mini"] or case["mini"] % case["gpus"], (case, report.findings)
        else:
            made = report.job
            assert (made.get("prompts"), made.get("updates")) == (case["train"], case["train"] // case["mini"])
            each = None if case["micro"] is None else case["micro"] // case["gpus"]  # the old key counts all GPUs
            assert made.get("train_micro_responses") == each, case


def test_torchtitans_accumulation_and_defaults():
    names = ("global_batch_size", "micro_batch_size", "accumulation_steps")
    for case in vectors("torchtitan"):
        report = checked({"training": case["training"]}, "torchtitan@0.3", data_parallel_size=case["ranks"])
        assert report.ok == ("result" in case), (case, report.findings)
        if report.ok:
            assert [report.job.get(name) for name in names] == case["result"], case


def test_llama_factorys_micro_batches():
    for case in vectors("llama_factory"):
        keys = {"micro_batch_size": case["micro"], "global_batch_size": case["batch"]}
        keys = {key: value for key, value in keys.items() if value is not None}
        report = checked(keys, "llama-factory@1", data_parallel_size=case["ranks"])
        assert report.ok == ("result" in case), (case, report.findings)
        if report.ok:
            assert [report.job.get("global_batch_size"), report.job.get("accumulation_steps")] == case["result"], case


def test_transformers_defaults_and_numbers():
    for case in vectors("transformers"):
        made = job(reading(case["keys"], "huggingface"))
        assert [made.get("micro_batch_size"), made.get("accumulation_steps")] == case["result"][:2]
        assert case["result"][2] is True  # average_tokens_across_devices, the default that `check` relies on


def test_tunixs_accumulation():
    """MaxText trains with tunix: micro batches of prompts, over all ranks."""
    for case in vectors("tunix"):
        keys = {"batch_size": case["batch"], "rl.num_generations": 2, "train_micro_batch_size": case["micro"]}
        report = checked({key: value for key, value in keys.items() if value is not None}, "maxtext-rl")
        assert report.ok == ("result" in case), (case, report.findings)
        if report.ok:
            responses = case["batch"] * 2
            assert report.job.get("train_micro_responses") * (case["result"] or 1) == responses, case


def test_trls_generation_batches():
    """One difference on purpose: an update that learns from two rounds is refused, and accepted there."""
    for case in vectors("trl"):
        report = checked(case["keys"] | {"use_vllm": False}, "trl-grpo", devices=case["world"])
        if "refused" in case:
            assert not report.ok, case
            continue
        responses, every, group = case["result"]
        if not report.ok:
            splits = (responses // group) % max(1, every // case["keys"]["gradient_accumulation_steps"])
            assert every % case["keys"]["gradient_accumulation_steps"] or splits, (case, report.findings)
            continue
        made = report.job
        assert (made.get("prompts") * group, made.get("generations")) == (responses, group), case


UNKNOWN = {
    # Inherited from transformers.
    "keys_llamafactory": {*huggingface.KEYS, *huggingface.CHECKED, "accelerator_config.split_batches"},
    # Names of versions other than the one that was installed.
    "keys_torchtitan": {
        "parallelism.num_pp_microbatches",
        "training.max_context_length",
        "training.num_tokens_per_microbatch_per_dp_rank",
        "training.num_tokens_per_train_step",
        "experimental.pipeline_parallel_microbatches",
    },
    "keys_megatron_bridge": {"train.step_batch_size_schedule"},  # of the core that later versions require
}


@pytest.mark.parametrize("name", sorted(path.stem for path in VECTORS.glob("keys_*.json")))
def test_the_frameworks_know_the_keys(name):
    missing = {case["key"] for case in vectors(name) if not case["known"]}
    assert missing <= UNKNOWN.get(name, set()) | FLAT.get(name, set()) | {"per_gpu_train_batch_size"}


# OpenRLHF before 0.10, whose names had no dots; some are not words of the newer files.
FLAT = {
    "keys_openrlhf": {
        "actor_num_gpus_per_node", "actor_num_nodes", "advantage_estimator", "async_queue_size", "async_train",
        "ds_tensor_parallel_size", "eval_steps", "max_epochs", "micro_rollout_batch_size", "micro_train_batch_size",
        "n_samples_per_prompt", "ring_attn_size", "rollout_batch_size", "save_steps", "train_batch_size",
        "use_dynamic_batch", "vllm_generate_batch_size",
    }
}  # fmt: skip
