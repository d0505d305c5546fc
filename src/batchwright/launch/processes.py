"""Starts the processes of a launch on this machine, one per node, for programs that torchrun does not start: JAX.

    python -P -m batchwright.launch.processes NUMBER COMMAND...

Each process gets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT. When one fails, the others are
blocked in a collective: they get some seconds to end, and are killed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

from batchwright.processes.guard import die_with

from .ports import free_port

SHUTDOWN_SECONDS = 15.0
_POLL_SECONDS = 0.1


def main(number: int, command: list[str]) -> int:
    """Run the processes; the exit code is 0 if all of them succeeded, or that of the first that failed."""
    world = {
        "WORLD_SIZE": str(number),
        "LOCAL_WORLD_SIZE": str(number),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    me = os.getpid()
    started = [
        subprocess.Popen(
            command,
            env={**os.environ, **world, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            preexec_fn=lambda: die_with(me),
        )
        for rank in range(number)
    ]
    deadline: float | None = None
    code = 0
    while None in [process.poll() for process in started]:  # all of them: any() would stop at the first that runs
        failed = [process.returncode for process in started if process.returncode]
        if failed and deadline is None:
            code, deadline = failed[0], time.monotonic() + SHUTDOWN_SECONDS
        if deadline is not None and time.monotonic() > deadline:
            for process in started:
                process.kill()  # the parent of a rank, with which the rank ends
        time.sleep(_POLL_SECONDS)
    return code or next((process.returncode for process in started if process.returncode), 0)


if __name__ == "__main__":
    sys.exit(abs(main(int(sys.argv[1]), sys.argv[2:])))
