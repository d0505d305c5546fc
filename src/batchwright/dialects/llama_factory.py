"""LLaMA-Factory: v0 has the keys of TrainingArguments; v1 counts a micro batch and a global one."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from . import huggingface
from .record import NEWEST, Dialect, Fields, Finding, Job, Reading, Version, by_default

_NEW = {"micro_batch_size": "micro_batch_size", "global_batch_size": "global_batch_size"}


def _version_of(keys: Collection[str]) -> Version:
    return (1,) if set(_NEW) & set(keys) else (0,)


def _resolve(special: Fields, fields: Fields) -> tuple[Fields, list[str]]:
    """The defaults: those of v1 beside a global batch, and of TrainingArguments without one."""
    micro = 1 if "global_batch_size" in fields else 8
    found = {"micro_batch_size": by_default(micro, "LLaMA-Factory")}
    if "global_batch_size" not in fields:
        found["accumulation_steps"] = by_default(1, "LLaMA-Factory")
    if huggingface.SPLIT not in special:
        return found, []
    fields.setdefault("micro_batch_size", found.pop("micro_batch_size"))
    derived, notes = huggingface.resolve(special, fields)
    return found | derived, notes


def _check(reading: Reading) -> list[Finding]:
    return [] if reading.version >= (1,) else huggingface.check(reading)


def _write(job: Job, version: Version) -> dict[str, Any]:
    """The keys of v0, which its releases run, unless version 1 is asked for."""
    length = job.named({"cutoff_len": "sequence_length"})
    if version == NEWEST or version < (1,):
        return huggingface.write(job, version) | length
    return job.named(_NEW) | length


DIALECTS = (
    Dialect(
        name="llama-factory",
        title="LLaMA-Factory",
        aliases=("llamafactory",),
        keys={**huggingface.KEYS, **_NEW, "cutoff_len": "sequence_length"},
        special=frozenset({huggingface.SPLIT}),
        resolve=_resolve,
        common=frozenset({*huggingface.KEYS, *_NEW, huggingface.SPLIT}),
        signs=(
            "finetuning_type",
            "template",
            "cutoff_len",
            "stage",
            "dataset_dir",
            "dist_config.",
            "batching_strategy",
        ),
        programs=("llamafactory", "llama_factory"),
        checked=huggingface.CHECKED,
        steps=huggingface.STEPS,
        gradient=huggingface.AVERAGED,
        versions=("0", "1"),
        since=dict.fromkeys(_NEW, (1,)),
        version_of=_version_of,
        beside=("deepspeed", "accelerate"),
        check=_check,
        write=_write,
        source="llamafactory 0.9.5: hparams/training_args.py, v1/core/utils/batching.py",
    ),
)
