"""Checkpoints of other frameworks are folders that are written file by file. A seal, written last, says that one is complete.

The seal lists the size of every file and holds the position. So weights, optimizer and position belong together, or the
checkpoint does not count: after a kill in the middle of a save, the one before it is the newest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from batchwright.core.codec import SCHEMA
from batchwright.rundir.files import find_object, write_json

SEAL = "batchwright.json"


def seal(folder: Path, state: Mapping[str, Any]) -> None:
    """Declare a checkpoint complete."""
    write_json(folder / SEAL, {"schema": SCHEMA, **state, "files": _sizes(folder)})


def unseal(folder: Path) -> None:
    """Declare a checkpoint incomplete, before anything is written to it."""
    (folder / SEAL).unlink(missing_ok=True)


def sealed(folder: Path) -> dict[str, Any] | None:
    """The state of a complete checkpoint; None if there is no seal, or a file is missing or has another size."""
    found = find_object(folder / SEAL)
    files = found.get("files") if found else None
    if found is None or not isinstance(files, dict):
        return None
    present = _sizes(folder)
    wanted = cast("dict[str, Any]", files)
    return found if all(present.get(name) == size for name, size in wanted.items()) else None


def newest(folders: Iterable[Path]) -> tuple[Path, dict[str, Any]] | None:
    """The complete checkpoint with the largest launch and position, and its state."""
    found = [(folder, state) for folder in folders if (state := sealed(folder)) is not None]
    return max(found, key=lambda entry: (entry[1].get("launch", -1), entry[1].get("position", -1)), default=None)


def _sizes(folder: Path) -> dict[str, int]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != SEAL)
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}
