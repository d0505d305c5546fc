"""The example, as a task that kills its process once, in the middle of a stage."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

from batchwright.jax import JaxTask

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "jax_gpt"))

import jax_gpt


class Killed:
    """A dataset whose process, number `rank`, dies at the read of row number `reads`, unless the marker exists."""

    def __init__(self, rows, marker, reads, rank) -> None:
        self.rows, self.marker = rows, Path(marker)
        self.left = reads if os.environ.get("RANK") == rank else 0
        self.fingerprint = rows.fingerprint

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i):
        self.left -= 1
        if not self.left and not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.rows[i]


def task(marker: str, reads: int = 0, rank: str = "0") -> JaxTask:
    made = jax_gpt.task(sequence_length=16, files=10)
    return replace(made, dataset=Killed(made.dataset, marker, int(reads), str(rank)))
