"""Hugging Face: `per_device_train_batch_size`, `gradient_accumulation_steps`."""

from __future__ import annotations

from typing import Any

from . import Dialect

DIALECT = Dialect(
    name="huggingface",
    title="Hugging Face",
    keys={
        "per_device_train_batch_size": "micro_batch_size",
        "gradient_accumulation_steps": "accumulation_steps",
    },
)

# What TrainingArguments calls an optimizer.
_OPTIMIZERS = {"adamw": "adamw_torch", "adamw-8bit": "adamw_8bit", "sgd": "sgd", "adafactor": "adafactor"}


def training_arguments(
    micro_batch_size: int,
    accumulation_steps: int,
    *,
    precision: str = "fp32",
    optimizer: str | None = None,
    checkpoint_activations: bool = False,
    sharded: bool = False,
) -> dict[str, Any]:
    """Settings of transformers' TrainingArguments (5.20 and later). A pure precision is the dtype of the model instead.

    >>> training_arguments(1, 32, precision="bf16", checkpoint_activations=True)["gradient_checkpointing"]
    True
    """
    made: dict[str, Any] = {
        "per_device_train_batch_size": micro_batch_size,
        "gradient_accumulation_steps": accumulation_steps,
    }
    if precision in ("bf16", "fp16"):
        made[precision] = True
    if optimizer is not None:
        made["optim"] = _OPTIMIZERS[optimizer]
    if sharded:
        # Under FSDP, the Trainer wants checkpointing in the configuration of FSDP.
        made["fsdp"] = True
        made["fsdp_config"] = {"version": 2, "activation_checkpointing": checkpoint_activations}
        if accumulation_steps > 1:
            # Otherwise the Trainer reduces once per step, and every rank holds the gradients of the whole model until then.
            made["accelerator_config"] = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    else:
        made["gradient_checkpointing"] = checkpoint_activations
    return made
