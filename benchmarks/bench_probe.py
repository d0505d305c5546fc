"""The largest micro batch in a memory budget: batchwright against Lightning's and Accelerate's finders.

Same model, data, budget (address space above the imported libraries), allocator settings and steps (two, without
accumulation, as the other tools do), each tool in a process of its own, interleaved. The reference is a bisection of a
plain loop without batchwright, with a new interpreter per size. Counts do not depend on the machine's load. Times are
ratios within a round: of processor time (stable) and of wall time (not stable on a shared machine).

A whole probe (limit, speed, bottleneck) of a small model takes at most 60 s of wall time on two quiet cores: the script fails
above that. On a machine that does something else, it may fail without a fault. `--only whole` or `--only finders` runs a part.

Other tools: `pip install --target DIR --no-deps lightning …` and run with PYTHONPATH=DIR (never let pip replace torch).
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ONLY = sys.argv[sys.argv.index("--only") + 1] if "--only" in sys.argv else "finders,whole"
WHOLE_SECONDS = 60.0
BYTEGPT = Path(__file__).resolve().parents[1] / "examples" / "bytegpt"
ROUNDS = int(sys.argv[sys.argv.index("--rounds") + 1]) if "--rounds" in sys.argv else 1
GPT = """
import torch
from torch import nn
from torch.nn import functional as F

V, D, T, LAYERS = 4096, 128, 128, 2

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(V, D), nn.Embedding(T, D)
        block = lambda: nn.TransformerEncoderLayer(D, 4, 4 * D, 0.0, batch_first=True, norm_first=True)
        self.blocks = nn.ModuleList(block() for _ in range(LAYERS))
        self.head = nn.Linear(D, V)

    def forward(self, x):
        h = self.tokens(x) + self.places(torch.arange(x.shape[1]))
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        for block in self.blocks:
            h = block(h, src_mask=mask, is_causal=True)
        return self.head(h)

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 4096
    def __getitem__(self, i):
        return torch.randint(0, V, (T + 1,), generator=torch.Generator().manual_seed(i))

def loss(model, batch):
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten(), reduction="sum"), batch[:, 1:].numel()

def task():
    from batchwright.runtime.task import Task
    return Task(model=Model, dataset=Data(), loss=loss, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3))
"""
# Up to some hundred samples the optimizer's step is the peak, so small batches show no slope.
MLP = """
import torch
from torch import nn

class Model(nn.Sequential):
    def __init__(self):
        super().__init__(*(layer for _ in range(4) for layer in (nn.Linear(1024, 1024), nn.ReLU())))

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 1 << 15
    def __getitem__(self, i):
        return torch.full((1024,), float(i % 7))

def loss(model, batch):
    return model(batch).square().sum(), len(batch)

def task():
    from batchwright.runtime.task import Task
    return Task(model=Model, dataset=Data(), loss=loss, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3))
"""
# Name: source, budget, the sizes that Accelerate starts from, a size that does not fit, how far below the truth ours may be.
MODELS = {
    "two-layer GPT": (GPT, 768 * 2**20, (256, 1024), 256, 0.0),
    # The limit of a plain loop itself varies by 0.4%, and rows of 4 KiB leave holes in the heap.
    "four-layer MLP, optimizer-bound": (MLP, 256 * 2**20, (8192,), 16384, 0.02),
}
# What another tool's process does: import, set the budget, search, print what it found and left behind.
PEER = """
import inspect, json, os, random, resource, sys
sys.path.insert(0, os.getcwd())
import torch, torch._dynamo
from bench_task import Model, Data, loss
tool = sys.argv[1]
if tool.startswith("lightning"):
    import lightning
elif tool.startswith("accelerate"):
    import accelerate
size = lambda: int(next(l for l in open("/proc/self/status") if l.startswith("VmSize")).split()[1]) * 1024
hard = resource.getrlimit(resource.RLIMIT_AS)[1]
resource.setrlimit(resource.RLIMIT_AS, (size() + int(sys.argv[2]), hard))
tried, rng, files = [], torch.get_rng_state(), set(os.listdir("."))

