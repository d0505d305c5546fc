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
            f"theme={theme!r:.42} must be one of {', '.join(PAGE_THEMES)}.",
            field="theme",
            given=str(theme)[:40],
            nearest=PAGE_THEMES,
        )
    asked = {"output": output, "markdown": None if markdown == "-" else markdown}
    for field, path in {**asked, "png": png_dir, "svg": svg_dir}.items():
        _check_path(field, path)
    _check_outputs(inputs, asked)
    probes = [document for kind, document, _ in inputs if kind == "probe"]
    inputs = [(kind, _with_probe(one, probes) if kind == "estimate" else one, source) for kind, one, source in inputs]
    for field, folder in (("png", png_dir), ("svg", svg_dir)):
        if folder is not None and Path(folder).is_file():
            raise ConfigError(
                f"{field}={str(folder)[:120]!r} is a file, and a directory is needed.", field=field, given=str(folder)
            )
    named = [Path(source).resolve().name if source else kind for kind, _, source in inputs]
    title = f"batchwright report: {', '.join(named)}"[:120]
    files: list[str] = []
    pictures: dict[tuple[int, str], str] = {}
    # A picture has one theme; a page has colours that its style sheet sets.
    pictured = png_dir is not None or svg_dir is not None
    drawn = [section(*one, (theme if theme in THEMES else "light") if pictured else "css") for one in inputs]
    for folder, ending, render in ((png_dir, "png", png), (svg_dir, "svg", svg)):
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


def _with_probe(estimate: Mapping[str, Any], probes: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """An estimate of a task as it is, with the first probe of the same task with the same arguments on as many ranks."""
    lengths = {point["sequence_length"] for point in estimate["points"]}
    changed = estimate["model"] or estimate["precision"] != "fp32" or estimate["checkpoint_activations"]
    if changed or len(lengths) != 1:
        return estimate
    # A length is one more argument of the task.
    length = lengths.pop()
    args = {**(estimate.get("args") or {}), **({} if length is None else {"sequence_length": str(length)})}
    for probe in probes:
        same = _same_task(probe["target"], estimate["task"]) and probe["ranks"] == estimate["ranks"]
        if same and ((probe.get("identity") or {}).get("args") or {}) == args:
            return {**estimate, "probe": probe}
    return estimate


def _same_task(one: str, two: str) -> bool:
    """Whether two `FILE.py:function` are of one file: by the whole path, or by its name if a path is not absolute."""
    paths = [Path(target) for target in (one, two)]
    if all(path.is_absolute() for path in paths):
        return os.path.normpath(paths[0]) == os.path.normpath(paths[1])
    return paths[0].name == paths[1].name


# The endings of a report in a run directory: no file of a run has one of these.
_PAGES = (".html", ".htm", ".md", ".markdown")


def _check_path(field: str, path: str | os.PathLike[str] | None) -> None:
    """Refuse a name that no file can have."""
    try:
        if path is not None and b"\0" in os.fsencode(path):
            raise ValueError("a null character")
    except ValueError as error:
        shown = str(path)[:120]
        raise ConfigError(f"{field}={shown!r}: not a usable path: {error}.", field=field, given=shown) from None


def _check_outputs(
    inputs: Sequence[tuple[str, Mapping[str, Any], str]], outputs: Mapping[str, str | os.PathLike[str] | None]
) -> None:
    """Refuse to replace what the report is made of."""
    for field, output in outputs.items():
        if output is None:
            continue
        shown, reason, path = str(output)[:120], "", Path(output).resolve()
        if str(output) == "-":
            reason = "a page is written to a file, such as report.html; only Markdown can be printed"
        for kind, document, source in inputs:
            place = Path((kind == "run" and document.get("directory")) or source).expanduser().resolve()
            if place == path and path.is_file():
                reason = "the report is made of this file, and would replace it"
            elif kind in ("run", "rl") and place in path.parents and path.suffix.lower() not in _PAGES:
                reason = (
                    "in a run directory a report must end with .html or .md, so that it replaces no file of the run"
                )
        if reason:
            raise ConfigError(f"{field}={shown!r}: {reason}.", field=field, given=shown)


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
