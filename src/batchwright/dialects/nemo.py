"""NeMo: `data.micro_batch_size` (2.0), `model.micro_batch_size` (1.x), `training.…` (its launcher), and recipes.

NeMo derives accumulation itself, as global / (micro × ranks); `trainer.accumulate_grad_batches` must be 1.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, MutableMapping
from typing import Any, cast

from batchwright.core.batch.plan import BatchPlan
from batchwright.core.errors import ConfigError

from . import megatron
from .record import NEWEST, Dialect, Fields, Finding, Job, Reading, Version, error, note

_PARALLEL = {**megatron.PARALLEL, "virtual_pipeline_model_parallel_size": "virtual_stages"}

_PLAIN = {
    "data.micro_batch_size": "micro_batch_size",
    "data.global_batch_size": "global_batch_size",
    "data.seq_length": "sequence_length",
    "model.micro_batch_size": "micro_batch_size",
    "model.global_batch_size": "global_batch_size",
    "model.encoder_seq_length": "sequence_length",
    "data.rampup_batch_size": "linear",
    "model.rampup_batch_size": "linear",
    "trainer.num_nodes": "nodes",
    "trainer.devices": "devices_per_node",
    **{f"trainer.strategy.{theirs}": ours for theirs, ours in _PARALLEL.items()},
    **{f"model.{theirs}": ours for theirs, ours in _PARALLEL.items()},
}

_ACCUMULATE = "trainer.accumulate_grad_batches"


def _resolve(special: Fields, fields: Fields) -> tuple[Fields, list[str]]:
    given = special.get(_ACCUMULATE) or special.get(f"training.{_ACCUMULATE}")
    if given is None:
        return {}, []
    note = f"NeMo derives accumulation itself, as global / (micro × ranks): {_ACCUMULATE} must be 1 there."
    world_known = "data_parallel_size" in fields or "devices" in fields or {"nodes", "devices_per_node"} <= set(fields)
    if str(given.value) == "1" and world_known:
        return {}, [note]
    if str(given.value) != "1":
        note += f" In NeMo {given.value} would multiply the batch; here it is accumulation_steps."
    else:
        note += " The number of devices is not given, so it is read as accumulation_steps=1."
    return {"accumulation_steps": given}, [note]


def _check(reading: Reading) -> list[Finding]:
    """NeMo multiplies the batch by accumulate_grad_batches, and stops at every change of a ramp's batch."""
    key = reading.first(_ACCUMULATE, f"training.{_ACCUMULATE}")
    means = note(
        "mean-of-means",
        "NeMo trains with Megatron, whose calculate_per_token_loss is false by default: the gradient is a mean of the micro "
        "batches' means.",
    )
    late: list[Finding] = []
    if triple := reading.first(*(key for key, name in DIALECTS[0].keys.items() if name == "linear")):
        batch = triple.replace("rampup_batch_size", "global_batch_size")
        late = megatron.ignored_triple(
            reading, triple, batch, "", ignored=False
        )  # NeMo counts with Megatron's calculator
    if key is None or str(reading.value(key)) == "1":
        return [means, *late]
    return [
        means,
        *late,
        error(
            "accumulates-twice",
            f"{key}={reading.value(key)} must be 1: NeMo derives accumulation itself, as global / (micro × ranks), and this "
            "key would multiply the batch.",
            key,
            (1,),
        ),
    ]


_BATCH = ("micro_batch_size", "global_batch_size", "rampup_batch_size")
_OLD = tuple(f"{start}model.{name}" for start in ("", "training.") for name in (*_BATCH, "encoder_seq_length"))
_NEW = tuple(f"{start}data.{name}" for start in ("", "training.") for name in (*_BATCH, "seq_length"))


def _version_of(keys: Collection[str]) -> Version:
    old = any(key.removeprefix("training.") in ("model.micro_batch_size", "model.global_batch_size") for key in keys)
    return (1,) if old else NEWEST


def _write(job: Job, version: Version) -> dict[str, Any]:
    """The keys of NeMo 2, or with version 1 those of megatron_gpt_config.yaml."""
    batch, parallel = ("model", "model") if version < (2,) else ("data", "trainer.strategy")
    length = "model.encoder_seq_length" if version < (2,) else "data.seq_length"
    job.need("global_batch_size", "NeMo counts the global batch over all devices")
    made = job.named(
        {
            f"{batch}.micro_batch_size": "micro_batch_size",
            f"{batch}.global_batch_size": "global_batch_size",
            length: "sequence_length",
            **{f"{parallel}.{theirs}": ours for theirs, ours in _PARALLEL.items()},
        }
    )
    from .ramps import micro_of_all_stages, triple

    names = {"nodes": "trainer.num_nodes", "devices_per_node": "trainer.devices"}
    made |= {names[name]: number for name, number in job.placed().items()}
    if ramp := triple(job):
        made |= {f"{batch}.rampup_batch_size": list(ramp), f"{batch}.micro_batch_size": micro_of_all_stages(job)}
    if "warmup" in job.steps:
        warmup = "model.optim.sched.warmup_steps" if version < (2,) else "optim.lr_scheduler.warmup_steps"
        made[warmup] = job.steps["warmup"]
    return made | {_ACCUMULATE: 1}


