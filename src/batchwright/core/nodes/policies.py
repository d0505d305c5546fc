"""On how many nodes each stage of a ramp runs: named policies with the same constraints.

A stage of global batch B is valid on n nodes if the nodes hold a whole number of replicas, B is a whole number of
micro batches on each, and the pipeline allows that number. The policies choose among the valid numbers:

    launcher         what NeMo-Framework-Launcher computes: the largest number that its two divisibility conditions
                     allow, never falling as the batch grows, and all nodes for the largest batch
    constant-work    nodes in proportion to the batch: a replica does the same work in every stage
    min-node-hours   the cheapest choice, restarts included, optionally within a deadline
    min-time         the fastest choice, restarts included, optionally within a budget of node-hours
    constant         all nodes in every stage: what the saving is measured against

The two optima may go up and down in nodes. Among equal costs they prefer fewer changes of nodes, then fewer nodes.
Within a limit the choice may cost more than the best one; `NodePlan.gap` says how much more at most.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from itertools import groupby, pairwise
from math import ceil, floor, inf, isfinite, ulp

from batchwright.core.batch.pipeline import PipelineRule
from batchwright.core.batch.world import World
from batchwright.core.errors import ScheduleError, Violation, either, raise_violations
from batchwright.core.numbers import arrows, divisors, human
from batchwright.core.ramp.schedule import Segment

from .feasibility import Fit, StageRules
from .shortest_path import Pair, cheapest_chain
from .throughput import StageSeconds, Throughput

POLICIES = ("launcher", "constant-work", "min-node-hours", "min-time", "constant")

# From stopping to training again: save, queue, start, load. An assumption; restart_seconds replaces it.
ASSUMED_RESTART_SECONDS = 300.0
# An error lists this many stages: a ramp may have 100,000.
_LISTED = 50


@dataclass(frozen=True)
class Stage:
    """A segment placed on nodes; `hours` are those of its steps, without restarts. A shortened step counts as whole.

    >>> stage = place([Segment(0, 0, 512, 10)], World(1, devices_per_node=8), nodes=4, micro_batch_size=4).stages[0]
    >>> stage.data_parallel_size, stage.accumulation_steps, stage.end_sample
    (32, 4, 5120)
    """

    index: int
    global_batch_size: int
    first_step: int
    steps: int | None
    start_sample: int
    end_sample: int | None
    sequence_length: int | None
    nodes: int
    data_parallel_size: int
    micro_batch_size: int
    accumulation_steps: int
    ragged: bool
    step_seconds: float | None
    hours: float | None
    node_hours: float | None


@dataclass(frozen=True)
class Launch:
    """One start of the training processes: consecutive stages on the same number of nodes.

    >>> ramp = [Segment(0, 0, 256, 10), Segment(10, 2560, 512, None)]
    >>> place(ramp, World(1, devices_per_node=8), nodes=8, micro_batch_size=4).launches[0].stages
    (0, 1)
    """

    index: int
    nodes: int
    stages: tuple[int, ...]
    first_step: int
    start_sample: int
    end_sample: int | None


@dataclass(frozen=True)
class NodePlan:
    """All stages placed. Totals include restarts, and are None if a time is unknown or the end is open.

    >>> model = Throughput(fixed_seconds=0.1, per_sample_seconds=0.2)
    >>> place([Segment(0, 0, 64, 3600)], World(1), nodes=16, micro_batch_size=4, throughput=model).node_hours
    14.4
    """

    policy: str
    stages: tuple[Stage, ...]
    launches: tuple[Launch, ...]
    restart_seconds: float
    hours: float | None
    node_hours: float | None
    full_cluster_hours: float | None
    full_cluster_node_hours: float | None
    saved_node_hours: float | None
    notes: tuple[str, ...]
    rules: StageRules
    gap: float = 0.0
    """Within a limit: how many node-hours (min-time: hours) another choice could save, at most."""


def launcher_nodes(batches: Sequence[int], world: World, *, nodes: int, micro_batch_size: int) -> tuple[int, ...]:
    """NeMo-Framework-Launcher's node count for every batch, or an error where it has none; no other check of the stages.

    Its second condition counts every device as a replica. The largest batch gets all nodes, unchecked. It ignores
    context parallelism.

    >>> launcher_nodes([256, 512, 768, 1024, 1280], World(1, devices_per_node=8), nodes=10, micro_batch_size=4)
    (8, 8, 8, 8, 10)
    """
    devices, replica = world.devices_per_node or 1, world.tensor_parallel * world.pipeline_parallel
    sizes = sorted(set(batches), reverse=True)
    if len(sizes) > 1 and devices < replica:
        raise ScheduleError(
            f"the launcher's rule has no answer if a replica spans nodes: tensor_parallel {world.tensor_parallel} × "
            f"pipeline_parallel {world.pipeline_parallel} = {replica} devices, {devices} devices_per_node, so it counts "
            "0 replicas on one node and divides by 0. Nearest: node policy constant-work.",
            field="policy",
            given="launcher",
            nearest=("constant-work",),
        )
    chosen, found = {sizes[0]: nodes}, list[Violation]()
    cap = nodes
    for batch in sizes[1:]:
        quotient, over = divmod(batch, micro_batch_size * devices)
        counts = () if over else reversed(divisors(quotient))
        best = next(
            (n for n in counts if n <= cap and batch % (micro_batch_size * (devices * n // replica)) == 0), None
        )
        if best is None:
            quantum = micro_batch_size * devices
            nearest = tuple(n for n in (batch // quantum * quantum, (batch // quantum + 1) * quantum) if n)
            message = (
                f"the launcher's rule has no node count for global_batch_size={batch}: it needs a multiple of "
                f"micro_batch_size {micro_batch_size} × devices_per_node {devices} = {quantum} per node. "
                f"Nearest: {either(nearest)}; or node policy constant-work, which counts replicas, not devices."
            )
            found.append(Violation(message, "global_batch_size", batch, nearest))
        else:
            chosen[batch] = cap = best
    if len(found) > _LISTED:
        more = f"{len(found) - _LISTED:,} more batches have none."
        found[_LISTED - 1] = replace(found[_LISTED - 1], message=f"{found[_LISTED - 1].message} {more}")
    raise_violations(ScheduleError, found[:_LISTED])
    return tuple(chosen[batch] for batch in batches)


def place(
    segments: Sequence[Segment],
    world: World,
    *,
    nodes: int,
    micro_batch_size: int | None = None,
    max_micro_batch_size: int | None = None,
    policy: str = "launcher",
    throughput: Throughput | StageSeconds | None = None,
    restart_seconds: float | None = None,
    deadline_hours: float | None = None,
    node_hours_budget: float | None = None,
    allow_ragged: bool = False,
    accumulation_steps: int | None = None,
    pipeline: PipelineRule | None = None,
    inner_microbatches: int | None = None,
    sequence_length: int | None = None,
    stop_every_stage: bool = False,
    ramp_sizes: Sequence[int] = (),
    first: int = 0,
) -> NodePlan:
    """Choose nodes for every stage by `policy`, check every stage, and compute the cost.

    Without `micro_batch_size` a stage takes the equation's best split up to `max_micro_batch_size`. A pipeline's
    microbatches are the accumulation steps, unless `inner_microbatches` says how many there are in each of them.
    The launcher's rule looks at every size of a ramp: `ramp_sizes` may add those that no step uses. Stages are numbered
    from `first`: those before it were trained already.

    >>> ramp = [Segment(0, 0, 384, 100), Segment(100, 38_400, 768, 100), Segment(200, 115_200, 1152, None)]
    >>> world = World(1, devices_per_node=8, tensor_parallel=8)
    >>> [stage.nodes for stage in place(ramp, world, nodes=288, micro_batch_size=4, policy="constant-work").stages]
    [96, 192, 288]
    """
    if pipeline is None and world.pipeline_parallel > 1:
        pipeline = PipelineRule("1f1b", world.pipeline_parallel)
    rules = StageRules(
        world,
        nodes,
        micro_batch_size,
        max_micro_batch_size,
        accumulation_steps,
        allow_ragged,
        pipeline,
        inner_microbatches,
        sequence_length,
    )
    limits = {
        "min-node-hours": ("deadline_hours", deadline_hours),
        "min-time": ("node_hours_budget", node_hours_budget),
    }
    found = list(_request_violations(rules, segments, first, policy, throughput))
    for owner, (name, value) in limits.items():
        if value is not None and not isfinite(value):
            found.append(Violation(f"{name}={value} is not a limit: leave it out.", name, str(value)))
        elif value is not None and policy != owner:
            message = f"{name}={value} needs the policy {owner}, and the policy is {policy}."
            found.append(Violation(message, name, value, (owner,)))
    restart = ASSUMED_RESTART_SECONDS if restart_seconds is None else restart_seconds
    if not 0 <= restart < inf:
        message = f"restart_seconds={restart}: must be at least 0 and finite."
        found.append(Violation(message, "restart_seconds", restart if isfinite(restart) else str(restart), (0,)))
    raise_violations(ScheduleError, found)
    batches = [segment.global_batch_size for segment in segments]
    notes: list[str] = []
    gap = 0.0
    if policy == "launcher":
        counts: Sequence[int] = _launcher(rules, batches, ramp_sizes, notes)
    elif policy == "constant-work":
        counts = _constant_work(rules, batches, notes, first)
    elif isinstance(throughput, Throughput) and policy != "constant":
        counts, gap = _optimum(rules, segments, first, policy, throughput, restart, limits[policy][1], stop_every_stage)
    else:
        counts = [nodes] * len(batches)
    try:
        stages = _stages(rules, segments, first, counts, throughput)
    except ScheduleError as error:
        if policy == "launcher":
            raise_violations(ScheduleError, _with_constant_work(rules, batches, error))
        raise
    launches = _launches(stages, stop_every_stage)
    hours, node_hours = _totals(stages, restart, stop_every_stage)
    if gap:
        unit, total = ("hours", hours) if policy == "min-time" else ("node-hours", node_hours)
        most = 1.005 * gap  # three digits of it are never below the gap
        notes.append(
            f"within the limit, {policy} found {total:.4g} {unit}; another choice could save {most:.3g} {unit} at most."
        )
    full: tuple[float | None, float | None] = (None, None)
    if isinstance(throughput, Throughput) and hours is not None:
        # Early batches are often too small for all nodes at this micro batch: the baseline then uses a smaller one.
        relaxed = replace(rules, micro_batch_size=None, max_micro_batch_size=micro_batch_size or max_micro_batch_size)
        fits = [rules.fit(batch, nodes) or relaxed.fit(batch, nodes) for batch in batches]
        if all(fits):
            everywhere = _timed(rules, segments, first, list(filter(None, fits)), throughput)
            full = _totals(everywhere, restart, stop_every_stage)
            least = min(stage.micro_batch_size for stage in everywhere)
            if micro_batch_size and least < micro_batch_size:
                notes.append(
                    f"the full cluster is counted with micro batches down to {least} where a batch needs them. "
                    f"micro_batch_size={micro_batch_size} does not allow them to the policy; max_micro_batch_size would."
                )
        else:
            notes.append(f"no saving is computed: not every stage is valid on all {nodes} nodes.")
    if throughput is not None:
        notes += throughput.remarks([s.micro_batch_size for s in stages], [s.sequence_length for s in stages])
        if restart_seconds is None and len(launches) > 1:
            notes.append(f"a restart is assumed to take {restart:g} s (restart_seconds).")
    for stage, segment in zip(stages, segments, strict=True):
        rest = segment.global_batch_size - segment.shortfall
        if segment.shortfall and rest % (stage.micro_batch_size * stage.data_parallel_size):
            notes.append(f"the last step of stage {stage.index + 1} has only {rest} samples, and runs ragged.")
    saved = full[1] - node_hours if full[1] is not None and node_hours is not None else None
    return NodePlan(policy, stages, launches, restart, hours, node_hours, *full, saved, tuple(notes), rules, gap)


def _request_violations(
    rules: StageRules,
    segments: Sequence[Segment],
    first: int,
    policy: str,
    throughput: Throughput | StageSeconds | None,
) -> Iterator[Violation]:
    if policy not in POLICIES:
        yield Violation(f"policy={policy!r} is not one of {', '.join(POLICIES)}.", "policy", policy, POLICIES)
    if not segments:
        yield Violation("a ramp needs at least one segment.", "segments", 0)
    for name in ("nodes", "micro_batch_size", "max_micro_batch_size", "accumulation_steps", "inner_microbatches"):
        if (value := getattr(rules, name)) is not None and value < 1:
            yield Violation(f"{name}={value}: must be at least 1.", name, value, (1,))
    pieces, pipeline = rules.inner_microbatches, rules.pipeline
    if pieces and pieces > 0 and pipeline is not None and (refusal := pipeline.refusal(pieces)):
        near = pipeline.nearest(pieces)
        message = f"pipeline_microbatches={pieces}: {refusal}. Nearest: {either(near)}."
        yield Violation(message, "pipeline_microbatches", pieces, near)
    if policy == "launcher" and rules.micro_batch_size is None:
        yield Violation("the launcher's rule needs micro_batch_size; constant-work does not.", "micro_batch_size")
    number = first + len(segments)
    if isinstance(throughput, StageSeconds) and len(throughput.seconds) != number:
        message = f"step seconds are given for {len(throughput.seconds)} stages, and the ramp has {number}."
        yield Violation(message, "throughput", len(throughput.seconds), (number,))
    if policy.startswith("min-"):
        if not isinstance(throughput, Throughput):
            message = (
                f"{policy} needs the time of a step on any number of nodes: give micro_step_seconds "
                "(fixed and per sample), or a probe file. Times given per stage hold for one number of nodes only."
            )
            yield Violation(message, "throughput", nearest=("constant-work",))
        if segments and segments[-1].steps is None:
            message = f"{policy} needs a budget: the last stage has no end. Give samples, tokens or epochs."
            yield Violation(message, "samples")


def _launcher(rules: StageRules, batches: Sequence[int], others: Sequence[int], notes: list[str]) -> list[int]:
    sizes = sorted({*batches, *others})
    counts = launcher_nodes(sizes, rules.world, nodes=rules.nodes, micro_batch_size=rules.micro_batch_size or 1)
    chosen = dict(zip(sizes, counts, strict=True))
    # Counts never fall as the batch grows: the next larger size has the cap.
    for batch, cap in zip(sizes, (*counts[1:], counts[-1]), strict=True):
        count = chosen[batch]
        better = max((fit.nodes for fit in rules.fits(batch) if fit.nodes <= cap), default=count)
        if better > count and batch in batches:
            notes.append(
                f"global_batch_size {batch} is also valid on {better} nodes: the launcher's rule counts every device as "
                f"a replica, and uses {count}."
            )
    return [chosen[batch] for batch in batches]


def _constant_work(rules: StageRules, batches: Sequence[int], notes: list[str], first: int = 0) -> list[int]:
    """In proportion to the largest batch on all nodes, or the nearest valid number below, with a note."""
    top, counts = max(batches), list[int]()
    for i, batch in enumerate(batches, first):
        exact, over = divmod(rules.nodes * batch, top)
        if batch == top or (not over and rules.fit(batch, exact)):
            counts.append(exact)
            continue
        # If there is none below, the check of the stages reports the exact number, with the nearest valid ones.
        count = max((fit.nodes for fit in rules.fits(batch) if fit.nodes <= exact), default=max(1, exact))
        counts.append(count)
        notes.append(
            f"stage {i + 1}: {rules.nodes} nodes × {batch} / {top} = {rules.nodes * batch / top:g} is not a valid number "
            f"of nodes; on {count}, the nearest below, a replica does {rules.nodes * batch / top / count:.2f} times the work."
        )
    return counts


def _with_constant_work(rules: StageRules, batches: Sequence[int], error: ScheduleError) -> list[Violation]:
    """The violations of the launcher's choice; they mention constant-work if that has an answer."""
    counts = _constant_work(rules, batches, [])
    found = list(error.violations)
    if all(rules.fit(batch, n) for batch, n in zip(batches, counts, strict=True)):
        shown = arrows([n for n, _ in groupby(counts)])
        found[-1] = replace(
            found[-1], message=f"{found[-1].message} Node policy constant-work runs all stages: {shown} nodes."
        )
    return found


