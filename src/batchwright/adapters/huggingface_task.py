"""What `check`, `probe` and `estimate` see of a Trainer: its model, its data, and its loss as it scales it."""

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportArgumentType=false, reportOptionalMemberAccess=false
# transformers' annotations are incomplete.

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer

from batchwright.runtime.task import FrameworkTask, Task

from .additive import labels_that_count
from .huggingface import Exact, data_of


def task_of(trainer: Trainer) -> Task:
    """What a Trainer trains, with the loss as the Trainer scales it: `check` then names what a split changes.

    A stock Trainer passes `num_items_in_batch` to a model that takes keywords, adds the losses of the micro batches, and
    divides by their number only if it did not pass it. So the loss of a micro batch counts as `loss × items`, its weight as
    its items; a model that ignores `num_items_in_batch` returns a mean there. `items` is a constant: that of a step.
    """
    data, collate = data_of(trainer)
    ours = isinstance(trainer, Exact)
    weigh = trainer._weight if ours else labels_that_count(trainer._loss_shifts_labels)

    def collated(rows: list[Any]) -> Any:
        return collate([dict(row) if isinstance(row, Mapping) else row for row in rows])  # a collator may change rows

    sample = [data[i] for i in range(min(8, len(data)))]
    first = collated(sample)
    labelled = isinstance(first, Mapping) and "labels" in first
    passes = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
    step = trainer.args.train_batch_size * trainer.args.gradient_accumulation_steps * trainer.args.world_size
    items = max(1, round(float(weigh(first)) / len(sample) * step)) if labelled or ours else step
    passed = torch.tensor(items) if labelled and passes and not ours else None
    scaled = trainer.loss_is_scaled_for_ga
    if scaled is None:
        scaled = (trainer.model_accepts_loss_kwargs and passed is not None) or trainer.compute_loss_func is not None

    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor | float]:
        weight = weigh(batch) if labelled or ours else 1.0
        inputs = copy.copy(batch)
        mean: Any = trainer.compute_loss(model, inputs, num_items_in_batch=passed)
        if ours:
            return mean * weight, weight
        return (mean * items, weight) if scaled else (mean, 1.0)

    kind, settings = Trainer.get_optimizer_cls_and_kwargs(trainer.args, trainer.model)
    return FrameworkTask(
        model=trainer.model,
        dataset=data,
        loss=loss,
        optimizer=lambda parameters: kind(parameters, **settings),
        collate=collated,
        framework="transformers",
    )
