"""torchtitan: since 2026-08-20 it counts tokens; before (release 0.3) it counted samples, under other names.

A pipeline splits each micro batch: into `num_pp_microbatches`, or into pieces of `pipeline_parallel_microbatch_size`.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from batchwright.core.errors import ConfigError, PlanError, either
from batchwright.core.numbers import count, nearest_divisors, nearest_multiples

from .record import NEWEST, Dialect, Fields, Given, Job, Version

_TOKENS: Version = (2026, 8, 20)
_MICRO, _STEP = "training.num_tokens_per_microbatch_per_dp_rank", "training.num_tokens_per_train_step"
_LENGTH, _PIECES = "training.max_context_length", "parallelism.num_pp_microbatches"
_OLD_MICRO, _OLD_GLOBAL, _OLD_LENGTH = "training.local_batch_size", "training.global_batch_size", "training.seq_len"
_OLD_PIECE = "parallelism.pipeline_parallel_microbatch_size"
_REPLICATE, _SHARD = "parallelism.data_parallel_replicate_degree", "parallelism.data_parallel_shard_degree"
_PARALLEL = {
    "parallelism.tensor_parallel_degree": "tensor_parallel",
    "parallelism.pipeline_parallel_degree": "pipeline_parallel",
    "parallelism.context_parallel_degree": "context_parallel",
    "parallelism.expert_parallel_degree": "expert_parallel",
}


def _resolve(special: Fields, fields: Fields) -> tuple[Fields, list[str]]:
    found = (
        _samples(special, fields)
        if _OLD_MICRO not in special and {_MICRO, _STEP} & set(special)
        else _old(special, fields)
    )
    shard = special.get(_SHARD)
    if shard and str(shard.value) != "-1":
        copies = special.get(_REPLICATE)
        ranks = count(shard.value, _SHARD) * (count(copies.value, _REPLICATE) if copies else 1)
        origin = " and ".join(one.origin for one in (shard, copies) if one)
        found["data_parallel_size"] = Given(ranks, origin, shard.level)
    return found, []


def _old(special: Fields, fields: Fields) -> Fields:
    found: Fields = {}
    micro = special.get(_OLD_MICRO) or Given(8, "torchtitan's default", -2)
    found["micro_batch_size"] = micro
    whole = special.get(_OLD_GLOBAL)
    if whole and str(whole.value) != "-1":
        found["global_batch_size"] = whole
    if _pipeline(fields):
        size = count(micro.value, _OLD_MICRO)
        piece = special.get(_OLD_PIECE)
        each = count(piece.value, _OLD_PIECE) if piece else 1
        if size % each:
            near = nearest_divisors(size, each)
            raise PlanError(
                f"{_OLD_PIECE}={each} does not divide {_OLD_MICRO} {size}: {size} / {each} = {size / each:.2f}. "
                f"Nearest: {either(near)}.",
                field=_OLD_PIECE,
                given=each,
                nearest=near,
            )
        found["pipeline_style"] = Given("inner", "torchtitan", -1)
        found["pipeline_microbatches"] = Given(size // each, (piece or micro).origin, micro.level)
        found["pipeline_schedule"] = Given("1f1b", "torchtitan", -2)
    return found


def _samples(special: Fields, fields: Fields) -> Fields:
    """Tokens as samples of the maximal context."""
    found: Fields = {}
    length = fields.get("sequence_length")
    if length is None:
        raise ConfigError(f"{_MICRO} counts tokens and needs {_LENGTH} to count samples.", field="sequence_length")
    tokens = count(length.value, _LENGTH)
    micro = special.get(_MICRO) or Given(16384, "torchtitan's default", -2)
    size = count(micro.value, _MICRO)
    if size % tokens:
        near = nearest_multiples(tokens, size)
        raise PlanError(
            f"{_MICRO}={size} is {size / tokens:.2f} samples of {tokens} tokens. Nearest: {either(near)}.",
            field=_MICRO,
            given=size,
            nearest=near,
        )
    pieces = special.get(_PIECES)
    parts = count(pieces.value, _PIECES) if pieces else 1
    if parts > 1 and _pipeline(fields):
        found["pipeline_style"] = Given("inner", "torchtitan", -1)
        found["pipeline_microbatches"] = pieces or micro
        found["pipeline_schedule"] = Given("1f1b", "torchtitan", -2)
    else:
        parts = 1
    found["micro_batch_size"] = Given(size // tokens * parts, micro.origin, micro.level)
    whole = special.get(_STEP)
    if whole and str(whole.value) != "-1":
        found["global_batch_size_tokens"] = whole
    return found


def _pipeline(fields: Fields) -> bool:
    given = fields.get("pipeline_parallel")
    return given is not None and count(given.value, "pipeline_parallel") > 1


def _version_of(keys: Collection[str]) -> Version:
    return (0, 3) if {_OLD_MICRO, _OLD_GLOBAL, _OLD_LENGTH, _OLD_PIECE} & set(keys) else NEWEST


def _write(job: Job, version: Version) -> dict[str, Any]:
    micro, steps = (
        job.need("micro_batch_size", "torchtitan counts the batch per rank"),
        job.get("accumulation_steps", 1),
    )
    stages = job.get("pipeline_parallel", 1)
    passes = job.get("pipeline_passes", 1) if stages > 1 else steps
    pieces = steps // passes
    made: dict[str, Any]
    if version < _TOKENS:
        made = {
            _OLD_MICRO: micro * pieces,
            **job.named({_OLD_GLOBAL: "global_batch_size", _OLD_LENGTH: "sequence_length"}),
        }
        if stages > 1:
            made[_OLD_PIECE] = micro
    else:
        length = job.need("sequence_length", "torchtitan counts tokens")
        made = {_MICRO: micro * length, _LENGTH: length}
        if "global_batch_size" in job.numbers:
            made[_STEP] = job.get("global_batch_size") * length
        if stages > 1:
            made[_PIECES] = pieces
    if _OLD_GLOBAL not in made and _STEP not in made and passes > 1:
        job.need("global_batch_size", "torchtitan derives accumulation from the batch of all ranks")
    return made | job.named(_PARALLEL)


DIALECTS = (
    Dialect(
        name="torchtitan",
        title="torchtitan",
        aliases=("titan",),
        keys={**_PARALLEL, _LENGTH: "sequence_length", _OLD_LENGTH: "sequence_length"},
        special=frozenset({_MICRO, _STEP, _PIECES, _OLD_MICRO, _OLD_GLOBAL, _OLD_PIECE, _REPLICATE, _SHARD}),
        resolve=_resolve,
        signs=("parallelism.", "job.config_file", "training.local_batch_size"),
        programs=("torchtitan",),
        steps={
            "training.steps": "budget",
            "lr_scheduler.warmup_steps": "warmup",
            "checkpoint.interval": "save",
            "validation.freq": "eval",
            "metrics.log_freq": "log",
        },
        versions=("0.3", "2026-08-20"),
        version_of=_version_of,
        accumulates_once=True,
        write=_write,
        form="toml",
        unit="tokens",
        source="torchtitan 0.3.0 and b5bcd76c6: config/configs.py, trainer.py",
    ),
)
