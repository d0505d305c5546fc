"""A run that continues: with other launch settings, smaller micro batches, or another ramp from its position on."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields, replace
from typing import Any, TypeVar

from batchwright.core.batch.request import BatchRequest
from batchwright.core.errors import ConfigError, PlanError
from batchwright.core.fields import read_fields
from batchwright.core.ramp.request import RAMP_READERS, RULE_FLAGS, RampRequest
from batchwright.rundir import names

from .directory import RunDirectory, write_json
from .plan import build, not_written
from .records import TASK, RunPlan
from .settings import read_options
from .work import work


def resume(
    directory: RunDirectory,
    changes: Mapping[str, Any],
    batch: BatchRequest | None = None,
    ramp: Mapping[str, Any] | None = None,
) -> RunPlan:
    """The plan of an existing run with changed launch settings and, from its position on, another batch, world or ramp.

    max_micro_batch_size alone only splits the stages anew. The lock is held from here on. If another supervisor holds it,
    nothing is written: the attempt to supervise says who.
    """
    plan = directory.plan()
    free = directory.supervisor() is None
    batch = batch or BatchRequest()
    try:
        if free:
            directory.lock(fresh=True)
            plan = directory.plan()
        changed = replace(plan, options=read_options(changes, plan.options))
        if set(batch.given) == {"max_micro_batch_size"} and not ramp:
            changed = refit(changed, batch.max_micro_batch_size or 1)
        elif (batch.given or ramp) and free:
            position = work(directory, plan).position(verify=True)
            changed = replan(changed, batch, ramp or {}, position)
            directory.event("replanned", position=position, before=plan.schedule, after=changed.schedule)
        if changed != plan and free:
            write_json(directory.path / names.PLAN, changed)
    except OSError as error:
        raise not_written(directory, error) from None
    return changed


def refit(plan: RunPlan, limit: int) -> RunPlan:
    """The same samples in micro batches of at most `limit`: the global batch, and so the gradient, does not change."""
    made = [s if s.micro_batch_size <= limit else plan.resplit(s, s.nodes, limit) for s in plan.stages]
    refused = [before for before, after in zip(plan.stages, made, strict=True) if after is None]
    if not refused:
        return replace(plan, stages=tuple(stage for stage in made if stage is not None))
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


# A new value replaces the old values of these fields: both would describe the same thing.
_REPLACED: Mapping[str, tuple[str, ...]] = {
    **{rule: RULE_FLAGS for rule in RULE_FLAGS},
    "samples": ("tokens",),
    "tokens": ("samples",),
    "global_batch_size": ("global_batch_size_tokens",),
    "global_batch_size_tokens": ("global_batch_size",),
    "nodes": ("devices", "data_parallel_size"),
    "devices": ("nodes", "devices_per_node", "data_parallel_size"),
    "data_parallel_size": ("nodes", "devices_per_node", "devices"),
    "micro_batch_size": ("max_micro_batch_size", "accumulation_steps"),
    "max_micro_batch_size": ("micro_batch_size", "accumulation_steps"),
}
_ENDS_ITSELF = (
    "per_device",
    "thresholds",
    "thresholds_tokens",
    "thresholds_steps",
    "recipe",
)  # rules with a last batch


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
    new = {name: getattr(batch, name) for name in batch.given} | read
    gone = {name for given in new for name in _REPLACED.get(given, ())}
    if any(rule in read for rule in _ENDS_ITSELF):
        gone |= {"global_batch_size", "global_batch_size_tokens", "sequence_lengths"}
    gone -= set(new)
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
