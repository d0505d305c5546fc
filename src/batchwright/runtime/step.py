"""The step: the gradient of the whole global batch, however it was split into micro batches and ranks.

    for step in accumulate(micros, model):
        for micro in step:
            loss_sum, weight = loss(model, micro.data)     # a sum, and what it is a sum over (tokens, samples)
            step.backward(loss_sum, weight)
        step.apply(optimizer)

denotes, for one process,

    for micros in steps:
        optimizer.zero_grad()
        total = 0
        for micro in micros:
            loss_sum, weight = loss(model, micro.data)
            loss_sum.backward()                            # gradients add up unscaled
            total += weight
        for p in model.parameters():
            p.grad /= total                                # divided once, by what was really there
        optimizer.step()

and on several ranks the same, `total` and gradients being sums over all of them. Never a mean of means; never a look
at a later micro batch's weight. Per step there is one gradient synchronisation (in parallel.py) and one all-reduce of
a few numbers that carries weight, loss, samples and the check that all ranks did the same.

An auxiliary mean (a router's balance loss) enters as weight × mean, so that it leaves the division as a mean again,
at any split. A filler micro batch runs forward and backward, so that collectives match, with loss and weight times 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from batchwright.core.errors import PlanError, RunError, Violation, raise_violations
from batchwright.core.schedule import Step

from .noise import NoiseScale
from .parallel import (
    DataParallel,
    FlatGradients,
    SHARDED_MEMORY,
    Group,
    ShardedMemory,
    Sums,
    Totals,
    local,
    same,
    total_norm,
)
from .windows import Feed, MicroBatch

Partial = Literal["exact", "drop", "carry"]
Outcome = Literal["applied", "skipped", "dropped", "carried"]
PARTIAL: dict[Partial, str] = {
    "exact": "a step that ends early is applied, divided by the weight that was there",
    "drop": "a step that ends early is thrown away: gradients cleared, optimizer untouched",
    "carry": "a step that ends early stays open: the accumulator's next `steps` goes on with its sums",
}


@dataclass(frozen=True)
class StepResult:
    """What one step came to, over all ranks; `end_sample` is the position a checkpoint may now continue from."""

    step: int
    outcome: Outcome
    loss: float  # Σ loss_sum / Σ weight, without the auxiliary mean
    auxiliary: float  # Σ weight × auxiliary_mean / Σ weight
    weight: float
    samples: int
    micro_steps: int
    grad_norm: float | None  # before clipping; None unless max_norm is set or the noise was measured
    learning_rate: float | None  # the factor that `learning_rate` gave
    end_sample: int

    @property
    def skipped(self) -> bool:
        """Whether the GradScaler met an overflow: the position moved on, the weights did not."""
        return self.outcome == "skipped"


class Accumulator:
    """Turns micro batches into steps for one model; holds the options, and a carried step between two `steps`.

    - `group`: the data-parallel ranks, a process group or mesh; by default those of the model's DDP or FSDP2 wrapper.
    - `partial`: what happens when the micro batches end in mid-step (`PARTIAL`).
    - `max_norm`: clip the final gradient, once; `math.inf` only measures its norm.
    - `scaler`: a GradScaler, unscaled once per step.
    - `loss_scale`: a constant for fp16's range; it cancels, exactly so when a power of two. A sum over N tokens is N
      times the mean that scalers expect, so 2**-k near 1/N keeps fp16 activations where they were.
    - `accumulate_dtype`: add gradients up in (at least) this; torch.float32 for parameters that are bf16 themselves.
      fp32 parameters under autocast need nothing, FSDP2 takes MixedPrecisionPolicy(reduce_dtype=torch.float32).
    - `noise`: measure the noise scale. `sharded_memory`: FSDP2's trade (`SHARDED_MEMORY`).
    - `averaged`: False when the wrapper was told to sum over ranks (a divide factor of 1, a comm hook).
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        group: Group = "auto",
        partial: Partial = "exact",
        max_norm: float | None = None,
        scaler: torch.amp.GradScaler | None = None,
        loss_scale: float = 1.0,
        accumulate_dtype: torch.dtype | None = None,
        noise: NoiseScale | None = None,
        sharded_memory: ShardedMemory = "medium",
        averaged: bool = True,
    ) -> None:
        self.parallel = DataParallel.of(model, group)
        self.parameters = list(model.parameters())
        self.partial, self.max_norm, self.scaler, self.loss_scale = partial, max_norm, scaler, loss_scale
        self.noise, self.sharded_memory, self.averaged = noise, sharded_memory, averaged
        trainable = [p for p in self.parameters if p.requires_grad]
        widened = accumulate_dtype is not None and any(
            torch.promote_types(p.dtype, accumulate_dtype) != p.dtype for p in trainable
        )
        _check_options(self, trainable, widened)
        self.device = trainable[0].device
        # Every step goes through our own buffer where it has a wider dtype, or where nobody else sums over ranks.
        self.always_flat = widened or (self.parallel.wrapper == "ours" and self.parallel.size > 1)
        self.flat = FlatGradients(trainable, accumulate_dtype or torch.float32) if self.always_flat or noise else None
        self.carried: Sums | None = None
        self._segment: int | None = None

    @property
    def pending(self) -> int:
        """Micro steps carried over from a step that ended early; `windows(..., first_index=pending)` completes it."""
        return self.carried.micro_steps if self.carried else 0

    def steps(self, micros: Iterable[MicroBatch]) -> Iterator[GradientStep]:
        """Group micro batches into steps; each is to be iterated to its end, and applied before the next."""
        feed = Feed(micros)
        handles = self.flat.attach() if self.flat else []
        finished = True
        try:
            while (first := feed.peek()) is not None:
                self._agree(first)
                finished = False
                step = GradientStep(self, feed, first)
                yield step
                if step.result is None:
                    raise _misuse(step, "was not applied", "call step.apply(optimizer) after its micro steps")
                finished = True
        finally:
            if not finished:  # abandoned: its gradients must not reach the next step
                self.parallel.forget()
            self.parallel.synchronise(True)
            for handle in handles:
                handle.remove()

    def clear(self) -> None:
        """Forget all gradients, and a carried step."""
        self.carried = None
        for p in self.parameters:
            p.grad = None
        if self.flat:
            self.flat.clear()

    def _agree(self, first: MicroBatch) -> None:
        # FSDP2 gathers parameters in every forward, so ranks with unequal counts would wait for each other forever.
        # Counts depend on the segment only: asked where it changes, this costs nothing in between.
        if self.parallel.wrapper == "sharded" and first.step.segment != self._segment:
            same("micro steps", self.parallel.everyone(first.count, self.device), first.step)
            self._segment = first.step.segment


