"""Files that are complete or absent: written under another name in the same directory, then renamed; and how files are opened.

Other users may write to the directory. The temporary name is random and must not exist, so that no symbolic link of
another user is followed. Whatever is opened must be a regular file: a FIFO would block, and /dev/zero never ends.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def write(path: Path, content: str | bytes, *, mode: int = 0o666, sync: bool = True) -> None:
    """Replace the content of `path` by `content`: a reader sees the old file or the new one, also after a power failure.

    `mode` is that of `os.open`: the umask applies. Without `sync` the write is atomic, but not durable.
    """
    temporary = path.with_name(f".{path.name}.{os.urandom(8).hex()}.part")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        # A path in the text may contain bytes that are not UTF-8: they stay as they are.
        with open(descriptor, "wb") as file:
            file.write(content.encode("utf-8", "surrogateescape") if isinstance(content, str) else content)
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
        # Some file systems cannot sync a directory.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def regular(path: str | Path, flags: int = os.O_RDONLY, mode: int = 0o666) -> int:
    """An `opener` for `open` that refuses everything but a regular file, without waiting for it."""
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "it is not a regular file", str(path))


def no_follow(path: str | Path, flags: int, mode: int = 0o666) -> int:
    """The same for files that are appended to: it also refuses a path which is a symbolic link."""
    try:
        return regular(path, flags | os.O_NOFOLLOW, mode)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(
                error.errno, "it is a symbolic link, and batchwright does not write through links", str(path)
            ) from None
        raise
