"""The ranks of one small job on this machine, one process each: if one fails, the others are killed, since they wait for it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from batchwright.core.errors import BatchwrightError, RunError

from .guard import die_with

# Seconds for the other ranks to end after a first one has failed: the rank at fault may be the second to exit.
_GRACE = 5.0


def run_ranks(module: str, spec: Path, ranks: int, *, timeout: float, field: str, but: str = "") -> None:
    """Run `python -m MODULE SPEC RANK` for every rank; an error shows the output of the rank at fault.

    `but` follows the reason in the message, `field` is the error's. The output of each rank is a file beside `spec`. The ranks
    end with this process.
    """
    logs = [spec.with_name(f"rank{rank}.log") for rank in range(ranks)]
    processes: list[subprocess.Popen[bytes]] = []
    deadline, me = time.monotonic() + timeout, os.getpid()
    try:
        for rank, log in enumerate(logs):
            with log.open("wb") as file:
                command = [sys.executable, "-m", module, str(spec), str(rank)]
                processes.append(subprocess.Popen(command, stdout=file, stderr=file, preexec_fn=lambda: die_with(me)))
        failing = False
        while any(p.poll() is None for p in processes) and time.monotonic() < deadline:
            if not failing and any(p.poll() for p in processes):
                failing, deadline = True, min(deadline, time.monotonic() + _GRACE)
            time.sleep(0.05)
        codes = [p.poll() for p in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
    if any(codes) or None in codes:
        # The rank at fault writes its error, then ends; ranks that lose their connection to it write theirs after that.
        failed = [r for r, code in enumerate(codes) if code] or [0]
        rank = min(failed, key=lambda r: logs[r].stat().st_mtime_ns)
        output = logs[rank].read_text(encoding="utf-8", errors="replace").strip()
        how = f"exit code {codes[rank]}" if codes[rank] else f"no result within {timeout:g} s"
        message = f"rank {rank} of {ranks} failed ({how}){but}. Its output:\n{output[-4000:]}"
        raise RunError(message, field=field, given=ranks)


def run_rank(main: Callable[[str, int], None]) -> NoReturn:
    """Call `main(SPEC, RANK)` in a process of `run_ranks`, print its error, and end the process.

    The interpreter is not shut down: gloo's threads may still hold tensors then, and torch aborts (pytorch/pytorch#179291).
    """
    code = 0
    try:
        main(sys.argv[1], int(sys.argv[2]))
    except BatchwrightError as fault:
        if fault.__cause__ is not None:
            traceback.print_exception(fault.__cause__)  # the user's own exception
        print(f"error: {fault}", file=sys.stderr)
        code = fault.exit_code
    except Exception:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
