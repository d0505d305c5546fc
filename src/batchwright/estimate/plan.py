"""From a model and a device to a plan: the request is checked as a whole, the estimating process chooses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from batchwright.core import codec
from batchwright.core.batch.pipeline import HALF_SPEED_TOKENS
from batchwright.core.batch.plan import BatchPlan, plan
from batchwright.core.batch.request import BatchRequest, resolve_ranks
from batchwright.core.errors import ConfigError, PlanError, Violation, raise_violations
from batchwright.processes.target import task_file

from . import worker
from .choose import RECOMPUTED, SHARDED, Choice
from .devices import Device
from .estimate import TIMEOUT, assumptions, check_request, find_room, nothing_fits
from .model import find_config
from .records import CAUSAL_LM, ChoiceRequest, EstimateRequest, Placement, Point, Room


def plan_memory(
    batch: BatchRequest,
    *,
    task: str | None = None,
    model: str | None = None,
    args: Mapping[str, Any] | None = None,
    device: str | Device | None = None,
    memory_bytes: int | None = None,
    margin_bytes: int = 0,
    context_bytes: int | None = None,
    workspace_bytes: int | None = None,
    fragmentation_percent: float | None = None,
    precision: str = "fp32",
    optimizer: str | None = None,
    lora: int = 0,
    checkpoint_activations: bool | None = None,
    shard: bool | None = None,
    timeout: float = TIMEOUT,
    progress: bool = False,
) -> tuple[BatchPlan, Placement]:
    """The best plan whose micro batch fits, by an estimate, and how the model is trained in it.

    `checkpoint_activations` and `shard` (FSDP2 over the data-parallel ranks) are chosen if they are None.
    """
    room, wrong = find_room(device, memory_bytes, margin_bytes, context_bytes, workspace_bytes, fragmentation_percent)
    if room.memory_bytes is None and not wrong:
        wrong.append(Violation("A plan from an estimate needs device or memory: what must it fit in?", "device"))
    base, more = described(batch, task, model, args, precision, optimizer, lora, room, progress)
    batch, invalid = on_devices(batch)
    raise_violations(PlanError, [*wrong, *more, *invalid])
    if model is not None:
        base = replace(base, model=find_config(model, lora))
    request = ChoiceRequest(batch, base, checkpoint_activations, shard)
    result = worker.run("choose", request, timeout=timeout)
    if "remedies" in result:
        way = codec.decode(EstimateRequest, result["way"])
        changes = [
            {**r, "change": change}
            for r in result["remedies"]
            if (change := _on_devices(r["change"], batch)) is not None
        ]
        raise nothing_fits(room, codec.decode(Point, result["point"]), changes, _trained(way))
    made = codec.decode(Choice, result)
    way = replace(made.request, accumulation_steps=made.plan.accumulation_steps)
    rule = (
        f"Ways to train are ranked by rule, not by measured times: recomputation takes {RECOMPUTED:.2f} times as long, "
        f"sharding {SHARDED:g} times, and a micro batch of {HALF_SPEED_TOKENS} tokens runs at half speed.",
    )
    few = ("`extrapolated`: from three and five layers, since all are the same. The first row is from all layers.",)
    extrapolated = any(c.source == "extrapolated" for c in made.candidates)
    planned = replace(made.plan, notes=(*made.plan.notes, *result["notes"]))
    return planned, Placement(
        task=task,
        model=model,
        device=room.device,
        memory_bytes=room.memory_bytes or 0,
        margin_bytes=margin_bytes,
        allowance=room.allowance,
        usable_bytes=room.usable_bytes or 0,
        precision=precision,
        optimizer=base.optimizer if model else None,
        lora=lora,
        checkpoint_activations=way.checkpoint_activations,
        sharded=way.ranks > 1,
        tensor_parallel=way.tensor_parallel,
        peak_memory_bytes=made.point.peak_memory_bytes,
        breakdown=made.point.breakdown,
        source=made.candidates[0].source,
        candidates=made.candidates,
        assumptions=(*assumptions(way, "torch", room), *result["rules"], *rule, *(few if extrapolated else ())),
    )


def _trained(way: EstimateRequest) -> str:
    """How a way trains, for an error.

    >>> _trained(EstimateRequest("", checkpoint_activations=True, ranks=8))
    ', recomputed and sharded over 8 ranks,'
    """
    recomputed = "recomputed" if way.checkpoint_activations else "not recomputed"
    return f", {recomputed} and {f'sharded over {way.ranks} ranks' if way.ranks > 1 else 'not sharded'},"


def _on_devices(change: str, batch: BatchRequest) -> str | None:
    """A change of the ranks, as plan takes it; None if the batch cannot be planned on them.

    >>> _on_devices("lora=16 + ranks=8", BatchRequest(tensor_parallel=2))
    'lora=16 + shard + devices=16'
    >>> _on_devices("ranks=8", BatchRequest(devices_per_node=4))
    'shard + nodes=2'
    >>> _on_devices("ranks=8", BatchRequest(devices=8, global_batch_size=16))
    'shard'
    >>> _on_devices("ranks=16", BatchRequest(devices=8, global_batch_size=8))
    """
    names, found, ranks = change.rpartition("ranks=")
    if not found:
        return change
    if int(ranks) == resolve_ranks(batch):
        return f"{names}shard"
    devices, each = int(ranks) * batch.tensor_parallel, batch.devices_per_node
    if each and devices % each == 0:
        said, world = f"nodes={devices // each}", replace(batch, nodes=devices // each, devices=None)
    else:
        said, world = f"devices={devices}", replace(batch, devices=devices, nodes=None, devices_per_node=None)
    return None if on_devices(world)[1] else f"{names}shard + {said}"


def described(
    batch: BatchRequest,
    task: str | None,
    model: str | None,
    args: Mapping[str, Any] | None,
    precision: str,
    optimizer: str | None,
    lora: int,
    room: Room,
    progress: bool,
) -> tuple[EstimateRequest, list[Violation]]:
    """The request of one way to train, and what is wrong with it."""
    base = EstimateRequest(
        task=task or "",
        args=dict(args or {}),
        sequence_lengths=() if batch.sequence_length is None else (batch.sequence_length,),
        memory_bytes=room.usable_bytes,
        precision=precision,
        accelerator=room.device is not None,
        progress=progress,
        model=model,
        optimizer=optimizer or "adamw",
        lora=lora,
        tensor_parallel=batch.tensor_parallel,
    )
    wrong = check_request(base, optimizer)
    if task:
        try:
            task_file(task)
        except ConfigError as error:
            wrong += error.violations
    for name in ("pipeline_parallel", "context_parallel"):
        if getattr(batch, name) > 1:
            message = (
                f"{name}={getattr(batch, name)} cannot be estimated: give max_micro_batch_size instead of a model."
            )
            wrong.append(Violation(message, name, getattr(batch, name), (1,)))
    return base, wrong


def on_devices(batch: BatchRequest) -> tuple[BatchRequest, list[Violation]]:
    """The request on known devices (one, if it names none), and why it has no plan at any micro batch."""
    try:
        if resolve_ranks(batch) is None:
            batch = replace(batch, devices=1, origins={**batch.origins, "devices": "one device by default"})
        known = (batch.global_batch_size, batch.global_batch_size_tokens, batch.micro_batch_size)
        plan(batch if any(known) else replace(batch, max_micro_batch_size=batch.max_micro_batch_size or 1))
    except PlanError as error:
        return batch, list(error.violations)
    return batch, []


def probe_target(base: EstimateRequest, checkpoint_activations: bool) -> tuple[str, dict[str, Any]]:
    """The task and its arguments with which a model is probed instead of estimated."""
    if base.model is None:
        return base.task, base.arguments(next(iter(base.sequence_lengths), None))
    whole = replace(base, checkpoint_activations=checkpoint_activations).as_task()
    return CAUSAL_LM, {**whole.arguments(base.sequence_lengths[0]), "real": True}
