"""Why a split's gradient differs from the full batch's: experiments, then one finding for each cause.

1. random draws fixed, fp64       an error that disappears is dropout or precision
2. batch statistics frozen        an error that disappears is BatchNorm
3. without the auxiliary mean     an error that disappears is the auxiliary mean's
4. samples doubled and joined     what kind of number the loss is, and so what is wrong with it (structure.py)

The second half of the file has the message of each cause: what is wrong, the numbers, and what to change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from batchwright.core.errors import RunError
from batchwright.core.ramp.learning_rate import check_horizon
from batchwright.core.ramp.schedule import Schedule

from .measured import Gradient, Measures, Variant, combine, dot, group_errors, norm, relative_error
from .names import Cause
from .structure import Structure, structure

# Errors that rounding alone can cause. fp64: any fault of logic is far larger. fp32, if the task does not run in fp64:
# measured up to 1e-5 on deep networks. Half precision: one rounding is 0.4% (bf16), and a gradient has many.
EXACT = 1e-8
ROUNDING = {"float64": 1e-10, "float32": 1e-5, "bfloat16": 1e-3, "float16": 1e-3}
HALVES = {"bfloat16", "float16"}
SINGLE, HALF = 1e-4, 5e-2
# A larger rounding error is an error, not a note: an assumption.
COARSE = 5e-2


@dataclass(frozen=True)
class Finding:
    """One cause of a different gradient: `severity` is `error`, or `note` if training is correct without a change."""

    cause: Cause
    severity: Literal["error", "note"]
    message: str


@dataclass(frozen=True)
class SplitResult:
    """One split of the batch, and its error relative to the whole batch's gradient; None if it could not run."""

    micro_batch_size: int
    accumulation_steps: int
    ranks: int
    relative_error: float | None
    groups: Mapping[str, float]  # the modules with the largest errors, each divided by the norm of the whole gradient
    pipeline_parallel: int = 1


@dataclass(frozen=True)
class Scale:
    """A split's gradient as `factor` times the reference plus an orthogonal rest, of relative norm `rest`."""

    micro_batch_size: int
    accumulation_steps: int
    ragged: bool
    error: float
    factor: float
    rest: float


