"""Real tasks, real processes, a real limit of memory. Each takes seconds, so there are few."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from batchwright.cli import main
from batchwright.core.numbers import parse_bytes
from batchwright.probe import probe
from batchwright.probe.machine import trial_environment
from batchwright.probe.records import read_request
from batchwright.probe.runner import TaskRunner

pytestmark = pytest.mark.torch
BUDGET = "320MiB"


@contextmanager
def runner(target, folder: Path, **options) -> Iterator[TaskRunner]:
    folder.mkdir(exist_ok=True)
    with closing(TaskRunner(read_request(str(target), timeout=900, **options), folder)) as made:
        yield made


# A plain training loop without batchwright: a new interpreter, the libraries, the limit, two steps.
PLAIN = """
import resource, sys, torch, torch._dynamo
sys.path.insert(0, sys.argv[1])
size, micro_steps, budget = map(int, sys.argv[2:])
now = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmSize")) * 1024
resource.setrlimit(resource.RLIMIT_AS, (now + budget, resource.getrlimit(resource.RLIMIT_AS)[1]))
try:
    import tiny
    model = tiny.net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = iter(torch.utils.data.DataLoader(tiny.Data(), batch_sampler=[[i % 64 for i in range(size)]] * 9))
    for step in range(2):
        for micro in range(micro_steps):
            x = next(data)
            (model(x).square().sum() / x.numel()).backward()
        optimizer.step()
        optimizer.zero_grad()
except (RuntimeError, MemoryError):
    sys.exit(3)
