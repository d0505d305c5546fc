"""`batchwright convert`."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from typing import Any

import click

from batchwright.core.codec import SCHEMA
from batchwright.core.errors import ConfigError, PlanError, RunError
from batchwright.dialects.checking import check, equation
from batchwright.dialects.converting import DIFFERS, NOT_EXPRESSIBLE, Conversion, Difference, compare, convert
from batchwright.dialects.editing import FORMS, edited, written
from batchwright.dialects.reading import job, named
from batchwright.dialects.record import NEWEST, version_text

from . import text
from .config import PasteCommand
from .files import read_keys
from .frameworks import heading, passed_over, read_configuration, read_text_as, spelled
from .options import CONFIGURATION_FLAGS, FILES, FRAMEWORK, complete, devices_options, json_option, number, print_json
from .parse import read_text

_WHOLE = "whole file"


class ConvertCommand(PasteCommand):
    """A verb that reads a pasted command line whole."""

    kind = None
    inside = CONFIGURATION_FLAGS


@click.command(
    cls=ConvertCommand,
    epilog="\b\nExamples:\n  batchwright convert sft.yaml --to deepspeed --devices 16\n"
    "  batchwright convert base.yml --to megatron-lm@0.18 --devices 64 --into args.yaml --dry-run\n"
    "  batchwright convert --from megatron-lm@0.17 --to levanter torchrun --nproc-per-node 8 pretrain_gpt.py \\\n"
    "      --micro-batch-size 2 --global-batch-size 128 --rampup-batch-size 32 32 100000",
)
@click.argument("arguments", nargs=-1, metavar="CONFIG [KEY=VALUE]...", shell_complete=complete)
@click.option("--list-frameworks", is_flag=True, help="Print the frameworks that are read and written.")
@number("--from", "The framework of the configuration, and its version.  [default: detected]", FRAMEWORK)
@number("--to", "The framework to write, and its version. Required.", FRAMEWORK)
@devices_options
@number("--format", f"{' | '.join(FORMS[:-1])}.  [default: the framework's own]", "NAME")
@number("--into", "Set the keys in this YAML, JSON or TOML file; comments and order stay.", "FILE")
@click.option("--dry-run", is_flag=True, help="With --into: print the changes as a diff, and write nothing.")
@click.option(
    "--partial", is_flag=True, help="With --into: write also if something cannot be expressed or means another batch."
)
@json_option
@click.pass_context
def command(ctx: click.Context, arguments: tuple[str, ...], list_frameworks: bool, as_json: bool, **flags: Any) -> None:
    """Write the batch of a configuration in the keys of another framework.

    The keys that are written are read back as that framework reads them, and compared with the source. The conversion is
    exact, differs (by how many steps or samples, and where), or cannot express something. What it leaves out is listed.
    Exits with 5 if something cannot be expressed, or if the file of --into as a whole would mean another batch or break a rule.
    """
    left_out: tuple[str, ...] = ctx.meta["left_out"]
    if list_frameworks:
        _list(as_json)
        return
    if flags["to"] is None:
        raise ConfigError("--to NAME is required: the framework to write.", field="to")
    if not arguments and not left_out:
        raise ConfigError("convert needs a configuration: a file, KEY=VALUE or a command line.", field="file")
    target, version = named(flags["to"])
    into, form = flags["into"], flags["format"] or target.form
    if form not in FORMS:
        raise ConfigError(
            f"format={form[:40]!r} is not one of {', '.join(FORMS[:-1])}.", field="format", nearest=FORMS[:-1]
        )
    if form == "flags" and target.form == "dashes":
        form = "dashes"
    for name in ("dry_run", "partial"):
        if flags[name] and into is None:
            raise ConfigError(f"{name} needs --into FILE.", field=name)
    reading = read_configuration(arguments, left_out, flags, flags["from"])
    before = "" if into is None else _text(into)
    present = read_keys(into) if into is not None and before.strip() else {}  # limits what a file may contain
    if version == NEWEST and present and target.version_of:
        version = target.version_of(present)  # a file has the keys of one version
    made = convert(reading, target, version, present)
    after, others = before, list[str]()
    if into is not None and made.keys:
        after = _edited(before, made, into)
        others = _other_batch(made, into, after)
        whole = [Difference(_WHOLE, DIFFERS, f"{into} as a whole {one}") for one in others]
        made = replace(made, differences=(*made.differences, *whole))
    document = _document(made, form)
    lines = render(made, form)
    fine = (made.status != NOT_EXPRESSIBLE and not others) or (flags["partial"] and bool(made.keys))
    if into is not None:
        more, changed = _into(into, before, after, dry_run=flags["dry_run"], write=fine)
        lines += ["", *more]
        document |= changed | ({"whole_file": others} if others else {})
    if as_json:
        print_json({"schema": SCHEMA, **document})
    else:
        click.echo("\n".join(lines))
    ctx.exit(0 if fine else RunError.exit_code)


def _list(as_json: bool) -> None:
    from batchwright.dialects import frameworks

    if as_json:
        names = ("name", "title", "aliases", "versions", "unit", "source")
        listed = [{name: getattr(d, name) for name in names} for d in frameworks()]
        print_json(
            {
                "schema": SCHEMA,
                "frameworks": [{k: list(v) if isinstance(v, tuple) else v for k, v in d.items()} for d in listed],
            }
        )
        return
    rows = [(d.name, d.unit, ", ".join(d.versions), d.source) for d in frameworks()]
    click.echo("\n".join(text.table(rows, head=("name", "counts", "versions that differ", "read from"))))


def _document(made: Conversion, form: str) -> dict[str, Any]:
    return {
        "status": made.status,
        "from": made.reading.dialect.name,
        "from_version": version_text(made.reading.version) or None,
        "to": made.target.name,
        "to_version": version_text(made.version) or None,
        "equation": equation(made.job),
        "keys": dict(made.keys),
        "text": written(made.keys, form) if made.keys else "",
        "differences": [{"what": d.what, "status": d.status, "message": d.message} for d in made.differences],
        "left_out": list(made.left_out),
        "notes": list(made.notes),
        "passed_over": len(made.reading.passed_over),
        "passed_over_keys": list(made.reading.passed_over),
    }


def render(made: Conversion, form: str) -> list[str]:
    """A conversion as text: the verdict, the equation, the keys, and what differs or is left out."""
    version = version_text(made.version)
    verdict = f"{made.status}: {heading(made.reading)} -> {made.target.title}{f' {version}' if version else ''}"
    lines = [*text.fitted([verdict]), "", *text.fitted([equation(made.job)])]
    if made.keys:
        lines += ["", *written(made.keys, form).splitlines()]
    for difference in made.differences:
        lines += ["", f"{difference.status}: {difference.what}"]
        whole = difference.what == _WHOLE  # in the words of the other framework
        lines += text.bullets([difference.message if whole else spelled(made.reading, difference.message)])
    if made.left_out:
        head = f"left out, in no key of {made.target.title} here:"
        lines += ["", *text.fitted([head]), *text.bullets(made.left_out)]
    if made.notes:
        lines += ["", "notes:", *text.bullets(made.notes)]
    return [*lines, *passed_over(made.reading)]


def _text(path: str) -> str:
    """The text of the file that is edited; a new file has none."""
    if not path.endswith(FILES):
        raise ConfigError(
            f"{path[:80]!r}: --into writes files that end with {', '.join(FILES)}.", field="into", given=path[:80]
        )
    return read_text(path) if os.path.exists(path) else ""


def _edited(before: str, made: Conversion, path: str) -> str:
    """The text with the keys set, and with the line ends that it had."""
    form = {".json": "json", ".toml": "toml"}.get(os.path.splitext(path)[1], "yaml")
    mark = "\ufeff" * before.startswith("\ufeff")
    after = mark + edited(before.removeprefix(mark), form, made.keys, path)
    return re.sub(r"\r?\n", "\r\n", after) if before.count("\n") == before.count("\r\n") > 0 else after


def _into(path: str, before: str, after: str, *, dry_run: bool, write: bool) -> tuple[list[str], dict[str, Any]]:
    """Write the edited text into a file, or show the diff."""
    record: dict[str, Any] = {"into": path, "written": False, "backup": None, "diff": None}
    if dry_run:
        import difflib

        lines = difflib.unified_diff(before.splitlines(), after.splitlines(), path, path, lineterm="")
        record["diff"] = "\n".join(lines)
        return record["diff"].splitlines() or [f"{path}: nothing changes"], record
    if not write:
        return [f"{path} is not changed: give --partial to write what can be expressed."], record
    from pathlib import Path

    from batchwright.rundir import atomic

    target = Path(os.path.realpath(path))
    said: list[str] = []
    mode = target.stat().st_mode & 0o777 if target.exists() else 0o666
    if before:
        backup = next(name for n in range(10**6) if not (name := Path(f"{target}.bak{n or ''}")).exists())
        atomic.write(backup, before, mode=mode)
        record["backup"] = str(backup)
        said.append(f"backup: {backup}")
    atomic.write(target, after, mode=mode)
    record["written"] = True
    said.insert(0, f"wrote {path}")
    return said, record


def _other_batch(made: Conversion, path: str, text: str) -> list[str]:
    """How the edited file differs from the batch that was written, and which rules it breaks: by keys that were in it before."""
    version = version_text(made.version)
    name = f"{made.target.name}@{version}" if version else made.target.name
    world = {} if made.target.has_world else {n: made.job.get(n) for n in ("devices", "nodes", "devices_per_node")}
    try:
        reading = read_text_as(path, text, world, name)
        whole = job(reading)
    except PlanError as wrong:
        return [f"has no valid batch: {wrong}"]
    known = {d.what for d in made.differences} | {d.message for d in made.differences}
    found = [f"means another batch: {d.message}" for d in compare(made.job, whole, made.target) if d.what not in known]
    return found + [
        f"is wrong: {f.message}"
        for f in check(reading).findings
        if f.severity == "error" and not {f.message, f.key} & known
    ]
