"""The same batch on several processes: gloo, DDP or a pipeline, one subprocess per rank, which exchange files.

python -m batchwright.runtime.check.ranks SPEC.json RANK
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from batchwright.core.batch.pipeline import PipelineRule
from batchwright.core.codec import decode, encode
from batchwright.processes.together import run_rank, run_ranks
from batchwright.runtime.state.generators import set_seeds
from batchwright.runtime.task import load_task

from .gradients import Gradient, Rig, Variant
from .pipeline import staged_rig

# The limit of one collective, and of all ranks together: an assumption.
TIMEOUT_SECONDS = 600.0

Key = tuple[int, int]  # a micro batch size and the index of a variant


def on_ranks(
    source: tuple[str, Mapping[str, Any]],
    rig: Rig,
    ranks: int,
    sizes: Sequence[int],
    variants: Sequence[Variant],
    pipeline: PipelineRule | None = None,
) -> dict[Key, Gradient]:
    """The gradient of each micro batch size in each variant, computed by `ranks` processes, or as many pipelines."""
    with tempfile.TemporaryDirectory(prefix="batchwright-check-") as folder:
        torch.save(rig.model.state_dict(), Path(folder, "model.pt"))
        spec = {
            "target": source[0],
            "args": dict(source[1]),
            "ranks": ranks,
            "sizes": list(sizes),
            "seed": rig.seed,
            "global_batch_size": rig.size,
            "variants": [asdict(v) for v in variants],
            "folder": folder,
            "pipeline": encode(pipeline),
            "accumulate_dtype": str(rig.accumulate_dtype).removeprefix("torch.") if rig.accumulate_dtype else None,
        }
        file = Path(folder, "spec.json")
        file.write_text(json.dumps(spec), encoding="utf-8")
        run_ranks(
            "batchwright.runtime.check.ranks",
            file,
            ranks * (pipeline.stages if pipeline else 1),
            timeout=TIMEOUT_SECONDS,
            field="ranks",
            but=", but one process runs the same batch",
        )
        saved = torch.load(Path(folder, "gradients.pt"), weights_only=True)
    return {(size, v): saved[f"{size}/{v}"] for size in sizes for v in range(len(variants))}


def main(spec_file: str, rank: int) -> None:
    """Run one rank: every size in every variant; rank 0 writes the gradients."""
    spec = json.loads(Path(spec_file).read_text(encoding="utf-8"))
    folder, ranks = Path(spec["folder"]), spec["ranks"]
    torch.set_num_threads(1)
    set_seeds(spec["seed"])
    kind = getattr(torch, spec["accumulate_dtype"]) if spec["accumulate_dtype"] else None
    rig = Rig(load_task(spec["target"], spec["args"]), spec["global_batch_size"], spec["seed"], kind)
    # If Task.model is a module, each process has built its own: load the weights of the parent.
    rig.model.load_state_dict(torch.load(folder / "model.pt", weights_only=True))
    ranks_in_all = ranks * (spec["pipeline"]["stages"] if spec["pipeline"] else 1)
    store = dist.FileStore(str(folder / "store"), ranks_in_all)  # pyright: ignore[reportPrivateImportUsage]
    timeout = timedelta(seconds=TIMEOUT_SECONDS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks_in_all, timeout=timeout)
    found: dict[str, Gradient] = {}
    rule = decode(PipelineRule, spec["pipeline"]) if spec["pipeline"] else None
    mesh = init_device_mesh(rig.device.type, (rule.stages, ranks), mesh_dim_names=("pp", "dp")) if rule else None
    for size in spec["sizes"]:
        staged = staged_rig(rig, rule, mesh, size) if rule and mesh else None
        for index, variant in enumerate(Variant(**v) for v in spec["variants"]):
            found[f"{size}/{index}"] = (
                staged.split(variant, size)
                if staged
                else rig.split(variant, size, rank, ranks, DistributedDataParallel)
            )
    if rank == 0:
        torch.save(found, folder / "gradients.pt")
    dist.barrier()  # pyright: ignore[reportUnknownMemberType]
    dist.destroy_process_group()


if __name__ == "__main__":
    run_rank(main)
