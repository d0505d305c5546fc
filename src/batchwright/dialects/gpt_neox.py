"""GPT-NeoX: DeepSpeed's three keys, with a pipeline whose microbatches are the accumulation steps."""

from __future__ import annotations

from typing import Any

from batchwright.core.numbers import count

from .deepspeed import KEYS, mean_of_micro_batches
from .record import Dialect, Fields, Finding, Given, Job, Reading, Version

_PIPE, _MODEL = "pipe_parallel_size", "model_parallel_size"


def _resolve(special: Fields, fields: Fields) -> tuple[Fields, list[str]]:
    """A size of 0 is off."""
    found: Fields = {}
    for key, name in ((_PIPE, "pipeline_parallel"), (_MODEL, "tensor_parallel")):
        if key in special:
            given = special[key]
            found[name] = Given(max(1, count(given.value, key, least=0)), given.origin, given.level)
    return found, []


def _check(reading: Reading) -> list[Finding]:
    return [mean_of_micro_batches("DeepSpeed")] if str(reading.value("gradient_accumulation_steps", 1)) != "1" else []


def _write(job: Job, version: Version) -> dict[str, Any]:
    made = job.named({**KEYS, "seq_length": "sequence_length", "global_num_gpus": "devices"})
    return made | {_PIPE: job.get("pipeline_parallel", 1), _MODEL: job.get("tensor_parallel", 1)}


DIALECTS = (
    Dialect(
        name="gpt-neox",
        title="GPT-NeoX",
        aliases=("neox",),
        keys={**KEYS, "seq_length": "sequence_length", "global_num_gpus": "devices"},
        special=frozenset({_PIPE, _MODEL}),
        resolve=_resolve,
        common=frozenset({*KEYS, "seq_length"}),
        signs=(_PIPE, _MODEL, "vocab_file", "tokenizer_type", "lr_decay_iters", "checkpoint_factor"),
        programs=("deepy.py",),
        steps={
            "train_iters": "budget",
            "lr_decay_iters": "decay",
            "checkpoint_factor": "save",
            "eval_interval": "eval",
            "log_interval": "log",
        },
        accumulates_once=True,
        check=_check,
        write=_write,
        has_world=True,
        source="gpt-neox ea7aefd8: megatron/neox_arguments",
    ),
)
