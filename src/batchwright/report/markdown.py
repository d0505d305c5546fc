"""A report as Markdown, for a pull request or an issue: tables, and pictures of the charts where they were written."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from urllib.parse import quote

from .sections import Lines, Section, Table


def markdown(title: str, sections: Sequence[Section], pictures: Mapping[tuple[int, str], str]) -> str:
    """The report as text; `pictures` are the paths of charts by (index of the section, name of the chart)."""
    from batchwright import __version__

    parts = [f"# {_text(title)}"]
    for index, section in enumerate(sections):
        parts += [f"## {_text(section.title)}", *(_text(line) for line in section.summary)]
        for name, spec in section.charts.items():
            if path := pictures.get((index, name)):
                parts.append(f"![{_text(spec['description'])}]({quote(os.fsencode(path))})")
            else:
                parts.append(f"- {_text(spec['description'])}")
        for block in section.blocks:
            parts += [f"### {_text(block.title)}", _table(block) if isinstance(block, Table) else _lines(block)]
    parts.append(f"Made by batchwright report, version {__version__}.")
    return "\n\n".join(part for part in parts if part) + "\n"


def _table(table: Table) -> str:
    rows = [table.head, ["---"] * len(table.head), *table.rows]
    return "\n".join(
        "| " + " | ".join(_text(cell) if row is not rows[1] else cell for cell in row) + " |" for row in rows
    )


def _lines(block: Lines) -> str:
    items = "\n".join(f"- {_text(line)}" for line in block.lines)
    if not block.code:
        return items
    fence = "`" * max(3, 1 + max((len(run) for line in block.code for run in re.findall("`+", line)), default=0))
    return f"{items}\n\n{fence}text\n" + "\n".join(block.code) + f"\n{fence}"


def _text(text: str) -> str:
    """Text that Markdown shows as it is.

    >>> _text("a|b <script> *x*")
    'a\\\\|b &lt;script> \\\\*x\\\\*'
    """
    flat = " ".join(text.split())
    return re.sub(
        r"([\\`*|\[\]]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9]))", r"\\\1", flat.replace("&", "&amp;").replace("<", "&lt;")
    )
