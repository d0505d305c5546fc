"""Exact gradient accumulation for JAX: sums of losses and of weights over all micro batches, divided once.

One signature of a loss, for both forms:

    loss(params, batch) -> (loss_sum, weight) or (loss_sum, weight, auxiliary_mean)

`accumulate` runs all micro batches of a step in one compiled function. Their number is an argument of it, not a shape, so a
ramp compiles once. `micro_steps` compiles one micro step, whose sums are donated: for steps that are too large to be on the
devices at once, or a host that acts between micro steps.

Parameters that are replicated over mesh axes (`axis`) are reduced over them once per step. Left to itself, the compiler
reduces in every micro step, since it differentiates a sum over all devices. Over other axes (fsdp, tensor) it decides.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from batchwright.core.errors import PlanError, RunError

Params = Any
Batch = Any
Loss = Callable[[Params, Batch], tuple[Any, ...]]


class Accumulated(NamedTuple):
    """The gradient of one step's whole batch, and the means of its loss; with `weight` 0, all of them are NaN."""

    gradient: Params
    loss: jax.Array
    weight: jax.Array
    """The sum that the losses were divided by."""
    auxiliary: jax.Array
    """The mean of the auxiliary means, by weight; 0 without any. The gradient includes it."""


class Sums(NamedTuple):
    """What micro batches add to."""

    gradient: Params
    loss: jax.Array
    weight: jax.Array
    auxiliary: jax.Array


class MicroSteps(NamedTuple):
    """A step as three compiled functions, in the manner of optax. They denote the loop:

    sums = init(params)
    for batch in micro_batches:
        sums = add(sums, params, batch)      # the memory of `sums` is reused
    step = divide(sums, params)              # an `Accumulated`; the memory of `sums` is reused
    """

    init: Callable[[Params], Sums]
    add: Callable[[Sums, Params, Batch], Sums]
    divide: Callable[[Sums, Params], Accumulated]


def accumulate(
    loss: Loss, *, mesh: Mesh | None = None, axis: str | tuple[str, ...] = "data"
) -> Callable[[Params, Batch, Any], Accumulated]:
    """A pure function `(params, batches, count) -> Accumulated`, to call inside `jax.jit`. It denotes the loop:

        sums = 0
        for batch in batches[:count]:                    # batches: arrays of shape [most, rows, …]
            loss_sum, weight, auxiliary_mean = loss(params, batch)
            sums += gradient of (loss_sum + weight × auxiliary_mean), loss_sum, weight, weight × auxiliary_mean
        return sums / sum of weights

    `count` is traced, so that one compilation serves every number of micro batches up to `most`; a larger one gives NaN. A micro
    batch of weight 0 adds nothing. With a `mesh`, `params` are replicated over its `axis`, the rows of `batches` are split over
    it, and there is one reduction per step. Without one, the shardings of the arguments decide.

    >>> loss = lambda w, batch: (((batch["x"] * w - 1) ** 2 * batch["weight"]).sum(), batch["weight"].sum())
    >>> batches = {"x": jnp.array([[1.0, 2.0], [3.0, 9.0]]), "weight": jnp.array([[1.0, 1.0], [1.0, 0.0]])}
    >>> step = jax.jit(accumulate(loss))
    >>> float(step(jnp.float32(1.0), batches, 2).loss), float(step(jnp.float32(1.0), batches, 1).loss)
    (1.6666666269302368, 0.5)
    """

    axes = () if mesh is None else _axes(mesh, axis)

    def run(params: Params, batches: Batch, count: Any) -> Accumulated:
        varying = _vary(params, axes)

        def body(index: Any, sums: Sums) -> Sums:
            return _added(loss, sums, varying, jax.tree.map(lambda leaf: _at(leaf, index), batches))

        # count is one number for all devices, so all of them run the loop equally often.
        sums = jax.lax.fori_loop(0, count, body, _vary(_zeros(params), axes))
        # Beyond the end, JAX reads the last micro batch again. A compiled function cannot raise.
        most = jax.tree.leaves(batches)[0].shape[0]
        sums = sums._replace(weight=jnp.where(count > most, jnp.nan, sums.weight))
        return _divided(jax.lax.psum(sums, axes) if axes else sums, params)

    if not axes:
        return run
    return jax.shard_map(
        run,
        mesh=mesh,
        in_specs=(P(), P(None, axes), P()),
        out_specs=P(),
        axis_names=set(axes),
    )