def _stages(
    rules: StageRules,
    segments: Sequence[Segment],
    first: int,
    counts: Sequence[int],
    throughput: Throughput | StageSeconds | None,
) -> tuple[Stage, ...]:
    """Every segment on its nodes, or one error with every stage that is not valid."""
    fits = [rules.fit(segment.global_batch_size, n) for segment, n in zip(segments, counts, strict=True)]
    bad = [i for i, fit in enumerate(fits) if fit is None]
    raise_violations(ScheduleError, _stage_violations(rules, segments, first, counts, bad))
    return _timed(rules, segments, first, list(filter(None, fits)), throughput)


def _timed(
    rules: StageRules,
    segments: Sequence[Segment],
    first: int,
    fits: Sequence[Fit],
    throughput: Throughput | StageSeconds | None,
) -> tuple[Stage, ...]:
    stages: list[Stage] = []
    for i, (segment, fit) in enumerate(zip(segments, fits, strict=True), first):
        seconds = None if throughput is None else _step_seconds(rules, throughput, i, segment, fit)
        time = None if seconds is None or segment.steps is None else _microseconds(seconds, segment.steps)
        hours, node_hours = (None, None) if time is None else (time / _HOUR, fit.nodes * time / _HOUR)
        steps = (segment.global_batch_size, segment.first_step, segment.steps)
        samples = (segment.start_sample, segment.end_sample, segment.sequence_length)
        stages.append(Stage(i, *steps, *samples, *fit, seconds, hours, node_hours))
    return tuple(stages)


