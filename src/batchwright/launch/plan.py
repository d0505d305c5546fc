"""From a ramp to the plan of a run, with everything that can be checked before a start."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from batchwright.core.batch.loading import readers_on
from batchwright.core.batch.pipeline import RUN_BY_TORCH
from batchwright.core.batch.plan import pipeline_rule
from batchwright.core.batch.request import BatchRequest
from batchwright.core.errors import ConfigError, EnvironmentFault, ScheduleError, Violation, either, raise_violations
from batchwright.core.nodes.policies import NodePlan
from batchwright.core.numbers import nearest_multiples
from batchwright.core.ramp.ramp import Ramp
from batchwright.core.ramp.ramp import ramp as make_ramp
from batchwright.core.ramp.request import RampRequest
from batchwright.processes.target import is_jax_task, task_file
from batchwright.rundir import names

from .dataset import dataset_size
from .directory import RunDirectory, write_json
from .engine import check_machine
from .records import COMMAND, TASK, Options, RunPlan
from .work import BATCH_PLACEHOLDERS, check_placeholders, placeholders

# With the assumed restart of five minutes, more of them take longer than three days.
MOST_LAUNCHES = 1000


def build(
    request: BatchRequest,
    wanted: RampRequest,
    options: Options,
    *,
    target: str | None = None,
    arguments: Mapping[str, Any] | None = None,
    command: Sequence[str] = (),
    position_command: Sequence[str] = (),
    working_directory: str | None = None,
    before: tuple[RunPlan, int] | None = None,
) -> tuple[RunPlan, Ramp]:
    """The plan of a run, of a task or of a command, and the ramp that it follows.

    `before` is the plan so far and the samples that it has trained: they stay as they are.
    """
    if bool(target) == bool(command):
        what = "both" if target else "neither"
        raise ConfigError(
            f"{what} given: a run takes either a task (FILE.py:function) or a command after --.",
            field="task",
            given=target,
        )
    if command and not command[0].strip():
        raise ConfigError("the command has no program: its first argument is empty.", field="command", given=command[0])
    check_placeholders(command)
    check_placeholders(position_command, "position_command")
    beyond = placeholders(position_command) - {"run_dir"}
    if beyond:
        raise ConfigError(
            f"the position command may use {{run_dir}} only: {', '.join(sorted(beyond))} differ between launches.",
            field="position_command",
        )
    if wanted.start_sample and not target:
        raise ConfigError(
            f"start_sample={wanted.start_sample} is for tasks: a command says itself where it is (--position-command).",
            field="start_sample",
            given=wanted.start_sample,
        )
    if target and wanted.budgets == ["epochs"] and wanted.dataset_size is None:
        wanted = replace(wanted, dataset_size=dataset_size(target, arguments or {}, options))
    notes: list[str] = []
    asked = request, wanted
    request = _placed(request, notes)
    if target and max(request.tensor_parallel, request.context_parallel) > 1:
        raise ConfigError(
            "a task is data-parallel or in a pipeline. Leave out tensor and context parallelism, or run your own script: "
            "batchwright run … -- COMMAND.",
            field="tensor_parallel",
            given=request.tensor_parallel,
            nearest=(1,),
        )
    if target and request.pipeline_parallel > 1:
        request = _run_by_torch(request, notes)
    _check_loading(request, notes, task=bool(target))
    if placeholders(command) & set(BATCH_PLACEHOLDERS) and not wanted.stop_every_stage:
        wanted = replace(wanted, stop_every_stage=True)
        notes.append("The command has a placeholder for its batch, so every stage is a launch of its own.")
    ours = [name for name in ("container", "container_mounts", "python", "srun", "launcher") if options.slurm.get(name)]
    if command and ours:
        notes.append(f"A command is started unchanged: launch.slurm.{', launch.slurm.'.join(ours)} is for tasks only.")
    jax = target is not None and is_jax_task(target)
    if jax and options.slurm.get("launcher", "srun") != "srun":
        raise ConfigError(
            f"launch.slurm.launcher={options.slurm['launcher']} does not start a JaxTask: its processes, one per node, join each "
            "other at the port that torchrun uses. Nearest: srun.",
            field="launch.slurm.launcher",
            given=options.slurm["launcher"],
            nearest=("srun",),
        )
    if target and wanted.lr_scaling:
        options = replace(options, settings={"lr_scaling": wanted.lr_scaling, **options.settings})
    # Every stage is placed, also those that another program has trained: the position may be in any of them.
    whole = replace(wanted, start_sample=0)
    made = make_ramp(request, whole, before and before[0].schedule, before[1] if before else 0, one_shape=jax)
    if made.schedule.total_samples is None:
        raise ScheduleError(
            "a run needs an end, and the last stage is open. Give a budget: --samples N, --tokens N or --epochs N.",
            field="samples",
        )
    assert made.placement is not None  # `_placed` gives the request a world
    if target and request.pipeline_parallel > 1:
        raise_violations(ScheduleError, _beyond_a_pipeline(made.placement))
    if start := wanted.start_sample:
        made = _begun_at(made, start)
        assert made.placement is not None
        shuffled = options.settings.get("shuffle", True)
        notes.append(
            f"The run begins at sample {start:,}, step {made.schedule.at_sample(start).step:,}: the samples before it were "
            + (
                "trained elsewhere, in the order of this run. For an order of another program, set task.settings.shuffle=false."
                if shuffled
                else "trained elsewhere."
            )
        )
    launches = len(made.placement.launches)
    if launches > MOST_LAUNCHES:
        raise ScheduleError(
            f"the run has {launches:,} launches, and at most {MOST_LAUNCHES:,} are allowed: every launch restarts all "
            "processes. Give a ramp with fewer stages"
            + (", or leave out stop_every_stage." if len(made.placement.stages) == launches else "."),
            field="stop_every_stage",
            given=launches,
            nearest=(MOST_LAUNCHES,),
        )
    sizes = {stage.global_batch_size for stage in made.placement.stages}
    if command and len(sizes) > 1 and not placeholders(command) & set(BATCH_PLACEHOLDERS):
        notes.append(
            "The command has no placeholder for its batch. Unless it takes its batch from the run, as batchwright.adapters do, "
            "every stage trains with the command's own batch: write "
            f"{', '.join(f'{{{name}}}' for name in BATCH_PLACEHOLDERS)} where they belong."
        )
    stage = made.placement.stages[0]
    replica = request.tensor_parallel * request.pipeline_parallel * request.context_parallel
    per_node = request.devices_per_node or stage.data_parallel_size * replica // stage.nodes
    plan = RunPlan(
        kind=TASK if target else COMMAND,
        # With an absolute path: a run is resumed from anywhere.
        target="{}:{}".format(*task_file(target)) if target else command[0],
        arguments=dict(arguments or {}),
        command=tuple(command),
        position_command=tuple(position_command),
        working_directory=working_directory or os.getcwd(),
        schedule=made.schedule,
        stages=made.placement.stages,
        launches=made.placement.launches,
        batch=asked[0],
        ramp=asked[1],
        devices_per_node=per_node,
        rules=made.placement.rules,
        options=options,
        notes=tuple(notes),
    )
    return _with_past(before[0], plan) if before else plan, replace(made, notes=(*notes, *made.notes))


def _begun_at(made: Ramp, start: int) -> Ramp:
    """The ramp without the launches before sample `start`; an error if no step begins there."""
    assert made.placement is not None
    first = replace(made, start_sample=start).left[0]
    ahead = [launch for launch in made.placement.launches if launch.end_sample is None or launch.end_sample > start]
    if ahead[0].start_sample < start:  # else the launch is of a later part of a run that goes on
        ahead[0] = replace(ahead[0], start_sample=start, first_step=first.first_step)
    launches = tuple(replace(launch, index=index) for index, launch in enumerate(ahead))
    return replace(made, placement=replace(made.placement, launches=launches))


_LOADING = ("loading_hosts", "expansion_factor", "read_ahead", "hosts", "stored_hosts", "equal_rows")


def _check_loading(request: BatchRequest, notes: list[str], *, task: bool) -> None:
    """What a run does with the section `loading`, or why it cannot."""
    given = [name for name in _LOADING if name in request.given]
    if given and not task:
        notes.append(f"A command reads its data itself: {', '.join(given)} is for tasks only.")
        return
    factor = request.expansion_factor
    if request.loading_hosts is not None and factor is not None:
        raise ConfigError("loading_hosts and expansion_factor are mutually exclusive.", field="expansion_factor")
    if factor is not None and factor < 1:
        raise ConfigError(
            f"expansion_factor={factor}: must be at least 1 in a run. Below 1 it means that fewer hosts continue from the "
            "states of more hosts; a run of batchwright continues from one position, on any number of hosts.",
            field="expansion_factor",
            given=str(factor),
            nearest=(1,),
        )
    if request.read_ahead > 1 and readers_on(1, request.loading_hosts, factor) is None:
        raise ConfigError(
            f"read_ahead={request.read_ahead} needs loading_hosts: without it every rank reads for itself, and its workers "
            "read ahead (task.settings.num_workers).",
            field="read_ahead",
            given=request.read_ahead,
            nearest=(1,),
        )
    if unused := [name for name in ("hosts", "stored_hosts", "equal_rows") if name in given]:
        notes.append(f"Not used by a run, in which a host is a node and every row is read once: {', '.join(unused)}.")


def _run_by_torch(request: BatchRequest, notes: list[str]) -> BatchRequest:
    """The request with the rules that hold when torch runs the pipeline of a task."""
    given = request.pipeline_schedule
    # The default of inner microbatches is MaxText's schedule, which torch does not have.
    default = "interleaved" if request.virtual_stages > 1 else "1f1b"
    rule = pipeline_rule(replace(request, pipeline_schedule=given or default))
    assert rule is not None
    if rule.schedule not in RUN_BY_TORCH:
        raise ConfigError(
            f"pipeline_schedule={rule.schedule} is not run by torch, which runs the pipeline of a task. Nearest: "
            f"{', '.join(RUN_BY_TORCH)}; or run your own script: batchwright run … -- COMMAND.",
            field="pipeline_schedule",
            given=rule.schedule,
            nearest=tuple(RUN_BY_TORCH),
        )
    if request.allow_ragged:
        raise ConfigError(
            "allow_ragged does not work in a pipeline: microbatches of different sizes cannot follow each other in it.",
            field="allow_ragged",
            given=True,
            nearest=(False,),
        )
    theirs = RUN_BY_TORCH[rule.schedule]
    if theirs != rule.schedule and given is not None:
        notes.append(f"torch runs the pipeline, so the rules of pipeline_schedule {theirs} hold.")
    return replace(request, pipeline_schedule=theirs)


def _beyond_a_pipeline(placement: NodePlan) -> list[Violation]:
    """What the pipeline of a task cannot run, beyond what a ramp refuses: a last step that the budget cuts, an inner split."""
    rule, inner, found = placement.rules.pipeline, placement.rules.inner_microbatches, list[Violation]()
    assert rule is not None
    for stage in placement.stages:
        if inner and stage.micro_batch_size % inner:
            ratio = stage.micro_batch_size / inner
            message = (
                f"stage {stage.index + 1}: micro_batch_size={stage.micro_batch_size} / pipeline_microbatches={inner} = "
            )
            message += f"{ratio:.2f} is not whole: a rank splits its own micro batch."
            found.append(Violation(message, "pipeline_microbatches", inner))
    last = placement.stages[-1]
    samples, quantum = (last.end_sample or 0) - last.start_sample, last.micro_batch_size * last.data_parallel_size
    cut = samples % last.global_batch_size
    reason = rule.refusal(cut // quantum) if not inner else None
    if cut and (cut % quantum or reason):
        why = f"{cut} / {quantum} = {cut / quantum:.2f} microbatches" + (
            f"; {reason}" if reason and not cut % quantum else ""
        )
        near = tuple(n + last.start_sample for n in nearest_multiples(last.global_batch_size, samples))
        message = f"the budget of {last.end_sample:,} samples cuts the last step to {cut} samples, which the pipeline does not "
        message += f"run: {why}. Nearest: {either(near)}; or last_step drop or overshoot."
        found.append(Violation(message, "samples", last.end_sample, near))
    return found


def _with_past(past: RunPlan, plan: RunPlan) -> RunPlan:
    """The plan with the stages and launches of `past` before it. Its schedule has them already."""
    first = plan.stages[0].index
    begin = plan.stages[0].start_sample
    trained = [
        stage
        if stage.end_sample == segment.end_sample
        else replace(stage, steps=segment.steps, end_sample=segment.end_sample, hours=None, node_hours=None)
        for stage, segment in zip(past.stages, plan.schedule.segments[:first], strict=False)
    ]
    launched = [
        replace(
            launch,
            stages=tuple(i for i in launch.stages if i < first),
            end_sample=min(launch.end_sample or begin, begin),
        )
        for launch in past.launches
        if launch.start_sample < begin
    ]
    ahead = (replace(launch, index=len(launched) + launch.index) for launch in plan.launches)
    return replace(plan, stages=(*trained, *plan.stages), launches=(*launched, *ahead))


def _placed(request: BatchRequest, notes: list[str]) -> BatchRequest:
    """The request with a world: its own, or one process."""
    known = (request.nodes, request.devices, request.data_parallel_size)
    if any(value is not None for value in known):
        return request
    notes.append("No world is given: one process on this machine (--nodes N --devices-per-node M for more).")
    return replace(request, nodes=1, devices_per_node=request.devices_per_node or 1)


def default_directory(plan: RunPlan) -> RunDirectory:
    """`runs/NAME`, where NAME is that of the task's file or of the command."""
    name = os.path.splitext(os.path.basename(plan.target.rpartition(":")[0] or plan.target))[0]
    return RunDirectory(os.path.join("runs", name if name.strip(". ") else "command"))  # `runs/..` is not below runs


def begin(directory: RunDirectory, plan: RunPlan) -> None:
    """Write the plan of a new run. The lock is held from here on, so no other process can write one."""
    taken = ConfigError(
        f"{directory.path} already holds a run. Continue it with batchwright run --resume "
        f"{shlex.quote(str(directory.path))}, or give another --dir.",
        field="dir",
        given=str(directory.path),
    )
    if directory.exists:
        raise taken
    check_machine(plan.options, direct=plan.kind == COMMAND, target=plan.target)
    try:
        directory.lock(fresh=True)
        if directory.exists:
            directory.unlock()
            raise taken
        write_json(directory.path / names.PLAN, plan)
    except OSError as error:
        raise not_written(directory, error) from None


def not_written(directory: RunDirectory, error: OSError) -> EnvironmentFault:
    """The error for a run directory that cannot be written."""
    which = f"{os.fsdecode(error.filename)}: " if error.filename not in (None, str(directory.path)) else ""
    return EnvironmentFault(f"{directory.path} cannot be written: {which}{error.strerror or error}.", field="dir")
