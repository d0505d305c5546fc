"""Run directories of any number of ranks, written without training; and the files that a block of code opens."""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

NOBODY = 2**22 + 1  # above Linux's largest process number
LOG = b"step 3 loss 2.5\n" * 4096  # 64 KiB


def launch_folder(folder: Path, ranks: int, *, ended: int | None = None, code: int = 0) -> Path:
    """`ranks/` and `logs/` of a launch as `rank.py` writes them; the first `ended` ranks have ended with `code`."""
    for name in ("ranks", "logs"):
        (folder / name).mkdir(parents=True)
    log = folder / "logs" / "rank-0.log"
    log.write_bytes(LOG)
    for rank in range(ranks):
        if rank:
            os.link(log, log.with_name(f"rank-{rank}.log"))
        process = {"pid": NOBODY, "parent": NOBODY, "start_time": 1, "time": 1.0}
        (folder / "ranks" / f"{rank}.json").write_text(json.dumps(process))
        if rank < (ranks if ended is None else ended):
            end(folder, rank, code)
    return folder


def end(folder: Path, rank: int, code: int = 0) -> None:
    """One more rank of a launch has ended."""
    (folder / "ranks" / f"{rank}.exit.json").write_text(json.dumps({"code": code, "time": 2.0}))


def ledger(root: Path, ranks: int, lines: int, *, launch: int = 1, steps: int = 10, each: int = 2) -> int:
    """The ledgers of a launch from sample 0 on, and its checkpoint; returns the number of samples.

    Each line has `steps` steps, and in each of them every rank has `each` samples.

    The sums of all ranks add up to those of the order; which rank has which part of a sum is drawn at random.
    """
    from batchwright.runtime.data.order import GlobalOrder
    from batchwright.runtime.state.audit import _expected
    from batchwright.runtime.state.ledger import _line, _OpenRun

    order, batch, draw, mask = GlobalOrder(10**9, seed=1), each * ranks, random.Random(3), 2**64 - 1
    folder, total = root / "ledger", lines * steps * batch
    folder.mkdir(parents=True, exist_ok=True)
    starts = [(line * steps, line * steps * batch) for line in range(lines)]
    left = [_expected(order, at, at + steps * batch, step, batch) for step, at in starts]
    for rank in range(ranks):
        header = {
            "schema": 1, "launch": launch, "rank": rank, "ranks": ranks, "step": 0, "position": 0, "parent": None,
            "order": {"size": order.size, "seed": order.seed, "shuffle": order.shuffle}, "time": 1.0,
        }  # fmt: skip
        text = [json.dumps(header).encode() + b"\n"]
        for index, (step, at) in enumerate(starts):
            low, high = (left[index] & mask, left[index] >> 64) if rank == ranks - 1 else (draw.getrandbits(64),) * 2
            left[index] = ((left[index] >> 64) - high & mask) << 64 | (left[index] - low & mask)
            text.append(_line(_OpenRun(step, at, batch, "applied", steps, each * steps, low, high)))
        (folder / f"launch-{launch:05d}-rank-{rank:05d}.jsonl").write_bytes(b"".join(text))
    saved = root / "checkpoints" / f"step-{lines * steps:012d}-launch-{launch:05d}"
    saved.mkdir(parents=True)
    state = json.dumps({"launch": launch, "position": total, "step": lines * steps}).encode()
    (saved / "state.json").write_bytes(state)
    facts = {"size": len(state), "sha256": hashlib.sha256(state).hexdigest()}
    (saved / "manifest.json").write_text(json.dumps({"schema": 1, "files": {"state.json": facts}}))
    return total


def complete_run(root: Path, ranks: int, lines: int = 10, *, steps: int = 10, each: int = 2) -> Path:
    """A complete run of a task in one launch, as `run --status` reads it."""
    from batchwright.core.batch.request import BatchRequest
    from batchwright.core.ramp.request import read_ramp
    from batchwright.launch.directory import RunDirectory, write_json
    from batchwright.launch.plan import build
    from batchwright.launch.records import TASK, Ending, Manifest, Options

    total, directory = ledger(root, ranks, lines, steps=steps, each=each), RunDirectory(root)
    batch = BatchRequest(global_batch_size=each * ranks, nodes=max(1, ranks // 8), devices_per_node=min(8, ranks))
    plan, _ = build(batch, read_ramp({"samples": total}), Options(), command=["train"])
    write_json(root / "plan.json", replace(plan, kind=TASK, target="train.py:task", command=()))
    launch_folder(directory.launch(1), ranks)
    manifest = Manifest(1, 0, batch.nodes or 1, ranks, 0, total, ("train",), {}, "/", 1.0)
    write_json(directory.launch(1) / "manifest.json", manifest)
    write_json(directory.launch(1) / "ending.json", Ending(1, "done", total, 2.0))
    return root


@dataclass
class Opened:
    """What a block of code opened and listed, each time that it did."""

    files: list[str] = field(default_factory=list)
    listed: list[str] = field(default_factory=list)


_counting: list[Opened] = []
_installed = False


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if _counting and event in ("open", "os.listdir", "os.scandir"):
        into = _counting[-1].files if event == "open" else _counting[-1].listed
        by_opener = event == "open" and arguments[1] is None and into[-1:] == [str(arguments[0])]
        if not by_opener:  # `open` with an opener reports itself, and then the `os.open` of the opener
            into.append(str(arguments[0]))


@contextmanager
def opened() -> Iterator[Opened]:
    """Count the files that are opened and the folders that are listed in a block."""
    global _installed
    if not _installed:  # a hook cannot be removed
        sys.addaudithook(_hook)
        _installed = True
    _counting.append(Opened())
    try:
        yield _counting[-1]
    finally:
        _counting.pop()
