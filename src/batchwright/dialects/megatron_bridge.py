"""Megatron-Bridge: `train.micro_batch_size`, `train.global_batch_size`, and parallelism in `model`.

Bridge passes `train.rampup_batch_size` on to its Megatron-core, which ignores it from 0.18 on, and passes no step schedule.
Bridge 0.3 requires a core below 0.17, which ramps.
"""

from __future__ import annotations

from typing import Any

from .megatron import PARALLEL, ignored_triple, spaced
from .record import Dialect, Fields, Finding, Job, Reading, Version, error, note

_TRIPLE = "train.rampup_batch_size"
_SCHEDULE = "train.step_batch_size_schedule"
_SHRINK = "train.decrease_batch_size_if_needed"
_IGNORED: Version = (0, 4)  # the first version after the last one that is known to require a core that ramps
_PARALLEL = {f"model.{theirs}": ours for theirs, ours in PARALLEL.items()}
_KEYS = {
    "train.micro_batch_size": "micro_batch_size",
    "train.global_batch_size": "global_batch_size",
    "dataset.sequence_length": "sequence_length",
    "dataset.seq_length": "sequence_length",
    "model.seq_length": "sequence_length",
    "train.train_samples": "samples",
    "model.virtual_pipeline_model_parallel_size": "virtual_stages",
    **_PARALLEL,
}


def _resolve(special: Fields, fields: Fields) -> tuple[Fields, list[str]]:
    from batchwright.core.fields import switch

    from .record import Given

    found: Fields = {}
    if _TRIPLE in special:
        found["linear"] = spaced(special[_TRIPLE])
    shrink = special.get(_SHRINK)
    if shrink and switch(shrink.value, _SHRINK):
        found["round"] = Given("down", shrink.origin, shrink.level)
    return found, []


def _check(reading: Reading) -> list[Finding]:
    found: list[Finding] = []
    if _TRIPLE in reading.given:
        ignored = reading.version >= _IGNORED
        found += ignored_triple(
            reading, _TRIPLE, "train.global_batch_size", "Megatron-LM's --step-batch-size-schedule", ignored
        )
        if "train.train_samples" in reading.given:
            found.append(
                error(
                    "excluded-key",
                    f"{_TRIPLE} and train.train_samples: Bridge refuses a ramp in training that is counted in samples. Give "
                    "train.train_iters.",
                    _TRIPLE,
                )
            )
    if _SCHEDULE in reading.given:
        found.append(
            error(
                "ignored-key",
                f"{_SCHEDULE} is a field of Bridge that it does not pass on: the batch stays at train.global_batch_size.",
                _SCHEDULE,
            )
        )
    if not reading.on("model.calculate_per_token_loss"):
        found.append(
            note(
                "mean-of-means",
                "model.calculate_per_token_loss is false (the default): the gradient is a mean of the micro batches' means. "
                "true divides by the tokens of the step.",
                "model.calculate_per_token_loss",
            )
        )
    return found


def _write(job: Job, version: Version) -> dict[str, Any]:
    """Without a ramp in versions that would ignore it."""
    from .ramps import micro_of_all_stages, triple

    job.need("global_batch_size", "Megatron-Bridge counts the global batch over all devices")
    skipped = ("dataset.seq_length", "model.seq_length")
    made = job.named({key: name for key, name in _KEYS.items() if key not in skipped})
    if version < _IGNORED and (ramp := triple(job)):
        made |= {_TRIPLE: list(ramp), "train.micro_batch_size": micro_of_all_stages(job)}
    return made


DIALECTS = (
    Dialect(
        name="megatron-bridge",
        title="Megatron-Bridge",
        aliases=("bridge",),
        keys=_KEYS,
        special=frozenset({_TRIPLE, _SHRINK}),
        resolve=_resolve,
        common=frozenset(_PARALLEL) | {"model.virtual_pipeline_model_parallel_size"},  # NeMo has them, too
        signs=("train.micro_batch_size", "train.global_batch_size", "checkpoint.save_interval", "ddp."),
        checked=frozenset({"model.calculate_per_token_loss", _SCHEDULE}),
        steps={
            "train.train_iters": "budget",
            "scheduler.lr_warmup_iters": "warmup",
            "scheduler.lr_decay_iters": "decay",
            "checkpoint.save_interval": "save",
            "train.eval_interval": "eval",
            "logger.log_interval": "log",
        },
        versions=("0.3", "0.4"),
        ignores_triple=_IGNORED,
        gradient={"model.calculate_per_token_loss": None},
        accumulates_once=True,
        check=_check,
        write=_write,
        form="keys",
        source="megatron-bridge 0.3.1: training/config.py, training/initialize.py; 067f987df",
    ),
)
