"""The Trainer's checkpoints as folders: which one continues, and whether its files name one position."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers.trainer_callback import TrainerState

from batchwright.core.errors import RunError

from .sealed import INTERRUPTED, fault
from .sealed import newest as newest_sealed

NAME = "batchwright"  # of the position in trainer_state.json
logger = logging.getLogger(__name__)


def check_position(folder: Path, state: Mapping[str, Any]) -> None:
    """The seal and the Trainer's own file must name one position."""
    callbacks: Any = TrainerState.load_from_json(str(folder / "trainer_state.json")).stateful_callbacks
    position = (callbacks.get(NAME) or {}).get("attributes", {}).get("position")
    if position != state.get("position"):
        raise RunError(
            f"{folder} is inconsistent: trainer_state.json has position {position}, batchwright.json {state.get('position')}.",
            field="resume_from_checkpoint",
            given=str(folder),
        )


def newest(output: Path) -> tuple[Path, dict[str, Any]] | None:
    """The newest complete checkpoint; None if there is none, but an interrupted first save. Others would be overwritten."""
    folders = sorted(output.glob("checkpoint-*"), key=lambda folder: (len(folder.name), folder.name))
    found, faults = newest_sealed(folders), {folder.name: text for folder in folders if (text := fault(folder))}
    told = "; ".join(f"{name}: {text}" for name, text in faults.items())
    if found is None and any(text != INTERRUPTED for text in faults.values()):
        raise RunError(
            f"no checkpoint in {output} can be continued. {told}. Give another output_dir, or train with "
            "resume_from_checkpoint=False, which starts at sample 0 and overwrites them.",
            field="resume_from_checkpoint",
            given=str(output),
        )
    if faults:
        start = f"continues from {found[0].name}" if found else "starts at sample 0"
        logger.warning("In %s training %s. Not complete: %s.", output, start, told)
    return found
