"""Tasks for `check`: correct ones, and one for each fault that it must find. `batchwright check check_tasks.py:NAME`."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from batchwright.runtime.task import Task

VOCABULARY, WIDTH, IGNORE = 23, 16, -100


class Images:
    """Sixty-four random images of one shape with a class each."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(i)), i % 5


class Sentences:
    """Sixty-four token sequences of lognormal length (3 to 40)."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> Tensor:
        length = min(40, max(3, round(random.Random(i).lognormvariate(2.3, 0.8))))
        return torch.randint(1, VOCABULARY, (length,), generator=torch.Generator().manual_seed(i))


class Cnn(nn.Module):
    def __init__(self, norm: nn.Module | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), norm or nn.GroupNorm(2, 8)
        self.dropout, self.head = nn.Dropout(dropout), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.dropout(F.relu(self.norm(self.conv(x))).mean((2, 3))))


class Transformer(nn.Module):
    def __init__(self, masked: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.block = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=dropout, batch_first=True)
        self.head, self.masked = nn.Linear(WIDTH, VOCABULARY), masked

    def forward(self, tokens: Tensor) -> Tensor:
        padding = tokens == 0
        return self.head(self.block(self.embed(tokens), src_key_padding_mask=padding if self.masked else None))


class Experts(nn.Module):
    """Two experts and a router; `balance` is the router's auxiliary loss for the last forward."""

    def __init__(self, statistic: bool = False) -> None:
        super().__init__()
        self.router, self.statistic = nn.Linear(WIDTH, 2), statistic
        self.experts = nn.ModuleList(nn.Linear(WIDTH, VOCABULARY) for _ in range(2))
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.balance = torch.zeros(())

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        gates = self.router(x).softmax(-1)
        if self.statistic:  # Switch's: a product of two means over the micro batch
            self.balance = 2 * (gates.mean((0, 1)) * gates.mean((0, 1))).sum()
        else:
            self.balance = self.router.weight.square().sum()  # independent of the data
        return sum(g.unsqueeze(-1) * e(x) for g, e in zip(gates.unbind(-1), self.experts, strict=True))  # type: ignore[return-value]


def pad(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    tokens = nn.utils.rnn.pad_sequence([row[:-1] for row in rows], batch_first=True)
    labels = nn.utils.rnn.pad_sequence([row[1:] for row in rows], batch_first=True, padding_value=IGNORE)
    return tokens, labels


def token_loss(model: nn.Module, batch: tuple[Tensor, Tensor], reduction: str = "sum") -> tuple[Tensor, Tensor]:
    tokens, labels = batch
    loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction=reduction, ignore_index=IGNORE)
    return loss, (labels != IGNORE).sum()


def image_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[0])


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def _images(loss: Any = image_loss, model: Any = Cnn, optimizer: Any = sgd) -> Task:
    return Task(model, Images(), loss, optimizer)


def _tokens(loss: Any = token_loss, model: Any = Transformer) -> Task:
    return Task(model, Sentences(), loss, sgd, collate=pad)


# Correct tasks.


def cnn() -> Task:
    return _images()


def transformer() -> Task:
    return _tokens()


def sequence_weighted() -> Task:
    """A sum over tokens with the number of sequences as its weight, which is valid."""
    return _tokens(lambda model, batch: (token_loss(model, batch)[0], len(batch[0])))


def auxiliary() -> Task:
    def loss(model: Any, batch: Any) -> Any:
        return (*token_loss(model, batch), 0.5 * model.balance)

    return _tokens(loss, Experts)


def with_dropout() -> Task:
    return _tokens(model=lambda: Transformer(dropout=0.2))


def noisy() -> Task:
    """Noise drawn in the loss, as in diffusion models."""

    def loss(model: Any, batch: Any) -> Any:
        return image_loss(model, (batch[0] + 0.3 * torch.randn_like(batch[0]), batch[1]))

    return _images(loss)


def checkpointed(reentrant: bool = False) -> Task:
    """Dropout of a function, in a part that backward runs again."""

    class Recomputed(Cnn):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.dropped, x.requires_grad_(), use_reentrant=reentrant)

        def dropped(self, x: Tensor) -> Tensor:
            return super().forward(F.dropout(x, 0.5, self.training))

    return _images(model=Recomputed)


def checkpointed_reentrant() -> Task:
    return checkpointed(reentrant=True)


