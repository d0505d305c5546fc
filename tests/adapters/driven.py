"""An example under `batchwright run`, with one signal at a chosen place; as a program, the script that sends it.

    python driven.py PLACE examples/FRAMEWORK/train.py ARGUMENTS...

`step@40`: rank 0 kills itself when it has applied the step that ends at sample 40. `write@96`: in the save at sample 96, when
it has written half of the file that comes last but one or last; `save@96`: before that file, and after others. `stop@48`: it
sends the stop signal of the run to itself after that step, and continues. `interrupt@48`: Ctrl-C, to the process of the variable
INTERRUPT, or to itself. Each once per run directory, or per `--out`.
"""

from __future__ import annotations

import io
import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

import batchwright

EXAMPLES = Path(__file__).parents[2] / "examples"
# A part of the name of a file of a checkpoint.
FILES = {"huggingface": "optimizer.pt", "sft": "optimizer.pt", "lightning": ".last.ckpt."}


def drive(framework: str, folder: Path, place: str, *arguments: str, **options: Any) -> Any:
    """The example, on one rank up to sample 64, then on two up to sample 128; its status."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "{devices}"]
    handled = ["--shutdown-timeout", "60", "--signals-to-handle", "SIGTERM,SIGUSR1"]
    folders = {"sft": Path(__file__).parent / "sft"}  # it is no example
    script = [
        __file__,
        place,
        str(folders.get(framework, EXAMPLES / framework) / "train.py"),
        "--out",
        "{run_dir}/out",
        *arguments,
    ]
    return batchwright.run(
        [*torchrun, *handled, *script],
        thresholds="0:8 64:16", samples=128, micro_batch_size=4, nodes=2, devices_per_node=1, node_policy="constant-work",
        dir=str(folder), progress=False, retry_seconds=0,
        environment={"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}, **options,
    )  # fmt: skip


def arm(framework: str, kind: str, position: int) -> None:
    import torch

    from batchwright.adapters.adapter import Adapter

    applied, save, adapters = Adapter.applied, torch.save, list[Adapter]()
    marker = Path(os.environ.get("BATCHWRIGHT_RUN_DIR") or sys.argv[sys.argv.index("--out") + 1]) / "signalled"

    def here() -> bool:
        return any((adapter.position, adapter.rank) == (position, 0) for adapter in adapters) and not marker.exists()

    def after_step(adapter: Any, *given: Any) -> None:
        applied(adapter, *given)
        adapters[:] = [adapter]
        if kind in ("step", "stop", "interrupt") and here():
            marker.touch()
            if kind == "interrupt":
                os.kill(int(os.environ.get("INTERRUPT", os.getpid())), signal.SIGINT)
            else:
                os.kill(os.getpid(), adapter.run.stop_signal if kind == "stop" else signal.SIGKILL)

    def in_save(content: Any, file: Any, *given: Any, **named: Any) -> None:
        path = getattr(file, "name", file)
        if FILES[framework] in os.path.basename(path) and here():
            marker.touch()
            if kind == "write":
                save(content, whole := io.BytesIO())
                with open(path, "wb") as half:
                    half.write(whole.getvalue()[: whole.tell() // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        save(content, file, *given, **named)

    Adapter.applied = after_step
    if kind in ("write", "save"):
        torch.save = in_save


if __name__ == "__main__":
    kind, at = sys.argv[1].split("@")
    sys.argv = sys.argv[2:]
    arm(Path(sys.argv[0]).parent.name, kind, int(at))
    runpy.run_path(sys.argv[0], run_name="__main__")