def accumulate(micros: Iterable[MicroBatch], model: nn.Module, **options: Any) -> Iterator[GradientStep]:
    """The steps that `micros` make up: `Accumulator(model, **options).steps(micros)`.

    >>> model = nn.Linear(1, 1, bias=False)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> batches = [torch.ones(3, 1), torch.ones(1, 1)]  # uneven: 3 samples, then 1
    >>> for step in accumulate(windows(batches, accumulation_steps=2), model):
    ...     for micro in step:
    ...         step.backward(model(micro.data).sum(), weight=len(micro.data))
    ...     result = step.apply(optimizer)
    >>> result.samples, result.weight, model.weight.grad.item()
    (4, 4.0, 1.0)
    """
    return Accumulator(model, **options).steps(micros)


class GradientStep:
    """One optimizer step in the making: iterate its micro batches, call `backward` for each, then `apply`."""

    def __init__(self, owner: Accumulator, feed: Feed, first: MicroBatch) -> None:
        self.plan = first.step
        self.result: StepResult | None = None
        self._owner, self._feed, self._first = owner, feed, first
        self._micro: MicroBatch | None = None  # the one whose backward is due
        self._ended: Literal["", "full", "early"] = ""
        sums = owner.carried
        if sums is None:
            owner.clear()
            measured = owner.noise is not None and owner.noise.measures(self.plan.step)
            sums = Sums(self.plan.start_sample, measured, owner.flat if measured or owner.always_flat else None)
        owner.carried, self._sums = None, sums

    @property
    def skipped(self) -> bool:
        """Whether `apply` was skipped by the GradScaler."""
        return self.result is not None and self.result.skipped

    def __iter__(self) -> Iterator[MicroBatch]:
        owner, sums, feed = self._owner, self._sums, self._feed
        if owner.flat:
            owner.flat.active, owner.flat.measure = sums.flat is not None, sums.measured
        index = self._first.index
        if index not in (0, sums.micro_steps):
            raise _misuse(self, f"begins with micro step {index}", f"begin at 0, or at the {sums.micro_steps} carried")
        while not self._ended:
            micro = feed.take()
            if micro.index != index or micro.step != self.plan:
                raise _misuse(self, f"has micro step {micro.index} where {index} is due", "yield them in order")
            index += 1
            if index == micro.count:
                self._ended = "full"
            elif not feed.continues(self.plan):
                self._ended = "early"
            carry = self._ended == "early" and owner.partial == "carry"
            together = bool(self._ended) and not carry
            if sums.flat is not None:  # our buffer is reduced in `apply`; sharded gradients are whole only if reduced
                together = owner.parallel.wrapper == "sharded"
            owner.parallel.synchronise(together, owner.sharded_memory)
            self._micro = micro
            yield micro
            if self._micro is not None:
                raise _misuse(self, f"had no backward in micro step {micro.index}", "call step.backward once for each")

    def backward(self, loss_sum: Tensor, weight: Tensor | float, auxiliary_mean: Tensor | None = None) -> None:
        """Add the gradient of one micro batch's loss: a sum, what it is a sum over, and optionally a mean beside it."""
        micro, self._micro = self._micro, None
        if micro is None:
            raise _misuse(self, "has no micro step waiting for a backward", "call step.backward once for each")
        keep = 0.0 if micro.filler else 1.0
        objective = loss_sum if auxiliary_mean is None else loss_sum + weight * auxiliary_mean
        if objective.numel() != 1:
            raise _misuse(self, f"got a loss of shape {tuple(objective.shape)}", "sum it, and give what it sums over")
        self._sums.add(
            loss_sum.detach() * keep,
            (weight.detach() if isinstance(weight, Tensor) else float(weight)) * keep,
            0.0 if auxiliary_mean is None else (objective.detach() - loss_sum.detach()) * keep,
            0 if micro.filler else len(micro.ids),
        )
        factor = keep * self._owner.loss_scale
        objective = objective if factor == 1.0 else objective * factor
        scaler = self._owner.scaler
        (objective if scaler is None else scaler.scale(objective)).backward()

    def apply(self, *optimizers: Optimizer, learning_rate: Callable[[int], float] | None = None) -> StepResult:
        """Divide the gradient by the step's weight, clip it, and step; `learning_rate` is a function of samples.

        `learning_rate(start_sample)` multiplies each parameter group's own rate (torch's `initial_lr`).
        """
        owner, sums = self._owner, self._sums
        if self.result is not None or not self._ended or self._micro is not None:
            state = "is applied twice" if self.result else f"is applied after {sums.micro_steps} micro steps, too early"
            raise _misuse(self, state, "iterate the step to its end, then apply it once")
        _check_optimizers(owner, optimizers)
        totals = sums.totals(owner.parallel, owner.device, self.plan)
        outcome: Outcome = "applied"
        norm = rate = None
        if self._ended == "early" and owner.partial != "exact":
            outcome = "dropped" if owner.partial == "drop" else "carried"
        elif totals.weight == 0:
            raise RunError(
                f"step {self.plan.step} has no weight: its {sums.micro_steps} micro steps × {owner.parallel.size} ranks "
                "add up to 0, and a gradient cannot be divided by that. Is every token masked?",
                field="weight",
                given=0,
            )
        else:
            rate = (
                None if learning_rate is None else _set_learning_rate(optimizers, learning_rate(self.plan.start_sample))
            )
            norm = self._finish(totals, optimizers)
            outcome = _advance(optimizers, owner.scaler)
        if outcome == "dropped":
            owner.clear()
        if outcome == "carried":
            owner.carried = sums
        trained = 0 if outcome == "carried" else totals.samples
        weight = totals.weight or math.nan
        self.result = StepResult(
            self.plan.step, outcome, totals.loss / weight, totals.auxiliary / weight, totals.weight, totals.samples,
            sums.micro_steps, norm, rate, sums.start_sample + trained,
        )  # fmt: skip
        return self.result

    def _finish(self, totals: Totals, optimizers: tuple[Optimizer, ...]) -> float | None:
        """Turn summed gradients into the final ones, in `p.grad`; the norm before clipping, where it is wanted."""
        owner, flat = self._owner, self._sums.flat
        ours = flat is not None and owner.parallel.wrapper != "sharded"
        if flat is not None:
            if ours:
                flat.reduce(owner.parallel)
            pairs = flat.gradients()
        else:
            pairs = [(p, p.grad) for p in owner.parameters if p.grad is not None]
        gradients = [g for _, g in pairs]
        ranks = 1 if ours or not owner.averaged else owner.parallel.size
        scale = owner.loss_scale
        if owner.scaler is not None:
            for p, gradient in pairs:
                p.grad = gradient
            squares_scale = scale * owner.scaler.get_scale()
            for optimizer in optimizers:
                owner.scaler.unscale_(optimizer)
        else:
            squares_scale = scale
        factor = ranks / (totals.weight * scale)
        norm = None
        if gradients and (owner.max_norm is not None or self._sums.measured):
            norm = float(total_norm(gradients)) * factor
            if self._sums.measured and owner.noise is not None:
                square_sum = totals.square_sum * (ranks / squares_scale) ** 2
                owner.noise.observe(totals.weight, (norm * totals.weight) ** 2, square_sum, totals.weight_square_sum)
            if owner.max_norm is not None:
                factor *= min(1.0, owner.max_norm / (norm + 1e-6))  # torch's own rule and constant
        if gradients:
            torch._foreach_mul_([local(g) for g in gradients], factor)
        for p, gradient in pairs:
            p.grad = gradient.to(p.dtype)
        return norm


