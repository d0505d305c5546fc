"""From a ramp to the plan of a run, with everything that can be checked before a start."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from batchwright.core.batch.loading import readers_on
from batchwright.core.batch.request import BatchRequest
from batchwright.core.errors import ConfigError, EnvironmentFault, ScheduleError
from batchwright.core.ramp.ramp import Ramp
from batchwright.core.ramp.ramp import ramp as make_ramp
from batchwright.core.ramp.request import RampRequest
from batchwright.processes.target import task_file
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
    if wanted.start_sample:
        raise ConfigError(
            "start_sample is for `ramp`: a run continues from its newest checkpoint (batchwright run --resume DIR).",
            field="start_sample",
            given=wanted.start_sample,
        )
    if target and wanted.budgets == ["epochs"] and wanted.dataset_size is None:
        wanted = replace(wanted, dataset_size=dataset_size(target, arguments or {}, options))
    notes: list[str] = []
    asked = request, wanted
    request = _placed(request, notes)
    if target and max(request.tensor_parallel, request.pipeline_parallel, request.context_parallel) > 1:
        raise ConfigError(
            "a task is data-parallel only. Leave out tensor, pipeline and context parallelism, or run your own script: "
            "batchwright run … -- COMMAND.",
            field="tensor_parallel",
            given=request.tensor_parallel,
            nearest=(1,),
        )
    _check_loading(request, notes, task=bool(target))
    if placeholders(command) & set(BATCH_PLACEHOLDERS) and not wanted.stop_every_stage:
        wanted = replace(wanted, stop_every_stage=True)
        notes.append("The command has a placeholder for its batch, so every stage is a launch of its own.")
    ours = [name for name in ("container", "container_mounts", "python", "srun", "launcher") if options.slurm.get(name)]
    if command and ours:
        notes.append(f"A command is started unchanged: launch.slurm.{', launch.slurm.'.join(ours)} is for tasks only.")
    if target and wanted.lr_scaling:
        options = replace(options, settings={"lr_scaling": wanted.lr_scaling, **options.settings})
    made = make_ramp(request, wanted, before and before[0].schedule, before[1] if before else 0)
    if made.schedule.total_samples is None:
        raise ScheduleError(
            "a run needs an end, and the last stage is open. Give a budget: --samples N, --tokens N or --epochs N.",
            field="samples",
        )
    assert made.placement is not None  # `_placed` gives the request a world
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
    check_machine(plan.options, direct=plan.kind == COMMAND)
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
