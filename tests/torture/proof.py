"""The independent audit: was every sample trained in exactly one step that led to the newest checkpoint?

Nothing here is imported from batchwright. The order and the hash are computed again from their formulas, one sample at a
time, in Python's integers; ledgers and checkpoints are read again from their files.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from functools import cache
from math import isqrt
from pathlib import Path
from typing import Any

_WORD = 2**64
_LEDGER = re.compile(r"launch-(\d{5,})-rank-(\d{5,})\.jsonl")
_CHECKPOINT = re.compile(r"step-(\d{12})-launch-(\d{5,})")


@cache
def _keys(size: int, seed: int, epoch: int, rounds: int) -> tuple[int, ...]:
    text = f"batchwright order 1: size {size}, seed {seed}, epoch {epoch}"
    stream = hashlib.shake_128(text.encode()).digest(8 * rounds)
    return tuple(int.from_bytes(stream[at : at + 8], "little") for at in range(0, len(stream), 8))


@cache
def sample_id(size: int, seed: int, shuffle: bool, position: int) -> int:
    """The sample at a position of the global order."""
    epoch, index = divmod(position, size)
    if not shuffle:
        return index
    height = isqrt(size) + 1
    height -= height % 2
    width = (size + height - 1) // height
    shorter = max(2, min(height, width))
    bits = len(bin(shorter)) - 3  # the whole part of its logarithm to base 2
    rounds = max(8, 2 + 2 * ((32 + bits - 1) // bits))
    while True:
        left, right = index // width, index % width
        for number, key in enumerate(_keys(size, seed, epoch, rounds)):
            other, modulus = (right, height) if number % 2 == 0 else (left, width)
            t = (other * 0x9E3779B97F4A7C15 + key) % _WORD
            t = (t ^ (t >> 32)) * 0xD6E8FEB86659FD93 % _WORD
            added = (t >> 24) * modulus >> 40
            if number % 2 == 0:
                left = (left + added) % height
            else:
                right = (right + added) % width
        index = left * width + right
        if index < size:
            return index


def _mixed(x: int, a: int, b: int, c: int, d: int, e: int) -> int:
    x = (x ^ (x >> a)) * b % _WORD
    x = (x ^ (x >> c)) * d % _WORD
    return x ^ (x >> e)


@cache
def sample_hash(step: int, sample: int) -> tuple[int, int]:
    """The high and the low half of the hash of a sample in a step."""
    spread, high = 0x9E3779B97F4A7C15, (27, 0x3C79AC492BA7B653, 33, 0x1C69B3F74AC4AE35, 27)
    x = ((sample + 1) * spread + _mixed((step + 1) * spread % _WORD, *high)) % _WORD
    return _mixed(x, *high), _mixed(x, 30, 0xBF58476D1CE4E5B9, 27, 0x94D049BB133111EB, 31)


@dataclass(frozen=True)
class Proof:
    """How many samples are proven to be in exactly one step each, and everything that contradicts it."""

    samples: int
    problems: tuple[str, ...]


def proof(run: Path, total: int | None = None) -> Proof:
    """Audit a run directory. With `total`, the newest checkpoint must be at that sample."""
    problems: list[str] = []
    launches = _launches(run / "ledger", problems)
    found = _newest(run / "checkpoints", problems)
    if found is None:
        return Proof(0, (*problems, "no checkpoint is complete"))
    launch, end = found
    if total is not None and end != total:
        problems.append(f"the newest checkpoint is at {end}, not at {total}")
    owner: dict[int, int] = {}  # position -> step
    try:
        while launch is not None:
            headers, lines = launches[launch]
            start = headers[0]["position"]
            _claim(owner, headers, lines, start, end, problems)
            if headers[0]["parent"] is not None and headers[0]["parent"] >= launch:
                problems.append(f"launch {launch} has the parent {headers[0]['parent']}")
                break
            launch, end = headers[0]["parent"], start
        if end:
            problems.append(f"the first launch starts at {end}")
    except (KeyError, TypeError, ValueError, IndexError, ZeroDivisionError) as error:
        problems.append(f"{type(error).__name__}: {error}")
    if sorted(owner) != list(range(found[1])):
        problems.append(f"{len(owner)} positions are in a step, of {found[1]}")
    steps = [owner[position] for position in sorted(owner)]
    if steps != sorted(steps) or sorted(set(steps)) != list(range(len(set(steps)))):
        problems.append("steps are not numbered one by one")
    return Proof(len(owner), tuple(problems))


Lines = dict[int, list[dict[str, Any]]]  # by rank


def _launches(folder: Path, problems: list[str]) -> dict[int, tuple[list[dict[str, Any]], Lines]]:
    """(headers, lines by rank) of every launch. A line that is no JSON object is a problem, unless it is the last."""
    launches: dict[int, tuple[list[dict[str, Any]], Lines]] = {}
    for path in sorted(folder.iterdir()):
        if not (name := _LEDGER.fullmatch(path.name)):
            continue
        number, rank = int(name[1]), int(name[2])
        headers, lines = launches.setdefault(number, ([], {}))
        texts = [text for text in path.read_bytes().split(b"\n") if text.strip(b" \0")]
        mine = lines.setdefault(rank, [])
        for index, text in enumerate(texts):
            try:
                document = json.loads(text.decode())
                if not isinstance(document, dict):
                    raise ValueError("no object")
            except ValueError as error:
                if index != len(texts) - 1:
                    problems.append(f"{path.name}: {error}")
                continue
            if index == 0:
                if (document.get("launch"), document.get("rank"), document.get("schema")) != (number, rank, 1):
                    problems.append(f"{path.name}: the header is that of another file")
                headers.append(document)
            else:
                mine.append(document)
    return launches


def _claim(
    owner: dict[int, int],
    headers: list[dict[str, Any]],
    lines: Lines,
    start: int,
    end: int,
    problems: list[str],
) -> None:
    """Give every position of [start, end) to its step of this launch; the sums of all ranks must be those of the order."""
    shared = [
        {key: header[key] for key in ("ranks", "step", "position", "parent", "order", "launch")} for header in headers
    ]
    if any(one != shared[0] for one in shared) or shared[0]["ranks"] != len(lines):
        problems.append(f"the headers of a launch differ: {shared}")
    order = shared[0]["order"]
    runs: dict[int, dict[int, dict[str, Any]]] = {}
    for rank, mine in lines.items():
        for line in mine:
            if line["start_sample"] < end:
                if rank in runs.setdefault(line["first_step"], {}):
                    problems.append(f"rank {rank} has step {line['first_step']} twice")
                runs[line["first_step"]][rank] = line
    at, step = start, shared[0]["step"]
    for first, by_rank in sorted(runs.items()):
        facts = {(r["start_sample"], r["global_batch_size"], r["steps"], r["outcome"]) for r in by_rank.values()}
        if len(facts) != 1:
            problems.append(f"the ranks differ in step {first}: {sorted(facts)}")
        position, batch, steps, outcome = min(facts)
        if (position, first) != (at, step) or outcome not in ("applied", "skipped"):
            problems.append(f"step {first} is at {position} ({outcome}), not step {step} at {at}")
        if batch < 1 or not 0 < steps * batch <= end - position:
            problems.append(f"step {first} has {steps} × {batch} samples, and the checkpoint is at {end}")
            return
        high = low = 0
        for offset in range(steps * batch):
            number = first + offset // batch
            if position + offset in owner:
                problems.append(f"position {position + offset} is in two steps")
            owner[position + offset] = number
            sample = sample_id(order["size"], order["seed"], order["shuffle"], position + offset)
            one = sample_hash(number, sample)
            high, low = (high + one[0]) % _WORD, (low + one[1]) % _WORD
        values = [int(r["hash"], 16) for r in by_rank.values()]
        sums = (sum(v >> 64 for v in values) % _WORD, sum(v % _WORD for v in values) % _WORD)
        if any(len(r["hash"]) != 32 for r in by_rank.values()) or sums != (high, low):
            problems.append(f"steps {first} to {first + steps}: not the samples of the order")
        if sum(r["samples"] for r in by_rank.values()) != steps * batch:
            problems.append(f"steps {first} to {first + steps}: not {steps * batch} samples")
        at, step = position + steps * batch, first + steps
    if at != end:
        problems.append(f"positions {at} to {end} are in no ledger")


def _newest(folder: Path, problems: list[str]) -> tuple[int, int] | None:
    """(launch, position) of the newest checkpoint: by launch, then by step. It must be sound."""
    named = [(int(m[2]), int(m[1]), m[0]) for path in folder.iterdir() if (m := _CHECKPOINT.fullmatch(path.name))]
    for launch, step, name in sorted(named, reverse=True):
        try:
            manifest = json.loads((folder / name / "manifest.json").read_bytes())
            text = (folder / name / "state.json").read_bytes()
            if hashlib.sha256(text).hexdigest() != manifest["files"]["state.json"]["sha256"]:
                raise ValueError("state.json has another SHA-256")
            state = json.loads(text)
            if (state["launch"], state["step"]) != (launch, step):
                raise ValueError("state.json is that of another checkpoint")
            return launch, state["position"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            problems.append(f"{name}: {error}")
    return None
