"""The `Task`: what a user's file gives to probe, estimate, check and run, which all take `FILE.py:function`.

def task() -> Task:
    return Task(
        model=GPT(...),                                   # a module, or a function that builds one
        dataset=dataset,                                  # map-style: len() and [i]
        loss=lambda model, batch: (loss_sum, weight),     # a sum, and the weight that it is divided by
        optimizer=lambda params: torch.optim.AdamW(params, lr=3e-4),
    )
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn
from torch.optim import Optimizer

from batchwright.core.errors import BatchwrightError, ConfigError, RunError, Violation, raise_violations
from batchwright.processes.endings import error_record, users_code
from batchwright.processes.target import call_target
from batchwright.rundir.files import read_json, write_json

from .state.generators import set_seeds

Loss = tuple[Tensor, Tensor | float] | tuple[Tensor, Tensor | float, Tensor | None]


@dataclass(frozen=True)
class Task:
    """What to train: a model, a dataset, a loss that returns a sum and its weight, and an optimizer factory.

    >>> import torch
    >>> task = Task(
    ...     model=lambda: nn.Linear(2, 1),
    ...     dataset=[torch.ones(2)] * 8,
    ...     loss=lambda model, batch: (model(batch).sum(), len(batch)),
    ...     optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    ... )
    >>> same = torch.equal(task.build_model(seed=1).weight, task.build_model(seed=1).weight)
    >>> same, len(task.dataset)
    (True, 8)
    """

    model: nn.Module | Callable[[], nn.Module]
    dataset: Any  # map-style: len() and [i]
    loss: Callable[[nn.Module, Any], Loss]  # (loss_sum, weight) or (loss_sum, weight, auxiliary_mean)
    optimizer: Callable[[Any], Optimizer]
    collate: Callable[[list[Any]], Any] | None = None  # None: torch's default_collate
    example_batch: Callable[[int], Any] | None = None  # micro_batch_size -> a batch, to probe without the dataset
    stage: Callable[[int, int], nn.Module] | None = (
        None  # (i, n) -> stage i of n; None: a pipeline splits the model itself
    )

    def __post_init__(self) -> None:
        map_style = hasattr(self.dataset, "__len__") and hasattr(self.dataset, "__getitem__")
        checks = (
            ("model", callable(self.model), "a module, or a function without arguments that builds one"),
            (
                "dataset",
                map_style,
                "map-style: len() and [i]. A stream has no positions to resume from: index it first",
            ),
            ("loss", callable(self.loss), "a function of (model, batch)"),
            ("optimizer", callable(self.optimizer), "a function of parameters: lambda params: AdamW(params)"),
            ("collate", self.collate is None or callable(self.collate), "a function of a list of samples"),
            (
                "example_batch",
                self.example_batch is None or callable(self.example_batch),
                "a function of micro_batch_size",
            ),
            ("stage", self.stage is None or callable(self.stage), "a function of (stage, stages) that builds a module"),
        )
        faults = [(name, type(getattr(self, name)).__name__, wanted) for name, valid, wanted in checks if not valid]
        raise_violations(
            ConfigError,
            [
                Violation(f"Task.{name} has type {kind}. It must be {wanted}.", name, kind)
                for name, kind, wanted in faults
            ],
        )

    @classmethod
    def from_trainer(cls, trainer: Any) -> Task:
        """What a Trainer of transformers trains, with the loss as that Trainer scales it."""
        from batchwright.adapters.huggingface_task import task_of

        return task_of(trainer)

    @classmethod
    def from_lightning(cls, module: Any, data: Any) -> Task:
        """What a LightningModule trains on a loader or a LightningDataModule, with the loss as Lightning scales it."""
        from batchwright.adapters.lightning_task import task_of

        return task_of(module, data)

    def build_model(self, seed: int) -> nn.Module:
        """Return the model; if it is a function, seed torch, numpy and random, then call it."""
        if isinstance(self.model, nn.Module):
            return self.model
        set_seeds(seed)
        model = cast(object, self.model())
        if not isinstance(model, nn.Module):
            raise RunError(
                f"Task.model() returned {type(model).__name__}, not a torch.nn.Module.",
                field="model",
                given=type(model).__name__,
            )
        return model

    def loss_of(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor | float, Tensor | None]:
        """Call the loss and check what it returns: a sum, its weight, and an auxiliary mean or None."""
        returned = cast(object, self.loss(model, batch))
        values: tuple[Any, ...] = cast("tuple[Any, ...]", returned) if isinstance(returned, tuple) else ()
        if len(values) not in (2, 3) or not isinstance(values[0], Tensor):
            shape = f"{len(values)} values" if isinstance(returned, tuple) else f"a {type(returned).__name__}"
            raise RunError(
                f"Task.loss returned {shape}. It must return (loss_sum, weight) or (loss_sum, weight, auxiliary_mean): a "
                "sum, not a mean, and the weight to divide it by.",
                field="loss",
                given=type(cast(object, returned)).__name__,
            )
        weight: Any = values[1]
        auxiliary: Any = values[2] if len(values) == 3 else None
        checks: tuple[tuple[str, Any, bool], ...] = (
            ("weight", weight, isinstance(weight, (int, float, Tensor)) or hasattr(weight, "__float__")),
            ("auxiliary_mean", auxiliary, auxiliary is None or isinstance(auxiliary, (int, float, Tensor))),
        )
        for name, value, valid in checks:
            shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) and value.numel() != 1 else ""
            if not valid or shape:
                raise RunError(
                    f"Task.loss returned a {name} of type {type(value).__name__}{shape}. It must be a number, or a tensor "
                    "with one element.",
                    field=name,
                    given=type(value).__name__,
                )
        return values[0], cast("Tensor | float", weight), cast("Tensor | None", auxiliary)


@dataclass(frozen=True)
class FrameworkTask(Task):
    """The task of a trainer: `check` says what to change in its framework."""

    framework: str = ""
    partial_window: Callable[[], float] | None = None  # the gradient of a step with 1 of 2 micro batches, as a factor


def load_task(target: str, args: Mapping[str, Any] | None = None) -> Task:
    """Call the function that `FILE.py:function` names (default: `task`) and return its Task, or that of a trainer.

    >>> load_task("missing.py:task")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    batchwright.core.errors.ConfigError: task file missing.py does not exist (looked for it at ...).
    """
    return call_target(target, dict(args or {}), Task, "batchwright.runtime.Task", _as_task)


def write_dataset_size(request_file: str, result_file: str) -> None:
    """Load the task that one file names and write the length of its dataset, or the error, to the other."""
    request = read_json(Path(request_file))
    try:
        task = load_task(request["target"], request["arguments"])
        with users_code("the length of Task.dataset is not known"):
            result: dict[str, Any] = {"dataset_size": len(task.dataset)}
    except BatchwrightError as error:
        result = {"error": error_record(error)}
        print(result["error"]["traceback"] or "", file=sys.stderr)
    write_json(Path(result_file), result, sync=False)


def _as_task(made: object) -> object:
    """A trainer, or a LightningModule and its data, as a task; anything else as it is.

    Nothing is imported that the user's file did not import.
    """
    several = cast("tuple[object, ...]", made) if isinstance(made, tuple) else ()
    if len(several) == 2 and ("lightning", "LightningModule") in _classes(several[0]):
        return Task.from_lightning(*several)
    other = cast(object, made)
    return Task.from_trainer(other) if ("transformers", "Trainer") in _classes(other) else other


def _classes(made: object) -> set[tuple[str, str]]:
    """The top package and the name of every class that an object is of."""
    return {(c.__module__.partition(".")[0], c.__name__) for c in type(made).__mro__}
