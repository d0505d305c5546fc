"""The fence: `RUN/launch.json` holds the number of the launch that may write. No other launch may."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from batchwright.core.codec import SCHEMA
from batchwright.core.errors import EnvironmentFault

from . import names
from .files import read_json, write_json


@dataclass(frozen=True)
class Fence:
    """The right of a launch to write to a run; a call returns whether the launch still has it."""

    run: Path
    launch: int

    def __call__(self) -> bool:
        return self.current(self.run) == self.launch

    @staticmethod
    def current(run: Path) -> int | None:
        """The launch that may write now; None before the first."""
        path = run / names.FENCE
        return int(read_json(path)["launch"]) if path.exists() else None

    def claim(self) -> Fence:
        """Take over the run from an earlier launch; an error if a later launch has taken over."""
        current = self.current(self.run)
        if current is not None and current > self.launch:
            raise EnvironmentFault(
                f"launch={self.launch} is too late: launch {current} has taken over {self.run}. Nothing was changed. "
                f"Nearest: {current + 1}.",
                field="launch",
                given=self.launch,
                nearest=(current + 1,),
            )
        if current != self.launch:
            write_json(self.run / names.FENCE, {"schema": SCHEMA, "launch": self.launch})
        return self
