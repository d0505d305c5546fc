"""Tasks for tests: a small GPT, a wide MLP, and tasks that fake tensors cannot follow."""

from __future__ import annotations

import time
from collections import UserDict
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from batchwright.runtime.task import Task

VOCABULARY = 4096


class Block(nn.Module):
    def __init__(self, width: int, flash: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.flash = flash

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (y.view(batch, length, 4, -1).transpose(1, 2) for y in self.qkv(self.norm1(x)).split(width, 2))
        if self.flash:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            mixed = (q @ k.transpose(-2, -1)).softmax(-1) @ v  # T² activations
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, layers: int, length: int, width: int, flash: bool) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, flash) for _ in range(layers))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def next_token(model: nn.Module, ids: Tensor) -> tuple[Tensor, int]:
    logits = model(ids[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum"), ids[:, 1:].numel()


def gpt(sequence_length: int = 128, layers: int = 2, width: int = 128, flash: bool = True, built: bool = False) -> Task:
    def build() -> nn.Module:
        return GPT(layers, sequence_length, width, flash)

    return Task(
        model=build() if built else build,
        dataset=torch.randint(0, VOCABULARY, (64, sequence_length + 1)),
        loss=next_token,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
    )


def _mlp(loss: Any, width: int = 512, layers: int = 6, **more: Any) -> Task:
    def build() -> nn.Module:
        return nn.Sequential(*(m for _ in range(layers) for m in (nn.Linear(width, width), nn.GELU())))

    options: dict[str, Any] = {"dataset": torch.zeros(8, width), **more}
    return Task(
        model=build, loss=loss, optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9), **options
    )


def mlp() -> Task:
    def example_batch(micro_batch_size: int) -> Tensor:
        return torch.zeros(micro_batch_size, 512)

    return _mlp(lambda model, x: (model(x).square().sum(), len(x)), example_batch=example_batch)


def small() -> Task:
    return _mlp(lambda model, x: (model(x).square().sum(), len(x)), width=16, layers=2)


def twice() -> Task:
    """A contrastive loss calls the model twice, and has an auxiliary mean and a tensor as its weight."""
    return _mlp(
        lambda m, x: (m(x).square().sum() + m(x).sum(), torch.ones(len(x)).sum(), m(x).mean()), width=16, layers=2
    )


def converted(how: str = "none", tied: bool = False, dtype: str = "float32") -> Task:
    """Two layers of a dtype, which the model's function then converts."""

    def build() -> nn.Module:
        model = nn.Sequential(*(nn.Linear(64, 64, dtype=getattr(torch, dtype)) for _ in range(2)))
        if tied:
            model[1].weight = model[0].weight
        convert: dict[str, Any] = {
            "none": lambda: model,
            "to": lambda: model.to(torch.bfloat16),
            "half": lambda: model.half(),
            "device": lambda: model.to("cpu"),
            "double": lambda: model.double(),
            "meta": lambda: model.to("meta").to_empty(device="cpu"),
        }
        return convert[how]()

    def loss(model: nn.Module, x: Tensor) -> tuple[Tensor, int]:
        return model(x.to(next(model.parameters()).dtype)).float().square().sum(), len(x)

    return Task(model=build, dataset=torch.zeros(8, 64), loss=loss, optimizer=lambda ps: torch.optim.AdamW(ps))


def frozen() -> Task:
    """Half of the model does not train, and the optimizer reads values in its step."""

    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16, bias=False))
        model[0].requires_grad_(False)
        return model

    return Task(
        model=build,
        dataset=torch.zeros(8, 16),
        loss=lambda model, x: (model(x).square().sum(), len(x)),
        optimizer=lambda params: torch.optim.Adafactor([p for p in params if p.requires_grad]),
    )


def convolutional(width: int = 16) -> Task:
    """Images, batch norm and a mean over the pixels."""

    def build() -> nn.Module:
        widths = (3, width, width, 2 * width, 2 * width)
        layers = [
            m
            for a, b in pairwise(widths)
            for m in (nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU())
        ]
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, 10))

    return Task(
        model=build,
        dataset=torch.zeros(64, 3, 32, 32),
        loss=lambda model, x: (F.log_softmax(model(x), 1)[:, 0].neg().sum(), len(x)),
        optimizer=lambda params: torch.optim.AdamW(params),
    )


def unused() -> Task:
    """A layer that is trained by its flag, and that the loss does not use."""
    model = lambda: nn.ModuleList(nn.Linear(16, 16) for _ in range(2))  # noqa: E731
    return Task(
        model=model,
        dataset=torch.zeros(8, 16),
        loss=lambda model, x: (model[0](x).square().sum(), len(x)),  # type: ignore[index]
        optimizer=lambda params: torch.optim.AdamW(params),
    )


class Remembers(nn.Linear):
    """Its last result enters the next forward, as in a recurrence over segments."""

    last: Tensor | None = None

    def forward(self, input: Tensor) -> Tensor:
        result = super().forward(input if self.last is None else input + self.last)
        self.last = result.detach().clone()
        return result


def remembers() -> Task:
    return Task(
        model=lambda: Remembers(16, 16),
        dataset=torch.zeros(8, 16),
        loss=lambda model, x: (model(x).square().sum(), len(x)),
        optimizer=lambda params: torch.optim.AdamW(params),
    )