def micro_steps(loss: Loss, *, mesh: Mesh | None = None, axis: str | tuple[str, ...] = "data") -> MicroSteps:
    """The same step, one compiled call per micro batch; `batch` has arrays of shape [rows, …].

    With a `mesh`, every device along `axis` keeps sums of its own until `divide`, which reduces once.

    >>> loss = lambda w, batch: (((batch * w - 1) ** 2).sum(), len(batch))
    >>> steps, w = micro_steps(loss), jnp.float32(1.0)
    >>> sums = steps.init(w)
    >>> for batch in (jnp.array([1.0, 2.0]), jnp.array([3.0])): sums = steps.add(sums, w, batch)
    >>> float(steps.divide(sums, w).loss)
    1.6666666269302368
    """
    axes = _axes(mesh, axis) if mesh is not None else ()

    def init(params: Params) -> Sums:
        # Placed as `add` places its results, which would compile twice otherwise. With axes, one sum per device: a leading
        # axis, split over the devices.
        shapes = jax.eval_shape(_zeros, params)
        known = [
            leaf.sharding
            for leaf in jax.tree.leaves(params)
            if isinstance(getattr(leaf, "sharding", None), NamedSharding)
        ]
        over = mesh if mesh is not None else known[0].mesh if known else None
        lead = [math.prod(over.shape[name] for name in axes)] if over is not None and axes else []

        def zeros(shape: jax.ShapeDtypeStruct, like: Any = None) -> jax.Array:
            place = getattr(like, "sharding", None)
            spec = (*place.spec, *[None] * shape.ndim)[: shape.ndim] if isinstance(place, NamedSharding) else ()
            parts = P(*([axes] if axes else []), *spec)
            return jnp.zeros((*lead, *shape.shape), shape.dtype, device=over and NamedSharding(over, parts))

        return Sums(jax.tree.map(zeros, shapes.gradient, params), *map(zeros, shapes[1:]))

    if not axes:
        return MicroSteps(init, jax.jit(partial(_added, loss), donate_argnums=0), jax.jit(_divided, donate_argnums=0))

    def add(sums: Sums, params: Params, batch: Batch) -> Sums:
        own = jax.tree.map(lambda leaf: leaf[0], sums)
        return jax.tree.map(lambda leaf: leaf[None], _added(loss, own, _vary(params, axes), batch))

    def divide(sums: Sums, params: Params) -> Accumulated:
        return _divided(jax.lax.psum(jax.tree.map(lambda leaf: leaf[0], sums), axes), params)

    shared = partial(jax.shard_map, mesh=mesh, axis_names=set(axes))
    return MicroSteps(
        init,
        jax.jit(shared(add, in_specs=(P(axes), P(), P(axes)), out_specs=P(axes)), donate_argnums=0),
        jax.jit(shared(divide, in_specs=(P(axes), P()), out_specs=P()), donate_argnums=0),
    )


def _zeros(params: Params) -> Sums:
    def zeros(leaf: Any) -> jax.Array:
        # A bf16 sum of 1024 micro steps is off by 34%: at least fp32.
        return jnp.zeros_like(leaf, dtype=jnp.promote_types(jnp.result_type(leaf), jnp.float32))

    number = jnp.zeros((), jnp.result_type(float))
    return Sums(jax.tree.map(zeros, params), number, number, number)


