"""From a ramp to the plan of a run: what is checked before anything is started."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from batchwright.core.batch.request import BatchRequest
from batchwright.core.errors import ConfigError, EnvironmentFault, ScheduleError
from batchwright.core.nodes.policies import Stage
from batchwright.core.numbers import divisors
from batchwright.core.ramp.ramp import Ramp, ramp
from batchwright.core.ramp.request import RampRequest
from batchwright.processes.target import task_file
from batchwright.rundir import names

from . import template
from .directory import RunDirectory, write_json
from .records import COMMAND, TASK, Options, RunPlan


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
) -> tuple[RunPlan, Ramp]:
    """The plan of a run and the ramp it follows; a task or a command, never both."""
    if bool(target) == bool(command):
        what = "both" if target else "neither"
        raise ConfigError(
            f"{what} given: a run takes a task (FILE.py:function) or a command after --.", field="task", given=target
        )
    template.check(command)
    template.check(position_command, "position_command")
    beyond = template.places(position_command) - {"run_dir"}
    if beyond:
        raise ConfigError(
            f"the position command may have {{run_dir}} only: {', '.join(sorted(beyond))} belong to one launch.",
            field="position_command",
        )
    notes: list[str] = []
    request = _placed(request, notes)
    if target and max(request.tensor_parallel, request.pipeline_parallel, request.context_parallel) > 1:
        raise ConfigError(
            "a task is data-parallel: splitting a model over devices is your framework's business. Leave tensor, pipeline "
            "and context parallelism out, or run your own script: batchwright run … -- COMMAND.",
            field="tensor_parallel",
            given=request.tensor_parallel,
            nearest=(1,),
        )
    if template.places(command) & set(template.BATCH_PLACES) and not wanted.stop_every_stage:
        wanted = replace(wanted, stop_every_stage=True)
        notes.append("The command is given its batch, so every stage is a launch of its own.")
    ours = [name for name in ("container", "container_mounts", "python", "srun", "launcher") if options.slurm.get(name)]
    if command and ours:
        notes.append(f"A command is started as it stands, without launch.slurm's {', '.join(ours)}.")
    if target and wanted.lr_scaling:
        options = replace(options, settings={"lr_scaling": wanted.lr_scaling, **options.settings})
    made = ramp(request, wanted)
    if made.schedule.total_samples is None:
        raise ScheduleError(
            "a run needs an end: the last stage is open. Give the budget, --samples N or --tokens N.", field="samples"
        )
    assert made.placement is not None  # _placed saw to that
    sizes = {stage.global_batch_size for stage in made.placement.stages}
    if command and len(sizes) > 1 and not template.places(command) & set(template.BATCH_PLACES):
        notes.append(
            "The command has no place for its batch, so it trains every stage with whatever it does by itself: write "
            f"{', '.join(f'{{{name}}}' for name in template.BATCH_PLACES)} where they belong."
        )
    stage = made.placement.stages[0]
    replica = request.tensor_parallel * request.pipeline_parallel * request.context_parallel
    per_node = request.devices_per_node or stage.data_parallel_size * replica // stage.nodes
    plan = RunPlan(
        TASK if target else COMMAND,
        "{}:{}".format(*task_file(target)) if target else command[0],  # by its full path: resumed from anywhere
        dict(arguments or {}),
        tuple(command),
        tuple(position_command),
        working_directory or os.getcwd(),
        made.schedule,
        made.placement.stages,
        made.placement.launches,
        per_node,
        options,
        tuple(notes),
    )
    return plan, replace(made, notes=(*notes, *made.notes))


def _placed(request: BatchRequest, notes: list[str]) -> BatchRequest:
    """A world: that of the request, or one process."""
    known = (request.nodes, request.devices, request.data_parallel_size)
    if any(value is not None for value in known):
        return request
    notes.append("No world is given: one process on this machine (--nodes N --devices-per-node M for more).")
    return replace(request, nodes=1, devices_per_node=request.devices_per_node or 1)


def refit(plan: RunPlan, max_micro_batch_size: int) -> RunPlan:
    """The same samples in smaller micro batches: a free choice at any time, as the gradient is the global batch's."""
    return replace(plan, stages=tuple(_refit(stage, max_micro_batch_size) for stage in plan.stages))


def _refit(stage: Stage, limit: int) -> Stage:
    if stage.micro_batch_size <= limit:
        return stage
    share = -(-stage.global_batch_size // stage.data_parallel_size)
    micro = limit if stage.ragged else max(n for n in divisors(share) if n <= limit)
    return replace(stage, micro_batch_size=micro, accumulation_steps=-(-share // micro))


def begin(directory: RunDirectory, plan: RunPlan) -> None:
    """Write the plan, where there is none yet; the run's lock is held from here on, so nobody writes another."""
    taken = ConfigError(
        f"{directory.path} holds a run already. Go on with batchwright run --resume "
        f"{shlex.quote(str(directory.path))}, or give another --dir.",
        field="dir",
        given=str(directory.path),
    )
    if directory.exists:
        raise taken
    try:
        directory.lock(fresh=True)
        if directory.exists:
            directory.unlock()
            raise taken
        write_json(directory.path / names.PLAN, plan)
    except OSError as error:
        raise EnvironmentFault(f"{directory.path} cannot be written: {error}.", field="dir") from None
