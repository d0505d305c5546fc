"""ramp: from a rule, a budget and a world to every stage with its nodes, cost and learning rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Any, cast

from batchwright.core import codec
from batchwright.core.batch.pipeline import PipelineRule
from batchwright.core.batch.plan import pipeline_rule
from batchwright.core.batch.request import BatchRequest, resolve_ranks, unused_pipeline, within_probe, world_of
from batchwright.core.errors import ConfigError, ScheduleError, raise_violations
from batchwright.core.nodes.policies import NodePlan, place
from batchwright.core.nodes.throughput import StageSeconds, Throughput
from batchwright.core.numbers import decimal, divisors, fraction

from .learning_rate import HorizonCheck, StageRate, Suggestion, check_horizon, stage_rates, suggested_rule
from .recipes import Recipe, recipe
from .request import RampRequest, compile_schedule
from .rules import PerDevice
from .schedule import Rule, Schedule, Segment, Step


@dataclass(frozen=True)
class Ramp:
    """A schedule, the nodes and cost of each stage, and its learning rate."""

    schedule: Schedule
    rule: Rule
    placement: NodePlan | None
    rates: tuple[StageRate, ...]
    suggestion: Suggestion | None
    horizon: HorizonCheck | None
    sources: Mapping[str, str]
    notes: tuple[str, ...]
    nodes_known: bool = True
    start_sample: int = 0
    """Stages, nodes and costs are those from this sample on. The schedule is the whole one."""

    @property
    def left(self) -> tuple[Segment, ...]:
        """The segments from `start_sample` on; the first may be the rest of one."""
        return _left(self.schedule, self.start_sample)[1]

    @property
    def first_stage(self) -> int:
        """The index of the first stage that is left."""
        return _left(self.schedule, self.start_sample)[0]

    @property
    def remaining_steps(self) -> int | None:
        """Steps from `start_sample` to the end, or None if there is no end."""
        total = self.schedule.total_steps
        return None if total is None else total - self.left[0].first_step

    @property
    def remaining_samples(self) -> int | None:
        """Samples from `start_sample` to the end, or None if there is no end."""
        total = self.schedule.total_samples
        return None if total is None else total - self.start_sample

    @property
    def compiles_at(self) -> tuple[int, ...]:
        """The stages at which a program with compiled shapes (JAX, torch.compile) compiles: those whose micro batch size is
        new in their launch. The number of micro steps is not a shape."""
        return () if self.placement is None else _compiles_at(self.placement)

    @property
    def shared_micro_batch_size(self) -> int | None:
        """The largest micro batch size that all stages can run, within their own: with it, a launch compiles once."""
        return None if self.placement is None else _shared_micro_batch_size(self.placement)

    def at_step(self, step: int) -> Step:
        """The span of an optimizer step."""
        return self.schedule.at_step(step)

    def at_sample(self, sample: int) -> Step:
        """The step that owns a sample."""
        return self.schedule.at_sample(sample)

    def stages(self) -> list[dict[str, Any]]:
        """One record per stage that is left, with the documented keys; values that need a world are None without one."""
        rows: list[dict[str, Any]] = []
        by_index = {stage.index: stage for stage in self.placement.stages} if self.placement else {}
        for index, segment in enumerate(self.left, self.first_stage):
            placed = by_index.get(index)
            unknown = () if self.nodes_known else ("nodes", "node_hours")
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
                | {name: None if name in unknown else getattr(placed, name, None) for name in _PLACED}
            )
        return rows

    def to_json(self) -> dict[str, Any]:
        """The ramp as `--json` prints it."""
        placed = self.placement
        growth = {name: getattr(self.rule, name, None) for name in ("num_increments", "samples_per_increment")}
        return {
            "schema": codec.SCHEMA,
            "rule": type(self.rule).__name__,
            **codec.encode(growth),
            "stages": self.stages(),
            "total_steps": self.schedule.total_steps,
            "total_samples": self.schedule.total_samples,
            "total_tokens": self.schedule.total_tokens,
            "start_sample": self.start_sample,
            "remaining_steps": self.remaining_steps,
            "remaining_samples": self.remaining_samples,
            "last_step": self.schedule.last_step,
            "policy": placed.policy if placed else None,
            "launches": codec.encode(placed.launches) if placed else None,
            "hours": placed.hours if placed else None,
            "node_hours": placed.node_hours if placed and self.nodes_known else None,
            "full_cluster_hours": placed.full_cluster_hours if placed else None,
            "full_cluster_node_hours": placed.full_cluster_node_hours if placed else None,
            "saved_node_hours": placed.saved_node_hours if placed else None,
            "gap": placed.gap if placed else None,
            "compiles_at": list(self.compiles_at),
            "shared_micro_batch_size": self.shared_micro_batch_size,
            "learning_rate": codec.encode(self.rates[self.first_stage :]),
            "learning_rate_suggestion": codec.encode(self.suggestion),
            "learning_rate_horizon": codec.encode(self.horizon),
            "sources": dict(self.sources),
            "notes": list(self.notes),
        }


_PLACED = (
    "nodes",
    "data_parallel_size",
    "micro_batch_size",
    "accumulation_steps",
    "ragged",
    "step_seconds",
    "hours",
    "node_hours",
)


def ramp(
    request: BatchRequest,
    wanted: RampRequest,
    past: Schedule | None = None,
    position: int = 0,
    *,
    one_shape: bool = False,
) -> Ramp:
    """Compile the rule, check and place every stage, and compute the learning rates.

    With `past`, the schedule of a run that has trained up to sample `position`, its steps before that stay as they are.
    With `wanted.start_sample`, only what is left from there on is placed. With `one_shape`, a micro batch that is not given is
    one that all stages share, for a program with compiled shapes.

    >>> from batchwright.core.ramp.request import read_ramp
    >>> r = ramp(BatchRequest(global_batch_size=1024), read_ramp({"linear": "256,128,50M"}))
    >>> [s.global_batch_size for s in r.schedule.segments], r.schedule.ramp_steps
    ([256, 384, 512, 640, 768, 896, 1024], 103703)
    """
    if wanted.probe is not None:
        longest = max(wanted.sequence_lengths or (), default=None)
        request = within_probe(request, wanted.probe, longest=longest, synced=wanted.sync_seconds is not None)
    notes: list[str] = list(request.notes)
    published = None if wanted.recipe is None else recipe(wanted.recipe)
    schedule, rule = compile_schedule(request, wanted, published)
    if past is not None:
        schedule = past.continued(position, schedule)
        first = sum(segment.end_sample is not None and segment.end_sample <= position for segment in schedule.segments)
        left = schedule.segments[first:]
    else:
        first, left = _left(schedule, wanted.start_sample)
    notes += schedule.notes
    if wanted.epochs is not None:
        notes.append(
            f"The budget is {decimal(wanted.epochs)} epochs × dataset_size {wanted.dataset_size} = {schedule.samples:,} samples."
        )
    if isinstance(rule, PerDevice):
        request = _per_device_world(request, rule, notes)
    if published:
        request = _published_world(request, published, notes)
    placement = _placement(request, wanted, left, first, published, rule)
    if one_shape and placement and len(_compiles_at(placement)) > len(placement.launches):
        sizes, times = [stage.micro_batch_size for stage in placement.stages], len(_compiles_at(placement))
        if request.accumulation_steps is None or isinstance(rule, PerDevice):
            shared = _shared_micro_batch_size(placement)
            request = replace(request, micro_batch_size=shared, accumulation_steps=None)
            wanted = replace(wanted, node_policy=placement.policy)
            placement = _placement(request, wanted, left, first, published, rule)
            notes.append(
                f"All stages run in micro batches of {shared}, so that JAX compiles once per launch. In the largest ones, "
                f"{min(sizes)} to {max(sizes)}, it would compile {times} times."
            )
        else:
            notes.append(
                f"JAX compiles {times} times, at each new micro batch: with accumulation_steps={request.accumulation_steps} "
                f"they grow from {min(sizes)} to {max(sizes)}."
            )
    rates, suggestion = _rates(wanted, schedule)
    horizon = _horizon(wanted, schedule)
    if request.global_batch_size not in (None, schedule.segments[-1].global_batch_size):
        notes.append(
            f"The budget ends before the ramp: the last batch is {schedule.segments[-1].global_batch_size}, and the run does "
            f"not reach {request.global_batch_size}."
        )
    if schedule.ending:
        notes.append(f"{schedule.ending} (last_step {schedule.last_step})")
    if placement:
        notes += placement.notes
    if suggestion and wanted.lr_scaling is None and len(schedule.segments) > 1:
        notes.append(f"Suggested lr_scaling: {suggestion.rule}; {suggestion.reason}. It is not applied unless given.")
    if horizon:
        notes.append(f"Learning rate: {horizon.message}")
    known = request.nodes is not None or request.devices_per_node is not None
    sources = dict(request.origins)
    start = wanted.start_sample
    made = Ramp(schedule, rule, placement, rates, suggestion, horizon, sources, tuple(notes), known, start)
    if isinstance(rule, PerDevice) and placement and len(made.compiles_at) > len(placement.launches):
        at = ", ".join(str(index + 1) for index in made.compiles_at)
        notes.append(
            f"JAX compiles at stage {at}, where the micro batch is new. In micro batches of {made.shared_micro_batch_size}, "
            "which all stages share, it compiles once per launch (batchwright.jax)."
        )
    return replace(made, notes=tuple(notes))


def _compiles_at(placement: NodePlan) -> tuple[int, ...]:
    sizes = {stage.index: stage.micro_batch_size for stage in placement.stages}
    found: list[int] = []
    for launch in placement.launches:
        first: dict[int, int] = {}
        for index in launch.stages:
            first.setdefault(sizes[index], index)
        found += first.values()
    return tuple(found)


def _shared_micro_batch_size(placement: NodePlan) -> int:
    stages = placement.stages
    ranks = gcd(*(stage.micro_batch_size * stage.accumulation_steps for stage in stages))
    return max(size for size in divisors(ranks) if size <= max(stage.micro_batch_size for stage in stages))


def _left(schedule: Schedule, start: int) -> tuple[int, tuple[Segment, ...]]:
    """The index of the segment that owns sample `start`, and the segments from that sample on."""
    if not start:
        return 0, schedule.segments
    total = schedule.total_samples
    if total is not None and start >= total:
        last = schedule.at_sample(total - 1).start_sample
        raise ScheduleError(
            f"start_sample={start:,}: nothing is left, since the ramp ends at sample {total:,}. Nearest: {last:,} (before "
            "the last step).",
            field="start_sample",
            given=start,
            nearest=(last,),
        )
    step = schedule.at_sample(start)
    if step.start_sample != start:
        near = [step.start_sample] if step.end_sample == total else [step.start_sample, step.end_sample]
        shown = " or ".join(
            f"{sample:,} ({where} it)" for sample, where in zip(near, ("before", "after"), strict=False)
        )
        raise ScheduleError(
            f"start_sample={start:,} is inside a step: step {step.step:,} owns samples {step.start_sample:,} to "
            f"{step.end_sample:,}. Nearest: {shown}.",
            field="start_sample",
            given=start,
            nearest=near,
        )
    segment = schedule.segments[step.segment]
    done, token = step.step - segment.first_step, segment.start_token
    if token is not None and segment.sequence_length is not None:
        token += (start - segment.start_sample) * segment.sequence_length
    rest = replace(
        segment,
        first_step=step.step,
        start_sample=start,
        steps=None if segment.steps is None else segment.steps - done,
        start_token=token,
    )
    return step.segment, (rest, *schedule.segments[step.segment + 1 :])


def _per_device_world(request: BatchRequest, rule: PerDevice, notes: list[str]) -> BatchRequest:
    """MaxText's stages change only the size per device: accumulation stays, and END is the maximum."""
    replica = request.tensor_parallel * request.pipeline_parallel * request.context_parallel
    largest = fraction(rule.end, "end") * replica
    notes.append(
        f"num_increments {rule.num_increments}, samples_per_increment {float(rule.samples_per_increment):g}: each stage "
        "counts its own samples."
    )
    if rule.accumulation_steps > 1:
        notes.append("The sizes in MaxText's ramp manager do not include accumulation; all sizes here do.")
    return replace(
        request,
        micro_batch_size=None,
        max_micro_batch_size=largest.__ceil__(),
        accumulation_steps=rule.accumulation_steps,
    )


