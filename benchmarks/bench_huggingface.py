"""CPU time of a micro step in transformers' Trainer: with the adapter, without, and the Trainer against itself.

Pairs are interleaved, and each ratio is the median over them: the last column shows how far two equal programs differ. It fails
if the median of the pairs is above 1.05, whatever that column shows: run it on a quiet machine. TRL's SFTTrainer has the same
mixin, so it is not measured by itself.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
from transformers import Trainer, TrainerCallback

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import batchwright
from batchwright.adapters.huggingface import exact
from tests.adapters import hf

PAIRS, STEPS, MICRO_STEPS, MICRO = 20, 9, 8, 4


class Clock(TrainerCallback):
    """CPU seconds between the end of the first step, which also tests the loss, and that of the last."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_end(self, args, state, control, **kwargs):
        self.times.append(time.process_time())


def micro_step(adapter: bool) -> float:
    """CPU milliseconds per micro step of one training."""
    torch.manual_seed(0)
    clock, size = Clock(), MICRO * MICRO_STEPS
    given = {"train_dataset": hf.rows(STEPS * size), "data_collator": hf.collate, "callbacks": [clock]}
    with tempfile.TemporaryDirectory() as out:
        common = {"per_device_train_batch_size": MICRO, "logging_steps": 1000, "max_steps": STEPS}
        if adapter:
            schedule = batchwright.Constant(size).compile().until(STEPS * size)
            trainer = exact(Trainer)(hf.llama(), args=hf.arguments(out, **common), schedule=schedule, **given)
        else:
            trainer = Trainer(
                hf.llama(), args=hf.arguments(out, **common, gradient_accumulation_steps=MICRO_STEPS), **given
            )
        trainer.train()
    return (clock.times[-1] - clock.times[0]) / (STEPS - 1) / MICRO_STEPS * 1000


def spread(values: list[float]) -> str:
    ordered = sorted(values)
    return f"{statistics.median(ordered):.3f} ({ordered[len(ordered) // 4]:.3f} to {ordered[-len(ordered) // 4]:.3f})"


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    stock, ours, again = [], [], []
    for _ in range(PAIRS + 1):
        stock.append(micro_step(False))
        ours.append(micro_step(True))
        again.append(micro_step(False))
    stock, ours, again = stock[1:], ours[1:], again[1:]  # the first round warms up
    print(f"CPU time of a micro step, {PAIRS} interleaved pairs, median (and quartiles):\n")
    print("| Trainer, ms | with the adapter, ms | adapter / Trainer | Trainer / Trainer |")
    print("|---|---|---|---|")
    ratios = [b / a for a, b in zip(stock, ours, strict=True)]
    noise = [b / a for a, b in zip(stock, again, strict=True)]
    print(
        f"| {statistics.median(stock):.2f} | {statistics.median(ours):.2f} | {spread(ratios)} | {spread(noise)} |",
    )
    print(
        f"\nLimit: 1.050 for adapter / Trainer. Two equal programs differ by {abs(statistics.median(noise) - 1):.3f}."
    )
    sys.exit(int(statistics.median(ratios) > 1.05))
