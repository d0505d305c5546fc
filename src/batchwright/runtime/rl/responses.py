"""Finished responses: one file for each rollout micro batch, which the trainer reads and which survives a kill.

    RUN/rollouts/launch-00003/prompts-000000000000384-8-policy-12.rows     8 prompts from position 384 on, sampled by policy 12

A file is a SHA-256 and the packed responses (data/rows.py; nothing in it is pickled), each with its position and generation.
Before them it says for which dataset, order and model it was made, and has a digest of the weights that sampled it. It is
written under another name and renamed, so it is complete or absent. Files are the queue, too: who samples writes a file, who
trains reads it, so that the queue takes no memory, and there is one way for threads, processes and ranks.

A file goes when a checkpoint has its prompts. If its policy is newer than every checkpoint, it goes when its round is trained:
no restart could use it. Its name stays in the file `trained`, so that a restart can count what was lost.

Each launch has its own folder. A launch that starts takes over the files of earlier ones that it can use and deletes the
others. A process of an earlier launch that still runs finds its folder gone, and cannot add to the run.
"""

from __future__ import annotations

import os
import re
import shutil
from bisect import bisect_right, insort
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from batchwright.core.errors import RunError
from batchwright.rundir import atomic, names
from batchwright.rundir.files import read_bytes, write_fault
from batchwright.runtime.data.rows import pack, unpack
from batchwright.runtime.device import to_device

from .task import Group, Prompts

_NAME = re.compile(r"prompts-(\d{15,18})-(\d{1,15})-policy-(\d{1,18})\.rows")
_DIGEST = 32  # bytes
_TRAINED = "trained"  # names of files that were deleted after their round


@dataclass(frozen=True)
class Piece:
    """The finished responses to consecutive prompts, all sampled by one policy.

    >>> Piece.named("prompts-000000000000384-8-policy-12.rows")
    Piece(positions=range(384, 392), version=12)
    """

    positions: range
    version: int

    @property
    def name(self) -> str:
        """The name of its file."""
        return f"prompts-{self.positions.start:015d}-{len(self.positions)}-policy-{self.version}.rows"

    @staticmethod
    def named(name: str) -> Piece | None:
        """The piece of a file; None for any other name."""
        found = _NAME.fullmatch(name)
        if not found:
            return None
        first, count, version = map(int, found.groups())
        return Piece(range(first, first + count), version)


