"""Flags in files: lists of flags, and shell scripts that keep them in variables."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from batchwright.core.errors import ConfigError

from .parse import MOST_ITEMS

_ASSIGNED = re.compile(r"([a-zA-Z_]\w*)(\+?)=(\(?)(.*)", re.DOTALL).fullmatch
_USED = re.compile(r"\$\{?(\w+)").match


def has_flags(text: str) -> bool:
    return (
        re.search(r"^[ \t]*(--?[a-zA-Z]|[+\w.]+=)", text, re.MULTILINE) is not None
        or re.search(r"\s--[a-zA-Z]", text) is not None
    )


def is_flag(word: Any) -> bool:
    return isinstance(word, str) and word.startswith("--") and len(word) > 2


def split_script(path: str, text: str) -> list[str]:
    import shlex

    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        shown = path[:120]
        raise ConfigError(f"{shown} is not a list of flags: {error}.", field="file", given=shown) from None
    return _with_variables(path, words)


def _with_variables(path: str, words: list[str]) -> list[str]:
    """The words of a script with the flags of its variables (`ARGS=(--lr 1)`, `ARGS="--lr 1"`) where it uses them.

    If it uses none of them, another script may: then all count.
    """
    flags: dict[str, list[str]] = {}
    inserted = 0

    def is_used(word: str) -> bool:
        name = _USED(word)
        return name is not None and name[1] in flags

    def filled(parts: Iterable[str]) -> list[str]:
        nonlocal inserted
        found: list[str] = []
        for part in parts:
            name = _USED(part)
            one = flags.get(name[1], [part]) if name else [part]
            inserted += len(one) if one and name else 0
            if inserted > MOST_ITEMS:
                shown = path[:120]
                message = f"{shown}: its variables make more than {MOST_ITEMS:,} words."
                raise ConfigError(message, field="file", given=shown)
            found += one
        return found

    rest: list[str] = []
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        assigned = _ASSIGNED(word)
        name, more, array, value = assigned.groups() if assigned else ("", "", "", word)
        if array:
            first, left_open = at, value.count("(") - value.count(")")
            while left_open >= 0 and at < len(words):
                left_open += words[at].count("(") - words[at].count(")")
                at += 1
            parts = [value, *words[first:at]]
            parts[-1] = parts[-1].rpartition(")")[0] if left_open < 0 else parts[-1]
        else:
            parts = _parts(value.rstrip("; \n"))
            if not name or not any(is_flag(part) or is_used(part) for part in parts):
                rest.append(word)
                continue
        parts = filled(part for part in parts if part)
        if more:
            flags.setdefault(name, []).extend(parts)
        else:
            flags[name] = parts
    split = [parts if any(map(is_used, parts := _parts(word))) else [word] for word in rest]
    if any(is_used(part) for parts in split for part in parts):
        return filled(part for parts in split for part in parts)
    return [*rest, *(word for one in flags.values() for word in one)]


def _parts(word: str) -> list[str]:
    """The words inside a quoted one, as the shell that uses it splits it."""
    import shlex

    if not re.search(r"\s", word) or not ("--" in word or "$" in word):
        return [word]
    try:
        return shlex.split(word)
    except ValueError:
        return word.split()
