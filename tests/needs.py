"""What a test needs beside torch."""

from __future__ import annotations

import os
from importlib.util import find_spec
from shutil import which

import pytest


def needs(module: str) -> None:
    """Skip if a framework is not installed, but fail in CI: there a skipped test would look like one that passed."""
    if find_spec(module) is None:  # searched, not imported
        _missing(module)


def needs_program(name: str) -> str:
    """The path of a program; skip if it is not installed, but fail in CI."""
    found = which(name)
    if found is None:
        _missing(name)
    return str(found)


def _missing(name: str) -> None:
    if os.environ.get("CI"):
        pytest.fail(f"{name} is not installed")
    pytest.skip(f"{name} is not installed", allow_module_level=True)
