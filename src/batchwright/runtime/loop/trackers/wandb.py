"""Weights & Biases: one run for all launches, its files in `RUN/wandb`; online or offline as WANDB_MODE says."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from batchwright.rundir.events import last_step

from . import CLOSE_SECONDS, CONFIG, Recorder


class WandB(Recorder):
    """Logs rows by step. Charts show samples on their x axis unless the user chooses steps."""

    name = "wandb"

    def __init__(self, run: Path) -> None:
        super().__init__(run)
        import wandb

        self._wandb = cast(Any, wandb)

    def begin(self, launch: Mapping[str, Any]) -> None:
        """Start the run, or continue it: `resume` needs the id only."""
        wandb = self._wandb
        given = wandb.setup().settings  # with the user's environment
        # The streams of this process are its log. Without a limit, an exit without network takes minutes.
        wanted = {"console": "off", "finish_timeout": CLOSE_SECONDS / 2}
        self._run = wandb.init(
            id=self.identity(lambda: given.run_id or os.urandom(8).hex())[0],
            resume="allow",
            reinit="create_new",  # the user's own run in this process stays as it is
            project=given.project or "batchwright",
            name=given.run_name or self.run.name,
            dir=str(self.run),
            settings=wandb.Settings(**{k: v for k, v in wanted.items() if k in wandb.Settings.model_fields}),
        )
        self._run.config.update({name: launch.get(name) for name in CONFIG}, allow_val_change=True)
        for part in ("train", "evaluation"):
            self._run.define_metric(f"{part}/samples")
            self._run.define_metric(f"{part}/*", step_metric=f"{part}/samples")
        self._last = last_step(self.run, before=launch["launch"])
        self._held: dict[str, float] = {}

    def record(self, values: Mapping[str, float], step: int, samples: int, time: float) -> None:
        """One row per step. A run that was continued ignores the steps that it has, so the lost seconds wait for a new one."""
        if "launch/lost_seconds" in values:
            self._held = dict(values)
            return
        if step > self._last:
            values, self._held = {**self._held, **values}, {}
        self._run.log(dict(values), step=step)

    def end(self) -> None:
        """Finish; a launch that failed is a failed run, until the next launch continues it."""
        if self._held:
            self._run.log(self._held, step=self._last + 1)
        self._run.finish(exit_code=0 if self.stopped else 1)


RECORDER = WandB