if tool.startswith("lightning"):
    import logging, warnings
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.batch_size, self.model = 2, Model()
        def training_step(self, batch, index):
            if not tried or tried[-1] != self.batch_size:
                tried.append(self.batch_size)
            total, weight = loss(self.model, batch)
            return total / weight
        def train_dataloader(self):
            return torch.utils.data.DataLoader(Data(), batch_size=self.batch_size)
        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    module = Module()
    trainer = lightning.Trainer(max_steps=2, logger=False, enable_progress_bar=False, enable_model_summary=False,
                                enable_checkpointing=False, accelerator="cpu")
    rng = torch.get_rng_state()
    # Newer versions stop at 8192 unless they are told another cap.
    takes = inspect.signature(lightning.pytorch.tuner.Tuner.scale_batch_size).parameters
    largest = {"max_val": len(Data())} if "max_val" in takes else {}
    tuner = lightning.pytorch.tuner.Tuner(trainer)
    found = tuner.scale_batch_size(module, mode="binsearch", steps_per_trial=2, max_trials=50, **largest)
else:
    data = Data()

    def train(batch_size):
        tried.append(batch_size)
        model = Model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for step in range(2):
            batch = torch.stack([data[(step * batch_size + i) % len(data)] for i in range(batch_size)])
            total, weight = loss(model, batch)
            (total / weight).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return batch_size

    start = int(tool.rpartition("-")[2])
    if tool.startswith("accelerate"):
        found = accelerate.utils.find_executable_batch_size(train, starting_batch_size=start)()
    else:
        found = train(start)  # one size, for the truth
resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
left = sorted(set(os.listdir(".")) - files - {"__pycache__"})
print(json.dumps({"found": found, "trials": len(tried), "files": left, "rng": not torch.equal(rng, torch.get_rng_state())}))
"""
# The allocator settings of a trial, for all tools: without them the limit changes from run to run.
ENVIRONMENT = os.environ | {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "OPENBLAS_NUM_THREADS": "1",
}


def clocks() -> tuple[float, float]:
    """Wall time, and processor time of all processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.monotonic(), used.ru_utime + used.ru_stime


def since(before: tuple[float, float]) -> dict[str, float]:
    return dict(zip(("seconds", "cpu"), (now - then for now, then in zip(clocks(), before, strict=True)), strict=True))


def ours(folder: Path, budget: int, exact: bool) -> dict[str, object]:
    arguments = [
        sys.executable,
        "-m",
        "batchwright",
        "probe",
        f"{folder / 'bench_task.py'}:task",
        "--memory",
        str(budget),
    ]
    started, before = clocks(), set(os.listdir(folder))
    arguments += ["--limit-only", "--accumulation-steps", "1", "--fresh", "--json", *(["--exact"] if exact else [])]
    arguments += ["--dir", str(folder / "journal")]
    done = subprocess.run(arguments, cwd=folder, capture_output=True, text=True, check=True)
    made = json.loads(done.stdout)
    left = sorted(set(os.listdir(folder)) - before - {"__pycache__", "journal"})
    trials = sum(t["purpose"] == "limit" for t in made["trials"])
    return {"found": made["max_micro_batch_size"], "trials": trials, "files": left, "rng": False} | since(started)


def peer(tool: str, folder: Path, budget: int) -> dict[str, object] | None:
    started = clocks()
    arguments = [sys.executable, "peer.py", tool, str(budget)]
    done = subprocess.run(arguments, cwd=folder, env=ENVIRONMENT, text=True, capture_output=True, check=False)
    if done.returncode:
        print(f"{tool}: {'not installed' if 'No module named' in done.stderr else done.stderr[-300:]}", file=sys.stderr)
        return None
    return json.loads(done.stdout.strip().splitlines()[-1]) | since(started)


