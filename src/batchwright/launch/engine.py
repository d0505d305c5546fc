"""What the supervisor needs of an engine: start, poll, signal, logs.

A handle is plain JSON. The manifest of the launch holds it, so that a new supervisor can ask about a launch that an
earlier one started.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Protocol

from batchwright.core.errors import ConfigError, MissingExtraError
from batchwright.processes.guard import process_state
from batchwright.processes.start import TAIL_BYTES
from batchwright.processes.target import is_jax_task
from batchwright.rundir import atomic
from batchwright.rundir.files import find_object
from batchwright.rundir.names import listed
from batchwright.rundir.trackers import require

from .records import Options

Handle = Mapping[str, Any]
Action = Literal["checkpoint", "trace", "kill"]

ENGINES = ("local", "slurm")


@dataclass(frozen=True)
class Job:
    """One launch for an engine: what each rank runs (if `direct`: the one command), where, and with how many ranks."""

    name: str
    directory: Path  # of this launch: the engine makes ranks/ and logs/ in it
    nodes: int
    ranks_per_node: int
    argv: tuple[str, ...]
    direct: bool
    environment: Mapping[str, str]
    working_directory: Path
    stop_signal: str
    grace_seconds: float
    launcher: Literal["torchrun", "processes"] = "torchrun"
    """What starts the ranks on this machine; a JAX program has one process per node, which is a rank here."""


@dataclass(frozen=True)
class Poll:
    """Whether a launch waits, runs or has ended; `code` is shown, and decides nothing about the position."""

    state: Literal["pending", "running", "ended"]
    code: int | None = None
    detail: str = ""


@dataclass(frozen=True)
class RankLog:
    """One rank, from its files and /proc; `state` is the letter of /proc, `code` is None while it runs."""

    rank: int
    pid: int | None
    state: str | None
    code: int | None
    ended: float | None
    path: Path

    @property
    def tail(self) -> str:
        """The end of its log, read when it is asked for: of thousands of ranks, one log is usually enough."""
        return tail(self.path)


class Engine(Protocol):
    """Start, poll, signal, logs."""

    name: str

    def command(self, job: Job) -> tuple[str, ...]:
        """The command that `start` would run, for a dry run."""
        ...

    def start(self, job: Job) -> Handle:
        """Start a launch; the handle finds it again."""
        ...

    def poll(self, handle: Handle) -> Poll:
        """Whether the launch waits, runs or has ended."""
        ...

    def signal(self, handle: Handle, action: Action) -> None:
        """Ask every rank to save and stop (checkpoint) or to write its stack (trace), or end all of them (kill)."""
        ...

    def logs(self, handle: Handle) -> tuple[RankLog, ...]:
        """Every rank's state and log, from files of every rank: not for every poll."""
        ...


def engine(name: str, *, owns_process: bool = False) -> Engine:
    """The engine of this name. `owns_process`: this process supervises, and does nothing else."""
    if name == "local":
        from .local import LocalEngine

        return LocalEngine(owns_process)
    if name == "slurm":
        from .slurm.engine import SlurmEngine

        return SlurmEngine()
    raise ConfigError(
        f"engine={name[:40]!r} is not one of {', '.join(ENGINES)}.", field="engine", given=name[:40], nearest=ENGINES
    )


def check_machine(options: Options, *, direct: bool, target: str = "") -> None:
    """An error if this machine lacks what a run needs for a task, or for a command (`direct`).

    On Slurm the ranks may run in a container, with packages of its own: they check for trackers themselves.
    """
    if direct and options.tracker:
        raise ConfigError(
            f"tracker={options.tracker[0]} needs a task: a command records its numbers itself.",
            field="tracker",
            given=options.tracker[0],
        )
    if options.engine == "slurm":
        from .slurm.commands import check_installed

        check_installed()
    elif not direct and is_jax_task(target):
        missing = [name for name in ("jax", "optax", "orbax") if find_spec(name) is None]
        if missing:
            raise MissingExtraError(
                f"a JaxTask needs {', '.join(missing)}, which is not installed: pip install 'batchwright[jax]'.",
                field="task",
            )
        require(options.tracker)
    elif not direct and find_spec("torch") is None:
        raise MissingExtraError(
            "a task needs torch, which is not installed: pip install 'batchwright[torch]'. A command of your own "
            "(batchwright run … -- COMMAND) does not.",
            field="task",
        )
    else:
        require(options.tracker)


def rank_logs(directory: Path, ranks: Iterable[int] | None = None, *, alive: bool = True) -> tuple[RankLog, ...]:
    """These ranks of a launch, or all, from the files that `rank.py` writes; with `alive`, their state from /proc."""
    folder = directory / "ranks"
    found: list[RankLog] = []
    for rank in sorted(_started(listed(folder))) if ranks is None else ranks:
        begun = find_object(folder / f"{rank}.json") or {}
        ended = find_object(folder / f"{rank}.exit.json") or {}
        pid, code, when = _whole(begun.get("pid")), _whole(ended.get("code")), ended.get("time")
        state = process_state(pid, _whole(begun.get("start_time"))) if alive and pid and code is None else None
        path = directory / "logs" / f"rank-{rank}.log"
        found.append(RankLog(rank, pid, state, code, when if isinstance(when, float) else None, path))
    return tuple(found)


def _whole(value: object) -> int | None:
    """A whole number; None for everything else, as the file may be damaged."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def all_ended(directory: Path) -> bool:
    """Whether every rank of a launch that started has ended: one listing and no file, for every poll."""
    names = listed(directory / "ranks")
    started = _started(names)
    return bool(started) and {f"{rank}.exit.json" for rank in started}.issubset(names)


def _started(names: Iterable[str]) -> list[int]:
    return [int(name[:-5]) for name in names if name.endswith(".json") and name[:-5].isdecimal()]


def tail(path: Path, size: int = TAIL_BYTES) -> str:
    """The end of a log."""
    try:
        with open(path, "rb", opener=atomic.regular) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - size))
            return file.read(size).decode("utf-8", "replace").replace("\r", "\n")
    except OSError:
        return ""
