"""Why a split's gradient is not the full batch's: experiments first, then one finding for each cause they leave.

1. random draws fixed, fp64       what vanishes is dropout, or precision
2. batch statistics frozen        what vanishes is BatchNorm
3. without the auxiliary mean     what vanishes is the auxiliary's
4. the loss doubled and joined    says what kind of number it is, and so what is wrong with it (structure.py)
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Literal, get_args

import torch

from batchwright.core.errors import RunError, Violation

from .gradients import Gradient, Rig, Variant, combine, dot, group_errors, norm, relative_error
from .messages import (
    auxiliary_as_sum,
    auxiliary_in_sum,
    auxiliary_per_batch,
    batch_norm,
    constant_weight,
    dropout,
    interaction,
    keeps_state,
    mean_of_means,
    mean_with_count,
    precision,
    ragged_tail,
    shares_differ,
    unexplained,
    unknown_draws,
    weights_do_not_add,
)
from .structure import Structure, structure

Cause = Literal[
    "scaled-by-accumulation",
    "mean-of-means",
    "ragged-tail",
    "padding",
    "in-batch-negatives",
    "auxiliary-scaled",
    "auxiliary-per-micro-batch",
    "batch-norm",
    "keeps-state",
    "dropout",
    "random-draws",
    "precision",
    "bf16-accumulator",
    "fp16-accumulator",
    "step-counted-schedule",
    "rank-dependent",
    "unexplained",
]
CAUSES: tuple[str, ...] = get_args(Cause)

# What rounding alone leaves. fp64: any fault of logic is far above it. fp32 without fp64 beside it: measured up to
# 1e-5 on deep networks. Half precision: one rounding is 0.4% (bf16), and a gradient is many of them.
EXACT = 1e-8
ROUNDING = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 1e-3, torch.float16: 1e-3}
SINGLE, HALF = 1e-4, 5e-2
# From here on rounding is no longer small beside the gradient: an assumption.
COARSE = 5e-2


def unknown_causes(names: Collection[str]) -> list[Violation]:
    """A violation for every name to allow that is not a cause.

    >>> unknown_causes(["batchnorm"])[0].message
    "allow='batchnorm' is not a cause that check can name. Nearest: batch-norm."
    """
    found: list[Violation] = []
    for name in names:
        if name not in CAUSES:
            near = tuple(get_close_matches(name, CAUSES, n=2))
            hint = f"Nearest: {', '.join(near)}." if near else f"The causes are: {', '.join(CAUSES)}."
            text = f"allow={name[:40]!r} is not a cause that check can name. {hint}"
            found.append(Violation(text, "allow", name[:40], near or CAUSES))
    return found


@dataclass(frozen=True)
class Finding:
    """One cause of a wrong gradient: `severity` is `error`, or `note` where training is right without a change."""

    cause: Cause
    severity: Literal["error", "note"]
    message: str


@dataclass(frozen=True)
class Measured:
    """A split in the task's own arithmetic; `error` is None where it could not be run."""

    micro_batch_size: int
    accumulation_steps: int
    error: float | None
    groups: dict[str, float]


@dataclass(frozen=True)
class Scale:
    """How a split's gradient lies to the reference: `factor` times it, and `rest` beside it, relative."""

    micro_batch_size: int
    accumulation_steps: int
    ragged: bool
    error: float
    factor: float
    rest: float


class Diagnosis:
    """Finds the causes for the splits of one rig; `variant` and `tolerance` are the strictest that the task allows."""

    def __init__(self, rig: Rig, splits: Sequence[Measured]) -> None:
        self.rig, self.splits = rig, splits
        self.sizes = [s.micro_batch_size for s in splits]
        self.notes: list[str] = []
        self.variant, self.tolerance = self._strictest()

    def findings(self) -> list[Finding]:
        """All causes, errors first."""
        found = self._chance()
        if any(f.severity == "error" for f in found):
            return found
        scales = self._scales(self.variant)
        if any(s.error > self.tolerance for s in scales) or any(s.error is None for s in self.splits):
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
            half = bool(self.rig.dtypes & {torch.bfloat16, torch.float16})
            self.notes.append(
                f"The task does not run in fp64 ({type(error.__cause__).__name__}), so rounding is told from logic by size "
                f"only: errors below {HALF if half else SINGLE:g} count as rounding."
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
        return [Finding("dropout", "note", dropout(own, max((s.error or 0.0 for s in self.splits), default=0.0)))]

    def _rounding(self) -> list[Finding]:
        kind = min(self.rig.dtypes, key=lambda d: torch.finfo(d).bits)
        worst = max(self.splits, key=lambda s: s.error or 0.0)
        if (worst.error or 0.0) <= ROUNDING.get(kind, 1e-3):
            return []
        own = Variant(random=False)
        error = relative_error(self.rig.split(own, worst.micro_batch_size), self.rig.reference(own))
        if error <= ROUNDING.get(kind, 1e-3):
            return []
        severity = "error" if error > COARSE else "note"
        name = str(kind).removeprefix("torch.")
        return [Finding("precision", severity, precision(error, name, worst.micro_batch_size, self.variant.exact))]

    def _logic(self, scales: list[Scale]) -> list[Finding]:
        found: list[Finding] = []
        variant, rig = self.variant, self.rig
        frozen = replace(variant, statistics=False)
        before = max((s.error for s in scales), default=None)
        if rig.uses_statistics(variant) or any(s.error is None for s in self.splits):
            after = self._scales(frozen)
            failed = [s.micro_batch_size for s in self.splits if s.error is None]
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
            self.notes.append(f"The experiments that tell causes apart could not be run: {error}")
            return [*found, self._unexplained(variant, worst)]
        if facts.auxiliary is not None:
            found += self._auxiliary(facts, variant, scales)
            variant = replace(variant, auxiliary=False)
            scales = self._scales(variant) if facts.loss != "zero" else []
        if scales and max(s.error for s in scales) > self.tolerance:
            found += self._loss(facts, scales)
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
        if facts.apart > max(tolerance, 1e-6) or facts.loss == "other":
            cause = "padding" if facts.padding else "in-batch-negatives"
            return [Finding(cause, "error", interaction(facts, worst))]
        if facts.loss == "mean" and constant:
            if all(s.error <= tolerance for s in scales if not s.ragged):
                return [Finding("ragged-tail", "error", ragged_tail(worst, self.rig.size))]
            return [Finding("mean-of-means", "error", mean_of_means(worst))]
        if facts.loss == "mean" and counts:
            found = [Finding("scaled-by-accumulation", "error", mean_with_count(facts, worst))]
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
            if split.error is None and variant.statistics:
                continue
            gradient = self.rig.split(variant, split.micro_batch_size)
            found.append(scale_of(gradient, reference, split.micro_batch_size, self.rig.size))
        return found


def scale_of(gradient: Gradient, reference: Gradient, micro_batch_size: int, size: int) -> Scale:
    """Fit g = factor × r."""
    whole = norm(reference)
    factor = dot(gradient, reference) / whole**2
    rest = norm(combine((1.0, gradient), (-factor, reference))) / whole
    steps = -(-size // micro_batch_size)
    return Scale(
        micro_batch_size, steps, size % micro_batch_size != 0, relative_error(gradient, reference), factor, rest
    )
