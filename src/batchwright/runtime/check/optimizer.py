"""Checks beyond the loss: gradients added in half precision, a learning rate that counts steps, a step that ends early."""

# pyright: reportUnknownMemberType=false
# torch's annotations are incomplete.

from __future__ import annotations

import copy
import warnings
from typing import Any, cast

import torch

from batchwright.core.ramp.schedule import Schedule
from batchwright.processes.endings import users_code
from batchwright.runtime.task import FrameworkTask

from .causes import Finding, number, step_counted_schedule
from .gradients import Rig, Variant

# The error is also computed for these accumulation steps.
LONGER = (16, 64, 256, 1024)
# All elements have a similar error, so a sample of them is enough.
MOST_ELEMENTS = 200_000
# A larger error is an error, not a note: 64 equal steps in bf16 lose 0.8%, 256 lose 1.9% (measured).
TOO_COARSE = 1e-2
STEPS = 200


def accumulator(rig: Rig, accumulation_steps: int) -> list[Finding]:
    """Whether gradients are added in half precision, and the error of that at 16 to 1024 steps."""
    half = rig.dtypes & {torch.bfloat16, torch.float16}
    if not half or rig.accumulate_dtype is not None:
        return []
    terms = [g[:: max(1, len(g) // MOST_ELEMENTS)] for g in rig.micro_gradients(Variant(random=False), 1)]
    kind = str(next(iter(half))).removeprefix("torch.")
    errors = {k: accumulation_error(terms, k) for k in sorted({accumulation_steps, *LONGER})}
    listed = ", ".join(f"{number(error)} at {k}" for k, error in errors.items())
    severity = "error" if errors[accumulation_steps] > TOO_COARSE else "note"
    message = (
        f"parameters are {kind}, so their gradients are added in {kind}: a small number added to a large sum is rounded away. "
        f"With the gradients of this batch's micro batches, the sum is off by {listed} accumulation steps. Add in fp32: "
        "`Accumulator(model, accumulate_dtype=torch.float32)` (to check that: `--accumulate-dtype float32`), or keep fp32 "
        "parameters under autocast; FSDP2: `MixedPrecisionPolicy(reduce_dtype=torch.float32)`."
    )
    return [Finding("bf16-accumulator" if kind == "bfloat16" else "fp16-accumulator", severity, message)]


def accumulation_error(terms: list[torch.Tensor], steps: int) -> float:
    """The relative error of a sum of `steps` terms (taken in turn) in their own precision.

    >>> accumulation_error([torch.ones(1, dtype=torch.bfloat16)], 512)  # 256 + 1 is 256 in bf16
    0.5
    """
    total, exact = torch.zeros_like(terms[0]), torch.zeros_like(terms[0], dtype=torch.float64)
    for i in range(steps):
        total += terms[i % len(terms)]
        exact += terms[i % len(terms)]
    error, size = cast(torch.Tensor, (total.double() - exact).norm()), cast(torch.Tensor, exact.norm())
    return float(error) / (float(size) or 1.0)


def step_counted(rig: Rig, ramp: Schedule | None, horizon_steps: int | None, budget: int | None) -> list[Finding]:
    """Whether the task's optimizer changes its learning rate with every step, and what a ramp does to that.

    A Task has no scheduler, but a hook of its optimizer may step one. So this steps the optimizer without gradients, which
    changes no parameter, and compares its learning rates.
    """
    before, after = _rates(rig)
    moved = [(a, b) for a, b in zip(before, after, strict=True) if a != b]
    if not moved and (horizon_steps is None or ramp is None):
        return []
    what = f"the learning rate's horizon is given in steps ({horizon_steps})"
    if moved:
        what = f"the optimizer changes its learning rate with every step (from {moved[0][0]:.4g} to {moved[0][1]:.4g} in {STEPS})"
    remedy = (
        "Count in samples: `step.apply(optimizer, learning_rate=lambda sample: ...)` with a `SampleSchedule`, which ends at "
        "the same sample for any batch size."
    )
    return [step_counted_schedule(what, remedy, STEPS, ramp, horizon_steps, budget)]


def _rates(rig: Rig) -> tuple[list[float], list[float]]:
    model = copy.deepcopy(rig.model)
    with users_code("building the optimizer failed"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer: Any = rig.task.optimizer(model.parameters())
        optimizer.zero_grad(set_to_none=True)
        before = [float(group["lr"]) for group in optimizer.param_groups]
        try:
            for _ in range(STEPS):
                optimizer.step()
        except TypeError:  # the optimizer needs a closure (LBFGS)
            return before, before
        return before, [float(group["lr"]) for group in optimizer.param_groups]


def partial_window(rig: Rig) -> list[Finding]:
    """Whether a framework divides a step that ends early by the micro batches that it should have had."""
    ask = rig.task.partial_window if isinstance(rig.task, FrameworkTask) else None
    if ask is None:
        return []
    with users_code("training one micro batch in the framework's own Trainer failed"):
        factor = ask()
    if abs(factor - 1) <= 1e-3:
        return []
    message = (
        f"a step that ends early has the wrong size: with 1 of 2 micro batches, the Trainer's gradient is {number(factor)}× that "
        "of the micro batch. Every loss is divided by accumulate_grad_batches, also in the last window of an epoch: with r micro "
        "batches left over for K, the gradient is r/K times the right one. Train with `exact(MyModule)` and `Steps` of "
        "batchwright.adapters.lightning, or accumulate a number that divides the micro batches of an epoch."
    )
    return [Finding("partial-window", "error", message)]
