"""All benchmarks: `make bench`. Each prints a Markdown table of ratios; docs/benchmarks.md keeps the last."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent

if __name__ == "__main__":
    failed = []
    for script in sorted(HERE.glob("bench_*.py")):
        print(f"\n## {script.stem}\n", flush=True)
        if subprocess.run([sys.executable, script], check=False).returncode:
            failed.append(script.name)
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)
