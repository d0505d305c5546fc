"""Where every number of a plan came from: its source (given, derived, probed, default) and the reason in words."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

from .equation import Unknowns
from .request import Request, asked_for

if TYPE_CHECKING:
    from .pipeline import PipelineRule
    from .plan import Plan

SHOWN = (
    "global_batch_size", "micro_batch_size", "accumulation_steps", "data_parallel_size", "batch_quantum", "devices",
    "nodes", "devices_per_node", "tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel",
    "expert_tensor_parallel",
    "sequence_length", "global_batch_size_tokens", "max_micro_batch_size", "samples_per_second", "step_seconds",
    "tokens_per_second",
)  # fmt: skip


def provenance(
    request: Request, unknowns: Unknowns, plan: Plan, rule: PipelineRule | None = None
) -> tuple[dict[str, str], dict[str, str]]:
    """For every number, those of the pipeline and of the loading too: given, derived, probed or default, and why."""
    sources: dict[str, str] = {}
    reasons: dict[str, str] = {}
    for name in SHOWN:
        value = getattr(plan, name)
        if value is None:
            continue
        origin = request.origins.get(name, "")
        if getattr(request, name, None) is not None and (name in request.origins or not _defaulted(request, name)):
            unsaid = origin.endswith(" default")  # a launcher's: nobody gave it
            sources[name] = "probed" if origin.startswith("probe") else "default" if unsaid else "given"
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
    elif unknowns.accumulation_steps is None and unknowns.data_parallel_size is None:
        sources["accumulation_steps"] = "default"
        reasons["accumulation_steps"] = "the fewest there are: more of them add no throughput"
    if unknowns.global_batch_size is None and unknowns.data_parallel_size is None:
        sources["data_parallel_size"] = "default"
        reasons["data_parallel_size"] = (
            f"one node of {plan.devices_per_node}" if plan.devices_per_node else "one device"
        )
    if request.round and unknowns.global_batch_size is not None and not asked_for(request, unknowns.global_batch_size):
        for name in {"global_batch_size", "global_batch_size_tokens"} & sources.keys():
            sources[name], reasons[name] = "derived", f"rounded {request.round} as asked"
    for name, (source, reason) in {**_pipeline(request, plan, rule), **_loading(request, plan)}.items():
        sources[name] = source
        if reason:
            reasons[name] = reason
    return sources, reasons


def _given(request: Request, name: str) -> tuple[str, str]:
    return "given", request.origins.get(name, "")


def _pipeline(request: Request, plan: Plan, rule: PipelineRule | None) -> dict[str, tuple[str, str]]:
    made = plan.pipeline
    if made is None or rule is None:
        return {}
    pieces, quantum = made.pipeline_microbatches, plan.batch_quantum
    if request.pipeline_microbatches is not None:
        source = _given(request, "pipeline_microbatches")
    elif made.pipeline_style == "accumulation":
        source = "derived", "accumulation_steps"
    else:
        source = "derived", f"the fewest that fill {made.stages} stages and divide {quantum} samples"
    found = {
        "virtual_stages": _given(request, "virtual_stages") if made.virtual_stages > 1 else ("default", ""),
        "pipeline_microbatches": source,
        "bubble_fraction": ("derived", f"{rule.idle} / ({made.virtual_stages} × {pieces} + {rule.idle})"),
    }
    if made.recommended_microbatches is not None:
        found["recommended_microbatches"] = "derived", "idle stages against small microbatches"
    return found


def _loading(request: Request, plan: Plan) -> dict[str, tuple[str, str]]:
    load, batch = plan.loading, plan.global_batch_size
    hosts, readers, factor = load.hosts, load.loading_hosts, load.expansion_factor
    one_each = "derived", "one per node"

    def up(number: Fraction) -> str:
        return "" if number.denominator == 1 else ", rounded up"

    found = {
        "hosts": _given(request, "hosts") if request.hosts else one_each if plan.nodes else ("default", ""),
        "loading_hosts": ("default", "every host reads"),
        "expansion_factor": ("default", "every host reads"),
        "load_batch_size": (
            "derived",
            "global_batch_size" if factor <= 1 else f"{batch} × {factor}" + up(batch * factor),
        ),
        "rows_per_loading_host": (
            "derived",
            f"{batch} / {readers}" + up(Fraction(batch, readers)) * request.equal_rows,
        ),
        "placeholder_rows": ("derived", f"{load.load_batch_size} - {batch}"),
        "rows_read": ("derived", f"all of {readers} hosts"),
        "read_amplification": ("derived", f"{load.rows_read} / {batch}"),
    }
    if request.loading_hosts is not None:
        found["loading_hosts"] = _given(request, "loading_hosts")
        found["expansion_factor"] = "derived", f"{hosts} / {readers} hosts"
    elif request.stored_hosts is not None:
        found["expansion_factor"] = "derived", f"{hosts} / {load.stored_shards or hosts} hosts"
    elif request.expansion_factor is not None:
        found["expansion_factor"] = _given(request, "expansion_factor")
        if factor > 1:
            found["loading_hosts"] = "derived", f"{hosts} / {factor}"
    if load.stored_shards is not None:
        stored = _given(request, "stored_hosts") if request.stored_hosts else ("derived", f"{hosts} / ({factor})")
        found |= {"stored_shards": stored, "shards_per_host": ("derived", f"{load.stored_shards} / {hosts}")}
    return found


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
        "tokens_per_second": f"samples per second × {plan.sequence_length}",
    }
