"""What the ranks of the pipeline's tests run: a model in stages against the same model whole, in one process."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from batchwright.core.batch.pipeline import SPLIT_BACKWARD
from batchwright.core.errors import BatchwrightError
from batchwright.core.ramp.schedule import Step
from batchwright.runtime.stages import Stages, refuse_tied
from batchwright.runtime.state import generators
from batchwright.runtime.state.checkpoint import Checkpoints
from batchwright.runtime.step.noise import NoiseScale
from batchwright.runtime.step.pipeline import PipelineAccumulator, stage_indices
from batchwright.runtime.step.pipeline_calls import asked_of
from batchwright.runtime.task import Task

sys.path.insert(0, str(Path(__file__).parent))  # the helpers beside this file, under any import mode

from step_cases import Micro, relative_error

VOCABULARY, WIDTH, LENGTH, BLOCKS = 23, 6, 12, 8
# Schedule, stages on each rank.
SCHEDULES: dict[str, int] = {
    "gpipe": 1,
    "1f1b": 1,
    "torch-interleaved": 2,
    "looped-bfs": 2,
    "zero-bubble": 1,
    "zbv": 2,
    "dualpipev": 2,
}
# Other numbers of stages on a rank.
MORE_STAGES = (("torch-interleaved", 1), ("looped-bfs", 1), ("zero-bubble", 2), ("zero-bubble", 4))


class Block(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(index)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.router = nn.Linear(WIDTH, 1)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=generator) / 3)

    def forward(self, hidden: Tensor, balance: Tensor) -> tuple[Tensor, Tensor]:
        """The activations, and a router's balance loss that grows on the way, one number for each sample."""
        return hidden + torch.tanh(self.inner(hidden)), balance + self.router(hidden).square().mean(dim=(1, 2))


