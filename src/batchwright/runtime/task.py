"""What training code hands over: a `Task` where batchwright runs the loop, batches where it keeps its own.

Probe, estimate, check and run all take `FILE.py:function`, a function that returns a `Task`:

    def task() -> Task:
        return Task(
            model=GPT(...),                                   # a module, or a function that builds one
            dataset=dataset,                                  # map-style: len() and [i]
            loss=lambda model, batch: (loss_sum, weight),     # a sum, what it is a sum over, optionally a mean beside it
            optimizer=lambda params: torch.optim.AdamW(params, lr=3e-4),
        )

A loop of one's own uses `accumulate` (step.py) on the loader's micro batches, or on `windows(loader, k)` of any loader.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import inspect
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from batchwright.core.errors import ConfigError, PlanError, RunError, Violation, raise_violations
from batchwright.core.ramp.schedule import Step
from batchwright.processes.target import did_you_mean, no_function, task_file

Loss = tuple[Tensor, Tensor | float] | tuple[Tensor, Tensor | float, Tensor | None]


@dataclass(frozen=True)
class Task:
    """What to train: a model, its samples, a loss that is a sum with its weight, and an optimizer factory.

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
    loss: Callable[[nn.Module, Any], Loss]  # a sum, what it is a sum over, and optionally an auxiliary mean
    optimizer: Callable[[Any], Optimizer]
    collate: Callable[[list[Any]], Any] | None = None  # default: torch's
    example_batch: Callable[[int], Any] | None = None  # micro_batch_size -> a batch, for probing without the dataset

    def __post_init__(self) -> None:
        kinds = {name: type(getattr(self, name)).__name__ for name in self.__dataclass_fields__}
        faults = (
            (not callable(self.model), "model", "a module, or a function without arguments that builds one"),
            (not (hasattr(self.dataset, "__len__") and hasattr(self.dataset, "__getitem__")), "dataset",
             "map-style: len() and [i]. A stream has no positions to continue from; index it first"),
            (not callable(self.loss), "loss", "a function of (model, batch)"),
            (not callable(self.optimizer), "optimizer", "a function of parameters: lambda params: AdamW(params)"),
            (not (self.collate is None or callable(self.collate)), "collate", "a function of a list of samples"),
            (not (self.example_batch is None or callable(self.example_batch)), "example_batch",
             "a function of micro_batch_size"),
        )  # fmt: skip
        raise_violations(ConfigError, [
            Violation(f"Task.{name} is of type {kinds[name]}. It has to be {wanted}.", name, kinds[name])
            for wrong, name, wanted in faults if wrong
        ])  # fmt: skip

    def build_model(self, seed: int) -> nn.Module:
        """The model; when it is a function, seed torch, numpy and random before calling it."""
        if isinstance(self.model, nn.Module):
            return self.model
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        model = self.model()
        if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise RunError(
                f"Task.model() returned {type(model).__name__}, not a torch.nn.Module.",
                field="model",
                given=type(model).__name__,
            )
        return model

    def loss_of(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor | float, Tensor | None]:
        """The loss's three values, checked: sum, weight and auxiliary mean (or None); made for `step.backward(*…)`."""
        returned = self.loss(model, batch)
        if not (isinstance(returned, tuple) and len(returned) in (2, 3) and isinstance(returned[0], Tensor)):
            shape = f"{len(returned)} values" if isinstance(returned, tuple) else f"a {type(returned).__name__}"
            raise RunError(
                f"Task.loss returned {shape}. It has to return (loss_sum, weight) or (loss_sum, weight, "
                "auxiliary_mean): a sum, not a mean, and what it is a sum over.",
                field="loss",
                given=type(returned).__name__,
            )
        return returned[0], returned[1], returned[2] if len(returned) == 3 else None


def load_task(target: str, args: Mapping[str, Any] | None = None) -> Task:
    """Call the function that `FILE.py:function` names (`task` when it names none) and return its Task.

    >>> load_task("missing.py:task")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    batchwright.core.errors.ConfigError: task file missing.py does not exist (looked for it at ...).
    """
    path, name = task_file(target)
    file, path = target.removesuffix(f":{name}"), path.resolve()
    module = _import(path)
    function = getattr(module, name, None)
    if not callable(function):
        own = [n for n, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == module.__name__]
        raise no_function(target, file, name, own)
    arguments = dict(args or {})
    _check_arguments(f"{file}:{name}", function, arguments)
    task = _users(path, f"{file}:{name} failed", lambda: function(**arguments))
    if not isinstance(task, Task):
        raise RunError(
            f"{file}:{name} returned {type(task).__name__}, not a batchwright.runtime.Task.",
            field="task",
            given=type(task).__name__,
        )
    return task


def _import(path: Path) -> ModuleType:
    """Import a file under a name of its own, so that a user's `random.py` replaces nothing, beside its neighbours."""
    name = f"batchwright_task_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} is not a Python file.", field="task", given=str(path))
    module = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:  # as `python FILE.py` has it: the file may import its neighbours
        sys.path.insert(0, str(path.parent))
    sys.modules[name] = module  # dataclasses and pickle look the module up by name
    try:
        _users(path, f"{path.name} cannot be imported", lambda: spec.loader.exec_module(module))  # pyright: ignore
    except RunError:
        del sys.modules[name]
        raise
    return module


