"""Where every number of a plan came from: its source (given, derived, probed, default) and the reason in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .equation import Unknowns
from .request import Request, asked_for

if TYPE_CHECKING:
    from .plan import Plan

SHOWN = (
    "global_batch_size", "micro_batch_size", "accumulation_steps", "data_parallel_size", "batch_quantum", "devices",
    "nodes", "devices_per_node", "tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel",
    "sequence_length", "global_batch_size_tokens", "max_micro_batch_size", "samples_per_second", "step_seconds",
)  # fmt: skip


def provenance(request: Request, unknowns: Unknowns, plan: Plan) -> tuple[dict[str, str], dict[str, str]]:
    """For every number: given, derived, probed or default, and by what or from what."""
    sources: dict[str, str] = {}
    reasons: dict[str, str] = {}
    for name in SHOWN:
        value = getattr(plan, name)
        if value is None:
            continue
        origin = request.origins.get(name, "")
        if getattr(request, name, None) is not None and (name in request.origins or not _defaulted(request, name)):
            sources[name] = "probed" if origin.startswith("probe") else "given"
            if origin:
                reasons[name] = origin
        else:
            sources[name] = "default" if _defaulted(request, name) else "derived"
    for name, reason in _derivations(request, unknowns, plan).items():
        if sources.get(name) == "derived":
            reasons[name] = reason
    if unknowns.global_batch_size is None and unknowns.accumulation_steps is None:
        sources["accumulation_steps"] = "default"
        reasons["accumulation_steps"] = (
            "the fewest that fill the pipeline" if plan.pipeline else "one micro batch per step"
        )
    if unknowns.global_batch_size is None and unknowns.data_parallel_size is None:
        sources["data_parallel_size"] = "default"
        reasons["data_parallel_size"] = (
            f"one node of {plan.devices_per_node}" if plan.devices_per_node else "one device"
        )
    if request.round and unknowns.global_batch_size is not None and not asked_for(request, unknowns.global_batch_size):
        for name in {"global_batch_size", "global_batch_size_tokens"} & sources.keys():
            sources[name], reasons[name] = "derived", f"rounded {request.round} as asked"
    return sources, reasons


def _defaulted(request: Request, name: str) -> bool:
    return name.endswith("_parallel") and getattr(request, name) == 1 and name not in request.origins


def _derivations(request: Request, unknowns: Unknowns, plan: Plan) -> dict[str, str]:
    share = -(-plan.global_batch_size // plan.data_parallel_size)
    replica = plan.world.split()
    known_batch = unknowns.global_batch_size is not None
    limit = plan.max_micro_batch_size
    product = f"{plan.micro_batch_size} × {plan.accumulation_steps} × {plan.data_parallel_size}"
    divided = f"{plan.global_batch_size} / ({plan.micro_batch_size} × {plan.data_parallel_size})"
    if plan.ragged:
        whole = f"ceil({plan.global_batch_size} / {plan.data_parallel_size})"
        divided = f"ceil({share} / {plan.micro_batch_size}), where {share} = {whole}"
    micro = f"{share} samples per rank / {plan.accumulation_steps}"
    if plan.ragged:
        micro = f"{share} samples per rank in {plan.accumulation_steps} steps, rounded up"
    elif unknowns.accumulation_steps is None:
        micro = f"largest that divides {share} samples per rank" + (f" and is at most {limit}" if limit else "")
        if plan.pipeline and plan.pipeline.pipeline_style == "accumulation":
            micro = f"{share} samples per rank in {plan.accumulation_steps} pipeline microbatches"
    return {
        "global_batch_size": f"{plan.global_batch_size_tokens:,} tokens / {plan.sequence_length}"
        if request.global_batch_size_tokens
        else product,
        "micro_batch_size": micro if known_batch else f"max_micro_batch_size {limit}",
        "accumulation_steps": divided if unknowns.accumulation_steps is None else "pipeline_microbatches",
        "data_parallel_size": f"{plan.devices} devices" + (f" / ({replica})" if replica else "")
        if unknowns.data_parallel_size
        else f"{plan.global_batch_size} / ({plan.micro_batch_size} × {plan.accumulation_steps})",
        "batch_quantum": f"{plan.micro_batch_size} × {plan.data_parallel_size}",
        "devices": f"{plan.nodes} nodes × {plan.devices_per_node}"
        if request.nodes and request.devices_per_node
        else f"{plan.data_parallel_size} × {plan.world.model_parallel_size}",
        "nodes": f"{plan.devices} devices / {plan.devices_per_node}",
        "devices_per_node": f"{plan.devices} devices / {plan.nodes} nodes",
        "global_batch_size_tokens": f"{plan.global_batch_size} × {plan.sequence_length}",
        "step_seconds": f"{plan.global_batch_size} / samples per second",
        "samples_per_second": f"{plan.global_batch_size} / step seconds",
    }
