"""NeMo-RL: prompts and generations of a step in `grpo`, responses of an update and of a micro batch in `policy`."""

from __future__ import annotations

from typing import Any

from batchwright.core.errors import PlanError, either
from batchwright.core.fields import switch
from batchwright.core.numbers import count, nearest_divisors

from .record import Dialect, Fields, Finding, Given, Job, Reading, Version, by_default, error, note

_PROMPTS, _GROUP = "grpo.num_prompts_per_step", "grpo.num_generations_per_prompt"
_GLOBAL, _MICRO, _LOGPROB = (
    f"policy.{name}" for name in ("train_global_batch_size", "train_micro_batch_size", "logprob_batch_size")
)
_ASYNC, _AGE = "grpo.async_grpo.enabled", "grpo.async_grpo.max_trajectory_age_steps"
_TENSOR, _CONTEXT = "policy.dtensor_cfg.tensor_parallel_size", "policy.dtensor_cfg.context_parallel_size"
_MEGATRON = {
    "policy.megatron_cfg.tensor_model_parallel_size": "tensor_parallel",
    "policy.megatron_cfg.pipeline_model_parallel_size": "pipeline_parallel",
    "policy.megatron_cfg.context_parallel_size": "context_parallel",
}
_ON = "policy.megatron_cfg.enabled"
_TOKENS = ("policy.dynamic_batching.enabled", "policy.sequence_packing.enabled")


def _resolve(special: Fields, fields: Fields) -> tuple[Fields, list[str]]:
    """Updates per step, the ranks of the backend that is on, and the micro batch unless it counts tokens."""
    found: Fields = {}
    notes: list[str] = []
    megatron = _ON in special and switch(special[_ON].value, _ON)
    sizes = _MEGATRON if megatron else {_TENSOR: "tensor_parallel", _CONTEXT: "context_parallel"}
    for key, name in sizes.items():
        if key in special:
            found[name] = special[key]
    from . import ranks_of

    fields.pop("data_parallel_size", None)
    if ranks := ranks_of({**fields, **found}):
        found["data_parallel_size"] = ranks
    prompts, group, update = (special.get(key) for key in (_PROMPTS, _GROUP, _GLOBAL))
    for given, name in ((prompts, "prompts"), (group, "generations")):
        if given:
            found[name] = given
    if prompts and group and update:
        whole, size = count(prompts.value, _PROMPTS) * count(group.value, _GROUP), count(update.value, _GLOBAL)
        if whole % size:
            near = nearest_divisors(whole, size)
            raise PlanError(
                f"{_GLOBAL}={size} does not divide the {whole} responses of a step: {whole} / {size} = {whole / size:.2f}. "
                f"Nearest: {either(near)}.",
                field=_GLOBAL,
                given=size,
                nearest=near,
            )
        found["updates"] = Given(whole // size, f"{prompts.origin} and {update.origin}", update.level)
    if any(key in special and switch(special[key].value, key) for key in _TOKENS):
        notes.append(f"Micro batches are filled up to a number of tokens: {_MICRO} does not count.")
    elif _MICRO in special:
        found["train_micro_responses"] = special[_MICRO]
    if _ASYNC in special and switch(special[_ASYNC].value, _ASYNC):
        found["rounds_ahead"] = special.get(_AGE) or by_default(1, "NeMo-RL")
    return found, notes


def _check(reading: Reading) -> list[Finding]:
    found: list[Finding] = []
    tensor, micro, logprob = (reading.value(key) for key in (_TENSOR, _MICRO, _LOGPROB))
    if str(tensor or 1).isdigit() and int(str(tensor or 1)) >= 4 and logprob is not None and str(logprob) != str(micro):
        found.append(
            error(
                "excluded-key",
                f"{_LOGPROB}={logprob} must equal {_MICRO} {micro} with {_TENSOR}={tensor}: NeMo-RL refuses others from 4 on.",
                _LOGPROB,
                (micro,),
            )
        )
    if str(reading.value("grpo.batch_multiplier", 1)) not in ("1", "1.0") and not reading.on(
        "grpo.use_dynamic_sampling"
    ):
        found.append(
            error(
                "excluded-key",
                "grpo.batch_multiplier above 1 needs grpo.use_dynamic_sampling.",
                "grpo.batch_multiplier",
                (1,),
            )
        )
    if _MICRO not in reading.given and not any(reading.on(key) for key in _TOKENS):
        found.append(note("missing-key", f"{_MICRO} is not given.", _MICRO))
    return found


def _write(job: Job, version: Version) -> dict[str, Any]:
    whole = job.get("prompts") * job.get("generations") // job.get("updates", 1)
    made = {
        _PROMPTS: job.get("prompts"),
        _GROUP: job.get("generations"),
        _GLOBAL: whole,
        **job.named({_MICRO: "train_micro_responses"}),
    }
    if "train_micro_responses" not in job.numbers:
        made[_TOKENS[0]] = True
    names = {"nodes": "cluster.num_nodes", "devices_per_node": "cluster.gpus_per_node"}
    made |= {names[name]: number for name, number in job.placed().items()}
    if job.get("pipeline_parallel", 1) > 1:
        made |= {_ON: True, **job.named(_MEGATRON)}
    else:
        made |= job.named({_TENSOR: "tensor_parallel", _CONTEXT: "context_parallel"})
    if job.get("rounds_ahead"):
        made |= {_ASYNC: True, _AGE: job.get("rounds_ahead")}
    return made


DIALECTS = (
    Dialect(
        name="nemo-rl",
        title="NeMo-RL",
        kind="rl",
        keys={"cluster.num_nodes": "nodes", "cluster.gpus_per_node": "devices_per_node"},
        special=frozenset(
            {_PROMPTS, _GROUP, _GLOBAL, _MICRO, _ASYNC, _AGE, _TENSOR, _CONTEXT, _ON, *_MEGATRON, *_TOKENS}
        ),
        resolve=_resolve,
        signs=("grpo.", "policy.train_global_batch_size", "cluster.gpus_per_node"),
        programs=("run_grpo",),
        checked=frozenset({_LOGPROB, "grpo.batch_multiplier", "grpo.use_dynamic_sampling"}),
        counts_rounds=True,
        steps={"grpo.max_num_steps": "budget", "grpo.val_period": "eval", "checkpointing.save_period": "save"},
        check=_check,
        write=_write,
        has_world=True,
        unit="prompts",
        source="NeMo-RL 7ea279abf: examples/configs/grpo_math_1B.yaml, algorithms/grpo.py",
    ),
)
