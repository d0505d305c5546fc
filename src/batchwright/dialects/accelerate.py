"""Accelerate: its configuration has the processes and the accumulation; the batch is that of the DataLoader.

`batch_size` is the DataLoader's: per process, or of all processes with `split_batches`.
"""

from __future__ import annotations

from typing import Any

from batchwright.core.errors import ConfigError, either
from batchwright.core.fields import switch
from batchwright.core.numbers import count, nearest_multiples

from .deepspeed import mean_of_micro_batches
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

_SIZE, _SPLIT = "batch_size", "split_batches"
_STEPS, _FILE = "deepspeed_config.gradient_accumulation_steps", "deepspeed_config.deepspeed_config_file"


def _resolve(special: Fields, fields: Fields) -> tuple[Fields, list[str]]:
    given, split = special.get(_SIZE), special.get(_SPLIT)
    if given is None:
        return {}, []
    if split is None or not switch(split.value, _SPLIT):
        return {"micro_batch_size": given}, []
    return divided(_SIZE, given, _SPLIT, split, fields)


def divided(key: str, given: Given, switched_by: str, split: Given, fields: Fields) -> tuple[Fields, list[str]]:
    """With `split_batches`, each process that has data of its own gets a share of the DataLoader's batch.

    Where their number is not known, the size gives the global batch.
    """
    size, ranks, origin = count(given.value, key), count_ranks(fields), origins(given, split)
    if ranks is None:
        steps = count(fields.get("accumulation_steps", by_default(1, "")).value, "gradient_accumulation_steps")
        notes = [f"{switched_by}: {key}={size} is divided by the number of processes, which is not given."]
        return {"global_batch_size": Given(size * steps, origin, given.level)}, notes
    if size % ranks:
        near = nearest_multiples(ranks, size)
        raise ConfigError(
            f"{key}={size} must be a multiple of the {ranks} processes with {switched_by}: {size} / {ranks} = "
            f"{size / ranks:.2f}. Nearest: {either(near)}.",
            field=key,
            given=size,
            nearest=near,
        )
    return {"micro_batch_size": Given(size // ranks, origin, given.level)}, []


def _check(reading: Reading) -> list[Finding]:
    found: list[Finding] = []
    if "micro_batch_size" not in reading.fields:
        found.append(
            note(
                "missing-key",
                "The batch per process is that of the DataLoader: give batch_size=N to see the global batch.",
            )
        )
    if str(reading.value("gradient_accumulation_steps", 1)) != "1":
        found.append(mean_of_micro_batches("Accelerate"))
    if _FILE in reading.given and _STEPS in (*reading.given, *reading.filled_in):
        found.append(
            error(
                "excluded-key",
                f"{_STEPS} and {_FILE}: Accelerate refuses both. Give gradient_accumulation_steps in the file alone.",
                _STEPS,
            )
        )
    if reading.on("even_batches", True) and _SIZE in reading.given:
        found.append(
            note(
                "padded-batch",
                "even_batches is true (the default): the last batches repeat samples of the first ones.",
                "even_batches",
            )
        )
    return found


def _write(job: Job, version: Version) -> dict[str, Any]:
    return job.named(
        {
            "num_processes": "devices",
            "num_machines": "nodes",
            "gradient_accumulation_steps": "accumulation_steps",
            _SIZE: "micro_batch_size",
            "megatron_lm_config.megatron_lm_tp_degree": "tensor_parallel",
            "megatron_lm_config.megatron_lm_pp_degree": "pipeline_parallel",
        }
    )


_KEYS = {
    "num_processes": "devices",
    "num_machines": "nodes",
    "gradient_accumulation_steps": "accumulation_steps",
    _STEPS: "accumulation_steps",
    "megatron_lm_config.megatron_lm_tp_degree": "tensor_parallel",
    "megatron_lm_config.megatron_lm_pp_degree": "pipeline_parallel",
    "megatron_lm_config.megatron_lm_num_micro_batches": "accumulation_steps",
    "parallelism_config.parallelism_config_tp_size": "tensor_parallel",
    "parallelism_config.parallelism_config_cp_size": "context_parallel",
}

DIALECTS = (
    Dialect(
        name="accelerate",
        title="Accelerate",
        keys=_KEYS,
        special=frozenset({_SIZE, _SPLIT}),
        resolve=_resolve,
        common=frozenset({"num_processes", "num_machines", "gradient_accumulation_steps", _SIZE, _SPLIT}),
        signs=(
            *("compute_environment", "distributed_type", "machine_rank", "main_training_function", _SPLIT, _FILE),
            "deepspeed_config_file",  # a flag of accelerate launch
        ),
        checked=frozenset({"even_batches", _FILE}),
        defaults={"gradient_accumulation_steps": 1, "num_machines": 1},
        beside=("deepspeed",),
        yields={"accumulation_steps": 1},
        check=_check,
        write=_write,
        has_world=True,
        source="accelerate 1.15: data_loader.py, accelerator.py, commands/launch.py, utils/dataclasses.py",
    ),
)
