"""Plain text for terminals and pipes: aligned columns and wrapped lines."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence


def table(
    rows: Sequence[Sequence[object]],
    *,
    head: Sequence[str] = (),
    right: Sequence[int] = (),
    drop: Sequence[str] = (),
    width: int | None = None,
) -> list[str]:
    """Rows as aligned lines, indented by two; columns whose index is in `right` align right.

    On a terminal that is too narrow, columns named in `drop` are left out in this order, and the last column is wrapped if
    it is text. A pipe or a file gets all columns.

    >>> table([("a", 1), ("bc", 22)], right=[1])
    ['  a    1', '  bc  22']
    >>> table([("a", 1, 2)], head=("name", "x", "y"), right=[1, 2], drop=["x"], width=10)
    ['  name  y', '  a     2', '  left out', '  here: x']
    """
    cells = [[str(cell) for cell in row] for row in ([head] if head else []) + list(rows)]
    if not cells:
        return []
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    columns, left = list(range(len(widths))), list[str]()
    width = width or _terminal()

    def excess() -> int:
        return 0 if width is None else sum(widths[i] + 2 for i in columns) - width

    for name in drop:
        if excess() > 0 and name in head:
            columns.remove(head.index(name))
            left.append(name)
    last = columns[-1]
    if excess() > 0 and last not in right:
        widths[last] = max(_NARROWEST, widths[last] - excess())
    lines: list[str] = []
    for row in cells:
        text = wrapped(row[last], widths[last]) if last not in right else [row[last]]
        for k, piece in enumerate(text):
            shown = [piece if i == last else "" if k else row[i] for i in columns]
            aligned = (
                cell.rjust(widths[i]) if i in right else cell.ljust(widths[i])
                for i, cell in zip(columns, shown, strict=True)
            )
            lines.append(f"  {'  '.join(aligned)}".rstrip())
    if left:
        lines += [f"  {line}" for line in wrapped(f"left out here: {', '.join(left)}", (width or 0) - 2)]
    return lines


# A column of text does not get narrower than this: the terminal breaks what is too long.
_NARROWEST = 12


def wrapped(text: str, width: int) -> list[str]:
    """A text broken at its spaces; a word longer than the width gets its own line. (Importing textwrap is slower.)

    >>> wrapped("one two three", 7)
    ['one two', 'three']
    """
    if len(text) <= width:
        return [text]
    lines = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append("")
        lines[-1] += f" {word}" if lines[-1] else word
    return lines


def fitted(items: Sequence[str]) -> list[str]:
    """Lines unchanged, or broken at spaces and indented where the terminal is too narrow."""
    width = _terminal()
    if width is None:
        return list(items)
    return [("    " if k else "") + line for item in items for k, line in enumerate(wrapped(item, max(20, width - 4)))]


def bullets(items: Iterable[str], width: int | None = None) -> list[str]:
    """Texts as bullets, wrapped at the width of the terminal.

    >>> bullets(["one two three four five six seven eight nine"], width=40)
    ['  - one two three four five six seven', '    eight nine']
    """
    width = max(40, min(100, width or _terminal() or 100))
    return [("    " if k else "  - ") + line for item in items for k, line in enumerate(wrapped(item, width - 4))]


def color() -> bool:
    """Whether standard output is a terminal with colours; not with NO_COLOR or a dumb terminal."""
    if not sys.stdout.isatty():
        return False
    # rich knows the conventions.
    from rich.console import Console

    console = Console()
    return console.color_system is not None and not console.no_color


def _terminal() -> int | None:
    """The width of the terminal that standard output writes to; None for a pipe or a file."""
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or None
    except (OSError, ValueError, AttributeError):
        return None
