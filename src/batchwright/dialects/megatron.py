"""Megatron-LM's flags. Its `--micro-batch-size` and `--global-batch-size` are spelled like ours."""

from __future__ import annotations

from . import Dialect, Fields

_SCHEDULE = "step_batch_size_schedule"
_TRIPLE = "rampup_batch_size"


def _resolve(special: Fields, fields: Fields) -> tuple[Fields, list[str]]:
    found: Fields = {}
    notes: list[str] = []
    if _SCHEDULE in special:
        # Megatron's trainer always passes its sequence length, and then thresholds are tokens.
        found["thresholds_tokens" if "sequence_length" in fields else "thresholds"] = special[_SCHEDULE]
    if _TRIPLE in special:
        found["linear"] = special[_TRIPLE]
        notes.append(
            "Megatron-core 0.18 and later accept --rampup-batch-size and ignore it: the batch stays flat there."
        )
    return found, notes


DIALECT = Dialect(
    name="megatron",
    title="Megatron-LM",
    keys={
        "tensor_model_parallel_size": "tensor_parallel",
        "pipeline_model_parallel_size": "pipeline_parallel",
        "context_parallel_size": "context_parallel",
        "expert_model_parallel_size": "expert_parallel",
        "num_virtual_stages_per_pipeline_rank": "virtual_stages",
        "microbatch_group_size_per_virtual_pipeline_stage": "pipeline_group",
        "seq_length": "sequence_length",
        "train_samples": "samples",
    },
    special=frozenset({_SCHEDULE, _TRIPLE}),
    resolve=_resolve,
)
