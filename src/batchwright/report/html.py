"""A report as one HTML file: no request to anything, readable at any width, light and dark, on screen and on paper.

The specifications of the charts are in the file as JSON, and Vega draws them; everything else works without JavaScript. All
text from documents is escaped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from html import escape

from .charts.spec import Spec
from .charts.theme import PAGE_FONT, colors
from .render import bundle
from .sections import Lines, Section, Table

# The page draws each chart as wide as its figure, again after a change of the width. A chart of several views has a width
# in each of them. 70 pixels are for the numbers of the vertical axis.
_SCRIPT = """
const charts = JSON.parse(document.getElementById("charts").textContent);
const fit = (view, width) => {
  if ("width" in view) view.width = width;
  (view.vconcat || []).forEach(part => fit(part, width));
  return view;
};
const draw = async figure => {
  const width = Math.max(160, Math.min(900, figure.clientWidth - 70));
  if (figure.drawnAt === width) return;
  figure.drawnAt = width;
  const spec = fit(structuredClone(charts[figure.dataset.chart]), width);
  if (width < 420) spec.config.legend.direction = "vertical";
  try {
    await vegaEmbed(figure.querySelector(".chart"), spec, {actions: false, renderer: "svg", mode: "vega-lite"});
    figure.dataset.drawn = "yes";
  } catch (error) {
    figure.querySelector(".chart").textContent = "This chart could not be drawn: " + error.message;
  }
};
const figures = [...document.querySelectorAll("figure[data-chart]")];
let waiting;
const all = () => figures.forEach(draw);
addEventListener("resize", () => { clearTimeout(waiting); waiting = setTimeout(all, 150); });
all();
"""

_STYLE = """
:root { color-scheme: light dark; %(light)s }
@media (prefers-color-scheme: dark) { :root { %(dark)s } }
@media print { :root { %(light)s } figure, tr { break-inside: avoid } nav { display: none } }
* { box-sizing: border-box }
body { margin: 0 auto; padding: 1.5rem clamp(1rem, 4vw, 3rem) 4rem; max-width: 74rem; background: var(--background);
  color: var(--text); font: 16px/1.5 %(font)s }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .25rem }
