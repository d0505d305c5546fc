"""examples/lightning/train.py with a SIGKILL at a chosen place, once per run directory: `step@40` or `save@96`.

    python lit_run.py PLACE train.py ARGUMENTS...

`step@40`: rank 0 dies when it has applied the step that ends at sample 40. `save@96`: between the two files of the save at
sample 96, the checkpoint and last.ckpt. `stop@40`: it sends SIGTERM to itself there, and continues.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any


def once(kind: str) -> None:
    marker = Path(os.environ["BATCHWRIGHT_RUN_DIR"]) / f"{kind}.done"
    if not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGTERM if kind == "stop" else signal.SIGKILL)


def arm(kind: str, position: int) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    from batchwright.adapters.seat import Seat

    def after_step(seat: Any, group: Any, outcome: str = "applied", applied: Any = Seat.applied) -> None:
        applied(seat, group, outcome)
        if seat.position == position and seat.rank == 0:
            once(kind)

    def before_last(callback: Any, trainer: Any, *rest: Any, save: Any = ModelCheckpoint._save_last_checkpoint) -> None:
        if trainer.train_dataloader.seat.position == position and trainer.is_global_zero:
            once(kind)
        save(callback, trainer, *rest)

    if kind == "save":
        ModelCheckpoint._save_last_checkpoint = before_last
    else:
        Seat.applied = after_step


if __name__ == "__main__":
    kind, at = sys.argv[1].split("@")
    arm(kind, int(at))
    sys.argv = sys.argv[2:]
    runpy.run_path(sys.argv[0], run_name="__main__")
