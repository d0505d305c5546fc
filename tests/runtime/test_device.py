"""Which device a process gets, the memory limit of a probe, and a batch moved to a device. Accelerators are simulated."""

from __future__ import annotations

from collections import UserDict, defaultdict
from types import MappingProxyType
from typing import NamedTuple

import pytest

pytest.importorskip("torch")

import torch

from batchwright.core.errors import PlanError
from batchwright.probe.worker import Worker
from batchwright.runtime.device import choose, to_device
from batchwright.runtime.loop.process import joined
from batchwright.runtime.ranks import Ranks

pytestmark = pytest.mark.torch


@pytest.fixture
def cuda(monkeypatch):
    """After `cuda(n)` torch reports n CUDA devices."""

    def see(count: int) -> None:
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)

    return see


@pytest.mark.parametrize(
    ("name", "local_rank", "count", "chosen"),
    [
        ("auto", 0, 1, "cuda:0"),
        ("cuda", 0, 1, "cuda:0"),
        ("cuda", 3, 4, "cuda:3"),
        ("auto", 3, 1, "cuda:0"),  # srun --gpus-per-task=1: each process sees only its own device
        ("cuda:2", 0, 4, "cuda:2"),
        ("cpu", 3, 4, "cpu"),
    ],
)
def test_an_accelerator_has_an_index(cuda, name, local_rank, count, chosen):
    cuda(count)
    assert choose(name, Ranks(local_rank, 8, local_rank, 8)) == torch.device(chosen)


@pytest.mark.parametrize(
    ("name", "local_rank", "asked"),
    [("auto", 2, "local rank 2 needs cuda:2, which"), ("cuda:2", 0, "device='cuda:2'")],
)
def test_an_index_beyond_the_devices_is_refused(cuda, name, local_rank, asked):
    cuda(2)
    expected = f"^{asked} does not exist: this process sees 2 cuda devices, indices 0 to 1"
    with pytest.raises(PlanError, match=expected) as caught:
        choose(name, Ranks(local_rank, 8, local_rank, 8))
    assert caught.value.nearest == ("cuda:0", "cuda:1")


@pytest.mark.parametrize("name", ["cuda", "cuda:0", "tpu", "cpu:x", "cpu:9"])
def test_a_device_that_is_not_available_is_refused(monkeypatch, name):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    with pytest.raises(PlanError, match=r"is not available: torch .* finds cpu"):
        choose(name, Ranks())


def test_training_on_a_device_that_is_not_available_is_refused(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    with pytest.raises(PlanError, match="is not available"), joined("cuda", "auto"):
        pass


def test_a_probe_limits_the_memory_of_the_only_gpu(cuda, monkeypatch):
    """torch's own `set_per_process_memory_fraction` runs, which refuses a device without an index; its C call is replaced."""
    cuda(1)
    limits = []
    monkeypatch.setattr(torch.cuda.memory, "_lazy_init", lambda: None)
    monkeypatch.setattr(torch._C, "_cuda_setMemoryFraction", lambda *arguments: limits.append(arguments), raising=False)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (6000, 8000))
    worker = object.__new__(Worker)
    worker.spec = {"device": None, "limited": True, "memory": None, "margin": 2000}
    worker.ranks, worker.result = Ranks(), {}
    worker.device = choose("auto", worker.ranks)
    worker._set_limit()
    assert limits == [(0.5, 0)] and worker.result["limit_bytes"] == 4000


class Pair(NamedTuple):
    first: torch.Tensor
    second: list[torch.Tensor]


class OwnMove(UserDict):
    """Like a tokenizer's batch: a mapping that moves itself."""

    def to(self, device):
        return OwnMove({key: value.to(device) for key, value in self.items()}, moved=True)


def test_a_batch_is_moved_whatever_contains_its_tensors():
    x, meta = torch.ones(2), torch.device("meta")
    batch = {
        "pair": Pair(x, [x, x]),
        "grouped": defaultdict(list, a=[x]),
        "fixed": MappingProxyType({"x": x}),
        "own": OwnMove(x=x.clone(), moved=torch.zeros(())),
        "packed": torch.nn.utils.rnn.pack_sequence([x]),
        "rest": ("text", b"bytes", range(3), 5, None),
    }
    moved = to_device(batch, meta)
    assert [type(value) for value in moved.values()] == [type(value) for value in batch.values()]
    tensors = [
        moved["pair"].first,
        *moved["pair"].second,
        *moved["grouped"]["a"],
        moved["fixed"]["x"],
        moved["own"]["x"],
    ]
    assert {t.device for t in [*tensors, moved["packed"].data]} == {meta}
    assert moved["own"]["moved"] is True and moved["grouped"]["new"] == [] and moved["rest"] == batch["rest"]
    assert batch["pair"].first is x and batch["grouped"]["a"][0] is x
    assert to_device(batch, torch.device("cpu")) is batch
