"""Microbatches of a pipeline: runs every `batchwright probe` command of docs/pipeline.md, and prints it with its output.

    python benchmarks/bench_pipeline.py [--write]

`--write` puts the new outputs into the page. It takes about two minutes. Run it on a quiet machine with two cores: the rounds
of all numbers of microbatches follow each other in the same processes, and numbers are medians, but another program that
computes makes every step longer.
"""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "pipeline.md"
BLOCK = re.compile(r"```text\n\$ batchwright (probe .*)\n(?:.*\n)*?```")


def measured(block: re.Match[str]) -> str:
    """The block with the output of its command, as it is now."""
    words = shlex.split(block[1])
    done = subprocess.run(
        [sys.executable, "-m", "batchwright", *words], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True
    )
    made = f"```text\n$ batchwright {block[1]}\n{done.stdout.rstrip()}\n```"
    print(made, end="\n\n", flush=True)
    return made


def main() -> None:
    """Run the commands of the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the outputs into docs/pipeline.md")
    write = parser.parse_args().write
    page = BLOCK.sub(measured, PAGE.read_text(encoding="utf-8"))
    if write:
        PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
