"""TensorBoard: `RUN/tensorboard`, and `RUN/tensorboard/samples` for charts over samples."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from . import OVER_SAMPLES, Recorder

# A killed process loses what is not flushed: torch's default are two minutes.
_FLUSH_SECONDS = 5


class TensorBoard(Recorder):
    """Writes event files. `purge_step` hides the points of an earlier launch that this one trains again."""

    name = "tensorboard"

    def __init__(self, run: Path) -> None:
        super().__init__(run)
        from torch.utils.tensorboard import SummaryWriter

        self._new = cast(Any, SummaryWriter)

    def begin(self, launch: Mapping[str, Any]) -> None:
        """Open both folders; points from this launch's first step on are its own."""
        folder = self.run / "tensorboard"
        again = {"steps": launch["step"], "samples": launch["samples"] + 1}
        self._steps = self._new(str(folder), purge_step=again["steps"], flush_secs=_FLUSH_SECONDS)
        self._samples = self._new(str(folder / "samples"), purge_step=again["samples"], flush_secs=_FLUSH_SECONDS)

    def record(self, values: Mapping[str, float], step: int, samples: int, time: float) -> None:
        """Each number is a scalar."""
        for name, value in values.items():
            self._steps.add_scalar(name, value, step, time)
            if name in OVER_SAMPLES:
                self._samples.add_scalar(OVER_SAMPLES[name], value, samples, time)

    def flush(self) -> None:
        """Write the files."""
        self._steps.flush()
        self._samples.flush()

    def end(self) -> None:
        """Flush and close."""
        self._steps.close()
        self._samples.close()


RECORDER = TensorBoard
