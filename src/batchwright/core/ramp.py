"""ramp: a rule, a budget and a world in; every stage with its nodes, its cost and its learning rate out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from . import codec
from .errors import ConfigError, ScheduleError, raise_violations
from .nodes import NodePlan, place
from .plan import pipeline_rule
from .ramp_request import RULE_FLAGS, RampRequest
from .recipes import Recipe, recipe
from .request import Request, choice, resolve_ranks, world_of
from .rules import Constant, Doubling, Linear, PerDevice, parse_thresholds
from .scaling import HorizonCheck, StageRate, Suggestion, check_horizon, stage_rates, suggested_rule
from .schedule import Rule, Schedule, Step, Unit
from .throughput import StageSeconds, Throughput
from .units import count


@dataclass(frozen=True)
class Ramp:
    """A schedule, where each stage runs, what it costs, and the learning rate beside it."""

    schedule: Schedule
    placement: NodePlan | None
    rates: tuple[StageRate, ...]
    suggestion: Suggestion | None
    horizon: HorizonCheck | None
    notes: tuple[str, ...]

    def at_step(self, step: int) -> Step:
        """The span of an optimizer step."""
        return self.schedule.at_step(step)

    def at_sample(self, sample: int) -> Step:
        """The step that owns a sample."""
        return self.schedule.at_sample(sample)

    def stages(self) -> list[dict[str, Any]]:
        """One record per stage, with the keys others rely on; what needs a world is None without one."""
        rows: list[dict[str, Any]] = []
        for index, segment in enumerate(self.schedule.segments):
            placed = self.placement.stages[index] if self.placement else None
            rows.append(
                {
                    "index": index,
                    "global_batch_size": segment.global_batch_size,
                    "first_step": segment.first_step,
                    "steps": segment.steps,
                    "start_sample": segment.start_sample,
                    "end_sample": segment.end_sample,
                    "sequence_length": segment.sequence_length,
                    "start_token": segment.start_token,
                    "end_token": segment.end_token,
                }
                | {name: getattr(placed, name, None) for name in _PLACED}
            )
        return rows

    def to_json(self) -> dict[str, Any]:
        """The ramp as `--json` prints it."""
        placed = self.placement
        return {
            "schema": codec.SCHEMA,
            "stages": self.stages(),
            "total_steps": self.schedule.total_steps,
            "total_samples": self.schedule.total_samples,
            "total_tokens": self.schedule.total_tokens,
            "last_step": self.schedule.last_step,
            "policy": placed.policy if placed else None,
            "launches": codec.encode(placed.launches) if placed else None,
            "hours": placed.hours if placed else None,
            "node_hours": placed.node_hours if placed else None,
            "full_cluster_hours": placed.full_cluster_hours if placed else None,
            "full_cluster_node_hours": placed.full_cluster_node_hours if placed else None,
            "saved_node_hours": placed.saved_node_hours if placed else None,
            "learning_rate": codec.encode(self.rates),
            "learning_rate_suggestion": codec.encode(self.suggestion),
            "learning_rate_horizon": codec.encode(self.horizon),
            "notes": list(self.notes),
        }


_PLACED = (
    "nodes", "data_parallel_size", "micro_batch_size", "accumulation_steps", "ragged", "step_seconds", "hours",
    "node_hours",
)  # fmt: skip


def ramp(request: Request, wanted: RampRequest) -> Ramp:
    """Compile the rule, check and place every stage, and put the learning rate beside it.

    >>> from batchwright.core.ramp_request import read_ramp
    >>> r = ramp(Request(global_batch_size=1024), read_ramp({"linear": "256,128,50M"}))
    >>> [s.global_batch_size for s in r.schedule.segments], r.schedule.ramp_steps
    ([256, 384, 512, 640, 768, 896, 1024], 103703)
    """
    published = recipe(wanted.recipe) if wanted.recipe else None
    schedule = _schedule(request, wanted, published)
    if published and published.tensor_parallel and request.nodes:
        request = replace(
            request,
            tensor_parallel=max(request.tensor_parallel, published.tensor_parallel),
            devices_per_node=request.devices_per_node or published.devices_per_node,
            micro_batch_size=request.micro_batch_size or published.samples_per_replica,
        )
    placement = _placement(request, wanted, schedule)
    rates, suggestion = _rates(wanted, schedule)
    horizon = None
    if wanted.lr_horizon_steps or wanted.lr_horizon_samples:
        if schedule.total_samples is None:
            raise ScheduleError(
                "a learning-rate horizon is checked against a budget: give samples or tokens.", field="samples"
            )
        horizon = check_horizon(
            schedule.segments,
            schedule.total_samples,
            steps=wanted.lr_horizon_steps,
            samples=wanted.lr_horizon_samples,
        )
    notes = [*request.notes, *schedule.notes]
    if schedule.ending:
        notes.append(f"{schedule.ending} (last_step {schedule.last_step})")
    if placement:
        notes += placement.notes
    if suggestion and wanted.lr_scaling is None and len(schedule.segments) > 1:
        notes.append(f"Suggested lr_scaling: {suggestion.rule}; {suggestion.reason}. Not applied unless asked for.")
    if horizon and not horizon.ok:
        notes.append(f"Learning rate: {horizon.message}")
    return Ramp(schedule, placement, rates, suggestion, horizon, tuple(notes))


def _schedule(request: Request, wanted: RampRequest, published: Recipe | None) -> Schedule:
    if published:
        compiled = published.schedule()
        if wanted.samples or wanted.tokens:
            compiled = replace(published, samples=None, tokens=None).schedule()
    else:
        compiled = _rule(request, wanted).compile()
    if wanted.samples is None and wanted.tokens is None:
        return compiled
    return compiled.until(wanted.samples, tokens=wanted.tokens, last_step=wanted.last_step)  # type: ignore[arg-type]


def _rule(request: Request, wanted: RampRequest) -> Rule:
    length, target = request.sequence_length, request.global_batch_size
    named = [name for name in RULE_FLAGS if getattr(wanted, name)]
    if len(named) > 1:
        raise ConfigError(f"{' and '.join(named)} are two rules: give one.", field=named[1])
    if not named:
        return Constant(_needed(target, "a constant batch"), length)
    if wanted.linear:
        start, increment, samples = wanted.linear
        return Linear(
            count(start, "start"),
            count(increment, "increment", least=0),
            count(samples, "samples", least=0),
            _needed(target, "a linear ramp's target"),
            length,
            wanted.allow_falling,
        )
    if wanted.per_device:
        start, increment, end, samples = wanted.per_device
        return PerDevice(
            start,
            increment,
            end,
            count(samples, "samples", least=0),
            _devices(request),
            request.accumulation_steps or 1,
            length,
        )
    if wanted.doubling:
        start, every, *rest = wanted.doubling
        unit: Unit = choice("samples", "tokens", "steps")(rest[0], "doubling") if rest else "samples"  # type: ignore[assignment]
        return Doubling(
            count(start, "start"), _needed(target, "a doubling's target"), count(every, "every"), unit, length
        )
    unit = {"thresholds": "samples", "thresholds_tokens": "tokens", "thresholds_steps": "steps"}[named[0]]  # type: ignore[assignment]
    return parse_thresholds(getattr(wanted, named[0]), unit, length, allow_falling=wanted.allow_falling)


def _needed(target: int | None, what: str) -> int:
    if target is None:
        raise ScheduleError(f"{what} is global_batch_size: it is not given.", field="global_batch_size")
    return target


def _devices(request: Request) -> int:
    ranks = resolve_ranks(request)
    if ranks is None:
        raise ScheduleError(
            "a per-device ramp needs the number of devices: devices, or nodes and devices_per_node.", field="devices"
        )
    return world_of(request, ranks).devices


def _placement(request: Request, wanted: RampRequest, schedule: Schedule) -> NodePlan | None:
    ranks = resolve_ranks(request)
    if ranks is None and request.nodes is None:
        if wanted.node_policy:
            raise ScheduleError(f"node_policy={wanted.node_policy} needs nodes: the most there are.", field="nodes")
        return None
    if ranks is None:
        raise ScheduleError(
            f"nodes={request.nodes} needs devices_per_node to place the stages.", field="devices_per_node", nearest=(8,)
        )
    world = world_of(request, ranks)
    raise_violations(ScheduleError, world.violations())
    nodes, policy = request.nodes, wanted.node_policy
    if nodes is None:  # devices without nodes: one indivisible world
        if policy not in (None, "constant"):
            raise ScheduleError(f"node_policy={policy} needs nodes and devices_per_node.", field="nodes")
        world, nodes, policy = replace(world, devices_per_node=world.devices), 1, "constant"
    rule = pipeline_rule(request)
    return place(
        schedule.segments,
        world,
        nodes=nodes,
        micro_batch_size=request.micro_batch_size,
        max_micro_batch_size=request.max_micro_batch_size,
        policy=policy or ("launcher" if request.micro_batch_size else "constant-work"),
        throughput=_throughput(request, wanted),
        restart_seconds=wanted.restart_seconds,
        deadline_hours=wanted.deadline_hours,
        node_hours_budget=wanted.node_hours_budget,
        allow_ragged=request.allow_ragged,
        legal_microbatches=rule.refusal if rule else None,
        stop_every_stage=wanted.stop_every_stage,
    )


def _throughput(request: Request, wanted: RampRequest) -> Throughput | StageSeconds | None:
    named = [name for name in ("micro_step_seconds", "stage_seconds", "probe") if getattr(wanted, name)]
    if len(named) > 1:
        raise ConfigError(f"{' and '.join(named)} are two answers to how long a step takes: give one.", field=named[1])
    latency, volume = (*(wanted.sync_seconds or ()), 0.0, 0.0)[:2]
    sync: dict[str, Any] = {
        "sync_latency_seconds": latency,
        "sync_seconds": volume,
        "virtual_stages": request.virtual_stages,
    }
    if wanted.stage_seconds:
        return StageSeconds(wanted.stage_seconds)
    if wanted.micro_step_seconds:
        fixed, each = (*wanted.micro_step_seconds, 0.0)[:2]
        return Throughput(fixed, each, sequence_length=request.sequence_length, **sync)
    return Throughput.from_probe(wanted.probe, **sync) if wanted.probe else None


def _rates(wanted: RampRequest, schedule: Schedule) -> tuple[tuple[StageRate, ...], Suggestion | None]:
    suggestion = suggested_rule(wanted.optimizer) if wanted.optimizer else None
    if wanted.lr is None:
        if wanted.lr_scaling not in (None, "none"):
            raise ScheduleError(
                f"lr_scaling={wanted.lr_scaling} needs lr, the rate at the first stage's batch.", field="lr"
            )
        return (), suggestion
    return stage_rates(schedule.segments, wanted.lr_scaling or "none", wanted.lr), suggestion
