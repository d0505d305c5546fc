"""Why and where a launch ended: a record, `RUN/status.json`, and what the next launch learns from it."""

from __future__ import annotations

import math
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from batchwright.core.codec import encode
from batchwright.core.errors import BatchwrightError, RunError

from .durable import read_json, write_fault, write_json

STOPPED_AT_BOUNDARY, INTERRUPTED = 75, 130


@dataclass(frozen=True)
class Status:
    """Why and where a launch ended (or that it runs): `RUN/status.json`, and `RUN/status/launch-00003.json` for good.

    `reason` is `end` (of the budget), `boundary` (where the next launch begins), `signal`, `tokens` or `error`.

    >>> Status("stopped", "boundary", launch=0, position=960, step=60, bare=True).exit_code
    75
    """

    state: str  # running | complete | stopped | failed
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
    times: dict[str, float] = field(default_factory=dict)
    error: dict[str, Any] | None = None
    bare: bool = False
    schema: int = 1
    skipped_steps: int = 0
    """Steps of the lineage that overflowed in fp16: their samples are used up, the weights did not move."""

    @property
    def exit_code(self) -> int:
        """What the process exits with; launchers lose exit codes or take them for failures, so there it is 0."""
        if not self.bare or self.state == "complete":
            return 0
        return INTERRUPTED if self.reason == "signal" else STOPPED_AT_BOUNDARY


def write_status(root: Path, status: Status) -> None:
    """Write it for good as `status/launch-00003.json`, and as the newest, `status.json`; whole or not at all."""
    document = encode(status)
    for name in ("loss", "evaluation_loss"):
        if document[name] is not None and not math.isfinite(document[name]):
            document[name] = None
    try:
        (root / "status").mkdir(exist_ok=True)
        write_json(root / "status" / f"launch-{status.launch:05d}.json", document)
        write_json(root / "status.json", document)
    except OSError as error:
        raise write_fault(error, "the status", root, "Checkpoints are untouched.") from error


def error_record(error: BaseException, rank: int) -> dict[str, Any]:
    """An error for a status file: what `--json` prints, the traceback, and the rank it happened on."""
    known = isinstance(error, BatchwrightError)
    record = error.record() if known else {"type": type(error).__name__, "message": str(error)}
    return {**record, "rank": rank, "traceback": traceback.format_exception(error)}


def last_seen(root: Path, launch: int) -> dict[str, Any]:
    """When the launch before this one did its last step, and what its status says of its times."""
    files = [p for p in (root / "ledger").glob("launch-*-rank-*.jsonl") if int(p.name.split("-")[1]) < launch]
    if not files:
        return {}
    latest = max(p.name.split("-")[1] for p in files)
    seen = max(p.stat().st_mtime for p in files if p.name.split("-")[1] == latest)
    try:
        status = read_json(root / "status" / f"launch-{latest}.json")
    except RunError:
        status = {}
    return {"time": seen, "times": status.get("times", {})}
