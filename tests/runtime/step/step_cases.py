"""The problem of the step's tests: sequences of lognormal length, a summed loss, a router's balance loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from batchwright.core.ramp.schedule import Step

VOCABULARY = 29


class Model(nn.Module):
    """A toy language model with tied weights, a frozen and an unused parameter, and a data-independent mean loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.body = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
        self.head = nn.Linear(8, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.router = nn.Parameter(torch.randn(8))
        self.frozen = nn.Parameter(torch.randn(8), requires_grad=False)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return self.head(self.body(self.embed(tokens)) + self.frozen), self.router.square().mean()


def build(dtype: torch.dtype = torch.float64) -> Model:
    torch.manual_seed(7)
    return Model().to(dtype)


def sample(position: int) -> Tensor:
    """The tokens at a position; the length is lognormal, and the content depends on the length."""
    generator = torch.Generator().manual_seed(position)
    length = int(torch.exp(1.5 + torch.randn((), generator=generator)).clamp(2, 60))
    return torch.randint(0, 5 + length % (VOCABULARY - 5), (length,), generator=generator)


def pad(rows: list[Tensor]) -> Tensor:
    return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)


def collate(positions: range | list[int]) -> Tensor:
    return pad([sample(p) for p in positions])


def loss(model: nn.Module, batch: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    inputs, labels = batch[:, :-1].clamp(min=0), batch[:, 1:]
    logits, balance = model(inputs)
    summed = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-1, reduction="sum")
    return summed, (labels >= 0).sum(), balance


@dataclass(frozen=True)
class Micro:
    data: Any
    step: Step
    index: int
    count: int
    positions: range
    ids: range
    filler: bool = False


def micros(
    steps: list[Step], micro_batch_size: int, rank: int = 0, ranks: int = 1, make: Callable[[range], Any] = collate
) -> Iterator[Micro]:
    """Ragged shares of each span, in micro batches; a rank with fewer samples gets fillers."""
    for step in steps:
        least, more = divmod(step.global_batch_size, ranks)
        count = -(-(least + bool(more)) // micro_batch_size)
        start = step.start_sample + rank * least + min(rank, more)
        end = start + least + (rank < more)
        for index in range(count):
            span = range(min(start + index * micro_batch_size, end), min(start + (index + 1) * micro_batch_size, end))
            filler = len(span) == 0
            if filler:
                span = range(step.start_sample, step.start_sample + 1)
            yield Micro(make(span), step, index, count, span, span, filler)


def reference(model: nn.Module, step: Step) -> dict[str, Tensor]:
    """The gradient of the whole global batch, in one process and one backward."""
    model.zero_grad()
    summed, weight, balance = loss(model, collate(range(step.start_sample, step.end_sample)))
    (summed / weight + balance).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def plain_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Whole gradients by parameter name, with any wrapper."""
    from torch.distributed.tensor import DTensor

    found = {}
    for name, p in model.named_parameters():
        if p.grad is not None:
            whole = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
            found[name.removeprefix("module.").removeprefix("_orig_mod.")] = whole.detach().clone()
    return found


def relative_error(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """||g - r|| / ||r|| over all parameters; a missing or surplus gradient is an error of 1."""
    if found.keys() != wanted.keys():
        return 1.0
    difference = sum(float((found[n].double() - wanted[n].double()).square().sum()) for n in wanted)
    return (difference / sum(float(w.double().square().sum()) for w in wanted.values())) ** 0.5
