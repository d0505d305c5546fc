"""`FILE.py:function`, as probe, estimate, check and run all take it."""

from __future__ import annotations

from pathlib import Path

from .errors import ConfigError


def task_file(target: str) -> tuple[Path, str]:
    """The file and the function (`task` when none is named); the file has to be there.

    >>> task_file("missing.py:task")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    batchwright.core.errors.ConfigError: task file missing.py does not exist (looked for it at ...).
    """
    file, separator, name = target.rpartition(":")
    if not separator or not file.endswith(".py"):
        file, name = target, "task"
    path = Path(file).expanduser().absolute()
    if not path.is_file():
        raise ConfigError(f"task file {file} does not exist (looked for it at {path}).", field="task", given=target)
    return path, name
