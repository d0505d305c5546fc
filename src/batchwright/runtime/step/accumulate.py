"""The step: the gradient of the whole global batch, at any split into micro batches and ranks.

    for step in accumulate(micros, model):
        for micro in step:
            loss_sum, weight = loss(model, micro.data)     # a sum, and its weight: tokens or samples
            step.backward(loss_sum, weight)
        step.apply(optimizer)

is, for one process,

    for micros in steps:
        optimizer.zero_grad()
        total = 0
        for micro in micros:
            loss_sum, weight = loss(model, micro.data)
            loss_sum.backward()                            # gradients add up unscaled
            total += weight
        for p in model.parameters():
            p.grad /= total                                # divided once, by the weight that was there
        optimizer.step()

and on several ranks the same, where `total` and the gradients are sums over all ranks. It is never a mean of means, and
never needs the weight of a later micro batch. Each step has one gradient synchronisation (parallel.py) and one
all-reduce of a few numbers (sums.py): weight, loss, samples, and the check that all ranks did the same.

An auxiliary mean (a router's balance loss) is added as weight × mean, so that after the division it is a mean again, at
any split. A filler micro batch runs forward and backward, so that collectives match, with loss and weight times 0.
"""

# pyright: reportUnknownMemberType=false
# torch's annotations are incomplete.

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from batchwright.core.errors import PlanError, RunError, Violation, raise_violations
from batchwright.runtime.data.windows import Feed, MicroBatch

from .noise import NoiseScale
from .parallel import SHARDED_MEMORY, DataParallel, Group, ShardedMemory
from .sums import FlatGradients, Sums, Totals, scale_, total_norm

Outcome = Literal["applied", "skipped", "dropped", "carried"]
Partial = Literal["exact", "drop", "carry"]
PARTIAL: dict[Partial, str] = {
    "exact": "a step that ends early is applied, divided by the weight that it had",
    "drop": "a step that ends early is dropped: gradients are cleared, the optimizer does not step",
    "carry": "a step that ends early stays open: the accumulator's next `steps` continues its sums",
}


@dataclass(frozen=True)
class StepResult:
    """The result of one step over all ranks; after it, a checkpoint may continue from `end_sample`."""

    step: int
    outcome: Outcome
    loss: float  # Σ loss_sum / Σ weight, without the auxiliary mean
    auxiliary: float  # Σ weight × auxiliary_mean / Σ weight
    weight: float
    samples: int
    micro_steps: int
    grad_norm: float | None  # before clipping; None unless max_norm is set or the noise was measured
    learning_rate: float | None  # the factor that `learning_rate` returned
    end_sample: int

    @property
    def skipped(self) -> bool:
        """Whether the GradScaler found an overflow: the position advanced, the weights did not change."""
        return self.outcome == "skipped"


