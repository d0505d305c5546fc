"""The journal of a probe: append-only lines of JSON, each on disk before the next trial starts.

    {"kind": "trial", "identity": {...}, "conditions": {...}, "trial": {...}}
    {"kind": "written", "files": [...]}       files that the command writes: they are not its code
    {"kind": "fresh"}                         --fresh: lines before this one no longer count

The identity is what was probed: code, model, optimizer, precision, device, versions. Every trial has it, because two
probes may write into one file at once. A later probe continues with the stored trials that have the same identity and the
same conditions (memory, ranks, …). A line that was cut off by a crash, or is damaged, is skipped.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from batchwright.core import codec
from batchwright.rundir import atomic
from batchwright.rundir.files import parse_object, read_bytes

from .machine import digest
from .records import Trial


def path_for(directory: Path, target: str) -> Path:
    """The journal's path: a readable name, made unique by a hash."""
    name = re.sub(r"[^A-Za-z0-9]+", "-", target).strip("-")[-40:].strip("-")
    return directory / f"probe-{name}-{digest(target)}.jsonl"


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The differences between two identities, as text.

    >>> changes({"optimizer": "AdamW", "device": "cpu"}, {"optimizer": "SGD", "device": "cpu"})
    ['optimizer changed: AdamW -> SGD']
    """
    found: list[str] = []
    for key in dict.fromkeys([*before, *now]):
        old, new = before.get(key), now.get(key)
        whole = key.removesuffix("_options")
        if old == new or (whole != key and before.get(whole) != now.get(whole)):
            continue  # another optimizer has other options: its name is enough
        name = "arguments" if key == "args" else key.replace("_", " ")
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            for part in sorted({*old, *new}):
                if old.get(part) != new.get(part):
                    found.append(f"{name} changed: {part} {_short(old.get(part))} -> {_short(new.get(part))}")
        else:
            found.append(f"{name} changed: {_short(old)} -> {_short(new)}")
    return found


def _short(value: Any) -> str:
    return "nothing" if value is None else str(value)[:80]


class Journal:
    """One target's journal (or none); an error of the disk is kept in `error` and never stops a probe."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.error: str | None = None
        self.written: set[str] = set()
        """Files that the command writes, by the journal."""

    def stored(self) -> list[tuple[dict[str, Any], Any, Trial]]:
        """(identity, conditions, trial) of everything stored, oldest first."""
        found: list[tuple[dict[str, Any], Any, Trial]] = []
        try:
            text = read_bytes(self.path) if self.path and self.path.is_file() else b""
        except OSError as error:
            self.error = f"{self.path}: {error.strerror}"
            return []
        for line in text.split(b"\n"):
            try:
                record = parse_object(line)
                if record["kind"] == "written":
                    self.written |= set(map(str, record["files"]))
                elif record["kind"] == "fresh":
                    found.clear()
                    self.written.clear()
                elif record["kind"] == "trial":
                    identity, trial = dict(record["identity"]), codec.read(Trial, record["trial"])
                    found.append((identity, record["conditions"], trial))
            except (ValueError, KeyError, TypeError, AttributeError):
                continue  # cut off while it was written, or damaged
        for identity, *_ in found:
            if self.written and isinstance(code := identity.get("code"), dict):
                identity["code"] = {path: value for path, value in code.items() if path not in self.written}
        return found

    def restart(self) -> None:
        """Let the stored trials no longer count, in this probe and in later ones."""
        if self.stored():
            self._append([{"kind": "fresh"}])

    def resume(
        self, identity: Mapping[str, Any], conditions: Callable[[str], Mapping[str, Any]]
    ) -> tuple[list[Trial], list[str]]:
        """The stored trials with this identity and these conditions, and what changed since the last probe."""
        identity = json.loads(json.dumps(identity))
        stored = self.stored()
        trials = [
            replace(trial, resumed=True)
            for of, under, trial in stored
            # A crash or a hang is measured again: its cause may be gone.
            if of == identity and under == conditions(trial.purpose) and trial.status in ("fits", "oom")
        ]
        return trials, changes(stored[-1][0], identity) if stored else []

    def add(
        self, identity: Mapping[str, Any], conditions: Mapping[str, Any], trial: Trial, written: Collection[str] = ()
    ) -> None:
        """Append a trial, and before it the files that the command has written, if there are new ones."""
        lines: list[dict[str, Any]] = []
        if new := set(written) - self.written:
            lines.append({"kind": "written", "files": sorted(new)})
            self.written |= new
        record = {"identity": dict(identity), "conditions": dict(conditions), "trial": codec.encode(trial)}
        self._append([*lines, {"kind": "trial", **record}])

    def _append(self, lines: list[dict[str, Any]]) -> None:
        if self.path is None or self.error:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path, "a+b", buffering=0, opener=atomic.no_follow) as file:
                torn = b""
                if file.seekable() and file.tell() > 0:
                    file.seek(-1, os.SEEK_END)
                    torn = b"" if file.read(1) == b"\n" else b"\n"
                data = torn + b"".join(json.dumps(line).encode() + b"\n" for line in lines)
                while data:
                    data = data[file.write(data) or 0 :]
                os.fsync(file.fileno())
        except OSError as error:
            self.error = f"{self.path}: {error.strerror}"
