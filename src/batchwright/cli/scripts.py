"""Flags in files: lists of flags, and shell scripts, of which one command is read as if it were pasted."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import dropwhile
from typing import Any

from batchwright.core.errors import ConfigError

from .shell import BEFORE, Command, Unclosed, commands, is_flag
from .variables import Variables

_MOST_COMMANDS = 100
_CONFIGS = (".yaml", ".yml", ".toml")
_SHELLS = frozenset({"sh", "bash", "zsh", "dash"})
_READERS = _SHELLS | {"sbatch", "ssh"}  # they read a script from a text behind <<


@dataclass(frozen=True)
class Script:
    """What is read of a file of flags: the keys, the words that are no keys, and notes on what is not read."""

    keys: Mapping[str, str]
    left: tuple[str, ...]
    notes: tuple[str, ...] = ()


def has_flags(text: str) -> bool:
    """Whether a text may be a list of flags, `key=value` lines or a shell script.

    >>> [has_flags(text) for text in ("--lr 1", "a=1", "a: 1")]
    [True, True, False]
    """
    return (
        re.search(r"^[ \t]*(--?[a-zA-Z]|[+\w.]+=)", text, re.MULTILINE) is not None
        or re.search(r"\s--[a-zA-Z]", text) is not None
    )


@lru_cache(maxsize=4)
def read_script(path: str, text: str) -> Script:
    """A list of flags, or the command of a script that has a framework's flags, with the values of its variables.

    Read are variables with flags (`ARGS=(--lr 1)`, `ARGS="--lr 1"`), and values that are written once (`N=8`). If no command
    uses one with flags, another script may: then all count. Commands whose flags differ are an error.
    """
    shown = path[:120]
    try:
        found = _with_texts(commands(text))
    except Unclosed as error:
        raise ConfigError(f"{shown} is not a list of flags: {error}.", field="file", given=shown) from None
    variables = Variables(shown, found)
    first = next((one.words[0] for one in found if set(one.words) - BEFORE), "--")
    if first.startswith("-") or "=" in first:  # no program: a list of flags
        every = [w for one in found for w in (*_settings(one, variables), *variables.filled(one.words))]
        return Script(*pasted([*every, *variables.unused()]))
    read = [
        Line(one.line, tuple(inner))
        for one in found
        if one.words
        for inner in opened(variables.filled(dropwhile(BEFORE.__contains__, one.words)), variables)
    ]
    chosen, others = choose(shown, read)
    unused = variables.unused()
    if chosen is None:  # perhaps the command of another script, which reads the variables
        every = (*(word for line in read for word in line.words), *unused)
        return Script(*pasted(every), _named(shown, variables.notes(every)))
    keys, left = pasted([*chosen.words, *unused])
    notes = [*variables.notes(chosen.words), *_lost(read), *([] if unused else _unknown(left))]
    if others:
        numbers = ", ".join(map(str, dict.fromkeys(others[:5])))
        notes.append(f"line {chosen.number} is read, and not line {numbers}, which has flags about a batch, too.")
    return Script(keys, left, _named(shown, notes))


def _with_texts(found: list[Command]) -> list[Command]:
    """The commands of a script, also those in a text for another shell (`sbatch <<END`)."""
    inner = [
        replace(each, line=one.line + each.line)
        for one in found
        if one.texts and any(word.rsplit("/", 1)[-1] in _READERS for word in one.words)
        for text in one.texts
        for each in commands(text)
    ]
    return [*found, *inner]


def _named(shown: str, notes: Iterable[str]) -> tuple[str, ...]:
    return tuple(f"{shown}: {note}" for note in notes)


def pasted(line: Iterable[str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """The keys of a command line, and its other words, as `batchwright VERB` reads it."""
    from .paste import unpaste

    kept, left = unpaste(list(line), {}, lambda key: True, everything=True)
    return {key: value for key, equals, value in (word.partition("=") for word in kept) if equals}, left


@dataclass(frozen=True)
class Line:
    """A command of a script, with the values of variables."""

    number: int
    words: tuple[str, ...]


def choose(shown: str, lines: Iterable[Line]) -> tuple[Line | None, list[int]]:
    """The one command with a framework's flags, and the lines of others that have flags about a batch.

    A command with a batch comes before one without, and one that a launcher starts before others. An error if several are
    alike and their flags differ; None if no command has any.
    """
    ranked: dict[tuple[bool, ...], dict[tuple[Any, ...], Line]] = {}
    sized: list[int] = []
    for line in lines:
        if not any(map(_may_count, line.words)):
            continue
        said, rank = _rank(line.words)
        if any(said):
            ranked.setdefault(rank, {}).setdefault(said, line)
            sized += [line.number] if rank[0] and rank[-1] else []
        if sum(map(len, ranked.values())) > _MOST_COMMANDS:
            message = f"{shown} has more than {_MOST_COMMANDS} commands with flags of a framework."
            raise ConfigError(message, field="file", given=shown)
    if not ranked:
        return None, []
    best = list(ranked.pop(max(ranked)).values())
    if len(best) > 1:
        numbers = ", ".join(str(line.number) for line in best[:5])
        raise ConfigError(
            f"{shown} has {len(best)} commands with different flags (lines {numbers}), and each may be meant. Paste one of "
            "them after the verb, or keep it in a file of its own.",
            field="file",
            given=shown,
        )
    lower = {line.number for ones in ranked.values() for line in ones.values()} - {best[0].number}
    return best[0], [number for number in sized if number in lower]


def _rank(line: tuple[str, ...]) -> tuple[tuple[Any, ...], tuple[bool, ...]]:
    """What a command says about a framework and its configuration, and how likely it is the one that trains."""
    from batchwright.dialects import detect, is_about_a_batch
    from batchwright.dialects.launchers import STARTERS

    from .paste import is_command

    keys, left = pasted(line)
    read = {key: value for key, value in keys.items() if key in _read_keys()}
    files = tuple(word for word in left if word.endswith(_CONFIGS))
    known = detect(keys, left)[0] is not None
    sized = any(is_about_a_batch(key) and "parallel" not in key for key in read)
    prints = line[0] in ("echo", "printf")
    launched = any(word.rsplit("/", 1)[-1] in STARTERS for word in line)
    return (
        (tuple(sorted(read.items())), files * known),
        (not prints, known and sized, known, launched, any(map(is_command, line)), sized),
    )


def _may_count(word: str) -> bool:
    """Whether a word may be a key of a framework, or give some: this is faster than to read the line."""
    key = word.partition("=")[0].lstrip("-+").replace("-", "_")
    return key in _read_keys() or key == "factory" or word.endswith(_CONFIGS)


@cache
def _read_keys() -> frozenset[str]:
    """All keys that give a field in some framework."""
    from batchwright.dialects import dialects

    return frozenset(key for one in dialects() for key in (*one.keys, *one.special))


def opened(line: list[str], variables: Variables | None = None, depth: int = 0) -> Iterator[list[str]]:
    """A command line, or those in the text after a shell's -c or after `eval`, with what starts them in front.

    >>> list(opened(["srun", "-N", "4", "bash", "-c", "cd x; python t.py --lr 1"]))[1]
    ['srun', '-N', '4', 'python', 't.py', '--lr', '1']
    """
    at = next((n for n, word in enumerate(line[:-1]) if _is_shell_text(line, n)), None)
    if at is None or depth > 3:
        yield line
        return
    text = " ".join(line[at + 1 :]) if line[at] == "eval" else line[at + 1]
    rest = [] if line[at] == "eval" else line[at + 2 :]
    try:
        inner = commands(text)
    except Unclosed:
        inner = [Command(1, text.split())]
    before = line[:at] if line[at] == "eval" else _without_shell(line[:at])
    for one in inner:
        filled = one.words if variables is None else variables.filled(one.words)
        yield from opened([*before, *filled, *rest], variables, depth + 1)


def _is_shell_text(line: list[str], at: int) -> bool:
    """Whether the word after this one is a script: this is `eval`, or a shell's `-c`."""
    if line[at] == "eval" and at == 0:
        return True
    return re.fullmatch(r"-[a-z]*c", line[at]) is not None and _shell(line[max(0, at - 4) : at]) is not None


