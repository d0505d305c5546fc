"""The run directory as its supervisor uses it: the plan, the launches, the events and the lock.

`rundir/names.py` lists the files. Every file but the events is replaced as a whole.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from batchwright.core import codec
from batchwright.core.batch.world import World
from batchwright.core.errors import ConfigError, EnvironmentFault
from batchwright.core.nodes.feasibility import StageRules
from batchwright.processes.guard import start_time
from batchwright.rundir import atomic, files, names
from batchwright.rundir.fence import Fence
from batchwright.rundir.files import JsonLines, find_object

from .records import Ending, Manifest, RunPlan, is_handle

T = TypeVar("T")

LOCK_PATIENCE = 2.0  # seconds: `--status` takes the lock for a moment to see whether it is free


def write_json(path: Path, document: Any) -> None:
    """Write a document that only its owner may read: it may hold environment values. An argument may be NaN or infinite."""
    files.write_json(path, document, mode=0o600, allow_nan=True)


def modified(path: Path) -> float | None:
    """When a file was last changed or touched; None if it cannot be read."""
    try:
        return path.stat().st_mtime
    except OSError:
        return None


class RunDirectory:
    """The files of one run; a ConfigError if no file can have this path. `name` is what the user gave the path as."""

    def __init__(self, path: str | os.PathLike[str], name: str = "dir") -> None:
        self._lock: int | None = None
        try:
            if not os.fspath(path):
                raise ValueError("it is empty")  # an unset variable of a shell, and not the current directory
            self.path = Path(path).expanduser().absolute()
            if max(len(os.fsencode(part)) for part in self.path.parts) > 255:
                # Below a directory that does not exist, stat does not notice it.
                raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
            os.stat(self.path)
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            pass
        except (OSError, RuntimeError, ValueError) as error:
            # A user without a home, a name of more than 255 bytes, a loop of links, text that is no file name.
            reason = error.strerror if isinstance(error, OSError) else str(error).rstrip(".")
            shown = (str(path) if len(str(path)) <= 120 else f"{str(path)[:120]}...") or "''"
            raise ConfigError(
                f"{name} {shown}: not a usable path: {reason}.", field=name.removeprefix("--"), given=shown
            ) from None

    @property
    def exists(self) -> bool:
        """Whether this directory holds a run."""
        return (self.path / names.PLAN).exists()

    def check_kept(self) -> None:
        """Stop if the run was removed or replaced since it was locked: everything would start again at 0."""
        if self._lock is not None and self._is_lost(self._lock):
            raise EnvironmentFault(
                f"{self.path} was removed or replaced while its run was in progress: its plan and checkpoints are gone, and "
                "the run does not start again at sample 0 by itself. Restore the directory and use --resume, or start a "
                "new run.",
                field="dir",
                given=str(self.path),
            )

    def _is_lost(self, lock: int) -> bool:
        """Whether the plan is gone, or the lock is another file than the one that is held."""
        try:
            os.stat(self.path / names.PLAN)
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:  # perhaps a transient error
            return False
        try:
            return not os.path.samestat(os.stat(self.path / names.LOCK), os.fstat(lock))
        except OSError:
            return False

    def launch(self, number: int) -> Path:
        """The directory of one start."""
        return self.path / names.launch(number)

    def numbers(self) -> list[int]:
        """The numbers of all starts, in order."""
        folder = self.path / names.LAUNCHES
        # A longer number, or one in other digits than 0 to 9, was not written by a supervisor.
        found = [int(name) for name in names.listed(folder) if name.isdecimal() and name.isascii() and len(name) < 12]
        return sorted(number for number in found if (self.launch(number) / "manifest.json").exists())

    def plan(self) -> RunPlan:
        """The plan of the run; a ConfigError if it is damaged, an EnvironmentFault if it cannot be read."""
        from .settings import checked  # settings of a site write to a RunDirectory

        path = self.path / names.PLAN
        try:
            document = files.parse_object(files.read_bytes(path))
        except (FileNotFoundError, NotADirectoryError):
            what = "holds no run" if self.path.is_dir() else "does not exist"
            raise ConfigError(
                f"{self.path} {what}: it has no readable plan.json. Start a run with batchwright run … --dir DIR.",
                field="dir",
                given=str(self.path),
            ) from None
        except OSError as error:
            raise EnvironmentFault(
                f"{path} cannot be read: {error.strerror}.", field="dir", given=str(self.path)
            ) from None
        except ValueError as error:
            raise ConfigError(f"{path} is damaged: {error}.", field="dir", given=str(self.path)) from None
        if document.get("schema") != codec.SCHEMA:
            raise ConfigError(
                f"{path} has schema {str(document.get('schema'))[:40]}, and this version reads {codec.SCHEMA}: "
                "it was written by another version of batchwright.",
                field="dir",
                given=str(document.get("schema"))[:40],
                nearest=(codec.SCHEMA,),
            )
        try:
            return checked(codec.read(RunPlan, _with_rules(document)))
        except (TypeError, LookupError, ArithmeticError, AttributeError, ValueError) as error:
            raise ConfigError(f"{path} is damaged: {error}.", field="dir", given=str(self.path)) from None

    def manifest(self, number: int) -> Manifest | None:
        """What was started with this number; without its handle if that is damaged."""
        found = self._record(Manifest, number, "manifest.json")
        return found and (found if is_handle(found.handle or {}) else replace(found, handle=None))

    def ending(self, number: int) -> Ending | None:
        """How it ended; None while it runs, or if no supervisor recorded it."""
        return self._record(Ending, number, "ending.json")

    def _record(self, kind: type[T], number: int, name: str) -> T | None:
        document = find_object(self.launch(number) / name)
        try:
            return None if document is None else codec.read(kind, document)
        except ValueError:
            return None

    def next_number(self) -> int:
        """The first launch number above all earlier ones, also above those of a loop that ran here without a supervisor."""
        return max([*self.numbers(), Fence.current(self.path) or 0]) + 1

    def fence(self, number: int) -> None:
        """From now on only this launch number may save; an error if a later launch has taken over."""
        Fence(self.path, number).claim()

    def event(self, kind: str, **values: Any) -> None:
        """Append a line to the supervisor's events. On a full disk, or if the run was removed, the line is lost."""
        path = self.path / names.EVENTS / names.SUPERVISOR_EVENTS
        if self._lock is not None and self._is_lost(self._lock):
            return
        line = json.dumps({"kind": kind, "time": round(time.time(), 3), **codec.encode(values)})
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "a", encoding="utf-8", opener=atomic.no_follow) as file:
                file.write(line + "\n")
        except OSError:
            pass

    def events(self) -> list[dict[str, Any]]:
        """The supervisor's events so far."""
        return JsonLines(self.path / names.EVENTS / names.SUPERVISOR_EVENTS).new()

    def free_bytes(self) -> int:
        """The free space of its disk."""
        facts = os.statvfs(self.path)
        return facts.f_bavail * facts.f_frsize

    def lock(self, *, fresh: bool = False) -> None:
        """Become the supervisor of this run; an EnvironmentFault names the process that is. Nothing if it is held already.

        `fresh`: remove a stop request, as it was for an earlier supervisor.
        """
        if self._lock is not None:
            return
        self.path.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = atomic.no_follow(self.path / names.LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.EINVAL, errno.EISDIR):
                raise
            raise EnvironmentFault(
                f"{self.path}/lock cannot be used: {error.strerror}. Remove it, or choose a directory that only you may "
                "write to.",
                field="dir",
                given=str(self.path),
            ) from None
        deadline = time.monotonic() + LOCK_PATIENCE
        while not (got := _try_lock(descriptor, fcntl.LOCK_EX)):
            owner = _owner(descriptor)
            if got is None and (not _runs_here(owner) or owner[0] == str(os.getpid())):
                break
            if time.monotonic() > deadline:
                os.close(descriptor)
                raise EnvironmentFault(
                    f"{self.path} is being run by another supervisor (process {' on '.join(owner[:2]) or 'unknown'}). See "
                    "batchwright run --status DIR, or stop it with batchwright run --stop DIR.",
                    field="dir",
                    given=str(self.path),
                )
            time.sleep(0.1)
        os.ftruncate(descriptor, 0)
        try:
            os.pwrite(descriptor, f"{os.getpid()} {socket.gethostname()} {start_time(os.getpid())}\n".encode(), 0)
        except OSError:  # a full disk: the lock holds without the name
            pass
        self._lock = descriptor
        if fresh:
            (self.path / names.STOP).unlink(missing_ok=True)

    def unlock(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            os.ftruncate(self._lock, 0)
            os.close(self._lock)
            self._lock = None

    def supervisor(self) -> int | None:
        """The process that holds the lock, 0 if it is unknown; None if the lock is free."""
        try:
            descriptor = atomic.regular(self.path / names.LOCK)
        except OSError:
            return None
        try:
            locked = _try_lock(descriptor, fcntl.LOCK_SH)
            owner = _owner(descriptor)
            if locked or (locked is None and not _runs_here(owner)):
                return None
            return int(owner[0]) if owner and owner[0].isdigit() else 0
        finally:
            os.close(descriptor)


def _with_rules(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """Rules for a plan of an older version, which has none: its devices, no pipeline, ragged if a stage is."""
    if "rules" in document:
        return document
    per_node, first = document["devices_per_node"], document["stages"][0]
    replica = max(1, first["nodes"] * per_node // first["data_parallel_size"])
    nodes = max(launch["nodes"] for launch in document["launches"])
    ragged = any(stage["ragged"] for stage in document["stages"])
    rules = StageRules(World(1, per_node, tensor_parallel=replica), nodes, allow_ragged=ragged)
    return {**document, "rules": codec.encode(rules)}


def _owner(descriptor: int) -> list[str]:
    """What the holder of a lock wrote into it: process, host and start time of that process; or nothing."""
    return os.pread(descriptor, 300, 0).decode("utf-8", "replace").split()


def _runs_here(owner: list[str]) -> bool:
    """Whether the owner still runs on this host: the only evidence on a file system without locks."""
    if len(owner) != 3 or not owner[0].isdigit() or owner[1] != socket.gethostname():
        return False
    began = start_time(int(owner[0]))
    return began is not None and str(began) == owner[2]  # else the number was given to another process


def _try_lock(descriptor: int, how: int) -> bool | None:
    """Whether the lock was taken; None on a file system without locks, such as Lustre without -o flock."""
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
            raise
        return None
