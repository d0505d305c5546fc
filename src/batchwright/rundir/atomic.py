"""Files that are whole or absent: written under another name in the same directory, then renamed. Standard library only.

The directory may be one that others write to. The temporary name is random and must not exist yet, so that a symbolic
link which somebody has put there is never written through.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path


def write(path: Path, text: str, *, mode: int = 0o666, sync: bool = True) -> None:
    """Replace `path` by `text`: a reader sees the old file or the new one, and after a power cut one of the two.

    `mode` is what `open` takes: the umask is applied. Without `sync` the write is atomic and not durable.
    """
    temporary = path.with_name(f".{path.name}.{os.urandom(8).hex()}.part")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if sync:
        sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # a file system that cannot do this to a directory
            raise
    finally:
        os.close(descriptor)


def no_follow(path: str, flags: int) -> int:
    """An `opener` for `open` that refuses a symbolic link at the end of the path: for files that are appended to."""
    try:
        return os.open(path, flags | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(
                error.errno, "it is a symbolic link, and batchwright does not write through links", path
            ) from None
        raise