def recurrent() -> Task:
    return Task(
        model=lambda: nn.ModuleList([nn.LSTM(8, 8)]),
        dataset=torch.zeros(8, 4, 8),
        loss=lambda model, x: (model[0](x)[0].sum(), len(x)),  # type: ignore[index]
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    )


def masked() -> Task:
    def loss(model: nn.Module, x: Tensor) -> tuple[Tensor, int]:
        y = model(x)
        kept = y[y > 0]
        return kept.sum(), len(x)

    return _mlp(loss, width=16, layers=2)


def counted() -> Task:
    def loss(model: nn.Module, x: Tensor) -> tuple[Tensor, int]:
        return model(x).sum(), int((x > 0).sum())

    return _mlp(loss, width=16, layers=2)


def as_numpy() -> Task:
    def loss(model: nn.Module, x: Tensor) -> tuple[Tensor, int]:
        y = model(x)
        return y.sum() + float(y.detach().numpy().mean()), len(x)

    return _mlp(loss, width=16, layers=2)


def broken() -> Task:
    raise ValueError("no data")


def wrong() -> Task:
    def loss(model: nn.Module, x: Tensor) -> tuple[Tensor, int]:
        raise ValueError("the labels are missing")

    return _mlp(loss, width=16, layers=2)


def mismatched() -> Task:
    return _mlp(lambda model, x: (model(x[:, :3]).sum(), len(x)), width=16, layers=2)


def reads_its_data() -> Task:
    """Values of the data and of the model's rates are read, but not in the step."""
    data = torch.arange(32.0).view(8, 4)
    rows = [(row.numpy().copy(), int(row.sum().item()) % 3) for row in data]

    def build() -> nn.Module:
        rates = [rate.item() for rate in torch.linspace(0, 0.1, 3)]
        return nn.Sequential(*(m for rate in rates for m in (nn.Linear(4, 4), nn.Dropout(rate))))

    return Task(
        model=build,
        dataset=rows,
        loss=lambda model, batch: (F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1])),
        optimizer=lambda params: torch.optim.AdamW(params),
    )


def ragged(mapping: str = "dict") -> Task:
    """Samples of different lengths; the collator changes them, and pads to the longest of the batch."""
    kind = {"dict": dict, "user": UserDict}[mapping]

    def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
        names = [sample.pop("name") for sample in samples]
        return {"x": nn.utils.rnn.pad_sequence([s["x"] for s in samples], batch_first=True), "names": names}

    return _mlp(
        lambda model, batch: (model(batch["x"].view(-1, 16)).square().sum(), 1),
        width=16,
        layers=2,
        dataset=[kind({"x": torch.zeros(16 * (i % 4 + 1)), "name": "a"}) for i in range(8)],
        collate=collate,
    )


class OwnArguments(UserDict):
    """A mapping whose constructor takes no mapping, with an attribute beside its keys."""

    def __init__(self, x: Tensor, factor: int = 1) -> None:
        super().__init__()
        self.data["x"], self.factor = x, factor


@dataclass(frozen=True)
class Fields:
    """A batch whose tensors are fields."""

    x: Tensor

    def __getitem__(self, name: str) -> Tensor:
        return getattr(self, name)


def encoded(mapping: str = "dict", scale: bool = False) -> Task:
    """A collator that returns a container, such as the `BatchEncoding` of transformers, and maybe a scalar tensor."""
    kinds: dict[str, Any] = {"dict": dict, "user": UserDict}
    kinds |= {"own": lambda parts: OwnArguments(parts["x"], 2), "fields": lambda parts: Fields(**parts)}

    def collate(samples: list[Tensor]) -> Any:
        return kinds[mapping]({"x": torch.stack(samples), **({"scale": torch.tensor(2.0)} if scale else {})})

    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        assert mapping != "own" or batch.factor == 2
        y = model(batch["x"])
        return (y * batch["scale"] if scale else y).square().sum(), len(y)

    return _mlp(loss, width=64, layers=1, dataset=torch.zeros(8, 64), collate=collate)


def made_at_once(optimizer: str) -> Task:
    """Both optimizers keep one tensor per parameter; Adagrad makes it in its constructor."""
    made = {"Adagrad": torch.optim.Adagrad, "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9)}
    return Task(
        model=lambda: nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)),
        dataset=torch.zeros(8, 256),
        loss=lambda model, x: (model(x).square().sum(), len(x)),
        optimizer=made[optimizer],
    )


def sleeps(pid_file: str) -> Task:
    import os

    Path(pid_file).write_text(str(os.getpid()))
    time.sleep(600)
    return small()


def late() -> Task:
    """The ninth sample is 40 times as long as the others."""
    rows = [torch.zeros(400 if i == 8 else 10, 16) for i in range(12)]
    collate = lambda samples: nn.utils.rnn.pad_sequence(samples, batch_first=True)  # noqa: E731
    return _mlp(lambda m, x: (m(x).sum(), len(x)), width=16, layers=2, dataset=rows, collate=collate)


class Recomputed(nn.Module):
    """Blocks with torch.utils.checkpoint in their own code."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first = nn.Linear(16, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 256), nn.GELU(), nn.Linear(256, 16)) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        from torch.utils.checkpoint import checkpoint

        x = self.first(x)
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def recomputed(reentrant: bool | None) -> Task:
    return Task(
        model=lambda: Recomputed(reentrant),
        dataset=torch.zeros(8, 16),
        loss=lambda model, x: (model(x).square().sum(), len(x)),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    )
