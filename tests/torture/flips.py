"""One-bit flips in the files of a run: the audit ends with 0 only where the flip cannot matter, and never with 1."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .calls import Caller
from .material import Material
from .proof import proof
from .record import Case

# How often each kind of file is hit; ledgers most, as they are the evidence.
_KINDS = (
    (60, "ledger/*.jsonl"),
    (10, "checkpoints/*/state.json"),
    (10, "checkpoints/*/manifest.json"),
    (8, "plan.json"),
    (6, "events/*.jsonl"),
    (3, "launches/*/*.json"),
    (3, "*.json"),
)


def flips(material: Material, place: Path, call: Caller, seed: str, numbers: range) -> Iterator[Case]:
    """Flip one bit per case in a copy of a finished or half-finished run, and back."""
    runs = [place / "done", place / "half"]
    shutil.copytree(material.done, runs[0])
    shutil.copytree(material.half, runs[1])
    for number in numbers:
        draw = random.Random(f"{seed} flips {number}")
        run = draw.choices(runs, (3, 1))[0]
        pattern = draw.choices([pattern for _, pattern in _KINDS], [weight for weight, _ in _KINDS])[0]
        path = draw.choice(sorted(p for p in run.glob(pattern) if p.stat().st_size))
        before = path.read_bytes()
        bit = draw.randrange(8 * len(before))
        after = bytearray(before)
        after[bit // 8] ^= 1 << bit % 8
        path.write_bytes(after)
        try:
            yield _case(run, path, before, bit, call, number)
        finally:
            path.write_bytes(before)
    shutil.rmtree(place)


def _case(run: Path, path: Path, before: bytes, bit: int, call: Caller, number: int) -> Case:
    what = f"{path.relative_to(run.parent)}: bit {bit % 8} of byte {bit // 8} ({before[bit // 8]:#04x})"
    checked = call("check", "--ledger", run, "--json", cwd=run.parent)
    shown = call("run", "--status", run, "--json", cwd=run.parent)
    wrong = [*checked.wrong(), *shown.wrong()]
    codes = [code for code in (checked.code, shown.code) if code is not None]
    if not wrong:
        wrong += _verdict(run, path, before, checked.code or 0, checked.out)
    return Case("flips", number, what, tuple(codes), tuple(wrong))


def _verdict(run: Path, path: Path, before: bytes, code: int, out: str) -> list[str]:
    """Compare the exit code with the independent audit of the same files."""
    audited = proof(run)
    if code == 0 and audited.problems:
        return [f"check --ledger ends with 0, and the independent audit says: {'; '.join(audited.problems)}"]
    if code == 0 and json.loads(out)["samples"] != audited.samples:
        return [f"check --ledger proves {json.loads(out)['samples']} samples, the independent audit {audited.samples}"]
    if code and path.suffix == ".jsonl" and _meaning(path.read_bytes()) == _meaning(before) is not None:
        return [f"check --ledger ends with {code}, and the flip changed no value: {out[:500]}"]
    return []


def _meaning(content: bytes) -> list[Any] | None:
    """The lines of a ledger without their times; None if one of them is not JSON."""
    try:
        lines = [json.loads(line) for line in content.decode().split("\n") if line.strip()]
        return [{key: value for key, value in line.items() if key != "time"} for line in lines]
    except (ValueError, AttributeError):
        return None