def _stage_violations(
    rules: StageRules, segments: Sequence[Segment], first: int, counts: Sequence[int], bad: Sequence[int]
) -> list[Violation]:
    found: list[Violation] = []
    for i in bad[:_LISTED]:
        number, stages = first + i + 1, first + len(segments)
        where = f"ramp stage {number} of {stages} (from sample {human(segments[i].start_sample)})"
        found.append(rules.violation(segments[i].global_batch_size, counts[i], where))
    if found and len(segments) > 1:
        rest = "Other stages are valid." if len(bad) < len(segments) else "No stage is valid."
        if len(bad) > _LISTED:
            rest = f"{len(bad) - _LISTED:,} more stages are not valid."
        found[-1] = replace(found[-1], message=f"{found[-1].message} {rest}")
    return found


def _step_seconds(
    rules: StageRules, throughput: Throughput | StageSeconds, index: int, segment: Segment, fit: Fit
) -> float:
    return throughput.step_seconds(
        stage=index,
        nodes=fit.nodes,
        micro_batch_size=fit.micro_batch_size,
        accumulation_steps=fit.accumulation_steps,
        idle=rules.idle(fit.accumulation_steps),
        sequence_length=segment.sequence_length,
    )


def _launches(stages: Sequence[Stage], stop_every_stage: bool) -> tuple[Launch, ...]:
    groups = [list(g) for _, g in groupby(stages, key=lambda s: s.index if stop_every_stage else s.nodes)]
    return tuple(
        Launch(i, g[0].nodes, tuple(s.index for s in g), g[0].first_step, g[0].start_sample, g[-1].end_sample)
        for i, g in enumerate(groups)
    )