class Accumulator:
    """Turns micro batches into steps for one model; holds the options, and a carried step between two `steps`.

    - `group`: the data-parallel ranks, a process group or a mesh; the default is that of the DDP or FSDP2 wrapper.
    - `partial`: what happens if the micro batches end in the middle of a step (`PARTIAL`).
    - `max_norm`: clip the final gradient, once; `math.inf` only measures its norm.
    - `scaler`: a GradScaler, unscaled once per step.
    - `loss_scale`: a constant for fp16's range; it cancels out, exactly if it is a power of two. A sum over N tokens is N
      times the mean that scalers expect, so 2**-k near 1/N keeps fp16 activations in their usual range.
    - `accumulate_dtype`: add gradients in this dtype or a wider one: torch.float32 for bf16 parameters. fp32 parameters
      under autocast do not need it; FSDP2 takes MixedPrecisionPolicy(reduce_dtype=torch.float32) instead.
    - `noise`: measure the noise scale. `sharded_memory`: memory against communication in FSDP2 (`SHARDED_MEMORY`).
    - `averaged`: False if the wrapper sums over ranks (a divide factor of 1, a comm hook).
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
        # The ranks that add up the step's weight: those of a pipeline's other stages, too.
        self.shared = self.parallel
        self.parameters = list(model.parameters())
        self.partial: Partial = partial
        self.sharded_memory: ShardedMemory = sharded_memory
        self.max_norm, self.scaler, self.loss_scale = max_norm, scaler, loss_scale
        self.noise, self.averaged = noise, averaged
        trainable = [p for p in self.parameters if p.requires_grad]
        wrapper, several = self.parallel.wrapper, self.parallel.size > 1
        wider = accumulate_dtype or (torch.float32 if noise is not None and wrapper != "sharded" else None)
        widened = wider is not None and any(torch.promote_types(p.dtype, wider) != p.dtype for p in trainable)
        self.widened = widened
        _check_options(self, trainable, widened, self.parallel.left_out(model) if several else [])
        self.device = trainable[0].device
        # Every step uses the flat buffer if its dtype is wider, or if no wrapper sums over ranks.
        self.always_flat = widened or (wrapper == "ours" and several)
        self.flat = FlatGradients(trainable, wider or torch.float32) if self.always_flat or noise is not None else None
        self.carried: Sums | None = None
        self._open: GradientStep | None = None
        self._handles: list[Any] = []
        self._segment: int | None = None

    @property
    def pending(self) -> int:
        """Micro steps of a carried step; `windows(..., first_index=pending)` completes it."""
        return self.carried.micro_steps if self.carried else 0

    def steps(self, micros: Iterable[MicroBatch]) -> Iterator[GradientStep]:
        """Group micro batches into steps; iterate each to its end and apply it before the next."""
        self._leave()
        feed, latest = Feed(micros), None
        self._handles = self.flat.attach() if self.flat else []
        try:
            while (first := feed.peek()) is not None:
                self._agree(first)
                latest = self._open = self._open_step(feed, first)
                yield latest
                if latest.result is None:
                    raise _misuse(latest, "was not applied", "call step.apply(optimizer) after its micro steps.")
        finally:
            if self._open is latest:  # else this generator was abandoned, and a later `steps` has cleaned up
                self._leave()

    def _open_step(self, feed: Feed, first: MicroBatch) -> GradientStep:
        return GradientStep(self, feed, first)

    def _leave(self) -> None:
        if self._open is not None and self._open.result is None:  # abandoned: the next step must not see its gradients
            self.parallel.forget()
        self.parallel.synchronise(True, self.sharded_memory)
        for handle in self._handles:
            handle.remove()
        self._open, self._handles = None, []

    def clear(self) -> None:
        """Drop all gradients and a carried step."""
        self.carried = None
        for p in self.parameters:
            p.grad = None
        if self.flat:
            self.flat.clear()

    def _agree(self, first: MicroBatch) -> None:
        # FSDP2 gathers parameters in every forward, so ranks with unequal counts would wait for each other forever.
        # Counts depend on the segment only, so one check per segment is enough.
        if self.parallel.wrapper == "sharded" and first.step.segment != self._segment:
            self.parallel.agree("micro steps", first.count, first.step, self.device)
            self._segment = first.step.segment


def accumulate(micros: Iterable[MicroBatch], model: nn.Module, **options: Any) -> Iterator[GradientStep]:
    """Group micro batches into steps: `Accumulator(model, **options).steps(micros)`.

    >>> from batchwright.runtime.data.windows import windows
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
    """One open optimizer step: iterate its micro batches, call `backward` for each, then `apply`."""

    def __init__(self, owner: Accumulator, feed: Feed, first: MicroBatch) -> None:
        self.plan = first.step
        self.result: StepResult | None = None
        self._owner, self._feed, self._first = owner, feed, first
        self._micro: MicroBatch | None = None  # its backward has not been called yet
        self._ended: Literal["", "full", "early"] = ""
        sums = owner.carried
        if sums is None:
            owner.clear()
            measured = owner.noise is not None and owner.noise.measures(self.plan.step)
            sums = Sums(self.plan.start_sample, measured, owner.flat if measured or owner.always_flat else None)
        owner.carried, self._sums = None, sums

    @property
    def skipped(self) -> bool:
        """Whether the GradScaler skipped the optimizer step."""
        return self.result is not None and self.result.skipped

    def __iter__(self) -> Iterator[MicroBatch]:
        owner, sums, feed = self._owner, self._sums, self._feed
        if owner.flat:
            owner.flat.active, owner.flat.measure = sums.flat is not None, sums.measured
        index = self._first.index
        if index not in (0, sums.micro_steps):
            raise _misuse(
                self, f"begins with micro step {index}", f"begin at 0 or at {sums.micro_steps}, the carried ones."
            )
        while not self._ended:
            micro = feed.take()
            if micro.index != index or (micro.step is not self.plan and micro.step != self.plan):
                raise _misuse(self, f"has micro step {micro.index} instead of {index}", "yield them in order.")
            index += 1
            if index == micro.count:
                self._ended = "full"
            elif not feed.continues(self.plan):
                self._ended = "early"
            synchronise = bool(self._ended) and not (self._ended == "early" and owner.partial == "carry")
            if sums.flat is not None:  # `apply` reduces the buffer; sharded gradients are complete only if reduced
                synchronise = owner.parallel.wrapper == "sharded"
            owner.parallel.synchronise(synchronise, owner.sharded_memory)
            self._micro = micro
            yield micro
            if self._micro is not None:  # pyright: ignore[reportUnnecessaryComparison]  # `backward` sets it to None
                raise _misuse(self, f"had no backward in micro step {micro.index}", "call step.backward once.")

    def backward(self, loss_sum: Tensor, weight: Tensor | float, auxiliary_mean: Tensor | None = None) -> None:
        """Add the gradient of one micro batch: the loss sum, its weight, and optionally an auxiliary mean."""
        micro, self._micro = self._micro, None
        if micro is None:
            raise _misuse(self, "has no micro step waiting for a backward", "call step.backward once per micro step.")
        auxiliary = None if auxiliary_mean is None else weight * auxiliary_mean
        objective = loss_sum if auxiliary is None else loss_sum + auxiliary
        if objective.numel() != 1:
            raise _misuse(
                self, f"got a loss of shape {tuple(objective.shape)}", "return its sum, and the weight to divide by."
            )
        if micro.filler:
            self._sums.add(0.0, 0.0, 0.0, samples=0)
        else:
            self._sums.add(loss_sum, weight, 0.0 if auxiliary is None else auxiliary, samples=len(micro.ids))
        factor = 0.0 if micro.filler else self._owner.loss_scale
        objective = objective if factor == 1.0 else objective * factor
        scaler = self._owner.scaler
        (objective if scaler is None else scaler.scale(objective)).backward()

    def apply(self, *optimizers: Optimizer, learning_rate: Callable[[int], float] | None = None) -> StepResult:
        """Divide the gradient by the step's weight, clip it, and step the optimizers.

        `learning_rate(start_sample)` multiplies the own rate of each parameter group (torch's `initial_lr`).
        """
        owner, sums = self._owner, self._sums
        if self.result is not None or not self._ended or self._micro is not None:
            state = "is applied twice" if self.result else f"is applied after {sums.micro_steps} micro steps, too early"
            raise _misuse(self, state, "iterate the step to its end, then apply it once.")
        known = {id(p) for p in owner.parameters}
        held = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
        if (foreign := sum(id(p) not in known for p in held)) or not held:
            what = f"has an optimizer with {foreign} of {len(held)} parameters that are not the model's"
            raise _misuse(self, what, "build it from the model's parameters, after wrapping the model.", "optimizer")
        kept = self._ended != "early" or owner.partial == "exact"
        # The norm is read with the sums, so that the host waits once. What needs another rank comes after the sums, which show
        # whether all ranks do the same; so does a scaler, which takes a step only once.
        alone = owner.parallel.size == 1 or (owner.parallel.wrapper == "ddp" and sums.flat is None)
        alone = alone and owner.shared is owner.parallel
        early = kept and alone and owner.scaler is None and owner.device.type != "cpu"
        ready = self._complete(optimizers) if early else None
        totals = sums.totals(owner.shared, owner.device, self.plan, ready.read if ready else ())
        norm = rate = None
        if not kept and owner.partial == "carry":
            outcome, owner.carried = "carried", sums
        elif not kept:
            outcome = "dropped"
            owner.clear()
        elif totals.weight == 0:
            micro_steps = f"{sums.micro_steps} micro steps × {owner.parallel.size} ranks"
            raise _misuse(self, f"has no weight: its {micro_steps} sum to 0", "is every token masked?", "weight")
        else:
            if learning_rate is not None:
                rate = set_learning_rate(optimizers, learning_rate(self.plan.start_sample))
            ready = ready or self._complete(optimizers)
            numbers = iter(totals.also or [float(number) for number in ready.read])
            scale = next(numbers) if owner.scaler is not None else 1.0
            norm = self._finish(totals, ready, scale, next(numbers, None))
            outcome = _advance(optimizers, owner.scaler, scale)
        weight = totals.weight or math.nan
        self.result = StepResult(
            step=self.plan.step,
            outcome=outcome,
            loss=totals.loss / weight,
            auxiliary=totals.auxiliary / weight,
            weight=totals.weight,
            samples=totals.samples,
            micro_steps=sums.micro_steps,
            grad_norm=norm,
            learning_rate=rate,
            end_sample=sums.start_sample + (0 if outcome == "carried" else totals.samples),
        )
        return self.result

    def _complete(self, optimizers: tuple[Optimizer, ...]) -> _Ready:
        """Sum the gradients over ranks and unscale them, if nothing has done so; measure their norm, if it is needed."""
        owner, flat = self._owner, self._sums.flat
        ours = flat is not None and owner.parallel.wrapper != "sharded"
        if flat is not None and ours:
            flat.reduce(owner.parallel)
        pairs = flat.gradients() if flat else [(p, p.grad) for p in owner.parameters if p.grad is not None]
        read: list[Tensor] = []
        if owner.scaler is not None:
            read.append(owner.scaler.scale(torch.ones((), device=owner.device)))
            for p, gradient in pairs:
                p.grad = gradient
            for optimizer in optimizers:
                owner.scaler.unscale_(optimizer)
        if owner.max_norm is not None or self._sums.measured:
            read.append(total_norm([gradient for _, gradient in pairs]))
        return _Ready(pairs, 1 if ours or not owner.averaged else owner.parallel.size, read)

    def _finish(self, totals: Totals, ready: _Ready, scale: float, norm: float | None) -> float | None:
        """Write the final gradients to `p.grad`; return the norm before clipping, if it is needed."""
        owner, flat, ranks = self._owner, self._sums.flat, ready.ranks
        factor = ranks / (totals.weight * owner.loss_scale)
        norm = None if norm is None else norm * factor
        if owner.noise is not None and self._sums.measured and norm is not None:
            squares = totals.square_sum * (ranks / (owner.loss_scale * scale)) ** 2
            owner.noise.observe(totals.weight, (norm * totals.weight) ** 2, squares, totals.weight_square_sum)
        if owner.max_norm is not None and norm is not None:
            factor *= min(1.0, owner.max_norm / (norm + 1e-6))  # torch's own rule and constant
        # The one division, by the step's weight, and the clipping.
        scale_([gradient for _, gradient in ready.gradients], factor)
        if flat is not None:
            for p, gradient in ready.gradients:
                p.grad = flat.restored(p, gradient)
        return norm


