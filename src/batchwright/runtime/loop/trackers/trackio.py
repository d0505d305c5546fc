"""trackio: one run for all launches, in trackio's own folder, in a Space or on a server, as its variables say."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from . import CONFIG, Recorder


class Trackio(Recorder):
    """Logs rows by step. trackio finds a run by its name, so the name has an id in it."""

    name = "trackio"

    def __init__(self, run: Path) -> None:
        super().__init__(run)
        import trackio  # pyright: ignore[reportMissingImports]

        self._trackio = cast(Any, trackio)

    def begin(self, launch: Mapping[str, Any]) -> None:
        """Start the run, or continue the one of this name."""
        self._run = self._trackio.init(
            project="batchwright",
            name=self.identity(lambda: f"{self.run.name}-{os.urandom(4).hex()}")[0],
            resume="allow",
            config={name: launch.get(name) for name in CONFIG},
            embed=False,
        )
        # Without this attribute, steps would be recorded twice: the error leaves the tracker out, with a message.
        self.recorded = self._run._next_step
        if self.recorded:
            storage, run = import_module("trackio.sqlite_storage").SQLiteStorage, self._run
            rows = storage.get_metric_values(
                run.project, run.name, "evaluation/samples", step=self.recorded - 1, run_id=run.id
            )
            # Evaluations before the last step are known by their step. Of a server or a Space nothing is stored here.
            self.evaluated = max((int(row["value"]) for row in rows), default=0)

    def record(self, values: Mapping[str, float], step: int, samples: int, time: float) -> None:
        """One row per step."""
        self._run.log(dict(values), step=step)

    def end(self) -> None:
        """Write what is left."""
        self._run.finish()


RECORDER = Trackio
