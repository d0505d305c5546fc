"""Megatron-LM's flags. `--micro-batch-size` and `--global-batch-size` are the same as batchwright's."""

from __future__ import annotations

from batchwright.core.errors import ConfigError
from batchwright.core.numbers import count, nearest_multiples

from . import Dialect, Fields, Given

_SCHEDULE = "step_batch_size_schedule"
_TRIPLE = "rampup_batch_size"
_LAYERS = "num_layers_per_virtual_pipeline_stage"


def _resolve(special: Fields, fields: Fields) -> tuple[Fields, list[str]]:
    found: Fields = {}
    notes: list[str] = []
    if _SCHEDULE in special:
        if "sequence_length" not in fields:
            raise ConfigError(
                "step_batch_size_schedule counts in tokens (Megatron's trainer always passes its sequence length) and needs "
                "seq_length. For thresholds in samples give --thresholds.",
                field="sequence_length",
                nearest=(2048, 4096, 8192),
            )
        found["thresholds_tokens"] = special[_SCHEDULE]
    if _LAYERS in special:
        found["virtual_stages"] = _virtual_stages(special, fields)
    if _TRIPLE in special:
        found["linear"] = special[_TRIPLE]
        notes.append(
            "Megatron-core 0.18 and later accept --rampup-batch-size and ignore it: the batch stays constant there."
        )
    return found, notes


def _virtual_stages(special: Fields, fields: Fields) -> Given:
    """Layers / (pipeline stages × layers per virtual stage)."""
    given = special[_LAYERS]
    each = count(given.value, _LAYERS)
    stages = count(fields["pipeline_parallel"].value, "pipeline_parallel") if "pipeline_parallel" in fields else 1
    layers = count(special["num_layers"].value, "num_layers") if "num_layers" in special else None
    if layers is None or layers % (stages * each):
        raise ConfigError(
            f"{_LAYERS}={each} gives virtual stages as num_layers / (pipeline {stages} × {each}), and num_layers is "
            + (
                "not given."
                if layers is None
                else f"{layers}: {layers} / {stages * each} = {layers / stages / each:.2f}."
            ),
            field="num_layers",
            given=layers,
            nearest=() if layers is None else nearest_multiples(stages * each, layers),
        )
    return Given(layers // (stages * each), f"{layers} layers / ({stages} × {each})", given.level)


DIALECT = Dialect(
    name="megatron",
    title="Megatron-LM",
    keys={
        "tensor_model_parallel_size": "tensor_parallel",
        "pipeline_model_parallel_size": "pipeline_parallel",
        "context_parallel_size": "context_parallel",
        "expert_model_parallel_size": "expert_parallel",
        "expert_tensor_parallel_size": "expert_tensor_parallel",
        "num_virtual_stages_per_pipeline_rank": "virtual_stages",
        "microbatch_group_size_per_virtual_pipeline_stage": "pipeline_group",
        "seq_length": "sequence_length",
        "train_samples": "samples",
    },
    special=frozenset({_SCHEDULE, _TRIPLE, _LAYERS, "num_layers"}),
    resolve=_resolve,
)
