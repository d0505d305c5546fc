"""The stages of a pipeline that one rank holds: how they are built, what their parameters are called in the whole model.

A task gives its stages by a function (`Task.stage`), or its model is split here:

    a Sequential         into slices with about equally many parameters
    any other module     before repeated blocks (the largest ModuleList), by torch's tracer, for one shape of input

Parameters keep the names that they have in the whole model. So a checkpoint of any number of stages loads on any other, and
into the whole model. A weight that two stages would train as two copies is refused.
"""

# pyright: reportUnknownMemberType=false
# torch's annotations are incomplete.

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from batchwright.core.errors import ConfigError, RunError
from batchwright.processes.endings import users_code

from .state import generators
from .task import Task


class Stages(nn.Module):
    """The modules of this rank's stages, as one module. `full_names` maps its parameters' names to those of the whole model.

    If two stages use a name for different parameters, as slices that count from 0 do, all names get the stage before them,
    and a checkpoint loads on as many stages only. A buffer that several stages hold with one name and one value, such as the
    frequencies of rotary embeddings, is stored once.
    """

    def __init__(self, modules: Sequence[nn.Module], indices: Sequence[int], stages: int, group: Any) -> None:
        super().__init__()
        self.parts = nn.ModuleList(modules)
        self.group, self.indices = group, list(indices)
        own = {index: dict(_contents(part)) for index, part in self._plain()}
        held: dict[str, list[str]] = {}
        for of_rank in self.gathered(own):
            for contents in of_rank.values():
                for name, content in contents.items():
                    held.setdefault(name, []).append(content)
        self.unique = all(len(found) == 1 or set(found) == {found[0]} != {""} for found in held.values())
        self.shared = sorted(name for name, found in held.items() if self.unique and len(found) > 1)
        self.full_names = {
            f"parts.{place}.{name}": name if self.unique else f"stage{index}of{stages}.{name}"
            for place, (index, contents) in enumerate(own.items())
            for name in contents
        }

    def renamed(self, state: dict[str, Any], *, back: bool = False) -> dict[str, Any]:
        """The state of the module and its optimizers with the whole model's names; `back`: with this module's."""
        # Two stages of this rank may hold a buffer of one name.
        pairs = [(full, own) if back else (own, full) for own, full in self.full_names.items()]
        names = dict(pairs)

        def mapped(values: Mapping[str, Any]) -> dict[str, Any]:
            return {new: values[old] for old, new in pairs if old in values}

        of_optimizer = state["optimizer"]
        groups = [{**group, "params": [names[n] for n in group["params"]]} for group in of_optimizer["param_groups"]]
        renamed = {**of_optimizer, "state": mapped(of_optimizer["state"]), "param_groups": groups}
        return {"model": mapped(state["model"]), "optimizer": renamed}

    def check_shared(self) -> None:
        """Raise an error on all ranks if a buffer that is stored once no longer has one value."""
        if not self.shared:
            return
        own = [(name, content) for _, part in self._plain() for name, content in _contents(part) if name in self.shared]
        values: dict[str, set[str]] = {}
        for name, content in (each for of_rank in self.gathered(own) for each in of_rank):
            values.setdefault(name, set()).add(content)
        if changed := [name for name, found in values.items() if len(found) > 1]:
            raise RunError(
                f"the buffer {changed[0]} had one value in all stages that hold it, and now has {len(values[changed[0]])}: a "
                "checkpoint would keep one of them. Give it a name of its own in each stage, or register it with "
                "persistent=False.",
                field="stage",
                given=changed[0],
            )

    def trainable(self) -> dict[int, dict[str, int]]:
        """The elements of every parameter that is trained, by name, of all stages."""
        own = {i: {n: p.numel() for n, p in part.named_parameters() if p.requires_grad} for i, part in self._plain()}
        return {index: found for of_rank in self.gathered(own) for index, found in of_rank.items()}

    def _plain(self) -> Iterator[tuple[int, nn.Module]]:
        """The number of each stage of this rank, and its module without DDP."""
        for index, part in zip(self.indices, self.parts, strict=True):
            yield index, cast(nn.Module, part.module) if isinstance(part, DistributedDataParallel) else part

    def described(self) -> list[tuple[str, tuple[int, ...], str]]:
        """Name, shape and type of every parameter of the whole model, in the order of stages."""
        own: dict[int, list[tuple[str, tuple[int, ...], str]]] = {}
        for index, part in self._plain():
            own[index] = [(name, tuple(p.shape), str(p.dtype)) for name, p in part.named_parameters()]
        every = {index: listed for found in self.gathered(own) for index, listed in found.items()}
        return [parameter for index in sorted(every) for parameter in every[index]]

    def gathered(self, value: Any) -> list[Any]:
        """The values of all ranks of the pipeline."""
        found: list[Any] = [None] * dist.get_world_size(self.group)
        cast(Any, dist).all_gather_object(found, value, group=self.group)
        return found


