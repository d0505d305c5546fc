"""Explains a plan: the source (given, derived, probed, estimated, default) and reason of every number, and the notes."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

from batchwright.core.errors import either
from batchwright.core.numbers import nearest_multiples

from .equation import Unknowns
from .loading import MANY_ROWS, Storage, enough_readers, reader_load
from .pipeline import ASSUMED_LENGTH
from .request import BatchRequest, asked_for

if TYPE_CHECKING:
    from .pipeline import PipelineRule
    from .plan import BatchPlan

SHOWN = (
    "global_batch_size",
    "micro_batch_size",
    "accumulation_steps",
    "data_parallel_size",
    "batch_quantum",
    "devices",
    "nodes",
    "devices_per_node",
    "tensor_parallel",
    "pipeline_parallel",
    "context_parallel",
    "expert_parallel",
    "expert_tensor_parallel",
    "sequence_length",
    "global_batch_size_tokens",
    "max_micro_batch_size",
    "samples_per_second",
    "step_seconds",
    "tokens_per_second",
)


def provenance(
    request: BatchRequest, unknowns: Unknowns, plan: BatchPlan, rule: PipelineRule | None = None
) -> tuple[dict[str, str], dict[str, str]]:
    """The source and the reason of every number, including the pipeline's and the loading's."""
    sources: dict[str, str] = {}
    reasons: dict[str, str] = {}
    for name in SHOWN:
        value = getattr(plan, name)
        if value is None:
            continue
        origin = request.origins.get(name, "")
        if getattr(request, name, None) is not None and (name in request.origins or not _defaulted(request, name)):
            default = origin.endswith(" default")  # of a launcher
            measured = {"probe": "probed", "estimate": "estimated"}.get(origin.partition(" ")[0])
            sources[name] = measured or ("default" if default else "given")
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
        reasons["accumulation_steps"] = "the fewest possible: more add no throughput"
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


def _given(request: BatchRequest, name: str) -> tuple[str, str]:
    return "given", request.origins.get(name, "")


def _pipeline(request: BatchRequest, plan: BatchPlan, rule: PipelineRule | None) -> dict[str, tuple[str, str]]:
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
    idle = rule.idle(pieces)
    found = {
        "virtual_stages": _given(request, "virtual_stages") if made.virtual_stages > 1 else ("default", ""),
        "pipeline_microbatches": source,
        "bubble_fraction": ("derived", f"{idle} / ({made.virtual_stages} × {pieces} + {idle})"),
    }
    if made.recommended_microbatches is not None:
        found["recommended_microbatches"] = "derived", "idle stages against small microbatches"
    return found


def _loading(request: BatchRequest, plan: BatchPlan) -> dict[str, tuple[str, str]]:
    load, batch = plan.loading, plan.global_batch_size
    times = f" × {load.read_ahead}" * (load.read_ahead > 1)
    real = batch * load.read_ahead
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
            "global_batch_size" + times if factor <= 1 else f"{batch} × {factor}{times}" + up(real * factor),
        ),
        "rows_per_loading_host": (
            "derived",
            f"{batch}{times} / {readers}" + up(Fraction(real, readers)) * request.equal_rows,
        ),
        "read_ahead": _given(request, "read_ahead") if "read_ahead" in request.given else ("default", "one step"),
        "placeholder_rows": ("derived", f"{load.load_batch_size} - {real}"),
        "rows_read": ("derived", f"all of {readers} hosts"),
        "read_amplification": ("derived", f"{load.rows_read} / {real}"),
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


def _defaulted(request: BatchRequest, name: str) -> bool:
    return name.endswith("_parallel") and getattr(request, name) == 1 and name not in request.origins


def _derivations(request: BatchRequest, unknowns: Unknowns, plan: BatchPlan) -> dict[str, str]:
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


def notes_for(plan: BatchPlan, *, chosen: bool) -> tuple[str, ...]:
    """The notes of a plan; `chosen`: its numbers were chosen among alternatives, not determined by the equation."""
    notes: list[str] = []
    micro, steps, ranks = plan.micro_batch_size, plan.accumulation_steps, plan.data_parallel_size
    if plan.ragged:
        most = -(-plan.global_batch_size // ranks)
        notes.append(
            f"Ragged: {plan.global_batch_size} samples on {ranks} ranks are shares of {plan.global_batch_size // ranks} "
            f"or {most}. The gradient is exact only if the loss is a sum divided once by its weight, as in batchwright's "
            "own step; most trainers would change the gradient."
        )
    chosen = chosen and plan.sources["micro_batch_size"] == "derived"
    if chosen and plan.max_micro_batch_size is None:
        notes.append(
            f"max_micro_batch_size is not given, so micro_batch_size={micro} may not fit into memory. Give "
            "max_micro_batch_size, or measure it with a probe."
        )
    limit = plan.max_micro_batch_size
    if chosen and limit and 2 * micro <= limit and steps > 1 and plan.pipeline is None:
        near = nearest_multiples(limit * ranks, plan.global_batch_size)
        notes.append(
            f"max_micro_batch_size is {limit}, but the largest divisor of {plan.global_batch_size // ranks} samples per rank "
            f"up to it is {micro}: global_batch_size {either(near)} would run with micro_batch_size {limit}."
        )
    faster = [a for a in plan.alternatives if a.step_seconds and a.step_seconds < 0.98 * (plan.step_seconds or 0)]
    if faster and plan.sources.get("step_seconds") == "probed":
        best = min(faster, key=lambda a: a.step_seconds or 0)
        notes.append(
            f"By the probe's times, micro_batch_size={best.micro_batch_size} with {best.accumulation_steps} accumulation "
            f"steps takes {best.step_seconds:.4g} s per step instead of {plan.step_seconds:.4g}."
        )
    if chosen and micro & (micro - 1):
        notes.append(
            f"micro_batch_size={micro} is not a power of two. Powers of two are easier to divide later; they are not "
            "faster by themselves."
        )
    if steps > 1 and not (plan.pipeline and plan.pipeline.pipeline_style == "accumulation"):
        notes.append(
            f"{steps} accumulation steps save memory and add no throughput: the devices are used slightly less than with one "
            f"micro batch of {micro * steps}."
        )
        notes.append(
            f"Every N steps (logging, evaluation, saving) means N optimizer steps in Hugging Face: N × {steps} micro "
            f"steps, N × {plan.global_batch_size} samples. Lightning's val_check_interval counts micro steps."
        )
    if plan.pipeline:
        notes.extend(_pipeline_notes(plan))
    if plan.expert_parallel > 1:
        notes.append(
            f"expert_parallel={plan.expert_parallel} places experts on devices that hold different samples already: it does "
            f"not reduce data_parallel_size {ranks}."
        )
    if refusal := plan.world.expert_refusal():
        notes.append(refusal)
    if plan.devices <= 8 and plan.pipeline is None:
        notes.append(
            "Usual ranges for fine-tuning: global batch 32-64, micro batch 1-4 with checkpointed activations, "
            f"accumulation 8-32; this plan has {plan.global_batch_size}, {micro} and {steps}."
        )
    if advice := _reader_note(plan):
        notes.append(advice)
    if plan.loading.placeholder_rows:
        notes.append(
            f"{plan.loading.loading_hosts} of {plan.loading.hosts} hosts read; {plan.loading.placeholder_rows} "
            "placeholder rows fill the assembled array and are not trained on."
        )
    return tuple(notes)


# Hosts from which on it matters how many of them open connections.
_MANY_HOSTS = 16
_TOKEN_BYTES = 4


def _reader_note(plan: BatchPlan) -> str | None:
    """How many hosts are enough to read, by the model of docs/data.md, if nobody has said how many read."""
    load, seconds, length = plan.loading, plan.step_seconds, plan.sequence_length
    if load.hosts < _MANY_HOSTS or load.loading_hosts < load.hosts or not seconds or not length:
        return None
    rows, size = plan.global_batch_size, length * _TOKEN_BYTES
    cases = {
        "one row (rows in random order of remote files)": Storage(),
        "many rows (rows that lie together)": MANY_ROWS,
    }
    found: list[str] = []
    for case, storage in cases.items():
        few = enough_readers(rows, size, load.hosts, seconds, storage)
        every = reader_load(rows, size, load.hosts, load.hosts, storage)
        if few is None or 2 * few.loading_hosts > load.hosts or few.connections >= every.connections:
            continue
        found.append(
            f"loading_hosts={few.loading_hosts} would be enough if a request returns {case}: each reads its rows in "
            f"{few.read_seconds:.2g} s over {storage.at_once} connections and sends them in {few.send_seconds:.2g} s, and the "
            f"storage has {few.connections:,} connections instead of {every.connections:,}."
        )
    if not found:
        return None
    return (
        f"For a step of {seconds:.3g} s, {' '.join(found)} A model, with num_workers={MANY_ROWS.workers} on each reading host, "
        f"{size:,} bytes per row and an assumed storage; measure yours."
    )


def _pipeline_notes(plan: BatchPlan) -> list[str]:
    pipeline = plan.pipeline
    if pipeline is None:
        return []
    notes: list[str] = []
    if pipeline.pipeline_microbatches < pipeline.stages:
        notes.append(
            f"{pipeline.pipeline_microbatches} microbatches cannot fill {pipeline.stages} stages: "
            f"{pipeline.bubble_fraction:.0%} of the step is idle."
        )
    if pipeline.recommended_microbatches not in (None, pipeline.pipeline_microbatches):
        notes.append(
            f"{pipeline.recommended_microbatches} microbatches would balance idle stages against small microbatches "
            "(an estimate; a probe measures it)."
        )
    if plan.sequence_length is None:
        notes.append(f"sequence_length is unknown: the pipeline is balanced for an assumed {ASSUMED_LENGTH}.")
    return notes