def truth(folder: Path, budget: int, high: int) -> int:
    low = 0
    while high - low > 1:
        middle = (low + high) // 2
        arguments = [sys.executable, "peer.py", f"plain-{middle}", str(budget)]
        done = subprocess.run(arguments, cwd=folder, env=ENVIRONMENT, text=True, capture_output=True, check=False)
        if done.returncode and "allocate" not in done.stderr:
            raise SystemExit(done.stderr)
        low, high = (low, middle) if done.returncode else (middle, high)
    return low


def compare(name: str) -> str | None:
    """Print the table of one model; what is wrong with our row, if anything is."""
    source, budget, starts, high, below = MODELS[name]
    tools = ("lightning-binsearch", *(f"accelerate-{start}" for start in starts))
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "bench_task.py").write_text(source)
        (folder / "peer.py").write_text(PEER)
        rows: dict[str, list[dict[str, object]]] = {"batchwright probe": []} | {tool: [] for tool in tools}
        for _ in range(ROUNDS):
            rows["batchwright probe"].append(ours(folder, budget, exact=not below))
            for tool in tools:
                if (found := peer(tool, folder, budget)) is not None:
                    rows[tool].append(found)
        largest = truth(folder, budget, high)
    print(f"{name}: by bisection with new processes {largest} (budget {budget >> 20} MiB)\n")
    print("| tool | found | limit trials | CPU, ratio to ours | wall, ratio to ours | files left | RNG changed |")
    print("|---|---|---|---|---|---|---|")
    base = rows["batchwright probe"]
    for tool, runs in rows.items():
        if not runs:
            print(f"| {tool} | not installed | | | | | |")
            continue
        cpu, wall = (
            statistics.median(r[key] / b[key] for r, b in zip(runs, base, strict=False))  # type: ignore[operator]
            for key in ("cpu", "seconds")
        )
        last = runs[-1]
        left, changed = ", ".join(last["files"]) or "none", "yes" if last["rng"] else "no"  # type: ignore[arg-type]
        print(f"| {tool} | {last['found']} | {last['trials']} | {cpu:.2f} | {wall:.2f} | {left} | {changed} |")
    print(flush=True)
    mine = base[-1]
    if not (1 - below) * largest <= int(mine["found"]) <= largest or int(mine["trials"]) > 5:  # type: ignore[call-overload]
        return f"{name}: expected {largest} in at most 5 trials: found {mine['found']} in {mine['trials']} limit trials"
    return None


def whole(name: str, source: str, budget: int) -> str | None:
    """Print the row of a probe with its default settings (limit, speed, bottleneck, one rank); what is wrong with it."""
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "bench_task.py").write_text(source)
        arguments = ["probe", "bench_task.py:task", "--memory", str(budget), "--json", "--dir", "journal"]
        started = clocks()
        done = subprocess.run(
            [sys.executable, "-m", "batchwright", *arguments], cwd=scratch, capture_output=True, text=True, check=True
        )
        took = since(started)
    trials = [t["purpose"] for t in json.loads(done.stdout)["trials"]]
    counts = f"{trials.count('limit')} | {trials.count('throughput')}"
    print(f"| {name} | {counts} | {took['cpu']:.1f} | {took['seconds']:.1f} |", flush=True)
    if took["seconds"] > WHOLE_SECONDS:
        return (
            f"{name}: a whole probe took {took['seconds']:.1f} s, and {WHOLE_SECONDS:.0f} s are promised on quiet cores"
        )
    return None


def main() -> None:
    wrong = [said for name in MODELS if (said := compare(name))] if "finders" in ONLY else []
    if "whole" in ONLY:
        print("| a whole probe | limit trials | speed trials | CPU, s | wall, s |\n|---|---|---|---|---|", flush=True)
        bytegpt = f"import sys\nsys.path.insert(0, {str(BYTEGPT)!r})\nfrom bytegpt import task\n"
        rows = [
            ("examples/bytegpt", bytegpt, 2**30),
            *((name, source, budget) for name, (source, budget, *_) in MODELS.items()),
        ]
        wrong += [said for row in rows if (said := whole(*row))]
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
