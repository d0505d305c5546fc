"""The ranks of one small job on this machine, one process each: if one fails, the others are killed, since they wait for it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from batchwright.core.errors import RunError

from .guard import die_with


def run_ranks(module: str, spec: Path, ranks: int, *, timeout: float, field: str, but: str = "") -> None:
    """Run `python -m MODULE SPEC RANK` for every rank; an error shows the output of the rank at fault.

    `but` follows the reason in the message, `field` is the error's. The output of each rank is a file beside `spec`. The ranks
    end with this process.
    """
    logs = [spec.with_name(f"rank{rank}.log") for rank in range(ranks)]
    processes: list[subprocess.Popen[bytes]] = []
    deadline, me = time.monotonic() + timeout, os.getpid()
    first: list[int] = []
    try:
        for rank, log in enumerate(logs):
            with log.open("wb") as file:
                command = [sys.executable, "-m", module, str(spec), str(rank)]
                processes.append(subprocess.Popen(command, stdout=file, stderr=file, preexec_fn=lambda: die_with(me)))
        while any(p.poll() is None for p in processes):
            first = [rank for rank, p in enumerate(processes) if p.poll()]
            if first or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        time.sleep(0.1 if first else 0)  # the rank at fault may be the second to exit
        codes = [p.poll() for p in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
    if any(codes) or None in codes:
        # Ranks that lose their connection to it fail right after it, and write down their errors later.
        failed = [r for r, code in enumerate(codes) if code] or [0]
        rank = min(failed, key=lambda r: (r not in first, logs[r].stat().st_mtime_ns))
        output = logs[rank].read_text(encoding="utf-8", errors="replace").strip()
        how = f"exit code {codes[rank]}" if codes[rank] else f"no result within {timeout:g} s"
        message = f"rank {rank} of {ranks} failed ({how}){but}. Its output:\n{output[-4000:]}"
        raise RunError(message, field=field, given=ranks)
