"""What a test needs beside torch."""

from __future__ import annotations

import os
from importlib.util import find_spec
from shutil import which

import pytest


def needs(module: str) -> None:
    """Skip if a framework is not installed, but fail in CI: there a skipped test would look like one that passed."""
    if find_spec(module) is None:  # searched, not imported
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"{module} is not installed")


def needs_program(name: str) -> str:
    """The path of a program; skip if it is not installed, but fail in CI."""
    found = which(name)
    if found is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"{name} is not installed")
    return str(found)
