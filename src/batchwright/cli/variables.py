"""The variables of a shell script: those that contain flags, and those with one value that is written once."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from batchwright.core.errors import ConfigError

from .parse import MOST_ITEMS
from .shell import Assigned, Command, is_flag

# `$NAME`, `${NAME}`, `${NAME[@]}`, and those that say what counts if it is not set; alone or after `key=`.
_USED = re.compile(
    r"(?P<key>[-+\w.]+=)?\$(?:(?P<plain>\w+)"
    r"|\{(?P<name>\w+)(?P<all>\[[@*]\]|)(?::?-.*|:?\+\"?\$\{(?P=name)(?P=all)\}\"?)?\})",
    re.DOTALL,
).fullmatch
_MENTIONED = re.compile(r"\$\{?(\w+)").findall
_SETS = frozenset({"for", "select", "read", "getopts", "mapfile", "unset"})  # commands that set variables


class Variables:
    """The variables of a script that contain flags, or one value that is written once."""

    def __init__(self, shown: str, found: Collection[Command]) -> None:
        self._shown = shown
        self._values: dict[str, list[str]] = {}
        self._with_flags: set[str] = set()
        self._used: set[str] = set()
        self._inserted = 0
        settings = [one for command in found for one in command.assigned]
        self._lines = _replaced(settings)
        self._read_in: dict[str, int] = {}  # the line whose value counts
        self._arrays = {one.name for one in settings if not isinstance(one.value, str)}
        self._single = _single(settings, found)
        self._values |= {one.name: one.parts for one in settings if one.name in self._single and not _is_computed(one)}
        for one in settings:
            self._set(one)
        self._used = set()

    def _set(self, one: Assigned) -> None:
        more = one.more and one.name in self._with_flags
        if not (more or any(map(self._is_read, one.parts))):
            return
        filled = self.filled(one.parts)
        with_flags = any(map(is_flag, filled))
        if with_flags or more or one.name in self._single:
            self._read_in[one.name] = one.line
            self._values[one.name] = [*self._values.get(one.name, ()), *filled] if one.more else filled
        if with_flags:
            self._with_flags.add(one.name)

    def _is_read(self, part: str) -> bool:
        """Whether a word is a flag, a variable that is known, or a text with one."""
        match = _USED(part)
        if match:
            return (match["plain"] or match["name"]) in self._values
        return is_flag(part) or (part[:1] != "$" and " " in part and any(n in self._values for n in _MENTIONED(part)))

    def filled(self, line: Iterable[str]) -> list[str]:
        """These words with the values of variables; `key=$NAME` only if it is one word."""
        found: list[str] = []
        for word in line:
            match = _USED(word) if "$" in word else None
            name = match and (match["plain"] or match["name"])
            key, value = match["key"] if match else None, self._values.get(name or "")
            if match and value and name in self._arrays and not match["all"]:
                value = value[:1]  # as in bash, "$NAME" is the first word of an array
            if name is None or value is None or (key and len(value) != 1):
                found.append(word)
                continue
            self._used.add(name)
            self._inserted += len(value)
            if self._inserted > MOST_ITEMS:
                message = f"{self._shown}: its variables make more than {MOST_ITEMS:,} words."
                raise ConfigError(message, field="file", given=self._shown)
            found += [f"{key}{value[0]}"] if key else value
        return found

    def has_flags(self, name: str) -> bool:
        """Whether the value of a variable contains flags."""
        return name in self._with_flags

    def unused(self) -> list[str]:
        """The flags of all variables, if no command uses one of these."""
        if self._with_flags & self._used:
            return []
        return [word for name, value in self._values.items() if name in self._with_flags for word in value]

    def notes(self, line: Iterable[str]) -> list[str]:
        """A note on each variable that a command line has, and that is set to different values."""
        mentioned = set(_MENTIONED(" ".join(line)))
        found: list[str] = []
        for name, lines in self._lines.items():
            shown = " and ".join(map(str, dict.fromkeys(lines)))
            if name in self._with_flags:
                read = self._read_in[name]
                found.append(
                    f"{name} is set in lines {shown}, and line {read} is read. If another one counts, paste the command."
                )
            elif name in mentioned:
                found.append(f"{name} is set in lines {shown}, so its value is not known.")
        return found


def _own(one: Assigned) -> bool:
    """Whether a variable is set from its own value."""
    names = [match["plain"] or match["name"] for match in map(_USED, one.parts) if match]
    return one.more or one.name in names


def _replaced(settings: Iterable[Assigned]) -> dict[str, list[int]]:
    """The lines where a name is set to different values, none of which uses the one before."""
    found: dict[str, list[Assigned]] = {}
    for one in settings:
        if not _own(one):
            found.setdefault(one.name, []).append(one)
    return {n: [one.line for one in ones] for n, ones in found.items() if len({str(one.value) for one in ones}) > 1}


def _is_computed(one: Assigned) -> bool:
    """Whether a value has something that a shell replaces."""
    return any(mark in part for part in one.parts for mark in "$`")


def _single(settings: Iterable[Assigned], found: Iterable[Command]) -> set[str]:
    """The names that are set in one way only, and by no loop or `read`."""
    values: dict[str, set[str]] = {}
    for one in settings:
        values.setdefault(one.name, set()).update({str(one.value), *(["+="] if one.more else [])})
    others = {word for one in found if _SETS & set(one.words[:3]) for word in one.words}
    return {name for name, ones in values.items() if len(ones) == 1 and name not in others}
