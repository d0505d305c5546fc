"""Field names in messages, as the user wrote them: the library says `nodes=3`, a command line says `--nodes=3`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import click

from batchwright.core.errors import BatchwrightError, ConfigError, RunError
from batchwright.core.numbers import fraction, parse_bytes

from . import text

_GIVEN = "batchwright.given"
_NAME = r"[a-z]+(?:_[a-z]+)*"
# Quoted text is what the user wrote. A name in a path, in a dotted key, in {braces} or in a flag is not one of ours.
# Patterns are compiled when a message has a name in it: most commands never need them.
_QUOTED = r"(?<!\w)(?:'[^'\n]*'|\"[^\"\n]*\"|`[^`\n]*`)(?!\w)"
_WORD = rf"{_QUOTED}|(?<![\w./{{$:+\\-])(?P<name>{_NAME})(?![\w/{{}}(]|[.:-]\w)(?P<on>=True\b)?"
_LIST = rf"(?<![\w./{{$:+\\-]){_NAME}(?:(?:,? or|,? and|,| ×) {_NAME})+"
_VALUE = r"(=| is | )('[^']*'|-?\d[\d,./]*[a-zA-Z]{0,3}%?|True\b)"
_SUGGESTION = r"\b(?:Nearest|[Gg]ive|Or|or keep)\b"


class Verb(click.Command):
    """A verb: its errors name flags when they are printed as text, and keywords when they are printed as JSON.

    A RunError is not changed: it contains text of the user's program.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        rest = super().parse_args(ctx, args)
        if ctx.resilient_parsing:  # a shell completes the line: it is not complete yet
            return rest
        options = [option for option in self.get_params(ctx) if isinstance(option, click.Option)]
        flags = {flag for option in options for flag in (*option.opts, *option.secondary_opts)}
        for option in options:
            value = ctx.params.get(option.name or "")
            for one in value if isinstance(value, tuple) else (value,):
                if isinstance(one, str) and one in flags:
                    # `--dir --dry-run` would start a run in a directory of that name.
                    raise click.UsageError(f"{option.opts[0]} needs a value, and {one} is another flag.", ctx=ctx)
        return rest

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BatchwrightError as error:
            if ctx.params.get("as_json") or isinstance(error, RunError):
                raise
            names = _names(ctx)
            spelled = [
                replace(v, message=names.spell(v.message, v.field, {n for n in v.nearest if isinstance(n, str)}))
                for v in error.violations
            ]
            raise type(error)(violations=spelled) from error


def remember(values: Mapping[str, Any], origins: Mapping[str, str]) -> None:
    """Keep for later messages how the user wrote each field (`origins`: a flag, KEY=VALUE or FILE: KEY)."""
    if ctx := click.get_current_context(silent=True):
        ctx.meta[_GIVEN] = {name: (value, _spelling(origins.get(name, ""), value)) for name, value in values.items()}


def spell(message: str) -> str:
    """A message of the verb that runs, with the names that its user wrote."""
    ctx = click.get_current_context(silent=True)
    return message if ctx is None else _names(ctx).spell(message)


def notes(items: Iterable[str]) -> list[str]:
    """The notes of a result with their heading, or nothing if there are none."""
    items = [spell(item) for item in items]
    return ["", "notes:", *text.bullets(items)] if items else []


@dataclass(frozen=True)
class Names:
    """The flags of a verb by keyword, and for each given field its value and how the user wrote its name.

    None instead of a name: the value was derived from what the user wrote, so a message keeps the keyword.
    """

    flags: Mapping[str, str]
    given: Mapping[str, tuple[Any, str | None]]

    def spell(self, message: str, field: str | None = None, keep: Iterable[str] = ()) -> str:
        """The message with flags for keywords; `field` is the one it is about, `keep` are names that stay.

        >>> names = Names({"nodes": "--nodes", "allow_ragged": "--allow-ragged"}, {"nodes": ("3", "--nodes")})
        >>> names.spell("nodes=3 is odd: 3 nodes. Nearest: nodes=4. Or allow_ragged.")
        '--nodes=3 is odd: 3 nodes. Nearest: --nodes=4. Or --allow-ragged.'
        """
        if not any(name in message for name in self.flags):
            return message
        found = re.search(_SUGGESTION, message)
        suggestions = found.start() if found else len(message)
        listed = set(self._listed(message, field))

        def spelled(match: re.Match[str]) -> str:
            name, start = match["name"], match.start()
            if name not in self.flags or name in keep or re.match(r"\d ", message[max(0, start - 2) : start]):
                return match[0]
            value, written = self.given.get(name, (None, self.flags[name]))
            after = match.end("name")
            shown = re.match(_VALUE, message[after:])
            if shown:
                typed = name in self.given and ((start == 0 and shown[1] == "=") or _same(value, shown[2]))
                ours = start >= suggestions or typed
                # A word such as `nodes` before a number may be plain English, but not in an equation.
                if "_" not in name and shown[1] != "=" and start < suggestions:
                    ours = ours and re.match(r" [×/=]", message[after + shown.end() :]) is not None
            else:
                about = name == field and (start == 0 or message[:start].endswith(("needs ", "give ", "Give ")))
                ours = "_" in name or start in listed or about
            if not ours or written is None:
                return match[0]
            # A flag without a value.
            return written if written.startswith("--") else written + (match["on"] or "")

        return re.sub(_WORD, spelled, message)

    def _listed(self, message: str, field: str | None) -> Iterable[int]:
        """The positions of names in a list of names: there, `nodes` is not plain English."""
        for run in re.finditer(_LIST, message):
            names = [word for word in re.finditer(_NAME, run[0]) if word[0] in self.flags]
            if len(names) > 1 and any("_" in word[0] or word[0] == field for word in names):
                yield from (run.start() + word.start() for word in names)


def _names(ctx: click.Context) -> Names:
    flags: dict[str, str] = {}
    given: dict[str, tuple[Any, str | None]] = {}
    for option in ctx.command.params:
        if isinstance(option, click.Option) and option.name is not None:
            flag = option.opts[0]
            name = flag.lstrip("-").replace("-", "_")
            flags[name] = flag
            if (value := ctx.params.get(option.name)) not in (None, False, ()):
                given[name] = (value, flag)
    if "from_probe" in flags and ("probe" not in flags or ctx.params.get("from_probe")):
        flags["probe"] = flags["from_probe"]  # the library takes the record, the flag names its file
    return Names(flags, given | ctx.meta.get(_GIVEN, {}))


def _spelling(origin: str, value: Any) -> str | None:
    """The name in an origin, or None if the value is not the one that was written there."""
    if " and " in origin:
        return None  # made of several
    if origin.startswith("--"):
        return origin
    key, equals, written = origin.partition("=")
    if equals and key.replace(".", "_").isidentifier():
        return key if _same(value, written) else None
    _, colon, key = origin.rpartition(": ")
    return key if colon and " × " not in key else None


def _same(value: Any, shown: str) -> bool:
    """Whether a message shows this value, which may have been one of several (`1,2,4`)."""
    shown = shown.rstrip(".,").strip("'")
    return any(
        one == shown or _number(one) == _number(shown) is not None for one in (str(value), *str(value).split(","))
    )


def _number(written: str) -> object:
    for read in (fraction, parse_bytes):
        try:
            return read(written)
        except ConfigError:
            pass
    return None