@dataclass(frozen=True)
class _Ready:
    """The gradients of a step, complete but not yet divided; `ranks`: the number that they were divided by."""

    gradients: list[tuple[nn.Parameter, Tensor]]
    ranks: int
    read: list[Tensor]
    """Numbers that the host needs: the scale if there is a scaler, the norm if it is needed."""


def _advance(optimizers: Iterable[Optimizer], scaler: torch.amp.GradScaler | None, scale: float) -> Outcome:
    if scaler is None:
        for optimizer in optimizers:
            optimizer.step()
        return "applied"
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    return "skipped" if scaler.get_scale() < scale else "applied"  # the scale falls exactly after an overflow


def set_learning_rate(optimizers: Iterable[Optimizer], factor: float) -> float:
    """Set the rate of each parameter group to its own rate (torch's `initial_lr`) times `factor`."""
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        held = group["lr"]
        # torch's schedulers keep the base rate under the same key. Reading a rate that is on a device waits for it.
        if "initial_lr" not in group:
            group["initial_lr"] = float(held)
        rate = float(group["initial_lr"]) * factor
        group["lr"] = held.fill_(rate) if isinstance(held, Tensor) else rate  # a compiled optimizer holds that tensor
    return factor


def _misuse(step: GradientStep, what: str, remedy: str, field: str = "step") -> RunError:
    return RunError(f"step {step.plan.step} {what}: {remedy}", field=field, given=step.plan.step)


