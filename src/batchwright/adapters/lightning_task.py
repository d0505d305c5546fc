"""What a LightningModule trains, as a task for `check`, `probe` and `estimate`, with the loss as Lightning scales it.

Lightning divides the loss of every micro batch by `accumulate_grad_batches`: the gradient is a mean of means, whatever a micro
batch contains. So the loss of a micro batch counts as it is, with the weight 1. A module of `exact` is weighed by its loader.
"""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from functools import cache
from inspect import signature
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from batchwright.core.errors import ConfigError
from batchwright.runtime.data.loader import default_collate
from batchwright.runtime.task import FrameworkTask, Loss, Task

from .additive import weighed
from .lightning import LABELS, Exact, Steps, loss_of


class Training(nn.Module):
    """A LightningModule whose forward is `training_step`, so that DDP sees it."""

    def __init__(self, module: LightningModule, trainer: Callable[[], Trainer]) -> None:
        super().__init__()
        self.module, self._trainer = module, trainer

    def forward(self, batch: Any) -> Tensor:
        return loss_of(self.step(batch))

    def step(self, batch: Any) -> Any:
        """`training_step` of the user's class, on one micro batch and without logging."""
        own: Any = super(Exact, self.module) if isinstance(self.module, Exact) else self.module
        run: Callable[..., Any] = own.training_step
        self.module.trainer = self._trainer()  # a copy of a module has none
        self.module.log = _unlogged  # there is no Trainer to log to
        try:
            return run(batch, 0) if len(signature(run).parameters) > 1 else run(batch)
        finally:
            del self.module.log


def task_of(module: LightningModule, data: Any) -> Task:
    """The task of a module and its train data: a DataLoader, `Steps`, or a LightningDataModule that has one of them."""
    if isinstance(data, LightningDataModule):
        data.prepare_data()
        data.setup("fit")
        data = data.train_dataloader()
    if not isinstance(data, (DataLoader, Steps)):
        raise ConfigError(
            f"the train data is a {type(data).__name__}. It must be a DataLoader, batchwright.adapters.lightning.Steps, or a "
            "LightningDataModule whose train_dataloader() returns one of them.",
            field="data",
            given=type(data).__name__,
        )
    collate = (data.collate if isinstance(data, Steps) else data.collate_fn) or default_collate
    weigh = weighed(data.weights if isinstance(data, Steps) else LABELS)
    if not module.automatic_optimization:
        raise ConfigError(
            "automatic_optimization=False: must be True. With manual optimization, training_step itself decides what a step is.",
            field="automatic_optimization",
            given=False,
        )

    def loss(model: nn.Module, batch: Any) -> Loss:
        if not isinstance(module, Exact):
            return model(batch), 1.0
        weight = weigh(model, batch)
        return model(batch) * weight, weight

    @cache
    def trainer() -> Trainer:
        """A Trainer that trains nothing, for a module that asks its Trainer: for the number of steps, or the epoch."""
        made = _quiet()
        made.strategy.connect(module)
        made._data_connector.attach_data(module, train_dataloaders=range(len(data)))  # pyright: ignore[reportPrivateUsage]
        return made

    def optimizer(parameters: Any) -> Optimizer:
        module.trainer = trainer()
        return _optimizer(module, parameters)

    rows = [data.dataset[i] for i in range(min(2, len(data.dataset)))]  # pyright: ignore[reportArgumentType]
    return FrameworkTask(
        model=Training(module, trainer),
        dataset=data.dataset,
        loss=loss,
        optimizer=optimizer,
        collate=collate,
        framework="lightning",
        partial_window=None if isinstance(module, Exact) else lambda: _partial_window(module, collate(rows)),
    )


def _unlogged(*_: Any, **__: Any) -> None:
    """In place of `LightningModule.log`."""


def _optimizer(module: LightningModule, parameters: Any) -> Optimizer:
    """The optimizer that the module configures, for other parameters."""
    found: Any = module.configure_optimizers()
    while not isinstance(found, Optimizer):
        found = found["optimizer"] if isinstance(found, Mapping) else found[0]
    takes = signature(type(found)).parameters
    return type(found)(parameters, **{name: value for name, value in found.defaults.items() if name in takes})


def _partial_window(module: LightningModule, batch: Any) -> float:
    """Let Lightning itself train one micro batch, as a whole step and as the first of two: the second gradient / the first."""
    whole, partial = (_gradient(module, batch, accumulate) for accumulate in (1, 2))
    return float(partial @ whole / (whole @ whole))


class _Recorder(Callback):
    def __init__(self) -> None:
        self.gradient = torch.zeros(0)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        grads = [p.grad.detach().double().flatten() for p in pl_module.parameters() if p.grad is not None]
        self.gradient = torch.cat(grads)


def _gradient(module: LightningModule, batch: Any, accumulate: int) -> Tensor:
    mine, recorder = copy.deepcopy(module), _Recorder()
    mine.configure_optimizers = lambda: torch.optim.SGD(mine.parameters(), lr=0.0)
    trainer = _quiet(accumulate_grad_batches=accumulate, callbacks=[recorder])
    with _silent():
        torch.manual_seed(0)  # the same dropout in both
        trainer.fit(mine, DataLoader([batch], batch_size=None))  # pyright: ignore[reportArgumentType]
    return recorder.gradient


def _quiet(**options: Any) -> Trainer:
    """A Trainer for one epoch on the CPU that prints and saves nothing."""
    shown = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    with _silent():
        return Trainer(
            accelerator="cpu", devices=1, max_epochs=1, limit_val_batches=0, **dict.fromkeys(shown, False), **options
        )


@contextmanager
def _silent() -> Generator[None]:
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
