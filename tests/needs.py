"""What a test needs beside torch."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest


def needs(module: str) -> None:
    """Skip if a framework is not installed, but fail in CI: there a skipped test would look like one that passed."""
    if find_spec(module) is None:  # searched, not imported
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"{module} is not installed")