def _check_options(owner: Accumulator, trainable: list[nn.Parameter], widened: bool, alone: list[str]) -> None:
    sharded, dims = owner.parallel.wrapper == "sharded", len(owner.parallel.groups)
    scale, norm = owner.loss_scale, owner.max_norm
    found: list[Violation] = []

    def refuse(wrong: bool, field: str, message: str, given: object = None) -> None:
        if wrong:
            found.append(Violation(message if given is None else f"{field}={given!r} {message}", field, given))

    refuse(not trainable, "model", "the model has no parameter that requires a gradient.")
    names = ", ".join(alone[:5])
    refuse(bool(alone), "model", f"the wrapper leaves out {names}: wrap all {len(alone)}, or freeze them.")
    refuse(owner.partial not in PARTIAL, "partial", f"must be one of {', '.join(PARTIAL)}.", owner.partial)
    memory = owner.sharded_memory
    refuse(memory not in SHARDED_MEMORY, "sharded_memory", f"must be one of {', '.join(SHARDED_MEMORY)}.", memory)
    refuse(not (scale > 0 and math.isfinite(scale)), "loss_scale", "must be above zero. Nearest: 1.0.", scale)
    refuse(norm is not None and not norm > 0, "max_norm", "must be above zero; None does not clip.", norm)
    refuse(
        widened and sharded,
        "accumulate_dtype",
        "accumulate_dtype has no effect under FSDP2. Use fully_shard(..., "
        "mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32)), which adds and reduces in fp32.",
    )
    refuse(
        widened and owner.scaler is not None,
        "scaler",
        "a scaler cannot be used with half-precision parameters: it is for fp16 autocast over fp32 parameters, whose "
        "gradients are fp32 already.",
    )
    refuse(
        sharded and owner.noise is not None and dims > 1,
        "noise",
        f"noise cannot be measured on a mesh of {dims} dimensions: replicas would count twice.",
    )
    raise_violations(PlanError, found)