def _users(path: Path, what: str, call: Callable[[], Any]) -> Any:
    """Run a user's code; what it raises becomes the cause of a RunError, its traceback cut to begin in their file."""
    try:
        return call()
    except (Exception, SystemExit) as error:
        trace: TracebackType | None = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != str(path):
            trace = trace.tb_next
        cause = error.with_traceback(trace or error.__traceback__)
        raise RunError(f"{what}: {type(error).__name__}: {error}", field="task", given=str(path)) from cause


def _check_arguments(target: str, function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    parameters = inspect.signature(function).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    needed = {n for n, p in parameters.items() if p.default is p.empty and p.kind is not p.VAR_POSITIONAL}
    faults = [
        Violation(f"{target} takes no argument {n!r}; it takes: {', '.join(parameters) or 'none'}."
                  f"{did_you_mean(_near(n, parameters))}", "arg", n, _near(n, parameters))
        for n in arguments if n not in parameters
    ]  # fmt: skip
    faults += [
        Violation(f"{target} needs the argument {n!r}: --arg {n}=...", "arg", None, (n,))
        for n in sorted(needed - set(arguments))
    ]
    raise_violations(ConfigError, faults)


def _near(name: str, names: Iterable[str]) -> tuple[str, ...]:
    return tuple(difflib.get_close_matches(name, list(names), n=2))


class MicroBatch(Protocol):
    """What the step asks of a micro batch: the loader's `Micro` has it, and `windows` gives it to any loader's."""

    @property
    def data(self) -> Any: ...
    @property
    def step(self) -> Step: ...
    @property
    def index(self) -> int: ...
    @property
    def count(self) -> int: ...
    @property
    def ids(self) -> Any: ...
    @property
    def filler(self) -> bool: ...


@dataclass(frozen=True)
class Window:
    """A batch of an ordinary loader as micro batch `index` of `count`; `ids` counts the samples of that loader."""

    data: Any
    step: Step
    index: int
    count: int
    ids: range
    filler: bool = False


def windows(
    loader: Iterable[Any],
    accumulation_steps: int,
    *,
    first_step: int = 0,
    start_sample: int = 0,
    first_index: int = 0,
    data_parallel_size: int = 1,
    samples: Callable[[Any], int] | None = None,
) -> Iterator[Window]:
    """Every `accumulation_steps` batches of any loader as the micro batches of one step.

    The last window may be partial: what becomes of it is the accumulator's `partial`. To complete a carried one, pass
    `first_index=accumulator.pending`. `samples` counts a batch; by default the length of its first tensor.

    >>> [(m.step.step, m.index, len(m.ids)) for m in windows(["ab", "cd", "e"], 2, samples=len)]
    [(0, 0, 2), (0, 1, 2), (1, 0, 1)]
    """
    if not 0 <= first_index < accumulation_steps:
        raise PlanError(
            f"first_index={first_index} is not a micro step: accumulation_steps={accumulation_steps} counts from 0 to "
            f"{accumulation_steps - 1}.",
            field="first_index",
            given=first_index,
            nearest=(0,),
        )
    count, index, position = samples or leading_size, first_index, start_sample
    step: Step | None = None
    for batch in loader:
        size = count(batch)
        if step is None:
            declared = size * (accumulation_steps - index) * data_parallel_size
            step = Step(first_step, position, declared, 0)
        yield Window(batch, step, index, accumulation_steps, range(position, position + size))
        position, index = position + size * data_parallel_size, index + 1
        if index == accumulation_steps:
            step, index, first_step = None, 0, first_step + 1


def leading_size(batch: Any) -> int:
    """The samples in a batch: the length of the first thing in it that has a shape.

    >>> import torch
    >>> leading_size({"tokens": torch.zeros(4, 128), "mask": torch.zeros(4, 128)})
    4
    """
    if getattr(batch, "shape", ()):
        return int(batch.shape[0])
    inner = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, Sequence) else ()
    for member in inner if not isinstance(batch, str) else ():
        return leading_size(member)
    raise RunError(
        f"cannot count the samples in a batch of type {type(batch).__name__}: it has no shape. Pass samples=, a "
        "function that counts them.",
        field="samples",
    )


class Feed:
    """An iterator that can be asked what comes next; within a step that is at most one micro batch ahead.

    >>> feed = Feed(windows([torch.ones(1), torch.ones(1)], 1))
    >>> feed.continues(feed.take().step)  # the second batch is a step of its own
    False
    """

    def __init__(self, micros: Iterable[MicroBatch]) -> None:
        self._micros = iter(micros)
        self._next: MicroBatch | None = None

    def peek(self) -> MicroBatch | None:
        """The next micro batch, left where it is; None at the end."""
        if self._next is None:
            self._next = next(self._micros, None)
        return self._next

    def continues(self, plan: Step) -> bool:
        """Whether the next micro batch belongs to the same step."""
        following = self.peek()
        # The same object unless a worker sent it: comparing fields would be half of what a micro step costs here.
        return following is not None and (following.step is plan or following.step == plan)

    def take(self) -> MicroBatch:
        """The next micro batch."""
        micro, self._next = self.peek(), None
        if micro is None:
            raise RunError("the micro batches ended where one was due.")
        return micro
