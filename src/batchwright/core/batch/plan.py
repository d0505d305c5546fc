"""plan: from the known numbers of a job to all of them, each with its source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import gcd, lcm
from typing import TYPE_CHECKING, Any

from batchwright.core import codec
from batchwright.core.errors import PlanError, Violation, either, raise_violations
from batchwright.core.numbers import count, divisors, nearest_divisors, nearest_of

from .equation import Split, Unknowns, ragged_plan, rounded_batch, solve
from .explain import notes_for, provenance
from .loading import Loading, loading
from .pipeline import ASSUMED_LENGTH, Pipeline, PipelineRule
from .request import LARGEST_BATCH, BatchRequest, batch_in_samples, resolve_ranks, unused_pipeline, world_of
from .world import World

if TYPE_CHECKING:
    from batchwright.core.nodes.throughput import Throughput


@dataclass(frozen=True)
class Alternative:
    """Another split of the same batch, and what it would mean."""

    micro_batch_size: int
    accumulation_steps: int
    data_parallel_size: int
    reason: str
    step_seconds: float | None = None


@dataclass(frozen=True)
class BatchPlan:
    """A valid batch: every number, its source (given, derived, probed, estimated, default) and the reason."""

    global_batch_size: int
    micro_batch_size: int
    accumulation_steps: int
    data_parallel_size: int
    batch_quantum: int
    ragged: bool
    devices: int
    nodes: int | None
    devices_per_node: int | None
    tensor_parallel: int
    pipeline_parallel: int
    context_parallel: int
    expert_parallel: int
    expert_tensor_parallel: int | None
    sequence_length: int | None
    global_batch_size_tokens: int | None
    max_micro_batch_size: int | None
    samples_per_second: float | None
    tokens_per_second: float | None
    step_seconds: float | None
    sources: Mapping[str, str]
    reasons: Mapping[str, str]
    pipeline: Pipeline | None
    loading: Loading
    alternatives: tuple[Alternative, ...]
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """The plan as `--json` prints it.

        >>> plan(BatchRequest(micro_batch_size=4, accumulation_steps=8, devices=2)).to_json()["global_batch_size"]
        64
        """
        return {"schema": codec.SCHEMA, **codec.encode(self)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> BatchPlan:
        """The plan that `to_json` wrote."""
        return codec.decode(cls, data)

    @property
    def world(self) -> World:
        """The devices of the plan."""
        return World(
            self.data_parallel_size,
            self.devices_per_node,
            self.tensor_parallel,
            self.pipeline_parallel,
            self.context_parallel,
            self.expert_parallel,
            self.expert_tensor_parallel,
        )


def plan(request: BatchRequest, times: Throughput | None = None) -> BatchPlan:
    """Derive the unknown numbers, or raise a PlanError that shows why there is no solution.

    With measured `times`, every split also has the time of its step.

    >>> p = plan(BatchRequest(global_batch_size=32, nodes=1, devices_per_node=2, max_micro_batch_size=2))
    >>> p.micro_batch_size, p.accumulation_steps, p.data_parallel_size
    (2, 8, 2)
    """
    ranks = resolve_ranks(request)
    batch = batch_in_samples(request)
    rule = pipeline_rule(request)
    unknowns = Unknowns(
        batch,
        request.micro_batch_size,
        _known_steps(request, rule),
        ranks,
        request.max_micro_batch_size,
        rank_step(request),
        rule if request.pipeline_style == "accumulation" else None,
        request.sequence_length,
    )
    raise_violations(PlanError, _unused(request))
    wrong = [] if ranks is None else _world_violations(request, _world(request, ranks))
    notes = list(request.notes)
    try:
        unknowns = rounded_batch(request, unknowns, notes)
        ragged = ragged_plan(request, unknowns)
        found = (ragged,) if ragged else _solved(request, unknowns)
    except PlanError as error:
        raise PlanError(violations=[*wrong, *error.violations]) from None
    raise_violations(PlanError, wrong)
    if rule and request.pipeline_style == "inner":  # prefer splits whose accumulation steps divide into pieces
        pieces = request.pipeline_microbatches or (rule.stages if rule.schedule == "circular" else 1)
        found = tuple(s for s in found if s.micro_batch_size * s.data_parallel_size % pieces == 0) or found
    best = found[0]
    world = _world(request, best.data_parallel_size)
    size = count(unknowns.global_batch_size or best.product, "global_batch_size", most=LARGEST_BATCH)

    def seconds(split: Split) -> float | None:
        return None if times is None else _step_seconds(times, rule, request, split)

    samples_per_second, step_seconds = _speed(request, size)
    if step_seconds is None and (step_seconds := seconds(best)):
        samples_per_second = size / step_seconds
    result = BatchPlan(
        global_batch_size=size,
        micro_batch_size=best.micro_batch_size,
        accumulation_steps=best.accumulation_steps,
        data_parallel_size=best.data_parallel_size,
        batch_quantum=best.micro_batch_size * best.data_parallel_size,
        ragged=ragged is not None,
        devices=world.devices,
        nodes=world.nodes,
        devices_per_node=world.devices_per_node,
        tensor_parallel=world.tensor_parallel,
        pipeline_parallel=world.pipeline_parallel,
        context_parallel=world.context_parallel,
        expert_parallel=world.expert_parallel,
        expert_tensor_parallel=world.expert_tensor_parallel,
        sequence_length=request.sequence_length,
        global_batch_size_tokens=size * request.sequence_length if request.sequence_length else None,
        max_micro_batch_size=request.max_micro_batch_size,
        samples_per_second=samples_per_second,
        tokens_per_second=samples_per_second * request.sequence_length
        if samples_per_second and request.sequence_length
        else None,
        step_seconds=step_seconds,
        sources={},
        reasons={},
        pipeline=_pipeline(request, rule, best, size),
        loading=loading(
            size,
            hosts=_hosts(request, world),
            expansion_factor=request.expansion_factor,
            loading_hosts=request.loading_hosts,
            stored_hosts=request.stored_hosts,
            equal_rows=request.equal_rows,
            read_ahead=request.read_ahead,
        ),
        alternatives=tuple(_alternative(best, other, seconds(other)) for other in found[1:]),
        notes=(),
    )
    sources, reasons = provenance(request, unknowns, result, rule)
    if times is not None and request.step_seconds is None and request.samples_per_second is None:
        for name in ("step_seconds", "samples_per_second"):
            sources[name], reasons[name] = (
                "probed",
                f"{best.accumulation_steps} × the micro step of {best.micro_batch_size}",
            )
    result = replace(result, sources=sources, reasons=reasons)
    return replace(result, notes=(*notes, *notes_for(result, chosen=len(found) > 1)))


def _unused(request: BatchRequest) -> list[Violation]:
    found = unused_pipeline(request)
    if request.round and request.allow_ragged:
        message = "round and allow_ragged are mutually exclusive."
        found.append(Violation(message, "round", request.round))
    return found


def _hosts(request: BatchRequest, world: World) -> int:
    known = request.hosts or world.nodes
    asked = [n for n in ("loading_hosts", "stored_hosts") if getattr(request, n) is not None]
    if request.expansion_factor not in (None, 1):
        asked.append("expansion_factor")
    if known is None and asked:
        raise PlanError(f"{asked[0]} needs the number of hosts: give hosts or nodes.", field="hosts")
    return known or 1


def _known_steps(request: BatchRequest, rule: PipelineRule | None) -> int | None:
    """The accumulation steps; in pipeline_style accumulation they are the pipeline's microbatches."""
    pieces, steps = request.pipeline_microbatches, request.accumulation_steps
    if rule is None or request.pipeline_style == "inner" or pieces is None:
        return steps
    if steps not in (None, pieces):
        raise PlanError(
            f"pipeline_microbatches={pieces} contradicts accumulation_steps={steps}: in pipeline_style accumulation they "
            f"are the same number. Nearest: {steps}, or pipeline_style inner.",
            field="pipeline_microbatches",
            given=pieces,
            nearest=(steps,),
        )
    return pieces


