"""Disks that fail under a run of a command; under a task in `make test-all`."""

from __future__ import annotations

import os

import pytest

from tests.launch.conftest import _signals_as_at_a_terminal  # noqa: F401  (for processes that are started here)

from .disks import FAULTS, Unavailable, disk

FURTHER = [pytest.param(fault, marks=pytest.mark.rounds) for fault in FAULTS if fault not in ("full", "read-only")]


@pytest.mark.parametrize("fault", ["full", "read-only", *FURTHER])
@pytest.mark.parametrize("kind", ["command", pytest.param("task", marks=[pytest.mark.rounds, pytest.mark.torch])])
def test_a_disk_that_fails_under_a_run(tmp_path, kind, fault):
    try:
        case = disk(tmp_path / "it", kind, fault)
    except Unavailable as reason:
        missing = (
            pytest.fail if os.environ.get("CI") == "true" and fault == "full" and not os.geteuid() else pytest.skip
        )
        missing(f"{fault}: {reason}")
    assert not case.wrong, "\n".join(case.wrong)
