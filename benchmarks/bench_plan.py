"""The cost of planning, and of checking and converting a configuration of 500 lines: CPU time of commands above a bare
interpreter, interleaved; and of one large plan in process.

The script fails if a median is above its bound.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROUNDS = 15
BIN = Path(sys.executable).parent
PLAN = (
    "plan --global-batch-size 1024 --nodes 16 --devices-per-node 8 --tensor-parallel 2 --max-micro-batch-size 6".split()
)
FILE = Path(tempfile.gettempdir()) / "batchwright-bench.yaml"  # a configuration of 500 lines
COMMANDS = {
    "python -c pass": [sys.executable, "-c", "pass"],
    "import argparse, dataclasses, json": [sys.executable, "-c", "import argparse, dataclasses, json"],
    "import click": [sys.executable, "-c", "import click"],
    "import yaml": [sys.executable, "-c", "import yaml"],
    "import batchwright": [sys.executable, "-c", "import batchwright"],
    "import batchwright; batchwright.plan": [sys.executable, "-c", "import batchwright; batchwright.plan"],
    "batchwright plan": [str(BIN / "batchwright"), *PLAN],
    "batchwright plan --json": [str(BIN / "batchwright"), *PLAN, "--json"],
    "batchwright check, 500 lines": [str(BIN / "batchwright"), "check", str(FILE), "--devices", "16"],
    "batchwright convert, 500 lines": [
        str(BIN / "batchwright"),
        "convert",
        str(FILE),
        "--to",
        "nemo",
        "--devices",
        "16",
    ],
}
BOUNDS_MS = {
    "import batchwright": 30,
    "batchwright plan": 100,
    "batchwright plan --json": 100,
    "batchwright check, 500 lines": 150,
    "batchwright convert, 500 lines": 150,
}


# An installed package has bytecode; without it, this would measure the compiler.
ENVIRONMENT = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}


def cpu_ms(command: list[str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=ENVIRONMENT)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return 1000 * (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def configuration() -> str:
    """A configuration of Hugging Face with 500 lines, of which three concern the batch."""
    lines = ["output_dir: out", "per_device_train_batch_size: 4  # per device", "gradient_accumulation_steps: 8"]
    for section in range(24):
        lines.append(f"section_{section}:")
        lines += [f"  setting_{n}: {n * 3.5}" if n % 3 else f'  path_{n}: "/data/{n}"' for n in range(20)]
    return "\n".join(lines[:500]) + "\n"


def main() -> None:
    FILE.write_text(configuration(), encoding="utf-8")
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(ROUNDS):
        for name, command in COMMANDS.items():
            times[name].append(cpu_ms(command))
    bare = statistics.median(times["python -c pass"])
    broken = []
    print("| command | CPU ms above bare Python (median, quartiles) | × bare Python |")
    print("|---|---|---|")
    for name, values in times.items():
        low, middle, high = (q - bare for q in statistics.quantiles(values, n=4))
        print(f"| `{name}` | {middle:.0f} ({low:.0f} to {high:.0f}) | {(middle + bare) / bare:.2f} |")
        if middle > BOUNDS_MS.get(name, float("inf")):
            broken.append(f"{name}: {middle:.0f} ms, bound {BOUNDS_MS[name]}")

    from fractions import Fraction

    from batchwright.core.batch.nearby import nearby
    from batchwright.core.batch.plan import plan
    from batchwright.core.batch.request import BatchRequest

    large = BatchRequest(global_batch_size=100_000 * 720_720, devices=100_000)
    near = BatchRequest(global_batch_size=100_000 * 720, devices=100_000, micro_batch_size=2)
    print("\n| in process, 100,000 devices | ms (median) |\n|---|---|")
    cases = {
        f"plan with all {1 + len(plan(large).alternatives)} splits": lambda: plan(large),
        "tolerance 10%": lambda: nearby(near, Fraction(1, 10)),
    }
    for name, call in cases.items():
        taken = []
        for _ in range(ROUNDS):
            start = time.process_time()
            call()
            taken.append(1000 * (time.process_time() - start))
        print(f"| {name} | {statistics.median(taken):.1f} |")
        if statistics.median(taken) > 50:
            broken.append(f"{name}: {statistics.median(taken):.0f} ms, bound 50")
    if broken:
        sys.exit("; ".join(broken))


if __name__ == "__main__":
    main()
