"""Train a small Llama on bytes with transformers' Trainer, and a batch that grows.

    python examples/huggingface/train.py --out /tmp/llama                       # one process
    torchrun --standalone --nproc-per-node 2 examples/huggingface/train.py --out /tmp/llama     # continues on two ranks

Under `batchwright run` the ramp is that of the run, and so are the launches (README.md).
"""

from __future__ import annotations

import argparse
import os
import sysconfig
from pathlib import Path

import torch
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from batchwright import Thresholds
from batchwright.adapters.huggingface import exact

RAMP = Thresholds(((0, 8), (64, 16), (256, 32)))
MODELS = {"llama": (LlamaConfig, LlamaForCausalLM), "bert": (BertConfig, BertForMaskedLM)}


class Documents(torch.utils.data.Dataset):
    """Pieces of the source files of the standard library: about 10 MB of text, on every machine with Python."""

    def __init__(self, length: int, files: int) -> None:
        paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:files]
        texts = [path.read_bytes() for path in paths]
        self.pieces = [text[at : at + length] for text in texts for at in range(0, len(text), length)]

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return {"input_ids": list(self.pieces[index])}


def collate(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    longest = max(len(row["input_ids"]) for row in rows)
    short = [longest - len(row["input_ids"]) for row in rows]
    ids = torch.tensor([row["input_ids"] + [0] * n for row, n in zip(rows, short, strict=True)])
    mask = torch.tensor([[1] * (longest - n) + [0] * n for n in short])
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def trainer(
    out: str = "runs/llama", samples: int = 1024, model: str = "llama", stock: bool = False, **options
) -> Trainer:
    torch.manual_seed(0)
    config, network = MODELS[model]
    made = network(
        config(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
    )
    arguments = TrainingArguments(
        output_dir=out, per_device_train_batch_size=4, learning_rate=3e-3, lr_scheduler_type="cosine", warmup_steps=0.1,
        logging_steps=5, save_steps=5, save_total_limit=2, report_to=[], disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(), **options,
    )  # fmt: skip
    given = {"args": arguments, "train_dataset": Documents(length=64, files=20), "data_collator": collate}
    if stock:  # the Trainer as it is, for `batchwright check`
        return Trainer(made, **given)
    schedule = None if "BATCHWRIGHT_RUN_DIR" in os.environ else RAMP.compile().until(samples)
    return exact(Trainer)(made, **given, schedule=schedule)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="runs/llama")
    parser.add_argument("--samples", type=int, default=1024)
    given = parser.parse_args()
    trainer(given.out, given.samples).train(resume_from_checkpoint=True)
