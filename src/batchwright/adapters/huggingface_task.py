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

from .additive import weighed
from .huggingface import Exact, data_of, weights_of


def task_of(trainer: Trainer) -> Task:
    """What a Trainer trains, with the loss as the Trainer scales it: `check` then names what a split changes.

    A stock Trainer passes `num_items_in_batch` to a model that takes keywords, adds the losses of the micro batches, and
    divides by their number only if it did not pass it. So the loss of a micro batch counts as `loss × items`, its weight as
    its items; a model that ignores `num_items_in_batch` returns a mean there. `items` is a constant: that of a step.
    """
    data, collate = data_of(trainer)
    ours, candidates, settings = isinstance(trainer, Exact), weights_of(trainer), trainer.args
    weigh = weighed(candidates)
    if settings.gradient_checkpointing:  # `train` switches it on
        options = settings.gradient_checkpointing_kwargs
        trainer.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)

    def collated(rows: list[Any]) -> Any:
        return collate([dict(row) if isinstance(row, Mapping) else row for row in rows])  # a collator may change rows

    sample = [data[i] for i in range(min(8, len(data)))]
    first = collated(sample)
    labelled = isinstance(first, Mapping) and "labels" in first
    passes = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
    step = settings.train_batch_size * settings.gradient_accumulation_steps * settings.world_size
    items = max(1, round(float(candidates[0](first)) / len(sample) * step)) if labelled or ours else step
    passed = torch.tensor(items) if labelled and passes and not ours else None
    scaled = trainer.loss_is_scaled_for_ga
    if scaled is None:
        scaled = (trainer.model_accepts_loss_kwargs and passed is not None) or trainer.compute_loss_func is not None

    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor | float]:
        def mean(batch: Any) -> Any:
            with trainer.accelerator.autocast():
                return trainer.compute_loss(model, copy.copy(batch), num_items_in_batch=passed)

        weight = weigh(mean, batch) if labelled or ours else 1.0
        if ours:
            return mean(batch) * weight, weight
        return (mean(batch) * items, weight) if scaled else (mean(batch), 1.0)

    kind, options = Trainer.get_optimizer_cls_and_kwargs(settings, trainer.model)
    return FrameworkTask(
        model=trainer.model,
        dataset=data,
        loss=loss,
        optimizer=lambda parameters: kind(parameters, **options),
        collate=collated,
        framework="transformers",
    )
