"""torchtitan: since 2026-08-20 it counts tokens; before (release 0.3) it counted samples, under other names, and before
0.1 the batch per rank had the name `training.batch_size`, and the degrees were in `training` and `experimental`.

A pipeline splits each micro batch: into `num_pp_microbatches`, or into pieces of `pipeline_parallel_microbatch_size`.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from batchwright.core.batch.pipeline import PipelineRule
from batchwright.core.errors import ConfigError, PlanError, either
from batchwright.core.numbers import count, divisors, nearest_divisors, nearest_multiples, nearest_of

from .record import NEWEST, Dialect, Fields, Given, Job, Version, by_default, origins

_TOKENS: Version = (2026, 8, 20)
_MICRO, _STEP = "training.num_tokens_per_microbatch_per_dp_rank", "training.num_tokens_per_train_step"
_LENGTH, _PIECES = "training.max_context_length", "parallelism.num_pp_microbatches"
_OLD_MICRO, _OLD_GLOBAL, _OLD_LENGTH = "training.local_batch_size", "training.global_batch_size", "training.seq_len"
_OLDEST_MICRO, _OLDEST_PIECES = "training.batch_size", "experimental.pipeline_parallel_microbatches"
_OLDEST_SHARD, _OLDEST_REPLICATE = (f"training.data_parallel_{name}_degree" for name in ("shard", "replicate"))
_OLDEST_PARALLEL = {
    "training.tensor_parallel_degree": "tensor_parallel",
    "experimental.pipeline_parallel_degree": "pipeline_parallel",
    "experimental.context_parallel_degree": "context_parallel",
}
_SCHEDULE, _OLDEST_SCHEDULE = (f"{section}.pipeline_parallel_schedule" for section in ("parallelism", "experimental"))
# torch's names (torch.distributed.pipelining.schedules: get_schedule_class), in any case.
_SCHEDULES = {
    "1F1B": "torch-1f1b",
    "Interleaved1F1B": "torch-interleaved",
    "GPipe": "gpipe",
    "LoopedBFS": "looped-bfs",
    "InterleavedZeroBubble": "zero-bubble",
    "ZBVZeroBubble": "zbv",
    "DualPipeV": "dualpipev",
}
_ABSTRACT = ("pipelineschedulesingle", "pipelineschedulemulti")  # they have no order of their own
_ORDERS = tuple(f"{section}.pipeline_parallel_schedule_csv" for section in ("parallelism", "experimental"))
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
        if not {_OLD_MICRO, _OLDEST_MICRO} & set(special) and {_MICRO, _STEP} & set(special)
        else _old(special, fields)
    )
    shard = special.get(_SHARD) or special.get(_OLDEST_SHARD)
    if shard and str(shard.value) != "-1":
        copies = special.get(_REPLICATE) or special.get(_OLDEST_REPLICATE)
        ranks = count(shard.value, _SHARD) * (count(copies.value, _REPLICATE) if copies else 1)
        found["data_parallel_size"] = Given(ranks, origins(shard, copies), shard.level)
    return found, []


def _old(special: Fields, fields: Fields) -> Fields:
    found: Fields = {}
    micro = special.get(_OLD_MICRO) or special.get(_OLDEST_MICRO) or by_default(8, "torchtitan")
    found["micro_batch_size"] = micro
    whole = special.get(_OLD_GLOBAL)
    if whole and str(whole.value) != "-1":
        found["global_batch_size"] = whole
    if _pipeline(fields):
        size = count(micro.value, _OLD_MICRO)
        piece = special.get(_OLD_PIECE)
        each = count(piece.value, _OLD_PIECE) if piece else 1
        if piece is None and _OLDEST_MICRO in special:  # by default as many pieces as stages
            piece = special.get(_OLDEST_PIECES)
            pieces = piece or fields["pipeline_parallel"]
            each = _piece(size, count(pieces.value, _OLDEST_PIECES))
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
        found["pipeline_microbatches"] = Given(size // each, origins(micro, piece), micro.level)
        found |= _schedule(special)
        rule = _rule(fields, found)
        if rule is not None and rule.refusal(size // each):
            _refuse_old(rule, size, each, special)
    return found


def _rule(fields: Fields, found: Fields) -> PipelineRule | None:
    """The rule of the pipeline, unless batchwright's own names say something about it."""
    if {"pipeline_style", "pipeline_schedule", "pipeline_microbatches"} & set(fields):
        return None
    stages, virtual = fields["pipeline_parallel"], found.get("virtual_stages")
    return PipelineRule(
        found["pipeline_schedule"].value, count(stages.value, "pipeline_parallel"), virtual.value if virtual else 1
    )


