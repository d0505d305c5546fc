"""What the ranks of the step's tests run; each group of ranks is started once and runs all of its cases."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from batchwright.core.errors import PlanError, RunError
from batchwright.core.ramp.schedule import Step
from batchwright.runtime.step.accumulate import Accumulator, StepResult
from batchwright.runtime.step.noise import NoiseScale

sys.path.insert(0, str(Path(__file__).parent))  # the helpers beside this file, under any import mode

from step_cases import Micro, build, collate, loss, micros, plain_gradients, reference, relative_error

STEPS = [Step(0, 0, 13, 0), Step(1, 13, 16, 1)]  # 13 is ragged on 2, 3 and 4 ranks
WRAPPERS = ("ddp", "ours", "fsdp-low", "fsdp-medium", "fsdp-high")


def wrapped(kind: str, dtype: torch.dtype, **policy: Any) -> tuple[nn.Module, dict[str, Any]]:
    """The model under a wrapper, and the accumulator's options for it."""
    model = build(dtype)
    if kind == "ddp":
        return DistributedDataParallel(model, gradient_as_bucket_view=dtype == torch.float64), {}
    if kind == "ours":
        return model, {"group": dist.group.WORLD}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (model.body, model):
        fully_shard(part, mesh=mesh, **policy)
    return model, {"sharded_memory": kind.removeprefix("fsdp-")}


def sgd(model: nn.Module, rate: float = 0.0) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=rate)


def train(
    owner: Accumulator, model: nn.Module, feed: Any, optimizer: torch.optim.Optimizer
) -> list[tuple[StepResult, dict[str, torch.Tensor]]]:
    """The loop, with each step's result and gradients."""
    done = []
    for step in owner.steps(feed):
        for micro in step:
            step.backward(*loss(model, micro.data))
        done.append((step.apply(optimizer), plain_gradients(model)))
    return done


def equality(rank: int) -> dict[tuple[str, str, int, int], float]:
    """The relative gradient error of every wrapper, dtype, micro batch and step."""
    world, errors = dist.get_world_size(), {}
    for dtype in (torch.float32, torch.float64):
        wanted = [reference(build(dtype), step) for step in STEPS]
        for kind in WRAPPERS:
            model, options = wrapped(kind, dtype)
            owner, optimizer = Accumulator(model, **options), sgd(model)
            for micro_batch_size in (3,) if kind in ("fsdp-low", "fsdp-high") else (1, 3, 20):
                done = train(owner, model, micros(STEPS, micro_batch_size, rank, world), optimizer)
                for result, gradients in done:
                    key = (kind, str(dtype), micro_batch_size, result.step)
                    errors[key] = relative_error(gradients, wanted[result.step])
    return errors


def meshes(rank: int) -> dict[str, float]:
    """Four ranks as a mesh of two by two: HSDP, where all hold different samples, and data × tensor parallel."""
    step, errors = STEPS[0], {}
    wanted = reference(build(torch.float64), step)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = build(torch.float64)
    fully_shard(model, mesh=mesh)
    ((result, gradients),) = train(
        Accumulator(model, group=mesh, max_norm=math.inf), model, micros([step], 2, rank, 4), sgd(model)
    )
    norm = sum(float(g.square().sum()) for g in wanted.values()) ** 0.5
    errors["hsdp"] = relative_error(gradients, wanted) + abs((result.grad_norm or 0.0) / norm - 1)
    for kind in ("ddp", "ours"):
        model, options = build(torch.float64), {"group": mesh["dp"]}
        if kind == "ddp":
            model, options = DistributedDataParallel(model, process_group=mesh.get_group("dp")), {}
        share = micros([step], 2, mesh.get_local_rank("dp"), 2)
        ((result, gradients),) = train(Accumulator(model, **options), model, share, sgd(model))
        errors[kind] = relative_error(gradients, wanted) + (result.samples != 13)
    try:
        Accumulator(build())
    except PlanError as error:
        errors["unwrapped is refused"] = float(error.field != "group")
    return errors


def numbers(rank: int) -> dict[str, Any]:
    """Loss, weight, samples and clipped gradients, equal on all ranks; noise terms against those computed by hand."""
    world, found = dist.get_world_size(), {}
    step = STEPS[0]
    for kind in ("ddp", "ours", "fsdp-medium"):
        model, options = wrapped(kind, torch.float64)
        noise = NoiseScale()
        owner = Accumulator(model, max_norm=0.1, noise=noise, **options)
        ((result, gradients),) = train(owner, model, micros([step], 2, rank, world), sgd(model))
        wanted = reference(whole := build(torch.float64), step)
        summed, weight, balance = loss(whole, collate(range(step.start_sample, step.end_sample)))
        norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
        clipped = {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}
        by_hand = [summed.item() / weight.item(), balance.item(), weight.item(), 13, norm.item()]
        given = [result.loss, result.auxiliary, result.weight, result.samples, result.grad_norm or 0.0]
        found[kind] = {
            "numbers": max(abs(a - b) / abs(b) for a, b in zip(given, by_hand, strict=True)),
            "clipped": relative_error(gradients, clipped),
            "noise": noise_error(noise, step, world, kind, wanted),
            "result": result,
        }
    return found


