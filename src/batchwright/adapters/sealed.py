"""Checkpoints of other frameworks are folders that are written file by file. A seal, written last, says that one is complete.

The seal lists the size of every file and holds the position. So weights, optimizer and position belong together, or the
checkpoint does not count: after a kill in the middle of a save, the one before it is the newest.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from batchwright.core.codec import SCHEMA
from batchwright.rundir.files import find_object, write_json

SEAL = "batchwright.json"
INTERRUPTED = "its save was interrupted"


def seal(folder: Path, state: Mapping[str, Any]) -> None:
    """Declare a checkpoint complete."""
    write_json(folder / SEAL, {"schema": SCHEMA, **state, "files": _sizes(folder)})


def unseal(folder: Path) -> None:
    """Declare a checkpoint incomplete, before anything is written to it."""
    write_json(folder / SEAL, {"schema": SCHEMA, "files": None})


def sealed(folder: Path) -> dict[str, Any] | None:
    """The state of a complete checkpoint; None if it has a fault."""
    return None if fault(folder) else find_object(folder / SEAL)


def fault(folder: Path) -> str:
    """Why a checkpoint is not complete; empty if it is."""
    found = find_object(folder / SEAL)
    if found is None:
        return f"it has no {SEAL}, so it was saved without batchwright"
    files = found.get("files")
    if not isinstance(files, dict):
        return INTERRUPTED
    present = _sizes(folder)
    for name, size in cast("dict[str, Any]", files).items():
        if name not in present:
            return f"{name} is missing"
        if present[name] != size:
            return f"{name} has {present[name]} bytes, and had {size}"
    return ""


def newest(folders: Iterable[Path]) -> tuple[Path, dict[str, Any]] | None:
    """The complete checkpoint with the largest launch and position, and its state."""
    return next(reversed(_in_order(folders)), None)


def rotate(folders: Iterable[Path], limit: int | None, kept: Collection[Path]) -> None:
    """Delete the oldest complete checkpoints, by launch and position, until `limit` are left; never those of `kept`."""
    found, keep = [folder for folder, _ in _in_order(folders)], {folder.resolve() for folder in kept}
    surplus = len(found) - max(limit, len(keep)) if limit and limit > 0 else 0
    for folder in [folder for folder in found if folder.resolve() not in keep][: max(0, surplus)]:
        unseal(folder)
        shutil.rmtree(folder, ignore_errors=True)


def _in_order(folders: Iterable[Path]) -> list[tuple[Path, dict[str, Any]]]:
    """The complete checkpoints, oldest first. Not by the clock: two saves may be closer than its ticks."""
    found = [(folder, state) for folder in folders if (state := sealed(folder)) is not None]
    return sorted(found, key=lambda entry: (entry[1].get("launch", -1), entry[1].get("position", -1)))


def _sizes(folder: Path) -> dict[str, int]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != SEAL)
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}