"""


def runs(folder: Path, size: int, micro_steps: int) -> bool:
    arguments = [sys.executable, "-c", PLAIN, folder, size, micro_steps, parse_bytes(BUDGET, "memory")]
    done = subprocess.run(
        [*map(str, arguments)], env=trial_environment(limited=True), capture_output=True, text=True, timeout=900
    )
    assert done.returncode in (0, 3), done.stderr
    return done.returncode == 0


@pytest.mark.parametrize("accumulation_steps", [1, pytest.param(8, marks=pytest.mark.rounds)])
def test_the_limit_is_that_of_a_plain_loop_in_fresh_processes(accumulation_steps, task_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "batchwright.probe.prober._ESTIMATE_SECONDS", 900.0
    )  # without an estimate, there are more trials
    random.seed(7)
    before = random.getstate(), sorted(p.name for p in tmp_path.iterdir())
    made = probe(
        f"{task_file}:task",
        memory=BUDGET,
        dir=None,
        throughput=False,
        timeout=900,
        accumulation_steps=accumulation_steps,
    )
    assert (random.getstate(), sorted(p.name for p in tmp_path.iterdir() if p.name != "__pycache__")) == before
    assert len(made.trials) <= 5
    assert {t.status for t in made.trials} == {"fits", "oom"}
    assert made.first_failing_micro_batch_size == made.max_micro_batch_size + 1

    micro_steps = min(2, accumulation_steps)
    assert runs(tmp_path, made.max_micro_batch_size, micro_steps)
    assert not runs(tmp_path, made.first_failing_micro_batch_size, micro_steps)


def test_the_command_line_measures_and_prints_one_document(task_file, tmp_path, capsys):
    journal = str(tmp_path / "j")
    arguments = ["probe", f"{task_file}:task", "--max", "2", "--seconds", "0.1", "--memory", "1GiB", "--dir", journal]
    with pytest.raises(SystemExit) as done:
        main([*arguments, "--json"])
    out, err = capsys.readouterr()
    assert done.value.code == 0, err
    document = json.loads(out)
    assert document["schema"] == 1
    assert document["max_micro_batch_size"] == 2
    measured = {t["micro_batch_size"] for t in document["trials"] if t["status"] == "fits"}
    assert {document["saturating_micro_batch_size"], document["recommended_micro_batch_size"]} <= measured
    assert document["bottleneck"] in ("none", "input", "synchronisation", "overhead", "too-noisy")
    assert document["tflops_per_second"] > 0
    assert "micro_batch_size 2" in err
    with pytest.raises(SystemExit):
        main([*arguments, "--plot"])  # everything is in the journal: one process that describes the task
    out, err = capsys.readouterr()
    assert "micro_batch_size 2 is the largest that ran; larger sizes were not tried" in out
    assert "up: samples per second" in out and "Time of a step" in out
    assert "resumed: " in err


def planned(capsys, *arguments: str) -> dict[str, Any]:
    capsys.readouterr()
    with pytest.raises(SystemExit) as done:
        main(["plan", "--probe", "--json", *arguments])
    out, err = capsys.readouterr()
    assert done.value.code == 0, err
    return json.loads(out)


def test_a_plan_of_a_task_is_of_sizes_that_ran(task_file, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    task = ["--task", f"{task_file}:task", "--arg", "optimizer=SGD", "--memory", BUDGET, "--max-micro-batch-size", "2"]
    made = planned(capsys, *task, "--global-batch-size", "48", "--devices", "2")
    # Which of them is recommended depends on the speeds that were measured.
    assert made["micro_batch_size"] in (1, 2) and made["micro_batch_size"] * made["accumulation_steps"] == 24
    assert made["samples_per_second"] > 0  # measured
    journal = next((tmp_path / ".batchwright").iterdir()).read_text().splitlines()
    trials = [line["trial"] for line in map(json.loads, journal) if line["kind"] == "trial"]
    assert {t["micro_batch_size"] for t in trials if t["status"] == "fits"} == {1, 2}


@pytest.mark.rounds
def test_a_plan_of_a_model_is_of_sizes_that_ran(tmp_path, monkeypatch, capsys):
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = {"model_type": "llama", "vocab_size": 4096, "max_position_embeddings": 128, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = ["--model", str(tmp_path), "--sequence-length", "128", "--memory", "640MiB", "--global-batch-size", "256"]
    made = planned(capsys, *model)
    assert made["micro_batch_size"] * made["accumulation_steps"] == 256
    assert made["sources"]["max_micro_batch_size"] == "probed"
    assert made["settings"]["per_device_train_batch_size"] == made["micro_batch_size"]


def test_the_users_mistake_is_shown_and_ends_the_search(task_file, tmp_path, capsys):
    with pytest.raises(SystemExit) as done:
        main(["probe", f"{task_file}:broken", "--memory", "1GiB", "--dir", str(tmp_path / "j")])
    err = capsys.readouterr().err
    assert done.value.code == 5
    assert "ValueError: the user's own mistake" in err
    assert 'tiny.py", line' in err
    assert "worker.py" not in err
    assert err.count("limit  ") == 1, "one trial, no search"


def test_two_ranks_and_what_they_are(task_file, tmp_path):
    with runner(f"{task_file}:task", tmp_path / "scratch", memory="1GiB", ranks=2, args={"optimizer": "SGD"}) as trials:
        trial = trials.limit(2)
    assert trial.fits, trial
    assert trials.identity["optimizer"] == "SGD"
    assert trials.identity["code"].keys() == {"tiny.py"}
    assert trials.identity["args"] == {"optimizer": "SGD"}


def test_the_longest_sample_fills_the_batch(tmp_path):
    path = tmp_path / "ragged.py"
    path.write_text(
        "import torch\nfrom torch import nn\nfrom batchwright.runtime.task import Task\n"
        "class Data:\n    def __len__(self): return 9\n"
        "    def __getitem__(self, i): return torch.ones(20000 if i == 7 else 1, 64)\n"
        "def task():\n    return Task(model=lambda: nn.Sequential(nn.Linear(64, 512), nn.Linear(512, 64)), dataset=Data(),\n"
        "        collate=nn.utils.rnn.pad_sequence, loss=lambda m, x: (m(x).sum(), x.numel()),\n"
        "        optimizer=lambda p: torch.optim.SGD(p, lr=0.1))\n"
    )
    with runner(path, tmp_path / "scratch", memory="1GiB", longest=True) as trials:
        trial = trials.limit(2)
    assert trials.longest_index == 7
    assert trial.peak_memory_bytes > 2 * 20000 * 512 * 4, "the activations of two of them"


@pytest.mark.rounds
@pytest.mark.parametrize("longest", [False, True])
def test_samples_that_are_longer_than_the_estimate_has_seen(tmp_path, longest):
    """The first eight samples have 50 rows, the others 2,000: the estimate is 40 times too small, but not with --longest."""
    path = tmp_path / "ragged.py"
    path.write_text(
        "import torch\nfrom torch import nn\nfrom batchwright.runtime.task import Task\n"
        "class Data:\n    def __len__(self): return 256\n"
        "    def __getitem__(self, i): return torch.ones(50 if i < 8 else 2000, 64)\n"
        "def pad(samples): return nn.utils.rnn.pad_sequence(samples, batch_first=True)\n"
        "def task():\n    return Task(model=lambda: nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)),\n"
        "        dataset=Data(), collate=pad, loss=lambda m, x: (m(x).square().sum(), x.numel()),\n"
        "        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3))\n"
    )
    made = probe(f"{path}:task", memory="256MiB", longest=longest, throughput=False, dir=None, timeout=900)
    assert made.first_failing_micro_batch_size == made.max_micro_batch_size + 1
    assert 30 < made.max_micro_batch_size < 50
    assert any("the estimate was far from" in note for note in made.notes) == (not longest)
    assert len(made.trials) <= (5 if longest else 12)


@pytest.mark.rounds
def test_evaluation_if_only_one_sample_can_be_trained(tmp_path):
    path = tmp_path / "wide.py"
    path.write_text(
        "import torch\nfrom torch import nn\nfrom batchwright.runtime.task import Task\n"
        "class Data:\n    def __len__(self): return 64\n    def __getitem__(self, i): return torch.ones(2**21)\n"
        "def loss(model, x):\n    for _ in range(10): x = model(x.unsqueeze(-1)).squeeze(-1).tanh()\n"
        "    return x.sum(), len(x)\n"
        "def task():\n    return Task(model=lambda: nn.Linear(1, 1), dataset=Data(), loss=loss,\n"
        "        optimizer=lambda p: torch.optim.SGD(p, lr=0.1))\n"
    )
    with runner(path, tmp_path / "scratch", memory="160MiB") as trials:
        assert [trials.limit(size).fits for size in (1, 2)] == [True, False]
        assert trials.evaluation(2).fits


@pytest.mark.rounds
def test_under_ulimit_v_the_budget_is_what_it_leaves_and_a_larger_one_is_refused(task_file, tmp_path):
    def limited(kilobytes: int, *arguments: str) -> subprocess.CompletedProcess[str]:
        program = (
            "import sys; from batchwright.probe import probe; from batchwright.core.errors import BatchwrightError\n"
            "try: print(*probe(sys.argv[1], memory=(sys.argv[2:] or [None])[0], max=2, throughput=False, dir=None).notes)\n"
            "except BatchwrightError as error: print(error); sys.exit(error.exit_code)\n"
        )
        shell = ["bash", "-c", f'ulimit -v {kilobytes}; exec "$@"', "bash", sys.executable, "-c", program]
        return subprocess.run(
            [*shell, f"{task_file}:task", *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=300
        )

    half = limited(1_500_000)
    assert half.returncode == 0, half.stderr
    assert "is what ulimit -v leaves" in half.stdout
    larger = limited(1_500_000, "100GB")
    assert larger.returncode == 4 and "ulimit -v allows 1,536,000,000 bytes" in larger.stdout
    without_torch = limited(300_000)
    assert without_torch.returncode == 4 and "torch cannot be loaded: ulimit -v allows" in without_torch.stdout
