"""What `probe` runs of a JaxTask: optimizer steps at one micro batch size, one line for each, until it is ended.

    python -m batchwright.jax.trial FILE.py FUNCTION ARGUMENTS MICRO_BATCH_SIZE

ARGUMENTS is JSON. A step has one micro step: the sums of `accumulate` exist beside the activations in any case. All devices of
this process train, each rank on a micro batch of this size; `probe` counts the samples of one rank.
"""

from __future__ import annotations

import json
import sys
import traceback
from itertools import count
from math import prod

import jax
import numpy as np

from batchwright.core.errors import BatchwrightError
from batchwright.core.ramp.rules import Constant
from batchwright.runtime.data.order import GlobalOrder

from .feed import ROW_AXES, Feed
from .task import load_task


def main(target: str, arguments: str, micro_batch_size: int) -> None:
    """Train without end, and print every step."""
    task = load_task(target, json.loads(arguments))
    mesh = task.build_mesh()
    arrays = task.start(mesh, seed=0)
    params, state, step = arrays["params"], arrays["optimizer"], task.compiled_step(mesh, arrays)
    size = micro_batch_size * prod(mesh.shape[name] for name in ROW_AXES if name in mesh.shape)
    order = GlobalOrder(len(task.dataset), shuffle=False)
    feed = Feed(task.dataset, order, Constant(size).compile(), micro_batch_size, mesh=mesh, collate=task.collate)
    for number, batch in zip(count(), feed, strict=False):
        params, state, numbers = step(params, state, batch.batches, np.int32(batch.count), np.float32(1))
        jax.block_until_ready((params, numbers))
        print(f"batchwright: step {number}", flush=True)


if __name__ == "__main__":
    try:
        main(f"{sys.argv[1]}:{sys.argv[2]}", sys.argv[3], int(sys.argv[4]))
    except BatchwrightError as fault:
        if fault.__cause__ is not None:
            traceback.print_exception(fault.__cause__)
        print(f"{type(fault).__name__}: {fault}", file=sys.stderr)
        sys.exit(fault.exit_code)
