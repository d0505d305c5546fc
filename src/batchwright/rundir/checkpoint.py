"""The checkpoints of a run, and whether one is complete. `runtime/state/checkpoint.py` writes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from batchwright.core.codec import SCHEMA
from batchwright.core.errors import RunError

from . import names
from .files import digest_of, read_json

MANIFEST, STATE = "manifest.json", "state.json"


def listing(directory: Path) -> list[tuple[str, int, int]]:
    """The checkpoints in a directory as (name, step, launch), newest first: by launch, then by step.

    >>> listing(Path("nowhere"))
    []
    """
    found = [(name, *numbers) for name in names.listed(directory) if (numbers := names.read_checkpoint(name))]
    return sorted(found, key=lambda entry: (entry[2], entry[1]), reverse=True)


@dataclass(frozen=True)
class CheckpointFiles:
    """The manifest of a checkpoint: the size and SHA-256 of every other file."""

    path: Path
    schema: object
    files: Mapping[str, Any]

    def problem(self, verify: Callable[[int], bool] = lambda index: True) -> str | None:
        """What is wrong, or None: a file is missing, or its size or SHA-256 differs.

        `verify` is called with the index of each file and decides whether its SHA-256 is computed, so that ranks can share
        the work. state.json is small and always verified.
        """
        if STATE not in self.files:
            return f"{self.path / MANIFEST} lists no files."
        found = (self.problem_of(name, name == STATE or verify(i)) for i, name in enumerate(sorted(self.files)))
        return next((problem for problem in found if problem), None)

    def problem_of(self, name: str, verify: bool = True) -> str | None:
        """What is wrong with one file, or None."""
        manifest, file, facts = self.path / MANIFEST, self.path / name, _object(self.files.get(name))
        if ".." in Path(name).parts or Path(name).is_absolute():
            return f"{manifest} lists {name}, outside of the checkpoint."
        size = file.stat().st_size if file.is_file() else None
        if size is None:
            return f"{file} is missing."
        wanted, digest = facts.get("size"), facts.get("sha256")
        if not isinstance(wanted, int) or not isinstance(digest, str):
            return f"{manifest} has no size and SHA-256 of {name}."
        if size != wanted:
            return f"{file} has {size:,} bytes, but {wanted:,} were written."
        if verify and (found := digest_of(file)) != digest:
            return f"{file} has SHA-256 {found[:12]}…, not {digest[:12]}…: its content changed."
        return None


def read_manifest(checkpoint: Path) -> CheckpointFiles:
    """The manifest of a checkpoint; a RunError that names the file if it cannot be read."""
    document = _object(read_json(checkpoint / MANIFEST))
    return CheckpointFiles(checkpoint, document.get("schema"), _object(document.get("files")))


def _object(value: object) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def refuse_newer(schema: object, path: Path) -> None:
    """Raise an error if a file has a newer schema than this version reads."""
    if isinstance(schema, int) and schema > SCHEMA:
        raise RunError(
            f"{path} has schema {schema}, but this version of batchwright reads up to {SCHEMA}: a newer version wrote it. "
            "Nothing was loaded or changed. Update batchwright to resume from it.",
            field="schema",
            given=schema,
            nearest=(SCHEMA,),
        )


def none_complete(directory: Path, skipped: Sequence[str]) -> RunError:
    """The error for a directory whose checkpoints are all damaged: a start from the beginning would train all samples again."""
    return RunError(
        f"none of the {len(skipped)} checkpoints in {directory} is complete:\n" + "\n".join(skipped) + "\n"
        "Nothing was loaded or changed. Restore a checkpoint from a backup, or start in another directory.",
        field="directory",
        given=str(directory),
    )


def positions(directory: Path, *, verify: bool = False) -> Iterator[int]:
    """The position of every complete checkpoint, newest first; with `verify`, the SHA-256 of every file is checked."""
    for name, _, _ in listing(directory):
        try:
            if read_manifest(directory / name).problem(lambda index: verify) is None:
                yield int(read_json(directory / name / STATE)["position"])
        except (RunError, OSError, TypeError, KeyError, ValueError):
            continue
