"""Notes that teach: what a plan means for the person who is about to run it, only where it applies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .errors import either
from .nearest import nearest_multiples

if TYPE_CHECKING:
    from .plan import Plan


def notes_for(plan: Plan, *, chosen: bool) -> tuple[str, ...]:
    """The notes of a plan; `chosen` when numbers were chosen among alternatives, not forced by the equation."""
    notes: list[str] = []
    micro, steps, ranks = plan.micro_batch_size, plan.accumulation_steps, plan.data_parallel_size
    if plan.ragged:
        most = -(-plan.global_batch_size // ranks)
        notes.append(
            f"Ragged: {plan.global_batch_size} samples on {ranks} ranks are shares of {plan.global_batch_size // ranks} "
            f"or {most}. Exact only where the loss is a sum divided once by its weight, as in batchwright's own step; "
            "most trainers would change the gradient."
        )
    chosen = chosen and plan.sources["micro_batch_size"] == "derived"
    if chosen and plan.max_micro_batch_size is None:
        notes.append(
            f"Nothing was said about what fits: micro_batch_size={micro} is an assumption. Give max_micro_batch_size, or "
            "measure it with a probe."
        )
    limit = plan.max_micro_batch_size
    if chosen and limit and 2 * micro <= limit and steps > 1 and plan.pipeline is None:
        near = nearest_multiples(limit * ranks, plan.global_batch_size)
        notes.append(
            f"{limit} would fit, but {plan.global_batch_size // ranks} samples per rank have no larger divisor than {micro} "
            f"up to it: global_batch_size {either(near)} would run with micro_batch_size {limit}."
        )
    faster = [a for a in plan.alternatives if a.step_seconds and a.step_seconds < 0.98 * (plan.step_seconds or 0)]
    if faster and plan.sources.get("step_seconds") == "probed":
        best = min(faster, key=lambda a: a.step_seconds or 0)
        notes.append(
            f"By the probe, micro_batch_size={best.micro_batch_size} with {best.accumulation_steps} accumulation steps takes "
            f"{best.step_seconds:.4g} s per step instead of {plan.step_seconds:.4g}."
        )
    if chosen and micro & (micro - 1):
        notes.append(
            f"micro_batch_size={micro} is not a power of two. Powers of two are easier to divide later; they are not "
            "faster by themselves."
        )
    if steps > 1 and not (plan.pipeline and plan.pipeline.pipeline_style == "accumulation"):
        notes.append(
            f"{steps} accumulation steps save memory and add no throughput: utilisation is slightly lower than with one "
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
            f"expert_parallel={plan.expert_parallel} spreads experts over devices that hold different samples anyway: it does "
            f"not reduce data_parallel_size {ranks}."
        )
    if refusal := plan.world.expert_refusal():
        notes.append(refusal)
    if plan.devices <= 8 and plan.pipeline is None:
        notes.append(
            "Usual ranges for fine-tuning: global batch 32-64, micro batch 1-4 with checkpointed activations, "
            f"accumulation 8-32; this plan has {plan.global_batch_size}, {micro} and {steps}."
        )
    if plan.loading.placeholder_rows:
        notes.append(
            f"{plan.loading.loading_hosts} of {plan.loading.hosts} hosts read; {plan.loading.placeholder_rows} "
            "placeholder rows fill the assembled array and are never trained on."
        )
    return tuple(notes)


def _pipeline_notes(plan: Plan) -> list[str]:
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
        notes.append("sequence_length is unknown: 4096 was assumed to balance the pipeline.")
    return notes
