"""DeepSpeed's JSON: `train_batch_size` = `train_micro_batch_size_per_gpu` × `gradient_accumulation_steps` × ranks."""

from __future__ import annotations

from typing import Any

from .record import Dialect, Finding, Job, Reading, Version, error, note

KEYS = {
    "train_batch_size": "global_batch_size",
    "train_micro_batch_size_per_gpu": "micro_batch_size",
    "gradient_accumulation_steps": "accumulation_steps",
}


def _check(reading: Reading) -> list[Finding]:
    found: list[Finding] = []
    filled_in = [key for key in KEYS if key in reading.filled_in]
    if filled_in:
        found.append(
            note(
                "missing-key",
                f"{', '.join(filled_in)}: auto. transformers' Trainer or Accelerate gives the values: check its configuration "
                "together with this file.",
                filled_in[0],
            )
        )
    if not {"train_batch_size", "train_micro_batch_size_per_gpu"} & {*reading.given, *filled_in}:
        found.append(
            error(
                "missing-key",
                "Neither train_batch_size nor train_micro_batch_size_per_gpu is given: DeepSpeed needs one of them.",
                "train_batch_size",
            )
        )
    if "elasticity.enabled" in reading.given:
        found += _elasticity(reading)
    if str(reading.value("gradient_accumulation_steps", 1)) != "1":
        found.append(mean_of_micro_batches("DeepSpeed"))
    return found


def _elasticity(reading: Reading) -> list[Finding]:
    """Elastic batches: removed in 0.19.8, and exclusive with a batch before."""
    if reading.version >= (0, 19, 8):
        return [
            error(
                "unknown-key",
                "elasticity: DeepSpeed 0.19.8 and later refuse it. Give train_batch_size, train_micro_batch_size_per_gpu and "
                "gradient_accumulation_steps.",
                "elasticity.enabled",
            )
        ]
    if not reading.on("elasticity.enabled"):
        return []
    found = [
        note(
            "changes-the-batch",
            "elasticity chooses the batch from max_train_batch_size and micro_batch_sizes by the number of GPUs.",
            "elasticity.enabled",
        )
    ]
    batch = [key for key in KEYS if key in reading.given]
    if batch and not reading.on("elasticity.ignore_non_elastic_batch_info"):
        found.append(
            error(
                "excluded-key",
                f"elasticity.enabled and {', '.join(batch)}: DeepSpeed refuses both. Leave the batch out, or set "
                "elasticity.ignore_non_elastic_batch_info.",
                batch[0],
            )
        )
    return found


def mean_of_micro_batches(title: str) -> Finding:
    """The note about engines that divide each micro batch's loss by the number of micro batches."""
    return note(
        "mean-of-means",
        f"{title} divides the loss of each micro batch by the number of micro batches: with a mean over tokens, the gradient "
        "is a mean of the micro batches' means.",
    )


def _write(job: Job, version: Version) -> dict[str, Any]:
    """All three, where the number of ranks is known: DeepSpeed checks that they fit its world."""
    return job.named(KEYS)


DIALECTS = (
    Dialect(
        name="deepspeed",
        title="DeepSpeed",
        keys=KEYS,
        common=frozenset({"gradient_accumulation_steps"}),
        signs=("zero_optimization.", "bf16.enabled", "fp16.enabled", "steps_per_print", "wall_clock_breakdown"),
        checked=frozenset({"elasticity.enabled", "elasticity.ignore_non_elastic_batch_info"}),
        steps={"scheduler.params.warmup_num_steps": "warmup", "steps_per_print": "log"},
        needs={"scheduler.params.warmup_num_steps": "scheduler.type"},
        versions=("0.19.7", "0.19.8"),
        accumulates_once=True,
        check=_check,
        write=_write,
        form="json",
        source="DeepSpeed 0.19.8: runtime/config.py",
    ),
)
