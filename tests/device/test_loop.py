"""The loop, the loader, evaluation and checkpoints on a device: the numbers of the CPU, and no wait that is not needed."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from batchwright.core.ramp.rules import Constant, Thresholds
from batchwright.core.ramp.schedule import Schedule
from batchwright.runtime.data.loader import Loader
from batchwright.runtime.data.order import GlobalOrder
from batchwright.runtime.data.sampler import StepSampler
from batchwright.runtime.device import to_device
from batchwright.runtime.loop.evaluate import evaluate
from batchwright.runtime.loop.events import read_events
from batchwright.runtime.loop.process import ThisProcess
from batchwright.runtime.loop.settings import Settings
from batchwright.runtime.loop.train import train
from batchwright.runtime.state import tensors
from batchwright.runtime.task import Task
from tests.device.host import SIMULATED, fresh_port, place, same, waits
from tests.runtime.loop.loop_tasks import Numbers, task

simulated = pytest.mark.skipif(not SIMULATED, reason="counts what only the simulated device shows")
SAMPLES = 96


def schedule() -> Schedule:
    return Thresholds(((0, 8), (32, 16))).compile().until(SAMPLES)


def run(directory: str, device: str, of: Task | None = None, **changes: Any) -> tuple[list[float], dict[str, Any]]:
    """The losses of all launches in a directory so far, and the weights."""
    model = dict[str, Any]()

    def keep(_: Any, trained: nn.Module, optimizer: Any) -> None:
        whole = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in trained.state_dict().items()}
        model.update({name: p.detach().cpu().clone() for name, p in whole.items()})

    fresh_port()
    options = {"micro_batch_size": 4, "progress": False, "log_every": 1, "device": device, **changes}
    train(of or task(dropout=0.25), schedule(), Settings(directory=directory, **options), on_step=keep)
    events = read_events(directory)
    numbers = [(e["step"], e["loss"], e.get("grad_norm")) for e in events if e["kind"] == "step"]
    assert [step for step, _, _ in numbers] == list(range(len(numbers))) and numbers
    return [*numbers, *[e["loss"] for e in events if e["kind"] == "evaluation"]], model


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped, with noise": {"max_norm": 0.5, "noise_every": 2},
    "evaluated": {"evaluation_samples": 20, "evaluate_every": 32},
    "scaler": {"grad_scaler": 1024.0},
    "workers": {"num_workers": 2},
    "saved in the background": {"checkpoint_every": 16, "asynchronous": True},
    "fsdp2": {"strategy": "fsdp2"},
}


def both(variant: str, folder: str) -> bool:
    of = task(dropout=0.25 if SIMULATED else 0.0)  # a real device has another generator than the CPU
    options = VARIANTS[variant]
    return same(run(f"{folder}/there", "auto", of, **options), run(f"{folder}/here", "cpu", of, **options))


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_run_on_a_device_is_that_of_the_cpu(on_device, tmp_path, variant):
    assert on_device(both, variant, str(tmp_path))


def resumed(folder: str, options: dict[str, Any]) -> tuple[bool, str]:
    whole = run(f"{folder}/whole", "auto", **options)
    run(f"{folder}/parts", "auto", end_sample=48, **options)
    torch.manual_seed(12345)  # nothing may depend on what this process drew before
    parts = run(f"{folder}/parts", "auto", **options)
    launched = [e["device"] for e in read_events(f"{folder}/parts") if e["kind"] == "launch"]
    return same(parts, whole), launched


@pytest.mark.parametrize("options", [{}, {"checkpoint_every": 16, "asynchronous": True}])
def test_a_run_resumed_on_a_device_is_the_whole_run(on_device, tmp_path, options):
    equal, devices = on_device(resumed, str(tmp_path), options)
    assert equal and len(devices) == 2 and all(device.endswith(":0") for device in devices)


def moved(folder: str) -> list[bool]:
    """A run of the CPU continues on the device, and the other way round."""
    plain = task(dropout=0.0)
    whole = run(f"{folder}/whole", "cpu", plain)
    found = []
    for first, second in (("cpu", "auto"), ("auto", "cpu")):
        run(f"{folder}/{first}", first, plain, end_sample=48)
        found.append(same(run(f"{folder}/{first}", second, plain), whole))
    return found


def test_a_checkpoint_of_the_cpu_continues_on_a_device_and_back(on_device, tmp_path):
    assert on_device(moved, str(tmp_path)) == [True, True]


def waited(folder: str) -> tuple[list[dict[str, int]], list[str]]:
    """The waits of each step but the first, and those of the rest of the run."""
    counts: list[dict[str, int]] = []
    options = {"micro_batch_size": 4, "progress": False, "log_every": 1000, "max_norm": 1.0, "device": "auto"}
    train(task(), schedule(), Settings(directory=folder, **options), on_step=lambda *_: counts.append(dict(waits())))
    return counts[1:], sorted(waits())


@simulated
def test_the_loop_waits_once_per_step(on_device, tmp_path):
    counts, _ = on_device(waited, str(tmp_path))
    assert [sum(count.values()) for count in counts] == [1] * len(counts), counts


def evaluated(weight: str) -> tuple[float, int]:
    made = task(dropout=0.0)

    def loss(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> Any:
        total, own = made.loss(model, batch)[:2]
        return total, {"device": own, "number": len(batch[0]), "host": torch.tensor(len(batch[0]))}[weight]

    process = ThisProcess(0, 1, place(), None, True)
    held = Task(made.model, made.dataset, loss, made.optimizer)
    model = held.build_model(0).to(place())
    waits()
    found, _ = evaluate(held, model, Numbers(40), 4, process)
    return found, sum(waits().values())


@simulated
@pytest.mark.parametrize("weight", ["device", "number", "host"])
def test_evaluation_waits_once(on_device, weight):
    found, waited = on_device(evaluated, weight)
    assert 0 < found < 100 and waited == 1


def copied() -> tuple[int, bool, list[str]]:
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(10)]).to(place())
    state = {name: p for name, p in model.state_dict().items()} | {"host": torch.ones(3)}
    waits()
    copies = tensors.snapshot(state)
    count = sum(waits().values())
    with torch.no_grad():
        expected = {name: p.cpu().clone() for name, p in state.items()}
        for p in state.values():
            p.add_(1)
    return count, same(copies, expected), sorted({t.device.type for t in copies.values()})


@simulated
def test_a_snapshot_waits_once_and_is_complete(on_device):
    assert on_device(copied) == (1, True, ["cpu"])


@dataclass(frozen=True)
class Pair:
    x: torch.Tensor
    y: torch.Tensor


def collate_pairs(rows: list[Any]) -> Pair:
    return Pair(torch.stack([row[0] for row in rows]), torch.stack([row[1] for row in rows]))


def pairs_loss(model: nn.Module, batch: Pair) -> tuple[torch.Tensor, int]:
    assert batch.x.device == batch.y.device == next(model.parameters()).device
    return (model(batch.x) - batch.y).square().sum(), len(batch.x)


def odd_batches(folder: str) -> list[bool]:
    """A dataset whose tensors are on the device, and batches that are dataclasses, with and without workers."""
    made = task(dropout=0.0)
    rows = Numbers(SAMPLES)
    there = [tuple(t.to(place()) for t in rows[i]) for i in range(SAMPLES)]
    expected = run(f"{folder}/expected", "cpu", Task(made.model, rows, made.loss, made.optimizer))
    found = [same(run(f"{folder}/there", "auto", Task(made.model, there, made.loss, made.optimizer)), expected)]
    own = Task(made.model, rows, pairs_loss, made.optimizer, collate_pairs)
    expected = run(f"{folder}/pairs", "cpu", own)
    for workers in (0, 2):
        found.append(same(run(f"{folder}/pairs{workers}", "auto", own, num_workers=workers), expected))
    return found


def test_data_on_the_device_and_dataclasses_are_trained(on_device, tmp_path):
    assert on_device(odd_batches, str(tmp_path)) == [True] * 3


def pinning() -> list[bool]:
    rows = [torch.ones(2) for _ in range(8)]
    sampler = StepSampler(Constant(8).compile().until(8), 8)
    return [next(iter(Loader(rows, GlobalOrder(8), sampler, pin_memory=pin))).data.is_pinned() for pin in (False, True)]


def test_memory_is_pinned_only_where_asked_for(on_device):
    assert on_device(pinning) == [False, True]


def untouched(folder: str) -> bool:
    run(folder, "cpu", num_workers=1, evaluation_samples=8, evaluate_every=32)
    return torch.get_device_module(place()).is_initialized()


@simulated
def test_a_run_on_the_cpu_does_not_touch_the_device(on_device, tmp_path):
    assert not on_device(untouched, str(tmp_path))


class Encoding(UserDict):
    """As a tokenizer's BatchEncoding: a mapping that moves itself."""

    def to(self, device, non_blocking=False):
        return Encoding({name: value.to(device, non_blocking=non_blocking) for name, value in self.data.items()})


