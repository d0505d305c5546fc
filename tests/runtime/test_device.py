"""Which device a process gets, the memory limit of a probe, and a batch moved to a device. Accelerators are simulated."""

from __future__ import annotations

import re
from collections import UserDict, UserList, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import pytest

pytest.importorskip("torch")

import numpy
import torch

import batchwright
from batchwright.core.errors import PlanError, RunError
from batchwright.probe.worker import Worker
from batchwright.runtime.device import (
    choose,
    collectives_for,
    free_and_total,
    outside_allocator,
    to_device,
    widest_float,
)
from batchwright.runtime.loop.process import joined
from batchwright.runtime.ranks import Ranks, discover
from batchwright.runtime.state import generators

pytestmark = pytest.mark.torch
GIB = 2**30


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
        ("cpu", 3, 4, "cpu"),
    ],
)
def test_an_accelerator_has_an_index(cuda, name, local_rank, count, chosen):
    cuda(count)
    assert choose(name, Ranks(local_rank, 8, local_rank, 8)) == torch.device(chosen)


def test_a_device_that_is_named_is_taken_by_the_only_rank_of_a_node(cuda):
    cuda(4)
    assert choose("cuda:2", Ranks()) == choose("cuda:2", Ranks(3, 8, 0, 1)) == torch.device("cuda:2")
    cuda(1)  # srun --gpus-per-task=1
    assert choose("cuda:0", Ranks(1, 2, 1, 2)) == torch.device("cuda:0")


@pytest.mark.parametrize(
    ("count", "ranks"),
    [
        (4, Ranks(0, 2, 0, 2)),
        (4, Ranks(1, 2, 1, None)),  # srun without --ntasks-per-node
        (1, Ranks(0, 2, 0, 2, same_devices=True)),
    ],
)
def test_one_device_for_several_ranks_is_refused(cuda, count, ranks):
    cuda(count)
    with pytest.raises(PlanError, match="device='cuda:0' is one device for 2 ranks of this node") as caught:
        choose("cuda:0", ranks)
    assert caught.value.nearest == ("cuda",)


def test_two_ranks_of_torchrun_on_one_visible_gpu_are_refused(cuda):
    cuda(1)
    environment = {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "TORCHELASTIC_RUN_ID": "x",
    }
    with pytest.raises(
        PlanError, match="local rank 1 needs cuda:1, which does not exist: this process sees 1 cuda device,"
    ):
        choose("auto", discover(environment))


@pytest.mark.parametrize("kind", ["xpu", "mps"])
def test_auto_takes_whatever_accelerator_torch_finds(cuda, monkeypatch, kind):
    cuda(1)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(kind))
    assert choose("auto", Ranks()) == torch.device(kind, 0)


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


@pytest.mark.parametrize("by", ["the loop", "the probe"])
def test_the_device_is_set_before_the_process_group(cuda, monkeypatch, by):
    """Else a bare "cuda" in the user's code is device 0 on all ranks, and NCCL has to guess."""
    cuda(2)
    done: list[Any] = []

    def init_process_group(**options):
        done.append(options)
        raise KeyboardInterrupt  # no further

    monkeypatch.setattr(torch.accelerator, "set_device_index", done.append)
    monkeypatch.setattr(torch.distributed, "init_process_group", init_process_group)
    for name, value in {
        "RANK": 1,
        "WORLD_SIZE": 2,
        "LOCAL_RANK": 1,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 1,
    }.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(KeyboardInterrupt):
        if by == "the loop":
            joined("auto", "ddp").__enter__()
        else:
            spec = {"micro_batch_size": 1, "result": "nothing", "on": None, "limited": False, "memory": None}
            worker = Worker(spec)
            monkeypatch.setattr("batchwright.probe.worker.free_and_total", lambda device: None)
            monkeypatch.setattr(worker, "write", lambda **_: None)
            worker.run()
    device = torch.device("cuda", 1)
    assert done[0] == device and done[1]["backend"] == "cpu:gloo,cuda:nccl" and done[1]["device_id"] == device


def test_a_probe_limits_the_memory_of_the_only_gpu(cuda, monkeypatch):
    """torch's own `set_per_process_memory_fraction` runs, which refuses a device without an index; its C call is replaced."""
    cuda(1)
    limits = []
    monkeypatch.setattr(torch.cuda.memory, "_lazy_init", lambda: None)
    monkeypatch.setattr(torch._C, "_cuda_setMemoryFraction", lambda *arguments: limits.append(arguments), raising=False)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (6 * GIB, 8 * GIB))
    worker = object.__new__(Worker)
    worker.spec = {"on": None, "limited": True, "memory": None, "margin": 2 * GIB - outside_allocator(1)}
    worker.ranks, worker.result = Ranks(), {}
    worker.device = choose("auto", worker.ranks)
    worker._set_limit()
    assert limits == [(0.5, 0)] and worker.result["limit_bytes"] == 4 * GIB


def test_a_device_whose_memory_torch_cannot_limit_takes_no_budget(monkeypatch):
    """Of MPS torch has no `mem_get_info`. Peaks are unknown there, not those of the host."""
    worker = object.__new__(Worker)
    worker.spec = {"on": None, "limited": True, "memory": None, "margin": 0}
    worker.ranks, worker.result, worker.device = Ranks(), {}, torch.device("mps", 0)
    worker._set_limit()
    assert worker.result == {} and worker._peaks() == {"peak_memory_bytes": None}
    worker.spec["memory"] = GIB
    with pytest.raises(PlanError, match="batchwright sets no limit on mps"):
        worker._set_limit()


