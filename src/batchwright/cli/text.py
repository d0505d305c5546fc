"""Plain text for terminals and pipes: aligned columns and wrapped notes."""

from __future__ import annotations

import os
from collections.abc import Sequence


def table(rows: Sequence[Sequence[object]], *, head: Sequence[str] = (), right: Sequence[int] = ()) -> list[str]:
    """Rows as aligned lines, indented by two; columns whose index is in `right` align right.

    >>> table([("a", 1), ("bc", 22)], right=[1])
    ['  a    1', '  bc  22']
    """
    cells = [[str(cell) for cell in row] for row in ([head] if head else []) + list(rows)]
    if not cells:
        return []
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    lines = (
        "  ".join(
            cell.rjust(w) if i in right else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    )
    return [f"  {line}".rstrip() for line in lines]


def notes(items: Sequence[str], width: int | None = None) -> list[str]:
    """Notes as bullets, wrapped at the terminal's width. (textwrap and shutil would cost more than all of a plan.)

    >>> notes(["one two three four five six seven eight nine"], width=40)
    ['  - one two three four five six seven', '    eight nine']
    """
    width = max(40, min(100, width or _columns()))
    lines: list[str] = []
    for item in items:
        line = "  -"
        for word in item.split():
            if len(line) + 1 + len(word) > width and line.strip(" -"):
                lines.append(line)
                line = "   "
            line += f" {word}"
        lines.append(line)
    return lines


def color() -> bool:
    """Whether standard output is a terminal that wants colours: NO_COLOR and dumb terminals do not."""
    import sys

    if not sys.stdout.isatty():
        return False
    from rich.console import Console  # it knows the conventions

    return Console().color_system is not None


def _columns() -> int:
    try:
        return os.get_terminal_size(1).columns
    except OSError:  # a pipe or a file
        return 100
