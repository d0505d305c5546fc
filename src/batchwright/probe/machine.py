"""What trials depend on outside of the request: their environment, other programs' use of the processors, the code."""

from __future__ import annotations

import hashlib
import os
import stat
import sys
from pathlib import Path

from batchwright.processes.start import FIXED_ALLOCATOR, environment

UNLOADED = "failed to map segment from shared object"  # the dynamic linker, if a limit is too small for a library
_LARGEST_FILE = 16 * 2**20
_MOST_FILES, _MOST_FOLDERS = 1000, 1000
# Installed code, and folders into which training copies code.
_NOT_SOURCES = {"__pycache__", "site-packages", "node_modules", "venv", "wandb", "mlruns", "lightning_logs", "outputs"}

# Rich, which draws Lightning's bar, prints a bar into a pipe only when it has ended, unless it is told to draw it.
_BARS = {"TTY_COMPATIBLE": "1", "TTY_INTERACTIVE": "1", "COLUMNS": "200"}


def trial_environment(*, limited: bool, ranks: int = 1, task: bool = True) -> dict[str, str]:
    """The environment of a trial: with a budget the allocator is fixed; speed is measured with the user's own settings."""
    changes = {"PYTHONUNBUFFERED": "1"}  # a line about a step must arrive when it is printed
    if task:
        changes["PYTHONSAFEPATH"] = "1"  # a `random.py` in the current folder replaces nothing
    threads = max(1, (os.cpu_count() or 1) // ranks)  # torchrun would set 1
    default = {"OMP_NUM_THREADS": str(threads)} | ({} if task else _BARS)
    return environment(FIXED_ALLOCATOR if limited else {}, changes, default=default)


def busy_seconds() -> float | None:
    """Processor seconds that all programs have used."""
    try:
        fields = [int(f) for f in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):
        return None
    user, nice, system, _idle, _wait, irq, soft, steal = fields
    return (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")


def digest(data: str | bytes) -> str:
    """A short fingerprint.

    >>> digest("a")
    'ca978112'
    """
    if isinstance(data, str):
        data = data.encode("utf-8", "surrogatepass")  # an argument may contain bytes that are not text
    return hashlib.sha256(data).hexdigest()[:8]


def file_digest(path: Path) -> str:
    """A fingerprint of a file: of its content, or of its size and time if it is too large to be code."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            return "not a regular file"  # reading a FIFO would never end
        small = status.st_size <= _LARGEST_FILE
        return digest(path.read_bytes() if small else f"{status.st_size} {status.st_mtime_ns}")
    except OSError as error:
        return f"unreadable: {error.strerror}"


def sources(folder: Path) -> dict[str, str]:
    """Fingerprints of the *.py files below a folder, which a script may import. Reads at most 1000 of them."""
    found: dict[str, str] = {}
    for visited, (at, folders, names) in enumerate(os.walk(folder)):
        folders[:] = sorted(f for f in folders if not f.startswith(".") and f not in _NOT_SOURCES)
        for name in sorted(n for n in names if n.endswith(".py"))[: _MOST_FILES - len(found)]:
            path = Path(at, name)
            found[str(path)] = file_digest(path)
        if visited + 1 >= _MOST_FOLDERS or len(found) >= _MOST_FILES:
            break
    return found


def code_below(folder: Path) -> dict[str, str]:
    """Fingerprints of the imported files below a folder: the task's file and the files it imports, without installed ones."""
    ours, inside = Path(__file__).resolve().parents[1], os.path.join(folder, "")
    # Thousands of modules are loaded, and this runs within the memory budget: do not make a Path for each.
    names = {f for m in list(sys.modules.values()) if (f := getattr(m, "__file__", None)) and f.startswith(inside)}
    own = (f for f in map(Path, names) if f.suffix == ".py" and not f.is_relative_to(ours))
    return {str(f.relative_to(folder)): digest(f.read_bytes()) for f in sorted(own) if "site-packages" not in f.parts}
