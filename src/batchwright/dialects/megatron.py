"""Megatron-LM's flags. `--micro-batch-size` and `--global-batch-size` are the same as batchwright's.

Up to core 0.17 the batch grows linearly (`--rampup-batch-size START INCREMENT SAMPLES`); from 0.18 on in steps
(`--step-batch-size-schedule "TOKENS:SIZE ..."`), and the old flag is accepted and ignored.
"""

from __future__ import annotations

from typing import Any

from batchwright.core.errors import ConfigError, PlanError, either
from batchwright.core.fields import switch
from batchwright.core.numbers import count, nearest_multiples

from .record import Dialect, Fields, Finding, Given, Job, Reading, Version, count_ranks, error, note

_SCHEDULE = "step_batch_size_schedule"
_TRIPLE = "rampup_batch_size"
_LAYERS = "num_layers_per_virtual_pipeline_stage"
_SHRINK = "decrease_batch_size_if_needed"
_EVAL, _EVAL_MICRO = "eval_global_batch_size", "eval_micro_batch_size"
STEPPED: Version = (0, 18)  # the core in which the step schedule replaced the triple


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
        found["linear"] = spaced(special[_TRIPLE])
        notes.append(
            "Megatron-core 0.18 and later accept --rampup-batch-size and ignore it: the batch stays constant there."
        )
    shrink = special.get(_SHRINK)
    if shrink and switch(shrink.value, _SHRINK):
        found["round"] = Given("down", shrink.origin, shrink.level)
    return found, notes


def spaced(given: Given) -> Given:
    """A triple that is written with spaces instead of commas."""
    if isinstance(given.value, str):
        return Given(",".join(_parts(given.value)), given.origin, given.level)
    return given


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


def check(reading: Reading) -> list[Finding]:
    """The ramp that this version reads, and what its schedule excludes."""
    found: list[Finding] = []
    if _TRIPLE in reading.given:
        found += ignored_triple(
            reading, _TRIPLE, "global_batch_size", "--step-batch-size-schedule", reading.version >= STEPPED
        )
    if _SCHEDULE in reading.given:
        if reading.version < STEPPED:
            found.append(
                error(
                    "unknown-key",
                    f"{_SCHEDULE}: Megatron-core before 0.18 does not have it, but --rampup-batch-size START INCREMENT SAMPLES.",
                    _SCHEDULE,
                )
            )
        if "global_batch_size" in reading.given:
            found.append(
                error(
                    "excluded-key",
                    f"global_batch_size={reading.value('global_batch_size')} and {_SCHEDULE}: Megatron raises ValueError for "
                    "both. The last size of the schedule is the final batch: leave global_batch_size out.",
                    "global_batch_size",
                )
            )
        if reading.on(_SHRINK):
            found.append(
                error("excluded-key", f"{_SHRINK} and {_SCHEDULE}: Megatron raises ValueError for both.", _SHRINK)
            )
        found += [
            error(
                "steps-of-the-first-batch",
                f"{key}={reading.value(key)}: with a schedule Megatron converts iterations to samples by micro batch × "
                f"ranks, not by the batch of the schedule. Give {key.replace('iters', 'samples')}.",
                key,
            )
            for key in ("lr_decay_iters", "lr_warmup_iters")
            if key in reading.given
        ]
    found += _evaluation(reading)
    if not reading.on("calculate_per_token_loss"):
        found.append(
            note(
                "mean-of-means",
                "calculate_per_token_loss is false (the default): the gradient is a mean of the micro batches' means, so "
                "each micro batch counts the same, however many tokens it has. true divides by the tokens of the step.",
                "calculate_per_token_loss",
            )
        )
    return found


def _evaluation(reading: Reading) -> list[Finding]:
    """The batch of evaluation: whole micro batches of all ranks; by default the global batch and the micro batch."""
    ranks = count_ranks(reading.fields)
    if ranks is None or not {_EVAL, _EVAL_MICRO} & set(reading.given) or "micro_batch_size" not in reading.given:
        return []
    each = count(reading.value("micro_batch_size"), "micro_batch_size")
    micro = count(reading.value(_EVAL_MICRO, each), _EVAL_MICRO)
    # With a schedule, Megatron sets the global batch to one micro batch of each rank.
    batch = count(reading.value(_EVAL, reading.value("global_batch_size", each * ranks)), _EVAL)
    if batch % (micro * ranks) == 0:
        return []
    near = nearest_multiples(micro * ranks, batch)
    shown = _EVAL if _EVAL in reading.given else "global_batch_size"
    named = _EVAL_MICRO if _EVAL_MICRO in reading.given else "micro_batch_size"
    return [
        error(
            "eval-batch",
            f"{shown}={batch} is the batch of evaluation and must be a multiple of {named} {micro} × {ranks} ranks = "
            f"{micro * ranks}: {batch} / {micro * ranks} = {batch / micro / ranks:.2f}. Nearest: {either(near)} for {_EVAL}.",
            _EVAL,
            near,
        )
    ]


def ignored_triple(reading: Reading, key: str, target: str, instead: str, ignored: bool) -> list[Finding]:
    """A ramp that this version ignores, with the schedule that does the same; or boundaries that it reaches late."""
    from batchwright.core.ramp.rules import Linear

    try:
        start, increment, samples = (count(part, key, least=0) for part in _parts(reading.value(key)))
        ramp = Linear(start, increment, samples, count(reading.value(target), target))
    except (PlanError, ValueError):
        return []  # the equation reports it
    if not ignored:
        return _late(ramp, key)
    length = reading.fields.get("sequence_length")
    if length is None:
        same = f"Give seq_length to see the {instead} that does the same."
    else:
        tokens = count(length.value, "sequence_length")
        same = f'The same ramp: {instead} "{schedule_text([(s.at * tokens, s.global_batch_size) for s in ramp.switches()])}".'
    return [
        error(
            "ignored-key",
            f"{key}={_shown(reading.value(key))} is accepted and ignored by Megatron-core 0.18 and later: the batch is "
            f"{ramp.target} from the first step, not {ramp.start}. {same} If the job has an older "
            f"version, name it: --from {reading.dialect.name}@{reading.dialect.versions[0]}.",
            key,
        )
    ]


