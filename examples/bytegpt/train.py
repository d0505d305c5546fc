"""Train the byte GPT with a batch ramp: `python examples/bytegpt/train.py --help`; also under torchrun.

Start it again with the same directory to continue after a stop or a crash, on any number of ranks.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch
from bytegpt import SIZES, Documents, task

from batchwright import SampleSchedule, Thresholds
from batchwright.runtime import Settings, audit, train


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", default="runs/bytegpt", help="the run directory (%(default)s)")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--sequence-length", type=int, default=128)
    parser.add_argument("--samples", type=int, default=12_288, help="the budget (%(default)s)")
    parser.add_argument("--micro-batch-size", type=int, default=8)
    parser.add_argument("--strategy", choices=["auto", "ddp", "fsdp2"], default="auto")
    parser.add_argument("--files", type=int, default=0, help="read only this many source files (0: all)")
    given = parser.parse_args()
    if "RANK" in os.environ and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    mine = task(given.size, given.sequence_length, files=given.files)
    documents: Documents = mine.dataset
    entropy = documents.unigram_entropy()
    # Three stages of 16, 32 and 64 samples per step, each a third of the budget.
    third = given.samples // 3 // 64 * 64
    schedule = Thresholds(((0, 16), (third, 32), (2 * third, 64))).compile().until(given.samples)
    if int(os.environ.get("RANK", 0)) == 0:
        print(f"{len(documents):,} samples of up to {given.sequence_length} bytes, {len(documents.data):,} bytes")
        print(f"unigram entropy: {entropy:.3f} nats per byte", flush=True)
    status = train(
        mine,
        schedule,
        Settings(
            directory=given.dir,
            micro_batch_size=given.micro_batch_size,
            strategy=given.strategy,
            checkpoint_every=max(64, given.samples // 6),
            evaluation_samples=min(256, len(documents) // 10),
            evaluate_every=max(64, given.samples // 6),
            evaluation_batch_size=32,
            learning_rate=SampleSchedule(1.0, given.samples, warmup_samples=given.samples // 20, min_lr=0.1),
            max_norm=1.0,
        ),
    )
    if int(os.environ.get("RANK", 0)) == 0:
        found = audit(Path(given.dir))
        losses = f"held-out loss {status.evaluation_loss:.3f} nats per byte, unigram entropy {entropy:.3f}"
        print(f"{status.state} at sample {status.position:,}: {losses}; ledger {found.summary()}")
    return status.exit_code


if __name__ == "__main__":
    sys.exit(main())
