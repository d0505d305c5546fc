"""The worker's step, in this process, without a limit."""

from __future__ import annotations

import resource
import time
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

import torch

from batchwright.core.errors import PlanError
from batchwright.probe.worker import Worker

pytestmark = pytest.mark.torch


@pytest.fixture
def worker():
    made = object.__new__(Worker)
    made.spec = {"steps": 2, "micro_steps": 2, "seconds": 0.0, "contrasts": False, "workers": 0}
    made.size, made.device, made.result = 3, torch.device("cpu"), {}
    made.ranks = SimpleNamespace(rank=0, size=1)
    made.model = torch.nn.Linear(4, 1)
    made.optimizer = torch.optim.AdamW(made.model.parameters())
    made.task = SimpleNamespace(example_batch=lambda size: torch.ones(size, 4), loss_of=loss_of)
    made.stage = lambda doing: None
    SEEN.clear()
    SEEN.append(made.optimizer)
    return made


def test_a_limit_trial_accumulates_and_has_the_optimizers_state(worker):
    worker._limit()
    assert SEEN[1:] == [(False, False), (False, True), (True, True)]


@pytest.mark.parametrize("micro_steps", [1, 2])
def test_a_trial_of_speed_needs_the_memory_of_a_limit_trial(worker, micro_steps):
    """If the job accumulates: gradients and the optimizer's state exist during a forward pass."""
    worker.spec["micro_steps"] = micro_steps
    worker._throughput()
    assert ((True, True) in SEEN[1:]) == (micro_steps > 1)
    assert SEEN[-1] == (False, True), "the steps that are timed do not accumulate"


def test_a_task_with_an_example_batch_needs_no_dataset(worker):
    worker.spec["contrasts"] = True
    worker._throughput()
    assert worker.result["contrasts"].keys() == {"cached"}, "on one rank, accumulating shows nothing"


@pytest.mark.parametrize("memory", [None, 2**30])
def test_what_the_limit_depends_on_without_a_budget(worker, memory):
    worker.spec |= {"memory": memory, "host_memory": 2**34}
    before = resource.getrlimit(resource.RLIMIT_AS)
    free = worker.room()
    try:
        resource.setrlimit(resource.RLIMIT_AS, (2**46, before[1]))
        limited = worker.room()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert (limited == free) == (memory is not None)
    worker.spec["host_memory"] = 2**33
    assert (worker.room() == free) == (memory is not None)


@pytest.mark.parametrize(("memory", "ranks"), [(2**34 + 1, 1), (2**33 + 1, 2)])
def test_a_budget_above_the_machines_memory_is_refused(worker, monkeypatch, memory, ranks):
    """RLIMIT_AS would not stop such a trial: the kernel would kill some process."""
    monkeypatch.setattr("batchwright.probe.worker.physical_memory", lambda: 2**34)
    monkeypatch.setattr("batchwright.probe.worker.resource.setrlimit", lambda *limits: None)
    worker.spec |= {"memory": memory, "margin": 0, "limited": True, "host_memory": 2**33}
    worker.base, worker.ranks.size = 2**30, ranks
    with pytest.raises(PlanError, match=f"memory={memory:,}.*{2**34:,}") as caught:
        worker._set_limit()
    assert caught.value.nearest == (2**34 // ranks,)
    worker.spec["memory"] = 2**34 // ranks
    worker._set_limit()


def test_other_ranks_are_not_other_programs(worker, monkeypatch):
    """Two ranks, and nothing else on this machine: all processors' seconds are theirs."""
    monkeypatch.setattr("batchwright.probe.worker.busy_seconds", lambda: 1.0 + 2 * time.process_time())
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor: tensor.mul_(2))
    monkeypatch.setattr("batchwright.probe.worker.os.cpu_count", lambda: 1)
    monkeypatch.setattr(worker, "_agree", lambda steps: steps)
    worker.ranks.size = 2
    timing = worker._time(lambda: sum(range(10**5)))
    assert timing.cpu_seconds > 0
    assert timing.contention < 0.1 * timing.cpu_seconds / timing.seconds


SEEN: list = []


def loss_of(model, batch):
    SEEN.append((model.weight.grad is not None, bool(SEEN[0].state)))
    return model(batch).sum(), len(batch), None


