"""Which ranks hold different samples, and when their gradients are reduced: one synchronisation per step.

    DDP      `require_backward_grad_sync` is off for all micro steps except the last. `no_sync` sets the same flag; here
             it is set *before* the forward, where DDP reads it, and restored even if a loop is abandoned
    FSDP2    `set_requires_gradient_sync`; unsharded gradients are kept until then (see `SHARDED_MEMORY`)
    none     gradients are added into one flat buffer (sums.py), which is summed over the ranks in one all-reduce

DDP and FSDP2 average over ranks. The step keeps that and multiplies by the number of ranks, in the one multiplication
that also divides by the step's weight. To switch the division off (`set_gradient_divide_factor(1)`) would need NCCL's
PREMUL_SUM, which gloo does not have.
"""

# pyright: reportUnknownMemberType=false
# torch's annotations are incomplete.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
SHARDED_MEMORY: dict[ShardedMemory, str] = {
    "low": "reduce-scatter after every micro step: no unsharded gradients are kept, one synchronisation per micro step",
    "medium": "one reduce-scatter per step: unsharded gradients are kept between micro steps",
    "high": "also keep parameters unsharded between micro steps: no all-gathers after the first",
}


@dataclass(frozen=True)
class DataParallel:
    """The data-parallel ranks of a model, and what reduces its gradients: `ddp`, `sharded` (FSDP2) or `ours`.

    >>> DataParallel.of(nn.Linear(2, 1))
    DataParallel(wrapper='ours', size=1, groups=(), modules=())
    """

    wrapper: Literal["ddp", "sharded", "ours"]
    size: int
    groups: tuple[dist.ProcessGroup, ...]  # a mesh of several dimensions (HSDP) is reduced one dimension at a time
    modules: tuple[nn.Module, ...]  # the DDP or FSDP2 modules

    @staticmethod
    def of(model: nn.Module, group: Group = "auto") -> DataParallel:
        """Find the wrapper in `model`, and take the ranks from it or from `group` (a process group or a mesh)."""
        ddp = tuple(m for m in model.modules() if isinstance(m, DistributedDataParallel))
        sharded = tuple(m for m in model.modules() if isinstance(m, FSDPModule))
        groups = _find_groups(model, ddp) if group == "auto" else _groups(group)
        size = 1
        for one in groups:
            size *= dist.get_world_size(one)
        wrapper = "sharded" if sharded else "ddp" if ddp else "ours"
        return DataParallel(wrapper, size, groups, sharded or ddp)

    def synchronise(self, on: bool, memory: ShardedMemory = "medium") -> None:
        """Set whether the next forward and backward reduce gradients over ranks."""
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
        """Raise on every rank unless all ranks have the same value."""
        rank = 0
        for group in self.groups:
            rank = rank * dist.get_world_size(group) + dist.get_rank(group)
        slots = torch.zeros(self.size, dtype=torch.int64, device=device)
        slots[rank] = value
        values = cast("list[int]", self.sum(slots).tolist())
        if len(set(values)) > 1:
            listed = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values[:16]))
            raise RunError(
                f"step {plan.step}: the ranks do not agree on {name} ({listed}). All ranks must run the same number of "
                "micro steps of the same step, or their collectives wait forever. Add filler micro batches.",
                field="micro_steps",
                given=values,
                nearest=(max(values),),
            )

    def left_out(self, model: nn.Module) -> list[str]:
        """Trainable parameters outside the wrapper: each rank would train its own copy of them."""
        inside = {id(p) for module in self.modules for p in module.parameters()}

        def reduced(p: nn.Parameter) -> bool:
            return self.wrapper == "ours" or (id(p) in inside if self.wrapper == "ddp" else isinstance(p, DTensor))

        return [name for name, p in model.named_parameters() if p.requires_grad and not reduced(p)]

    def forget(self) -> None:
        """Drop the unsharded gradients that an abandoned step left inside FSDP2."""
        sharded: list[Any] = [m for m in self.modules if isinstance(m, FSDPModule)]
        if sharded and hasattr(sharded[0], "reset_iter_state"):  # torch 2.13 and later; ends collectives in flight
            sharded[0].reset_iter_state()
        # Its documentation says that it drops these gradients too, but 2.13.0 does not. `unshard` would be a collective.
        states = [module._get_fsdp_state() for module in sharded]
        several = all(hasattr(state, "_fsdp_param_groups") for state in states)  # up to about 2.11: one group, or None
        groups = [g for s in states for g in (s._fsdp_param_groups if several else [s._fsdp_param_group]) if g]
        for parameter in (p for group in groups for p in group.fsdp_params):
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None


def _groups(group: dist.ProcessGroup | DeviceMesh | None) -> tuple[dist.ProcessGroup, ...]:
    if isinstance(group, DeviceMesh):
        return tuple(group.get_all_groups())
    return () if group is None else (group,)


def _find_groups(model: nn.Module, ddp: Sequence[DistributedDataParallel]) -> tuple[dist.ProcessGroup, ...]:
    meshes = {p.device_mesh for p in model.parameters() if isinstance(p, DTensor)}
    if ddp:
        return (cast(dist.ProcessGroup, ddp[0].process_group),)
    if len(meshes) == 1 and (mesh := meshes.pop()).ndim == 1:
        return _groups(mesh)
    if meshes:
        raise PlanError(
            "group='auto' cannot decide which dimensions of the model's device mesh hold different samples. "
            "Pass group=mesh['dp'], or group=mesh for HSDP, where all of them do.",
            field="group",
            given="auto",
            nearest=("mesh['dp']", "mesh"),
        )
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if ranks > 1:
        raise PlanError(
            f"group='auto' finds neither DDP nor FSDP2 in the model, but there are {ranks} ranks. Wrap the model, pass "
            "group=dist.group.WORLD to sum gradients over all ranks, or group=None to train this rank alone.",
            field="group",
            given="auto",
            nearest=("dist.group.WORLD", None),
        )
    return ()
