"""TRL's SFTTrainer on packed rows, as a script for `batchwright run`: the schedule is that of the run."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.adapters import hf

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    saves = {"save_strategy": "steps", "save_steps": 5, "save_total_limit": 2}
    trainer, _ = hf.sft(parser.parse_args().out, None, per_device_train_batch_size=4, learning_rate=1e-2, **saves)
    trainer.train(resume_from_checkpoint=True)
