"""The cost of a report: CPU time and size for a run of 1,000 and of 100,000 steps, beside parsing its events with json.loads.

The script fails if the report of 100,000 steps needs 5 s of CPU time, or has 5 MB.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.report.material import run_directory

ROUNDS = 5
PARSE = "import json, sys\nfor path in sys.argv[1:]:\n    [json.loads(line) for line in open(path)]"


def cpu_seconds(command: list[str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    broken: list[str] = []
    print("| steps | events, MB | report, MB | report, CPU s | json.loads of the events, CPU s | ratio |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        for steps in (1_000, 100_000):
            root = run_directory(Path(name) / str(steps), steps=steps // 2, failed=False)
            page = Path(name) / "report.html"
            events = sorted(map(str, (root / "events").glob("launch-*.jsonl")))
            made: list[float] = []
            parsed: list[float] = []
            for _ in range(ROUNDS):
                made.append(cpu_seconds([sys.executable, "-m", "batchwright", "report", str(root), "-o", str(page)]))
                parsed.append(cpu_seconds([sys.executable, "-c", PARSE, *events]))
            report, parse = statistics.median(made), statistics.median(parsed)
            size, read = page.stat().st_size / 1e6, sum(os.path.getsize(path) for path in events) / 1e6
            print(f"| {steps:,} | {read:.1f} | {size:.2f} | {report:.2f} | {parse:.2f} | {report / parse:.1f} |")
            if report > 5 or size > 5:
                broken.append(f"{steps:,} steps: {report:.1f} s, {size:.1f} MB; bounds 5 s, 5 MB")
    if broken:
        sys.exit("; ".join(broken))


if __name__ == "__main__":
    main()
