"""Hugging Face: `per_device_train_batch_size`, `gradient_accumulation_steps`, and the launchers that go with them."""

from __future__ import annotations

from . import Dialect

DIALECT = Dialect(
    name="huggingface",
    title="Hugging Face",
    keys={
        "per_device_train_batch_size": "micro_batch_size",
        "gradient_accumulation_steps": "accumulation_steps",
        "nproc_per_node": "devices_per_node",  # torchrun
        "nnodes": "nodes",
        "num_processes": "devices",  # accelerate launch
        "num_machines": "nodes",
    },
)
