"""One random damage to a folder: an entry replaced or removed, bytes, lines, or values of a JSON document changed."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

JUNK = b'\x00\xff\xfe{["junk": \xed\xa0\x80 1e999, \n'
DEEP = "[" * 100_000  # deeper than any recursion limit
# As text, since Python cannot build all of them: huge and special numbers, halves of surrogate pairs.
VALUES = (
    *("null", "true", "false", "0", "-1", "1", "3", "0.5", "-0.0", "1e308", "1e999", "-1e999", "NaN"),
    *("9" * 30, "9" * 5000, "-" + "9" * 30, '""', '"x"', '"-1"', '"\\ud800"', '"\\u0000"', '"../../../x"', '"/"'),
    *("[]", "{}", "[[]]", "[null]", '{"x": 1}', '["\\udfff"]', "[" * 900 + "]" * 900, '"' + "y" * 70_000 + '"'),
)
_LAUNCH_NAMES = ("0000", "0007", "7", "007", "\u00b2", "\u0663", "9" * 200, "-1", "x", "0001.bak", "1e3", " 1")


class Mutation:
    """Damages `root` with what `draw` gives; `outside` is a file that is not ours."""

    def __init__(self, root: Path, outside: Path, draw: random.Random, user: int | None) -> None:
        self.root, self.outside, self.draw, self.user = root, outside, draw, user
        self.files = sorted(p for p in root.rglob("*") if p.is_file())
        self.folders = sorted(p for p in root.rglob("*") if p.is_dir())
        self.path = root
        self.what = ""

    def apply(self) -> str:
        """Damage something; returns what, as text."""
        kind = self.draw.choices((self.values, self.bytes, self.entry, self.names), (50, 20, 25, 5))[0]
        kind()
        return self.what

    def _say(self, what: str, path: Path | None = None) -> None:
        self.path = path or self.path
        self.what = f"{self.path.relative_to(self.root)}: {what}"

    # An entry -----------------------------------------------------------------------------------------------------

    def entry(self) -> None:
        """Remove a file or folder, or put something else in its place."""
        path = self.draw.choice(self.files + self.folders * 2)
        kinds: list[Callable[[Path], None]] = [_fifo, _loop, _zero, _dangling, self._link, _folder, _file, _nothing]
        if self.user is not None:
            kinds += [_unreadable] * 3
        made = self.draw.choice(kinds)
        self._say(made.__name__.strip("_"), path)
        if made is not _unreadable:
            _remove(path)
        made(path)

    def _link(self, path: Path) -> None:
        path.symlink_to(self.outside)

    def names(self) -> None:
        """Rename a launch, a checkpoint or a ledger, or add a folder with a strange name."""
        launches = [p for p in self.folders if p.parent.name == "launches"]
        others = [p for p in self.root.rglob("*") if p.name.startswith(("step-", "launch-"))]
        if not launches:
            return self.bytes()
        one = self.draw.choice([*launches, *launches, *others])
        if one in launches:
            new = one.with_name(self.draw.choice(_LAUNCH_NAMES))
        else:
            digits = [index for index, letter in enumerate(one.name) if letter.isdigit()]
            at = self.draw.choice(digits)
            new = one.with_name(one.name[:at] + self.draw.choice("0123456789\u0663") + one.name[at + 1 :])
        if os.path.lexists(new):
            return self.bytes()
        if self.draw.random() < 0.5:
            one.rename(new)
            self._say(f"renamed to {new.name}", one)
        else:
            (shutil.copytree if one.is_dir() else shutil.copy)(one, new)
            self._say(f"copied to {new.name}", one)
        return None

    # Bytes and lines ----------------------------------------------------------------------------------------------

    def bytes(self) -> None:
        """Change the bytes of a file."""
        path = self._file()
        content = path.read_bytes()
        at = self.draw.randrange(len(content) + 1)
        lines = content.splitlines(keepends=True) or [b""]
        one, two = self.draw.randrange(len(lines)), self.draw.randrange(len(lines))
        other = self.draw.choice(self.files)
        changes: dict[str, Callable[[], bytes]] = {
            "empty": lambda: b"",
            f"cut at {at}": lambda: content[:at],
            "junk at the end": lambda: content + JUNK,
            f"junk at {at}": lambda: content[:at] + JUNK + content[at:],
            f"NULs from {at} on": lambda: content[:at] + bytes(len(content) - at),
            f"not UTF-8 at {at}": lambda: content[:at] + b"\xff\xfe\xc3" + content[at:],
            f"line {one} twice": lambda: b"".join([*lines[: one + 1], *lines[one:]]),
            f"line {one} removed": lambda: b"".join(lines[:one] + lines[one + 1 :]),
            f"lines {one} and {two} exchanged": lambda: _exchanged(lines, one, two),
            f"exchanged with {other.relative_to(self.root)}": lambda: other.read_bytes(),
            "deeply nested": lambda: DEEP.encode(),
            "another JSON value": lambda: self.draw.choice(VALUES).encode(),
        }
        name = self.draw.choice(sorted(changes))
        new = changes[name]()
        if name.startswith("exchanged with"):
            other.write_bytes(content)
        path.write_bytes(new)
        self._say(name, path)

    def _file(self) -> Path:
        """A file, JSON more often than others."""
        text = [path for path in self.files if path.suffix in (".json", ".jsonl")]
        return self.draw.choice(text * 3 + self.files)

    # Values of JSON -----------------------------------------------------------------------------------------------

    def values(self) -> None:
        """Replace or remove one value in a JSON document or in one line of a file of JSON lines."""
        text = [path for path in self.files if path.suffix in (".json", ".jsonl")]
        plans = [path for path in text if path.name in ("plan.json", "result.json")]
        path = self.draw.choice(text + plans * (len(text) // 3))
        lines = [path.read_bytes()] if path.suffix == ".json" else path.read_bytes().splitlines(keepends=True)
        index = self.draw.randrange(len(lines)) if lines else 0
        try:
            document = json.loads(lines[index])
        except (ValueError, IndexError):
            return self.bytes()
        places = _places(document)
        if not places:
            return self.bytes()
        place = self.draw.choice(places)
        holder = document
        for key in place[:-1]:
            holder = holder[key]
        shown = "".join(f"[{key!r}]" for key in place)
        if self.draw.random() < 0.2:
            del holder[place[-1]]
            new, value = json.dumps(document), "removed"
        else:
            value = self.draw.choice(VALUES)
            holder[place[-1]] = "<here>"
            new = json.dumps(document).replace('"<here>"', value)
        lines[index] = new.encode() + b"\n"
        path.write_bytes(b"".join(lines))
        self._say(f"line {index + 1}, {shown}: {value[:60]}", path)
        return None


def _places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value in a JSON document."""
    members = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found: list[tuple[Any, ...]] = [at] if at else []
    for key, item in members:
        found += _places(item, (*at, key))
    return found


def _exchanged(lines: list[bytes], one: int, two: int) -> bytes:
    lines[one], lines[two] = lines[two], lines[one]
    return b"".join(lines)


def _remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _nothing(path: Path) -> None:
    pass


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _loop(path: Path) -> None:
    path.symlink_to(path.name)


def _zero(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _dangling(path: Path) -> None:
    path.symlink_to(path.with_name("nowhere"))


def _folder(path: Path) -> None:
    path.mkdir()


def _file(path: Path) -> None:
    path.write_bytes(b"a file\n")


def _unreadable(path: Path) -> None:
    path.chmod(0)
