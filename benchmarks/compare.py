"""This checkout against another one: plan, ramp, step, loop, probe and run, in one interleaved run.

    git clone . /tmp/before && git -C /tmp/before checkout COMMIT
    python benchmarks/compare.py /tmp/before [--rounds 7] [--cases plan,step]

Each case runs in a fresh process of this environment, with the `src` folder of one checkout or the other first on the path;
both are run in turn, round after round. A number is CPU seconds of the case and its children; `probe` and `run` also wait,
so their wall time is compared, too. A ratio is the median over rounds of after / before, with the smallest and largest.
"""

from __future__ import annotations

import argparse
import compileall
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
PREPARE = """
import time, torch
import batchwright
from batchwright.runtime import GlobalOrder, Loader, Settings, StepSampler, Task, accumulate, train
torch.set_num_threads(1)
rows = [(torch.randn(32, generator=torch.Generator().manual_seed(i)), torch.zeros(1)) for i in range(512)]
def loss(model, batch):
    return (model(batch[0]) - batch[1]).square().sum(), len(batch[0])
def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.01)
schedule = batchwright.ramp(thresholds="0:32 3200:64", samples=16000).schedule
"""
STEP = """
model = torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(4)], torch.nn.Linear(32, 1))
opt = optimizer(model.parameters())
began = None
for step in accumulate(Loader(rows, GlobalOrder(512), StepSampler(schedule, micro_batch_size=4)), model):
    for micro in step:
        step.backward(*loss(model, micro.data))
    step.apply(opt)
    began = began or time.process_time()
print(time.process_time() - began)
"""
LOOP = """
model = lambda: torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(4)], torch.nn.Linear(32, 1))
task = Task(model=model, dataset=rows, loss=loss, optimizer=optimizer)
began = time.process_time()
train(task, schedule, Settings(directory="run", micro_batch_size=16, checkpoint_every=1600, progress=False))
print(time.process_time() - began)
"""
RAMP = """
import time, batchwright
began = time.process_time()
for _ in range(5):
    batchwright.ramp(linear=(256, 256, "10M"), global_batch_size=25600, nodes=64, devices_per_node=8, micro_batch_size=1,
                     samples="40M", node_policy="min-node-hours", micro_step_seconds=(0.1, 0.01))
print(time.process_time() - began)
"""
TASK = (
    PREPARE
    + """
def task():
    model = lambda: torch.nn.Sequential(torch.nn.Linear(32, 4096), torch.nn.Linear(4096, 1))
    return Task(model=model, dataset=rows, loss=loss, optimizer=optimizer)
"""
)
CLI = [sys.executable, "-m", "batchwright"]
PLAN = "plan --global-batch-size 1024 --nodes 16 --devices-per-node 8 --tensor-parallel 2 --max-micro-batch-size 6"
CASES = {
    "plan": [*CLI, *PLAN.split()],
    "ramp": [sys.executable, "-c", RAMP],
    "step": [sys.executable, "-c", PREPARE + STEP],
    "loop": [sys.executable, "-c", PREPARE + LOOP],
    "probe": [*CLI, *"probe task.py:task --max 64 --memory 2GiB --seconds 0.2 --dir probe".split()],
    "run": [*CLI, *"run task.py:task --thresholds".split(), "0:16 64:32", *(
        "--samples 256 --micro-batch-size 8 --nodes 2 --devices-per-node 1 --node-policy constant-work --dir run"
    ).split()],
}  # fmt: skip


def measure(command: list[str], source: Path) -> tuple[float, float]:
    """CPU and wall seconds of a case in an empty folder; a case that prints a number measures its CPU itself."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "task.py").write_text(TASK, encoding="utf-8")
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        done = subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(source)},
            capture_output=True,
            text=True,
            check=False,
        )
        wall, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
        if done.returncode:
            sys.exit(f"{' '.join(command)[:200]} failed with {source}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return (float(done.stdout) if command[1] == "-c" else cpu), wall


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("other", type=Path, help="a checkout of the version to compare with")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cases", default=",".join(CASES))
    given = parser.parse_args()
    sources = {"before": given.other.resolve() / "src", "after": HERE / "src"}
    for source in sources.values():  # else a checkout without bytecode is compiled in every process
        compileall.compile_dir(source, quiet=1)
    print("| case | CPU after / before (median, least to most) | wall |\n|---|---|---|")
    for name in given.cases.split(","):
        times: dict[str, list[tuple[float, float]]] = {"before": [], "after": []}
        for round_ in range(given.rounds):
            for which in sorted(sources, reverse=round_ % 2 == 0):
                times[which].append(measure(CASES[name], sources[which]))
        cells = []
        for kind in (0, 1):
            ratios = sorted(a[kind] / b[kind] for a, b in zip(times["after"], times["before"], strict=True))
            cells.append(f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")
        print(f"| {name} | {cells[0]} | {cells[1]} |", flush=True)


if __name__ == "__main__":
    main()
