"""Axolotl: `micro_batch_size` and `gradient_accumulation_steps` per GPU; `batch_size` is their product."""

from __future__ import annotations

from math import lcm, prod
from typing import Any

from batchwright.core.errors import ConfigError, PlanError, either
from batchwright.core.numbers import count, nearest_multiples

from . import huggingface
from .record import (
    Dialect,
    Fields,
    Finding,
    Given,
    Job,
    Reading,
    Version,
    by_default,
    count_ranks,
    error,
    note,
    origins,
)

_MICRO, _STEPS, _BATCH = "micro_batch_size", "gradient_accumulation_steps", "batch_size"
_CONTEXT, _OLD_CONTEXT = "context_parallel_size", "sequence_parallel_degree"


def _resolve(special: Fields, fields: Fields) -> tuple[Fields, list[str]]:
    """Accumulation is batch_size // micro_batch_size where it is not given."""
    micro = special.get(_MICRO) or by_default(1, "Axolotl")
    found = {"micro_batch_size": micro}
    # The old key counts where the new one is not given, or 0.
    context = next((special[key] for key in (_CONTEXT, _OLD_CONTEXT) if _is_set(special.get(key))), None)
    if context:
        found["context_parallel"] = context
    batch, steps = special.get(_BATCH), special.get(_STEPS)
    if batch is None or (steps is not None and steps.level >= 0):
        return found | {"accumulation_steps": steps or by_default(1, "Axolotl")}, []
    size, each = count(batch.value, _BATCH), count(micro.value, _MICRO)
    if size % each:
        near = nearest_multiples(each, size)
        raise PlanError(
            f"{_BATCH}={size} is not a whole number of micro batches: {size} / {_MICRO} {each} = {size / each:.2f}, and Axolotl "
            f"rounds it down. Nearest: {either(near)}.",
            field=_BATCH,
            given=size,
            nearest=near,
        )
    return found | {"accumulation_steps": Given(size // each, origins(batch, micro), batch.level)}, []


def _is_set(given: Given | None) -> bool:
    return given is not None and str(given.value).strip() != "0"


def _check(reading: Reading) -> list[Finding]:
    found = [huggingface.trainer_loss()]
    if _BATCH in reading.given:
        if _STEPS in reading.given:
            found.append(
                error("excluded-key", f"{_BATCH} and {_STEPS}: Axolotl refuses both. Leave {_BATCH} out.", _BATCH)
            )
        elif _MICRO not in reading.given:
            found.append(
                error("missing-key", f"{_BATCH} alone: Axolotl needs two of {_MICRO}, {_STEPS} and {_BATCH}.", _MICRO)
            )
        found.append(
            note(
                "deprecated-key",
                f"{_BATCH} is per GPU before the launch and times the GPUs after: give {_STEPS}.",
                _BATCH,
            )
        )
    micro = str(reading.value(_MICRO, 1))
    context = _CONTEXT if _is_set(reading.given.get(_CONTEXT)) else _OLD_CONTEXT
    parts = str(reading.value(context, 1))
    if _OLD_CONTEXT in reading.given:
        counts = "is read as" if context == _OLD_CONTEXT else "is not read beside"
        found.append(
            note(
                "deprecated-key",
                f"{_OLD_CONTEXT}={reading.value(_OLD_CONTEXT)} {counts} {_CONTEXT}: give {_CONTEXT}.",
                _OLD_CONTEXT,
            )
        )
    if reading.on("sample_packing") and micro != "1" and parts not in ("1", "0"):
        found.append(
            error(
                "excluded-key",
                f"{_MICRO}={micro} with sample_packing and {context}={parts}: Axolotl requires 1.",
                _MICRO,
                (1,),
            )
        )
    if (method := reading.value("rl")) in ("grpo", "gdpo"):
        found.append(
            note(
                "counts-responses",
                f"rl={method}: Axolotl trains on the responses to prompts, so {_MICRO} and the batch count responses.",
                "rl",
            )
        )
    if method == "grpo":
        found += _grpo(reading)
    if reading.on("auto_find_batch_size"):
        found.append(
            note(
                "changes-the-batch",
                "auto_find_batch_size makes the batch smaller after out-of-memory.",
                "auto_find_batch_size",
            )
        )
    return found


def _grpo(reading: Reading) -> list[Finding]:
    """The rules of its GRPO, as Axolotl checks them before it starts."""
    key = "trl.num_generations"
    if key not in reading.given:
        return []
    try:
        group, micro = count(reading.value(key), key), count(reading.value(_MICRO, 1), _MICRO)
        batch = reading.value("trl.generation_batch_size")
        size = (
            micro * count(reading.value(_STEPS, 1), _STEPS)
            if batch is None
            else count(batch, "trl.generation_batch_size")
        )
    except ConfigError as wrong:
        return [error("value", v.message, v.field) for v in wrong.violations]
    if group < 2:
        return [error("one-generation", f"{key}={group}: Axolotl requires at least 2.", key, (2,))]
    if size % group:
        steps = lcm(group, micro) // micro
        return [
            error(
                "splits-a-group",
                f"{key}={group} does not divide the generation batch {size}: {size} / {group} = {size / group:.2f}. Nearest: "
                f"{_STEPS}={steps} ({micro} × {steps} = {micro * steps}).",
                key,
                (f"{_STEPS}={steps}",),
            )
        ]
    parts = [reading.fields[name].value for name in ("tensor_parallel", "context_parallel") if name in reading.fields]
    world = (count_ranks(reading.fields) or 1) * prod(count(part, "parallel size") for part in parts)
    if world > 1 and size < group * world:
        steps = -(-group * world // lcm(group, micro)) * lcm(group, micro) // micro
        near = f"{_STEPS}={steps}" if batch is None else f"trl.generation_batch_size={group * world}"
        return [
            error(
                "splits-a-group",
                f"The generation batch {size} is below {key} {group} × {world} GPUs = {group * world}: Axolotl requires a group "
                f"for each GPU. Nearest: {near}.",
                key,
                (near,),
            )
        ]
    return []


def _write(job: Job, version: Version) -> dict[str, Any]:
    return job.named(
        {
            _MICRO: "micro_batch_size",
            _STEPS: "accumulation_steps",
            "sequence_len": "sequence_length",
            "tensor_parallel_size": "tensor_parallel",
            _CONTEXT: "context_parallel",
        }
    )


DIALECTS = (
    Dialect(
        name="axolotl",
        title="Axolotl",
        keys={
            "sequence_len": "sequence_length",
            "tensor_parallel_size": "tensor_parallel",
        },
        special=frozenset({_MICRO, _STEPS, _BATCH, _CONTEXT, _OLD_CONTEXT}),
        resolve=_resolve,
        common=frozenset({_MICRO, _STEPS, _BATCH, _CONTEXT, _OLD_CONTEXT, "tensor_parallel_size"}),
        signs=("base_model", "sequence_len", "sample_packing", "val_set_size", "dataset_prepared_path"),
        programs=("axolotl",),
        checked=frozenset(
            {"sample_packing", "rl", "trl.num_generations", "trl.generation_batch_size", "auto_find_batch_size"}
        ),
        steps=huggingface.STEPS,
        beside=("deepspeed", "accelerate"),
        check=_check,
        write=_write,
        source="axolotl 0.19.0: utils/config/__init__.py, utils/schemas",
    ),
)
