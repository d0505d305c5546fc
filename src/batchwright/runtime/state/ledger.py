"""The ledger: what every rank was really fed, step by step, run-length compressed; `audit` (audit.py) holds it against
the global order.

A rank keeps one file per launch, `RUN/ledger/launch-00003-rank-00001.jsonl`: a header, then one line per *run* of steps
with equal batch and outcome. A line is as good after a thousand steps as after one, because the hash of a run is a sum:

    mark(step, id) = 128 bits mixed from both        run.hash = Σ mark(step, id) mod 2^64, in two lanes of 64

A sum does not care which rank or micro batch brought a sample, so the sums of all ranks over a run can be compared with
the sum over its span, computed from the order. It does care for everything else: a sample that is wrong, missing, fed
twice or fed in another step changes it by a number that is as good as random, and is missed once in 2^128.

The last line is the open run, rewritten in place after every step (one `pwrite`, no sync), so that even `kill -9` leaves
what was done. Runs end where a checkpoint is saved: work after the surviving one is then whole lines, and is counted.
"""

from __future__ import annotations

import errno
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchwright.core.errors import BatchwrightError, RunError
from batchwright.rundir import names
from batchwright.rundir.files import write_fault
from batchwright.runtime.data.order import GlobalOrder

SCHEMA = 1
# A run's line is padded to this, so that it can be rewritten in place while its numbers grow.
WIDTH = 384
# Where a fault is found, it is found in so many steps; a million steps are a thousand lines.
LONGEST_RUN = 1000


@dataclass
class _Run:
    first_step: int
    start_sample: int
    global_batch_size: int
    outcome: str
    steps: int = 0
    samples: int = 0
    low: int = 0
    high: int = 0


class Ledger:
    """One rank's ledger of one launch: `fed(ids)` for each micro batch, `applied(…)` for each step, `close` at saves.

    `start` is the (step, position) it goes on from, `parent` the launch that saved the checkpoint it goes on from.
    """

    def __init__(
        self,
        directory: Path | str,
        order: GlobalOrder,
        *,
        launch: int = 0,
        rank: int = 0,
        ranks: int = 1,
        start: tuple[int, int] = (0, 0),
        parent: int | None = None,
    ) -> None:
        folder = Path(directory)
        self.path = folder / names.ledger(launch, rank)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            raise RunError(
                f"launch={launch} has run in {folder} already: {self.path.name} exists, and is never overwritten. A "
                f"launch number names one life of the training processes. Nearest: {next_launch(folder)}.",
                field="launch",
                given=launch,
                nearest=(next_launch(folder),),
            ) from None
        except OSError as error:
            raise self._fault(error) from error
        header: dict[str, Any] = {
            "schema": SCHEMA, "launch": launch, "rank": rank, "ranks": ranks, "step": start[0], "position": start[1],
            "parent": parent, "order": {"size": order.size, "seed": order.seed, "shuffle": order.shuffle},
            "time": time.time(),
        }  # fmt: skip
        self._offset = 0
        self._offset = self._write(json.dumps(header).encode() + b"\n")
        self._run: _Run | None = None
        self._ids: list[NDArray[np.int64]] = []

    def fed(self, ids: NDArray[np.int64]) -> None:
        """These ids entered the open step on this rank; a filler's must not be given."""
        self._ids.append(ids)

    def applied(self, step: int, start_sample: int, global_batch_size: int, outcome: str = "applied") -> None:
        """The open step ended: `applied`, or `skipped` by a GradScaler. Dropped and carried steps are not recorded."""
        run = self._run
        if run is not None and (
            run.global_batch_size != global_batch_size
            or run.outcome != outcome
            or run.first_step + run.steps != step
            or step % LONGEST_RUN == 0
        ):
            self.close(sync=False)
            run = None
        if run is None:
            run = self._run = _Run(step, start_sample, global_batch_size, outcome)
        ids = np.concatenate(self._ids) if self._ids else np.empty(0, np.int64)
        self._ids.clear()
        low, high = combine(*marks(step, ids))
        run.steps, run.samples = run.steps + 1, run.samples + len(ids)
        run.low, run.high = (run.low + low) % 2**64, (run.high + high) % 2**64
        self._write(_line(run))

    def close(self, *, sync: bool = True) -> None:
        """End the open run, and by default make the ledger durable: to be called before a checkpoint is saved."""
        if self._run is not None:
            self._offset += WIDTH
            self._run = None
        if sync:
            try:
                os.fsync(self._file)
            except OSError as error:
                raise self._fault(error) from error

    def finish(self) -> None:
        """Close the file."""
        if self._file >= 0:
            try:
                self.close()
            finally:
                os.close(self._file)
                self._file = -1

    def _write(self, line: bytes) -> int:
        try:
            written = os.pwrite(self._file, line, self._offset)
            if written < len(line):  # the last bytes of a disk
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise self._fault(error) from error
        return written

    def _fault(self, error: OSError) -> BatchwrightError:
        return write_fault(error, f"the ledger {self.path.name}", self.path.parent, "Checkpoints are untouched.")


