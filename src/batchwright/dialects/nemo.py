"""NeMo: `data.micro_batch_size` (2.0), `model.micro_batch_size` (1.x), `training.…` (its launcher), and recipes.

NeMo derives accumulation itself, as global / (micro × ranks); `trainer.accumulate_grad_batches` has to stay 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from batchwright.core.plan import Plan

from . import Dialect, Fields

_PARALLEL = {
    "tensor_model_parallel_size": "tensor_parallel",
    "pipeline_model_parallel_size": "pipeline_parallel",
    "context_parallel_size": "context_parallel",
    "expert_model_parallel_size": "expert_parallel",
    "virtual_pipeline_model_parallel_size": "virtual_stages",
}

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
    note = f"NeMo derives accumulation itself, as global / (micro × ranks): {_ACCUMULATE} must stay 1 there."
    world_known = "data_parallel_size" in fields or "devices" in fields or {"nodes", "devices_per_node"} <= set(fields)
    if str(given.value) == "1" and world_known:
        return {}, [note]
    if str(given.value) == "1":
        note += " With no device count given, it is read as accumulation_steps=1 in the documented equation."
    return {"accumulation_steps": given}, [note]


DIALECT = Dialect(
    name="nemo",
    title="NeMo",
    keys=_PLAIN | {f"training.{key}": ours for key, ours in _PLAIN.items()},
    special=frozenset({_ACCUMULATE, f"training.{_ACCUMULATE}"}),
    resolve=_resolve,
)


def read_recipe(recipe: object) -> dict[str, Any]:
    """The dotted keys of a recipe that are set: any object with NeMo's attributes will do."""
    found: dict[str, Any] = {}
    for key in (*_PLAIN, _ACCUMULATE):
        value: Any = recipe
        for name in key.split("."):
            value = value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
            if value is None:
                break
        if isinstance(value, (int, str)) and not isinstance(value, bool):
            found[key] = value
    return found


def write_recipe(plan: Plan, recipe: Any) -> dict[str, Any]:
    """Fill a plan into a recipe; returns what was set, by dotted key. Parts the recipe does not have are left alone."""
    values: dict[str, Any] = {
        "data.micro_batch_size": plan.micro_batch_size,
        "data.global_batch_size": plan.global_batch_size,
        "trainer.num_nodes": plan.nodes,
        "trainer.devices": plan.devices_per_node,
        "trainer.strategy.tensor_model_parallel_size": plan.tensor_parallel,
        "trainer.strategy.pipeline_model_parallel_size": plan.pipeline_parallel,
        "trainer.strategy.context_parallel_size": plan.context_parallel,
        "trainer.strategy.expert_model_parallel_size": plan.expert_parallel,
        _ACCUMULATE: 1,  # NeMo's own accumulation follows from the batch; this one would multiply it
    }
    done: dict[str, Any] = {}
    for key, value in values.items():
        *path, last = key.split(".")
        target: Any = recipe
        for name in path:
            target = getattr(target, name, None)
        if target is None or value is None:
            continue
        if hasattr(target, last) or not key.startswith("trainer."):
            setattr(target, last, value)
            done[key] = value
    return done
