"""Programs that start ranks: torchrun, accelerate, deepspeed, srun. Their flags give the number of devices."""

from __future__ import annotations

from .record import Dialect, Fields, Given

# Short flags to read, by program: in other programs they mean something else.
SHORT = {"srun": {"-N": "nnodes", "-n": "ntasks"}, "composer": {"-n": "nproc_per_node"}}
# Programs that start the ranks: a task of srun is then one of these programs, not a rank.
STARTERS = frozenset({"torchrun", "accelerate", "deepspeed", "torch.distributed.run", "torch.distributed.launch"})
TASKS = frozenset({"ntasks", "ntasks_per_node"})


def _resolve(special: Fields, fields: Fields) -> tuple[Fields, list[str]]:
    """Without a number of nodes or devices, a launcher runs on one node."""
    given = {"nodes", "devices", "data_parallel_size"} & set(fields)
    if "devices_per_node" not in fields or given:
        return {}, []
    return {"nodes": Given(1, "the launcher's default", fields["devices_per_node"].level)}, []


DIALECT = Dialect(
    name="launchers",
    title="a launcher",
    keys={
        "nproc_per_node": "devices_per_node",  # torchrun
        "nnodes": "nodes",
        "num_processes": "devices",  # accelerate launch
        "num_machines": "nodes",
        "num_gpus": "devices_per_node",  # deepspeed
        "num_nodes": "nodes",
        "ntasks_per_node": "devices_per_node",  # srun, one rank per task
        "ntasks": "devices",
    },
    resolve=_resolve,
)
