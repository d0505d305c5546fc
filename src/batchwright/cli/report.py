"""`batchwright report`."""

from __future__ import annotations

import os

import click

from batchwright.core.errors import ConfigError

from . import text
from .naming import Verb
from .options import json_option, number, print_json


@click.command(
    cls=Verb,
    epilog="\b\nExamples:\n  batchwright report runs/train\n  batchwright report runs/train probe.json -o report.html\n"
    "  batchwright report runs/train --svg pictures --markdown report.md",
)
@click.argument("sources", nargs=-1, metavar="[RUN_DIR | FILE.json]...")
@click.option(
    "--output",
    "-o",
    metavar="FILE.html",
    help="The page to write.  [default: report.html, unless another output is given]",
)
@number("--png", "Write every chart as a PNG file into this directory.", "DIR")
@number("--svg", "Write every chart as an SVG file into this directory.", "DIR")
@click.option(
    "--markdown",
    is_flag=False,
    flag_value="-",
    metavar="[FILE.md]",
    help="Write Markdown, with the pictures of --png or --svg; without a file, print it.",
)
@number("--theme", "light | dark | auto (as the reader's system).  [default: auto; pictures: light]", "NAME")
@json_option
def command(
    sources: tuple[str, ...],
    output: str | None,
    png: str | None,
    svg: str | None,
    markdown: str | None,
    theme: str | None,
    as_json: bool,
) -> None:
    """Make a report: one HTML file with charts and tables that opens offline.

    Takes run directories, and documents that plan, ramp, probe and estimate print with --json; several become one report.
    Without arguments: the run and the documents in this directory, if there is one of each kind. Files are read, and for a run
    on Slurm also its queue; a run may still be running. HTML, PNG and SVG need the extra [report].
    """
    if markdown is not None and markdown != "-" and (os.path.isdir(markdown) or markdown.lower().endswith(".json")):
        what = "a directory" if os.path.isdir(markdown) else "a JSON document"
        raise ConfigError(
            f"--markdown={markdown[:120]!r} is {what}, and --markdown takes the file to write. To print the Markdown, write "
            "--markdown last.",
            field="markdown",
            given=markdown[:120],
        )
    from batchwright.api import report

    made = report(*sources, output=output, png=png, svg=svg, markdown=markdown, theme=theme or "auto")
    if as_json:
        print_json(made.to_json())
        return
    if made.markdown is not None:
        click.echo(made.markdown, nl=False)
    listed = made.files if len(made.files) <= 12 else (*made.files[:11], f"… {len(made.files) - 11} more files")
    lines = [f"wrote {file}" for file in listed]
    if not made.charts:
        lines.append("no chart: nothing in these documents can be drawn")
    lines += [f"skipped {count:,} damaged or incomplete lines of {name}" for name, count in made.skipped.items()]
    # With the Markdown on standard output, everything else goes to standard error.
    click.echo("\n".join(text.fitted(lines)), err=made.markdown is not None) if lines else None
