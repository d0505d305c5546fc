"""Code blocks that cannot rot: run the commands in README and docs, and write their real output below them.

A ```console block holds lines that start with `$ `; what stands below each is replaced by what it prints (standard
output, then standard error). `render(text)` is the page as it should be; a test compares. Run as a script, it writes.
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
    """The commands of a block, continuation lines joined to theirs."""
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
    """What a command prints, as in a terminal 100 columns wide."""
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
    for page in PAGES:
        before = page.read_text(encoding="utf-8")
        after = render(before)
        if after != before:
            page.write_text(after, encoding="utf-8")
            print(f"wrote {page.relative_to(ROOT)}")
