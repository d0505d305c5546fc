"""A small task for the tests of the loop: a sample is a function of its id, dropout shows the state of generators."""

from __future__ import annotations

import json
import time
from itertools import count

import torch
import torch.distributed as dist
from torch import nn

from batchwright.core.errors import PlanError
from batchwright.runtime.data.sources.access import Access
from batchwright.runtime.data.sources.jsonl import JsonLines
from batchwright.runtime.task import Task


class Numbers:
    """Sample i is eight random numbers with seed i, and a target; the target of the sample `spike` is infinite. In the folder
    `seen`, every rank writes down what it is asked. Rank 1 lacks the last `shorter` samples. `fault`: the rank and the call,
    "len" or "row", that fail."""

    def __init__(
        self,
        size: int,
        pause: float = 0.0,
        spike: int | None = None,
        seen: str | None = None,
        shorter: int = 0,
        fault: tuple[int, str] | None = None,
    ) -> None:
        self.size, self.pause, self.spike, self.seen, self.shorter, self.fault = (
            size,
            pause,
            spike,
            seen,
            shorter,
            fault,
        )

    def _note(self, what: object) -> None:
        if self.seen is not None:
            with open(f"{self.seen}/rank-{dist.get_rank()}.txt", "a") as file:
                file.write(f"{what}\n")

    def _fail(self, call: str) -> None:
        if self.fault is not None and (dist.get_rank(), call) == tuple(self.fault):
            if call == "len":
                raise FileNotFoundError("/data/shard-00017.bin is not on this host")
            raise PlanError("cannot read a.jsonl: its row 17 is not JSON.", field="path", given="a.jsonl")

    def __len__(self) -> int:
        self._note("len")
        self._fail("len")
        return self.size - (self.shorter if self.shorter and dist.get_rank() == 1 else 0)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        self._note(i)
        self._fail("row")
        if self.pause:
            time.sleep(self.pause)
        generator = torch.Generator().manual_seed(i)
        x = torch.randn(8, generator=generator)
        y = x[:3].sum() + 0.1 * torch.randn((), generator=generator)
        return x, y if i != self.spike else y + torch.inf, torch.tensor(1 + i % 3)


def remote(url: str, index_folder: str, numbers: Numbers) -> JsonLines:
    """The same samples, by rows of a file that say their number; a server that fails is asked again soon."""
    access = Access(tries=6, first_pause=0.001, longest_pause=0.01, merge_gap=0)
    return JsonLines(url, parse=lambda line: numbers[json.loads(line)["i"]], index_folder=index_folder, access=access)


class Net(nn.Module):
    """`reads_size`: the forward uses the number of samples, as that of attention does, and a traced one keeps it."""

    def __init__(self, dropout: float, width: int, blocks: int = 2, reads_size: bool = False) -> None:
        super().__init__()
        self.into = nn.Linear(8, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks))
        self.drop, self.out, self.reads_size = nn.Dropout(dropout), nn.Linear(width, 1), reads_size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.into(x))
        for block in self.blocks:
            x = x + torch.tanh(block(x).view(x.shape[0], 2, -1).flatten(1) if self.reads_size else block(x))
        return self.out(self.drop(x)).squeeze(-1)


class Stage(nn.Module):
    """Stage `index` of `stages` of a model with four blocks; the only stage of one is the whole model. `tied`: the head has the
    weight of the first layer. `opaque`: it cannot be built without memory."""

    def __init__(self, index: int = 0, stages: int = 1, tied: bool = False, opaque: bool = False) -> None:
        super().__init__()
        first, last = index == 0, index == stages - 1
        self.into = nn.Linear(8, 8) if first else None
        self.blocks = nn.ModuleDict(
            {str(i): nn.Linear(8, 8) for i in range(4 * index // stages, 4 * (index + 1) // stages)}
        )
        self.out = nn.Linear(8, 8) if last else None
        for name, parameter in self.named_parameters():
            generator = torch.Generator().manual_seed(int.from_bytes(name.encode(), "big") % 2**32)
            nn.init.normal_(parameter, std=0.3, generator=generator)
        if tied and self.into is not None and self.out is not None:
            self.out.weight = self.into.weight
        if opaque:
            float(next(self.parameters()).sum())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.into is None else torch.tanh(self.into(x))
        for block in self.blocks.values():
            x = x + torch.tanh(block(x))
        return x if self.out is None else self.out(x).sum(-1)


def task(
    size: int = 256,
    dropout: float = 0.0,
    width: int = 16,
    pause: float = 0.0,
    lr: float = 1e-2,
    spike: int | None = None,
    half: bool = False,
    url: str | None = None,
    index_folder: str = "",
    blocks: int = 2,
    reads_size: bool = False,
    stages: dict[str, bool] | None = None,
    masked: bool = False,
    seen: str | None = None,
    shorter: int = 0,
    fault: tuple[int, str] | None = None,
    hold: int | None = None,
) -> Task:
    """A regression with weights of 1 to 3 per sample, like documents of different lengths; `half`: in bf16; `url`: a file
    of JSON lines that has the samples; `stages`: the model is built in stages, with these options; `masked`: the loss draws
    which inputs the model sees; `hold`: after so many micro batches a rank waits to be killed."""
    calls = count()
    kind = torch.bfloat16 if half else torch.float32

    def loss(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        x, y, weight = batch
        if next(calls) == hold:
            time.sleep(600)
        x = x * (torch.rand(x.shape) < 0.5) if masked else x
        return ((model(x.to(kind)) - y) ** 2 * weight).sum(), weight.sum()

    return Task(
        model=lambda: Net(dropout, width, blocks, reads_size).to(kind) if stages is None else Stage(**stages),
        stage=None if stages is None else lambda index, count: Stage(index, count, **stages),
        dataset=remote(url, index_folder, Numbers(size, pause))
        if url
        else Numbers(size, pause, spike, seen, shorter, fault),
        loss=loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=lr),
    )
