"""Who may run a launch: one job, ever. A claim is a file that can be made once, whole, on any file system.

`os.link` fails where the name is taken, on NFS and Lustre too, and the file has its contents from its first moment. What
is alive is asked of Slurm; where the controller is away, a claim that its owner touches every few seconds says so.
"""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

from batchwright.core import codec
from batchwright.launch.directory import RunDirectory, write_json
from batchwright.rundir.files import find_json

from . import commands as slurm

BEAT_SECONDS = 5.0
SILENT_SECONDS = 120.0  # without a beat, and without a controller to ask: gone
_COMPLETING_SECONDS = 60.0  # a job whose processes have been killed may be cleaned up for that long


def create_once(path: Path, document: Any) -> bool:
    """Make a JSON file that nobody has made before; False where somebody has."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.once")
    write_json(beside, codec.encode(document))
    try:
        os.link(beside, path)
        return True
    except FileExistsError:
        return os.stat(beside).st_nlink > 1  # NFS: it was made, the answer was lost, and the question asked again
    except OSError:  # no hard links here: the next best, which may show an empty file for an instant
        try:
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(beside.read_bytes())
            return True
        except FileExistsError:
            return False
    finally:
        beside.unlink(missing_ok=True)


class JobRecord:
    """`launches/0003/job.json`: which job runs a launch, since when, and how it left. The first to make it owns it."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "job.json"
        self._beat = 0.0
        self._known: dict[str, Any] = {}

    def claim(self) -> bool:
        """Become the owner; False where another is, or was."""
        self._known = {
            "job": slurm.me(),
            "state": "running",
            "nodes": int(os.environ.get("SLURM_JOB_NUM_NODES", "0")) or None,
            "host": socket.gethostname(),
            "started": time.time(),
            "ended": None,
            "code": None,
            "detail": "",
        }
        return create_once(self.path, self._known)

    def beat(self) -> None:
        """A sign of life, now and then."""
        if time.monotonic() - self._beat > BEAT_SECONDS:
            self._beat = time.monotonic()
            try:
                os.utime(self.path)
            except OSError:
                pass

    def end(self, code: int | None, detail: str = "") -> None:
        """How it left."""
        self._known |= {"state": "ended", "ended": time.time(), "code": code, "detail": detail}
        write_json(self.path, self._known)


def owner_lives(directory: RunDirectory, number: int, job: str | None, mark: str) -> bool:
    """Whether the job that has claimed a launch may still write; `mark` is how the run's jobs are known."""
    path = directory.launch(number) / "job.json"
    record = find_json(path) or {}
    if record.get("state") == "ended" or job is None:
        return False
    deadline = time.monotonic() + _COMPLETING_SECONDS
    while True:
        try:
            known = slurm.job(job, mark)
        except slurm.Unreachable:
            return _beats(path)
        if known is None or known.state != "COMPLETING":
            return known is not None and known.alive
        if time.monotonic() > deadline or (find_json(path) or {}).get("state") == "ended":
            return False
        time.sleep(0.5)


def _beats(path: Path) -> bool:
    """Whether somebody still touches a claim. Waited for: a spare that gave up at once would be one fewer for nothing."""
    last = _modified(path)
    while _age(path) < SILENT_SECONDS:
        time.sleep(min(1.0, BEAT_SECONDS))
        if (find_json(path) or {}).get("state") == "ended":
            return False
        if _modified(path) != last:
            return True
    return False


def _modified(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def _age(path: Path) -> float:
    """Since a file was touched, by the clock of the file system it is on."""
    probe = path.with_name(f".clock.{socket.gethostname()}.{os.getpid()}")
    try:
        probe.touch()
        return probe.stat().st_mtime - path.stat().st_mtime
    except OSError:
        return float("inf")
    finally:
        probe.unlink(missing_ok=True)