def noise_error(noise: NoiseScale, step: Step, world: int, kind: str, wanted: dict[str, torch.Tensor]) -> float:
    """The measured |G|² against the same from each micro batch's own gradient."""
    terms: dict[Any, tuple[torch.Tensor, float]] = {}
    model = build(torch.float64)
    for rank in range(world):
        for micro in micros([step], 2, rank, world):
            if micro.filler:
                continue
            model.zero_grad()
            summed, weight, balance = loss(model, micro.data)
            (summed + weight * balance).backward()
            flat = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
            # Gradients that are reduced together are one term.
            key = micro.index if kind.startswith("fsdp") else (rank, micro.index)
            gradient, size = terms.get(key, (torch.zeros_like(flat), 0.0))
            terms[key] = (gradient + flat, size + float(weight))
    total = sum(size for _, size in terms.values())
    cross = (
        sum(gradient for gradient, _ in terms.values()).square().sum()
        - torch.stack([gradient.square().sum() for gradient, _ in terms.values()]).sum()
    )
    signal = float(cross) / (total**2 - sum(size**2 for _, size in terms.values()))
    return abs(noise.terms[0].signal / signal - 1)


def collectives(rank: int) -> dict[str, int]:
    """Gradient synchronisations of one step with four micro steps."""
    world, counted = dist.get_world_size(), {}
    model, _ = wrapped("ddp", torch.float32)
    calls = []

    def hook(state, bucket):  # no annotations: DDP reads them, and cannot read strings
        calls.append(bucket.index())
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        return allreduce_hook(None, bucket)  # type: ignore[arg-type]

    model.register_comm_hook(None, hook)  # type: ignore[operator]
    train(Accumulator(model), model, micros([Step(0, 0, 4 * world, 0)], 1, rank, world), sgd(model))
    counted["ddp"] = len(calls)
    for kind in ("ddp", "ours", "fsdp-medium", "fsdp-low"):
        model, options = wrapped(kind, torch.float32)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            train(Accumulator(model, **options), model, micros([Step(0, 0, 4 * world, 0)], 1, rank, world), sgd(model))
        names = [event.key for event in profile.key_averages() for _ in range(event.count)]
        counted[f"{kind} all-reduce"] = sum(name == "gloo:all_reduce" for name in names)
        counted[f"{kind} reduce-scatter"] = sum("c10d::_reduce_scatter_base_" in name for name in names)
    return counted