class CauseSearch:
    """Finds the causes for the splits of one rig; `variant` and `tolerance` are the strictest that the task allows."""

    def __init__(self, rig: Measures, splits: Sequence[SplitResult]) -> None:
        self.rig, self.splits = rig, splits
        self.notes: list[str] = []
        self.variant, self.tolerance = self._strictest()

    def findings(self) -> list[Finding]:
        """All causes, errors first."""
        found = self._chance()
        if any(f.severity == "error" for f in found):
            return found
        scales = self._scales(self.variant)
        if any(s.error > self.tolerance for s in scales) or any(s.relative_error is None for s in self.splits):
            found += self._logic(scales)
        else:
            found += self._rounding()
        return sorted(found, key=lambda finding: finding.severity != "error")

    def _strictest(self) -> tuple[Variant, float]:
        strict = Variant(random=False, exact=True)
        try:
            self.rig.reference(strict)
            return strict, EXACT
        except RunError as error:
            half = bool(self.rig.kinds & HALVES)
            self.notes.append(
                f"The task does not run in fp64 ({type(error.__cause__).__name__}), so errors below "
                f"{HALF if half else SINGLE:g} count as rounding."
            )
            return Variant(random=False), HALF if half else SINGLE

    def _chance(self) -> list[Finding]:
        rig, seed = self.rig, self.rig.seed
        own = relative_error(rig.reference(Variant(), seed + 1), rig.reference(Variant()))
        left = relative_error(rig.reference(self.variant, seed + 1), rig.reference(self.variant))
        collate = rig.collate_draws(self.variant)
        if left > self.tolerance or collate:
            return [Finding("random-draws", "error", unknown_draws(left, collate))]
        if own <= 1e-6 and not rig.collate_draws(Variant()):
            return []
        return [
            Finding("dropout", "note", dropout(own, max((s.relative_error or 0.0 for s in self.splits), default=0.0)))
        ]

    def _rounding(self) -> list[Finding]:
        kind = max(self.rig.kinds, key=lambda name: ROUNDING.get(name, 1.0))
        worst = max(self.splits, key=lambda s: s.relative_error or 0.0)
        if (worst.relative_error or 0.0) <= ROUNDING.get(kind, 1e-3):
            return []
        own = Variant(random=False)
        error = relative_error(self.rig.split(own, worst.micro_batch_size), self.rig.reference(own))
        if error <= ROUNDING.get(kind, 1e-3):
            return []
        severity = "error" if error > COARSE else "note"
        return [Finding("precision", severity, precision(error, kind, worst.micro_batch_size, self.variant.exact))]

    def _logic(self, scales: list[Scale]) -> list[Finding]:
        found: list[Finding] = []
        variant, rig = self.variant, self.rig
        frozen = replace(variant, statistics=False)
        before = max((s.error for s in scales), default=None)
        failed = [s.micro_batch_size for s in self.splits if s.relative_error is None]
        if failed or rig.uses_statistics(variant):
            after = self._scales(frozen)
            worst = max((s.error for s in after), default=0.0)
            found.append(Finding("batch-norm", "error", batch_norm(before, worst, failed)))
            variant, scales = frozen, after
        if max(s.error for s in scales) <= self.tolerance:
            return found
        worst = max(scales, key=lambda s: s.error)
        if (kept := rig.keeps_state(variant)) > self.tolerance:
            return [*found, Finding("keeps-state", "error", keeps_state(kept, worst))]
        try:
            facts = structure(rig, variant, self.tolerance)
        except RunError as error:
            self.notes.append(f"The experiments that identify the cause could not be run: {error}")
            return [*found, self._unexplained(variant, worst)]
        if facts.auxiliary is not None:
            found += self._auxiliary(facts, variant, scales)
            variant = replace(variant, auxiliary=False)
            scales = self._scales(variant) if facts.loss != "zero" else []
        if scales and max(s.error for s in scales) > self.tolerance:
            found += [_advised(finding, rig.framework) for finding in self._loss(facts, scales)]
        return found or [self._unexplained(variant, worst)]

    def _unexplained(self, variant: Variant, worst: Scale) -> Finding:
        gradient = self.rig.split(variant, worst.micro_batch_size)
        groups = group_errors(gradient, self.rig.reference(variant))
        return Finding("unexplained", "error", unexplained(worst, groups))

    def _loss(self, facts: Structure, scales: list[Scale]) -> list[Finding]:
        tolerance = self.tolerance
        worst = max(scales, key=lambda s: s.error)
        counts, constant = abs(facts.weight_factor - 2) <= 1e-6, abs(facts.weight_factor - 1) <= 1e-6
        if facts.loss == "mixed":
            return [Finding("auxiliary-scaled", "error", auxiliary_in_sum(facts, worst))]
        if facts.residual > max(tolerance, 1e-6) or facts.loss == "other":
            cause = "padding" if facts.padding else "in-batch-negatives"
            return [Finding(cause, "error", interaction(facts, worst))]
        if facts.loss == "mean" and constant:
            if all(s.error <= tolerance for s in scales if not s.ragged):
                return [Finding("ragged-tail", "error", ragged_tail(worst, self.rig.size))]
            return [Finding("mean-of-means", "error", mean_of_means(worst))]
        if facts.loss == "mean" and counts:
            found = [Finding("scaled-by-accumulation", "error", mean_with_count(facts, worst))]
            if self.rig.framework == "transformers":
                found = [Finding("ignores-num-items-in-batch", "error", ignores_count(worst))]
            if any(s.rest > 100 * tolerance for s in scales if not s.ragged):
                found.append(
                    Finding("mean-of-means", "error", mean_of_means(max(scales, key=lambda s: s.rest), rest=True))
                )
            return found
        if facts.loss == "sum" and constant:
            return [Finding("scaled-by-accumulation", "error", constant_weight(facts, worst))]
        if facts.loss == "sum" and max(abs(share - 1) for share in facts.shares) > max(tolerance, 1e-6):
            return [Finding("mean-of-means", "error", shares_differ(facts, worst))]
        if abs(facts.weight_joined - 1) > 1e-6:
            return [Finding("mean-of-means", "error", weights_do_not_add(facts, worst))]
        return []

    def _auxiliary(self, facts: Structure, variant: Variant, scales: list[Scale]) -> list[Finding]:
        worst = max(scales, key=lambda s: s.error)
        if facts.auxiliary in ("sum", "other", "mixed"):
            return [Finding("auxiliary-scaled", "error", auxiliary_as_sum(facts, worst))]
        if facts.auxiliary_joined > self.tolerance:
            alone = (
                max(s.error for s in self._scales(replace(variant, auxiliary=False))) if facts.loss != "zero" else 0.0
            )
            return [Finding("auxiliary-per-micro-batch", "note", auxiliary_per_batch(facts, worst, alone))]
        return []

    def _scales(self, variant: Variant) -> list[Scale]:
        reference = self.rig.reference(variant)
        found: list[Scale] = []
        for split in self.splits:
            if split.relative_error is None and variant.statistics:
                continue
            gradient = self.rig.split(variant, split.micro_batch_size)
            found.append(scale_of(gradient, reference, split.micro_batch_size, self.rig.size))
        return found


