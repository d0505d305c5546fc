"""The `JaxTask`: what a user's file gives to probe, estimate, check and run, as a torch `Task` does.

def task() -> JaxTask:
    return JaxTask(
        params=init,                                       # a tree of arrays, or a function of a key that makes one
        loss=lambda params, batch: (loss_sum, weight),     # a sum, and the weight that it is divided by
        optimizer=optax.adamw(3e-4),
        dataset=dataset,                                   # map-style: len() and [i]; rows are trees of numpy arrays
    )
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from batchwright.core.errors import BatchwrightError, ConfigError, PlanError, RunError, Violation, raise_violations
from batchwright.processes.endings import error_record, users_code
from batchwright.processes.target import call_target
from batchwright.rundir.files import read_json, write_json

from .feed import ROW_AXES, stack
from .gradient import Accumulated, Loss, accumulate


@dataclass(frozen=True)
class JaxTask:
    """What to train: parameters, a loss that returns a sum and its weight, an optimizer of optax, and a dataset.

    >>> task = JaxTask(
    ...     params=lambda key: {"w": jax.random.normal(key, (2,))},
    ...     loss=lambda params, x: ((x @ params["w"]).sum(), len(x)),
    ...     optimizer=optax.sgd(0.1),
    ...     dataset=[np.ones(2, np.float32)] * 8,
    ... )
    >>> bool((task.build_params(seed=1)["w"] == task.build_params(seed=1)["w"]).all()), len(task.dataset)
    (True, 8)
    """

    params: Any
    """A tree of arrays, or a function of a key, `jax.random.key(seed)`, that makes one."""
    loss: Loss
    """`loss(params, batch)` returns (loss_sum, weight) or (loss_sum, weight, auxiliary_mean)."""
    optimizer: optax.GradientTransformation
    dataset: Any
    """Map-style: len() and [i]."""
    collate: Callable[[list[Any]], Any] | None = None
    """Makes a batch of a list of rows; None: their leaves are stacked."""
    blank: Any = None
    """A row that weighs nothing in the loss: it fills batches that micro batch × devices does not divide."""
    mesh: Mapping[str, int] | None = None
    """The axes of the devices and their sizes; one may be -1, the rest. Rows are split over `data` and `fsdp`. None: one
    axis, `data`."""
    partition: Callable[[Any], Any] | None = None
    """A function of the parameters that gives a tree of `PartitionSpec`s; None: every device has all of them."""

    def __post_init__(self) -> None:
        optional = ("collate", "partition")
        checks = [
            (
                "dataset",
                hasattr(self.dataset, "__len__") and hasattr(self.dataset, "__getitem__"),
                "map-style: len() and [i]. A stream has no positions to resume from: index it first",
            ),
            ("loss", callable(self.loss), "a function of (params, batch)"),
            (
                "optimizer",
                isinstance(self.optimizer, optax.GradientTransformation),
                "an optimizer of optax, such as optax.adamw(3e-4)",
            ),
            *((n, getattr(self, n) is None or callable(getattr(self, n)), "a function, or None") for n in optional),
        ]
        wrong = [(name, type(getattr(self, name)).__name__, wanted) for name, valid, wanted in checks if not valid]
        raise_violations(
            ConfigError,
            [
                Violation(f"JaxTask.{name} has type {kind}. It must be {wanted}.", name, kind)
                for name, kind, wanted in wrong
            ],
        )

    def build_params(self, seed: int) -> Any:
        """The parameters, from `jax.random.key(seed)` if they are a function."""
        made = self.params
        if callable(made):
            with users_code("JaxTask.params failed"):
                made = made(jax.random.key(seed))
        if not jax.tree.leaves(made):
            what = "JaxTask.params() returned" if callable(self.params) else "JaxTask.params has"
            raise RunError(f"{what} no arrays.", field="params", given=type(made).__name__)
        return made

    def build_mesh(self) -> Mesh:
        """All devices of all processes, in the axes of the task."""
        return mesh_of(self.mesh or {"data": -1}, jax.devices())

    def place(self, mesh: Mesh, params: Any) -> Any:
        """The sharding of every parameter."""
        with users_code("JaxTask.partition failed"):
            specs = P() if self.partition is None else self.partition(params)
            # A spec may stand for a whole subtree.
            return jax.tree.map(
                lambda spec, part: jax.tree.map(lambda leaf: NamedSharding(mesh, spec), part),
                P() if specs is None else specs,
                params,
                is_leaf=_is_spec,
            )

    def start(self, mesh: Mesh, seed: int) -> dict[str, Any]:
        """The parameters and the state of the optimizer, on their devices."""
        made = self.build_params(seed)
        # Every process computes the same parameters from the seed, and keeps its parts.
        params = jax.tree.map(_placed, made, self.place(mesh, made))
        with users_code("JaxTask.optimizer.init failed"):
            shardings = _state_shardings(mesh, params, jax.eval_shape(self.optimizer.init, params))
            state = jax.jit(self.optimizer.init, out_shardings=shardings)(params)
        return {"params": params, "optimizer": state}

    def compiled_step(self, mesh: Mesh, arrays: dict[str, Any], max_norm: float | None = None) -> Callable[..., Any]:
        """`step`, compiled for arrays that stay where they are."""
        shardings = jax.tree.map(lambda leaf: leaf.sharding, arrays)
        axes = replicated_axes(mesh, shardings["params"])
        gradient_of = accumulate(self.loss, mesh=mesh, axis=axes) if axes else accumulate(self.loss)
        placed = (shardings["params"], shardings["optimizer"], NamedSharding(mesh, P()))
        return jax.jit(self.step(gradient_of, max_norm), donate_argnums=(0, 1), out_shardings=placed)

    def step(self, gradient_of: Callable[..., Accumulated], max_norm: float | None = None) -> Callable[..., Any]:
        """One optimizer step, to be compiled: (params, state, batches, count, rate) to new params and state, and the step's
        loss, weight, auxiliary mean and gradient norm. `rate` scales the optimizer's own learning rate."""

        def step(params: Any, state: Any, batches: Any, count: Any, rate: Any) -> Any:
            found = gradient_of(params, batches, count)
            gradient = found.gradient
            # The squares of fp16 numbers above 255 are infinite.
            wide = jax.tree.map(lambda g: g.astype(jnp.promote_types(g.dtype, jnp.float32)), gradient)
            norm: Any = optax.tree_utils.tree_norm(wide)
            if max_norm is not None:
                factor = jnp.minimum(1, max_norm / norm)
                gradient = jax.tree.map(lambda g, w: (w * factor).astype(g.dtype), gradient, wide)
            updates, state = self.optimizer.update(gradient, state, params)
            # The usual optimizers of optax end with a multiplication by their learning rate.
            updates = jax.tree.map(lambda u: (u * rate).astype(u.dtype), updates)
            return optax.apply_updates(params, updates), state, (found.loss, found.weight, found.auxiliary, norm)

        return step

    def estimated_step(self) -> tuple[Callable[..., Any], Callable[[int], tuple[Any, ...]]]:
        """The step on one device with one micro batch, and the shapes of its arguments for a micro batch size."""
        params = jax.eval_shape(lambda: self.build_params(0))
        row = self.batch([self.dataset[0]]) if self.collate is None else None

        def arguments(micro_batch_size: int) -> tuple[Any, ...]:
            batch = row if row is not None else self.batch([self.dataset[0]] * micro_batch_size)
            rows = jax.tree.map(
                lambda a: jax.ShapeDtypeStruct(
                    (1, micro_batch_size, *np.shape(a)[1:]), jax.dtypes.canonicalize_dtype(a.dtype)
                ),
                batch,
            )
            return params, jax.eval_shape(self.optimizer.init, params), rows, np.int32(1), np.float32(1)

        return self.step(accumulate(self.loss)), arguments

    def batch(self, rows: list[Any]) -> Any:
        """A batch of rows, as the task collates them."""
        return (self.collate or stack)(rows)


