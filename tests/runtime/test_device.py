"""Which device a process gets, and the limit that a probe sets on it. No accelerator is here: torch is told that one is."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

from batchwright.core.errors import PlanError
from batchwright.probe.worker import Worker
from batchwright.runtime.device import choose
from batchwright.runtime.loop.process import joined
from batchwright.runtime.ranks import Ranks

pytestmark = pytest.mark.torch


@pytest.fixture
def cuda(monkeypatch):
    """`cuda(n)`: torch sees n CUDA devices from now on."""

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
        ("auto", 3, 1, "cuda:0"),  # srun --gpus-per-task=1: each process sees its own device, and no other
        ("cuda:2", 0, 4, "cuda:2"),
        ("cpu", 3, 4, "cpu"),
    ],
)
def test_an_accelerator_has_an_index(cuda, name, local_rank, count, chosen):
    cuda(count)
    assert choose(name, Ranks(local_rank, 8, local_rank, 8)) == torch.device(chosen)


@pytest.mark.parametrize(("name", "local_rank"), [("auto", 2), ("cuda:2", 0)])
def test_an_index_beyond_the_devices_is_refused(cuda, name, local_rank):
    cuda(2)
    with pytest.raises(PlanError, match="2 cuda devices that this process sees: indices are 0 to 1") as caught:
        choose(name, Ranks(local_rank, 8, local_rank, 8))
    assert caught.value.nearest == ("cuda:0", "cuda:1")


@pytest.mark.parametrize("name", ["cuda", "cuda:0", "tpu", "cpu:x", "cpu:9"])
def test_a_device_that_is_not_here_is_refused(monkeypatch, name):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    with pytest.raises(PlanError, match=r"is not here: torch .* finds cpu"):
        choose(name, Ranks())


def test_training_on_a_device_that_is_not_here_is_refused(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    with pytest.raises(PlanError, match="is not here"), joined("cuda", "auto"):
        pass


def test_a_probe_limits_the_memory_of_the_only_gpu(cuda, monkeypatch):
    """`set_per_process_memory_fraction` is torch's own, which refuses a device without an index; only its end is not."""
    cuda(1)
    limits = []
    monkeypatch.setattr(torch.cuda.memory, "_lazy_init", lambda: None)
    monkeypatch.setattr(torch._C, "_cuda_setMemoryFraction", lambda *words: limits.append(words), raising=False)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (6000, 8000))
    worker = object.__new__(Worker)
    worker.spec = {"device": None, "limited": True, "memory": None, "margin": 2000}
    worker.ranks, worker.result = Ranks(), {}
    worker.device = choose("auto", worker.ranks)
    worker._set_limit()
    assert limits == [(0.5, 0)] and worker.result["limit_bytes"] == 4000