def _contents(part: nn.Module) -> Iterator[tuple[str, str]]:
    """What a checkpoint has of a stage: names, each with a digest if it is a buffer, and without one if it is a parameter."""
    parameters = {name for name, _ in part.named_parameters(remove_duplicate=False)}
    for name, value in part.state_dict().items():
        digest = ""
        if isinstance(value, Tensor) and name not in parameters:
            data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            digest = f"{value.dtype} {tuple(value.shape)} {sha256(data).hexdigest()}"
        yield name, digest


def refuse_tied(task: Task, model: Stages) -> str | None:
    """Raise an error on all ranks if stages of `Task.stage` hold a weight that is one in `Task.model`: each would train its own
    copy. Return a note if that is not known, because the model cannot be built without memory.

    Names do not show it: the stages may use two names for it, and stages that count from 0 use one name for different weights.
    So elements are counted. A stage that leaves out as many as another one has twice is not found; `check` finds that.
    """
    stages, said = model.trainable(), ("", "")
    if dist.get_rank(model.group) == 0:
        said = _tied(task, stages)
    fault, note = model.gathered(said)[0]
    if fault:
        raise ConfigError(fault, field="stage")
    return note or None


def _tied(task: Task, stages: Mapping[int, Mapping[str, int]]) -> tuple[str, str]:
    try:
        with generators.put_back(), torch.device("meta"):
            whole = task.model if isinstance(task.model, nn.Module) else task.model()
            named = dict(cast(Any, whole).named_parameters(remove_duplicate=False))
    except Exception as error:
        return "", (
            f"Whether stages share a weight was not checked: Task.model cannot be built on torch's meta device "
            f"({type(error).__name__}: {error!s:.200}). batchwright check with --pipeline-parallel compares the gradients."
        )
    expected = sum({id(p): p.numel() for p in named.values() if p.requires_grad}.values())
    found = sum(size for held in stages.values() for size in held.values())
    if found <= expected:
        return "", ""
    holders: dict[int, list[str]] = {}
    for index, held in sorted(stages.items()):
        for name in held:
            if name in named:
                holders.setdefault(id(named[name]), []).append(f"{name} of stage {index}")
    twice = [" and ".join(of_one) for of_one in holders.values() if len(of_one) > 1]
    which = f": {twice[0]} are one weight in Task.model" if twice else ""
    return (
        f"the stages of Task.stage train {found:,} elements, and Task.model has {expected:,}{which}. Each stage would train its "
        "own copy of a weight that is shared. Untie it in Task.model, or use it in one stage only."
    ), ""


def build_stages(task: Task, seed: int, indices: Sequence[int], stages: int, example: Any) -> list[nn.Module]:
    """The modules of the stages `indices` of `stages`; `example()` gives (args, kwargs) of the model, for torch's tracer."""
    if task.stage is None:
        parts = split(task.build_model(seed), stages, example)
        return [parts[index] for index in indices]
    made: list[nn.Module] = []
    for index in indices:
        # Each stage draws its own first weights.
        generators.seed_rank(seed, index, stages)
        with users_code("Task.stage failed"):
            module = cast(object, task.stage(index, stages))
        if not isinstance(module, nn.Module):
            raise RunError(
                f"Task.stage({index}, {stages}) returned {type(module).__name__}, not a torch.nn.Module.",
                field="stage",
                given=type(module).__name__,
            )
        made.append(module)
    return made


