"""A shell script as commands: their words, and what is assigned to variables. Nothing is run, and no value is computed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

_TEXT = r"<<-?[ \t]*\\?(?P<quote>['\"]?)(?P<ends>[\w.!-]+)(?P=quote)"  # a text that begins in the next line
_NEXT = re.compile(
    rf"""(?P<blank>(?:[ \t\r\f\v]|\\\r?\n)+|\#[^\n]*)
    | (?P<line>\n)
    | (?P<sum>\(\()
    | (?P<text>(?!<<<){_TEXT})
    | (?P<file>(?:\d*(?:<<<|<<-?|<>|>>|>\||[<>](?!\())|&>>?)&?)
    | (?P<array>[a-zA-Z_]\w*\+?=\()
    | (?P<close>\))
    | (?P<end>(?:[;&|(]|[<>](?=\())+)""",
    re.VERBOSE,
).match
_SIMPLE = re.compile(r"[\w \t\n./:=,+-]*").fullmatch
_PLAIN = re.compile(r"[^\s;&|()<>\"'\\`$]+").match
_ASSIGNED = re.compile(r"([a-zA-Z_]\w*)(\+?)=(.*)", re.DOTALL).fullmatch
_SPECIAL = re.compile(rf"\\|\$[({{]|[\"'`()}}]|{_TEXT}")
_PRINTED = re.compile(rf"\$\(\s*cat\s*{_TEXT}[^\n]*\n(?P<body>.*)\n[ \t]*(?P=ends)\s*\)", re.DOTALL).fullmatch
_QUOTE = re.compile("'")
_ESCAPED = re.compile(r"\\([\"\\$`])|\\\r?\n")
# What closes a quoted or substituted piece, by what opens it.
_CLOSES = {'"': '"', "'": "'", "`": "`", "(": ")", "$(": ")", "${": "}"}
_DEEPEST = 50
# Words after which an assignment may stand.
BEFORE = frozenset("if then else elif while until do ! { time export readonly local declare typeset".split())


class Unclosed(ValueError):
    """A quote or a bracket that is not closed, or that has too many others in it."""

    def __init__(self, text: str, at: int) -> None:
        mark = text[at : at + 1 + (text[at] == "$")]
        super().__init__(f"{mark} in line {text.count(chr(10), 0, at) + 1} is not closed")


@dataclass(frozen=True)
class Assigned:
    """`NAME=text`, `NAME=(words)` or, with `more`, the same with `+=`."""

    name: str
    value: str | list[str]
    more: bool
    line: int

    @cached_property
    def parts(self) -> list[str]:
        """The words of the value; of `$(cat <<END ...)`, those of the text."""
        if not isinstance(self.value, str):
            return self.value
        printed = _PRINTED(self.value)
        return words(printed["body"] if printed else self.value)


@dataclass
class Command:
    """The words of a command without quotes, redirections and comments, what is assigned before them, and texts for it."""

    line: int
    words: list[str] = field(default_factory=list[str])
    assigned: list[Assigned] = field(default_factory=list[Assigned])
    texts: list[str] = field(default_factory=list[str])

    def takes_assignments(self) -> bool:
        """Whether the next word may be an assignment."""
        return len(self.words) < 5 and all(
            word in BEFORE or (n > 0 and word[:1] == "-") for n, word in enumerate(self.words)
        )


def commands(text: str) -> list[Command]:
    r"""The commands of a script: they end with a line, `;`, `&&`, `||`, `|`, `&` or a bracket.

    >>> [one.words for one in commands("cd x && torchrun a.py --lr 1 \\\n --seed 2  # slow\n")]
    [['cd', 'x'], ['torchrun', 'a.py', '--lr', '1', '--seed', '2']]
    """
    found: list[Command] = []
    array: list[str] | None = None  # the words of the one that is open
    new, line, counted, opened = True, 1, 0, 0
    for kind, word, at in _tokens(text):
        if kind == "close" and array is not None:
            array = None
            continue
        if kind == "text":
            if found:
                found[-1].texts.append(word)
            continue
        if kind in ("line", "end", "close"):
            new = new or array is None
            continue
        line, counted = line + text.count("\n", counted, at), at
        if array is not None:
            array.append(word)
            continue
        if new:
            found.append(Command(line))
            new = False
        command = found[-1]
        assigned = _ASSIGNED(word) if command.takes_assignments() else None
        if assigned is None:
            command.words.append(word)
        if kind == "array":
            array, opened = [], at
        if assigned is not None:
            value = assigned[3] if array is None else array
            command.assigned.append(Assigned(assigned[1], value, bool(assigned[2]), line))
    if array is not None:
        raise Unclosed(text, text.index("(", opened))
    return found


def words(text: str) -> list[str]:
    """The words of a text, as a shell splits a variable that contains it.

    >>> words(" --lr 1  --name 'a b' ")
    ['--lr', '1', '--name', 'a b']
    """
    if _SIMPLE(text):
        return text.split()
    try:
        return [word for kind, word, _ in _tokens(text) if kind == "word"]
    except Unclosed:
        return text.split()


def is_flag(word: Any) -> bool:
    """Whether a word of a command line is a long flag.

    >>> [is_flag(word) for word in ("--lr", "--", "-n", 4)]
    [True, False, False, False]
    """
    return isinstance(word, str) and word.startswith("--") and len(word) > 2


def _tokens(text: str) -> Iterator[tuple[str, str, int]]:
    """Words, beginnings of arrays (`array`), texts (`<<END`), brackets that close (`close`), and what else ends a command."""
    here: list[str] = []  # what ends the texts (<<END) that begin in the next line
    at, is_file = 0, False  # is_file: the next word is the file of a redirection
    while at < len(text):
        match = _NEXT(text, at)
        kind, after = ("word", at) if match is None else (_kind(match), match.end())
        if kind == "text" and match is not None:
            here.append(match["ends"])
        elif kind == "line":
            body, after = after, _after_texts(text, after, here)
            if here:
                yield "text", text[body:after], at
            here = []
            yield kind, "", at
        elif kind == "sum":
            after = _end_of_piece(text, at)
            yield "end", "", at
        elif kind == "array" and match is not None:
            yield kind, match[0][:-1], at
        elif kind in ("close", "end"):
            yield kind, "", at
        elif kind == "word":
            word, after = _word(text, at)
            if not is_file:
                yield kind, word, at
        if kind != "blank":
            is_file = kind == "file"
        at = after


def _kind(match: re.Match[str]) -> str:
    kinds = ("blank", "line", "sum", "text", "file", "array", "close", "end")
    return next(kind for kind in kinds if match[kind] is not None)


def _word(text: str, at: int) -> tuple[str, int]:
    """The word that begins here, without its quotes, and where it ends. `$(...)` and `${...}` stay as they are."""
    parts: list[str] = []
    while at < len(text):
        plain = _PLAIN(text, at)
        mark = text[at]
        end = at + 1
        if plain:
            parts.append(plain[0])
            end = plain.end()
        elif mark == "\\":
            end = at + 2 + text.startswith("\r\n", at + 1)
            parts.append(text[at + 1 : end].strip("\r\n"))
        elif mark in "\"'`" or text.startswith(("${", "$("), at):
            end = _end_of_piece(text, at)
            piece = text[at + 1 : end - 1] if mark in "\"'" else text[at:end]
            parts.append(_ESCAPED.sub(lambda one: one[1] or "", piece) if mark == '"' else piece)
        elif mark == "$":
            parts.append(mark * (text[end : end + 1] not in ("'", '"')))
        else:
            break
        at = end
    return "".join(parts), at


def _end_of_piece(text: str, at: int) -> int:
    """Where a quoted or substituted piece (`"..."`, `$(...)`) that begins here ends, whatever pieces are in it."""
    opened, first = [""], at
    while True:
        inside = opened[-1]
        match = (_QUOTE if inside == "'" else _SPECIAL).search(text, at)
        if match is None or len(opened) > _DEEPEST:
            raise Unclosed(text, first)
        mark = match[0]
        at = match.end() + (mark == "\\")
        if mark == _CLOSES.get(inside):
            opened.pop()
            if len(opened) == 1:
                return at
        elif mark[:2] == "<<":
            at = _after_texts(text, _after_line(text, at), [match["ends"]]) if inside == "$(" else at
        elif _opens(mark, opened):
            opened.append(mark)


def _opens(mark: str, opened: list[str]) -> bool:
    """Whether a mark opens a piece inside these: in double quotes only a substitution does."""
    inside = opened[-1]
    if mark == "(":
        return inside in ("", "(", "$(")
    if mark in ("'", '"'):
        return inside != '"' and not (mark == "'" and '"' in opened)
    return mark in _CLOSES


def _after_texts(text: str, at: int, ends: list[str]) -> int:
    """Where the texts (`<<END`) end that begin with this line."""
    for end in ends:
        line = ""
        while at < len(text) and line.strip() != end:
            start, at = at, _after_line(text, at)
            line = text[start:at]
    return at


def _after_line(text: str, at: int) -> int:
    return text.find("\n", at) + 1 or len(text)