def _totals(stages: Sequence[Stage], restart: float, stop_every_stage: bool) -> tuple[float | None, float | None]:
    """Hours and node-hours with restarts; the nodes of the next stage wait during a restart."""
    timed: list[tuple[int, int]] = []
    for stage in stages:
        if stage.step_seconds is None or stage.steps is None:
            return None, None
        timed.append((_microseconds(stage.step_seconds, stage.steps), stage.nodes))
    wait = _microseconds(restart)
    timed += [(wait, b.nodes) for a, b in pairwise(stages) if a.nodes != b.nodes or stop_every_stage]
    return sum(time for time, _ in timed) / _HOUR, sum(time * nodes for time, nodes in timed) / _HOUR


# Time is counted in whole microseconds: sums are exact, so equal costs are equal and a stated total is a valid limit.
_HOUR = 3600 * 10**6


def _microseconds(seconds: float, times: int = 1) -> int:
    return round(seconds * (times * 10**6))


def _most(hours: float) -> int:
    """The most microseconds whose hours, as a float, are at most these: a plan's own total is within its own limit."""
    most = floor((Fraction(hours) + Fraction(ulp(hours)) / 2) * _HOUR)
    return most if most / _HOUR <= hours else most - 1


def _optimum(
    rules: StageRules,
    segments: Sequence[Segment],
    first: int,
    policy: str,
    throughput: Throughput,
    restart: float,
    limit: float | None,
    stop_every_stage: bool,
) -> tuple[list[int], float]:
    """The nodes of each stage, and the gap in the unit of the policy's cost.

    Both optima are one problem: (cost, weight) is (node time, time), or the other way round.
    """

    def pair(nodes: int, time: int) -> Pair:
        return (nodes * time, time) if policy == "min-node-hours" else (time, nodes * time)

    sync = cache(throughput.sync_step_seconds)
    options: list[dict[int, Pair]] = []
    choices = rules.choices([segment.global_batch_size for segment in segments])
    for segment, row in zip(segments, choices, strict=True):
        length = segment.sequence_length

        @cache  # there are few splits and many nodes
        def computing(micro: int, steps: int, length: int | None = length) -> float:
            return throughput.compute_seconds(micro, steps + rules.idle(steps), length)

        number = segment.steps or 0
        options.append(
            {n: pair(n, _microseconds(computing(micro, steps) + sync(n), number)) for n, micro, steps in row}
        )
    bad = [i for i, option in enumerate(options) if not option]
    raise_violations(ScheduleError, _stage_violations(rules, segments, first, [rules.nodes] * len(segments), bad))
    wait = _microseconds(restart)
    most = None if limit is None else _most(limit)
    found = cheapest_chain(options, lambda nodes: pair(nodes, wait), always=stop_every_stage, limit=most)
    if found is None:
        name, unit, other = "node_hours_budget", "node-hours", "min-node-hours"
        if policy == "min-node-hours":
            name, unit, other = "deadline_hours", "hours", "min-time"
        lightest, _ = _optimum(rules, segments, first, other, throughput, restart, None, stop_every_stage)
        totals = _totals(_stages(rules, segments, first, lightest, throughput), restart, stop_every_stage)
        least = (totals[0] if other == "min-time" else totals[1]) or 0.0
        digits = 100 if least >= 1 else 10**6
        nearest = ceil(Fraction(least) * digits) / digits  # rounded up, so that this limit is accepted
        shown = str(nearest).removesuffix(".0")
        message = f"{name}={limit} cannot be met on up to {rules.nodes} nodes: the least is {shown} {unit}."
        raise ScheduleError(message, field=name, given=limit, nearest=(nearest,))
    return found.counts, found.gap / _HOUR