def _published_world(request: BatchRequest, published: Recipe, notes: list[str]) -> BatchRequest:
    """The request with the report's world, for what is not given."""
    if published.tensor_parallel is None or not (request.nodes or request.devices):
        return request
    found: dict[str, int | None] = {}
    if "tensor_parallel" not in request.given:
        found["tensor_parallel"] = published.tensor_parallel
    if request.devices_per_node is None:
        found["devices_per_node"] = published.devices_per_node
    if request.micro_batch_size is None and request.max_micro_batch_size is None:
        found["micro_batch_size"] = published.samples_per_replica
    if found:
        notes.append("From the report: " + ", ".join(f"{name} {value}" for name, value in found.items()) + ".")
    return replace(request, **cast("dict[str, Any]", found))


def _horizon(wanted: RampRequest, schedule: Schedule) -> HorizonCheck | None:
    if wanted.lr_horizon_steps is None and wanted.lr_horizon_samples is None:
        return None
    if schedule.total_samples is None:
        raise ScheduleError(
            "checking a learning-rate horizon needs a budget: give samples, tokens or epochs.", field="samples"
        )
    return check_horizon(
        schedule.segments, schedule.total_samples, steps=wanted.lr_horizon_steps, samples=wanted.lr_horizon_samples
    )


def _inner_microbatches(
    request: BatchRequest, rule: PipelineRule | None, segments: Sequence[Segment], ranks: int
) -> int | None:
    """The microbatches inside each accumulation step of the whole run: as given, else the fewest that divide every stage."""
    if rule is None or request.pipeline_style != "inner":
        return None
    whole = gcd((request.micro_batch_size or 0) * ranks, *(s.global_batch_size for s in segments))
    valid = (m for m in divisors(whole) if m >= rule.fewest and rule.refusal(m) is None)
    return request.pipeline_microbatches or next(valid, rule.fewest)