def _line(run: _Run) -> bytes:
    text = (
        f'{{"first_step": {run.first_step}, "steps": {run.steps}, "start_sample": {run.start_sample}, '
        f'"global_batch_size": {run.global_batch_size}, "samples": {run.samples}, "outcome": "{run.outcome}", '
        f'"hash": "{run.high:016x}{run.low:016x}", "time": {time.time():.3f}}}'
    )
    return text.ljust(WIDTH - 1).encode() + b"\n"


def next_launch(directory: Path | str) -> int:
    """The first launch number that no ledger in `directory` has.

    >>> next_launch("nowhere")
    0
    """
    found = map(names.read_ledger, names.listed(Path(directory)))
    return 1 + max((numbers[0] for numbers in found if numbers), default=-1)


Words = NDArray[np.uint64]
_SPREAD = np.uint64(0x9E3779B97F4A7C15)
_LOW = (30, 0xBF58476D1CE4E5B9, 27, 0x94D049BB133111EB, 31)
_HIGH = (27, 0x3C79AC492BA7B653, 33, 0x1C69B3F74AC4AE35, 27)
_MASK = 2**64 - 1
# As in order.py: what fits a core's L2 cache.
_CHUNK = 16_384


def marks(step: int | NDArray[np.int64], ids: NDArray[np.int64]) -> tuple[Words, Words]:
    """The two lanes of each id's mark; `step` is one number, or one for each id.

    >>> low, high = marks(3, np.array([5, 6]))
    >>> combine(low, high) == combine(*(a + b for a, b in zip(marks(3, np.array([5])), marks(3, np.array([6])))))
    True
    >>> combine(low, high) == combine(*marks(4, np.array([5, 6])))
    False
    """
    x = ids.astype(np.uint64) * _SPREAD
    x += _SPREAD
    x += (
        np.uint64(_scramble(step))
        if isinstance(step, int)
        else _mixed(step.astype(np.uint64) * _SPREAD + _SPREAD, *_HIGH)
    )
    return _mixed(x, *_LOW), _mixed(x, *_HIGH)


def combine(low: Words, high: Words) -> tuple[int, int]:
    """The sums of both lanes."""
    return int(low.sum(dtype=np.uint64)), int(high.sum(dtype=np.uint64))


def span_hash(ids: NDArray[np.int64], first_step: int, global_batch_size: int) -> tuple[int, int]:
    """The sums over a span of whole steps, whose ids are given in the order of positions."""
    total_low = total_high = 0
    for start in range(0, len(ids), _CHUNK):
        part = ids[start : start + _CHUNK]
        steps = first_step + np.arange(start, start + len(part), dtype=np.int64) // global_batch_size
        low, high = combine(*marks(steps, part))
        total_low, total_high = total_low + low, total_high + high
    return total_low & _MASK, total_high & _MASK


def _scramble(step: int) -> int:
    """`_mixed` of one number, in Python's integers: a dozen numpy calls for a single step would cost more."""
    a, b, c, d, e = _HIGH
    x = (step + 1) * int(_SPREAD) & _MASK
    x = (x ^ (x >> a)) * b & _MASK
    x = (x ^ (x >> c)) * d & _MASK
    return x ^ (x >> e)


def _mixed(x: Words, a: int, b: int, c: int, d: int, e: int) -> Words:
    t = x ^ (x >> np.uint64(a))
    t *= np.uint64(b)
    t ^= t >> np.uint64(c)
    t *= np.uint64(d)
    t ^= t >> np.uint64(e)
    return t
