"""The same batch on several processes: gloo and DDP, one subprocess per rank, which exchange files.

    python -m batchwright.runtime.check.ranks SPEC.json RANK

If a rank fails, the others are killed, since they would wait in a collective; the error shows the output of that rank.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from batchwright.core.errors import RunError
from batchwright.runtime.state.generators import set_seeds
from batchwright.runtime.task import load_task

from .gradients import Gradient, Rig, Variant

# The limit of one collective, and of all ranks together: an assumption.
TIMEOUT_SECONDS = 600.0

Key = tuple[int, int]  # a micro batch size and the index of a variant


def on_ranks(
    source: tuple[str, Mapping[str, Any]], rig: Rig, ranks: int, sizes: Sequence[int], variants: Sequence[Variant]
) -> dict[Key, Gradient]:
    """The gradient of each micro batch size in each variant, computed by `ranks` processes."""
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
            "accumulate_dtype": str(rig.accumulate_dtype).removeprefix("torch.") if rig.accumulate_dtype else None,
        }
        Path(folder, "spec.json").write_text(json.dumps(spec), encoding="utf-8")
        _run(folder, ranks)
        saved = torch.load(Path(folder, "gradients.pt"), weights_only=True)
    return {(size, v): saved[f"{size}/{v}"] for size in sizes for v in range(len(variants))}


def _run(folder: str, ranks: int) -> None:
    command = [sys.executable, "-m", "batchwright.runtime.check.ranks", str(Path(folder, "spec.json"))]
    logs = [Path(folder, f"rank{rank}.log") for rank in range(ranks)]
    processes: list[subprocess.Popen[bytes]] = []
    deadline = time.monotonic() + TIMEOUT_SECONDS
    try:
        for rank, log in enumerate(logs):
            with log.open("wb") as file:
                processes.append(subprocess.Popen([*command, str(rank)], stdout=file, stderr=file))
        while any(p.poll() is None for p in processes):
            if any(p.poll() for p in processes) or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        time.sleep(0.1 if any(p.poll() for p in processes) else 0)  # the rank at fault may be the second to exit
        codes = [p.poll() for p in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
    if any(codes) or None in codes:
        rank = next((r for r, code in enumerate(codes) if code), 0)
        output = logs[rank].read_text(encoding="utf-8", errors="replace").strip()
        how = f"exit code {codes[rank]}" if codes[rank] else f"no result within {TIMEOUT_SECONDS:.0f} s"
        raise RunError(
            f"rank {rank} of {ranks} failed ({how}), but one process runs the same batch. Its output:\n{output[-4000:]}",
            field="ranks",
            given=ranks,
        )


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
    store = dist.FileStore(str(folder / "store"), ranks)  # pyright: ignore[reportPrivateImportUsage]
    timeout = timedelta(seconds=TIMEOUT_SECONDS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timeout)
    found: dict[str, Gradient] = {}
    for index, variant in enumerate(Variant(**v) for v in spec["variants"]):
        for size in spec["sizes"]:
            found[f"{size}/{index}"] = rig.split(variant, size, rank, ranks, DistributedDataParallel)
    if rank == 0:
        torch.save(found, folder / "gradients.pt")
    dist.barrier()  # pyright: ignore[reportUnknownMemberType]
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main(sys.argv[1], int(sys.argv[2]))
    except RunError as fault:
        if fault.__cause__ is not None:
            traceback.print_exception(fault.__cause__)  # the user's own exception
        print(f"error: {fault}", file=sys.stderr)
        sys.exit(fault.exit_code)
