"""Where gradients meet: the ranks that hold different samples, when their gradients are reduced, and in what.

One gradient synchronisation per step, whatever wraps the model:

    DDP      `require_backward_grad_sync` off for all micro steps but the last: what `no_sync` sets, but set *before*
             the forward, which is the one that counts, and restored even when a loop is abandoned
    FSDP2    `set_requires_gradient_sync`; unsharded gradients are kept until then (see `SHARDED_MEMORY`)
    nothing  gradients are added into one flat buffer, which is summed over the ranks in one all-reduce

DDP and FSDP2 average over ranks. We leave that as it is and multiply by the number of ranks: switching the division
off (`set_gradient_divide_factor(1)`) needs NCCL's PREMUL_SUM, which gloo does not have, and the factor melts into the
one multiplication that divides by the step's weight anyway.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from batchwright.core.errors import PlanError, RunError
from batchwright.core.ramp.schedule import Step

Group = dist.ProcessGroup | DeviceMesh | Literal["auto"] | None
ShardedMemory = Literal["low", "medium", "high"]
Outcome = Literal["applied", "skipped", "dropped", "carried"]
SHARDED_MEMORY: dict[ShardedMemory, str] = {
    "low": "reduce-scatter after every micro step: no unsharded gradients are kept, one synchronisation per micro step",
    "medium": "one reduce-scatter per step: unsharded gradients are kept between micro steps",
    "high": "also keep parameters unsharded between micro steps: no further all-gathers after the first",
}


@dataclass(frozen=True)
class DataParallel:
    """The data-parallel ranks of a model, and who reduces its gradients: `ddp`, `sharded` (FSDP2) or `ours`.

    >>> DataParallel.of(nn.Linear(2, 1))
    DataParallel(wrapper='ours', size=1, groups=(), modules=())
    """

    wrapper: Literal["ddp", "sharded", "ours"]
    size: int
    groups: tuple[dist.ProcessGroup, ...]  # a mesh of several dimensions (HSDP) is reduced one dimension at a time
    modules: tuple[nn.Module, ...]  # those whose synchronisation is switched

    @staticmethod
    def of(model: nn.Module, group: Group = "auto") -> DataParallel:
        """Find the wrapper in `model` and take the ranks from it, or from `group` (a process group or a mesh)."""
        ddp = tuple(m for m in model.modules() if isinstance(m, DistributedDataParallel))
        sharded = tuple(m for m in model.modules() if isinstance(m, FSDPModule))
        groups = _groups_of(model, ddp) if group == "auto" else _groups(cast("dist.ProcessGroup | None", group))
        size = 1
        for one in groups:
            size *= dist.get_world_size(one)
        wrapper = "sharded" if sharded else "ddp" if ddp else "ours"
        return DataParallel(wrapper, size, groups, sharded or ddp)

    def synchronise(self, on: bool, memory: ShardedMemory = "medium") -> None:
        """Say whether the next forward and backward reduce gradients over ranks."""
        for module in self.modules:
            if isinstance(module, FSDPModule):
                module.set_requires_gradient_sync(on or memory == "low", recurse=False)
                if memory == "high":
                    module.set_reshard_after_backward(on, recurse=False)
            else:
                cast(DistributedDataParallel, module).require_backward_grad_sync = on

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum `tensor` over the ranks, in place."""
        for group in self.groups:
            dist.all_reduce(tensor, group=group)
        return tensor

    def agree(self, name: str, value: int, plan: Step, device: torch.device) -> None:
        """Raise, on every rank, unless all ranks have the same value."""
        rank = 0
        for group in self.groups:
            rank = rank * dist.get_world_size(group) + dist.get_rank(group)
        slots = torch.zeros(self.size, dtype=torch.int64, device=device)
        slots[rank] = value
        values = self.sum(slots).tolist()
        if len(set(values)) > 1:
            listed = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values[:16]))
            raise RunError(
                f"step {plan.step}: the ranks do not agree on {name} ({listed}). Each must run equally many micro steps "
                "of the same step, or their collectives wait for each other forever; pad with filler micro batches.",
                field="micro_steps",
                given=values,
                nearest=(max(values),),
            )

    def left_out(self, model: nn.Module) -> list[str]:
        """Trainable parameters that the wrapper knows nothing of: every rank would train its own."""
        inside = {id(p) for module in self.modules for p in module.parameters()}
        known = {"ddp": lambda p: id(p) in inside, "sharded": lambda p: isinstance(p, DTensor), "ours": lambda p: True}
        return [n for n, p in model.named_parameters() if p.requires_grad and not known[self.wrapper](p)]

    def forget(self) -> None:
        """Drop what an abandoned step left inside FSDP2: unsharded gradients that were to be reduced later."""
        sharded = [m for m in self.modules if isinstance(m, FSDPModule)]
        if sharded and hasattr(sharded[0], "reset_iter_state"):  # from torch 2.13 on; ends what is in flight
            sharded[0].reset_iter_state()
        # It says that it drops these gradients too, but (2.13.0) does not; `unshard` would show them, in a collective.
        states: list[Any] = [module._get_fsdp_state() for module in sharded]
        several = all(hasattr(state, "_fsdp_param_groups") for state in states)  # before 2.12 or so: one, or None
        groups = [g for s in states for g in (s._fsdp_param_groups if several else [s._fsdp_param_group]) if g]
        for parameter in (p for group in groups for p in group.fsdp_params):
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None


