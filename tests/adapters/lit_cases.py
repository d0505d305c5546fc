"""A small LightningModule as users write them, and what its tests share; ranks in other processes import it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from batchwright import Thresholds

SCHEDULE = Thresholds(((0, 8), (32, 16), (96, 32))).compile().until(samples=256)


def rows(count: int = 256) -> list[torch.Tensor]:
    """Sequences of 3 to 32 tokens."""
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(64, (int(torch.randint(3, 33, (), generator=draw)),), generator=draw) for _ in range(count)]


def collate(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    tokens = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    labels = nn.utils.rnn.pad_sequence([row[1:] for row in rows], batch_first=True, padding_value=-100)
    return {"tokens": tokens[:, :-1], "labels": labels}


class Small(L.LightningModule):
    """Nothing in it knows batchwright."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(0)
        layers = nn.Embedding(64, 16), nn.Linear(16, 32), nn.GELU(), nn.Dropout(dropout), nn.Linear(32, 64)
        self.network = nn.Sequential(*layers)
        self.spans: list[Any] = []
        self.gradients: list[torch.Tensor] = []
        self.validated: list[int] = []

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        logits = self.network(batch["tokens"])
        return cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        if batch_idx == 0 and not self.trainer.sanity_checking:
            self.validated.append(self.trainer.global_step)
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.gradients.append(flat(self))


class Learns(Small):
    """The same with a learning rate."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])


def truth(ids: Any, data: list[torch.Tensor]) -> tuple[torch.Tensor, float]:
    """The gradient and the loss of these samples as one batch, in float64."""
    model = Small().double()
    loss = model.loss(collate([data[i] for i in ids]))
    loss.backward()
    return flat(model), float(loss.detach())


def error(gradient: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((gradient - wanted).norm() / wanted.norm())


def trainer(folder: Path, **options: Any) -> L.Trainer:
    """A Trainer without output; one process unless the environment says otherwise."""
    settings = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "num_sanity_val_steps": 0,
        "default_root_dir": folder,
    }
    return L.Trainer(**{**settings, **options})