def _solved(request: BatchRequest, given: Unknowns) -> tuple[Split, ...]:
    """Every split, best first: on ranks that hold whole groups of experts if possible, else on any ranks."""
    step = rank_step(request, experts=True)
    if given.data_parallel_size is None and step != given.rank_step:
        try:
            return solve(replace(given, rank_step=step))
        except PlanError:
            pass  # no such ranks: a note says so, since experts do not affect the batch
    return solve(given)


def rank_step(request: BatchRequest, *, experts: bool = False) -> int:
    """A free number of ranks must be a multiple of this: whole nodes and, with `experts`, whole groups of experts."""
    world = world_of(request, 1)
    step = lcm(world.replica_step, world.expert_step if experts else 1)
    if request.nodes and world.devices_per_node is None:
        step = lcm(step, request.nodes // gcd(request.nodes, world.model_parallel_size))
    return step


def _world(request: BatchRequest, ranks: int) -> World:
    world = world_of(request, ranks)
    if request.nodes and not world.devices_per_node and world.devices % request.nodes == 0:
        return replace(world, devices_per_node=world.devices // request.nodes)
    return world


def _world_violations(request: BatchRequest, world: World) -> list[Violation]:
    if request.nodes is None or world.nodes == request.nodes:
        return world.violations()
    near = nearest_divisors(world.devices, request.nodes)
    return [
        *world.violations(),
        Violation(
            f"nodes={request.nodes} does not divide the {world.devices} devices: {world.devices} / {request.nodes} "
            f"= {world.devices / request.nodes:.2f} devices per node. Nearest: {either(near)} nodes.",
            "nodes",
            request.nodes,
            near,
        ),
    ]


def pipeline_rule(request: BatchRequest) -> PipelineRule | None:
    """The pipeline schedule of a request, or None without a pipeline."""
    if request.pipeline_parallel == 1:
        return None
    inner = request.pipeline_style == "inner"
    schedule = request.pipeline_schedule or (
        "circular" if inner else "interleaved" if request.virtual_stages > 1 else "1f1b"
    )
    made = PipelineRule(
        schedule, request.pipeline_parallel, request.virtual_stages, request.pipeline_group, request.delayed_forwarding
    )
    measured = request.half_speed_tokens
    return made if measured is None else replace(made, half_speed_tokens=measured)


def _pipeline(request: BatchRequest, rule: PipelineRule | None, split: Split, batch: int) -> Pipeline | None:
    """The microbatches: the accumulation steps themselves, or pieces inside one of them."""
    if rule is None:
        return None
    pieces = inner = _inner_microbatches(request, rule, split)
    if pieces is None:
        pieces = split.accumulation_steps
    else:
        quantum = split.micro_batch_size * split.data_parallel_size
        valid = [m for m in divisors(quantum) if rule.refusal(m) is None]
        if pieces not in valid:
            reason = rule.refusal(pieces) or (
                f"they do not divide the {quantum} samples of one accumulation step: {quantum} / {pieces} = "
                f"{quantum / pieces:.2f}"
            )
            near = nearest_of(valid, pieces)
            raise PlanError(
                f"pipeline_microbatches={pieces}: {reason}. "
                + (f"Nearest: {either(near)}." if near else f"No number of microbatches works with {quantum} samples."),
                field="pipeline_microbatches",
                given=pieces,
                nearest=near,
            )
    whole = split.micro_batch_size if inner else -(-batch // split.data_parallel_size)
    tokens = whole * (request.sequence_length or ASSUMED_LENGTH)
    most = request.max_micro_batch_size if not inner else None
    candidates = [m for m in divisors(whole) if most is None or whole // m <= most]
    return Pipeline(
        schedule=rule.schedule,
        stages=rule.stages,
        virtual_stages=rule.virtual_stages,
        pipeline_microbatches=pieces,
        bubble_fraction=float(rule.bubble(pieces)),
        pipeline_style=request.pipeline_style,
        recommended_microbatches=rule.best(candidates, tokens),
    )


def _inner_microbatches(request: BatchRequest, rule: PipelineRule, split: Split) -> int | None:
    """The microbatches inside one accumulation step; None if the accumulation steps are the microbatches."""
    if request.pipeline_style == "accumulation":
        return None
    quantum, fewest = split.micro_batch_size * split.data_parallel_size, rule.fewest
    valid = (m for m in divisors(quantum) if m >= fewest and rule.refusal(m) is None)
    return request.pipeline_microbatches or next(valid, fewest)


def _speed(request: BatchRequest, batch: int) -> tuple[float | None, float | None]:
    """samples_per_second and step_seconds, each from the other: step_seconds = global_batch_size / samples_per_second."""
    speed, seconds = request.samples_per_second, request.step_seconds
    if speed and seconds and abs(batch / speed - seconds) > 0.01 * seconds:  # 1%: people round both
        raise PlanError(
            f"step_seconds={seconds:g} contradicts samples_per_second: {batch} / {speed:g} = {batch / speed:.4g} s. "
            f"Nearest: step_seconds={batch / speed:.4g}.",
            field="step_seconds",
            given=seconds,
            nearest=(batch / speed,),
        )
    if speed:
        return speed, batch / speed
    return (batch / seconds, seconds) if seconds else (None, None)


def _step_seconds(times: Throughput, rule: PipelineRule | None, request: BatchRequest, split: Split) -> float:
    idle = 0.0
    if rule is not None:
        idle = rule.idle_steps(split.accumulation_steps, _inner_microbatches(request, rule, split))
    return times.step_seconds(
        nodes=1, micro_batch_size=split.micro_batch_size, accumulation_steps=split.accumulation_steps, idle=idle
    )


def _alternative(best: Split, other: Split, seconds: float | None) -> Alternative:
    micro, steps, ranks = other.micro_batch_size, other.accumulation_steps, other.data_parallel_size
    parts: list[str] = []
    if micro < best.micro_batch_size:
        parts.append("less memory per device")
    elif micro > best.micro_batch_size:
        parts.append("more memory per device")
    if steps > best.accumulation_steps:
        parts.append(f"{steps / best.accumulation_steps:g}× the micro steps")
    elif steps < best.accumulation_steps:
        parts.append(f"{best.accumulation_steps / steps:g}× fewer micro steps")
    if ranks != best.data_parallel_size:
        parts.append(f"{ranks} rank{'s' * (ranks > 1)} instead of {best.data_parallel_size}")
    return Alternative(micro, steps, ranks, "; ".join(parts), seconds)
