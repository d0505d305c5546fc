"""Plain text for terminals and pipes: aligned columns and wrapped notes."""

from __future__ import annotations

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


def notes(items: Sequence[str]) -> list[str]:
    """Notes as wrapped bullets."""
    import shutil
    import textwrap

    width = max(40, min(100, shutil.get_terminal_size().columns))
    lines: list[str] = []
    for item in items:
        lines += textwrap.wrap(item, width, initial_indent="  - ", subsequent_indent="    ", break_on_hyphens=False)
    return lines
