"""OpenRLHF: prompts in the rollout batch, responses in the training batch; flags with dots since 0.10, flat ones before."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from batchwright.core.errors import PlanError, either
from batchwright.core.fields import switch
from batchwright.core.numbers import count, nearest_divisors

from .record import NEWEST, Dialect, Fields, Finding, Given, Job, Reading, Version, by_default, error, origins

_DOTTED: Version = (0, 10)
# The key with dots, the flat one, and the field.
_NAMES = (
    ("rollout.batch_size", "rollout_batch_size", "prompts"),
    ("rollout.n_samples_per_prompt", "n_samples_per_prompt", "generations"),
    ("train.micro_batch_size", "micro_train_batch_size", "train_micro_responses"),
    ("train.max_epochs", "max_epochs", "iterations"),
    ("actor.num_nodes", "actor_num_nodes", "nodes"),
    ("actor.num_gpus_per_node", "actor_num_gpus_per_node", "devices_per_node"),
    ("ds.tensor_parallel_size", "ds_tensor_parallel_size", "tensor_parallel"),
    ("ds.ring_attn_size", "ring_attn_size", "context_parallel"),
)
_TRAIN = ("train.batch_size", "train_batch_size")
_ASYNC, _QUEUE = ("train.async_enable", "async_train"), ("train.async_queue_size", "async_queue_size")
_DYNAMIC = ("train.dynamic_batch_enable", "use_dynamic_batch")
_MICRO = ("rollout.micro_batch_size", "micro_rollout_batch_size")
_OVER = ("rollout.vllm_generate_batch_size", "vllm_generate_batch_size")
_ESTIMATOR = ("algo.advantage.estimator", "advantage_estimator")
_GROUPS = ("rloo", "reinforce_baseline", "group_norm", "dr_grpo")


def _resolve(special: Fields, fields: Fields) -> tuple[Fields, list[str]]:
    """Updates per round are the responses of a rollout, divided by the training batch."""
    found: Fields = {}
    notes: list[str] = []

    def given(names: tuple[str, str]) -> Given | None:
        return next((special[name] for name in names if name in special), None)

    train = given(_TRAIN) or by_default(128, "OpenRLHF")
    prompts, group = (fields.get(name) for name in ("prompts", "generations"))
    if prompts is not None:
        size = count(train.value, "train_batch_size")
        whole = count(prompts.value, "rollout_batch_size") * (
            count(group.value, "n_samples_per_prompt") if group else 1
        )
        if whole % size:
            near = nearest_divisors(whole, size)
            raise PlanError(
                f"train_batch_size={size} does not divide the {whole} responses of a rollout: {whole} / {size} = "
                f"{whole / size:.2f}, and OpenRLHF drops the rest. Nearest: {either(near)}.",
                field="train_batch_size",
                given=size,
                nearest=near,
            )
        found["updates"] = Given(whole // size, origins(prompts, train), train.level)
    ahead = given(_ASYNC)
    if ahead and switch(ahead.value, _ASYNC[0]):
        found["rounds_ahead"] = given(_QUEUE) or by_default(1, "OpenRLHF")
    dynamic = given(_DYNAMIC)
    if dynamic and switch(dynamic.value, _DYNAMIC[0]):
        fields.pop("train_micro_responses", None)
        notes.append("Micro batches are filled up to a number of tokens: their number of responses changes.")
    return found, notes


def _check(reading: Reading) -> list[Finding]:
    found: list[Finding] = []
    estimator, group = reading.first(*_ESTIMATOR), reading.first("rollout.n_samples_per_prompt", "n_samples_per_prompt")
    if estimator and reading.value(estimator) in _GROUPS and str(reading.value(group or "", 1)) == "1":
        found.append(
            error(
                "one-generation",
                f"{estimator}={reading.value(estimator)} needs n_samples_per_prompt above 1: with one response, "
                "every advantage is 0.",
                group or estimator,
                (2,),
            )
        )
    over, whole = reading.first(*_OVER), reading.first("rollout.batch_size", "rollout_batch_size")
    ahead = reading.first(*_ASYNC)
    asynchronous = ahead is not None and reading.on(ahead)
    if over and not asynchronous:
        size, prompts = str(reading.value(over)), str(reading.value(whole or "", 1024))
        if size.isdigit() and prompts.isdigit() and int(size) > int(prompts):
            found.append(
                error(
                    "excluded-key",
                    f"{over}={size} above rollout_batch_size {prompts} needs asynchronous training.",
                    over,
                    (int(prompts),),
                )
            )
    return found


_PAIRS = (
    *(names[:2] for names in _NAMES), _TRAIN, _ASYNC, _QUEUE, _DYNAMIC, _MICRO, _OVER, _ESTIMATOR,
    ("ckpt.save_steps", "save_steps"), ("eval.steps", "eval_steps"), ("logger.logging_steps", "logging_steps"),
)  # fmt: skip


def _version_of(keys: Collection[str]) -> Version:
    return (0, 9) if {flat for _, flat in _PAIRS} & set(keys) else NEWEST


def _write(job: Job, version: Version) -> dict[str, Any]:
    at = 1 if version < _DOTTED else 0
    placed = job.placed()
    made = job.named({names[at]: names[2] for names in _NAMES if names[2] not in placed})
    made |= {names[at]: placed[names[2]] for names in _NAMES if names[2] in placed}
    made[_TRAIN[at]] = job.get("prompts") * job.get("generations") // job.get("updates", 1)
    if "train_micro_responses" not in job.numbers:
        made[_DYNAMIC[at]] = True
    if job.get("rounds_ahead"):
        made |= {_ASYNC[at]: True, _QUEUE[at]: job.get("rounds_ahead")}
    return made


DIALECTS = (
    Dialect(
        name="openrlhf",
        title="OpenRLHF",
        kind="rl",
        keys={key: name for dotted, flat, name in _NAMES for key in (dotted, flat)},
        special=frozenset({*_TRAIN, *_ASYNC, *_QUEUE, *_DYNAMIC}),
        resolve=_resolve,
        common=frozenset({"train_batch_size", "max_epochs", "train.batch_size", "train.micro_batch_size"}),
        signs=("rollout.batch_size", "rollout_batch_size", "micro_rollout_batch_size", "actor.num_gpus_per_node"),
        programs=("openrlhf", "train_ppo_ray"),
        checked=frozenset({*_MICRO, *_OVER, *_ESTIMATOR}),
        counts_rounds=True,
        # A step of these is a rollout (trainer/ppo_trainer.py: train_step).
        steps={
            "ckpt.save_steps": "save",
            "save_steps": "save",
            "eval.steps": "eval",
            "eval_steps": "eval",
            "logger.logging_steps": "log",
            "logging_steps": "log",
        },
        defaults={
            "rollout.batch_size": 1024,
            "rollout.n_samples_per_prompt": 1,
            "train.micro_batch_size": 1,
            "actor.num_nodes": 1,
            "actor.num_gpus_per_node": 8,
        },
        versions=("0.9", "0.10"),
        since={dotted: _DOTTED for dotted, _ in _PAIRS},
        until={flat: _DOTTED for _, flat in _PAIRS},
        version_of=_version_of,
        check=_check,
        write=_write,
        form="flags",
        has_world=True,
        unit="prompts",
        source="openrlhf 0.9.10 and 0.11.2: cli/train_ppo_ray.py, utils/deepspeed/deepspeed.py",
    ),
)
