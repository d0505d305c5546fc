"""Nanotron: `tokens.micro_batch_size` × `tokens.batch_accumulation_per_replica` × `parallelism.dp`."""

from __future__ import annotations

from typing import Any

from .record import Dialect, Finding, Job, Reading, Version, error

_KEYS = {
    "tokens.micro_batch_size": "micro_batch_size",
    "tokens.batch_accumulation_per_replica": "accumulation_steps",
    "tokens.sequence_length": "sequence_length",
    "parallelism.dp": "data_parallel_size",
    "parallelism.tp": "tensor_parallel",
    "parallelism.pp": "pipeline_parallel",
    "parallelism.expert_parallel_size": "expert_parallel",
}
_REQUIRED = ("tokens.micro_batch_size", "tokens.batch_accumulation_per_replica", "parallelism.dp")


def _check(reading: Reading) -> list[Finding]:
    return [
        error("missing-key", f"{key} is not given: Nanotron has no default for it.", key)
        for key in _REQUIRED
        if key not in reading.given
    ]


def _write(job: Job, version: Version) -> dict[str, Any]:
    job.need("data_parallel_size", "Nanotron configures the number of replicas")
    sizes = {"parallelism.tp": 1, "parallelism.pp": 1}
    return sizes | job.named(_KEYS)


DIALECTS = (
    Dialect(
        name="nanotron",
        title="Nanotron",
        keys=_KEYS,
        signs=("tokens.batch_accumulation_per_replica", "parallelism.dp", "parallelism.tp", "parallelism.pp"),
        programs=("nanotron",),
        steps={
            "tokens.train_steps": "budget",
            "optimizer.learning_rate_scheduler.lr_warmup_steps": "warmup",
            "optimizer.learning_rate_scheduler.lr_decay_steps": "decay",
            "checkpoints.checkpoint_interval": "save",
            "tokens.val_check_interval": "eval",
            "logging.iteration_step_info_interval": "log",
        },
        check=_check,
        write=_write,
        has_world=True,
        source="nanotron 0.4: config/config.py, config/parallelism_config.py",
    ),
)