def _groups(group: dist.ProcessGroup | DeviceMesh | None) -> tuple[dist.ProcessGroup, ...]:
    if isinstance(group, DeviceMesh):
        return tuple(group.get_all_groups())
    return () if group is None else (group,)


def _groups_of(model: nn.Module, ddp: Sequence[DistributedDataParallel]) -> tuple[dist.ProcessGroup, ...]:
    meshes = {p.device_mesh for p in model.parameters() if isinstance(p, DTensor)}
    if ddp:
        return (cast(dist.ProcessGroup, ddp[0].process_group),)
    if len(meshes) == 1 and (mesh := meshes.pop()).ndim == 1:
        return _groups(mesh)
    world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if meshes:
        raise PlanError(
            "group='auto' cannot tell which dimensions of the model's device mesh hold different samples. "
            "Give it: group=mesh['dp'], or group=mesh for HSDP, where all of them do.",
            field="group",
            given="auto",
            nearest=("mesh['dp']", "mesh"),
        )
    if world > 1:
        raise PlanError(
            f"group='auto' finds neither DDP nor FSDP2 in the model, but there are {world} ranks. Wrap the model, give "
            "group=dist.group.WORLD to have gradients summed over all ranks, or group=None to train this rank alone.",
            field="group",
            given="auto",
            nearest=("dist.group.WORLD", None),
        )
    return ()


