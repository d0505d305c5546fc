"""Runs a function of `tests/jax/programs.py` in new processes, each with some simulated CPU devices, joined by gloo."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import Any

from batchwright.launch.ports import free_port

SECONDS = 240


def environment(devices: int = 1) -> dict[str, str]:
    """That of a process with so many simulated devices."""
    return {
        **os.environ,
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "JAX_PLATFORMS": "cpu",
        "OMP_NUM_THREADS": "1",
    }


def run(function: str, *, devices: int = 1, processes: int = 1, killed: bool = False, **arguments: Any) -> list[Any]:
    """What the function returned in every process; nothing if all were `killed`."""
    port = free_port()
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.jax.programs", function, str(rank), str(processes), str(port), json.dumps(arguments)],
            env=environment(devices),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(processes)
    ]  # fmt: skip
    try:
        ended = [one.communicate(timeout=SECONDS) for one in started]
    finally:
        for one in started:
            one.kill()
    for one, (_, errors) in zip(started, ended, strict=True):
        assert one.returncode == (-signal.SIGKILL if killed else 0), errors[-6000:]
    return [] if killed else [json.loads(output.splitlines()[-1]) for output, _ in ended]
