"""The run directory as its supervisor uses it: the plan, the launches, the events and the lock.

Every file is written whole or not at all; `rundir/names.py` lists them.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from batchwright.core import codec
from batchwright.core.batch.world import World
from batchwright.core.errors import ConfigError, EnvironmentFault
from batchwright.core.nodes.feasibility import StageRules
from batchwright.processes.guard import start_time
from batchwright.rundir import atomic, files, names
from batchwright.rundir.fence import Fence
from batchwright.rundir.files import find_json

from .records import Ending, Manifest, RunPlan

T = TypeVar("T")

LOCK_PATIENCE = 2.0  # seconds: `--status` holds the lock for an instant to see whether anybody else does


def write_json(path: Path, document: Any) -> None:
    """Write a document of a run, for the owner only: it may hold environment values."""
    files.write_json(path, document, mode=0o600)


class RunDirectory:
    """The files of one run."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).expanduser().absolute()
        self._lock: int | None = None

    @property
    def exists(self) -> bool:
        """Whether a run was ever begun here."""
        return (self.path / names.PLAN).exists()

    def launch(self, number: int) -> Path:
        """The directory of one start."""
        return self.path / names.launch(number)

    def numbers(self) -> list[int]:
        """The numbers of all starts, in order."""
        folder = self.path / names.LAUNCHES
        found = [int(name) for name in names.listed(folder) if name.isdigit()]
        return sorted(number for number in found if (self.launch(number) / "manifest.json").exists())

    def plan(self) -> RunPlan:
        """The plan of the run, or an error that says what this directory is instead."""
        document = find_json(self.path / names.PLAN)
        if not isinstance(document, Mapping):
            what = "holds no run" if self.path.is_dir() else "does not exist"
            raise ConfigError(
                f"{self.path} {what}: there is no plan.json that can be read. Begin one with batchwright run … --dir DIR.",
                field="dir",
                given=str(self.path),
            )
        if document.get("schema") != codec.SCHEMA:
            raise ConfigError(
                f"{self.path}/plan.json has schema {document.get('schema')!r}, and this version reads {codec.SCHEMA}: "
                "it was written by another version of batchwright.",
                field="dir",
                given=document.get("schema"),
                nearest=(codec.SCHEMA,),
            )
        try:
            return codec.decode(RunPlan, _with_rules(document))
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise ConfigError(
                f"{self.path}/plan.json is damaged: {error}.", field="dir", given=str(self.path)
            ) from None

    def manifest(self, number: int) -> Manifest | None:
        """What was started under this number."""
        return self._record(Manifest, number, "manifest.json")

    def ending(self, number: int) -> Ending | None:
        """How it ended; None while it runs, or when nobody was there to see."""
        return self._record(Ending, number, "ending.json")

    def _record(self, kind: type[T], number: int, name: str) -> T | None:
        document = find_json(self.launch(number) / name)
        try:
            return codec.decode(kind, document) if isinstance(document, Mapping) else None
        except (TypeError, KeyError, AttributeError, ValueError):
            return None

    def fence(self, number: int) -> None:
        """From now on only this launch number may save."""
        Fence(self.path, number).take()

    def event(self, kind: str, **values: Any) -> None:
        """Append a line to the supervisor's events. A full disk loses the line, not the run."""
        path = self.path / "events" / "supervisor.jsonl"
        line = json.dumps({"kind": kind, "time": round(time.time(), 3), **codec.encode(values)}, ensure_ascii=False)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "a", encoding="utf-8", opener=atomic.no_follow) as file:
                file.write(line + "\n")
        except OSError:
            pass

    def events(self) -> list[dict[str, Any]]:
        """The supervisor's events so far."""
        found: list[dict[str, Any]] = []
        try:
            lines = (self.path / "events" / "supervisor.jsonl").read_text(encoding="utf-8").splitlines()
        except OSError:
            return found
        for line in lines:
            try:
                found.append(json.loads(line))
            except ValueError:  # the last line of a supervisor that was killed
                continue
        return found

    def free_bytes(self) -> int:
        """What its disk has left for us."""
        facts = os.statvfs(self.path)
        return facts.f_bavail * facts.f_frsize

    def lock(self, *, fresh: bool = False) -> None:
        """Become the supervisor of this run, or say who is; who is it already stays it.

        `fresh`: a wish to stop was for the one before. From this moment on it is for us.
        """
        if self._lock is not None:
            return
        self.path.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(self.path / names.LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            raise EnvironmentFault(
                f"{self.path}/lock is a symbolic link, and batchwright does not write through links. Remove it, or choose a "
                "directory that only you may write to.",
                field="dir",
                given=str(self.path),
            ) from None
        deadline = time.monotonic() + LOCK_PATIENCE
        while not (got := _try_lock(descriptor, fcntl.LOCK_EX)):
            owner = _owner(descriptor)
            if got is None and (not _lives(owner) or owner[0] == str(os.getpid())):
                break
            if time.monotonic() > deadline:
                os.close(descriptor)
                raise EnvironmentFault(
                    f"{self.path} is being run by another supervisor (process {' on '.join(owner[:2]) or 'unknown'}). Follow "
                    "it with batchwright run --status DIR, or end it with batchwright run --stop DIR.",
                    field="dir",
                    given=str(self.path),
                )
            time.sleep(0.1)
        os.ftruncate(descriptor, 0)
        try:
            os.pwrite(descriptor, f"{os.getpid()} {socket.gethostname()} {start_time(os.getpid())}\n".encode(), 0)
        except OSError:  # a full disk: the name is a courtesy, the lock is what counts
            pass
        self._lock = descriptor
        if fresh:
            (self.path / names.STOP).unlink(missing_ok=True)

    def unlock(self) -> None:
        """Stop being its supervisor."""
        if self._lock is not None:
            os.ftruncate(self._lock, 0)
            os.close(self._lock)
            self._lock = None

    def supervisor(self) -> int | None:
        """The process that holds the lock, 0 where it does not say who it is, or None."""
        try:
            descriptor = os.open(self.path / names.LOCK, os.O_RDONLY)
        except OSError:
            return None
        try:
            locked = _try_lock(descriptor, fcntl.LOCK_SH)
            owner = _owner(descriptor)
            if locked or (locked is None and not _lives(owner)):
                return None
            return int(owner[0]) if owner and owner[0].isdigit() else 0
        finally:
            os.close(descriptor)


def _with_rules(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """A plan of a version that wrote no rules: its devices as they are, raggedness where a stage has it, no pipeline."""
    if "rules" in document:
        return document
    per_node, first = document["devices_per_node"], document["stages"][0]
    replica = max(1, first["nodes"] * per_node // first["data_parallel_size"])
    nodes = max(launch["nodes"] for launch in document["launches"])
    ragged = any(stage["ragged"] for stage in document["stages"])
    rules = StageRules(World(1, per_node, tensor_parallel=replica), nodes, allow_ragged=ragged)
    return {**document, "rules": codec.encode(rules)}


def _owner(descriptor: int) -> list[str]:
    """Who wrote itself into a lock: process, host and when that process began; or nobody."""
    return os.pread(descriptor, 300, 0).decode("utf-8", "replace").split()


def _lives(owner: list[str]) -> bool:
    """Whether it does, as far as can be seen from here: where there are no locks, that is all there is to go by."""
    if len(owner) != 3 or not owner[0].isdigit() or owner[1] != socket.gethostname():
        return False
    began = start_time(int(owner[0]))
    return began is not None and str(began) == owner[2]  # not another process that has its number now


def _try_lock(descriptor: int, how: int) -> bool | None:
    """Whether the lock is ours now; None on a file system without locks, such as Lustre without -o flock."""
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
            raise
        return None
