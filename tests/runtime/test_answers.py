"""What one process answers, and how its error reaches the others."""

from __future__ import annotations

import json
from typing import Any

import pytest

from batchwright.core.errors import ConfigError, PlanError, RunError, Violation
from batchwright.runtime.answers import Answer


def raising(error: Exception) -> Any:
    raise error


def elsewhere(own: Answer[Any]) -> Any:
    """What a process hears that does not answer, through JSON as on JAX."""
    return Answer[Any](None).heard(json.loads(json.dumps(own.sent)))


def test_an_answer_is_heard() -> None:
    own = Answer(lambda: [1, None, "two"], "counting failed", "dataset")
    assert own.heard(own.sent) == elsewhere(own) == [1, None, "two"]
    assert elsewhere(Answer(lambda: None)) is None


def test_an_error_of_batchwright_keeps_its_class_and_its_fields() -> None:
    error = ConfigError(violations=[Violation("10 is odd.", "size", 10, (8, 12)), Violation("no path.", "path")])
    own = Answer(lambda: raising(error), "counting failed", "dataset")
    with pytest.raises(ConfigError) as here:
        own.heard(own.sent)
    assert here.value is error
    with pytest.raises(PlanError) as there:
        elsewhere(own)
    assert type(there.value) is ConfigError and there.value.violations == error.violations


def test_another_error_is_itself_here_and_a_run_error_elsewhere() -> None:
    own = Answer(lambda: raising(OSError(2, "no such file", "a.jsonl")), "rank 0: counting failed", "dataset")
    with pytest.raises(FileNotFoundError):
        own.heard(own.sent)
    with pytest.raises(RunError) as there:
        elsewhere(own)
    assert str(there.value) == "rank 0: counting failed: FileNotFoundError: [Errno 2] no such file: 'a.jsonl'"
    assert there.value.field == "dataset" and "in raising" in there.value.__notes__[0]


def test_an_error_of_this_process_comes_before_that_of_another() -> None:
    own, other = (Answer(lambda name=name: raising(ValueError(name)), name) for name in ("own", "other"))
    with pytest.raises(ValueError, match=r"^own$"):
        own.heard(other.sent)