h2 { font-size: 1.35rem; margin: 3rem 0 .5rem; padding-top: 1rem; border-top: 1px solid var(--grid); overflow-wrap: anywhere }
h3 { font-size: 1.05rem; margin: 2rem 0 .4rem; overflow-wrap: anywhere }
p { margin: .3rem 0; max-width: 75ch; overflow-wrap: anywhere }
a { color: var(--blue) }
.summary p:first-child { font-size: 1.1rem }
.muted, figcaption, footer { color: var(--muted); font-size: .92rem }
figure { margin: 1.5rem 0 2rem; min-width: 0 }
figure h3 { margin-bottom: 0 }
.chart { width: 100%%; min-height: 3rem; overflow: hidden; margin-top: .75rem }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .92rem }
th, td { padding: .3rem .9rem .3rem 0; text-align: left; vertical-align: top; border-bottom: 1px solid var(--grid) }
th { font-weight: 600; vertical-align: bottom }
td { overflow-wrap: break-word; max-width: 42ch }
td.text:last-child { min-width: 12rem }
.number { text-align: right; white-space: nowrap }
pre { overflow-x: auto; padding: .75rem; border: 1px solid var(--grid); border-radius: 6px; font-size: .85rem }
ul { margin: .3rem 0; padding-left: 1.2rem }
li { margin: .25rem 0; max-width: 80ch; overflow-wrap: anywhere }
nav ul { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; list-style: none; padding: 0 }
"""


_NUMBER = re.compile(r"-?[0-9][0-9,.]*(e[+-]?[0-9]+)?(%| [A-Za-z]+)?")


def page(title: str, sections: Sequence[Section], theme: str = "auto") -> str:
    """The whole page; `theme` is light, dark, or auto for the one that the reader's system has."""
    from batchwright import __version__

    charts: dict[str, Spec] = {}
    bodies: list[str] = []
    for index, section in enumerate(sections, 1):
        bodies.append(_section(section, index, charts))
    links = "".join(f'<li><a href="#part-{i}">{escape(s.title)}</a></li>' for i, s in enumerate(sections, 1))
    contents = f'<nav aria-label="Contents"><ul>{links}</ul></nav>' if len(sections) > 1 else ""
    script = ""
    if charts:
        # `<` in JSON is written so that no text of a document can end the script element.
        data = json.dumps(charts, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
        script = f'<script type="application/json" id="charts">{data}</script>\n<script>{bundle()}</script>\n'
        script += f"<script>{_SCRIPT}</script>"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="generator" content="batchwright">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>{_style(theme)}</style>
</head>
<body>
<header><h1>{escape(title)}</h1>{contents}</header>
<main>
{"".join(bodies)}</main>
<footer><p>Made by <code>batchwright report</code>, version {escape(__version__)}. Solid marks are measured; those that
are dashed, have a dashed edge or are hollow are predicted or planned.</p></footer>
{script}
</body>
</html>
"""


def fragment(section: Section, pictures: Sequence[str]) -> str:
    """A section for a notebook: its summary, its first table and pictures, without scripts or styles of a page."""
    lines = "".join(f"<p>{escape(line)}</p>" for line in section.summary)
    table = next((_table(block) for block in section.blocks if isinstance(block, Table)), "")
    return f"<div>{lines}{''.join(f'<div>{picture}</div>' for picture in pictures)}{table}</div>"


def _style(theme: str) -> str:
    light, dark = (
        "".join(f"--{role}: {color}; " for role, color in colors(name).items()) for name in ("light", "dark")
    )
    chosen = {"auto": (light, dark), "light": (light, light), "dark": (dark, dark)}[theme]
    scheme = {"auto": "light dark", "light": "light", "dark": "dark"}[theme]
    return (_STYLE % {"light": chosen[0], "dark": chosen[1], "font": PAGE_FONT}).replace(
        "color-scheme: light dark", f"color-scheme: {scheme}"
    )


def _section(section: Section, index: int, charts: dict[str, Spec]) -> str:
    parts = [f'<section aria-labelledby="part-{index}">\n<h2 id="part-{index}">{escape(section.title)}</h2>\n']
    parts.append('<div class="summary">' + "".join(f"<p>{escape(line)}</p>" for line in section.summary) + "</div>\n")
    parts.append(f'<p class="muted">from {escape(section.source)}</p>\n')
    for name, spec in section.charts.items():
        key = f"{index}-{name}"
        charts[key] = {k: v for k, v in spec.items() if k not in ("title", "$schema")}
        title, text = spec["title"]["text"], spec["title"]["subtitle"]
        parts.append(
            f'<figure data-chart="{key}"><h3>{escape(title)}</h3>'
            f'<figcaption>{escape(text)}</figcaption><div class="chart" role="img" aria-label="{escape(spec["description"])}">'
            "<noscript>The chart needs JavaScript.</noscript></div></figure>\n"
        )
    parts += [_table(block) if isinstance(block, Table) else _lines(block) for block in section.blocks]
    return "".join([*parts, "</section>\n"])


def _table(table: Table) -> str:
    columns = [[row[i] for row in table.rows] for i in range(len(table.head))]
    numeric = [any(column) and all(map(_is_number, column)) for column in columns]

    def cells(row: Sequence[str], tag: str) -> str:
        made: list[str] = []
        for i, cell in enumerate(row):
            scope = ' scope="col"' if tag == "th" else ""
            right = f' class="{"number" if numeric[i] else "text"}"'
            made.append(f"<{tag}{scope}{right}>{escape(cell)}</{tag}>")
        return f"<tr>{''.join(made)}</tr>"

    body = "".join(cells(row, "td") for row in table.rows)
    head = cells(table.head, "th")
    title = escape(table.title)
    return (
        f'<h3>{title}</h3><div class="wide" role="region" aria-label="{title}" tabindex="0"><table>'
        f"<thead>{head}</thead><tbody>{body}</tbody></table></div>\n"
    )


def _is_number(cell: str) -> bool:
    """Whether a cell is a number with a unit or a percent sign, or unknown.

    >>> [_is_number(cell) for cell in ("1,024", "-2.5e-05", "6.00 GiB", "1.5 s", "90%", "-", "1024 / (4 × 64)", "2 of 4 hosts")]
    [True, True, True, True, True, True, False, False]
    """
    return cell in ("", "-") or bool(_NUMBER.fullmatch(cell)) or cell.startswith("…")


def _lines(block: Lines) -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in block.lines)
    code = f"<pre>{escape(chr(10).join(block.code))}</pre>" if block.code else ""
    return f"<h3>{escape(block.title)}</h3><ul>{items}</ul>{code}\n"
