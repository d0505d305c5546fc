from __future__ import annotations

import subprocess
import sys

import pytest

from .devices import SECONDS, environment


@pytest.fixture
def run_command(tmp_path):
    """Run a command of batchwright: exit code, output, errors."""

    def run(*arguments: str) -> tuple[int, str, str]:
        command = [sys.executable, "-m", "batchwright", *arguments]
        done = subprocess.run(command, env=environment(), cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS)
        return done.returncode, done.stdout, done.stderr

    return run