def scale_of(gradient: Gradient, reference: Gradient, micro_batch_size: int, size: int) -> Scale:
    """Fit gradient = factor × reference."""
    whole = norm(reference)
    factor = dot(gradient, reference) / whole**2
    rest = norm(combine((1.0, gradient), (-factor, reference))) / whole
    steps = -(-size // micro_batch_size)
    return Scale(
        micro_batch_size, steps, size % micro_batch_size != 0, relative_error(gradient, reference), factor, rest
    )


_SUM = (
    'Return the sum and its weight: `return F.cross_entropy(logits, labels, reduction="sum"), (labels != -100).sum()`.'
)

# What to change instead where the loss is that of a framework.
_ADVICE = {
    "transformers": "Train with `exact(Trainer)` of batchwright.adapters.huggingface, which weighs each micro batch itself.",
    "jax": "Return the sum and its weight: `return (losses * mask).sum(), mask.sum()`.",
    "lightning": "Train with `exact(MyModule)` and `Steps` of batchwright.adapters.lightning, which weigh each micro batch.",
}


def _advised(finding: Finding, framework: str) -> Finding:
    return replace(finding, message=finding.message.replace(_SUM, _ADVICE.get(framework, _SUM)))


def number(value: float) -> str:
    """Print a relative error or a factor.

    >>> number(0.30000001), number(2.3e-7), number(15.99)
    ('0.3', '2.3e-07', '16')
    """
    return f"{value:.2g}" if abs(value) < 1 else f"{value:.3g}"


def _at(scale: Scale) -> str:
    return f"{scale.accumulation_steps} micro batches of {scale.micro_batch_size}"


def dropout(draws: float, error: float) -> str:
    changes = f"another seed changes the full batch's gradient by {number(draws)}, and " if draws else ""
    return (
        f"the task draws random numbers while it trains (dropout, noise, masking in collate): {changes}a split draws them in "
        f"another order (off by up to {number(error)}). Splits are equal in distribution, which is enough for training. "
        "Everything else was checked with the draws fixed."
    )


def unknown_draws(left: float, collate: bool) -> str:
    shown = f"the gradient of the same batch differs by {number(left)} between two seeds"
    if collate:
        shown = "collating the same samples twice gives different tensors"
    return (
        f"{shown}, even with dropout off and torch's draws fixed, so splits cannot be compared. Draw in dataset[i], which is "
        "seeded by position and the same at any split, or add an `--arg` that switches the draw off for the check."
    )


def precision(error: float, kind: str, micro: int, exact: bool) -> str:
    proof = "and exact in fp64: it is rounding, not logic" if exact else "which is small enough to be rounding"
    return (
        f"the gradient in micro batches of {micro} is off by {number(error)} in the task's own arithmetic (parameters: "
        f"{kind}) {proof}. Every split rounds differently. If it matters, keep parameters in fp32 and use "
        "`torch.autocast(device, torch.bfloat16)`, or compute the last layer and the loss in fp32: `logits.float()`."
    )


def batch_norm(before: float | None, after: float, failed: list[int]) -> str:
    if before is None:
        shown = "no split could run"
    else:
        shown = f"the gradient is off by {number(before)}, and by {number(after)} with statistics frozen"
        shown += " (the rest has another cause)" if after > 1e-3 * before else ""
    cannot = f" Micro batches of {failed[0]} cannot be normalised at all." if failed else ""
    return (
        f"BatchNorm normalises over the micro batch, so the model depends on the split: {shown}. It also updates its running "
        f"statistics once per micro batch.{cannot} Use a norm over single samples: `nn.GroupNorm(32, channels)`, or freeze "
        "it: `bn.eval()`. SyncBatchNorm combines ranks, but not micro batches. To accept it: `--allow batch-norm`."
    )


def mean_with_count(facts: Structure, worst: Scale) -> str:
    return (
        f"the gradient grows with the number of micro batches: {number(worst.factor)}× the full batch's at {_at(worst)}. "
        f"For twice the samples the returned loss stays the same ({number(facts.loss_factor)}×: a mean) while its weight grows "
        f"({number(facts.weight_factor)}×), so {worst.accumulation_steps} means are added and divided by one count. {_SUM}"
    )


def ignores_count(worst: Scale) -> str:
    return (
        f"the gradient is {number(worst.factor)}× the full batch's at {_at(worst)}: the Trainer passes num_items_in_batch, so it "
        "adds the losses of the micro batches and does not divide by their number, but the loss ignores num_items_in_batch "
        f"and is a mean. {_SUM} Or set `loss_is_scaled_for_ga = False` in the Trainer class: a mean of means."
    )


def constant_weight(facts: Structure, worst: Scale) -> str:
    return (
        f"the gradient shrinks with the number of micro batches: {number(worst.factor)}× the full batch's at {_at(worst)}. "
        f"The returned loss is a sum ({number(facts.loss_factor)}× for twice the samples), but its weight stays the same "
        f"({number(facts.weight_factor)}×), so the total weight grows with the number of micro batches. {_SUM}"
    )


def mean_of_means(worst: Scale, rest: bool = False) -> str:
    what = f"it is off by {number(worst.error)}"
    if rest:
        what = f"apart from its scale it is off by {number(worst.rest / abs(worst.factor))}"
    return (
        f"the gradient is a mean of the micro batches' means: {what} at {_at(worst)}. Every micro batch has the same weight, "
        f"with few or many tokens. {_SUM}"
    )


def ragged_tail(worst: Scale, size: int) -> str:
    full, tail = divmod(size, worst.micro_batch_size)
    return (
        f"the gradient is off by {number(worst.error)} if the last micro batch is short ({size} samples = {full} × "
        f"{worst.micro_batch_size} + {tail}), and correct if all are equal: the loss is a mean with a constant weight, so the "
        f"short one has the weight of a full one. {_SUM}"
    )


def shares_differ(facts: Structure, worst: Scale) -> str:
    parts = " and ".join(number(share) for share in facts.shares)
    return (
        f"the gradient is off by {number(worst.error)} at {_at(worst)}: joined into one micro batch, two pieces have {parts} "
        "times the weight that they have alone. The loss is divided by a number that depends on the micro batch, such as its "
        f"padded length or its number of tokens. {_SUM}"
    )


def weights_do_not_add(facts: Structure, worst: Scale) -> str:
    return (
        f"the gradient is {number(worst.factor)}× the full batch's at {_at(worst)} (off by {number(worst.error)}): the loss is "
        f"a sum, but its weights do not add up: joined, two pieces have {number(facts.weight_joined)}× the weight that they have "
        "alone, for example because padding is counted. Count only what the loss sums: `weight = (labels != -100).sum()`."
    )


def interaction(facts: Structure, worst: Scale) -> str:
    head = (
        f"the gradient is off by {number(worst.error)} at {_at(worst)}, and no weights can correct it: a sample's gradient "
        f"depends on the other samples in its micro batch (the gradient of two pieces joined is {number(facts.residual)} away "
        "from any weighted sum of their own gradients)"
    )
    if facts.padding:
        return (
            f"{head}. Samples of the same shape do not affect each other, so the cause is padding. Mask it: `attention_mask="
            "mask` or `src_key_padding_mask=~mask` in the model, `ignore_index=-100` in the loss."
        )
    also = " or unmasked padding" if facts.padding is None else ""
    return (
        f"{head}: in-batch negatives, batch statistics, a loss over pairs{also}. This loss is not a sum over samples, so a "
        "split trains something else. Run the batch in one piece (`--micro-batch-size` = the batch per rank), cache the "
        "embeddings (GradCache), or take negatives from a queue, not from the micro batch."
    )


def auxiliary_in_sum(facts: Structure, worst: Scale) -> str:
    where = f" (its gradient: {', '.join(facts.mean_modules)})" if facts.mean_modules else ""
    return (
        f"the loss sum contains a mean: doubling the samples doubles one part of the loss and does not change another{where}. "
        f"That part is added once per micro batch, {worst.accumulation_steps} times at {_at(worst)}, so its scale depends on "
        f"the split (gradient off by {number(worst.error)}). Return it as the third value: `return loss_sum, weight, "
        "auxiliary_mean`; the step then adds weight × mean."
    )


def auxiliary_as_sum(facts: Structure, worst: Scale) -> str:
    return (
        f"the third value grows with the batch ({facts.auxiliary}, not a mean), and the step multiplies it by the weight: at "
        f"{_at(worst)} the gradient is off by {number(worst.error)}. Return a mean over the micro batch: `return loss_sum, "
        "weight, balance.mean()`."
    )


def auxiliary_per_batch(facts: Structure, worst: Scale, alone: float) -> str:
    return (
        f"the auxiliary mean is a statistic of its micro batch, like a router's balance loss (for two pieces joined it is "
        f"{number(facts.auxiliary_joined)} away from their mean). The split does not change its scale, but its value: with it "
        f"the gradient is off by {number(worst.error)} at {_at(worst)}, without it by {number(alone)}. Frameworks balance per "
        "micro batch on purpose; to balance globally, all-reduce the router's counts before the loss."
    )


def keeps_state(kept: float, worst: Scale) -> str:
    return (
        f"the gradient is off by {number(worst.error)} at {_at(worst)}: the model, the loss or collate keeps state from one "
        f"micro batch to the next. The same batch run twice, without an optimizer step in between, gives gradients that "
        f"differ by {number(kept)}. Update this state once per optimizer step: `optimizer.register_step_post_hook(...)`."
    )


def unexplained(worst: Scale, groups: dict[str, float]) -> str:
    listed = ", ".join(f"{name} {number(error)}" for name, error in list(groups.items())[:3])
    return (
        f"the gradient is off by {number(worst.error)} at {_at(worst)} ({number(worst.factor)}× the full batch's along it), "
        f"most of it in {listed}, and no experiment shows a known cause. Compare `loss(model, batch)` on two samples with the "
        "same two samples one by one: the sums must be equal, and so must the weights."
    )


def step_counted_schedule(
    what: str, remedy: str, steps: int, ramp: Schedule | None, horizon_steps: int | None, budget: int | None
) -> Finding:
    """A learning rate that counts steps: a note while the batch is constant, an error with a ramp."""
    if ramp is None or len(ramp.segments) < 2:
        text = f"{what}. That is correct while the batch size is constant; a ramp (`--ramp`) would stretch it. {remedy}"
        return Finding("step-counted-schedule", "note", text)
    first, last = ramp.segments[0].global_batch_size, ramp.segments[-1].global_batch_size
    text = (
        f"{what}, and the batch ramps from {first} to {last} samples: {steps} steps are {steps * first:,} samples at the start "
        f"and {steps * last:,} at the end, so warm-up and decay end at another sample than without the ramp."
    )
    if horizon_steps is not None:
        text += f" Here {check_horizon(ramp.segments, budget or horizon_steps * last, steps=horizon_steps).message}"
    return Finding("step-counted-schedule", "error", f"{text} {remedy}")
