"""Run the commands in README and docs, and write their real output below them.

A ```console block contains lines that start with `$ `. The lines below each are replaced by what the command prints
(standard output, then standard error). `render(text)` returns the page with this output; a test compares it with the page.
As a script: `python docs/render.py [PAGE ...]` writes these pages, or all.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_BLOCK = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def commands(block: str) -> list[str]:
    """The commands of a block, each with its continuation lines."""
    found: list[str] = []
    continues = False
    for line in block.splitlines():
        if line.startswith("$ "):
            found.append(line[2:])
        elif continues:
            found[-1] += "\n" + line
        continues = line.endswith("\\") and (line.startswith("$ ") or continues)
    return found


def run(command: str) -> str:
    """What a command prints if the terminal is 100 columns wide."""
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "COLUMNS": "100",
        "LINES": "40",
        "NO_COLOR": "1",
    }
    done = subprocess.run(
        ["bash", "-c", command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    return done.stdout + done.stderr


def render(text: str) -> str:
    """A page with the real output in its console blocks."""

    def block(match: re.Match[str]) -> str:
        parts = [f"$ {command}\n{run(command)}" for command in commands(match[1])]
        return "```console\n" + "\n".join(part.rstrip("\n") + "\n" for part in parts) + "```"

    return _BLOCK.sub(block, text)


if __name__ == "__main__":
    for page in [Path(name).resolve() for name in sys.argv[1:]] or PAGES:
        before = page.read_text(encoding="utf-8")
        after = render(before)
        if after != before:
            page.write_text(after, encoding="utf-8")
            print(f"wrote {page.relative_to(ROOT)}")