def _advance(optimizers: Iterable[Optimizer], scaler: torch.amp.GradScaler | None) -> Outcome:
    if scaler is None:
        for optimizer in optimizers:
            optimizer.step()
        return "applied"
    before = scaler.get_scale()
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    return "skipped" if scaler.get_scale() < before else "applied"  # it backs off exactly when it met an overflow


def _set_learning_rate(optimizers: Iterable[Optimizer], factor: float) -> float:
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        rate = group["lr"]
        base = group.setdefault("initial_lr", float(rate))  # torch's schedulers keep the base rate there too
        if isinstance(rate, Tensor):  # in place: a compiled optimizer holds this very tensor
            rate.fill_(float(base) * factor)
        else:
            group["lr"] = float(base) * factor
    return factor


def _misuse(step: GradientStep, what: str, remedy: str) -> RunError:
    return RunError(f"step {step.plan.step} {what}: {remedy}.", field="step", given=step.plan.step)


def _check_options(owner: Accumulator, trainable: list[nn.Parameter], widened: bool) -> None:
    sharded, scale = owner.parallel.wrapper == "sharded", owner.loss_scale
    faults = (
        (not trainable, "the model has no parameter that requires a gradient.", "model", None),
        (owner.partial not in PARTIAL, f"partial={owner.partial!r} is none of {', '.join(PARTIAL)}.", "partial",
         owner.partial),
        (owner.sharded_memory not in SHARDED_MEMORY, f"sharded_memory={owner.sharded_memory!r} is none of "
         f"{', '.join(SHARDED_MEMORY)}.", "sharded_memory", owner.sharded_memory),
        (not (scale > 0 and math.isfinite(scale)), f"loss_scale={scale} must be above zero. Nearest: 1.0.",
         "loss_scale", scale),
        (owner.max_norm is not None and not owner.max_norm > 0, f"max_norm={owner.max_norm} must be above zero; "
         "None does not clip.", "max_norm", owner.max_norm),
        (widened and sharded, "accumulate_dtype is FSDP2's business: fully_shard(..., mp_policy=MixedPrecisionPolicy("
         "reduce_dtype=torch.float32)) adds and reduces in fp32.", "accumulate_dtype", None),
        (widened and owner.scaler is not None, "accumulate_dtype does not go with a scaler: a GradScaler is for fp16 "
         "autocast over fp32 parameters, whose gradients are fp32 already.", "accumulate_dtype", None),
        (sharded and owner.noise is not None and len(owner.parallel.groups) > 1, "noise is not measured on a mesh of "
         f"{len(owner.parallel.groups)} dimensions: replicas would count twice.", "noise", None),
    )  # fmt: skip
    raise_violations(PlanError, [Violation(message, name, given) for wrong, message, name, given in faults if wrong])


def _check_optimizers(owner: Accumulator, optimizers: tuple[Optimizer, ...]) -> None:
    known = {id(p) for p in owner.parameters}
    held = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    foreign = sum(id(p) not in known for p in held)
    if foreign or not held:
        raise RunError(
            f"{foreign} of the optimizer's {len(held)} parameters are not the model's, so their gradients would not be "
            "divided. Make the optimizer after wrapping the model, and put a loss with parameters inside the model.",
            field="optimizer",
            given=foreign,
        )