_STEPS = {
    "trainer.max_steps": "budget",
    "trainer.val_check_interval": "eval",
    "trainer.log_every_n_steps": "log",
    "model.optim.sched.warmup_steps": "warmup",
    "optim.lr_scheduler.warmup_steps": "warmup",
}
_TRAINER = frozenset({"trainer.num_nodes", "trainer.devices"})  # Lightning has them, too

DIALECTS = (
    Dialect(
        name="nemo",
        title="NeMo",
        aliases=("nemo-framework", "nemo-toolkit"),
        keys=_PLAIN | {f"training.{key}": ours for key, ours in _PLAIN.items()},
        special=frozenset({_ACCUMULATE, f"training.{_ACCUMULATE}"}),
        resolve=_resolve,
        signs=("exp_manager.", "training.trainer.", "trainer.strategy.tensor_model_parallel_size"),
        programs=("nemo", "megatron_gpt_pretraining"),
        steps=_STEPS | {f"training.{key}": role for key, role in _STEPS.items()},
        defaults={"trainer.num_nodes": 1},
        versions=("1", "2"),
        since=dict.fromkeys(_NEW, (2,)),
        until=dict.fromkeys(_OLD, (2,)),
        version_of=_version_of,
        check=_check,
        write=_write,
        form="keys",
        has_world=True,
        source="NeMo 2.4: megatron_gpt_config.yaml, lightning/pytorch/plugins/data_sampler.py",
    ),
)


_FACTORY = {"num_nodes": "trainer.num_nodes", "num_gpus_per_node": "trainer.devices"}


def factory(text: str) -> list[str]:
    """The nodes and devices in the arguments of a recipe's factory, as keys.

    >>> factory("llama3_8b(num_nodes=128, name='x')")
    ['trainer.num_nodes=128']
    """
    return [
        f"{_FACTORY[name]}={number}" for name, number in re.findall(r"\b(\w+)\s*=\s*(\d+)", text) if name in _FACTORY
    ]


def read_recipe(recipe: object) -> dict[str, Any]:
    """The dotted keys that are set in a recipe, which is any object with NeMo's attributes."""
    if all(_get(recipe, part) is None for part in ("data", "model", "trainer")):
        hint = " Call it first." if callable(recipe) else " A mapping of keys works too."
        raise ConfigError(
            f"{repr(recipe)[:60]} is not a recipe: it has neither data nor model nor trainer.{hint}", field="source"
        )
    found: dict[str, Any] = {}
    for key in (*_PLAIN, _ACCUMULATE):
        value: Any = recipe
        for name in key.split("."):
            value = _get(value, name)
            if value is None:
                break
        kinds = (list, tuple) if key.endswith("rampup_batch_size") else (int, str)
        if isinstance(value, kinds) and not isinstance(value, bool):
            found[key] = value
    return found


def write_recipe(plan: BatchPlan, recipe: Any) -> dict[str, Any]:
    """Set a plan's numbers in a recipe; returns what was set, by dotted key. Missing parts of the recipe are skipped."""
    values: dict[str, Any] = {
        "data.micro_batch_size": plan.micro_batch_size,
        "data.global_batch_size": plan.global_batch_size,
        "trainer.num_nodes": plan.nodes,
        "trainer.devices": plan.devices_per_node,
        "trainer.strategy.tensor_model_parallel_size": plan.tensor_parallel,
        "trainer.strategy.pipeline_model_parallel_size": plan.pipeline_parallel,
        "trainer.strategy.context_parallel_size": plan.context_parallel,
        "trainer.strategy.expert_model_parallel_size": plan.expert_parallel,
        "trainer.strategy.expert_tensor_parallel_size": plan.expert_tensor_parallel,
        _ACCUMULATE: 1,  # NeMo derives accumulation from the batch; this key would multiply it
    }
    # NeMo 1.x keeps the batch and the parallelism in `model`, 2.0 in `data` and `trainer.strategy`.
    if _get(_get(recipe, "model"), "micro_batch_size") is not None:
        values |= {
            f"model.{key.rsplit('.', 1)[1]}": value
            for key, value in values.items()
            if not key.startswith("trainer.") or ".strategy." in key
        }
    done: dict[str, Any] = {}
    for key, value in values.items():
        *path, last = key.split(".")
        target: Any = recipe
        for name in path:
            target = _get(target, name)
        if target is None or value is None:
            continue
        if isinstance(target, MutableMapping):
            target[last] = value
        elif hasattr(target, last) or key.startswith("data."):
            setattr(target, last, value)
        else:
            continue
        done[key] = value
    return done


def _get(target: Any, name: str) -> Any:
    return cast("Mapping[str, Any]", target).get(name) if isinstance(target, Mapping) else getattr(target, name, None)