def _added(loss: Loss, sums: Sums, params: Params, batch: Batch) -> Sums:
    def objective(params: Params) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        loss_sum, weight, auxiliary = checked_loss(loss(params, batch))
        loss_sum, weight = loss_sum.astype(sums.loss.dtype), jax.lax.stop_gradient(weight).astype(sums.weight.dtype)
        weighted = weight * auxiliary.astype(sums.auxiliary.dtype)
        return loss_sum + weighted, (loss_sum, weight, weighted)

    (_, numbers), gradient = jax.value_and_grad(objective, has_aux=True)(params)
    # A mean over blank rows is 0/0: without weight, a micro batch adds nothing, not NaN.
    weighs = numbers[1] != 0
    return jax.tree.map(lambda total, more: total + jnp.where(weighs, more, 0), sums, Sums(gradient, *numbers))


def _divided(sums: Sums, params: Params) -> Accumulated:
    weight = sums.weight
    mean = jax.tree.map(lambda g, p: (g / weight.astype(g.dtype)).astype(jnp.result_type(p)), sums.gradient, params)
    return Accumulated(mean, sums.loss / weight, weight, sums.auxiliary / weight)


def checked_loss(values: object) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What a loss returned, checked while it is traced."""
    if not isinstance(values, tuple) or len(values) not in (2, 3):
        shape = f"{len(values)} values" if isinstance(values, tuple) else f"one value of type {_kind(values)}"
        raise RunError(
            f"the loss returned {shape}. It must return (loss_sum, weight) or (loss_sum, weight, auxiliary_mean): a sum, not a "
            "mean, and the weight to divide it by.",
            field="loss",
            given=type(values).__name__,
        )
    numbers: list[jax.Array] = []
    for name, value in zip(("loss_sum", "weight", "auxiliary_mean"), (*values, 0.0)[:3], strict=True):
        try:
            number = jnp.asarray(0.0 if value is None and name == "auxiliary_mean" else value)
        except TypeError:
            number = None
        if number is None or number.size != 1:
            shape = f" of shape {number.shape}" if number is not None else ""
            raise RunError(
                f"the loss returned a {name} of type {_kind(value)}{shape}. It must be a number, or an array with one "
                "element.",
                field=name,
                given=type(value).__name__,
            )
        numbers.append(number.reshape(()))
    if not jnp.issubdtype(numbers[0].dtype, jnp.floating):
        raise RunError(
            f"the loss returned a loss_sum of type {numbers[0].dtype}, which has no gradient.",
            field="loss_sum",
            given=str(numbers[0].dtype),
        )
    return numbers[0], numbers[1], numbers[2]


def _kind(value: object) -> str:
    return "array" if isinstance(value, jax.Array) else type(value).__name__  # the user does not know JAX's tracers


def _vary(tree: Any, axes: tuple[str, ...]) -> Any:
    """Values that differ between the devices of these axes: autodiff then adds no reduction of its own."""
    return jax.tree.map(lambda leaf: jax.lax.pcast(leaf, axes, to="varying"), tree) if axes else tree


def _at(leaf: jax.Array, index: Any) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False)


def _axes(mesh: Mesh, axis: str | tuple[str, ...]) -> tuple[str, ...]:
    """The axes to reduce over: those of `axis` that have several devices."""
    axes = (axis,) if isinstance(axis, str) else tuple(axis)
    unknown = [name for name in axes if name not in mesh.axis_names]
    if unknown or not axes:
        known = ", ".join(f"{name} ({size})" for name, size in mesh.shape.items())
        raise PlanError(
            f"axis={axis!r} is not an axis of the mesh. Its axes: {known}.",
            field="axis",
            given=str(axis),
            nearest=mesh.axis_names,
        )
    # Over an axis of one device there is nothing to reduce, and XLA does not compile it beside a sharded axis.
    return tuple(name for name in axes if mesh.shape[name] > 1)
