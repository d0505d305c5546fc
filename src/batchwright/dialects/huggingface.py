"""Hugging Face: `per_device_train_batch_size`, `gradient_accumulation_steps`."""

from __future__ import annotations

from typing import Any

from batchwright.core.fields import switch

from .accelerate import divided
from .record import Dialect, Fields, Finding, Job, Reading, Version, error, note

KEYS = {
    "per_device_train_batch_size": "micro_batch_size",
    "gradient_accumulation_steps": "accumulation_steps",
    "parallelism_config.tp_size": "tensor_parallel",
    "parallelism_config.cp_size": "context_parallel",
    "parallelism_config.sp_size": "context_parallel",
}
STEPS = {
    "max_steps": "budget",
    "warmup_steps": "warmup",
    "save_steps": "save",
    "eval_steps": "eval",
    "logging_steps": "log",
}
CHECKED = frozenset(
    {"average_tokens_across_devices", "auto_find_batch_size", "per_gpu_train_batch_size", "dataloader_drop_last"}
)


SPLIT = "accelerator_config.split_batches"
_SIZE = "per_device_train_batch_size"


def resolve(special: Fields, fields: Fields) -> tuple[Fields, list[str]]:
    """With split_batches, the batch per device is that of all processes: each gets its share."""
    given, split = fields.get("micro_batch_size"), special.get(SPLIT)
    if given is None or given.level > 1 or split is None or not switch(split.value, SPLIT):
        return {}, []
    del fields["micro_batch_size"]
    return divided(_SIZE, given, SPLIT, split, fields)


_AVERAGED = "average_tokens_across_devices"
AVERAGED: dict[str, Version | None] = {_AVERAGED: (0,)}  # for frameworks with versions of their own


def check(reading: Reading) -> list[Finding]:
    """What transformers' Trainer does with these settings, as of 5.22."""
    found: list[Finding] = []
    if "per_gpu_train_batch_size" in reading.given:
        size = reading.value("per_gpu_train_batch_size")
        found.append(
            error(
                "ignored-key",
                f"per_gpu_train_batch_size={size} is not read: the batch per device is per_device_train_batch_size, "
                f"{reading.value('per_device_train_batch_size', 8)} here. Write per_device_train_batch_size={size}.",
                "per_gpu_train_batch_size",
                (f"per_device_train_batch_size={size}",),
            )
        )
    if reading.on("auto_find_batch_size"):
        found.append(
            note(
                "changes-the-batch",
                "auto_find_batch_size=true makes per_device_train_batch_size smaller after out-of-memory and leaves "
                "gradient_accumulation_steps as it is: the global batch becomes smaller than the one shown.",
                "auto_find_batch_size",
            )
        )
    if not reading.on(_AVERAGED, reading.dialect.is_on(_AVERAGED, reading.version)):
        given = _AVERAGED in reading.given
        found.append(
            note(
                "mean-of-means",
                f"{_AVERAGED} is false{'' if given else ', the default before 4.54'}: each device divides by "
                "its own number of tokens, so the gradient is a mean of the devices' means and depends on how samples are "
                "spread.",
                _AVERAGED,
            )
        )
    return [*found, trainer_loss()]


def trainer_loss() -> Finding:
    """The note about losses in transformers' Trainer, and in frameworks that use it."""
    return note(
        "mean-of-means",
        "The Trainer divides by the tokens of the whole step only if the model's loss takes num_items_in_batch; other "
        "losses give a mean of the micro batches' means. `batchwright check FILE.py:function` measures it.",
    )


def write(job: Job, version: Version) -> dict[str, Any]:
    """The keys of TrainingArguments; the number of devices is the launcher's."""
    return job.named({key: name for key, name in KEYS.items() if not key.endswith("sp_size")})


DIALECTS = (
    Dialect(
        name="huggingface",
        title="Hugging Face",
        aliases=("hf", "transformers", "trainer"),
        keys=KEYS,
        special=frozenset({SPLIT}),
        resolve=resolve,
        signs=("output_dir", "logging_steps", "lr_scheduler_type"),
        checked=CHECKED,
        steps=STEPS,
        defaults={"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1},
        gradient={_AVERAGED: (4, 54)},
        versions=("4.53", "4.54"),
        beside=("deepspeed", "accelerate"),
        check=check,
        write=write,
        source="transformers 5.22: training_args.py, trainer.py",
    ),
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
