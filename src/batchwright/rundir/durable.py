"""Files that are whole or absent: written beside, synced, renamed. What a killed process leaves is never half a file."""

from __future__ import annotations

import errno
import json
import os
from hashlib import sha256
from pathlib import Path
from typing import Any

from batchwright.core.errors import BatchwrightError, EnvironmentFault, RunError

from . import atomic

_BLOCK = 1 << 20
_REMEDIES = {
    errno.ENOSPC: "Free some space, or keep fewer checkpoints.",
    errno.EDQUOT: "Raise the quota, or keep fewer checkpoints.",
    errno.EFBIG: "The file size limit (ulimit -f) or the file system allows no larger file.",
    errno.EROFS: "Mount it writable, or choose another directory.",
    errno.EACCES: "Give this user write permission, or choose another directory.",
    errno.EPERM: "Give this user write permission, or choose another directory.",
}


def write_json(path: Path, value: Any, *, sync: bool = True) -> None:
    """Write `value` so that a reader sees the old file or the new one, and after a power cut one of the two."""
    atomic.write(path, json.dumps(value, indent=1, allow_nan=False) + "\n", sync=sync)


def read_json(path: Path) -> Any:
    """The JSON in `path`; a RunError that names the file when it is missing or not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunError(f"{path} is missing.", field=path.name) from None
    except (OSError, ValueError) as error:
        raise RunError(f"{path} cannot be read: {error}.", field=path.name, given=str(path)) from error


def digest_of(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    digest = sha256()
    with open(path, "rb", buffering=0) as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def write_fault(error: BaseException, what: str, directory: Path, kept: str) -> BatchwrightError:
    """An error of the disk in three parts: what could not be written, why with the numbers, and what is left."""
    if isinstance(error, BatchwrightError):
        return error
    reason = f"{type(error).__name__}: {error}"
    if not isinstance(error, OSError):
        return RunError(f"{what} could not be written to {directory}: {reason}. {kept}", field="directory")
    room = ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        try:
            facts = os.statvfs(directory)
            room = f", where {facts.f_bavail * facts.f_frsize:,} of {facts.f_blocks * facts.f_frsize:,} bytes are free"
        except OSError:
            pass
    remedy = _REMEDIES.get(error.errno or 0, "")
    return EnvironmentFault(
        f"{what} could not be written to {directory}{room}: {error.strerror or reason}. {kept} {remedy}".rstrip(),
        field="directory",
        given=str(directory),
    )