def _placement(
    request: BatchRequest,
    wanted: RampRequest,
    segments: Sequence[Segment],
    first: int,
    published: Recipe | None,
    growth: Rule,
) -> NodePlan | None:
    """The segments on nodes, as stages numbered from `first`; None without a world."""
    raise_violations(ScheduleError, unused_pipeline(request))
    ranks = resolve_ranks(request)
    if ranks is None:
        _refuse_without_world(request, wanted)
        return None
    world = world_of(request, ranks)
    raise_violations(ScheduleError, world.violations())
    nodes, policy = request.nodes or world.nodes, wanted.node_policy
    if nodes is None:  # devices per node are unknown: the whole world counts as one node, and nodes are not shown
        if policy not in (None, "constant"):
            raise ScheduleError(f"node_policy={policy} needs nodes and devices_per_node.", field="nodes")
        world, nodes, policy = replace(world, devices_per_node=world.devices), 1, "constant"
    if request.micro_batch_size and request.micro_batch_size > (
        request.max_micro_batch_size or request.micro_batch_size
    ):
        raise ScheduleError(
            f"micro_batch_size={request.micro_batch_size} is more than max_micro_batch_size="
            f"{request.max_micro_batch_size}. Nearest: {request.max_micro_batch_size}.",
            field="micro_batch_size",
            given=request.micro_batch_size,
            nearest=(request.max_micro_batch_size,),
        )
    if policy is None:  # a per-device ramp keeps its devices; the launcher's rule needs a micro batch
        policy = (
            "constant" if isinstance(growth, PerDevice) else "launcher" if request.micro_batch_size else "constant-work"
        )
    rule = pipeline_rule(request)
    options: dict[str, Any] = {
        "nodes": nodes,
        "first": first,
        "micro_batch_size": request.micro_batch_size,
        "max_micro_batch_size": request.max_micro_batch_size,
        "accumulation_steps": request.accumulation_steps,
        "policy": policy,
        "restart_seconds": wanted.restart_seconds,
        "deadline_hours": wanted.deadline_hours,
        "node_hours_budget": wanted.node_hours_budget,
        "allow_ragged": request.allow_ragged,
        "pipeline": rule,
        "inner_microbatches": _inner_microbatches(request, rule, segments, ranks),
        "sequence_length": request.sequence_length,
        "stop_every_stage": wanted.stop_every_stage,
        "ramp_sizes": [switch.global_batch_size for switch in growth.switches()],
    }
    times = _throughput(request, wanted)
    try:
        placed = place(segments, world, throughput=times, **options)
    except ScheduleError:
        if world.expert_step == 1:
            raise
        # Experts do not affect the batch. If they are the only reason, the stages are placed without them, with a note.
        wanted_world = world
        world = replace(world, expert_parallel=1, expert_tensor_parallel=None)
        placed = place(segments, world, throughput=times, **options)
        refusals = (
            replace(wanted_world, data_parallel_size=stage.data_parallel_size).expert_refusal()
            for stage in placed.stages
        )
        placed = replace(placed, notes=(*placed.notes, *list(filter(None, refusals))[:1]))
    if times is None and published and [s.nodes for s in placed.stages] == [s.nodes for s in published.stages][first:]:
        measured = StageSeconds(tuple(stage.iteration_seconds for stage in published.stages))
        placed = place(segments, world, throughput=measured, **options)
        return replace(placed, notes=(*placed.notes, "Step times are from the report, on these nodes."))
    return placed