class Stage(nn.Module):
    """Stage `index` of `stages`, with the names that the whole model's parameters have."""

    def __init__(self, index: int, stages: int) -> None:
        super().__init__()
        first, last = index == 0, index == stages - 1
        torch.manual_seed(1)
        self.embed = nn.Embedding(VOCABULARY, WIDTH) if first else None
        span = range(index * BLOCKS // stages, (index + 1) * BLOCKS // stages)
        self.blocks = nn.ModuleDict({str(i): Block(i) for i in span})
        torch.manual_seed(2)
        self.head = nn.Linear(WIDTH, VOCABULARY) if last else None

    def forward(self, hidden: Tensor, balance: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if self.embed is not None:
            hidden, balance = self.embed(hidden), torch.zeros(len(hidden), dtype=self.embed.weight.dtype)
        for block in self.blocks.values():
            hidden, balance = block(hidden, balance)
        return (hidden if self.head is None else self.head(hidden)), balance


def sample(position: int) -> Tensor:
    """Tokens of lognormal length, padded to one length with -1."""
    generator = torch.Generator().manual_seed(position)
    length = int(torch.exp(1.5 + torch.randn((), generator=generator)).clamp(2, LENGTH))
    tokens = torch.randint(0, 5 + length, (length,), generator=generator)
    return F.pad(tokens, (0, LENGTH - length), value=-1)


def loss(model: nn.Module, batch: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    inputs, labels = batch[:, :-1].clamp(min=0), batch[:, 1:]
    logits, balance = model(inputs)
    summed = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-1, reduction="sum")
    return summed, (labels >= 0).sum(), balance.mean()


def collate(positions: range) -> Tensor:
    return torch.stack([sample(p) for p in positions])


def micros(steps: list[Step], size: int, rank: int, ranks: int) -> Iterator[Micro]:
    for step in steps:
        share = step.global_batch_size // ranks
        count = share // size
        for index in range(count):
            start = step.start_sample + rank * share + index * size
            span = range(start, start + size)
            yield Micro(collate(span), step, index, count, span, span)


def reference(step: Step, dtype: torch.dtype, micro: int = 2) -> dict[str, Tensor]:
    """The gradient of the whole global batch by the whole model, in one backward.

    The balance loss is a mean over a micro batch that depends on its data, so it enters as weight × mean of each.
    """
    model = Stage(0, 1).to(dtype)
    summed, weight, _ = loss(model, collate(range(step.start_sample, step.end_sample)))
    parts = [loss(model, collate(range(at, at + micro))) for at in range(step.start_sample, step.end_sample, micro)]
    ((summed + sum(part[1] * part[2] for part in parts)) / weight).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def gradients(stages: list[nn.Module], pipeline: Any) -> dict[str, Tensor]:
    """The gradients of all stages, by name, on every rank."""
    own: dict[str, Tensor] = {}
    for module in stages:
        for name, p in module.named_parameters():
            if p.grad is not None:
                whole = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
                own[name.removeprefix("module.")] = whole.detach().clone()
    gathered: list[Any] = [None] * dist.get_world_size(pipeline)
    dist.all_gather_object(gathered, own, group=pipeline)
    return {name: g for each in gathered for name, g in each.items()}


def built(
    schedule: str, wrapper: str, dtype: torch.dtype, mesh: Any, virtual_stages: int | None = None, **options: Any
) -> Any:
    p, v = mesh["pp"].size(), virtual_stages or SCHEDULES[schedule]
    modules: list[nn.Module] = []
    for index in stage_indices(schedule, mesh.get_local_rank("pp"), p, v):
        module: nn.Module = Stage(index, p * v).to(dtype)
        if wrapper == "ddp":
            module = DistributedDataParallel(module, process_group=mesh.get_group("dp"))
        elif wrapper == "fsdp2":
            for block in module.blocks.values():
                fully_shard(block, mesh=mesh["dp"])
            fully_shard(module, mesh=mesh["dp"])
        modules.append(module)
    group = mesh.get_group("dp")
    owner = PipelineAccumulator(modules, loss, pipeline=mesh["pp"], group=group, schedule=schedule, **options)
    return owner, modules


def trained(owner: PipelineAccumulator, modules: list[nn.Module], feed: Any, rate: float = 0.0) -> list[Any]:
    """Each step's result and the gradients of the whole model."""
    optimizer = torch.optim.SGD([p for module in modules for p in module.parameters()], lr=rate)
    done = []
    for step in owner.steps(feed):
        step.run()
        done.append((step.apply(optimizer), gradients(modules, owner.pipeline)))
    return done


def made_mesh(stages: int) -> tuple[Any, int, int]:
    ranks = dist.get_world_size() // stages
    mesh = init_device_mesh("cpu", (ranks, stages), mesh_dim_names=("dp", "pp"))
    return mesh, mesh.get_local_rank("dp"), ranks


def ramp(ranks: int) -> list[Step]:
    """A ramp: 8 microbatches of 2 in the first step, 16 in the second."""
    return [Step(0, 0, 16 * ranks, 0), Step(1, 16 * ranks, 32 * ranks, 1)]


def equality(rank: int, stages: int, wrappers: tuple[str, ...]) -> dict[Any, tuple[float, float]]:
    """The relative errors of the gradient and of its norm, for every schedule, wrapper and precision, in a ramp."""
    mesh, place, ranks = made_mesh(stages)
    found: dict[Any, tuple[float, float]] = {}
    for dtype in (torch.float32, torch.float64):
        wanted = [reference(step, dtype) for step in ramp(ranks)]
        for schedule in SCHEDULES:
            for wrapper in wrappers:
                if schedule in SPLIT_BACKWARD and wrapper != "ours":
                    continue
                owner, modules = built(schedule, wrapper, dtype, mesh, max_norm=math.inf)
                for result, got in trained(owner, modules, micros(ramp(ranks), 2, place, ranks)):
                    whole = wanted[result.step]
                    norm = math.sqrt(sum(float(g.double().square().sum()) for g in whole.values()))
                    assert result.samples == ramp(ranks)[result.step].global_batch_size
                    key = (schedule, wrapper, str(dtype), result.step)
                    found[key] = (relative_error(got, whole), abs(result.grad_norm / norm - 1))
    return found


def more_stages(rank: int) -> dict[Any, float]:
    """The error of the gradient with other numbers of stages on a rank than those of `equality`."""
    mesh, place, ranks = made_mesh(2)
    wanted, found = [reference(step, torch.float64) for step in ramp(ranks)], {}
    for schedule, v in MORE_STAGES:
        owner, modules = built(schedule, "ours", torch.float64, mesh, v)
        done = trained(owner, modules, micros(ramp(ranks), 2, place, ranks))
        found[schedule, v] = max(relative_error(got, wanted[result.step]) for result, got in done)
    return found


def ended_early(rank: int) -> dict[Any, Any]:
    """Five of the eight microbatches of a step: the outcome, the samples and the error of the gradient, of each wrapper."""
    mesh, place, ranks = made_mesh(2)
    (step, *_), found = ramp(ranks), {}
    whole, total = Stage(0, 1).double(), 0
    for other in range(ranks):
        for micro in list(micros([step], 2, other, ranks))[:5]:
            summed, weight, mean = loss(whole, micro.data)
            (summed + weight * mean).backward()
            total += int(weight)
    wanted = {name: p.grad / total for name, p in whole.named_parameters() if p.grad is not None}
    for partial in ("exact", "drop"):
        for wrapper in ("ours", "ddp", "fsdp2"):
            owner, modules = built("1f1b", wrapper, torch.float64, mesh, partial=partial)
            ((result, got),) = trained(owner, modules, list(micros([step], 2, place, ranks))[:5])
            error = relative_error(got, wanted) if partial == "exact" else float(len(got))
            found[partial, wrapper] = (result.outcome, result.samples, error)
    return found


def inner(rank: int) -> dict[Any, float]:
    """The error of the gradient if each micro batch is split into four, of each wrapper."""
    mesh, place, ranks = made_mesh(2)
    (step, *_), found = ramp(ranks), {}
    for schedule in ("gpipe", "1f1b", "torch-interleaved"):
        for wrapper in ("ours", "ddp", "fsdp2"):
            owner, modules = built(schedule, wrapper, torch.float64, mesh, inner_microbatches=4)
            ((_, got),) = trained(owner, modules, micros([step], 8, place, ranks))
            found[schedule, wrapper] = relative_error(got, reference(step, torch.float64))
    return found


def evaluated(rank: int, cases: list[tuple[str, int]]) -> dict[Any, tuple[float, float]]:
    """Evaluation of batches of two sizes between two steps: the error of its losses, and of the gradients of the steps."""
    mesh, place, ranks = made_mesh(2)
    step, found = Step(0, 0, 16, 0), {}
    feed, whole = list(micros([step], 2, place, ranks)), Stage(0, 1).double()
    batches = [*feed, Micro(collate(range(3)), step, 0, 1, range(3), range(3))]
    wanted = [float(loss(whole, micro.data)[0].detach()) for micro in batches]
    for schedule, v in cases:
        owner, modules = built(schedule, "ours", torch.float64, mesh, v)
        (before,) = trained(owner, modules, feed)
        for module in modules:
            module.eval()
        with torch.no_grad():
            got = [float(owner.flow([micro], backward=False)[0][0]) for micro in batches]
        for module in modules:
            module.train()
        (after,) = trained(owner, modules, feed)
        whole_gradient = reference(step, torch.float64)
        of_gradients = max(relative_error(done[1], whole_gradient) for done in (before, after))
        of_losses = max(abs(a / b - 1) for a, b in zip(got, wanted, strict=True)) if owner.last else 0.0
        found[schedule, v] = (of_losses, of_gradients)
    return found


class Typed(nn.Module):
    """A layer in its own type."""

    def __init__(self, kind: torch.dtype) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8).to(kind)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.layer(hidden.to(self.layer.weight.dtype))


def typed_norms(rank: int) -> dict[str, tuple[float, float]]:
    """The norm over stages, as measured and by hand: of two types, and of fp16 with a norm whose square overflows."""
    mesh, _, _ = made_mesh(2)
    found: dict[str, tuple[float, float]] = {}
    for name, kinds in {"mixed": (torch.bfloat16, torch.float32), "half": (torch.float16, torch.float16)}.items():
        torch.manual_seed(rank)
        modules: list[nn.Module] = [Typed(kinds[rank])]

        def summed(model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
            return model(batch).float().square().sum(), 1

        owner = PipelineAccumulator(
            modules, summed, pipeline=mesh["pp"], group=None, schedule="1f1b", max_norm=math.inf
        )
        span = range(2)
        feed = [Micro(torch.full((2, 8), 8.0), Step(0, 0, 4, 0), i, 2, span, span) for i in range(2)]
        optimizer = torch.optim.SGD(modules[0].parameters(), lr=0.0)
        for step in owner.steps(feed):
            step.run()
            result = step.apply(optimizer)
            squares = sum(p.grad.double().square().sum() for p in modules[0].parameters())
            dist.all_reduce(squares, group=owner.pipeline)
            found[name] = (result.grad_norm, math.sqrt(float(squares)))
    return found


def numbers(rank: int) -> dict[str, Any]:
    """Loss, weight and clipped gradients on every rank of 2 x 2, against one process; MaxText's style; a masked loss."""
    mesh, place, ranks = made_mesh(2)
    (step, *_), dtype = ramp(ranks), torch.float64
    whole, weight, balance = Stage(0, 1).to(dtype), 0, 0.0
    parts = [loss(whole, micro.data) for other in range(ranks) for micro in micros([step], 2, other, ranks)]
    weight = sum(int(part[1]) for part in parts)
    objective = sum(part[0] + part[1] * part[2] for part in parts) / weight
    objective.backward()
    torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
    wanted = {name: p.grad for name, p in whole.named_parameters()}
    balance = sum(float(part[1] * part[2]) for part in parts) / weight
    by_hand = [sum(float(part[0]) for part in parts) / weight, balance, weight]
    found: dict[str, Any] = {}
    for style, size in (("accumulation", 2), ("inner", 8)):
        owner, modules = built("1f1b", "ddp", dtype, mesh, max_norm=0.1, inner_microbatches=4 if size == 8 else None)
        ((result, got),) = trained(owner, modules, micros([step], size, place, ranks))
        given = [result.loss, result.auxiliary, result.weight]
        found[style] = (
            max(abs(a / b - 1) for a, b in zip(given, by_hand, strict=True)),
            relative_error(got, wanted),
            result.samples,
            result.micro_steps,
        )
    return found


def filled(rank: int) -> float:
    """A filler: the microbatch of one rank repeats a sample, at weight zero."""
    mesh, place, _ = made_mesh(2)
    step = Step(0, 0, 6, 0)
    spans = [[range(2), range(2, 4)], [range(4, 6), range(4, 6)]][place]
    feed = [Micro(collate(s), step, i, 2, s, s, filler=place == 1 and i == 1) for i, s in enumerate(spans)]
    owner, modules = built("gpipe", "fsdp2", torch.float64, mesh)
    ((result, got),) = trained(owner, modules, feed)
    assert (result.samples, result.micro_steps) == (6, 2)
    return relative_error(got, reference(step, torch.float64))


def refusals(rank: int) -> dict[str, str]:
    """What a pipeline refuses, on every rank, before anything hangs."""
    mesh, _, _ = made_mesh(2)
    found: dict[str, str] = {}

    def said(name: str, call: Any) -> None:
        try:
            call()
        except BatchwrightError as error:
            found[name] = f"{error.field} {list(error.nearest or ())}: {error}"

    def fed(schedule: str, count: int, widths: list[int] | None = None) -> None:
        step = Step(0, 0, 2 * count, 0)
        data = [collate(range(2 * i, 2 * i + 2))[:, : (widths or [LENGTH] * count)[i]] for i in range(count)]
        spans = [range(2 * i, 2 * i + 2) for i in range(count)]
        owner, modules = built(schedule, "ours", torch.float64, mesh)
        trained(owner, modules, [Micro(data[i], step, i, count, s, s) for i, s in enumerate(spans)])

    said("1f1b", lambda: fed("1f1b", 1))
    said("interleaved", lambda: fed("torch-interleaved", 5))
    said("dualpipev", lambda: fed("dualpipev", 3))
    said("shapes", lambda: fed("1f1b", 2, [LENGTH, LENGTH - 1]))
    said("ddp", lambda: built("zero-bubble", "ddp", torch.float64, mesh))
    said("fsdp2", lambda: built("zbv", "fsdp2", torch.float64, mesh))
    said("noise", lambda: built("zero-bubble", "ours", torch.float64, mesh, noise=NoiseScale()))
    said("scaler", lambda: built("1f1b", "ours", torch.float64, mesh, scaler=torch.amp.GradScaler("cpu")))
    said("noise in ddp", lambda: built("1f1b", "ddp", torch.float64, mesh, noise=NoiseScale()))
    said("noise in fsdp2", lambda: built("1f1b", "fsdp2", torch.float64, mesh, noise=NoiseScale()))
    said("carry", lambda: built("1f1b", "ours", torch.float64, mesh, partial="carry"))
    said("inner", lambda: trained(*built("1f1b", "ours", torch.float64, mesh, inner_microbatches=3), inner_feed()))

    def passing(scale: Any) -> None:
        """A loss that passes something beside the batch to the model."""
        modules: list[nn.Module] = [Stage(mesh.get_local_rank("pp"), 2).double()]

        def passes(model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
            return model(batch.clamp(min=0), scale=scale(batch))[0].sum(), len(batch)

        owner = PipelineAccumulator(modules, passes, pipeline=mesh["pp"], group=mesh["dp"], schedule="1f1b")
        trained(owner, modules, micros([Step(0, 0, 4, 0)], 2, 0, 1))

    said("0 dimensions", lambda: passing(lambda batch: batch.sum() / 2))
    said("values", lambda: passing(lambda batch: float(batch.sum())))
    said("types", lambda: passing(lambda batch: np.full(2000, float(batch.sum()))))
    return found


def inner_feed() -> list[Micro]:
    return [Micro(collate(range(4)), Step(0, 0, 4, 0), 0, 1, range(4), range(4))]


def masked(rank: int) -> float:
    """A loss that draws: the first and the last stage draw the same mask, and so does one process."""
    mesh, place, ranks = made_mesh(2)
    step = Step(0, 0, 8, 0)

    def drawn(model: nn.Module, batch: Tensor) -> tuple[Tensor, Tensor]:
        inputs, labels = batch[:, :-1].clamp(min=0), batch[:, 1:]
        kept = torch.rand(inputs.shape) < 0.5
        logits, _ = model(torch.where(kept, inputs, 0))
        summed = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-1, reduction="none")
        return (summed * kept.flatten()).sum(), (kept & (labels >= 0)).sum()

    modules: list[nn.Module] = [Stage(mesh.get_local_rank("pp"), 2).double()]
    owner = PipelineAccumulator(modules, drawn, pipeline=mesh["pp"], group=mesh["dp"], schedule="1f1b", seed=5)
    ((_, got),) = trained(owner, modules, micros([step], 2, place, ranks))
    whole, total = Stage(0, 1).double(), 0
    for micro in micros([step], 2, 0, 1):
        with generators.draws_of_loss(5, 0, micro.ids[0], torch.device("cpu")):
            summed, weight = drawn(whole, micro.data)
        summed.backward()
        total += int(weight)
    # Where the whole model has no gradient, a stage may have one of zeros: it was sent zeros.
    nothing = {name: torch.zeros_like(p) for name, p in whole.named_parameters()}
    wanted = {name: p.grad / total for name, p in whole.named_parameters() if p.grad is not None}
    return relative_error(nothing | got, nothing | wanted)


class Named(Stage):
    """A stage that is called by position and by name; only the first one sees the arguments of the loss."""

    def forward(  # type: ignore[override]
        self, hidden: Tensor, balance: Tensor | None = None, *, target: Tensor | None = None, kind: str = ""
    ) -> tuple[Tensor, Tensor]:
        assert (target is not None) == (kind == "real") == (self.embed is not None), (kind, target)
        return super().forward(hidden if target is None else torch.where(target, hidden, 0), balance)


def named(rank: int) -> dict[str, float]:
    """A loss that calls the model with a tensor, None, a tensor whose name torch's schedules use, and a text."""

    def by_name(model: nn.Module, batch: Tensor) -> tuple[Tensor, Tensor]:
        inputs, labels = batch[:, :-1].clamp(min=0), batch[:, 1:]
        logits, _ = model(inputs, None, target=inputs % 2 == 0, kind="real")
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-1, reduction="sum"), len(batch)

    return _compared(by_name, Named, ("1f1b", "torch-interleaved", "zbv"))


class Apart(Stage):
    """A stage with parameters that no input reaches: a table that is added, and a table through a layer."""

    def __init__(self, index: int, stages: int) -> None:
        super().__init__(index, stages)
        torch.manual_seed(3)
        self.added = nn.ParameterDict({name: torch.randn(LENGTH - 1, WIDTH) for name in self.blocks})
        self.mixed = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in self.blocks})

    def forward(self, hidden: Tensor, balance: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if self.embed is not None:
            hidden, balance = self.embed(hidden), torch.zeros(len(hidden), dtype=self.embed.weight.dtype)
        for name, block in self.blocks.items():
            hidden, balance = block(hidden + self.mixed[name](self.added[name]), balance)
        return (hidden if self.head is None else self.head(hidden)), balance


def apart(rank: int) -> dict[str, float]:
    return _compared(loss, Apart, SPLIT_BACKWARD)


def _compared(loss: Any, stage: type[Stage], schedules: tuple[str, ...]) -> dict[str, float]:
    """The error of the gradient of stages on 2 ranks, against the same model whole."""
    mesh, _, _ = made_mesh(2)
    step, found = Step(0, 0, 8, 0), {}
    for schedule in schedules:
        count = 2 * SCHEDULES[schedule]
        modules: list[nn.Module] = [
            stage(index, count).double()
            for index in stage_indices(schedule, mesh.get_local_rank("pp"), 2, SCHEDULES[schedule])
        ]
        whole, total = stage(0, 1).double(), 0.0
        parts: dict[str, Tensor] = {}
        for module in modules:
            parts |= module.state_dict()
        gathered: list[Any] = [None] * 2
        dist.all_gather_object(gathered, parts, group=mesh.get_group("pp"))
        whole.load_state_dict(gathered[0] | gathered[1])
        owner = PipelineAccumulator(modules, loss, pipeline=mesh["pp"], group=mesh["dp"], schedule=schedule)
        ((_, got),) = trained(owner, modules, micros([step], 2, 0, 1))
        for micro in micros([step], 2, 0, 1):
            summed, weight, *mean = loss(whole, micro.data)
            (summed + (weight * mean[0] if mean else 0)).backward()
            total += float(weight)
        wanted = {name: p.grad / total for name, p in whole.named_parameters() if p.grad is not None}
        nothing = {name: torch.zeros_like(p) for name, p in whole.named_parameters()}
        found[schedule] = relative_error(nothing | got, nothing | wanted)
    return found


def drawn(rank: int, seed: int = 0) -> list[Any]:
    """What a loss draws in two steps with the same samples, and the mode that it sees; then forward only."""
    mesh, _, _ = made_mesh(2)
    seen: list[Any] = []

    def draws(model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
        seen.append((model.training, float(torch.rand(()))))
        logits, _ = model(batch.clamp(min=0))
        return logits.sum(), len(batch)

    modules: list[nn.Module] = [Stage(mesh.get_local_rank("pp"), 2).double()]
    owner = PipelineAccumulator(
        modules, draws, pipeline=mesh["pp"], group=mesh["dp"], schedule="gpipe", inner_microbatches=2, seed=seed
    )
    span = range(4)
    trained(owner, modules, [Micro(collate(span), Step(n, 4 * n, 4, 0), 0, 1, span, span) for n in range(2)])
    for module in modules:
        module.eval()
    with torch.no_grad():
        owner.flow([Micro(collate(span), Step(0, 0, 4, 0), 0, 1, span, span)], backward=False)
    return sorted(set(seen))


def autocast(rank: int) -> str:
    """The error of a loss that enters autocast before it calls the model, on the rank that calls it first."""

    def cast(model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
        with torch.autocast("cpu", torch.bfloat16):
            return model(batch.clamp(min=0))[0].sum(), len(batch)

    try:
        asked_of(cast, Micro(collate(range(2)), Step(0, 0, 2, 0), 0, 1, range(2), range(2)), torch.device("cpu"))
    except BatchwrightError as error:
        return str(error)
    return ""


class Rotary(nn.Module):
    """Layers of a stage, and a buffer that every stage has."""

    def __init__(self, index: int, stages: int) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.arange(4.0))
        self.layers = nn.ModuleDict(
            {str(i): nn.Linear(2, 2) for i in range(4 * index // stages, 4 * (index + 1) // stages)}
        )


def buffered(rank: int, folder: str) -> list[Any]:
    """A checkpoint of two stages with a buffer of one name, loaded on two ranks with two stages each; then the buffer differs."""
    said: list[Any] = []
    for stages in (2, 4):
        indices = [rank, rank + 2][: stages // 2]
        torch.manual_seed(stages)
        model = Stages([Rotary(index, stages) for index in indices], indices, stages, dist.group.WORLD)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        checkpoints = Checkpoints(folder, group=dist.group.WORLD)
        said.append((model.unique, model.shared))
        if stages == 2:
            for part in model.parts:
                part.frequencies += 7
            checkpoints.save(model, optimizer, step=1, position=1)
            weights = {name: p.detach().clone() for name, p in model.parts[0].named_parameters()}
            every = {name: p for each in model.gathered(weights) for name, p in each.items()}
            continue
        saved = checkpoints.newest()
        assert saved is not None
        checkpoints.load(saved, model, optimizer)
        said.append([part.frequencies.tolist() for part in model.parts])
        said.append(all(torch.equal(p, every[n]) for part in model.parts for n, p in part.named_parameters()))
        model.parts[0].frequencies += rank
        try:
            checkpoints.save(model, optimizer, step=2, position=2)
        except BatchwrightError as error:
            said.append(str(error))
    return said


def tied(rank: int) -> list[str]:
    """What is said of stages that share a weight of the model, by one name or two, and of stages that do not."""
    said: list[str] = []
    for tie in ("", "embed", "head", "count"):
        stages = [Tied(index, 2, tie) for index in range(2)]
        model = Stages([stages[rank]], [rank], 2, dist.group.WORLD)
        task = Task(
            model=lambda tie=tie: Tied(0, 1, tie),
            stage=lambda index, stages: nn.Identity(),
            dataset=[1],
            loss=lambda model, batch: (batch, 1),
            optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        )
        before = torch.get_rng_state()
        try:
            said.append(refuse_tied(task, model) or "")
        except BatchwrightError as error:
            said.append(str(error))
        assert torch.equal(before, torch.get_rng_state())
    failing = replace(task, model=lambda: nn.Linear(2, 2).weight.data.sum().item())
    said.append(refuse_tied(failing, model) or "")
    return said


class Tied(nn.Module):
    """An embedding, layers and a head with its weight, under one name or two; `count`: layers counted from 0, nothing tied."""

    def __init__(self, index: int, stages: int, tie: str) -> None:
        super().__init__()
        span = range(4 * index // stages, 4 * (index + 1) // stages)
        self.layers = nn.ModuleDict({str(i - span.start * (tie == "count")): nn.Linear(2, 2) for i in span})
        first, last = index == 0, index == stages - 1
        self.embed = nn.Linear(2, 2) if first or (last and tie == "embed") else None
        self.head = nn.Linear(2, 2) if last and tie != "embed" else None
        if self.embed is not None and self.head is not None and tie == "head":
            self.head.weight = self.embed.weight


def counted(rank: int, folder: str) -> list[str]:
    """Stages that count their parameters from 0: a checkpoint of two of them, loaded on two and on four."""
    said: list[str] = []
    for stages in (2, 2, 4):
        mesh = init_device_mesh("cpu", (stages, 4 // stages), mesh_dim_names=("pp", "dp"))
        index = mesh.get_local_rank("pp")
        torch.manual_seed(index + 10 * len(said))
        model = Stages([nn.Sequential(nn.Linear(2, 2))], [index], stages, mesh.get_group("pp"))
        assert not model.unique
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        checkpoints = Checkpoints(folder, group=dist.group.WORLD)
        saved = checkpoints.newest()
        if saved is None:
            before = model.parts[0][0].weight.detach().clone()
            checkpoints.save(model, optimizer, step=1, position=1)
            continue
        try:
            checkpoints.load(saved, model, optimizer)
            said.append(str(torch.equal(model.parts[0][0].weight, before)))
        except BatchwrightError as error:
            said.append(str(error))
    return said
