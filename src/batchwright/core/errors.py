"""All errors that users can see, as one tree. Each class has the exit code of the command line.

    BatchwrightError          exit 1
    ├── PlanError             exit 2   also a ValueError: the numbers contradict each other
    │   ├── ConfigError                a file, a key or a value cannot be read
    │   └── ScheduleError              a ramp or one of its stages is not valid
    ├── NothingFitsError      exit 3
    ├── EnvironmentFault      exit 4   a missing engine, permission or device
    │   └── MissingExtraError          also an ImportError
    └── RunError              exit 5   the user's code, a check or a run failed

An error says what is wrong, with field names and numbers; the arithmetic; the nearest valid values and what they
mean. One error may carry several `violations`: all are collected before it is raised.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any


@dataclass(frozen=True)
class Violation:
    """One thing that is wrong: the message, the field, the given value and the nearest valid values."""

    message: str
    field: str | None = None
    given: Any = None
    nearest: tuple[Any, ...] = ()


class BatchwrightError(Exception):
    """The base class; `field`, `given` and `nearest` are those of the first violation.

    >>> error = PlanError("global_batch_size=10 is not …", field="global_batch_size", given=10, nearest=(8, 12))
    >>> error.nearest
    (8, 12)
    """

    exit_code = 1

    def __init__(
        self,
        message: str = "",
        *,
        field: str | None = None,
        given: Any = None,
        nearest: Sequence[Any] = (),
        violations: Sequence[Violation] = (),
    ) -> None:
        self.violations = tuple(violations) or (Violation(message, field, given, tuple(nearest)),)
        self.field = self.violations[0].field
        self.given = self.violations[0].given
        self.nearest = self.violations[0].nearest
        super().__init__("\n".join(v.message for v in self.violations))

    def record(self) -> dict[str, Any]:
        """The error as `--json` prints it."""
        record: dict[str, Any] = {"type": type(self).__name__, "message": str(self), **_plain(self.violations[0])}
        if len(self.violations) > 1:
            record["violations"] = [{"message": v.message, **_plain(v)} for v in self.violations]
        return record


def _plain(v: Violation) -> dict[str, Any]:
    given = v.given if isinstance(v.given, (int, str, bool, type(None))) else str(v.given)
    if isinstance(v.given, float) and isfinite(v.given):  # JSON has no NaN
        given = v.given
    return {"field": v.field, "given": given, "nearest": list(v.nearest)}


class PlanError(BatchwrightError, ValueError):
    """The request has no solution, or contradicts itself."""

    exit_code = 2


class ConfigError(PlanError):
    """A file, a key or a value of the configuration cannot be understood."""


class ScheduleError(PlanError):
    """A ramp, or one of its stages, is not valid."""


class NothingFitsError(BatchwrightError):
    """No batch size fits into the available memory."""

    exit_code = 3


class EnvironmentFault(BatchwrightError):
    """Something outside the request is missing: an engine, a permission, a device."""

    exit_code = 4


class MissingExtraError(EnvironmentFault, ImportError):
    """An optional part is not installed; the message names the extra that installs it."""


class RunError(BatchwrightError):
    """The user's code, a check or a run failed."""

    exit_code = 5


def raise_violations(kind: type[BatchwrightError], violations: Sequence[Violation]) -> None:
    """Raise one `kind` with all violations, or do nothing if there are none."""
    if violations:
        raise kind(violations=violations)
    return None


def either(values: Sequence[object]) -> str:
    """Alternatives, as an error lists them.

    >>> either((4, 8))
    '4 or 8'
    """
    return " or ".join(str(v) for v in values)


def did_you_mean(near: Sequence[object]) -> str:
    """A question at the end of an error.

    >>> did_you_mean(["task"]), did_you_mean([])
    (' Did you mean task?', '')
    """
    return f" Did you mean {either(near)}?" if near else ""
