"""Which trackers a run can have, and which run of theirs belongs to a run directory.

`RUN/trackers/wandb.json` holds the id of the run in Weights & Biases, so that all launches continue that one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

from batchwright.core.errors import MissingExtraError, RunError, Violation, raise_violations

from . import names
from .files import create_once, find_object

TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")  # each is the name of its package, too


def require(trackers: Sequence[str]) -> None:
    """An error that names every tracker whose package is not installed. Nothing is imported."""
    raise_violations(
        MissingExtraError,
        [
            Violation(f"the tracker {name} needs a package that is not installed: pip install {name}.", "tracker", name)
            for name in trackers
            if find_spec(name) is None
        ],
    )


def identity(run: Path, tracker: str, make: Callable[[], str]) -> tuple[str, bool]:
    """The id of this run in a tracker, and whether an earlier launch has used it. Of several launches, one makes it."""
    path = run / names.TRACKERS / f"{tracker}.json"
    known = path.exists()
    if not known:
        path.parent.mkdir(parents=True, exist_ok=True)
        known = not create_once(path, {"schema": 1, "id": make()})
    found = (find_object(path) or {}).get("id")
    if not isinstance(found, str) or not found:
        raise RunError(
            f"{path} is damaged: it holds no id. Remove it to start a new run in {tracker}.", field=path.name
        )
    return found, known
