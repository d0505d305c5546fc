"""What went wrong while fake tensors followed a task: something they cannot follow, the user's code, or ours."""

from __future__ import annotations

import linecache
import sysconfig
import traceback
from pathlib import Path
from types import TracebackType

from batchwright.core.errors import BatchwrightError, PlanError, RunError

from .fake import REFUSED

_OURS = str(Path(__file__).resolve().parents[1])
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
# What a fake tensor says where torch has no class for it: numpy(), range(tensor), an f-string.
_TEXTS = ("tensor subclasses", "FakeTensor", "only integer tensors of a single element", "fake tensor")
_READS = (
    "it reads a tensor's value (int(tensor), .item(), .tolist(), .numpy(), `if tensor:`), and a fake tensor has none"
)
_SHAPES = "the shape of its result depends on the data (y[mask], nonzero, unique), and a fake tensor has no data"


def explain(error: BaseException, task: str) -> BatchwrightError:
    """The error to report; a traceback worth showing is its cause."""
    if isinstance(error, BatchwrightError):
        return error
    found = _refused(error)
    if found is not None:
        return _refusal(found, task)
    mine = users_frames(error)
    if mine is None:
        raise error  # no line of the user's: a bug of ours
    cause = error.with_traceback(mine)
    failed = RunError(
        f"the task failed while it was estimated: {type(error).__name__}: {error}. If it trains as it is, fake tensors "
        f"are what it does not bear; measure instead: batchwright probe {task}",
        field="task",
        given=task,
    )
    failed.__cause__ = cause
    return failed


def _refused(error: BaseException) -> BaseException | None:
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, REFUSED) or any(text in str(seen) for text in _TEXTS):
            return seen
        seen = seen.__cause__
    return None


def _refusal(error: BaseException, task: str) -> PlanError:
    name = str(error).splitlines()[0] if isinstance(error, REFUSED) else f"{type(error).__name__}: {error}"
    shape = type(error).__name__ == "DynamicOutputShapeException"
    unsupported = type(error).__name__ == "UnsupportedOperatorException"
    reason = "torch has no fake version of it" if unsupported else _SHAPES if shape else _READS
    return PlanError(
        f"estimate cannot follow {_line(error)} ({name}): {reason}. Measure instead: batchwright probe {task}",
        field="task",
        given=task,
        nearest=(f"batchwright probe {task}",),
    )


def _line(error: BaseException) -> str:
    """The innermost line of the user's, as they wrote it."""
    every = traceback.extract_tb(error.__traceback__)
    frames = [f for f in every if _is_users(f.filename)] or [f for f in every if not _is_machinery(f.filename)]
    if not frames:
        return "a step of this task"
    last = frames[-1]
    code = linecache.getline(last.filename, last.lineno or 0).strip()
    return f"{Path(last.filename).name}:{last.lineno}: `{code}`"


def users_frames(error: BaseException) -> TracebackType | None:
    """The traceback from the user's first line on, or None when no line of theirs took part."""
    trace = error.__traceback__
    while trace is not None and not _is_users(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return trace


def _is_machinery(filename: str) -> bool:
    return any(part in filename for part in (_OURS, "_subclasses", "_python_dispatch", "_ops.py", "_tools"))


def _is_users(filename: str) -> bool:
    return not filename.startswith((_OURS, "<", *_LIBRARIES))
