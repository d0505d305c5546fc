"""What this machine's accelerator confirms: `make gpu` writes gpu-report.md. Without one, the simulated device is used.

    python benchmarks/gpu.py REPORT.md

Runs the device tests (tests/device), measures what the tests cannot know (memory outside torch's allocator, waits of a
step), runs the demo and the benchmark of the loop. Nothing is written outside the report and temporary folders.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parents[1]
MIB = 2**20
# In a process of its own: how much memory some steps use on the device outside of torch's allocator, after a context
# exists, and how often a plain step waits (CUDA can count that itself).
MEASURE = """
import json, os, sys, warnings, torch
import torch.distributed as dist
from torch import nn
from batchwright.runtime import GlobalOrder, Loader, StepSampler, accumulate, to_device
from batchwright.core.ramp.rules import Constant
from batchwright.runtime.device import choose, collectives_for, free_and_total, peaks, synchronise, use
from batchwright.runtime.ranks import discover

ranks = discover()
device = choose("auto", ranks)
use(device)
found = free_and_total(device)
before = found[0] if found else None
model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(8)]).to(device)
if ranks.size > 1:
    dist.init_process_group(**collectives_for(device, ranks.size))
    model = nn.parallel.DistributedDataParallel(model, device_ids=[device])
optimizer = torch.optim.AdamW(model.parameters())
rows = [torch.randn(1024) for _ in range(256)]
sampler = StepSampler(Constant(32).compile().until(256), 4, ranks.rank, ranks.size)
module, counted = torch.get_device_module(device), []
debug = getattr(module, "set_sync_debug_mode", None)
for step in accumulate(Loader(rows, GlobalOrder(256), sampler, pin_memory=True), model):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if debug: debug("warn")
        for micro in step:
            step.backward(model(to_device(micro.data, device)).square().sum(), len(micro.data))
        step.apply(optimizer)
        if debug: debug("default")
        counted.append(sum("synchroniz" in str(w.message) for w in caught))
synchronise(device)
after = free_and_total(device)
outside = before - after[0] - (peaks(device).get("reserved_bytes") or 0) if found else None
print("MEASURED", json.dumps({"outside_bytes": outside, "waits": counted if debug else None}))
"""


def part(title: str, lines: list[str], text: str) -> None:
    lines += [f"## {title}", "", text.rstrip(), ""]
    print(f"\n## {title}\n\n{text.rstrip()}", flush=True)


def run(command: list[str], **environment: str) -> tuple[int, str, float]:
    """The exit code, the end of the output, and the seconds."""
    print(f"\n$ {' '.join(command)}", flush=True)
    began = time.monotonic()
    done = subprocess.run(
        command,
        cwd=HERE,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout, time.monotonic() - began


def block(code: int, output: str, seconds: float, last: int = 40) -> str:
    shown = "\n".join(output.rstrip().splitlines()[-last:])
    return f"Exit code {code} after {seconds:.0f} s.\n\n```\n{shown}\n```"


def measured(ranks: int) -> tuple[bool, str]:
    """Whether the memory outside the allocator and the waits are as assumed, and both as text."""
    command = [sys.executable, "-c", MEASURE]
    if ranks > 1:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command += ["--no-python", sys.executable, "-c", MEASURE]
    code, output, seconds = run(command)
    found = [json.loads(line.split("MEASURED ", 1)[1]) for line in output.splitlines() if "MEASURED " in line]
    if code or not found:
        return False, block(code, output, seconds)
    from batchwright.runtime.device import outside_allocator

    sizes = [f["outside_bytes"] for f in found if f["outside_bytes"] is not None]
    memory = f"{max(sizes) / MIB:.0f} MiB" if sizes else "unknown"
    waits = found[0]["waits"]
    right = max(sizes, default=0) <= outside_allocator(ranks) and max(waits or [0]) <= 1
    return right, (
        f"{ranks} ranks: {memory} of memory outside the allocator (assumed: {outside_allocator(ranks) / MIB:.0f} MiB); waits of "
        f"each step, as torch counts them: {waits if waits is not None else 'not counted on this device'}."
    )


def main(report: str) -> int:
    """Write the report; the exit code is 0 if everything passed."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    lines, failed = ["# Devices: what this machine confirms", ""], []
    if found is None:
        there, count = "There is no accelerator that torch finds: the simulated device was used.", 1
    else:
        count, module = torch.accelerator.device_count(), torch.get_device_module(found)
        names = [getattr(module, "get_device_name", str)(torch.device(found.type, i)) for i in range(count)]
        there = f"{count} × {found.type}: {', '.join(names)}."
    facts = (
        f"torch {torch.__version__}, Python {platform.python_version()}, {platform.platform()}, {os.cpu_count()} cores."
    )
    part("Machine", lines, f"{there} {facts}")

    device = {} if found is None else {"BATCHWRIGHT_DEVICE": "real"}
    tests = [
        sys.executable,
        "-m",
        "pytest",
        "tests/device",
        "tests/runtime/test_device.py",
        "-v",
        "-p",
        "no:cacheprovider",
    ]
    result = run(tests, **device)
    failed += ["tests"] * bool(result[0])
    part("Device tests", lines, block(*result, last=150))

    if found is not None:
        for ranks in sorted({1, count}):
            right, text = measured(ranks)
            failed += [f"measurement with {ranks} ranks"] * (not right)
            part(f"Measured with {ranks} ranks", lines, text)
        demo = {"DEMO_DEVICE": found.type, "DEMO_NODES": str(min(2, count)), "DEMO_MEMORY": "4GiB"}
        bench = run([sys.executable, "benchmarks/bench_loop.py", "--only", "loop", "--device", "auto"])
        failed += ["benchmark"] * bool(bench[0])
        part("The loop against one by hand", lines, block(*bench))
    else:
        site = os.pathsep.join([str(HERE / "tests/device/site"), str(HERE), os.environ.get("PYTHONPATH", "")])
        demo = {"DEMO_DEVICE": "sim", "DEMO_NODES": "1", "DEMO_MEMORY": "1GiB", "PYTHONPATH": site}
        part("The loop against one by hand", lines, "Left out: the simulated device says nothing about speed.")
    result = run(["bash", "examples/demo.sh"], **demo)
    failed += ["demo"] * bool(result[0])
    part("Demo", lines, block(*result, last=120))
    part("Verdict", lines, f"Failed: {', '.join(failed)}." if failed else "Everything passed.")
    Path(report).write_text("\n".join(lines), encoding="utf-8")
    print(f"\nwritten to {report}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "gpu-report.md"))
