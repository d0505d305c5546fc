"""A run that continues: with other launch settings, smaller micro batches, or another ramp from its position on."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields, replace
from typing import Any, TypeVar

from batchwright.core.batch.request import BatchRequest
from batchwright.core.errors import ConfigError, EnvironmentFault, PlanError
from batchwright.core.fields import read_fields
from batchwright.core.ramp.request import RAMP_READERS, RULE_FLAGS, RampRequest
from batchwright.rundir import names

from .directory import RunDirectory, write_json
from .engine import check_machine, engine
from .plan import build, not_written
from .records import COMMAND, TASK, RunPlan
from .settings import read_options
from .work import work


def resume(
    directory: RunDirectory,
    changes: Mapping[str, Any],
    batch: BatchRequest | None = None,
    ramp: Mapping[str, Any] | None = None,
) -> RunPlan:
    """The plan of an existing run with changed launch settings and, from its position on, another batch, world or ramp.

    max_micro_batch_size alone only splits the stages again. The lock is held from here on, unless this raises.
    """
    batch = batch or BatchRequest()
    try:
        plan = directory.plan()  # before the lock, which creates a directory
        if plan.options.engine == "slurm":
            from .slurm.control import refuse_running

            refuse_running(directory)  # a job of a chain, which holds the lock
        directory.lock(fresh=True)
        plan = directory.plan()
        changed = replace(plan, options=read_options(changes, plan.options))
        check_machine(changed.options, direct=plan.kind == COMMAND, target=plan.target)
        position = None
        if batch.given or ramp:
            _refuse_running(directory, plan)
            position = work(directory, plan).position(verify=True)
            if set(batch.given) == {"max_micro_batch_size"} and not ramp:
                changed = refit(changed, batch.max_micro_batch_size or 1, position)
            else:
                changed = replan(changed, batch, ramp or {}, position)
        if changed != plan:
            write_json(directory.path / names.PLAN, changed)
        if changed.schedule != plan.schedule:
            directory.event("replanned", position=position, before=plan.schedule, after=changed.schedule)
        return changed
    except OSError as error:
        directory.unlock()
        raise not_written(directory, error) from None
    except BaseException:
        directory.unlock()
        raise


def _refuse_running(directory: RunDirectory, plan: RunPlan) -> None:
    """An error if a launch still runs: it would train on by the old plan."""
    number = max(directory.numbers(), default=0)
    manifest = directory.manifest(number)
    if manifest is None or manifest.handle is None or directory.ending(number) is not None:
        return
    if engine(plan.options.engine).poll(manifest.handle).state != "ended":
        raise EnvironmentFault(
            f"launch {number} of {directory.path} still runs, by the plan as it is. Stop it first (batchwright run --stop "
            "DIR), or resume without changes.",
            field="resume",
            given=str(directory.path),
        )


def refit(plan: RunPlan, limit: int, position: int = 0) -> RunPlan:
    """The same samples in micro batches of at most `limit`: the global batch, and so the gradient, does not change.

    Stages that end at or before sample `position` were trained, and stay.
    """
    ahead = [s for s in plan.stages if s.end_sample is None or s.end_sample > position]
    made = [s if s.micro_batch_size <= limit else plan.resplit(s, s.nodes, limit) for s in ahead]
    refused = [before for before, after in zip(ahead, made, strict=True) if after is None]
    if not refused:
        trained = plan.stages[: len(plan.stages) - len(ahead)]
        batch = plan.batch and _merged(plan.batch, BatchRequest(max_micro_batch_size=limit), {}, _SPLIT)
        batch = batch and replace(batch, given=(batch.given - set(_SPLIT)) | {"max_micro_batch_size"})
        return replace(plan, stages=(*trained, *(stage for stage in made if stage is not None)), batch=batch)
    nearest = max(plan.smaller(stage)[-1].micro_batch_size for stage in refused)
    stage, rule = refused[0], plan.rules.pipeline
    pieces = plan.rules.inner_microbatches
    why = f" that {rule.schedule} with {rule.stages} pipeline stages allows" if rule else ""
    raise PlanError(
        f"max_micro_batch_size={limit}: stage {stage.index + 1} has no split{why}: global_batch_size "
        f"{stage.global_batch_size} / data_parallel_size {stage.data_parallel_size} = "
        f"{stage.global_batch_size / stage.data_parallel_size:g} samples per rank"
        + (f", and every accumulation step is {pieces} equal microbatches" if pieces else "")
        + f". Nearest: {nearest}.",
        field="max_micro_batch_size",
        given=limit,
        nearest=(nearest,),
    )


_SPLIT = ("micro_batch_size", "max_micro_batch_size", "accumulation_steps")
# A new value replaces the old values of these fields: both would describe the same thing.
_REPLACED: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(RULE_FLAGS, RULE_FLAGS),
    "samples": ("tokens", "epochs", "dataset_size"),
    "tokens": ("samples", "epochs", "dataset_size"),
    "epochs": ("samples", "tokens"),
    "global_batch_size": ("global_batch_size_tokens",),
    "global_batch_size_tokens": ("global_batch_size",),
    "nodes": ("devices", "data_parallel_size"),
    "loading_hosts": ("expansion_factor",),
    "expansion_factor": ("loading_hosts",),
    "devices": ("nodes", "devices_per_node", "data_parallel_size"),
    "data_parallel_size": ("nodes", "devices_per_node", "devices"),
    "micro_batch_size": ("max_micro_batch_size", "accumulation_steps"),
    "max_micro_batch_size": ("micro_batch_size", "accumulation_steps"),
}
_HAS_LAST_BATCH = (
    "per_device",
    "thresholds",
    "thresholds_tokens",
    "thresholds_steps",
    "recipe",
)


def replan(plan: RunPlan, batch: BatchRequest, values: Mapping[str, Any], position: int) -> RunPlan:
    """The plan with another ramp, budget or world from sample `position` on.

    `batch` and `values` are what changes: its given fields, and raw values of a RampRequest.
    """
    if plan.batch is None or plan.ramp is None:
        raise ConfigError(
            "this run was started by an older version, which did not store its request: its ramp cannot be changed. Launch "
            "settings and max_micro_batch_size can.",
            field="resume",
        )
    read = read_fields(values, RAMP_READERS)
    if "start_sample" in read:
        raise ConfigError(
            f"start_sample={read['start_sample']} is for a new run: this one continues at its newest checkpoint, sample "
            f"{position:,}.",
            field="start_sample",
            given=read["start_sample"],
        )
    new = {name: getattr(batch, name) for name in batch.given} | read
    gone = {name for given in new for name in _REPLACED.get(given, ())}
    if any(rule in read for rule in _HAS_LAST_BATCH):
        gone |= {"global_batch_size", "global_batch_size_tokens", "sequence_lengths"}
    gone = (gone | {"stage_seconds"}) - set(new)  # seconds of the old stages
    if (budget := read.get("samples")) is not None and budget <= position:
        nearest = position + plan.stages[-1].global_batch_size  # one more step
        raise ConfigError(
            f"samples={budget:,} is not after the position of the run: {position:,} samples are trained. Nearest: {nearest:,}.",
            field="samples",
            given=budget,
            nearest=(nearest,),
        )
    request = _merged(plan.batch, BatchRequest(), new, gone)
    request = replace(
        request,
        given=(plan.batch.given - gone) | batch.given,
        origins={**{name: text for name, text in plan.batch.origins.items() if name not in gone}, **batch.origins},
        notes=batch.notes,
    )
    settings = {name: value for name, value in plan.options.settings.items() if name not in read}  # lr_scaling
    made, _ = build(
        request,
        _merged(plan.ramp, RampRequest(), new, gone),
        replace(plan.options, settings=settings),
        target=plan.target if plan.kind == TASK else None,
        arguments=plan.arguments,
        command=plan.command,
        position_command=plan.position_command,
        working_directory=plan.working_directory,
        before=(plan, position),
    )
    change = f"From sample {position:,} on, the ramp is {_brief(made)}; it was {_brief(plan)}. Earlier steps stay."
    return replace(made, notes=(*made.notes, change))


Request = TypeVar("Request", BatchRequest, RampRequest)


def _merged(old: Request, empty: Request, new: Mapping[str, Any], gone: Collection[str]) -> Request:
    """The old request with its `new` fields; those in `gone` are empty."""
    names = {field.name for field in fields(old)}
    changes = {name: getattr(empty, name) for name in names & set(gone)}
    return replace(old, **changes, **{name: value for name, value in new.items() if name in names})


def _brief(plan: RunPlan) -> str:
    sizes = [stage.global_batch_size for stage in plan.stages]
    shown = " -> ".join(map(str, sizes if len(sizes) < 6 else [*sizes[:2], "…", sizes[-1]]))
    return f"{shown} until sample {plan.total_samples:,}"
