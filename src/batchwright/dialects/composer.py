"""Composer and llm-foundry: `global_train_batch_size` and `device_train_microbatch_size`; a last micro batch may be smaller."""

from __future__ import annotations

from typing import Any

from batchwright.core.errors import PlanError, either
from batchwright.core.numbers import count, nearest_multiples

from .record import Dialect, Fields, Finding, Given, Job, Reading, Version, note

_BATCH, _MICRO = "global_train_batch_size", "device_train_microbatch_size"


def _resolve(special: Fields, fields: Fields) -> tuple[Fields, list[str]]:
    """Each device takes its share of the batch in ceil(share / micro) micro batches."""
    micro = special.get(_MICRO)
    found: Fields = {}
    if _BATCH in special:
        found["global_batch_size"] = special[_BATCH]
    if micro is None or str(micro.value) == "auto":
        return found, []
    size = count(micro.value, _MICRO)
    found["micro_batch_size"] = micro
    ranks = _ranks(fields)
    if ranks is None or _BATCH not in special:
        return found, []
    batch = count(special[_BATCH].value, _BATCH)
    if batch % ranks:
        near = nearest_multiples(ranks, batch)
        raise PlanError(
            f"{_BATCH}={batch} must be a multiple of the {ranks} devices: {batch} / {ranks} = {batch / ranks:.2f}. Nearest: "
            f"{either(near)}.",
            field=_BATCH,
            given=batch,
            nearest=near,
        )
    share = batch // ranks
    if size > share:
        found["micro_batch_size"] = Given(share, micro.origin, micro.level)
        return found, [f"{_MICRO}={size} is more than the {share} samples of a device: llm-foundry takes {share}."]
    if share % size:
        found["allow_ragged"] = Given(True, micro.origin, micro.level)
        return found, [
            f"The last micro batch of a device is smaller: {share} = {share // size} × {size} + {share % size}."
        ]
    return found, []


def _ranks(fields: Fields) -> int | None:
    from . import ranks_of

    ranks = fields.get("data_parallel_size") or ranks_of(fields)
    return None if ranks is None else count(ranks.value, "data_parallel_size")


def _check(reading: Reading) -> list[Finding]:
    found: list[Finding] = []
    if str(reading.value(_MICRO, "auto")) == "auto":
        found.append(
            note(
                "changes-the-batch",
                f"{_MICRO} is auto: it is halved after out-of-memory; the global batch stays.",
                _MICRO,
            )
        )
    if not reading.on("accumulate_train_batch_on_tokens", True):
        found.append(
            note(
                "mean-of-means",
                "accumulate_train_batch_on_tokens is false: micro batches are weighed by samples, not by tokens.",
                "accumulate_train_batch_on_tokens",
            )
        )
    return found


def _write(job: Job, version: Version) -> dict[str, Any]:
    job.need("global_batch_size", "llm-foundry counts the global batch over all devices")
    return job.named({_BATCH: "global_batch_size", _MICRO: "micro_batch_size", "max_seq_len": "sequence_length"})


DIALECTS = (
    Dialect(
        name="composer",
        title="Composer",
        aliases=("llm-foundry", "foundry", "mosaicml"),
        keys={"max_seq_len": "sequence_length"},
        special=frozenset({_BATCH, _MICRO}),
        resolve=_resolve,
        signs=(_BATCH, "max_duration", "train_loader.", "fsdp_config.sharding_strategy"),
        programs=("composer",),
        checked=frozenset({"accumulate_train_batch_on_tokens"}),
        steps={
            "max_duration": "budget",
            "save_interval": "save",
            "eval_interval": "eval",
            "scheduler.t_warmup": "warmup",
        },
        steps_unit="ba",
        check=_check,
        write=_write,
        source="llm-foundry 0.22.0: utils/config_utils.py; mosaicml 0.32.1: trainer/trainer.py",
    ),
)