def _near(rule: PipelineRule, pieces: int) -> tuple[int, ...]:
    """The numbers of pieces next to this one that the schedule allows."""
    rounds = pieces // rule.stages  # a multiple of the stages fits every schedule, from two on
    tried = {*range(pieces - 64, pieces + 65), *(rule.stages * n for n in (1, 2, rounds, rounds + 1))}
    return nearest_of([m for m in sorted(tried) if rule.refusal(m) is None], pieces)


def _refuse_old(rule: PipelineRule, size: int, each: int, special: Fields) -> None:
    """Say which key makes a number of pieces that the schedule does not allow, and its nearest values."""
    pieces = size // each
    allowed = [m for m in divisors(size) if rule.refusal(m) is None]
    values: tuple[str, int, tuple[int, ...]] = (
        _OLDEST_MICRO if _OLDEST_MICRO in special else _OLD_MICRO, size, tuple(m * each for m in _near(rule, pieces))
    )  # fmt: skip
    if _OLDEST_PIECES in special and allowed:
        values = (_OLDEST_PIECES, pieces, nearest_of(allowed, pieces))
    elif _OLD_PIECE in special and allowed:
        values = (_OLD_PIECE, each, nearest_of([size // m for m in reversed(allowed)], each))
    key, value, near = values
    made = f" makes {pieces} microbatches" if key != _OLDEST_PIECES else ""
    raise PlanError(
        f"{key}={value}{made}: {rule.refusal(pieces)}. Nearest: {either(near)}.", field=key, given=value, nearest=near
    )


def _schedule(special: Fields) -> Fields:
    """The schedule of the pipeline; by default 1F1B. An order that a file gives has no rule."""
    key = _SCHEDULE if _SCHEDULE in special else _OLDEST_SCHEDULE
    given = special.get(key) or by_default("1F1B", "torchtitan")
    name = str(given.value).strip().lower()
    if key == _OLDEST_SCHEDULE:  # interleaved_1f1b, flexible_interleaved_1f1b
        name = name.replace("_", "").removeprefix("flexible")
    ours = {name.lower(): ours for name, ours in _SCHEDULES.items()}.get(name)
    if ours is None and name not in _ABSTRACT:
        raise ConfigError(
            f"{key}={str(given.value)[:40]} is not a schedule of torch. They are: {', '.join(_SCHEDULES)}.",
            field=key,
            given=str(given.value)[:40],
            nearest=tuple(_SCHEDULES),
        )
    if ours is None or any(str(special[order].value).strip() for order in _ORDERS if order in special):
        return {"pipeline_schedule": Given("looped-bfs", "torchtitan", -1)}  # any number of microbatches
    found = {"pipeline_schedule": Given(ours, given.origin, given.level)}
    if ours in ("zbv", "dualpipev"):
        found["virtual_stages"] = Given(2, given.origin, given.level)
    return found


def _piece(size: int, pieces: int) -> int:
    if size % pieces:
        near = nearest_multiples(pieces, size)
        raise PlanError(
            f"{_OLDEST_MICRO}={size} must be a multiple of the {pieces} pieces of a pipeline: {size} / {pieces} = "
            f"{size / pieces:.2f}. Nearest: {either(near)}.",
            field=_OLDEST_MICRO,
            given=size,
            nearest=near,
        )
    return size // pieces


def _samples(special: Fields, fields: Fields) -> Fields:
    """Tokens as samples of the maximal context."""
    found: Fields = {}
    length = fields.get("sequence_length")
    if length is None:
        raise ConfigError(f"{_MICRO} counts tokens and needs {_LENGTH} to count samples.", field="sequence_length")
    tokens = count(length.value, _LENGTH)
    micro = special.get(_MICRO) or by_default(16384, "torchtitan")
    size = count(micro.value, _MICRO)
    if size % tokens:
        near = nearest_multiples(tokens, size)
        raise PlanError(
            f"{_MICRO}={size} is {size / tokens:.2f} samples of {tokens} tokens. Nearest: {either(near)}.",
            field=_MICRO,
            given=size,
            nearest=near,
        )
    pieces = special.get(_PIECES) or by_default(1, "torchtitan")
    parts = 1
    if _pipeline(fields):
        parts = count(pieces.value, _PIECES)
        found["pipeline_style"] = Given("inner", "torchtitan", -1)
        found["pipeline_microbatches"] = pieces
        found |= _schedule(special)
        rule = _rule(fields, found)
        if rule is not None and (refusal := rule.refusal(parts)):
            near = _near(rule, parts)
            shown = "" if _PIECES in special else f" ({pieces.origin})"
            raise PlanError(
                f"{_PIECES}={parts}{shown}: {refusal}. Nearest: {either(near)}.",
                field=_PIECES,
                given=parts,
                nearest=near,
            )
    found["micro_batch_size"] = Given(size // tokens * parts, micro.origin, micro.level)
    whole = special.get(_STEP)
    if whole and str(whole.value) != "-1":
        found["global_batch_size_tokens"] = whole
    return found


def _pipeline(fields: Fields) -> bool:
    given = fields.get("pipeline_parallel")
    return given is not None and count(given.value, "pipeline_parallel") > 1


def _version_of(keys: Collection[str]) -> Version:
    if set(_OLDEST) & set(keys) and not {_OLD_MICRO, _OLD_GLOBAL, _MICRO, _STEP} & set(keys):
        return (0, 0)
    return (0, 3) if set(_OLD) & set(keys) else NEWEST


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
    if stages > 1 and "pipeline_schedule" in job.numbers:
        made[_SCHEDULE] = next(name for name, ours in _SCHEDULES.items() if ours == job.get("pipeline_schedule"))
    if _OLD_GLOBAL not in made and _STEP not in made and passes > 1:
        job.need("global_batch_size", "torchtitan derives accumulation from the batch of all ranks")
    return made | job.named(_PARALLEL)


_OLD = (_OLD_MICRO, _OLD_GLOBAL, _OLD_LENGTH, _OLD_PIECE)
_OLDEST = (
    _OLDEST_MICRO, _OLDEST_PIECES, _OLDEST_SHARD, _OLDEST_REPLICATE, _OLDEST_SCHEDULE, _ORDERS[1], *_OLDEST_PARALLEL,
)  # fmt: skip

DIALECTS = (
    Dialect(
        name="torchtitan",
        title="torchtitan",
        aliases=("titan",),
        keys={**_PARALLEL, **_OLDEST_PARALLEL, _LENGTH: "sequence_length", _OLD_LENGTH: "sequence_length"},
        special=frozenset(
            {
                *(
                    _MICRO,
                    _STEP,
                    _PIECES,
                    _OLD_MICRO,
                    _OLD_GLOBAL,
                    _OLD_PIECE,
                    _REPLICATE,
                    _SHARD,
                    _SCHEDULE,
                    _ORDERS[0],
                ),
                *_OLDEST[:6],
            }
        ),
        resolve=_resolve,
        signs=("parallelism.", "job.config_file", "training.local_batch_size"),
        programs=("torchtitan",),
        steps={
            "training.steps": "budget",
            "lr_scheduler.warmup_steps": "warmup",
            "training.warmup_steps": "warmup",  # before 0.1
            "checkpoint.interval": "save",
            "validation.freq": "eval",
            "metrics.log_freq": "log",
        },
        versions=("0.3", "2026-08-20"),
        since={**dict.fromkeys((_MICRO, _STEP, _LENGTH, _PIECES), _TOKENS), _OLD_MICRO: (0, 1), _OLD_GLOBAL: (0, 1)},
        until={**dict.fromkeys(_OLD, _TOKENS), **dict.fromkeys(_OLDEST, (0, 1))},
        version_of=_version_of,
        accumulates_once=True,
        write=_write,
        form="toml",
        unit="tokens",
        source="torchtitan 0.3.0 and b5bcd76c6: config/configs.py, trainer.py",
    ),
)
