"""Memory of this process and of this machine, as the system reports it."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

from batchwright.core.errors import EnvironmentFault


def status_bytes(name: str) -> int:
    """A size of this process from /proc: VmSize and VmRSS are now; VmPeak, which RLIMIT_AS limits, and VmHWM are peaks."""
    for line in Path("/proc/self/status").read_text().splitlines() if sys.platform == "linux" else ():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # macOS: bytes


def physical_memory() -> int:
    """Bytes of memory that this process may use: the machine's, or its control group's limit."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            total = min(total, int(Path(path).read_text()))
        except (OSError, ValueError):
            continue
    return total


def available_memory() -> int:
    """Bytes of free memory on this machine, as Linux counts them."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        raise EnvironmentFault(
            "--calibrate reads /proc/meminfo, which this system does not have: it needs Linux."
        ) from None
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
