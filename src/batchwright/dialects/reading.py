"""A configuration read as its framework reads it, and the batch that it means."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from batchwright.core.batch.plan import plan
from batchwright.core.batch.request import READERS, BatchRequest, batch_in_samples, read_request, resolve_ranks
from batchwright.core.errors import ConfigError, PlanError, did_you_mean
from batchwright.core.numbers import count

from . import Candidates, detect, dialects, framework, resolve
from .record import (
    AUTO,
    NEWEST,
    PARALLEL_FIELDS,
    RL_FIELDS,
    RULES,
    WORLD_FIELDS,
    Dialect,
    Fields,
    Finding,
    Given,
    Job,
    Reading,
    Version,
    error,
    parse_version,
)

if TYPE_CHECKING:
    from batchwright.core.ramp.schedule import Rule, Schedule

RAMP = (*RULES, "allow_falling")


def named(text: str) -> tuple[Dialect, Version]:
    """A framework and its version, from `NAME` or `NAME@VERSION`.

    >>> dialect, version = named("megatron-lm@0.17")
    >>> dialect.title, version
    ('Megatron-LM', (0, 17))
    """
    name, _, version = text.partition("@")
    return framework(name), parse_version(version) if version else NEWEST


def read(
    entries: Iterable[tuple[str, Given]],
    *,
    words: Iterable[str] = (),
    name: str | None = None,
    world: Mapping[str, Given] | None = None,
) -> Reading:
    """The reading of these keys: by the framework that is named (`NAME@VERSION`), or by the one that they belong to.

    `words` are those of the command line that the keys come from, `world` are fields of batchwright about the devices.
    """
    entries = list(entries)
    keys = [key for key, _ in entries]
    if name is None:
        dialect, by = detect(keys, list(words))
        version = NEWEST
        if dialect is None:
            raise ConfigError(
                "These keys belong to no framework that batchwright knows. Name it with --from NAME; "
                f"the names are {', '.join(d.name for d in dialects()[:-1])}.",
                field="from",
            )
    else:
        (dialect, version), by = named(name), []
    if version == NEWEST and dialect.version_of:
        version = dialect.version_of(keys)
    given_here = {key for key, value in entries if value.value != AUTO and value.section not in dialect.beside}
    filled_in = [key for key, value in entries if key not in given_here and value.section not in dialect.beside]
    launchers = dialects()[-1]
    beside = [d for d in dialects(dialect.kind) if d.name in dialect.beside]
    given: dict[str, Given] = {}
    passed_over: list[str] = []
    findings: list[Finding] = []
    taken: list[tuple[str, Given]] = []
    candidates = Candidates([*dialect.keys, *dialect.special, *dialect.checked, *dialect.steps, *dialect.in_samples])
    theirs: dict[str, Given] = {}
    for key, value in entries:
        if value.section in dialect.beside:
            taken.append((key, value))
            if value.value != AUTO and framework(value.section).reads(key):
                theirs[key] = value
            elif value.value != AUTO:
                passed_over.append(key)
            continue
        if value.value == AUTO:
            if dialect.reads(key) and key not in given_here:
                taken.append((key, value))
            continue
        if key in dialect.known:
            if key not in given or given[key].level <= value.level:
                given[key] = value
        elif any(d.reads(key) for d in beside):
            theirs[key] = value
        elif key not in launchers.keys:
            if candidates.is_misspelt(key):
                findings.append(_misspelt(key, candidates.keys, dialect))
            else:
                passed_over.append(key)
            continue
        if dialect.reads(key) or key not in dialect.known:
            taken.append((key, value))
    taken += (world or {}).items()
    fields: Fields = {}
    notes: tuple[str, ...] = ()
    try:
        ours = {*WORLD_FIELDS, *PARALLEL_FIELDS, "sequence_length"} - set(given)
        resolved = resolve(taken, own=ours, lenient=True, kind=dialect.kind, framework=dialect)
        fields, notes = resolved.fields, resolved.notes
        if dialect.ignores_triple and version >= dialect.ignores_triple:
            fields.pop("linear", None)  # the batch stays constant
    except PlanError as wrong:
        findings += [error("value", v.message, v.field, v.nearest) for v in wrong.violations]
    return Reading(
        dialect, version, tuple(by), given, fields, notes, tuple(passed_over), tuple(findings), tuple(filled_in), theirs
    )


def _misspelt(key: str, candidates: Iterable[str], dialect: Dialect) -> Finding:
    from difflib import get_close_matches

    close = get_close_matches(key, list(candidates), n=2, cutoff=0.85)
    return error(
        "misspelt-key", f"{key[:60]} is not a key of {dialect.title}.{did_you_mean(close)}", key[:60], tuple(close)
    )


def job(reading: Reading) -> Job:
    """The batch that a configuration means, or a PlanError that says why it has none."""
    if any(finding.cause == "value" for finding in reading.findings):
        raise ConfigError(" ".join(f.message for f in reading.findings if f.cause == "value"), field="file")
    steps: dict[str, int] = {}
    for key, number in steps_of(reading).items():
        steps.setdefault(reading.dialect.steps[key], number)
    values = {name: given.value for name, given in reading.fields.items()}
    if reading.dialect.kind == "rl":
        made = Job("rl", _rl_numbers(values, reading.dialect), steps=steps)
        if not reading.dialect.counts_rounds:
            return made
        return replace(made, steps={role: n * made.updates_of_a_round for role, n in steps.items()})
    request = read_request({name: value for name, value in values.items() if name in READERS})
    wanted = {name: values[name] for name in RAMP if name in values}
    rule: Rule | None = None
    schedule: Schedule | None = None
    if any(name in RULES for name in wanted):
        from batchwright.core.ramp.request import compile_schedule, read_ramp

        schedule, rule = compile_schedule(request, read_ramp(wanted), None)
        request = _at_the_end(request, schedule, rule)
    numbers = _numbers(request, {reading.dialect.keys.get(key, "") for key in reading.filled_in})
    if "pipeline_schedule" in numbers and reading.fields["pipeline_schedule"].level < 0:
        del numbers["pipeline_schedule"]  # a default, or a choice of the reader
    numbers |= {name: count(values[name], name, most=10**18) for name in ("samples", "tokens") if name in values}
    return Job("train", numbers, rule, schedule, steps)


def steps_of(reading: Reading) -> dict[str, int]:
    """The keys that count optimizer steps; shares (0.05 of all steps), epochs and -1 (off) are none."""
    texts = {key: str(reading.value(key, "")).strip().removesuffix("ba") for key in reading.dialect.steps}
    return {key: int(text) for key, text in texts.items() if text.isdecimal() and len(text) < 19 and int(text) > 0}


def _at_the_end(request: BatchRequest, schedule: Schedule, rule: Rule) -> BatchRequest:
    """The request for the last batch of a ramp. MaxText's ramp ends at the size per device that is its maximum."""
    from batchwright.core.ramp.rules import PerDevice

    last = schedule.segments[-1].global_batch_size
    if isinstance(rule, PerDevice):
        return replace(request, global_batch_size=last, micro_batch_size=None, max_micro_batch_size=None)
    return replace(request, global_batch_size=last, global_batch_size_tokens=None)


