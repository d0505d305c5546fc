"""Which job runs a launch number: the first that claims it. A claim is a file that only one process can create.

Slurm says whether the owner of a claim is alive; without a controller, the owner's heartbeat (the time of its file) does.
"""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

from batchwright.launch.directory import modified, write_json
from batchwright.rundir.files import create_once, find_object

from . import commands as slurm

HEARTBEAT_SECONDS = 5.0
SILENT_SECONDS = 120.0  # without a heartbeat, and without a controller to ask: the owner is gone
_COMPLETING_SECONDS = 60.0  # Slurm may clean up for this long after it has killed the processes of a job


def job_record(launch: Path) -> dict[str, Any]:
    """`job.json` of a launch; empty if no job has claimed it yet, or if it cannot be read now."""
    return find_object(launch / "job.json") or {}


class JobRecord:
    """`launches/0003/job.json`: which job runs a launch, since when, and how it ended. Who creates it owns the launch."""

    def __init__(self, launch: Path) -> None:
        self.path = launch / "job.json"
        self._last_heartbeat = 0.0
        self._known: dict[str, Any] = {}

    def claim(self) -> bool:
        """Become the owner; False if another job is or was."""
        self._known = {
            "job": slurm.me(),
            "state": "running",
            "nodes": slurm.my_nodes()[0] or None,
            "host": socket.gethostname(),
            "started": time.time(),
            "ended": None,
            "code": None,
            "detail": "",
        }
        return create_once(self.path, self._known, mode=0o600)

    def heartbeat(self) -> None:
        """Touch the record, every few seconds."""
        if time.monotonic() - self._last_heartbeat > HEARTBEAT_SECONDS:
            self._last_heartbeat = time.monotonic()
            try:
                os.utime(self.path)
            except OSError:
                pass

    def end(self, code: int | None, detail: str = "") -> None:
        """Write how the job ended."""
        self._known |= {"state": "ended", "ended": time.time(), "code": code, "detail": detail}
        write_json(self.path, self._known)


def owner_lives(launch: Path, job: str | None, token: str) -> bool:
    """Whether the job that has claimed a launch may still write."""
    if job is None or job_record(launch).get("state") == "ended":
        return False
    deadline = time.monotonic() + _COMPLETING_SECONDS
    while True:
        try:
            known = slurm.job(job, slurm.comment_prefix(token))
        except slurm.Unreachable:
            return _has_heartbeat(launch)
        if known is None or known.state != "COMPLETING":
            return known is not None and known.alive
        if time.monotonic() > deadline or job_record(launch).get("state") == "ended":
            return False
        time.sleep(0.5)


def _has_heartbeat(launch: Path) -> bool:
    """Whether the owner still touches its record. This waits: a successor that gave up at once would be lost."""
    path = launch / "job.json"
    last = modified(path)
    while _age(path) < SILENT_SECONDS:
        time.sleep(min(1.0, HEARTBEAT_SECONDS))
        if job_record(launch).get("state") == "ended":
            return False
        if modified(path) != last:
            return True
    return False


def _age(path: Path) -> float:
    """Seconds since a file was touched, by the clock of its file system."""
    probe = path.with_name(f".clock.{socket.gethostname()}.{os.getpid()}")
    try:
        probe.touch()
        return probe.stat().st_mtime - path.stat().st_mtime
    except OSError:
        return float("inf")
    finally:
        probe.unlink(missing_ok=True)
