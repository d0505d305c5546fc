"""verl: prompts in `data.train_batch_size` and `ppo_mini_batch_size`, responses per GPU in the micro batch."""

from __future__ import annotations

from typing import Any

from batchwright.core.errors import ConfigError, Violation, either, raise_violations
from batchwright.core.fields import switch
from batchwright.core.numbers import count, divisors, nearest_multiples, nearest_of

from .record import Dialect, Fields, Finding, Given, Job, Reading, Version, by_default, error, note, origins

_ROUND = "data.train_batch_size"
_ACTOR = "actor_rollout_ref.actor"
_MINI, _MICRO, _OLD = (
    f"{_ACTOR}.{name}" for name in ("ppo_mini_batch_size", "ppo_micro_batch_size_per_gpu", "ppo_micro_batch_size")
)
_DYNAMIC, _BUDGET = f"{_ACTOR}.use_dynamic_bsz", f"{_ACTOR}.ppo_max_token_len_per_gpu"
_GROUP = "actor_rollout_ref.rollout.n"
_ULYSSES = f"{_ACTOR}.fsdp_config.ulysses_sequence_parallel_size"
_MEGATRON = {
    f"{_ACTOR}.megatron.tensor_model_parallel_size": "tensor_parallel",
    f"{_ACTOR}.megatron.pipeline_model_parallel_size": "pipeline_parallel",
    f"{_ACTOR}.megatron.context_parallel_size": "context_parallel",
}


def _resolve(special: Fields, fields: Fields) -> tuple[Fields, list[str]]:
    """Updates per round, and the micro batch of a rank."""
    found: Fields = {}
    notes: list[str] = []
    wrong: list[Violation] = []
    given = special.get(_ROUND) or by_default(1024, "verl")
    mini = special.get(_MINI) or by_default(256, "verl")
    prompts, per_update = count(given.value, _ROUND), count(mini.value, _MINI)
    found["prompts"] = given
    if prompts % per_update:
        near = nearest_of(divisors(prompts), per_update)
        what = f"{_ROUND}={prompts} must be at least {_MINI} {per_update}"
        if prompts > per_update:
            what = (
                f"smaller last update: verl accepts {_ROUND}={prompts} with {_MINI} {per_update}, and the last update of a round "
                f"then has {prompts % per_update} prompts only"
            )
        wrong.append(
            Violation(
                f"{what}: {prompts} / {per_update} = {prompts / per_update:.2f} updates. Nearest: {either(near)} for {_MINI}.",
                _MINI,
                per_update,
                near,
            )
        )
        raise_violations(ConfigError, wrong)
    found["updates"] = Given(prompts // per_update, origins(given, mini), max(given.level, mini.level))
    if _DYNAMIC in special and switch(special[_DYNAMIC].value, _DYNAMIC):
        notes.append(
            f"{_DYNAMIC}: micro batches are filled up to {_BUDGET.rpartition('.')[2]} tokens, so their number of responses "
            "changes from step to step."
        )
        return found, notes
    if _MICRO in special:
        found["train_micro_responses"] = special[_MICRO]
    elif _OLD in special:
        ranks = count(fields["data_parallel_size"].value, "data_parallel_size") if "data_parallel_size" in fields else 1
        whole = count(special[_OLD].value, _OLD)
        if whole % ranks:
            near = nearest_multiples(ranks, whole)
            raise ConfigError(
                f"{_OLD}={whole} counts the responses of all GPUs: {whole} / {ranks} ranks = {whole / ranks:.2f}. Nearest: "
                f"{either(near)}.",
                field=_OLD,
                given=whole,
                nearest=near,
            )
        found["train_micro_responses"] = Given(whole // ranks, special[_OLD].origin, special[_OLD].level)
    return found, notes


def _check(reading: Reading) -> list[Finding]:
    found: list[Finding] = []
    dynamic = reading.on(_DYNAMIC)
    if _MICRO in reading.given and _OLD in reading.given:
        found.append(error("excluded-key", f"{_OLD} and {_MICRO}: verl refuses both. Leave the first out.", _OLD))
    elif _OLD in reading.given:
        found.append(note("deprecated-key", f"{_OLD} is deprecated: give {_MICRO}.", _OLD))
    if not dynamic and not {_MICRO, _OLD} & set(reading.given):
        found.append(
            error(
                "missing-key",
                f"{_MICRO} is not given, and {_DYNAMIC} is not true: verl needs one of them.",
                _MICRO,
            )
        )
    if dynamic and (key := reading.first(_MICRO, _OLD)):
        found.append(note("ignored-key", f"{key}={reading.value(key)} has no effect with {_DYNAMIC}=true.", key))
    return found


def _write(job: Job, version: Version) -> dict[str, Any]:
    updates = job.get("updates", 1)
    made = {
        _ROUND: job.get("prompts"),
        _MINI: job.get("prompts") // updates,
        **job.named({_MICRO: "train_micro_responses", _GROUP: "generations"}),
    }
    if "train_micro_responses" not in job.numbers:
        made[_DYNAMIC] = True
    if job.get("iterations", 1) > 1:
        made[f"{_ACTOR}.ppo_epochs"] = job.get("iterations")
    names = {"nodes": "trainer.nnodes", "devices_per_node": "trainer.n_gpus_per_node"}
    made |= {names[name]: number for name, number in job.placed().items()}
    if job.get("tensor_parallel", 1) > 1 or job.get("pipeline_parallel", 1) > 1:
        return made | job.named(_MEGATRON)
    return made | job.named({_ULYSSES: "context_parallel"})


DIALECTS = (
    Dialect(
        name="verl",
        title="verl",
        kind="rl",
        keys={
            _GROUP: "generations",
            f"{_ACTOR}.ppo_epochs": "iterations",
            "trainer.nnodes": "nodes",
            "trainer.n_gpus_per_node": "devices_per_node",
            _ULYSSES: "context_parallel",
            f"{_ACTOR}.ulysses_sequence_parallel_size": "context_parallel",  # deprecated
            **_MEGATRON,
        },
        special=frozenset({_ROUND, _MINI, _MICRO, _OLD, _DYNAMIC}),
        resolve=_resolve,
        signs=("actor_rollout_ref.", "algorithm.adv_estimator", "trainer.n_gpus_per_node"),
        programs=("verl",),
        checked=frozenset({_BUDGET}),
        counts_rounds=True,
        # The schedule of the learning rate steps with the last update of a round (workers/engine_workers.py).
        steps={
            "trainer.total_training_steps": "budget",
            "trainer.save_freq": "save",
            "trainer.test_freq": "eval",
            f"{_ACTOR}.optim.lr_warmup_steps": "warmup",
        },
        defaults={
            _ROUND: 1024,
            _MINI: 256,
            _GROUP: 1,
            "trainer.nnodes": 1,
            "trainer.n_gpus_per_node": 8,
        },
        check=_check,
        write=_write,
        form="keys",
        has_world=True,
        unit="prompts",
        source="verl 0.9.1: utils/config.py, workers/config/actor.py, trainer/config",
    ),
)
