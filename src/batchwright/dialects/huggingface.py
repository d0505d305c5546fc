"""Hugging Face: `per_device_train_batch_size`, `gradient_accumulation_steps`."""

from __future__ import annotations

from . import Dialect

DIALECT = Dialect(
    name="huggingface",
    title="Hugging Face",
    keys={
        "per_device_train_batch_size": "micro_batch_size",
        "gradient_accumulation_steps": "accumulation_steps",
    },
)