def _late(ramp: Any, key: str) -> list[Finding]:
    """Stages that Megatron's float division reaches one step late: int(c / (samples / n)) is below c × n // samples."""
    n, late = ramp.num_increments, []
    if not n or not ramp.samples:
        return []
    for segment in ramp.compile().segments[1:]:
        exact = segment.start_sample * n // ramp.samples
        if segment.start_sample <= ramp.samples and int(segment.start_sample / (ramp.samples / n)) < exact:
            late.append(segment)
    if not late:
        return []
    return [
        note(
            "float-boundary",
            f"Megatron divides floats: at sample {late[0].start_sample:,} it is still at the batch before "
            f"{late[0].global_batch_size}, one step late. The exact ramp changes there.",
            key,
        )
    ]


def _parts(value: Any) -> list[Any]:
    if isinstance(value, str):
        return value.strip("[]() ").replace(",", " ").split()
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _shown(value: Any) -> str:
    return "[" + ", ".join(str(part) for part in _parts(value)) + "]"


def schedule_text(pairs: list[tuple[int, int]]) -> str:
    """Megatron's step schedule.

    >>> schedule_text([(0, 768), (250_000_000_000, 1536)])
    '0:768 250B:1536'
    """

    def short(number: int) -> str:
        for suffix, factor in (("T", 10**12), ("B", 10**9), ("M", 10**6)):
            if number and number % factor == 0:
                return f"{number // factor}{suffix}"
        return str(number)

    return " ".join(f"{short(at)}:{size}" for at, size in pairs)


PARALLEL = {
    "tensor_model_parallel_size": "tensor_parallel",
    "pipeline_model_parallel_size": "pipeline_parallel",
    "context_parallel_size": "context_parallel",
    "expert_model_parallel_size": "expert_parallel",
    "expert_tensor_parallel_size": "expert_tensor_parallel",
}


def _write(job: Job, version: Version) -> dict[str, Any]:
    """The flags of this version: thresholds in tokens from core 0.18 on, a triple before."""
    from .ramps import micro_of_all_stages, token_thresholds, triple

    made = job.named(
        {
            "micro_batch_size": "micro_batch_size",
            "global_batch_size": "global_batch_size",
            "seq_length": "sequence_length",
            **PARALLEL,
            "num_virtual_stages_per_pipeline_rank": "virtual_stages",
            "microbatch_group_size_per_virtual_pipeline_stage": "pipeline_group",
            "train_samples": "samples",
        }
    )
    job.need("global_batch_size", "Megatron-LM counts the global batch over all devices")
    if job.schedule is None or len(job.schedule.segments) < 2:
        return made
    made |= {"micro_batch_size": micro_of_all_stages(job)} if "micro_batch_size" in made else {}
    if version < STEPPED:
        ramp = triple(job)
        return made | ({} if ramp is None else {_TRIPLE: list(ramp)})
    length = job.need("sequence_length", "Megatron-LM's step schedule counts tokens")
    del made["global_batch_size"]
    # With a schedule, Megatron would convert iterations to samples by the first batch.
    for key, role in _SAMPLES.items():
        if role in job.steps and key not in made:
            made[key] = job.schedule.at_step(job.steps[role]).start_sample
    return made | {_SCHEDULE: schedule_text(token_thresholds(job, length))}


_SAMPLES = {"train_samples": "budget", "lr_warmup_samples": "warmup", "lr_decay_samples": "decay"}
_BATCH = frozenset({"micro_batch_size", "global_batch_size"})  # other frameworks have these, too

DIALECTS = (
    Dialect(
        name="megatron-lm",
        title="Megatron-LM",
        aliases=("megatron", "megatron-core", "mcore"),
        keys={
            "micro_batch_size": "micro_batch_size",
            "global_batch_size": "global_batch_size",
            **PARALLEL,
            "num_virtual_stages_per_pipeline_rank": "virtual_stages",
            "microbatch_group_size_per_virtual_pipeline_stage": "pipeline_group",
            "seq_length": "sequence_length",
            "train_samples": "samples",
        },
        special=frozenset({_SCHEDULE, _TRIPLE, _LAYERS, "num_layers", _SHRINK}),
        resolve=_resolve,
        common=_BATCH | {"num_layers"},
        signs=("tensor_model_parallel_size", "train_iters", _TRIPLE, _SCHEDULE),
        programs=tuple(
            f"pretrain_{model}.py" for model in ("gpt", "bert", "t5", "vlm", "mamba", "hybrid", "retro", "ict")
        ),
        together=frozenset({"num_attention_heads", "micro_batch_size"}),
        checked=frozenset({"calculate_per_token_loss", _EVAL, _EVAL_MICRO}),
        steps={
            "train_iters": "budget",
            "lr_warmup_iters": "warmup",
            "lr_decay_iters": "decay",
            "save_interval": "save",
            "eval_interval": "eval",
            "log_interval": "log",
        },
        in_samples=_SAMPLES,
        versions=("0.17", "0.18"),
        ignores_triple=STEPPED,
        gradient={"calculate_per_token_loss": None},
        accumulates_once=True,
        check=check,
        write=_write,
        form="dashes",
        source="megatron-core 0.16.1 and 0.19.2: core/num_microbatches_calculator.py; Megatron-LM d98e8a64dd: training",
    ),
)
