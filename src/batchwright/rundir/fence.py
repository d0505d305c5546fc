"""The fence: `RUN/launch.json` holds the number of the launch that may write. Every other launch is old."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from batchwright.core.codec import SCHEMA
from batchwright.core.errors import EnvironmentFault

from . import names
from .files import read_json, write_json


@dataclass(frozen=True)
class Fence:
    """The right of one launch to write to a run; called, it says whether the launch still has it."""

    run: Path
    launch: int

    def __call__(self) -> bool:
        return self.current(self.run) == self.launch

    @staticmethod
    def current(run: Path) -> int | None:
        """The launch that may write now, or None before the first."""
        path = run / names.FENCE
        return int(read_json(path)["launch"]) if path.exists() else None

    def take(self) -> None:
        """From now on only this launch may write."""
        write_json(self.run / names.FENCE, {"schema": SCHEMA, "launch": self.launch})

    def claim(self) -> Fence:
        """Take over from an earlier launch; refused where a later one has taken over."""
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
            self.take()
        return self
