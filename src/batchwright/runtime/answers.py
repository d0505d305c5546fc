"""A question that one process answers for others, which use a collective of their own: torch's, gloo's or JAX's.

    own = Answer(question if rank == 0 else None, "rank 0: reading the samples failed", "dataset")
    answer = own.heard(broadcast(own.sent))

The process that answers catches its error, sends it like an answer, and raises it after the collective: no process is left
waiting, and every process raises the error. An error of batchwright has the same class and fields everywhere. Any other
one is a RunError elsewhere: its class may not exist there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from batchwright.core.errors import BatchwrightError, RunError
from batchwright.processes.endings import error_from_record, error_record

T = TypeVar("T")
_SHOWN = 2000  # characters of the message of a foreign error


class Answer(Generic[T]):
    """What `question()` returns in this process, or its error; None: another process answers.

    `failure` and `field` are for an error of another kind than batchwright's: what failed where, and the field of the RunError.

    >>> own = Answer(lambda: 256, "rank 0: counting the samples failed", "dataset")
    >>> Answer(None).heard(own.sent)
    256
    """

    def __init__(self, question: Callable[[], T] | None, failure: str = "", field: str | None = None) -> None:
        answer: T | None = None
        record: dict[str, Any] | None = None
        self._raised: Exception | None = None
        try:
            answer = None if question is None else question()
        except Exception as error:
            self._raised, record = error, error_record(_ours(error, failure, field))
        self.sent = answer, record
        """What the other processes must hear: the answer and the record of the error, which JSON can hold if the answer can."""

    def heard(self, said: Sequence[Any]) -> T:
        """The answer in what a process has `sent`. An error of this process or of that one is raised."""
        if self._raised is not None:
            raise self._raised
        answer, record = said
        if record is not None:
            raise error_from_record(record)
        return answer


def _ours(error: Exception, failure: str, field: str | None) -> BatchwrightError:
    if isinstance(error, BatchwrightError):
        return error
    ours = RunError(f"{failure}: {type(error).__name__}: {error}"[:_SHOWN], field=field)
    ours.__cause__ = error  # the record has its traceback
    return ours