def unused(rank: int) -> float:
    """Branches that only some ranks use, in only some micro steps, and one that no rank uses."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.branches = nn.ModuleList(nn.Linear(3, 1) for _ in range(4))

        def forward(self, x: torch.Tensor, branch: int) -> torch.Tensor:
            return self.branches[branch](x)

    def data(position: int) -> tuple[torch.Tensor, int]:
        return torch.randn(2, 3, generator=torch.Generator().manual_seed(position)).double(), min(position // 2, 2)

    step = Step(0, 0, 6, 0)
    worst = 0.0
    for kind in ("ddp", "ours"):
        torch.manual_seed(0)
        bare = Branches().double()
        for p in range(6):
            x, branch = data(p)
            bare(x, branch).sum().backward()
        wanted = {n: p.grad / 12 for n, p in bare.named_parameters() if p.grad is not None}
        torch.manual_seed(0)
        model = Branches().double()
        ddp = kind == "ddp"
        inner = DistributedDataParallel(model, find_unused_parameters=True) if ddp else model
        owner = Accumulator(inner, **({} if ddp else {"group": dist.group.WORLD}))
        for open_step in owner.steps(micros([step], 1, rank, dist.get_world_size(), make=lambda s: data(s.start))):
            for micro in open_step:
                x, branch = micro.data
                open_step.backward(inner(x, branch).sum(), len(x))
            open_step.apply(sgd(inner))
        worst = max(worst, relative_error(plain_gradients(model), wanted))
    return worst


def partial(rank: int) -> dict[str, Any]:
    """A step of four micro steps that ends after three, then a whole step; and a step that is abandoned."""
    world, found = dist.get_world_size(), {}
    first, second = Step(0, 0, 4 * world, 0), Step(1, 4 * world, 4 * world, 0)
    for kind in ("ddp", "ours", "fsdp-medium"):
        for policy in ("exact", "drop", "carry"):
            model, options = wrapped(kind, torch.float64)
            owner, optimizer = Accumulator(model, partial=policy, **options), sgd(model)
            ((early, gradients),) = train(owner, model, list(micros([first], 1, rank, world))[:3], optimizer)
            pending = owner.pending
            ((whole, after),) = train(owner, model, micros([second], 1, rank, world), optimizer)
            # Rank r trained the samples [4 r, 4 r + 3) of the first step.
            spans = [range(4 * r, 4 * r + 3) for r in range(world)]
            trained = [p for span in spans for p in span]
            later = [p for p in range(second.start_sample, second.end_sample)]
            wanted = {"exact": later, "drop": later, "carry": trained + later}[policy]
            found[kind, policy] = {
                "early": early,
                "whole": whole,
                "pending": pending,
                "early error": relative_error(gradients, gradient_of(trained)) if policy == "exact" else len(gradients),
                "later error": relative_error(after, gradient_of(wanted)),
            }
        model, options = wrapped(kind, torch.float64)
        owner, optimizer = Accumulator(model, **options), sgd(model)
        for step in owner.steps(micros([first], 1, rank, world)):
            for micro in step:
                step.backward(*loss(model, micro.data))
                if micro.index == 1:
                    break
            break
        ((_, after),) = train(owner, model, micros([second], 1, rank, world), optimizer)
        found[kind, "abandoned"] = relative_error(after, reference(build(torch.float64), second))
    return found


def gradient_of(positions: list[int]) -> dict[str, torch.Tensor]:
    model = build(torch.float64)
    summed, weight, balance = loss(model, collate(positions))
    (summed / weight + balance).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def disagreement(rank: int) -> dict[str, str]:
    """Unequal numbers of micro steps, different steps, and weights that are wrong on one rank only."""
    said = {}

    def attempt(name: str, kind: str, count: int, number: int = 0, weight: float = 1.0, segment: int = 0) -> None:
        model, options = wrapped(kind, torch.float32)
        plan = Step(number, 0, 8, segment)
        feed = [Micro(collate(range(i, i + 1)), plan, i, count, range(1), range(1)) for i in range(count)]
        try:
            for step in Accumulator(model, **options).steps(feed):
                for micro in step:
                    step.backward(loss(model, micro.data)[0], weight)
                step.apply(sgd(model))
            said[name] = "no error"
        except RunError as error:
            said[name] = str(error)

    attempt("ddp counts", "ddp", 2 + rank)
    attempt("fsdp counts", "fsdp-medium", 2 + rank)
    attempt("steps", "ddp", 2, number=rank)
    attempt("negative", "ddp", 2, weight=-1.0 if rank else 1.0)
    attempt("nan", "fsdp-medium", 2, weight=float("nan") if rank else 1.0)
    attempt("zero", "ddp", 2, weight=0.0)
    return said


def mixed(rank: int) -> dict[str, Any]:
    """bf16 parameters, summed in fp32 by the step and by FSDP2; and a GradScaler with an overflow on one rank."""
    world, found = dist.get_world_size(), {}
    step = Step(0, 0, 64 * world, 0)
    wanted = reference(build(torch.bfloat16).float(), step)
    for kind, options in (("ddp", {"accumulate_dtype": torch.float32}), ("ddp", {}), ("fsdp-medium", {})):
        policy = {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32)} if kind != "ddp" else {}
        model, more = wrapped(kind, torch.bfloat16, **policy)
        ((_, gradients),) = train(
            Accumulator(model, **options, **more), model, micros([step], 1, rank, world), sgd(model)
        )
        found[f"{kind} {'fp32' if options or policy else 'bf16'}"] = relative_error(gradients, wanted)
    for kind in ("ddp", "fsdp-medium"):
        model, more = wrapped(kind, torch.float32)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        owner, optimizer = Accumulator(model, scaler=scaler, **more), sgd(model, 0.1)
        outcomes = []
        for number, step in enumerate(owner.steps(micros(STEPS, 2, rank, world))):
            for micro in step:
                summed, weight, balance = loss(model, micro.data)
                spoilt = number == 0 and rank == 0 and micro.index == 0
                step.backward(summed * float("inf") if spoilt else summed, weight, balance)
            outcomes.append((step.apply(optimizer).outcome, scaler.get_scale(), step.skipped))
        error = relative_error(plain_gradients(model), reference(build(torch.float32), STEPS[1]))
        found[f"{kind} scaler"] = (outcomes, error)
    return found


def everything(rank: int, *names: str) -> dict[str, Any]:
    import warnings

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*returned a view tensor.*")  # FSDP2 warns about its own wrapping
    return {name: globals()[name](rank) for name in names}
