"""What a step adds up: gradients, losses and weights, over its micro steps and all ranks."""

# pyright: reportUnknownMemberType=false
# torch's annotations are incomplete.

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from batchwright.core.errors import RunError
from batchwright.core.ramp.schedule import Step
from batchwright.runtime.device import sent, widest_float

from .parallel import DataParallel


class FlatGradients:
    """Gradient sums in one flat buffer, filled during backward, so that each gradient exists only until it is added.

    A hook on each parameter runs when backward has produced `p.grad`:

        buffer[p] += p.grad;  squares += |p.grad|²;  p.grad = None

    The buffer needs the memory of one set of gradients in `dtype` (at least fp32: a bf16 sum of 1024 micro steps is off
    by 34%), sees the gradient of each micro step separately, and is reduced over ranks in one collective without a copy.
    (A gradient that arrives in parts, as with reentrant checkpointing of a shared weight, is summed correctly, but its
    parts are measured separately.)
    """

    def __init__(self, parameters: Iterable[nn.Parameter], dtype: torch.dtype = torch.float32) -> None:
        self.parameters = [p for p in parameters if p.requires_grad]
        device = self.parameters[0].device
        self.squares: Tensor = torch.zeros((), dtype=widest_float(device), device=device)
        self.active = self.measure = False
        self._present: set[nn.Parameter] = set()
        self._sparse: set[nn.Parameter] = set()
        self._buffers: list[tuple[Tensor, list[nn.Parameter]]] = []
        self._views: dict[nn.Parameter, Tensor] = {}
        kinds: dict[tuple[torch.device, torch.dtype], list[nn.Parameter]] = {}
        for p in self.parameters:
            kinds.setdefault((p.device, torch.promote_types(p.dtype, dtype)), []).append(p)
        for (device, kind), members in kinds.items():
            sizes = [local(p).numel() for p in members]
            # The tail counts the ranks that have a gradient of each parameter: one that no rank used keeps None.
            buffer = torch.zeros(sum(sizes) + len(members), dtype=kind, device=device)
            self._buffers.append((buffer, members))
            pieces = cast("tuple[Tensor, ...]", buffer.split([*sizes, len(members)]))
            for p, piece in zip(members, pieces, strict=False):
                self._views[p] = piece.view(local(p).shape)

    def attach(self) -> list[Any]:
        """Register the hooks; each returned handle has `remove()`."""
        return [p.register_post_accumulate_grad_hook(self._take) for p in self.parameters]

    def _take(self, p: Tensor) -> None:
        if p.grad is None or not self.active:
            return
        gradient, view = local(p.grad), self._views[cast(nn.Parameter, p)]
        view.add_(gradient)
        self._present.add(cast(nn.Parameter, p))
        if gradient.is_sparse:
            self._sparse.add(cast(nn.Parameter, p))
        if self.measure:
            norm = cast(Tensor, torch.linalg.vector_norm(_values(gradient), dtype=view.dtype))
            self.squares += norm.to(self.squares).square()
        p.grad = None

    def take(self) -> None:
        """Add gradients that came without autograd's hooks."""
        for p in self.parameters:
            self._take(p)

    def reduce(self, over: DataParallel) -> None:
        """Sum the buffer over ranks."""
        for buffer, members in self._buffers if over.groups else ():
            tail = buffer[-len(members) :]
            tail.copy_(sent([float(p in self._present) for p in members], buffer.dtype, buffer.device))
            over.sum(buffer)
            ranks = cast("list[float]", tail.tolist())
            self._present |= {p for p, count in zip(members, ranks, strict=True) if count}

    def gradients(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Each parameter that has a gradient, and the gradient."""
        return [(p, like(p, self._views[p])) for p in self.parameters if p in self._present]

    def restored(self, p: nn.Parameter, gradient: Tensor) -> Tensor:
        """A gradient of `gradients` as backward makes it: in the dtype of `p`, and sparse if it was (rows of zeros left out)."""
        return (gradient.to_sparse(1) if p in self._sparse else gradient).to(p.dtype)

    def clear(self) -> None:
        """Set all sums to zero."""
        self._present.clear()
        self.squares.zero_()
        for buffer, _ in self._buffers:
            buffer.zero_()


@dataclass(frozen=True)
class Totals:
    """The sums of one step over its micro steps and all ranks."""

    weight: float
    loss: float
    auxiliary: float
    samples: int
    square_sum: float
    weight_square_sum: float
    also: tuple[float, ...]
    """Further numbers of this rank, which were read together with the sums."""


@dataclass
class Sums:
    """The sums of an open step on this rank; tensors stay on their device until `totals`."""

    start_sample: int
    measured: bool
    flat: FlatGradients | None
    losses: list[Any] = field(default_factory=list[Any])
    weights: list[Any] = field(default_factory=list[Any])
    auxiliaries: list[Any] = field(default_factory=list[Any])
    samples: int = 0

    @property
    def micro_steps(self) -> int:
        return len(self.weights)

    def add(self, loss: Tensor | float, weight: Tensor | float, auxiliary: Tensor | float, samples: int) -> None:
        """Add one micro step."""
        for values, value in ((self.losses, loss), (self.weights, weight), (self.auxiliaries, auxiliary)):
            values.append(value.detach() if isinstance(value, Tensor) else float(value))
        self.samples += samples

    def totals(self, parallel: DataParallel, device: torch.device, plan: Step, also: Sequence[Tensor] = ()) -> Totals:
        """Sum over micro steps and ranks in one all-reduce. All ranks see the same faults, so all of them raise.

        The host waits for the device once. `also`: numbers of this rank that are read in the same wait, and not summed.
        """
        kind = widest_float(device)
        # All ranks have the same number if size × Σ x² = (Σ x)². The step is reduced mod 997 so that this is exact.
        count, residue = self.micro_steps, plan.step % 997
        numbers = [self.samples, count, count**2, residue, residue**2]
        losses, weights, auxiliaries, facts = _rows(
            (self.losses, self.weights, self.auxiliaries, numbers), kind, device
        )
        bad = (~weights.isfinite() | (weights < 0)).sum()
        squares = self.flat.squares if self.flat and self.measured else torch.zeros_like(losses[0])
        # If each micro step is reduced over ranks, it is one term, and its weight is the sum over all ranks.
        per_micro_step = self.measured and parallel.wrapper == "sharded"
        terms = weights if per_micro_step else weights.square().sum().reshape(1)
        parts = [losses.sum(), weights.sum(), auxiliaries.sum(), squares, bad.to(kind)]
        summed = parallel.sum(torch.cat([torch.stack(parts), facts, terms]))
        if also:
            summed = torch.cat([summed, torch.stack([number.to(summed) for number in also])])
        packed = cast("list[float]", summed.tolist())
        packed, own_numbers = packed[: len(packed) - len(also)], packed[len(packed) - len(also) :]
        loss, weight, auxiliary, square_sum, faults, samples, *moments = packed[:10]
        for name, own, (first, second) in (
            ("micro steps", count, moments[:2]),
            ("the step", plan.step, moments[2:]),
        ):
            if parallel.size * second != first * first:
                parallel.agree(name, own, plan, device)
        if faults:
            given = cast("list[float]", weights.tolist())
            raise RunError(
                f"step {plan.step}: {faults:.0f} of its weights are negative or not finite; on this rank they are "
                f"{[f'{w:g}' for w in given]}. The loss sum is divided by the sum of weights: each must be 0 or more.",
                field="weight",
                given=given,
            )
        squared = sum(n * n for n in packed[10:]) if per_micro_step else packed[10]
        return Totals(weight, loss, auxiliary, round(samples), square_sum, squared, tuple(own_numbers))


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor: itself, or the shard of a DTensor; writing to it writes to the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def like(p: Tensor, part: Tensor) -> Tensor:
    """`part` as a tensor that is distributed as `p` is."""
    if not isinstance(p, DTensor):
        return part
    return DTensor.from_local(part, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())


def scale_(gradients: Sequence[Tensor], factor: float) -> None:
    """Multiply all gradients, sharded or not, in place."""
    if gradients:
        torch._foreach_mul_([local(g) for g in gradients], factor)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """The 2-norm over all gradients, sharded or not, as a plain tensor that is equal on all ranks.

    >>> float(total_norm([torch.tensor([3.0]), torch.tensor([[4.0]])]))
    5.0
    """
    if not gradients:
        return torch.zeros(())
    kinds: dict[Any, list[Tensor]] = {}
    for gradient in gradients:
        mesh = gradient.device_mesh if isinstance(gradient, DTensor) else None
        kinds.setdefault(mesh, []).append(_values(gradient))
    norms = [torch.nn.utils.get_total_norm(members) for members in kinds.values()]
    whole = [n.full_tensor() if isinstance(n, DTensor) else n for n in norms]
    return whole[0] if len(whole) == 1 else cast(Tensor, torch.linalg.vector_norm(torch.stack(whole)))


def _values(gradient: Tensor) -> Tensor:
    """The values of a sparse gradient, each row once: torch has no norm of a sparse tensor. Any other one as it is."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _rows(lists: Sequence[Sequence[Any]], kind: torch.dtype, device: torch.device) -> list[Tensor]:
    """Lists of numbers and one-element tensors as one tensor each. The numbers of all lists go to the device in one copy.

    In few calls: on a small model this is the cost of the step.
    """
    if device.type != "cpu":  # reading a tensor in the host's memory waits for nothing
        lists = [[float(v) if isinstance(v, Tensor) and v.device.type == "cpu" else v for v in row] for row in lists]
    numbers = [[v for v in row if not isinstance(v, Tensor)] for row in lists]
    all_there: Any = sent([v for row in numbers for v in row], kind, device)
    there: tuple[Tensor, ...] = all_there.split([len(row) for row in numbers])
    return [
        mine if len(mine) == len(row) else _stacked(row, mine, kind, device)
        for row, mine in zip(lists, there, strict=True)
    ]


def _stacked(row: Sequence[Any], numbers: Tensor, kind: torch.dtype, device: torch.device) -> Tensor:
    """A list that holds tensors as one tensor; its `numbers` are on the device already."""
    if len(numbers) or len({(v.dtype, v.device) for v in row}) > 1:
        each = iter(numbers)
        row = [v.to(device, kind) if isinstance(v, Tensor) else next(each) for v in row]
    return torch.stack([v if v.dim() == 0 else v.reshape(()) for v in row]).to(device, kind)