class Responses:
    """The folder of one launch: `write`, `read`, and what is kept of earlier launches.

    `conditions` is a digest of what responses depend on beside the policy: the dataset, its order, the shape of the model.
    """

    def __init__(self, run: Path, launch: int, generations: int, conditions: str = "") -> None:
        self.root, self.generations, self.conditions = run / names.ROLLOUTS, generations, conditions
        self.folder = self.root / f"launch-{launch:05d}"

    def write(self, prompts: Prompts, groups: list[Group], weights: str = "") -> Piece:
        """Store what a rollout returned; `weights` is a digest of those of the policy."""
        piece = Piece(prompts.positions, prompts.policy_version)
        rows: list[Any] = [{"conditions": self.conditions, "weights": weights}]
        for position, group in zip(prompts.positions, groups, strict=True):
            for generation, response in enumerate(group):
                row = to_device(response, torch.device("cpu"))
                rows.append({**row, "prompt_position": position, "generation": generation})
        try:
            block = pack(rows, pickled=False).numpy().tobytes()
        except TypeError as error:
            raise RunError(
                f"a response of RLTask.rollout cannot be stored: {error}. Return tensors, arrays, numbers, text, and lists or "
                "dicts of them.",
                field="rollout",
            ) from None
        try:
            # Not synced: after a power failure the digest shows what is missing, and it is sampled again.
            atomic.write(self.folder / piece.name, sha256(block).digest() + block, sync=False)
        except OSError as error:
            raise write_fault(error, "finished responses", self.folder, "Checkpoints are untouched.") from error
        return piece

    def read(self, piece: Piece) -> list[Group]:
        """The groups of a piece; every response has its position, generation and policy."""
        try:
            rows = self._rows(self.folder / piece.name)
        except (OSError, ValueError) as error:
            raise RunError(f"{self.folder / piece.name} cannot be read: {error}.", field="rollouts") from error
        flat = [{**row, "policy_version": piece.version} for row in rows[1:]]
        return [flat[at : at + self.generations] for at in range(0, len(flat), self.generations)]

    def _rows(self, path: Path) -> list[Any]:
        data = read_bytes(path)
        if sha256(data[_DIGEST:]).digest() != data[:_DIGEST]:
            raise ValueError("its digest is another one")
        # A copy, because torch does not take memory that cannot be written.
        return unpack(torch.frombuffer(bytearray(data[_DIGEST:]), dtype=torch.uint8), pickled=False)

    def adopt(
        self, usable: Callable[[Piece], bool], version: int = 0, weights: str = "", position: int = 0
    ) -> tuple[dict[Piece, float | None], int]:
        """Take over the files of earlier launches that are whole and usable; delete all others.

        `weights` is a digest of those of policy `version`. Returns the pieces, which do not overlap, with the sum of their
        rewards, and how many responses were discarded. Those before `position` are not counted: they are trained, and a
        checkpoint has them.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise write_fault(error, "finished responses", self.root, "Checkpoints are untouched.") from error
        found: list[tuple[Piece, Path]] = []
        gone: set[Piece] = set()
        for folder in (self.root / name for name in names.listed(self.root)):
            if folder != self.folder and folder.is_dir():
                found += [(piece, folder / name) for name in names.listed(folder) if (piece := Piece.named(name))]
                gone.update(_trained(folder))
        gone -= {piece for piece, _ in found}
        found.sort(key=lambda pair: (pair[0].positions.start, -pair[0].version))
        kept: dict[Piece, float | None] = {}
        end = 0
        for piece, path in found:
            expected = weights if piece.version == version else None
            rows = self._whole(path, piece, expected) if piece.positions.start >= end and usable(piece) else None
            if rows is not None:
                os.replace(path, self.folder / piece.name)
                kept[piece] = total_reward(rows)
                end = piece.positions.stop
            else:
                gone.add(piece)
        discarded = sum(len(p.positions) for p in gone if p.positions.stop > position) * self.generations
        for name in names.listed(self.root):
            if self.root / name != self.folder:
                shutil.rmtree(self.root / name, ignore_errors=True)
        return kept, discarded

    def _whole(self, path: Path, piece: Piece, weights: str | None) -> list[Any] | None:
        """The responses in a file; None if it is damaged, was made under other conditions, or by other weights."""
        try:
            made, *rows = self._rows(path)
            same = made["conditions"] == self.conditions and weights in (None, made["weights"])
        except (OSError, ValueError, KeyError, TypeError, IndexError):
            return None
        return rows if same and len(rows) == len(piece.positions) * self.generations else None

    def delete(self, piece: Piece) -> None:
        """Delete the file of a piece, if it is there."""
        (self.folder / piece.name).unlink(missing_ok=True)

    def retire(self, piece: Piece) -> None:
        """Delete the file of a piece that is trained and that no restart can use; its name stays, to be counted."""
        try:
            with open(self.folder / _TRAINED, "a") as file:
                file.write(f"{piece.name}\n")
        except OSError as error:
            raise write_fault(error, "finished responses", self.folder, "Checkpoints are untouched.") from error
        self.delete(piece)

    def forget(self, before: int) -> None:
        """Delete all files whose prompts are before a position: a checkpoint has them."""
        for name in names.listed(self.folder):
            if (piece := Piece.named(name)) and piece.positions.stop <= before:
                self.delete(piece)
        if all(piece.positions.stop <= before for piece in _trained(self.folder)):
            (self.folder / _TRAINED).unlink(missing_ok=True)


def _trained(folder: Path) -> list[Piece]:
    """The pieces of a launch that were deleted after their round. A crash may have cut the last name off."""
    with suppress(OSError):
        return [piece for name in (folder / _TRAINED).read_text().splitlines() if (piece := Piece.named(name))]
    return []


def total_reward(responses: Iterable[Mapping[str, Any]]) -> float | None:
    """The sum of their rewards; None if one has no number as its `reward`.

    >>> total_reward([{"reward": 1}, {"reward": torch.tensor(0.5)}]), total_reward([{"score": 1}])
    (1.5, None)
    """
    try:
        return sum(float(response["reward"]) for response in responses)
    except (KeyError, TypeError, ValueError, RuntimeError):
        return None


class Spans:
    """Spans of positions that do not overlap, each with a value; found by a position in it.

    >>> spans = Spans(); spans.add(range(8, 12), "b"); spans.add(range(0, 4), "a")
    >>> spans.at(9), spans.at(4), spans.gap(0)
    ('b', None, range(4, 8))
    """

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._held: dict[int, tuple[range, Any]] = {}

    def add(self, positions: range, value: Any) -> None:
        """Add a span, or give the span that begins there another value."""
        if positions.start not in self._held:
            insort(self._starts, positions.start)
        self._held[positions.start] = (positions, value)

    def remove(self, positions: range) -> None:
        """Remove a span."""
        self._starts.remove(positions.start)
        del self._held[positions.start]

    def at(self, position: int) -> Any:
        """The value of the span that has a position, or None."""
        at = bisect_right(self._starts, position) - 1
        positions, value = self._held[self._starts[at]] if at >= 0 else (range(0), None)
        return value if position in positions else None

    def between(self, start: int, stop: int) -> list[Any]:
        """The values of the spans that begin in an interval, in order."""
        first, last = bisect_right(self._starts, start - 1), bisect_right(self._starts, stop - 1)
        return [self._held[one][1] for one in self._starts[first:last]]

    def count_from(self, start: int) -> int:
        """How many spans begin at a position or after it."""
        return len(self._starts) - bisect_right(self._starts, start - 1)

    def gap(self, position: int) -> range:
        """The first positions, from one on, that no span has; its end is the next span, or far away."""
        at = bisect_right(self._starts, position) - 1
        if at >= 0:
            position = max(position, self._held[self._starts[at]][0].stop)
        at += 1
        while at < len(self._starts) and self._starts[at] == position:
            position, at = self._held[position][0].stop, at + 1
        return range(position, self._starts[at] if at < len(self._starts) else 2**62)

    def forget(self, before: int) -> None:
        """Remove all spans that end at a position or before it."""
        while self._starts and self._held[self._starts[0]][0].stop <= before:
            del self._held[self._starts.pop(0)]
