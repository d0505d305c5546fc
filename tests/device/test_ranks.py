"""Two ranks, each with a device: DDP, FSDP2 and our own sum over a backend that takes tensors of the device only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from torch import nn

from batchwright.core.errors import PlanError
from batchwright.core.ramp.rules import Constant
from batchwright.runtime.data.loader import Loader
from batchwright.runtime.data.order import GlobalOrder
from batchwright.runtime.data.sampler import StepSampler
from batchwright.runtime.device import generator_state
from batchwright.runtime.loop.process import joined, wrapped
from batchwright.runtime.state.checkpoint import Checkpoints
from batchwright.runtime.step.accumulate import Accumulator
from batchwright.runtime.step.noise import NoiseScale
from tests.device.host import SIMULATED, fresh_port, place, same, waits
from tests.device.test_loop import run, task
from tests.runtime.loop.loop_tasks import Numbers

simulated = pytest.mark.skipif(not SIMULATED, reason="shows what only the simulated device shows")
MIB = 2**20


def refused() -> list[str]:
    """Tensors that NCCL does not take."""
    said = []
    with joined("auto", "ddp") as process:
        there, here = torch.ones(2, device=process.device), torch.ones(2)
        dist.all_reduce(there)
        dist.all_reduce(here)  # gloo
        assert same(there, here)
        for group, tensors in ((process.control, [there]), (None, [there, here])):
            try:
                dist.all_reduce(tensors[0], group=group) if len(tensors) == 1 else dist.all_gather(tensors, there)
                said.append("nothing")
            except RuntimeError as error:
                said.append(str(error))
    return said


@simulated
def test_the_groups_of_the_host_do_not_take_tensors_of_the_device(on_ranks):
    for control, gathered in on_ranks(refused):
        assert "sim" in control, control
        assert "different devices" in gathered, gathered


VARIANTS: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "ddp, clipped, with noise": {"strategy": "ddp", "max_norm": 0.5, "noise_every": 2},
    "ddp with a scaler": {"strategy": "ddp", "grad_scaler": 1024.0},
    "fsdp2": {"strategy": "fsdp2"},
    "fsdp2, clipped, evaluated": {"strategy": "fsdp2", "max_norm": 0.5, "evaluation_samples": 21, "evaluate_every": 32},
}


def both(variant: str, folder: str) -> bool:
    options = {"micro_batch_size": 2, **VARIANTS[variant]}
    plain = task(dropout=0.0)
    found = []
    for device in ("auto", "cpu"):
        found.append(run(f"{folder}/{device}", device, plain, **options))
    return same(*found)


@pytest.mark.parametrize("variant", VARIANTS)
def test_two_ranks_on_devices_train_as_on_the_cpu(on_ranks, tmp_path, variant):
    assert on_ranks(both, variant, str(tmp_path)) == [True, True]


def resumed(strategy: str, folder: str) -> bool:
    options = {"micro_batch_size": 2, "strategy": strategy, "asynchronous": True, "checkpoint_every": 16}
    whole = run(f"{folder}/whole", "auto", **options)
    run(f"{folder}/parts", "auto", end_sample=48, **options)
    torch.manual_seed(12345)
    return same(run(f"{folder}/parts", "auto", **options), whole)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_ranks_resume_exactly(on_ranks, tmp_path, strategy):
    assert on_ranks(resumed, strategy, str(tmp_path)) == [True, True]


def from_cpu(folder: str) -> list[int]:
    run(folder, "cpu", strategy="ddp", micro_batch_size=2, end_sample=48)
    torch.manual_seed(5)
    run(folder, "auto", strategy="ddp", micro_batch_size=2, end_sample=64)
    return generator_state(place()).tolist()


def test_ranks_that_resume_a_checkpoint_of_the_cpu_draw_different_numbers(on_ranks, tmp_path):
    first, second = on_ranks(from_cpu, str(tmp_path))
    assert first != second


class Wide(nn.Module):
    """Eight blocks of 1 MiB each, and a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(512, 512, bias=False) for _ in range(8))
        self.register_buffer("kept", torch.rand(4))
        self.register_buffer("other", torch.rand(4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x + self.other.sum() + self.kept.sum()


def started(limit: int) -> tuple[int, list[float], list[float]]:
    with joined("auto", "fsdp2") as process:
        module = torch.get_device_module(process.device)
        if SIMULATED:
            module.set_per_process_memory_fraction(limit / module.mem_get_info()[1], process.device)
        module.reset_peak_memory_stats(process.device)
        before = module.memory_allocated(process.device)
        torch.manual_seed(process.rank)  # rank 1's own weights must not stay
        built = Wide()
        expected = [*[float(p.detach().sum()) for p in built.parameters()], *[float(b.sum()) for b in built.buffers()]]
        model = wrapped(built, "fsdp2", process)
        peak = module.max_memory_allocated(process.device) - before
        found = [float(p.full_tensor().detach().sum()) for p in model.parameters()]
        found += [float(b.sum()) for b in model.buffers()]
        return peak, found, expected


def test_fsdp2_starts_a_model_that_does_not_fit_on_one_device(on_ranks):
    """8 MiB of weights: 4 MiB of shards, and one block of 1 MiB at a time."""
    answers = on_ranks(started, 7 * MIB)
    for peak, found, _ in answers:
        assert peak < 7 * MIB
        assert same(found, answers[0][2], exact=False)  # the weights and buffers of rank 0


def steps(kind: str) -> list[dict[str, int]]:
    """The waits of the steps after the first."""
    counts = []
    with joined("auto", "fsdp2" if kind == "fsdp2" else "ddp") as process:
        plain = task(dropout=0.0)
        model: nn.Module = plain.build_model(0)
        options: dict[str, Any] = {"max_norm": 1.0} if "clip" in kind else {}
        if kind == "ours":
            model, options = model.to(process.device), {"group": dist.group.WORLD}
        else:
            model = wrapped(model, "fsdp2" if kind == "fsdp2" else "ddp", process)
        if kind == "ddp with noise":
            options["noise"] = NoiseScale()
        optimizer = plain.optimizer(model.parameters())
        sampler = StepSampler(Constant(16).compile().until(64), 4, process.rank, process.ranks)
        for step in Accumulator(model, **options).steps(Loader(Numbers(64), GlobalOrder(64), sampler)):
            waits()
            for micro in step:
                batch = [t.to(process.device, non_blocking=True) for t in micro.data]
                step.backward(*plain.loss_of(model, tuple(batch)))
            step.apply(optimizer)
            counts.append(dict(waits()))
    return counts[1:]


# Several ranks: the presence of each gradient, or the norm of sharded or flat ones, is read after all ranks agreed.
@simulated
@pytest.mark.parametrize(
    ("kind", "most"), [("ddp", 1), ("ddp with clip", 1), ("ddp with noise", 3), ("ours", 2), ("fsdp2", 1)]
)
def test_how_often_a_step_of_two_ranks_waits(on_ranks, kind, most):
    for counts in on_ranks(steps, kind):
        assert counts and all(sum(count.values()) <= most for count in counts), counts


def one_for_all() -> str:
    from os import environ

    environ["TORCHELASTIC_RUN_ID"] = "x"
    try:
        with joined("auto", "ddp"):
            return "joined"
    except PlanError as error:
        return str(error)
    finally:
        del environ["TORCHELASTIC_RUN_ID"]


def second_rank_only() -> str:
    from os import environ

    return one_for_all() if environ["RANK"] == "1" else ""


@simulated
def test_two_ranks_of_torchrun_on_one_device_are_refused(on_ranks):
    _, said = on_ranks(second_rank_only)
    assert said.startswith("local rank 1 needs sim:1, which does not exist")


def reshard(folder: str) -> bool:
    """A checkpoint of FSDP2 on devices, read by DDP on devices."""
    answers = []
    for strategy in ("fsdp2", "ddp"):
        fresh_port()
        with joined("auto", strategy) as process:
            plain = task(dropout=0.0)
            model = wrapped(plain.build_model(3 if strategy == "fsdp2" else 4), strategy, process)
            optimizer = plain.optimizer(model.parameters())
            saves = Checkpoints(Path(folder), group=process.saving)
            if strategy == "fsdp2":
                saves.save(model, optimizer, step=1, position=8)
                answers.append([p.full_tensor().detach().cpu() for p in model.parameters()])
            else:
                saved = saves.newest()
                assert saved is not None and saves.load(saved, model, optimizer)
                answers.append([p.detach().cpu() for p in model.parameters()])
    return same(*answers)


def test_a_checkpoint_on_devices_reshards(on_ranks, tmp_path):
    assert on_ranks(reshard, str(tmp_path)) == [True, True]


class Block(nn.Module):
    """A block with a module list of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for expert in self.experts:
            x = expert(x)
        return x


class Experts(nn.Module):
    """Module lists inside of a module list, and a state dict without one of its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 1)
        self.register_state_dict_post_hook(lambda module, state, prefix, _: state.pop(f"{prefix}head.bias"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def sharded_experts() -> tuple[list[float], list[float]]:
    with joined("auto", "fsdp2") as process:
        torch.manual_seed(process.rank)  # rank 1's own weights must not stay
        built = Experts()
        own = [float(p.detach().sum()) for p in built.parameters()]
        model = wrapped(built, "fsdp2", process)
        model(torch.ones(2, 4, device=process.device)).sum().backward()
        return [float(p.full_tensor().detach().sum()) for p in model.parameters()], own


def test_fsdp2_takes_nested_module_lists_and_models_with_state_dict_hooks(on_ranks):
    answers = on_ranks(sharded_experts)
    assert all(same(found, answers[0][1], exact=False) for found, _ in answers)