class FlatGradients:
    """Gradient sums in one flat buffer, filled by backward itself, so that a gradient lives only until it is added.

    A hook on each parameter denotes, when backward has produced `p.grad`:

        buffer[p] += p.grad;  squares += |p.grad|²;  p.grad = None

    So it takes the memory of one set of gradients in `dtype` (at least fp32: a bf16 sum of 1024 micro steps is off by
    34%), sees the gradient of each micro step alone, and is reduced over ranks in one collective, with no copy.
    (A gradient that arrives in pieces, as with reentrant checkpointing of a shared weight, is summed rightly but measured
    in pieces.)
    """

    def __init__(self, parameters: Iterable[nn.Parameter], dtype: torch.dtype = torch.float32) -> None:
        self.parameters = [p for p in parameters if p.requires_grad]
        self.squares = torch.zeros((), dtype=exact(self.parameters[0].device), device=self.parameters[0].device)
        self.active = self.measure = False
        self._present: set[nn.Parameter] = set()
        self._buffers: list[tuple[Tensor, list[nn.Parameter]]] = []
        self._views: dict[nn.Parameter, Tensor] = {}
        kinds: dict[tuple[torch.device, torch.dtype], list[nn.Parameter]] = {}
        for p in self.parameters:
            kinds.setdefault((p.device, torch.promote_types(p.dtype, dtype)), []).append(p)
        for (device, kind), members in kinds.items():
            sizes = [local(p).numel() for p in members]
            # The tail says which parameters have a gradient at all: one that none of the ranks used stays None.
            buffer = torch.zeros(sum(sizes) + len(members), dtype=kind, device=device)
            self._buffers.append((buffer, members))
            for p, piece in zip(members, buffer.split([*sizes, len(members)]), strict=False):
                self._views[p] = piece.view(local(p).shape)

    def attach(self) -> list[Any]:
        """Register the hooks; each of the handles returned has `remove()`."""
        return [p.register_post_accumulate_grad_hook(self._take) for p in self.parameters]

    def _take(self, p: Tensor) -> None:
        if p.grad is None or not self.active:
            return
        gradient, view = local(p.grad), self._views[cast(nn.Parameter, p)]
        view.add_(gradient)
        self._present.add(cast(nn.Parameter, p))
        if self.measure:
            self.squares += torch.linalg.vector_norm(gradient, dtype=view.dtype).to(self.squares).square()
        p.grad = None

    def reduce(self, over: DataParallel) -> None:
        """Sum the buffer over ranks."""
        for buffer, members in self._buffers:
            tail = buffer[-len(members) :]
            tail.copy_(torch.tensor([float(p in self._present) for p in members]))
            over.sum(buffer)
            self._present |= {p for p, ranks in zip(members, tail.tolist(), strict=True) if ranks}

    def gradients(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Each parameter that has a gradient, with it."""
        return [(p, like(p, self._views[p])) for p in self.parameters if p in self._present]

    def clear(self) -> None:
        """Start again from zero."""
        self._present.clear()
        self.squares.zero_()
        for buffer, _ in self._buffers:
            buffer.zero_()


def exact(device: torch.device) -> torch.dtype:
    """The widest float of a device: sums of weights and losses are taken in it."""
    return torch.float32 if device.type == "mps" else torch.float64


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor: itself, or the shard of a DTensor; writing to it writes to the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def like(p: Tensor, part: Tensor) -> Tensor:
    """`part` as a tensor distributed as `p` is."""
    if not isinstance(p, DTensor):
        return part
    return DTensor.from_local(part, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())


def scale_(gradients: Sequence[Tensor], factor: float) -> None:
    """Multiply all gradients, sharded or not, in place."""
    if gradients:
        torch._foreach_mul_([local(g) for g in gradients], factor)  # pyright: ignore[reportPrivateImportUsage]


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """The 2-norm over all gradients, sharded or not, as a plain tensor that is equal on all ranks.

    >>> float(total_norm([torch.tensor([3.0]), torch.tensor([[4.0]])]))
    5.0
    """
    kinds: dict[Any, list[Tensor]] = {}
    for gradient in gradients:
        kinds.setdefault((gradient.device_mesh if isinstance(gradient, DTensor) else None), []).append(gradient)
    if not gradients:
        return torch.zeros(())
    norms = [torch.nn.utils.get_total_norm(members) for members in kinds.values()]
    whole = [n.full_tensor() if isinstance(n, DTensor) else n for n in norms]
    return whole[0] if len(whole) == 1 else torch.linalg.vector_norm(torch.stack(whole))


def _row(values: Sequence[Any], kind: torch.dtype, device: torch.device) -> Tensor:
    """Numbers and tensors of one element as one tensor, in few calls: this is the step's own cost on a small model."""
    if not any(isinstance(v, Tensor) for v in values):
        return torch.tensor(values, dtype=kind, device=device)
    if len({(v.dtype, v.device) if isinstance(v, Tensor) else None for v in values}) > 1:
        values = [torch.as_tensor(v, dtype=kind, device=device) for v in values]
    return torch.stack([v if v.dim() == 0 else v.reshape(()) for v in values]).to(device, kind)


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


@dataclass(frozen=True)
class Totals:
    """The sums of one step over its micro steps and all ranks."""

    weight: float
    loss: float
    auxiliary: float
    samples: int
    square_sum: float
    weight_square_sum: float


@dataclass
class Sums:
    """What an open step adds up to on this rank; tensors stay on their device until `totals`."""

    start_sample: int
    measured: bool
    flat: FlatGradients | None
    losses: list[Any] = field(default_factory=list)
    weights: list[Any] = field(default_factory=list)
    auxiliaries: list[Any] = field(default_factory=list)
    samples: int = 0

    @property
    def micro_steps(self) -> int:
        return len(self.weights)

    def add(self, loss: Tensor | float, weight: Tensor | float, auxiliary: Tensor | float, samples: int) -> None:
        """Take in one micro step."""
        for values, value in ((self.losses, loss), (self.weights, weight), (self.auxiliaries, auxiliary)):
            values.append(value.detach() if isinstance(value, Tensor) else float(value))
        self.samples += samples

    def totals(self, parallel: DataParallel, device: torch.device, plan: Step) -> Totals:
        """Sum over micro steps and ranks in one all-reduce; all ranks find the same faults, so all of them raise."""
        kind = exact(device)
        losses, weights, auxiliaries = (_row(v, kind, device) for v in (self.losses, self.weights, self.auxiliaries))
        bad = (~weights.isfinite() | (weights < 0)).sum()
        count, mark = self.micro_steps, plan.step % 997  # small, so that their squares add up exactly
        facts = torch.tensor([self.samples, count, count**2, mark, mark**2], dtype=kind, device=device)
        squares = self.flat.squares if self.flat and self.measured else torch.zeros_like(losses[0])
        # Where each micro step is reduced over ranks it is one term, and its weight is that of all ranks.
        whole = self.measured and parallel.wrapper == "sharded"
        terms = weights if whole else weights.square().sum().reshape(1)
        parts = [losses.sum(), weights.sum(), auxiliaries.sum(), squares, bad.to(kind)]
        packed = parallel.sum(torch.cat([torch.stack(parts), facts, terms])).tolist()
        loss, weight, auxiliary, square_sum, faults, samples, *moments = packed[:10]
        for name, own, (first, second) in (
            ("micro steps", count, moments[:2]),
            ("the step", plan.step, moments[2:]),
        ):
            if parallel.size * second != first * first:
                parallel.agree(name, own, plan, device)
        if faults:
            raise RunError(
                f"step {plan.step}: {faults:.0f} of its weights are negative or not finite; on this rank they are "
                f"{[f'{w:g}' for w in weights.tolist()]}. A weight counts what the loss is a sum over: 0 or more.",
                field="weight",
                given=weights.tolist(),
            )
        squared = sum(n * n for n in packed[10:]) if whole else packed[10]
        return Totals(weight, loss, auxiliary, round(samples), square_sum, squared)