def _is_spec(value: object) -> bool:
    return isinstance(value, P)


def _placed(leaf: Any, sharding: NamedSharding) -> jax.Array:
    # By way of the host: the step donates these arrays, and must not delete those of the user.
    host = np.asarray(leaf)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def _state_shardings(mesh: Mesh, params: Any, state: Any) -> Any:
    """Where the state of an optimizer is: a leaf that belongs to a parameter as that one, every other leaf everywhere.

    A leaf belongs to the parameter whose path is the end of its own (`mu.dense.kernel`), if it has the same shape. Optimizers
    keep trees of parameters in records of any kind, some with placeholders in them.
    """
    known = {path: leaf for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]}

    def place(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        ends = (known.get(path[start:]) for start in range(len(path) + 1))
        of = next((param for param in ends if param is not None), None)
        return of.sharding if of is not None and of.shape == leaf.shape else NamedSharding(mesh, P())

    return jax.tree_util.tree_map_with_path(place, state)


def replicated_axes(mesh: Mesh, shardings: Any) -> tuple[str, ...]:
    """The axes that split rows and no parameter: gradients are reduced over them once per step."""
    used = {
        name
        for sharding in jax.tree.leaves(shardings)
        for part in sharding.spec
        for name in (part if isinstance(part, tuple) else (part,))
    }
    return tuple(name for name in ROW_AXES if name in mesh.shape and name not in used)


def mesh_of(axes: Mapping[str, int], devices: list[Any]) -> Mesh:
    """The devices in named axes; -1 takes the rest.

    >>> mesh_of({"data": -1, "fsdp": 1}, jax.devices()).axis_names
    ('data', 'fsdp')
    """
    sizes = dict(axes)
    free = [name for name, size in sizes.items() if size == -1]
    fixed = prod(size for size in sizes.values() if size != -1)
    whole = all(size > 0 for size in sizes.values() if size != -1) and len(devices) % fixed == 0
    if not whole or len(free) > 1 or (not free and fixed != len(devices)):
        shown = " × ".join(f"{name} {size}" for name, size in sizes.items())
        raise PlanError(
            f"mesh={shown} does not divide the {len(devices)} devices. One axis may be -1: it takes the rest.",
            field="mesh",
            given=shown,
        )
    if free:
        sizes[free[0]] = len(devices) // fixed
    return Mesh(np.array(devices).reshape(tuple(sizes.values())), tuple(sizes))


def load_task(target: str, args: Mapping[str, Any] | None = None) -> JaxTask:
    """Call the function that `FILE.py:function` names (default: `task`) and return its JaxTask.

    >>> load_task("missing.py:task")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    batchwright.core.errors.ConfigError: task file missing.py does not exist (looked for it at ...).
    """
    return call_target(target, dict(args or {}), JaxTask, "batchwright.jax.JaxTask")


def write_dataset_size(request_file: str, result_file: str) -> None:
    """Load the task that one file names and write the length of its dataset, or the error, to the other."""
    request = read_json(Path(request_file))
    try:
        task = load_task(request["target"], request["arguments"])
        with users_code("the length of JaxTask.dataset is not known"):
            result: dict[str, Any] = {"dataset_size": len(task.dataset)}
    except BatchwrightError as error:
        result = {"error": error_record(error)}
        print(result["error"]["traceback"] or "", file=sys.stderr)
    write_json(Path(result_file), result, sync=False)
