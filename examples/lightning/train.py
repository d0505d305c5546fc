"""A byte-level language model in Lightning, on paragraphs of uneven length. README.md beside it has the commands."""

import argparse
import os
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from batchwright import Constant, SampleSchedule
from batchwright.adapters.lightning import Steps, exact


class ByteModel(L.LightningModule):
    """An ordinary LightningModule: `training_step` returns the mean loss of one micro batch."""

    def __init__(self, width: int = 64, lr: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.embed = nn.Embedding(256, width)
        self.body = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, 256)

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        states, _ = self.body(self.embed(batch["tokens"]))
        return cross_entropy(self.head(states).flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.loss(batch)

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True, batch_size=len(batch["tokens"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"])


def paragraphs(folder: Path, longest: int = 128) -> list[torch.Tensor]:
    texts = [text for path in sorted(folder.glob("*.md")) for text in path.read_text("utf-8").split("\n\n")]
    return [torch.tensor(list(text.encode()[:longest])) for text in texts if len(text) > 1]


def collate(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    labels = pad_sequence([row[1:] for row in rows], batch_first=True, padding_value=-100)
    return {"tokens": pad_sequence([row[:-1] for row in rows], batch_first=True), "labels": labels}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True, help="where checkpoints are kept: the same in every launch")
    parser.add_argument("--batch", type=int, help="a constant global batch; under `batchwright run` the ramp decides")
    parser.add_argument("--save-every", type=int, default=4, help="optimizer steps between two checkpoints")
    args = parser.parse_args()
    L.seed_everything(0)
    rows = paragraphs(Path(__file__).resolve().parents[2] / "docs")
    steps = Steps(rows[64:], args.batch and Constant(args.batch), micro_batch_size=4, collate=collate)
    steps.learning_rate = SampleSchedule(peak_lr=1.0, end_sample=steps.course.samples, warmup_samples=64).at
    trainer = L.Trainer(
        max_epochs=1,
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),  # as torchrun has started them
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
        gradient_clip_val=1.0,
        callbacks=[ModelCheckpoint(args.out, every_n_train_steps=args.save_every, save_last=True)],
        default_root_dir=args.out,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    validation = torch.utils.data.DataLoader(rows[:64], batch_size=16, collate_fn=collate)
    trainer.fit(exact(ByteModel)(), steps, validation, ckpt_path="last")
    trainer.print(", ".join(f"{name} {float(value):.4g}" for name, value in trainer.callback_metrics.items()))


if __name__ == "__main__":
    main()
