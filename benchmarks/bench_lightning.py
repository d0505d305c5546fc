"""CPU time per micro step in Lightning with the adapter, and alone: `python benchmarks/bench_lightning.py [--pairs 20]`.

The same model, samples, micro batch and accumulation; one process, one thread. Both log a loss in every micro step. The optimizer
records the CPU time of the process at each step; a round is the median over its steps, without the first ones. Rounds are
interleaved: stock, adapter, stock again; a pair is adapter / stock, and the noise floor is the second stock / the first. It
fails if the median of the pairs is above 1.05, whatever the noise floor is: run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import warnings
from itertools import pairwise
from statistics import median
from typing import Any

import lightning as L
import torch
from bench_order import ratio, seconds, table
from bench_step import ACCUMULATION, MICRO, SIZES, Model, Sentences, TimedSGD, collate
from torch.utils.data import DataLoader

from batchwright import Constant
from batchwright.adapters.lightning import Steps, exact

LIMIT = 1.05  # adapter / stock
FIRST = 4  # steps that are not counted: the adapter tests the loss in the first one


class Module(L.LightningModule):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = Model(layers, width)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        loss = self.model(**batch)["loss"]
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        self.timed = TimedSGD(self.parameters())
        return self.timed


def round_of(size: tuple[int, int], data: Sentences, adapter: bool) -> float:
    """CPU seconds per micro step."""
    module = (exact(Module) if adapter else Module)(*size)
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
            accumulate_grad_batches=1 if adapter else ACCUMULATION,
        )
        if adapter:
            loader: Any = Steps(
                data, Constant(MICRO * ACCUMULATION), micro_batch_size=MICRO, collate=collate, shuffle=False
            )
        else:
            loader = DataLoader(data, batch_size=MICRO, collate_fn=collate)
        trainer.fit(module, loader)
    times = module.timed.times[FIRST:]
    return median(b - a for a, b in pairwise(times)) / ACCUMULATION


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--models", type=int, default=len(SIZES), help="the first N models")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    data = Sentences(MICRO * ACCUMULATION * args.steps)
    rows: list[list[str]] = []
    slow: list[str] = []
    for name, size in list(SIZES.items())[: args.models]:
        round_of(size, data, adapter=True)
        rounds = [[round_of(size, data, adapter) for adapter in (False, True, False)] for _ in range(args.pairs)]
        first, adapter, second = (list(times) for times in zip(*rounds, strict=True))
        rows.append([name, seconds(first), ratio(first, adapter), ratio(first, second)])
        found, noise = (median(b / a for a, b in zip(first, other, strict=True)) for other in (adapter, second))
        if found > LIMIT:
            slow.append(f"{name}: {found:.3f} is above {LIMIT} (noise {noise:.3f})")
    title = f"{args.pairs} interleaved pairs, median and 95% interval"
    table(title, ["model", "Lightning, per micro step", "adapter / Lightning", "Lightning / Lightning"], rows)
    sys.exit("\n".join(slow) or 0)


if __name__ == "__main__":
    main()
