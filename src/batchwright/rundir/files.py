"""JSON documents and JSON lines on disk, hashes of files, and disk errors as errors of batchwright."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable
from hashlib import file_digest
from pathlib import Path
from typing import Any, cast

from batchwright.core.codec import encode
from batchwright.core.errors import BatchwrightError, EnvironmentFault, RunError

from . import atomic

# Records have fewer than ten levels. Some hundreds could be parsed, but not encoded again: `codec.encode` is recursive.
_DEEPEST = 64
_REMEDIES = {
    errno.ENOSPC: "Free some space, or keep fewer checkpoints.",
    errno.EDQUOT: "Raise the quota, or keep fewer checkpoints.",
    errno.EFBIG: "Raise the limit of file sizes (ulimit -f), or use a file system that allows larger files.",
    errno.EROFS: "Mount it writable, or choose another directory.",
    errno.EACCES: "Give this user write permission, or choose another directory.",
    errno.EPERM: "Give this user write permission, or choose another directory.",
}


def write_json(path: Path, value: Any, *, mode: int = 0o666, sync: bool = True, allow_nan: bool = False) -> None:
    """Write a value or a dataclass: a reader sees the old file or the new one, also after a power failure.

    ASCII, because a path or an error text that is not UTF-8 cannot be encoded otherwise.
    """
    text = json.dumps(encode(value), indent=1, allow_nan=allow_nan)
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic.write(path, text + "\n", mode=mode, sync=sync)


def create_once(path: Path, value: Any, *, mode: int = 0o666) -> bool:
    """Create a JSON file; False if it exists already. Of several processes, on any hosts, one gets True.

    `os.link` fails if the name exists, on NFS and Lustre too, and the file is complete as soon as its name exists.
    """
    complete = path.with_name(f".{path.name}.{os.urandom(8).hex()}.once")
    write_json(complete, value, mode=mode)
    try:
        os.link(complete, path)
        return True
    except FileExistsError:
        return os.stat(complete).st_nlink > 1  # NFS: our link was made, the answer was lost and the request repeated
    except OSError:  # no hard links on this file system: a reader may see an incomplete file
        try:
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
                file.write(complete.read_bytes())
            return True
        except FileExistsError:
            return False
    finally:
        complete.unlink(missing_ok=True)


def read_bytes(path: Path) -> bytes:
    """The content of a regular file; an OSError for everything else. All files of a run are read with this."""
    with open(path, "rb", opener=atomic.regular) as file:
        return file.read()


def parse(text: bytes) -> Any:
    """The JSON in `text`; a ValueError that says why it is none. All files of a run are parsed with this."""
    try:
        found = json.loads(text.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not UTF-8") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from None
    # Counting first: a record has few brackets, and almost none is walked.
    if text.count(b"[") + text.count(b"{") > _DEEPEST and _deeper(found, _DEEPEST):
        raise ValueError("nested too deeply")
    return found


def _deeper(value: Any, levels: int) -> bool:
    """Whether a value has more than this many levels."""
    level: list[Any] = [value]
    for _ in range(levels):
        level = [item for node in level for item in _items(node) if isinstance(item, (dict, list))]
    return bool(level)


def _items(node: Any) -> Iterable[Any]:
    return cast("dict[str, Any]", node).values() if isinstance(node, dict) else cast("list[Any]", node)


def parse_object(text: bytes) -> dict[str, Any]:
    """The JSON object in `text`; a ValueError that says what else it is."""
    found = parse(text)
    if not isinstance(found, dict):
        raise ValueError("no JSON object")
    return cast("dict[str, Any]", found)


def read_json(path: Path) -> Any:
    """The JSON in `path`; a RunError that names the file if it is missing or not JSON."""
    try:
        return parse(read_bytes(path))
    except FileNotFoundError:
        raise RunError(f"{path} is missing.", field=path.name) from None
    except (OSError, ValueError) as error:
        raise RunError(f"{path} cannot be read: {error}.", field=path.name, given=str(path)) from error


def find_object(path: Path) -> dict[str, Any] | None:
    """The JSON object in `path`; None if the file is missing, cannot be read now, or holds something else."""
    try:
        return parse_object(read_bytes(path))
    except (OSError, ValueError):
        return None


class JsonLines:
    """Reads a file of JSON lines, such as events, while it grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset, self._rest = 0, b""

    def new(self) -> list[dict[str, Any]]:
        """The objects whose lines were completed since the last call; anything else is left out."""
        try:
            with open(self._path, "rb", opener=atomic.regular) as file:
                file.seek(self._offset)
                chunk = file.read()
        except OSError:
            return []
        self._offset += len(chunk)
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        found: list[dict[str, Any]] = []
        for line in lines:
            try:
                found.append(parse_object(line))
            except ValueError:
                continue
        return found


def digest_of(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with open(path, "rb", buffering=0, opener=atomic.regular) as file:
        return file_digest(file, "sha256").hexdigest()


def write_fault(error: BaseException, what: str, directory: Path, kept: str) -> BatchwrightError:
    """A disk error as ours: what could not be written, why, with the free space, and what was kept."""
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
