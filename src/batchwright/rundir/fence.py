"""The fence: `RUN/launch.json` holds the number of the launch that may write. No other launch may."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from batchwright.core.codec import SCHEMA
from batchwright.core.errors import EnvironmentFault, RunError

from . import names
from .files import read_json, write_json

MOST_LAUNCHES = 10**9  # a larger number is damage


@dataclass(frozen=True)
class Fence:
    """The right of a launch to write to a run; a call returns whether the launch still has it."""

    run: Path
    launch: int

    def __call__(self) -> bool:
        return self.current(self.run) == self.launch

    @staticmethod
    def current(run: Path) -> int | None:
        """The launch that may write now; None before the first. A RunError if the file is damaged."""
        path = run / names.FENCE
        if not os.path.lexists(path):
            return None
        found = read_json(path)
        number = cast("dict[str, Any]", found).get("launch") if isinstance(found, dict) else None
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number <= MOST_LAUNCHES:
            raise RunError(
                f"{path} is damaged: launch is {str(number)[:40]!r}, and must be a number from 0 to {MOST_LAUNCHES:,}. "
                'Write the largest number in launches/ to it: {"schema": 1, "launch": NUMBER}.',
                field=path.name,
                given=str(path),
            )
        return number

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
