"""Lightning's checkpoints as files: written whole, and which of them the next launch continues from."""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO

from batchwright.core.errors import RunError
from batchwright.rundir.atomic import sync_directory


class WholeFiles(TorchCheckpointIO):
    """Checkpoints on a local file system that are complete or absent, also after a kill in the middle of a save.

    Lightning writes to the directory for temporary files and moves the file from there. If that is another file system, the
    move is a copy, and a kill leaves a part of a checkpoint under its final name.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        if "://" in str(path) or storage_options is not None:
            return super().save_checkpoint(checkpoint, path, storage_options)
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        for left in target.parent.glob(f".{glob.escape(target.name)}.*.part"):  # by a launch that was killed
            left.unlink(missing_ok=True)
        temporary = target.with_name(f".{target.name}.{os.urandom(8).hex()}.part")
        try:
            with open(temporary, "xb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync_directory(target.parent)


def saves_last(trainer: Any) -> ModelCheckpoint | None:
    """The callback whose `last.ckpt` a launch continues from."""
    return next((c for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint) and c.save_last), None)


def last_path(callback: ModelCheckpoint) -> Path:
    if callback.last_model_path:
        return Path(callback.last_model_path)
    return Path(callback.dirpath or "") / f"{callback.CHECKPOINT_NAME_LAST}{callback.FILE_EXTENSION}"


def position(checkpoint: Mapping[str, Any] | None, path: str) -> tuple[Mapping[str, Any] | None, str]:
    """The state of `Steps` in a checkpoint, and the name of its file; an empty state has no position."""
    if checkpoint is None:
        return None, path
    if "optimizer_states" not in checkpoint:
        raise RunError(
            f"{path} has weights only (save_weights_only), so it cannot be continued. To train these weights from the first "
            "sample on, load them with load_from_checkpoint.",
            field="ckpt_path",
            given=path,
        )
    states = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {}).get("combined_loader", [])
    return states[0] if states else {}, path


def reopen(checkpoint: Mapping[str, Any]) -> None:
    """The run is one epoch. Where a launch ended, Lightning has saved it as complete, and would not continue."""
    loop = checkpoint["loops"]["fit_loop"]
    loop["epoch_loop.batch_progress"]["is_last_batch"] = False
    for progress in loop["epoch_progress"].values():
        if isinstance(progress, dict):
            progress["processed"] = progress["completed"] = max(0, progress["ready"] - 1)
