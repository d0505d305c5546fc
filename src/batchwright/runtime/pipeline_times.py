"""Times of a pipeline: how long a step takes at several numbers of microbatches, and how long each rank computes in it.

    python -m batchwright.runtime.pipeline_times SPEC.json RANK

The rest of a step is idle: a rank waits for another, or sends. Rounds of all numbers follow each other, so that a machine that
becomes slower is slower for all of them. Each rank is one process; rank 0 writes the times.
"""

from __future__ import annotations

import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._pytree import tree_leaves

from batchwright.core.batch.pipeline import PipelineRule
from batchwright.core.codec import decode
from batchwright.core.ramp.schedule import Step
from batchwright.processes.together import run_rank
from batchwright.rundir.files import read_json, write_json

from .data.loader import default_collate
from .data.windows import Window
from .device import choose, collectives_for, synchronise
from .ranks import Ranks
from .stages import build_stages
from .step.pipeline import PipelineAccumulator, stage_indices
from .step.pipeline_calls import asked_of
from .task import load_task

TIMEOUT = timedelta(seconds=600)
# What a rank computes; receiving and sending are outside of these.
_COMPUTE = ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk")


def main(spec_file: str, rank: int) -> None:
    """One rank: every round of every number of microbatches."""
    spec = read_json(Path(spec_file))
    rule, batch = decode(PipelineRule, spec["pipeline"]), int(spec["global_batch_size"])
    torch.set_num_threads(int(spec["threads"]))
    device = choose(spec["device"], Ranks(rank, rule.stages, rank, rule.stages, same_devices=True))
    store = dist.FileStore(str(Path(spec_file).with_name("store")), rule.stages)  # pyright: ignore[reportPrivateImportUsage]
    backend = collectives_for(device)["backend"]
    dist.init_process_group(backend, store=store, rank=rank, world_size=rule.stages, timeout=TIMEOUT)
    mesh = init_device_mesh(device.type, (rule.stages,), mesh_dim_names=("pp",))
    task = load_task(spec["target"], spec["args"])
    rows = [task.dataset[index % len(task.dataset)] for index in range(batch)]

    def fed(count: int) -> list[Window]:
        size = batch // count
        data = [(task.collate or default_collate)(rows[at : at + size]) for at in range(0, batch, size)]
        ids = [range(at, at + size) for at in range(0, batch, size)]
        return [Window(d, Step(0, 0, batch, 0), i, count, ids[i]) for i, d in enumerate(data)]

    indices = stage_indices(rule.schedule, rank, rule.stages, rule.virtual_stages)
    modules: list[nn.Module] = []
    owners: dict[int, PipelineAccumulator] = {}
    tokens = 0
    for count in spec["microbatches"]:
        call = asked_of(task.loss_of, fed(count)[0], torch.device("cpu"))
        tokens = tokens or count * _tokens(call)
        # A model that torch's tracer splits may have fixed the size of its micro batches. All splits share their weights.
        made = build_stages(task, 0, indices, rule.stages * rule.virtual_stages, partial(_given, call))
        for module, first in zip(made, modules or made, strict=True):
            module.load_state_dict(first.state_dict(keep_vars=True), assign=True)
        modules = [module.to(device) for module in made]
        owners[count] = PipelineAccumulator(modules, task.loss_of, pipeline=mesh, group=None, schedule=rule.schedule)
    optimizer = torch.optim.SGD([p for module in modules for p in module.parameters()], lr=0.0)
    clock = [0.0]
    for owner in owners.values():
        for stage in owner.stages:
            for name in _COMPUTE:
                setattr(stage, name, _timed(getattr(stage, name), clock, device))
    times: dict[int, list[tuple[float, float]]] = {count: [] for count in owners}
    for _ in range(1 + int(spec["rounds"])):
        for count, owner in owners.items():
            _run(owner, fed(count), optimizer, clock, times[count], device)
    gathered: list[Any] = [None] * rule.stages
    dist.all_gather_object(gathered, times)  # pyright: ignore[reportUnknownMemberType]
    if rank == 0:
        found = {
            str(count): [
                # The first round infers shapes.
                {"seconds": max(part[0] for part in parts), "compute_seconds": [part[1] for part in parts]}
                for parts in list(zip(*(each[count] for each in gathered), strict=True))[1:]
            ]
            for count in owners
        }
        write_json(Path(spec["result"]), {"tokens": tokens, "times": found, "device": str(device)}, sync=False)
    dist.destroy_process_group()


def _given(call: Any) -> Any:
    return call


def _tokens(call: Any) -> int:
    """The tokens of a call of the model: samples × length of the first tensor, if that is token ids or vectors; else samples.

    >>> [_tokens(((x,), {})) for x in (torch.zeros(3, 5, dtype=torch.long), torch.zeros(3, 5, 2), torch.zeros(3, 5))]
    [15, 15, 3]
    """
    first = next((leaf for leaf in tree_leaves(call) if isinstance(leaf, torch.Tensor)), torch.zeros(1))
    ids = first.dim() == 2 and not first.is_floating_point() and first.dtype != torch.bool
    vectors = first.dim() == 3 and first.is_floating_point()
    return first.shape[0] * (first.shape[1] if ids or vectors else 1)


def _run(owner: Any, feed: Any, optimizer: Any, clock: list[float], times: Any, device: torch.device) -> None:
    for step in owner.steps(feed):
        dist.barrier()  # pyright: ignore[reportUnknownMemberType]
        clock[0], began = 0.0, time.perf_counter()
        step.run()
        synchronise(device)
        times.append((time.perf_counter() - began, clock[0]))
        step.apply(optimizer)


def _timed(call: Any, clock: list[float], device: torch.device) -> Any:
    def timed(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return call(*args, **kwargs)
        finally:
            synchronise(device)
            clock[0] += time.perf_counter() - began

    return timed


if __name__ == "__main__":
    run_rank(main)
