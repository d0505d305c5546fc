"""examples/lightning/train.py with a SIGKILL at a chosen place, once per run directory.

    python lit_run.py PLACE train.py ARGUMENTS...

`write@32`: at sample 32, rank 0 dies when it has written half of last.ckpt. `save@96`: between the two files of the save at
sample 96, the checkpoint and last.ckpt. `stop@40`: when it has applied the step that ends at sample 40, it sends SIGTERM to
itself, and continues.
"""

from __future__ import annotations

import io
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
    import torch
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

    def half(checkpoint: Any, file: Any, save: Any = torch.save) -> None:
        states = checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"]
        if states[0]["position"] == position and ".last.ckpt." in file.name:
            content = io.BytesIO()
            save(checkpoint, content)
            file.write(content.getvalue()[: content.tell() // 2])
            file.flush()
            once(kind)
            file.seek(0)
        save(checkpoint, file)

    if kind == "write":
        torch.save = half
    elif kind == "save":
        ModelCheckpoint._save_last_checkpoint = before_last
    else:
        Seat.applied = after_step


if __name__ == "__main__":
    kind, at = sys.argv[1].split("@")
    arm(kind, int(at))
    sys.argv = sys.argv[2:]
    runpy.run_path(sys.argv[0], run_name="__main__")
