"""A script, with a SIGKILL of rank 0 when it has applied the step that ends at a position, once per run directory.

python hf_run.py POSITION train.py ARGUMENTS...
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any


def arm(position: int) -> None:
    from batchwright.adapters.seat import Seat

    def after_step(seat: Any, group: Any, outcome: str = "applied", applied: Any = Seat.applied) -> None:
        applied(seat, group, outcome)
        marker = Path(os.environ["BATCHWRIGHT_RUN_DIR"]) / "killed"
        if seat.position == position and seat.rank == 0 and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    Seat.applied = after_step


if __name__ == "__main__":
    arm(int(sys.argv[1]))
    sys.argv = sys.argv[2:]
    runpy.run_path(sys.argv[0], run_name="__main__")
