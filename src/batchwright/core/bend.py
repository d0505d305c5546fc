"""A batch that does not divide, bent because somebody asked: rounded, or run with ragged shares."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from .equation import Split, Unknowns, equation, ragged_split, splits
from .errors import PlanError, either
from .request import Request, asked_for


def rounded_batch(request: Request, unknowns: Unknowns, notes: list[str]) -> Unknowns:
    """Round the global batch to a multiple of what is known, when that was asked for by name."""
    batch = unknowns.global_batch_size
    if request.round is None or batch is None:
        return unknowns
    known = unknowns.known
    quantum = prod(known.values())
    rounded = batch // quantum * quantum if request.round == "down" else -(-batch // quantum) * quantum
    if len(known) < 3:  # on to the first multiple that has an allowed split: a pipeline may refuse some
        step = -quantum if request.round == "down" else quantum
        tried = range(rounded, rounded + 1000 * step, step)
        rounded = next((n for n in tried if n > 0 and any(splits(replace(unknowns, global_batch_size=n)))), rounded)
    asked = f"global_batch_size {batch}"
    if request.global_batch_size_tokens and not asked_for(request, batch):
        asked = f"global_batch_size_tokens {request.global_batch_size_tokens:,}"
    if asked_for(request, rounded):
        return unknowns
    if rounded == 0:
        raise PlanError(
            f"global_batch_size={batch} rounds down to nothing: {equation(known)} = {quantum} is more than {batch}. "
            f"Nearest: {quantum} (round up).",
            field="global_batch_size",
            given=batch,
            nearest=(quantum,),
        )
    if len(known) == 3:  # all is given: only a product can be right, and rounding must not hide a contradiction
        return unknowns
    notes.append(
        f"Rounded {request.round} as asked: {asked} -> {rounded} samples"
        + (f", a multiple of {equation(known)}" if known else "")
        + (f" = {quantum}." if len(known) > 1 else ".")
    )
    return replace(unknowns, global_batch_size=rounded)


def ragged_plan(request: Request, unknowns: Unknowns) -> Split | None:
    """A batch that does not divide, run exactly anyway: accumulation = ceil(ceil(batch / ranks) / micro)."""
    batch, ranks = unknowns.global_batch_size, unknowns.data_parallel_size
    if not request.allow_ragged or batch is None or ranks is None:
        return None
    share = -(-batch // ranks)
    micro, steps = unknowns.micro_batch_size, unknowns.accumulation_steps
    if batch % (ranks * (micro or 1) * (steps or 1)) == 0:
        return None
    split = ragged_split(unknowns)
    micro, needed = split.micro_batch_size, split.accumulation_steps
    reason = unknowns.pipeline.refusal(needed) if unknowns.pipeline else None
    if unknowns.pipeline and reason:
        near = unknowns.pipeline.nearest(needed)
        batches = [m * micro * ranks if m < needed else (m - 1) * micro * ranks + 1 for m in near]
        raise PlanError(
            f"global_batch_size={batch} on data_parallel_size={ranks} takes {needed} accumulation steps of micro batches "
            f"of {micro}, and the pipeline refuses: {reason}. Nearest: {either(batches)}.",
            field="global_batch_size",
            given=batch,
            nearest=batches,
        )
    if steps not in (None, needed):
        raise PlanError(
            f"global_batch_size={batch} on data_parallel_size={ranks} takes {needed} accumulation steps: shares of at "
            f"most ceil({batch} / {ranks}) = {share} samples in micro batches of {micro}; not {steps}. "
            f"Nearest: accumulation_steps={needed}.",
            field="accumulation_steps",
            given=steps,
            nearest=(needed,),
        )
    if unknowns.max_micro_batch_size and micro > unknowns.max_micro_batch_size:
        raise PlanError(
            f"micro_batch_size={micro} is more than max_micro_batch_size={unknowns.max_micro_batch_size}, the most that "
            f"fits. Nearest: {unknowns.max_micro_batch_size}.",
            field="micro_batch_size",
            given=micro,
            nearest=(unknowns.max_micro_batch_size,),
        )
    return split
