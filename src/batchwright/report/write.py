"""A report as files: one HTML page, pictures of every chart, Markdown. Each file is replaced as a whole."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchwright.core import codec
from batchwright.core.errors import ConfigError, EnvironmentFault
from batchwright.rundir import atomic

from .charts.theme import THEMES
from .html import page
from .markdown import markdown as markdown_of
from .render import png, svg
from .sections import Section, section

PAGE_THEMES = (*THEMES, "auto")


@dataclass(frozen=True)
class Report:
    """What was written, from what; `markdown` is the text if it was asked for without a file."""

    title: str
    files: tuple[str, ...]
    inputs: tuple[Mapping[str, str], ...]
    charts: tuple[str, ...]
    skipped: Mapping[str, int]
    markdown: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The document that `--json` prints."""
        return {"schema": codec.SCHEMA, **codec.encode(self)}


def write(
    inputs: Sequence[tuple[str, Mapping[str, Any], str]],
    *,
    output: str | os.PathLike[str] | None = None,
    png_dir: str | os.PathLike[str] | None = None,
    svg_dir: str | os.PathLike[str] | None = None,
    markdown: str | os.PathLike[str] | None = None,
    theme: str = "auto",
) -> Report:
    """Write what is asked for; `inputs` are (kind, document, source). `markdown` may be `-`: the text is only returned."""
    if theme not in PAGE_THEMES:
        raise ConfigError(
            f"theme={theme[:40]!r} must be one of {', '.join(PAGE_THEMES)}.",
            field="theme",
            given=theme[:40],
            nearest=PAGE_THEMES,
        )
    named = [Path(source).resolve().name if source else kind for kind, _, source in inputs]
    title = f"batchwright report: {', '.join(named)}"[:120]
    files: list[str] = []
    pictures: dict[tuple[int, str], str] = {}
    # A picture has one theme; a page has colours that its style sheet sets.
    pictured = png_dir is not None or svg_dir is not None
    drawn = [section(*one, (theme if theme in THEMES else "light") if pictured else "css") for one in inputs]
    for folder, ending, render in ((png_dir, "png", lambda spec: png(spec)), (svg_dir, "svg", lambda spec: svg(spec))):
        if folder is None:
            continue
        for (index, name), path in _pictures(drawn, Path(folder), ending).items():
            _write(path, render(drawn[index].charts[name]))
            files.append(str(path))
            pictures[index, name] = str(path)
    text = None
    if markdown is not None:
        place = Path.cwd() if markdown == "-" else Path(markdown).resolve().parent
        relative = {key: os.path.relpath(path, place) for key, path in pictures.items()}
        text = markdown_of(title, drawn, relative)
        if markdown != "-":
            _write(Path(markdown), text)
            files.append(str(markdown))
    if output is not None:
        shown = [section(*one, "css") for one in inputs] if pictured else drawn
        _write(Path(output), page(title, shown, theme))
        files.append(str(output))
    skipped: dict[str, int] = {}
    for _, document, source in inputs:
        skipped |= {f"{source}/{name}": count for name, count in (document.get("skipped") or {}).items()}
    return Report(
        title,
        tuple(files),
        tuple({"kind": kind, "source": source} for kind, _, source in inputs),
        tuple(f"{one.kind}-{name}" for one in drawn for name in one.charts),
        skipped,
        text if markdown == "-" else None,
    )


def _pictures(sections: Sequence[Section], folder: Path, ending: str) -> dict[tuple[int, str], Path]:
    """The file of every chart: `probe-throughput.png`; with several documents of a kind, `probe-2-throughput.png`."""
    found: dict[tuple[int, str], Path] = {}
    seen: dict[str, int] = {}
    for index, one in enumerate(sections):
        seen[one.kind] = number = seen.get(one.kind, 0) + 1
        for name in one.charts:
            found[index, name] = folder / f"{one.kind}{f'-{number}' if number > 1 else ''}-{name}.{ending}"
    return found


def _write(path: Path, content: str | bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic.write(path, content)
    except OSError as error:
        raise EnvironmentFault(
            f"{path} cannot be written: {error.strerror}.", field="output", given=str(path)
        ) from None
