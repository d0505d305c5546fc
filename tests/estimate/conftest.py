"""Estimates in the test process, to save the time of starting one; test_worker.py has real processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from batchwright.estimate import worker
from batchwright.estimate.records import EstimateRequest

TASKS = Path(__file__).with_name("tasks.py")


@pytest.fixture(scope="session")
def tasks() -> str:
    """The file of tasks; a task is `f"{tasks}:name"`."""
    return str(TASKS)


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the estimate run in this process."""

    def run(job: str, request: EstimateRequest, *, timeout: float) -> dict[str, Any]:
        return worker._checked(worker.answer(job, request))

    monkeypatch.setattr(worker, "run", run)


@pytest.fixture(scope="session")
def peaks() -> Callable[..., dict[int, int]]:
    """`peaks(task, sizes, **options)` gives the estimated peaks by size."""

    def of(task: str, sizes: tuple[int, ...], **options: Any) -> dict[int, int]:
        result = worker.answer("estimate", EstimateRequest(task, micro_batch_sizes=sizes, **options))
        assert "error" not in result, result
        return {p["micro_batch_size"]: p["peak_memory_bytes"] for p in result["points"]}

    return of