class Own:
    """An object that pins and moves itself."""

    def __init__(self, x):
        self.x = x

    def pin_memory(self):
        return Own(self.x.pin_memory())

    def to(self, device, *, non_blocking=False):
        return Own(self.x.to(device, non_blocking=non_blocking))


def carried(kind: str) -> tuple[bool, dict[str, int]]:
    """Whether a batch was pinned, and the waits of moving it."""
    made = {
        "encoding": lambda rows: Encoding(x=torch.stack(rows)),
        "own": lambda rows: Own(torch.stack(rows)),
        "packed": lambda rows: nn.utils.rnn.pack_sequence(rows),
    }[kind]
    rows = [torch.ones(2) for _ in range(8)]
    sampler = StepSampler(Constant(8).compile().until(8), 8)
    data = next(iter(Loader(rows, GlobalOrder(8), sampler, collate=made, pin_memory=True))).data
    tensor = {"encoding": lambda d: d["x"], "own": lambda d: d.x, "packed": lambda d: d.data}[kind]
    pinned = tensor(data).is_pinned()
    if SIMULATED:
        waits()
    moved = to_device(data, place())
    assert tensor(moved).device == place()
    return pinned, dict(waits()) if SIMULATED else {}


@pytest.mark.parametrize("kind", ["encoding", "own", "packed"])
def test_objects_that_move_themselves_are_pinned_and_moved_without_a_wait(on_device, kind):
    assert on_device(carried, kind) == (True, {})