def _refuse_without_world(request: BatchRequest, wanted: RampRequest) -> None:
    """Stages are not placed without devices: refuse the options that need a placement."""
    if request.nodes is not None:
        raise ScheduleError(
            f"nodes={request.nodes} needs devices_per_node to place the stages.", field="devices_per_node", nearest=(8,)
        )
    need_world = ("node_policy", "micro_step_seconds", "stage_seconds", "probe", "deadline_hours", "node_hours_budget")
    named = [name for name in need_world if getattr(wanted, name) is not None]
    named += [name for name in ("micro_batch_size", "max_micro_batch_size") if getattr(request, name) is not None]
    if named:
        verb = "need" if len(named) > 1 else "needs"
        raise ScheduleError(f"{', '.join(named)} {verb} nodes and devices_per_node, or devices.", field="nodes")


def _throughput(request: BatchRequest, wanted: RampRequest) -> Throughput | StageSeconds | None:
    named = [name for name in ("micro_step_seconds", "stage_seconds", "probe") if getattr(wanted, name) is not None]
    if len(named) > 1:
        raise ConfigError(f"{' and '.join(named)} are mutually exclusive.", field=named[1])
    latency, volume = (*(wanted.sync_seconds or ()), 0.0, 0.0)[:2]
    sync: dict[str, Any] = {
        "sync_latency_seconds": latency,
        "sync_seconds": volume,
        "sequence_length": request.sequence_length,
    }
    if wanted.stage_seconds:
        return StageSeconds(wanted.stage_seconds)
    if wanted.micro_step_seconds:
        fixed, each = (*wanted.micro_step_seconds, 0.0)[:2]
        return Throughput(fixed, each, **sync)
    return None if wanted.probe is None else Throughput.from_probe(wanted.probe, **sync)


def _rates(wanted: RampRequest, schedule: Schedule) -> tuple[tuple[StageRate, ...], Suggestion | None]:
    suggestion = suggested_rule(wanted.optimizer) if wanted.optimizer else None
    if wanted.lr is None:
        if wanted.lr_scaling not in (None, "none"):
            raise ScheduleError(
                f"lr_scaling={wanted.lr_scaling} needs lr, the rate at the first stage's batch.", field="lr"
            )
        return (), suggestion
    return stage_rates(schedule.segments, wanted.lr_scaling or "none", wanted.lr), suggestion
