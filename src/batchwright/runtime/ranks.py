"""This process's rank in the job, and its data-parallel rank in a device mesh. Only this file of `runtime` reads the
environment."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from batchwright.core.errors import EnvironmentFault, PlanError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# Launcher -> its variables for rank, size, local rank, local size. SLURM_STEP_NUM_TASKS exists under srun only;
# SLURM_NTASKS is also set in the batch script's own process, which is not one of the tasks.
_LAUNCHERS = (
    ("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
)


@dataclass(frozen=True)
class Ranks:
    """The rank of this process in the job and on its node; `local_size` is None if unknown.

    >>> Ranks()
    Ranks(rank=0, size=1, local_rank=0, local_size=None, same_devices=False)
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int | None = None
    same_devices: bool = False
    """All processes of the node see the same devices: torchrun started them. srun may give each its own."""


def discover(environment: Mapping[str, str] | None = None) -> Ranks:
    """Read the ranks that torchrun or srun set for this process; without either it is the only process.

    >>> discover({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"})
    Ranks(rank=3, size=8, local_rank=1, local_size=2, same_devices=False)
    >>> discover({})
    Ranks(rank=0, size=1, local_rank=0, local_size=None, same_devices=False)
    """
    env = os.environ if environment is None else environment
    for launcher, rank, size, local_rank, local_size in _LAUNCHERS:
        # Slurm sets a rank in the batch script too; only srun sets this size.
        if size not in env and (launcher != "torchrun" or rank not in env):
            continue
        found = Ranks(
            rank=_number(env, rank, launcher),
            size=_number(env, size, launcher),
            local_rank=_number(env, local_rank, launcher) if local_rank in env else 0,
            local_size=_number(env, local_size, launcher) if local_size in env else None,
            same_devices="TORCHELASTIC_RUN_ID" in env,
        )
        if not 0 <= found.rank < found.size:
            raise EnvironmentFault(
                f"{rank}={found.rank}: must be 0 to {found.size - 1}, since {size}={found.size}.",
                field=rank,
                given=found.rank,
                nearest=[max(0, found.size - 1)],
            )
        return found
    return Ranks()


def check_rendezvous(ranks: Ranks, environment: Mapping[str, str] | None = None) -> None:
    """Raise unless the environment has the address at which the processes of a job meet.

    >>> check_rendezvous(Ranks(0, 2), {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"})
    """
    env = os.environ if environment is None else environment
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not env.get(name)]
    if missing:
        raise EnvironmentFault(
            f"rank {ranks.rank} of {ranks.size} has no {' and no '.join(missing)} in its environment, so it cannot reach the "
            "other ranks. torchrun sets both; under srun, export the first node's name and a free port.",
            field=missing[0],
        )


def rendezvous(environment: Mapping[str, str] | None = None) -> str:
    """The address at which the processes of a job meet.

    >>> rendezvous({"MASTER_ADDR": "node1", "MASTER_PORT": "29500"})
    'node1:29500'
    """
    env = os.environ if environment is None else environment
    return f"{env['MASTER_ADDR']}:{env['MASTER_PORT']}"


def data_parallel(mesh: DeviceMesh, dims: str | Sequence[str] | None = None) -> tuple[int, int]:
    """This process's data-parallel rank and size: its rank along the mesh dimensions `dims`, the last varying fastest.

    Ranks that differ only in other dimensions (tensor, pipeline, context) get equal results, so equal samples. For a mesh
    of one dimension `dims` may be omitted.

        mesh = init_device_mesh(device.type, (2, 4, 8), mesh_dim_names=("replicate", "shard", "tensor"))
        rank, size = data_parallel(mesh, ("replicate", "shard"))         # size 8
    """
    names = tuple(mesh.mesh_dim_names or ())
    wanted = (dims,) if isinstance(dims, str) else tuple(dims or ())
    shape = " × ".join(f"{name} {size}" for name, size in zip(names or "?" * mesh.ndim, mesh.shape, strict=True))
    if dims is None and mesh.ndim == 1:
        axes = (0,)
    elif not wanted or set(wanted) - set(names) or len(set(wanted)) < len(wanted):
        raise PlanError(
            f"dims={dims!r} does not name the dimensions of the mesh ({shape}) that hold different samples. "
            + (f"Name each once, out of: {', '.join(names)}." if names else "Create the mesh with mesh_dim_names."),
            field="dims",
            given=dims,
            nearest=names,
        )
    else:
        axes = tuple(names.index(name) for name in wanted)
    place = mesh.get_coordinate()
    if place is None:
        raise PlanError(
            f"this process is not part of the mesh ({shape}), so it has no data-parallel rank.", field="mesh"
        )
    rank, size = 0, 1
    for axis in axes:
        rank, size = rank * mesh.size(axis) + place[axis], size * mesh.size(axis)
    return rank, size


def _number(env: Mapping[str, str], name: str, launcher: str) -> int:
    text = env.get(name, "")
    if not text.isdecimal():
        raise EnvironmentFault(
            f"{name}={text!r}: must be an integer, which {launcher} sets in every process. Start the job with "
            f"{launcher}, or remove its variables from the environment.",
            field=name,
            given=text,
        )
    return int(text)