@pytest.mark.parametrize(("autocast", "expected"), [(False, "float32"), (True, "bfloat16")])
def test_the_type_of_the_products_is_that_of_autocast(worker, autocast, expected):
    """MFU compares with the device's peak in this type. The parameters are float32 in both."""
    plain = worker.task.loss_of

    def loss_of(model, batch):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return plain(model, batch)

    worker.task.loss_of = loss_of
    worker.spec["contrasts"] = True
    worker._throughput()
    assert worker.result["flops"] > 0 and worker.result["flops_type"] == expected


@pytest.mark.parametrize(
    ("lengths", "longest", "expected"), [((5, 5), False, 5), ((9, 5), False, None), ((9, 5), True, 9)]
)
def test_tokens_are_counted_where_the_samples_of_a_batch_have_one_length(worker, tmp_path, lengths, longest, expected):
    (tmp_path / "train.py").write_text(f"""
import torch
from batchwright.runtime.task import Task

def task():
    rows = [torch.ones({lengths}[i % 2], dtype=torch.long) for i in range(8)]
    collate = lambda samples: torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)
    loss = lambda model, x: (model(x.float()[..., :1]).sum(), 1)
    return Task(torch.nn.Linear(1, 1), rows, loss, torch.optim.AdamW, collate=collate)
""")
    worker.spec |= {"longest": longest, "longest_index": None, "target": f"{tmp_path / 'train.py'}:task", "args": {}}
    worker.write = lambda **found: None
    worker._build()
    assert worker.result["tokens_per_sample"] == expected


LISTS = "[{'ids': [1] * (4 if i == 0 else 64)} for i in range(8)]", "pad([torch.tensor(row['ids']) for row in rows])"
CHANGED = (
    "[{'ids': torch.ones(7), 'n': 1} for _ in range(8)]",
    "torch.stack([row.popitem() and row['ids'] for row in rows]).long()",
)
TEXTS = "['a' * n for n in (5, 9, 300, 7)]", "torch.ones(len(rows), 64, dtype=torch.long)"


@pytest.mark.parametrize(
    ("task", "longest", "expected"),
    [(LISTS, False, None), (LISTS, True, 64), (TEXTS, False, 64), (CHANGED, True, 7)],
    ids=["lists", "the longest list", "texts of one length as tokens", "rows that collate changes"],
)
def test_tokens_are_those_of_batches_not_of_rows(worker, tmp_path, task, longest, expected):
    rows, collate = task
    (tmp_path / "train.py").write_text(f"""
import torch
from batchwright.runtime.task import Task

def task():
    pad = lambda samples: torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)
    loss = lambda model, x: (model(x.float()[..., :1]).sum(), 1)
    return Task(torch.nn.Linear(1, 1), {rows}, loss, torch.optim.AdamW, collate=lambda rows: {collate})
""")
    worker.spec |= {"longest": longest, "longest_index": None, "target": f"{tmp_path / 'train.py'}:task", "args": {}}
    worker.write = lambda **found: None
    worker._build()
    assert worker.result["tokens_per_sample"] == expected
    worker.batch(0, 3)


@pytest.mark.filterwarnings("ignore:Using `torch.compile")  # of torch: its counter has hooks
def test_a_compiled_model_stays_compiled_in_all_that_is_compared(worker):
    """Counting operations makes the model run eagerly from then on."""
    stages, eager = ["warm-up"], []

    class Layer(torch.nn.Linear):
        def forward(self, x):
            if not torch.compiler.is_compiling():
                eager.append(stages[-1])
            return super().forward(x)

    layer = Layer(4, 1)
    worker.model, worker.optimizer = torch.compile(layer, backend="eager"), torch.optim.AdamW(layer.parameters())
    timed, counted = worker._time, worker._flops
    worker._time = lambda step, first: (stages.append("timing"), timed(step, first=first))[1]
    worker._flops = lambda batch: (stages.append("counting"), counted(batch))[1]
    worker.longest, worker.spec["contrasts"] = None, True
    worker.task = SimpleNamespace(
        example_batch=None, dataset=torch.ones(16, 4), collate=None, loss_of=lambda m, x: (m(x).sum(), 3, None)
    )
    worker._throughput()
    assert worker.result["contrasts"].keys() == {"loader", "cached"} and worker.result["flops"] > 0
    assert stages == ["warm-up", "timing", "timing", "timing", "counting"] and set(eager) == {"counting"}