def split(model: nn.Module, stages: int, example: Any = None) -> list[nn.Module]:
    """The stages of a model, with the names of its parameters.

    >>> [len(list(s.parameters())) for s in split(nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2)), 2)]
    [2, 2]
    """
    parts = _slices(model, stages) if isinstance(model, nn.Sequential) else _traced(model, stages, example)
    holders: dict[int, int] = {}
    for index, part in enumerate(parts):
        for name, parameter in part.named_parameters():
            if holders.setdefault(id(parameter), index) != index:
                raise ConfigError(
                    f"{name} is in stages {holders[id(parameter)]} and {index}: each would train its own copy of a weight that "
                    "is shared. Untie it, or use it in one stage only (Task.stage).",
                    field="model",
                    given=name,
                )
    return parts


def _even(weights: Sequence[int], stages: int) -> list[int]:
    """The first member of each stage, so that their weights are about equal and none is empty."""
    total, starts, sum_before = sum(weights) or 1, [0], 0
    for index, weight in enumerate(weights):
        left = stages - len(starts)
        middle = sum_before + weight / 2
        if index and left and (middle * stages >= len(starts) * total or len(weights) - index <= left):
            starts.append(index)
        sum_before += weight
    return starts


def _slices(model: nn.Sequential, stages: int) -> list[nn.Module]:
    # Not named_children(): that leaves out the second use of a module. A module without weights to train goes with the one
    # before it, so that each stage has some.
    units: list[list[tuple[str, nn.Module]]] = []
    weights: list[int] = []
    begun = False
    for name, module in model._modules.items():  # pyright: ignore[reportPrivateUsage]
        assert module is not None
        trains = any(p.requires_grad for p in module.parameters())
        if not units or (begun and trains):
            units.append([])
            weights.append(0)
        begun |= trains
        units[-1].append((name, module))
        weights[-1] += sum(p.numel() for p in module.parameters())
    if len(units) < stages:
        raise _too_few(f"the model is a Sequential of {len(units)} modules with weights to train", stages, len(units))
    starts = _even(weights, stages)
    made: list[nn.Module] = []
    for first, end in zip(starts, [*starts[1:], len(units)], strict=True):
        part = nn.Sequential()
        for name, module in (member for unit in units[first:end] for member in unit):
            part.add_module(name, module)
        made.append(part)
    return made


def _traced(model: nn.Module, stages: int, example: Any) -> list[nn.Module]:
    from torch.distributed.pipelining import SplitPoint, pipeline

    lists = {name: part for name, part in cast(Any, model).named_modules() if isinstance(part, nn.ModuleList)}
    sizes = {name: sum(p.numel() for p in part.parameters()) for name, part in lists.items()}
    name = max(sizes, key=lambda each: sizes[each], default="")
    blocks: list[nn.Module] = list(lists[name]) if name in lists else []
    if len(blocks) < stages:
        raise _too_few(
            f"the largest ModuleList of {type(model).__name__} has {len(blocks)} blocks", stages, len(blocks)
        )
    starts = _even([1] * len(blocks), stages)
    args, kwargs = example()
    with users_code(
        f"torch's tracer cannot split {type(model).__name__}: give Task.stage, a function that builds a stage"
    ):
        traced = pipeline(model, tuple(args), kwargs, {f"{name}.{first}": SplitPoint.BEGINNING for first in starts[1:]})
    parts: list[nn.Module] = [traced.get_stage_module(index) for index in range(stages)]
    if modes := sorted({op for part in parts for op in _fixed_to_training(part)}):
        raise ConfigError(
            f"torch's tracer keeps {', '.join(modes)} of {type(model).__name__} in training mode, in evaluation, too. Set "
            "dropout to 0, or give Task.stage, a function that builds a stage.",
            field="model",
            given=type(model).__name__,
        )
    return parts


def _fixed_to_training(part: nn.Module) -> Iterator[str]:
    """The traced operations that differ between training and evaluation, and no longer follow the mode of the module."""
    for graph in (cast(Any, module).graph for module in part.modules() if hasattr(module, "graph")):
        for node in graph.nodes:
            if not hasattr(node.target, "_schema"):
                continue
            names = [argument.name for argument in node.target._schema.arguments]
            given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
            trains = given.get("train") is True or given.get("training") is True
            if (trains and given.get("p") != 0) or given.get("dropout_p"):
                yield str(node.target._schema.name).removeprefix("aten::")


def _too_few(what: str, stages: int, most: int) -> ConfigError:
    return ConfigError(
        f"{what}, which are fewer than {stages} stages. Nearest: {most} stages; or give Task.stage, a function that builds "
        "stage i of n.",
        field="pipeline_parallel",
        given=stages,
        nearest=(most,) if most else (),
    )