def _shell(line: list[str]) -> int | None:
    """Where the last shell of a command line is."""
    found = [n for n, word in enumerate(line) if word.rsplit("/", 1)[-1] in _SHELLS]
    return found[-1] if found else None


def _without_shell(line: list[str]) -> list[str]:
    return line[: _shell(line)]


def _settings(command: Command, variables: Variables) -> list[str]:
    """The `key=value` lines of a list of flags."""
    return [
        f"{one.name}={one.value}"
        for one in command.assigned
        if isinstance(one.value, str) and not variables.has_flags(one.name)
    ]


def _lost(read: Iterable[Line]) -> list[str]:
    """A note on the lines that begin with a flag: they belong to no command."""
    numbers = [str(line.number) for line in read if line.words and is_flag(line.words[0])]
    if not numbers:
        return []
    return [f"line {', '.join(numbers[:5])} begins with a flag and belongs to no command, so it is not read."]


def _unknown(left: Iterable[str]) -> list[str]:
    """A note on the words that may be flags, which only the shell knows."""
    unknown = dict.fromkeys(
        word
        for before, word in _pairs(left)
        if word[:1] in ("$", "`") and not word.startswith(("$@", "$*", "${@")) and before[:1] != "-"
    )
    shown = ", ".join(word[:40] for word in list(unknown)[:5])
    return [f"only the shell knows {shown}, so flags in it are not read."] if unknown else []


def _pairs(line: Iterable[str]) -> Iterator[tuple[str, str]]:
    before = ""
    for word in line:
        yield before, word
        before = word
