"""The programs that start ranks: torchrun, accelerate, deepspeed, srun. They know the world that a script does not."""

from __future__ import annotations

from . import Dialect, Fields, Given

# Short flags that count, by program: they mean other things to other programs.
SHORT = {"srun": {"-N": "nodes", "-n": "ntasks"}}
# Programs that start the ranks themselves: what srun starts is then one of them, not a rank.
STARTERS = frozenset({"torchrun", "accelerate", "deepspeed", "torch.distributed.run", "torch.distributed.launch"})
TASKS = frozenset({"ntasks", "ntasks_per_node"})


def _resolve(special: Fields, fields: Fields) -> tuple[Fields, list[str]]:
    """A launcher that is told devices per node and nothing else runs on one node."""
    told = {"nodes", "devices", "data_parallel_size"} & set(fields)
    if "devices_per_node" not in fields or told:
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
        "ntasks_per_node": "devices_per_node",  # srun, one rank a task
        "ntasks": "devices",
    },
    resolve=_resolve,
)