class FusedHead(torch.autograd.Function):
    """A linear layer whose backward adds up in fp32, as the fused losses of some packages do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ weight, (gradient.float().T @ x.float()).to(weight.dtype)


def fused_head() -> Task:
    class Fused(Cnn):
        def forward(self, x: Tensor) -> Tensor:
            return FusedHead.apply(F.relu(self.conv(x)).mean((2, 3)), self.head.weight)

    return _images(model=Fused)


def balance_statistic() -> Task:
    """A router's balance loss over its micro batch: the split changes its value, but not its scale."""

    def loss(model: Any, batch: Any) -> Any:
        return (*token_loss(model, batch), 0.5 * model.balance)

    return _tokens(loss, lambda: Experts(statistic=True))


# Planted faults.


def mean_with_count() -> Task:
    return _images(lambda model, batch: (F.cross_entropy(model(batch[0]), batch[1]), len(batch[0])))


def token_mean_with_count() -> Task:
    return _tokens(lambda model, batch: token_loss(model, batch, "mean"))


def sum_without_weight() -> Task:
    return _images(lambda model, batch: (image_loss(model, batch)[0], 1.0))


def mean_of_means() -> Task:
    return _tokens(lambda model, batch: (token_loss(model, batch, "mean")[0], 1.0))


def mean_times_rows() -> Task:
    return _tokens(lambda model, batch: (token_loss(model, batch, "mean")[0] * len(batch[0]), len(batch[0])))


def padded_weight() -> Task:
    return _tokens(lambda model, batch: (token_loss(model, batch)[0], batch[0].numel()))


def ragged_tail() -> Task:
    return _images(lambda model, batch: (F.cross_entropy(model(batch[0]), batch[1]), 1.0))


def auxiliary_in_sum() -> Task:
    def loss(model: Any, batch: Any) -> Any:
        loss_sum, weight = token_loss(model, batch)
        return loss_sum + 0.5 * model.balance, weight

    return _tokens(loss, Experts)


def auxiliary_as_sum() -> Task:
    def loss(model: Any, batch: Any) -> Any:
        loss_sum, weight = token_loss(model, batch)
        return loss_sum, weight, 0.5 * model.balance * weight

    return _tokens(loss, Experts)


def batch_norm() -> Task:
    return _images(model=lambda: Cnn(nn.BatchNorm2d(8)))


