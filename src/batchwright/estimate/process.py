"""The caller's side of the estimating process: start it, wait, and turn what it left into a result or an error."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from batchwright.core import codec, errors
from batchwright.core.errors import BatchwrightError, RunError

from .records import Request

# One heap and a threshold that stays where it is: glibc would otherwise move it, and keep what was freed. Slopes measured
# without these are 17% off (docs/estimate.md). JAX stays on the CPU: nothing here may take a device.
MALLOC = ("MALLOC_ARENA_MAX=1", "MALLOC_MMAP_THRESHOLD_=65536", "OMP_NUM_THREADS=1", "JAX_PLATFORMS=cpu")


def run(job: str, request: Request, *, timeout: float) -> dict[str, Any]:
    """Do one job in a process of its own, which never outlives this call."""
    with tempfile.TemporaryDirectory(prefix="batchwright-estimate-") as folder:
        asked, left = Path(folder) / "request.json", Path(folder) / "result.json"
        asked.write_text(json.dumps({"job": job, "request": codec.encode(request)}), encoding="utf-8")
        command = [sys.executable, "-W", "ignore", "-m", "batchwright.estimate.worker", str(asked), str(left)]
        if os.name == "posix":
            command = ["env", *MALLOC, *command]  # sets them for the child only, without touching our environment
        # What the user's code prints goes to stderr: stdout is for the result.
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=2, start_new_session=True)
        try:
            code = child.wait(timeout)
        except subprocess.TimeoutExpired:
            raise RunError(
                f"{job} did not finish within {timeout:g} s. Give it longer (--timeout), or fewer sizes "
                "(--micro-batch-size).",
                field="timeout",
                given=timeout,
            ) from None
        finally:
            _end(child)
        if not left.exists():
            raise RunError(
                f"the process that was to {job} {_cause(code)} and left no result. Probe instead.", field="task"
            )
        result = json.loads(left.read_text(encoding="utf-8"))
    if "error" in result:
        raise _error(result["error"])
    return result


def _end(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def _cause(code: int) -> str:
    if code < 0:
        names = {signal.SIGKILL: " (killed: out of memory, perhaps)", signal.SIGABRT: " (aborted inside torch)"}
        return f"died of signal {-code}{names.get(signal.Signals(-code), '')}"
    return f"ended with code {code}"


def _error(record: dict[str, Any]) -> Exception:
    """The error as the worker raised it; `users_traceback` is what the user should see of their own code."""
    if record["kind"] == "bug":
        return RuntimeError(f"in the estimating process: {record['message']}")
    kind = getattr(errors, record["kind"], RunError)
    error: BatchwrightError = kind(
        violations=[
            errors.Violation(v["message"], v["field"], v["given"], tuple(v["nearest"]))
            for v in record.get("violations") or [record]
        ]
    )
    error.users_traceback = record["traceback"]  # type: ignore[attr-defined]
    return error
