"""A script with Lightning's Trainer and its default progress bar: it knows nothing of batchwright."""

from __future__ import annotations

import argparse

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Line(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        loss = self.layer(batch[0]).square().mean()
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, required=True)
    data = DataLoader(TensorDataset(torch.ones(4096, 64)), batch_size=parser.parse_args().batch_size)
    trainer = lightning.Trainer(max_epochs=1000, accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.fit(Line(), data)


if __name__ == "__main__":
    main()