def batch_norm_flat() -> Task:
    """BatchNorm1d refuses a micro batch of one."""

    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.head = nn.Linear(192, 8), nn.BatchNorm1d(8), nn.Linear(8, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(F.relu(self.norm(self.first(x.flatten(1)))))

    return _images(model=Flat)


def contrastive() -> Task:
    def loss(model: Any, batch: Any) -> Any:
        x = F.normalize(model(batch[0]))
        y = F.normalize(model(batch[0].flip(-1)))
        return F.cross_entropy(x @ y.T / 0.1, torch.arange(len(x)), reduction="sum"), len(x)

    return _images(loss)


def unmasked_padding() -> Task:
    return _tokens(model=lambda: Transformer(masked=False))


def autocast() -> Task:
    def loss(model: Any, batch: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return token_loss(model, batch)

    return _tokens(loss)


def bf16() -> Task:
    def loss(model: Any, batch: Any) -> Any:
        logits = model(batch[0].bfloat16())
        return F.cross_entropy(logits, torch.zeros_like(batch[1]), reduction="sum"), len(batch[0])

    return _images(loss, lambda: Cnn().bfloat16())


def fp16() -> Task:
    def loss(model: Any, batch: Any) -> Any:
        logits = model(batch[0].half())
        return F.cross_entropy(logits, torch.zeros_like(batch[1]), reduction="sum"), len(batch[0])

    return _images(loss, lambda: Cnn().half())


def scheduled() -> Task:
    """The optimizer steps its own scheduler."""

    def optimizer(params: Any) -> torch.optim.Optimizer:
        made = torch.optim.SGD(params, lr=0.1)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(made, T_max=1000)
        made.register_step_post_hook(lambda *_: schedule.step())
        return made

    return _images(optimizer=optimizer)


def rank_reduced() -> Task:
    """The loss itself sums the weight over ranks."""

    def loss(model: Any, batch: Any) -> Any:
        loss_sum, weight = token_loss(model, batch)
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(weight)
        return loss_sum, weight

    return _tokens(loss)


def broken() -> Task:
    return _images(lambda model, batch: image_loss(model, (batch[0].flatten(), batch[1])))


def broken_at_one() -> Task:
    def loss(model: Any, batch: Any) -> Any:
        if len(batch[0]) == 1:
            raise ValueError("one is not enough")
        return image_loss(model, batch)

    return _images(loss)


# Several faults at once, and harder ones.


def batch_norm_and_mean() -> Task:
    def loss(model: Any, batch: Any) -> Any:
        return F.cross_entropy(model(batch[0]), batch[1]), len(batch[0])

    return _images(loss, lambda: Cnn(nn.BatchNorm2d(8)))


def dropout_and_mean() -> Task:
    return _tokens(lambda model, batch: (token_loss(model, batch, "mean")[0], 1.0), lambda: Transformer(dropout=0.2))


def auxiliary_statistic_in_sum() -> Task:
    def loss(model: Any, batch: Any) -> Any:
        loss_sum, weight = token_loss(model, batch)
        return loss_sum + 0.5 * model.balance, weight

    return _tokens(loss, lambda: Experts(statistic=True))


def masked_in_collate() -> Task:
    """Random masking in collate, as in masked language models: equal in distribution."""

    def collate(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
        tokens, labels = pad(rows)
        chosen = torch.bernoulli(torch.full(tokens.shape, 0.3)).bool()
        return tokens.masked_fill(chosen & (tokens != 0), 1), labels

    return Task(Transformer, Sentences(), token_loss, sgd, collate=collate)


def masked_by_numpy() -> Task:
    """Masking in collate, with random draws that `check` cannot fix."""

    def collate(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
        tokens, labels = pad(rows)
        chosen = torch.from_numpy(np.random.rand(*tokens.shape) < 0.3)
        return tokens.masked_fill(chosen & (tokens != 0), 1), labels

    return Task(Transformer, Sentences(), token_loss, sgd, collate=collate)


def noisy_by_python() -> Task:
    """The loss has a random scale, from Python's generator."""

    def loss(model: Any, batch: Any) -> Any:
        loss_sum, weight = image_loss(model, batch)
        return loss_sum * (1 + 0.1 * random.random()), weight

    return _images(loss)


def wrong_at_odd_sizes() -> Task:
    """Like a faulty GPU kernel: micro batches of three count double, all others are correct."""

    def loss(model: Any, batch: Any) -> Any:
        loss_sum, weight = image_loss(model, batch)
        return loss_sum * (2 if len(batch[0]) == 3 else 1), weight

    return _images(loss)


def refuses_twins() -> Task:
    """A mean with a count, in a loss that refuses a repeated sample: the experiments fail."""

    def loss(model: Any, batch: Any) -> Any:
        if len(batch[0].flatten(1).unique(dim=0)) < len(batch[0]):
            raise ValueError("a sample came twice")
        return F.cross_entropy(model(batch[0]), batch[1]), len(batch[0])

    return _images(loss)


def functional_batch_norm() -> Task:
    """Batch statistics without a BatchNorm module."""

    class Model(Cnn):
        def forward(self, x: Tensor) -> Tensor:
            return self.head(F.relu(F.batch_norm(self.conv(x), None, None, training=True)).mean((2, 3)))

    return _images(model=Model)


def keeps_state() -> Task:
    """The loss depends on earlier micro batches."""

    class Model(Cnn):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.seen += len(x)
            return super().forward(x) * (1 + self.seen / 100)

    return _images(model=Model)


def pairs() -> Task:
    """A loss over all pairs of a micro batch."""

    def loss(model: Any, batch: Any) -> Any:
        x = model(batch[0])
        return (x.unsqueeze(0) - x.unsqueeze(1)).square().sum(), len(x)

    return _images(loss)


def single_precision_only() -> Task:
    """Does not run in fp64: a custom function that requires fp32."""

    def loss(model: Any, batch: Any) -> Any:
        logits = model(batch[0])
        if logits.dtype != torch.float32:
            raise TypeError("fp32 only")
        return F.cross_entropy(logits, batch[1]), len(batch[0])

    return _images(loss)


def unseeded() -> Task:
    """A model built in the function itself, so every process builds its own."""
    return _images(model=Cnn())


def sized(classes: int = 5) -> Task:
    """Takes an argument."""
    model = Cnn()
    model.head = nn.Linear(8, classes)
    return _images(model=model)