def _numbers(request: BatchRequest, filled_in: Collection[str]) -> dict[str, Any]:
    """The numbers that the configuration determines: with an unknown number of ranks, not all of the equation.

    Fields that another program fills in are not chosen here.
    """
    batch, ranks = batch_in_samples(request), resolve_ranks(request)
    micro, steps = request.micro_batch_size, request.accumulation_steps
    given = {name: getattr(request, name) for name in request.given if name not in RAMP}
    if ranks is None and None in (batch, micro, steps):
        if batch is not None and micro is not None:
            plan(request)  # the batch must hold whole micro batches, on any number of ranks
        return given
    if (batch is None and micro is None) or ({*_SIZES} & {*filled_in} and (batch, micro, steps).count(None) > 1):
        return given | {"data_parallel_size": ranks}
    made = plan(request)
    found = {name: getattr(made, name) for name in _EQUATION}
    found |= {name: getattr(made, name) for name in ("nodes", "devices_per_node") if getattr(made, name) is not None}
    for name in (*PARALLEL_FIELDS, "virtual_stages"):
        if (value := getattr(request, name)) not in (None, 1):
            found[name] = value
    pieces = made.pipeline.pipeline_microbatches if made.pipeline else 1
    if made.pipeline and request.pipeline_style == "inner" and made.micro_batch_size % pieces == 0:
        # A pipeline microbatch counts as a micro batch: what Megatron calls accumulation.
        found["micro_batch_size"] //= pieces
        found["accumulation_steps"] *= pieces
        found["pipeline_passes"] = made.accumulation_steps
    left = {name: value for name, value in given.items() if name not in found and name not in _DERIVED}
    return left | found


_MICRO = {"train_micro_prompts", "train_micro_responses", "micro_batch_size"}
_SIZES = ("global_batch_size", "micro_batch_size", "accumulation_steps")
_EQUATION = (*_SIZES, "data_parallel_size", "devices")
# Said by other numbers, or a choice of the reader.
_DERIVED = (
    "global_batch_size_tokens", "max_micro_batch_size", "pipeline_style", "pipeline_microbatches", "allow_ragged", "round",
    *PARALLEL_FIELDS, "virtual_stages",
)  # fmt: skip


def _rl_numbers(values: Mapping[str, Any], dialect: Dialect) -> dict[str, Any]:
    """The numbers of a round; the micro batch in responses of a rank, unless it is filled up to a number of tokens."""
    given = {name: value for name, value in values.items() if name in RL_FIELDS}
    for name in ("prompts", "generations"):
        if name not in given:
            raise ConfigError(f"{name} is required.", field=name)
    from batchwright.core.rl import rl

    made = rl(**given)
    found: dict[str, Any] = {
        "prompts": made.prompts_per_round,
        "generations": made.generations_per_prompt,
        "updates": made.updates_per_pass,
        "iterations": made.iterations,
        "data_parallel_size": made.data_parallel_size,
    }
    if dialect.all_at_once or _MICRO & set(given):
        found["train_micro_responses"] = made.train_micro_responses
    if made.rollout_micro_steps > 1:
        found["rollout_micro_prompts"] = made.rollout_micro_prompts
    if made.rounds_ahead:
        found["rounds_ahead"] = made.rounds_ahead
    world = {name: values[name] for name in (*WORLD_FIELDS[1:], *PARALLEL_FIELDS) if name in values}
    request = read_request(world)
    return found | {
        name: getattr(request, name) for name in world if getattr(request, name) != 1 or name in WORLD_FIELDS
    }
