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

import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from torch import Tensor, nn
from torch.optim import Optimizer

from batchwright.core.errors import BatchwrightError, ConfigError, RunError, Violation, raise_violations
from batchwright.processes.endings import users_traceback
from batchwright.processes.target import check_arguments, no_function, split_target, task_file

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
        )
        faults = [(name, type(getattr(self, name)).__name__, wanted) for name, valid, wanted in checks if not valid]
        raise_violations(
            ConfigError,
            [
                Violation(f"Task.{name} has type {kind}. It must be {wanted}.", name, kind)
                for name, kind, wanted in faults
            ],
        )

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


def load_task(target: str, args: Mapping[str, Any] | None = None) -> Task:
    """Call the function that `FILE.py:function` names (default: `task`) and return its Task.

    >>> load_task("missing.py:task")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    batchwright.core.errors.ConfigError: task file missing.py does not exist (looked for it at ...).
    """
    path, name = task_file(target)
    file, path = split_target(target)[0], path.resolve()
    module = _import(path)
    function = getattr(module, name, None)
    if not callable(function):
        own = [n for n, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == module.__name__]
        raise no_function(target, file, name, own)
    arguments = dict(args or {})
    check_arguments(f"{file}:{name}", function, arguments)
    with users_code(f"{file}:{name} failed", str(path)):
        task = function(**arguments)
    if not isinstance(task, Task):
        raise RunError(
            f"{file}:{name} returned {type(task).__name__}, not a batchwright.runtime.Task.",
            field="task",
            given=type(task).__name__,
        )
    return task


@contextmanager
def users_code(failure: str, given: str | None = None) -> Generator[None]:
    """Run a user's code: raise RunError from any exception, and cut its traceback to begin in the user's code."""
    try:
        yield
    except BatchwrightError:
        raise
    except (Exception, SystemExit) as error:
        cause = error.with_traceback(users_traceback(error))
        raise RunError(f"{failure}: {type(error).__name__}: {error}", field="task", given=given) from cause


def _import(path: Path) -> ModuleType:
    """Import a file under a unique module name, so that a user's `random.py` replaces no other module."""
    name = f"batchwright_task_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} is not a Python file.", field="task", given=str(path))
    module = importlib.util.module_from_spec(spec)
    # As with `python FILE.py`, the file may import modules of its own folder.
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    sys.modules[name] = module  # dataclasses and pickle look the module up by name
    try:
        with users_code(f"{path.name} cannot be imported", str(path)):
            spec.loader.exec_module(module)
    except RunError:
        del sys.modules[name]
        raise
    return module