def test_fp64_is_used_where_a_device_has_it(monkeypatch):
    properties = SimpleNamespace(has_fp64=False)
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda device: properties)
    widest_float.cache_clear()
    assert widest_float(torch.device("xpu", 0)) is widest_float(torch.device("mps", 0)) is torch.float32
    widest_float.cache_clear()
    properties.has_fp64 = True
    assert widest_float(torch.device("xpu", 0)) is widest_float(torch.device("cpu")) is torch.float64
    widest_float.cache_clear()


def test_the_collectives_are_those_of_the_device():
    device = torch.device("cuda", 1)
    assert collectives_for(device, 2) == {"backend": "cpu:gloo,cuda:nccl", "device_id": device}
    # With a device_id, torch would refuse gloo groups: gloo has nothing for XPU.
    assert collectives_for(torch.device("xpu", 1), 2) == {"backend": "cpu:gloo,xpu:xccl"}
    assert collectives_for(torch.device("cpu"), 2) == {"backend": "gloo"}


def test_several_ranks_on_a_device_without_collectives_are_refused():
    with pytest.raises(PlanError, match="device='mps' has no collectives in torch, and there are 2 ranks"):
        collectives_for(torch.device("mps", 0), 2)


def test_only_one_file_names_kinds_of_devices():
    """Files that ask for a kind of device by name do not run on the others."""
    root = Path(batchwright.__file__).parent
    named = [p for p in root.rglob("*.py") if re.search(r"\b(cuda|xpu|mps)\b", p.read_text(encoding="utf-8"))]
    assert [p.relative_to(root).as_posix() for p in named] == ["runtime/device.py"]


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


@dataclass(frozen=True)
class Sample:
    x: torch.Tensor
    name: str
    inner: Any = None
    checked: int = field(init=False, default=0)


class Rows(UserList):
    pass


class Opaque:
    def __init__(self, **parts):
        self.__dict__.update(parts)


class OnlyOneArgument(Sequence):
    def __init__(self, values, extra):
        self.values = values

    def __getitem__(self, index):
        return self.values[index]

    def __len__(self):
        return len(self.values)


def test_dataclasses_and_own_sequences_are_moved():
    x, meta = torch.ones(2), torch.device("meta")
    batch = Sample(x, "a", Rows([Sample(x, "b"), {x}]))
    moved = to_device(batch, meta)
    assert (moved.x.device, moved.name, type(moved.inner)) == (meta, "a", Rows)
    assert moved.inner[0].x.device == next(iter(moved.inner[1])).device == meta
    assert batch.x is x and batch.inner[0].x is x


def test_what_holds_no_tensor_stays_the_same_object():
    values = [
        range(3),
        Opaque(a=1),
        OnlyOneArgument(["a"], 0),
        numpy.ones(2),
        {1, 2}.__iter__(),
        {"a": 1}.keys(),
        Sample,
    ]
    assert all(new is old for new, old in zip(to_device(values, torch.device("meta")), values, strict=True))


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (
            Opaque(x=torch.ones(1)),
            r"batch\['a'\]\[1\] of type Opaque cannot be moved to meta: it holds tensors, and has no",
        ),
        (Opaque(to=lambda device: None), "of type Opaque cannot be moved to meta: its `to` returned None"),
        (OnlyOneArgument([torch.ones(1)], 0), r"of type OnlyOneArgument cannot be moved to meta: TypeError: .*'extra'"),
    ],
)
def test_what_cannot_be_moved_is_named(value, why):
    with pytest.raises(RunError, match=why):
        to_device({"a": [0, value]}, torch.device("meta"))


class _Moved(torch.Tensor):
    """Records how it was moved."""

    asked: ClassVar[list[bool]] = []

    def to(self, device, non_blocking=False):
        self.asked.append(non_blocking)
        return self


@pytest.mark.parametrize(("kind", "waits"), [("cuda", False), ("xpu", False), ("mps", True)])
def test_a_batch_is_moved_without_a_wait_but_for_mps_which_may_read_freed_memory(kind, waits):
    _Moved.asked = []
    to_device({"x": torch.ones(1).as_subclass(_Moved)}, torch.device(kind, 0))
    assert _Moved.asked == [not waits]


def test_a_device_that_cannot_tell_its_free_memory_has_no_limit(monkeypatch):
    def raises(device):
        raise RuntimeError("The device doesn't support querying the available free memory")

    module = SimpleNamespace(mem_get_info=raises, set_per_process_memory_fraction=lambda *given: None)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    assert free_and_total(torch.device("xpu", 0)) is None


def test_generators_of_another_kind_of_device_are_not_restored():
    state = generators.capture()
    assert generators.restore(state)
    assert not generators.restore({**state, "cuda": state["torch"]}, torch.device("cpu"))
    assert not generators.restore(state, torch.device("cuda", 0))
    assert not generators.restore({**state, "xpu": state["torch"]}, torch.device("cuda", 0))
