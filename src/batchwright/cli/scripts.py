"""Flags in files: lists of flags, and shell scripts, of which one command is read as if it were pasted."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import dropwhile
from typing import Any

from batchwright.core.errors import ConfigError

from .parse import MOST_ITEMS
from .shell import BEFORE, Assigned, Command, Unclosed, commands

_MOST_COMMANDS = 100
_CONFIGS = (".yaml", ".yml", ".toml")
# `$NAME`, `${NAME}`, `${NAME[@]}`, and those that say what counts if it is not set; alone or after `key=`.
_USED = re.compile(
    r"(?P<key>[-+\w.]+=)?\$(?:(?P<plain>\w+)"
    r"|\{(?P<name>\w+)(?P<all>\[[@*]\]|)(?::?-.*|:?\+\"?\$\{(?P=name)(?P=all)\}\"?)?\})",
    re.DOTALL,
).fullmatch
_MENTIONED = re.compile(r"\$\{?(\w+)").findall
_SETS = frozenset({"for", "select", "read", "getopts", "mapfile", "unset"})  # commands that set variables
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


def is_flag(word: Any) -> bool:
    """Whether a word of a command line is a long flag.

    >>> [is_flag(word) for word in ("--lr", "--", "-n", 4)]
    [True, False, False, False]
    """
    return isinstance(word, str) and word.startswith("--") and len(word) > 2


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
    variables = _Variables(shown, found)
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


def opened(line: list[str], variables: _Variables | None = None, depth: int = 0) -> Iterator[list[str]]:
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


def _settings(command: Command, variables: _Variables) -> list[str]:
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


class _Variables:
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
        constants = _constants(settings, found)
        self._arrays = {one.name for one in settings if not isinstance(one.value, str)}
        self._values |= {one.name: one.parts for one in settings if one.name in constants}
        for one in settings:
            self._set(one)
        self._used = set()

    def _set(self, one: Assigned) -> None:
        if not any(map(self._is_read, one.parts)):
            return
        filled = self.filled(one.parts)
        self._read_in[one.name] = one.line
        self._values[one.name] = [*self._values.get(one.name, ()), *filled] if one.more else filled
        if any(map(is_flag, filled)):
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


def _constants(settings: Iterable[Assigned], found: Iterable[Command]) -> set[str]:
    """The names that are set to one value, in which nothing is to be computed, and by no loop or `read`."""
    values: dict[str, set[str]] = {}
    for one in settings:
        computed = one.more or any(mark in part for part in one.parts for mark in "$`")
        values.setdefault(one.name, set()).update({str(one.value), *([""] if computed else [])})
    others = {word for one in found if _SETS & set(one.words[:3]) for word in one.words}
    return {name for name, ones in values.items() if len(ones) == 1 and name not in others}
