"""The record of one checkpoint on disk, whichever framework saved its arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Saved:
    """A checkpoint on disk. `state` is the content of state.json: the argument of `save` and what `save` added.

    >>> Saved(Path("step-000000000012-launch-00003"), step=12, launch=3).name
    'step-000000000012-launch-00003'
    """

    path: Path
    step: int
    launch: int
    state: Mapping[str, Any] = field(default_factory=dict[str, Any])
    skipped: tuple[str, ...] = ()
    """A message for each newer checkpoint that is damaged, with the name of the damaged file."""

    @property
    def name(self) -> str:
        """The name of its folder."""
        return self.path.name

    @property
    def position(self) -> int:
        """The first sample that is not trained yet."""
        return int(self.state["position"])
