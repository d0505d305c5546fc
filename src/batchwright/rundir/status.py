"""Why and where a launch ended: the record `RUN/status.json`, and what the next launch reads of it."""

from __future__ import annotations

import math
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from batchwright.core.codec import SCHEMA, encode
from batchwright.core.errors import BatchwrightError, RunError

from . import names
from .fence import Fence
from .files import create_once, find_object, write_fault, write_json

STOPPED_AT_BOUNDARY, INTERRUPTED = 75, 130
READING_HEAD = ("launch", "readers", "rows read", "rows per reader", "amplification", "waited for data")


def reading_rows(starts: Iterable[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Who read, how much, and how long the trainers waited: one row for every launch of a run's history that says so.

    >>> read = {"rows_read": 3000, "read_amplification": 1.0, "wait_seconds": 0.25}
    >>> hosts = {"readers": 2, "hosts": 4, "loading_hosts": 2, **read}
    >>> stages = {"readers": 4, "hosts": None, "loading_hosts": None, **read}
    >>> for row in reading_rows([{"number": 1, "ranks": 8, "loading": one} for one in (hosts, None, stages)]): print(row)
    ('1', '2 of 4 hosts', '3,000', '1,500', '1.00', '0.2 s')
    ('1', '4 of 8 ranks', '3,000', '750', '1.00', '0.2 s')
    """
    rows: list[tuple[str, ...]] = []
    for start in starts:
        if read := start.get("loading"):
            readers, of = read["readers"], read["hosts"] or start["ranks"]
            unit = "host" if read["hosts"] else "rank"
            rows.append(
                (
                    str(start["number"]),
                    f"every {unit}" if readers == of else f"{readers} of {of} {unit}s",
                    f"{read['rows_read']:,}",
                    f"{read['rows_read'] / readers:,.0f}" if readers else "-",
                    f"{read['read_amplification']:.2f}",
                    f"{read['wait_seconds']:,.1f} s",
                )
            )
    return rows


@dataclass(frozen=True)
class Status:
    """Why and where a launch ended, or that it runs: `RUN/status.json`, with a copy in `RUN/status/launch-00003.json`.

    `state` is running, complete, stopped or failed. `reason` is `end` (of the budget), `boundary` (where the next launch
    begins), `signal`, `tokens` or `error`.

    >>> Status("stopped", "boundary", launch=0, position=960, step=60, bare=True).exit_code
    75
    """

    state: str
    reason: str | None
    launch: int
    position: int
    step: int
    stage: int | None = None
    stages: int = 1
    next_stage: dict[str, Any] | None = None
    ranks: int = 1
    checkpoint: str | None = None
    tokens: float = 0.0
    loss: float | None = None
    evaluation_loss: float | None = None
    signal: str | None = None
    times: dict[str, float] = field(default_factory=dict[str, float])
    error: dict[str, Any] | None = None
    bare: bool = False
    schema: int = 1
    skipped_steps: int = 0
    """Steps of the lineage that overflowed in fp16: their samples count, the weights did not change."""
    nonfinite_steps: int = 0
    """Steps of the lineage whose loss was NaN or infinite."""
    loading: dict[str, Any] = field(default_factory=dict[str, Any])
    """Of this launch, once it has stopped: readers, hosts, loading_hosts, rows_read, rows_trained, read_amplification,
    wait_seconds."""

    @property
    def exit_code(self) -> int:
        """The exit code of the process; 0 under a launcher, which would lose it or report a failure."""
        if not self.bare or self.state == "complete":
            return 0
        return INTERRUPTED if self.reason == "signal" else STOPPED_AT_BOUNDARY


def claim_launch(root: Path, wanted: int | None = None) -> int:
    """The number of a launch that starts: `wanted`, or the first free one. Of several processes, one gets a number."""
    ledgers = (numbers[0] for name in names.listed(root / names.LEDGER) if (numbers := names.read_ledger(name)))
    current = Fence.current(root)
    free = 1 + max((-1 if current is None else current, *ledgers))
    number = free if wanted is None else wanted
    while not _create(root, number):
        if wanted is not None:
            raise RunError(
                f"launch={wanted} has run in {root} already: {names.status(wanted)} exists. Each start of the training "
                f"processes needs its own launch number. Nearest: {max(free, wanted + 1)}.",
                field="launch",
                given=wanted,
                nearest=(max(free, wanted + 1),),
            )
        number += 1
    return number


def _create(root: Path, number: int) -> bool:
    try:
        return create_once(root / names.status(number), {"schema": SCHEMA, "state": "starting", "launch": number})
    except OSError as error:
        raise write_fault(error, "the status", root, "Checkpoints are untouched.") from error


def write_status(root: Path, status: Status) -> None:
    """Write `status/launch-00003.json`, then `status.json`, which the next launch replaces."""
    document = encode(status)
    for name in ("loss", "evaluation_loss"):
        if document[name] is not None and not math.isfinite(document[name]):
            document[name] = None
    try:
        write_json(root / names.status(status.launch), document)
        write_json(root / names.STATUS, document)
    except OSError as error:
        raise write_fault(error, "the status", root, "Checkpoints are untouched.") from error


def failure_record(error: BaseException, rank: int) -> dict[str, Any]:
    """An error for a status file: the record that `--json` prints, the traceback, and the rank."""
    known = isinstance(error, BatchwrightError)
    record = error.record() if known else {"type": type(error).__name__, "message": str(error)}
    return {**record, "rank": rank, "traceback": traceback.format_exception(error)}


def write_failure(root: Path, launch: int, error: dict[str, Any]) -> None:
    """Write the error of a rank other than 0, which does not write the status of the launch."""
    write_json(root / names.status(launch, error["rank"]), {"schema": SCHEMA, "state": "failed", "error": error})


def last_seen(root: Path, launch: int) -> dict[str, Any]:
    """The time of the last step of the launch before this one, and the times in its status; empty if there is none.

    A step changes the ledgers of all ranks, so that of rank 0 stands for thousands.
    """
    earlier = (names.read_events(name) for name in names.listed(root / names.EVENTS))
    latest = max((number for number in earlier if number is not None and number < launch), default=None)
    if latest is None:
        return {}
    try:
        seen = (root / names.LEDGER / names.ledger(latest, 0)).lstat()
    except OSError:
        return {}
    times = (find_object(root / names.status(latest)) or {}).get("times")
    known = cast("dict[str, Any]", times).items() if isinstance(times, dict) else ()
    return {"time": seen.st_mtime, "times": {name: value for name, value in known if _is_time(value)}}


def _is_time(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e15
