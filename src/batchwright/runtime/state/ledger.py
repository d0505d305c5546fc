"""The ledger: the samples that each rank trained, step by step, compressed. `audit.py` compares it with the global order.

Each rank writes one file per launch, `RUN/ledger/launch-00003-rank-00001.jsonl`: a header, then one line per *run* of
consecutive steps with equal batch and outcome. The hash of a run is a sum, so that a line for a thousand steps checks as
much as a line for one:

    hash(step, id) = 128 bits mixed from both       run.hash = Σ hash(step, id), in two halves, each mod 2^64

A sum does not depend on which rank or micro batch had a sample. So the sum over all ranks can be compared with the sum
over the span of the run, computed from the order. It does depend on everything else: a sample that is wrong, missing,
repeated or in another step changes it by a pseudo-random number, which is zero once in 2^128.

The last line is the open run. Each step overwrites it (one `pwrite`, no sync), so that it is complete even after `kill -9`.
A checkpoint ends the open run, so that the work after the surviving checkpoint is in separate lines and can be counted.
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
# Bytes of a line. Lines are padded, so that the last one can be overwritten while its numbers grow.
WIDTH = 384
# Steps in one line, at most. The audit locates a fault within a line, and a million steps are a thousand lines.
LONGEST_RUN = 1000


@dataclass
class _OpenRun:
    """The run of steps that one rank is adding to."""

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

    `start` is the (step, position) where the launch starts, `parent` the launch that saved its checkpoint, `first_sample` where
    the run begins if the samples before it were trained elsewhere.
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
        first_sample: int = 0,
        parent: int | None = None,
    ) -> None:
        folder = Path(directory)
        self.path = folder / names.ledger(launch, rank)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:  # such as a file in its place
            raise self._fault(error) from error
        try:
            self._file = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            raise RunError(
                f"launch={launch} has run in {folder} already: {self.path.name} exists, and is never overwritten. Each "
                f"start of the training processes needs its own launch number. Nearest: {next_launch(folder)}.",
                field="launch",
                given=launch,
                nearest=(next_launch(folder),),
            ) from None
        except OSError as error:
            raise self._fault(error) from error
        header: dict[str, Any] = {
            "schema": SCHEMA,
            "launch": launch,
            "rank": rank,
            "ranks": ranks,
            "step": start[0],
            "position": start[1],
            "first_sample": first_sample,
            "parent": parent,
            "order": {"size": order.size, "seed": order.seed, "shuffle": order.shuffle},
            "time": time.time(),
        }
        self._offset = 0
        self._offset = self._write(json.dumps(header).encode() + b"\n")
        self._run: _OpenRun | None = None
        self._ids: list[NDArray[np.int64]] = []

    def fed(self, ids: NDArray[np.int64]) -> None:
        """Add these ids to the present step of this rank; not those of a filler."""
        self._ids.append(ids)

    def applied(self, step: int, start_sample: int, global_batch_size: int, outcome: str = "applied") -> None:
        """Record the present step: `applied`, or `skipped` by a GradScaler. Dropped and carried steps are not recorded."""
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
            run = self._run = _OpenRun(step, start_sample, global_batch_size, outcome)
        ids = np.concatenate(self._ids) if self._ids else np.empty(0, np.int64)
        self._ids.clear()
        low, high = sums(*sample_hashes(step, ids))
        run.steps, run.samples = run.steps + 1, run.samples + len(ids)
        run.low, run.high = (run.low + low) % 2**64, (run.high + high) % 2**64
        self._write(_line(run))

    def close(self, *, sync: bool = True) -> None:
        """End the open run and, with `sync`, make the ledger durable: call it before a checkpoint is saved."""
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
            return write_all(self._file, line, self._offset)
        except OSError as error:
            raise self._fault(error) from error

    def _fault(self, error: OSError) -> BatchwrightError:
        return write_fault(error, f"the ledger {self.path.name}", self.path.parent, "Checkpoints are untouched.")


def write_all(file: int, data: bytes, offset: int | None = None) -> int:
    """Write all of the data at `offset` (None: at the end); the number of bytes. After a short write, a second one fails, and
    says why: the disk is full, a quota is reached, or `ulimit -f`."""
    done = 0
    while done < len(data):
        rest = data[done:]
        written = os.write(file, rest) if offset is None else os.pwrite(file, rest, offset + done)
        if written == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done += written
    return done


def _line(run: _OpenRun) -> bytes:
    text = (
        f'{{"first_step": {run.first_step}, "steps": {run.steps}, "start_sample": {run.start_sample}, '
        f'"global_batch_size": {run.global_batch_size}, "samples": {run.samples}, "outcome": "{run.outcome}", '
        f'"hash": "{run.high:016x}{run.low:016x}", "time": {time.time():.3f}}}'
    )
    return text.ljust(WIDTH - 1).encode() + b"\n"


def next_launch(directory: Path | str) -> int:
    """The first launch number without a ledger in `directory`.

    >>> next_launch("nowhere")
    0
    """
    found = map(names.read_ledger, names.listed(Path(directory)))
    return 1 + max((numbers[0] for numbers in found if numbers), default=-1)


Hashes = NDArray[np.uint64]
_SPREAD = np.uint64(0x9E3779B97F4A7C15)
_LOW = (30, 0xBF58476D1CE4E5B9, 27, 0x94D049BB133111EB, 31)
_HIGH = (27, 0x3C79AC492BA7B653, 33, 0x1C69B3F74AC4AE35, 27)
_MASK = 2**64 - 1
# Ids at a time, as in order.py: they fit in the L2 cache of a core.
_CHUNK = 16_384


def sample_hashes(step: int | NDArray[np.int64], ids: NDArray[np.int64]) -> tuple[Hashes, Hashes]:
    """The hash of each id in a step, as its low and high 64 bits; `step` is one number, or one for each id.

    >>> low, high = sample_hashes(3, np.array([5, 6]))
    >>> one, two = sample_hashes(3, np.array([5])), sample_hashes(3, np.array([6]))
    >>> sums(low, high) == sums(one[0] + two[0], one[1] + two[1])
    True
    >>> sums(low, high) == sums(*sample_hashes(4, np.array([5, 6])))
    False
    """
    # (id + 1) × _SPREAD, since 0 is a fixed point of mixing.
    x = ids.astype(np.uint64) * _SPREAD
    x += _SPREAD
    x += (
        np.uint64(_scramble(step))
        if isinstance(step, int)
        else _mixed(step.astype(np.uint64) * _SPREAD + _SPREAD, *_HIGH)
    )
    return _mixed(x, *_LOW), _mixed(x, *_HIGH)


def sums(low: Hashes, high: Hashes) -> tuple[int, int]:
    """The sums of both halves, each mod 2^64."""
    return int(low.sum(dtype=np.uint64)), int(high.sum(dtype=np.uint64))


def span_hash(ids: NDArray[np.int64], first_step: int, global_batch_size: int) -> tuple[int, int]:
    """The sums over a span of whole steps; `ids` are in the order of positions."""
    total_low = total_high = 0
    for start in range(0, len(ids), _CHUNK):
        part = ids[start : start + _CHUNK]
        steps = first_step + np.arange(start, start + len(part), dtype=np.int64) // global_batch_size
        low, high = sums(*sample_hashes(steps, part))
        total_low, total_high = total_low + low, total_high + high
    return total_low & _MASK, total_high & _MASK


def _scramble(step: int) -> int:
    """`_mixed` of one number in Python's integers: a dozen numpy calls for one number would take longer."""
    a, b, c, d, e = _HIGH
    x = (step + 1) * int(_SPREAD) & _MASK
    x = (x ^ (x >> a)) * b & _MASK
    x = (x ^ (x >> c)) * d & _MASK
    return x ^ (x >> e)


def _mixed(x: Hashes, a: int, b: int, c: int, d: int, e: int) -> Hashes:
    t = x ^ (x >> np.uint64(a))
    t *= np.uint64(b)
    t ^= t >> np.uint64(c)
    t *= np.uint64(d)
    t ^= t >> np.uint64(e)
    return t
