"""Does a split change the gradient of a JAX loss? Runs one global batch of a `JaxTask` whole and in several splits.

    report = check(task, global_batch_size=32, micro_batch_sizes=(1, 3, 16))
    report.ok, report.splits[0].relative_error, report.findings

The experiments, causes and messages are those of a torch task (`runtime/check`). Two things differ. Random numbers come from
keys: to switch them off, the functions of `jax.random` are replaced while the loss is traced. And JAX does not know what a
batch norm is: a loss with one is found as a loss whose samples depend on each other.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property
from inspect import signature
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax

from batchwright.core.errors import PlanError, either
from batchwright.core.numbers import nearest_multiples
from batchwright.core.ramp.rules import Constant
from batchwright.core.ramp.schedule import Schedule
from batchwright.processes.endings import users_code
from batchwright.runtime.check.causes import CauseSearch, Finding, number, scale_of, step_counted_schedule
from batchwright.runtime.check.measured import Gradient, Piece, Variant, norm, relative_error
from batchwright.runtime.check.splits import (
    DEFAULT_BATCH,
    CheckReport,
    check_gradient,
    check_request,
    compared,
    default_sizes,
    measure,
    report,
)
from batchwright.runtime.data.order import GlobalOrder
from batchwright.runtime.data.reading import Reader

from .feed import Feed
from .gradient import MicroSteps, accumulate, checked_loss, micro_steps
from .task import JaxTask, mesh_of

_STEPS = 200
# Functions of jax.random that take a key and draw nothing.
_NO_DRAWS = ("clone", "fold_in", "key_data", "key_impl", "split")


class JaxRig:
    """One task and one global batch: all measurements of `check` are made here."""

    framework = "jax"

    def __init__(self, task: JaxTask, global_batch_size: int, seed: int = 0) -> None:
        self.task, self.size, self.seed = task, global_batch_size, seed
        self.params = jax.tree.map(np.asarray, task.build_params(seed))
        self.kinds = {str(leaf.dtype) for leaf in jax.tree.leaves(self.params)}
        self._rows: list[Any] | None = None
        self._references: dict[Any, Gradient] = {}
        self._steps: dict[Variant, MicroSteps] = {}  # compiled once per variant and shape

    @property
    def rows(self) -> list[Any]:
        """The samples of the batch, as the dataset returns them."""
        if self._rows is None:
            with users_code("reading the dataset failed"):
                reader = Reader(self.task.dataset, self.seed, list)
                with reader.own_generators():
                    self._rows = reader.rows(range(self.size), self._order.ids(range(self.size)).tolist())
        return self._rows

    @cached_property
    def _has_draws(self) -> bool:
        """Whether the loss draws random numbers: its program has operations for that."""
        with users_code(f"the task failed with {self.size} samples in one micro batch"):
            text = str(jax.make_jaxpr(self.task.loss)(self.params, self._batch(self.rows, Variant())))
        return "random_bits" in text or "threefry" in text

    @property
    def _order(self) -> GlobalOrder:
        return GlobalOrder(len(self.task.dataset), seed=self.seed)

    def reference(self, variant: Variant, seed: int | None = None) -> Gradient:
        """The gradient of the whole batch in one piece, by plain autodiff: the reference for every split."""
        key = (variant, self.seed if seed is None or not self._has_draws else seed)
        if key not in self._references:
            with self._run(variant, seed=seed) as params:

                def mean(params: Any, batch: Any) -> jax.Array:
                    loss_sum, weight, auxiliary = self._loss(params, batch, variant)
                    return loss_sum / weight + auxiliary

                self._references[key] = self._gradient(jax.grad(mean), params, self._batch(self.rows, variant), variant)
        return self._references[key]

    def split(self, variant: Variant, micro_batch_size: int) -> Gradient:
        """The gradient that reaches the optimizer if the batch is run in micro batches."""
        with self._run(variant, micro_batch_size) as params:
            if variant not in self._steps:
                self._steps[variant] = micro_steps(lambda p, batch: self._loss(p, batch, variant))
            steps = self._steps[variant]
            sums = steps.init(params)
            for at in range(0, self.size, micro_batch_size):
                rows = self.rows[at : at + micro_batch_size]
                if self.task.blank is not None:
                    rows = rows + [self.task.blank] * (micro_batch_size - len(rows))
                sums = steps.add(sums, params, self._batch(rows, variant))
            return named(steps.divide(sums, params).gradient)

    def on_devices(self, micro_batch_size: int, devices: Sequence[Any]) -> Gradient:
        """The same on several devices, by the step of the loop."""
        mesh = mesh_of({"data": -1}, list(devices))
        schedule = Constant(self.size).compile().until(self.size)
        with self._run(Variant(), micro_batch_size) as params:
            (step,) = Feed(
                self.task.dataset,
                self._order,
                schedule,
                micro_batch_size,
                mesh=mesh,
                collate=self.task.collate,
                blank=self.task.blank,
            )
            gradient = jax.jit(accumulate(self.task.loss, mesh=mesh))
            return named(gradient(params, step.batches, step.count).gradient)

    def piece(self, variant: Variant, rows: Sequence[Any]) -> Piece:
        """The weight of some samples, and the gradient of each part of their loss."""
        with self._run(variant, len(rows)) as params:
            batch = self._batch(list(rows), variant)
            parts = [
                self._gradient(jax.grad(lambda p, b, i=index: self._loss(p, b, variant)[i]), params, batch, variant)
                for index in (0, 2)
            ]
            weight = float(self._loss(params, batch, variant)[1])
            has_auxiliary = norm(parts[1]) > 0
            return Piece(parts[0], weight, parts[1] if has_auxiliary else None)

    def uses_statistics(self, variant: Variant) -> bool:
        """JAX does not know: a mean over the batch is a mean."""
        return False

    def keeps_state(self, variant: Variant) -> float:
        """The relative change of the gradient if the loss is traced a second time."""
        self._references.pop((variant, self.seed), None)
        first = self.reference(variant)
        self._references.pop((variant, self.seed), None)
        return relative_error(self.reference(variant), first) if norm(first) else 0.0

    def collate_draws(self, variant: Variant) -> bool:
        """Whether collating the same rows twice gives different arrays."""
        found = [jax.tree.leaves(self.task.batch(list(self.rows))) for _ in range(2)]
        return any(not np.array_equal(a, b) for a, b in zip(*found, strict=True))

    def shapes(self, rows: Sequence[Any]) -> tuple[Any, ...]:
        """The shapes of the arrays of a batch of these rows, without the number of rows."""
        return tuple(np.shape(leaf)[1:] for leaf in jax.tree.leaves(self.task.batch(list(rows))))

    def _batch(self, rows: list[Any], variant: Variant) -> Any:
        with users_code("collating the samples failed"):
            batch = self.task.batch(rows)
        return jax.tree.map(_double, batch) if variant.exact else batch

    def _loss(self, params: Any, batch: Any, variant: Variant) -> tuple[jax.Array, jax.Array, jax.Array]:
        loss_sum, weight, auxiliary = checked_loss(self.task.loss(params, batch))
        return loss_sum, jax.lax.stop_gradient(weight), auxiliary if variant.auxiliary else jnp.zeros_like(auxiliary)

    def _gradient(self, function: Callable[..., Any], params: Any, batch: Any, variant: Variant) -> Gradient:
        if variant.exact:
            text = str(jax.make_jaxpr(function)(params, batch))
            if re.search(r":(f32|bf16|f16)\[", text):
                raise TypeError("the loss casts to another type")
        return named(jax.jit(function)(params, batch))

    @contextmanager
    def _run(self, variant: Variant, micro: int | None = None, seed: int | None = None) -> Generator[Any]:
        """Yield the parameters, with the arithmetic and the draws of a variant."""
        pieces = "in one micro batch" if micro in (None, self.size) else f"in micro batches of {micro}"
        precision = ", in fp64" if variant.exact else ""
        with ExitStack() as stack:
            stack.enter_context(users_code(f"the task failed with {self.size} samples {pieces}{precision}"))
            if variant.exact:
                stack.enter_context(jax.enable_x64(True))
            changed = seed is not None and seed != self.seed
            if (changed or not variant.random) and self._has_draws:
                stack.enter_context(_draws(seed if variant.random else None))
            yield jax.tree.map(_double, self.params) if variant.exact else self.params


def named(gradient: Any) -> Gradient:
    """A tree of arrays by the names of its leaves, on the host and in fp64."""
    leaves = jax.tree_util.tree_flatten_with_path(gradient)[0]
    return {_name(path): np.asarray(leaf.addressable_data(0), np.float64) for path, leaf in leaves}


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".") or "params"


def _double(leaf: Any) -> Any:
    array = np.asarray(leaf)
    return array.astype(np.float64) if jnp.issubdtype(array.dtype, jnp.floating) else array


@contextmanager
def _draws(seed: int | None) -> Generator[None]:
    """Replace the draws of `jax.random`: by those of another seed, or, with None, by numbers that do not depend on the place."""
    with ExitStack() as stack:
        # A function that the user has compiled is not traced again, neither now nor afterwards, unless JAX forgets it.
        jax.clear_caches()
        stack.callback(jax.clear_caches)
        for name, draw in _drawing().items():
            stack.enter_context(mock.patch.object(jax.random, name, _replaced(name, draw, seed)))
        yield


def _drawing() -> dict[str, Callable[..., Any]]:
    """The functions of `jax.random` that draw: those whose first parameter is a key."""
    found: dict[str, Callable[..., Any]] = {}
    for name, function in vars(jax.random).items():
        if name[0] != "_" and name not in _NO_DRAWS and callable(function):
            with suppress(ValueError, TypeError):  # without a signature
                if next(iter(signature(function).parameters), None) == "key":
                    found[name] = function
    return found


def _replaced(name: str, draw: Callable[..., Any], seed: int | None) -> Callable[..., Any]:
    def other(key: Any, *given: Any, **more: Any) -> Any:
        return draw(jax.random.fold_in(key, seed or 0), *given, **more)

    def fixed(key: Any, *given: Any, **more: Any) -> Any:
        made = draw(key, *given, **more)
        if name == "bernoulli":
            return jnp.broadcast_to(jnp.asarray(given[0] if given else more.get("p", 0.5)) >= 0.5, made.shape)
        if name == "permutation":
            return made
        return jnp.broadcast_to(made.reshape(-1)[:1].reshape(()), made.shape)

    return fixed if seed is None else other


def check(
    task: JaxTask,
    *,
    global_batch_size: int | None = None,
    micro_batch_sizes: Sequence[int] | None = None,
    ranks: int = 1,
    seed: int = 0,
    ramp: Schedule | None = None,
    lr_horizon_steps: int | None = None,
    budget_samples: int | None = None,
    allow: Collection[str] = (),
    progress: Callable[[str], None] = lambda line: None,
) -> CheckReport:
    """Run one global batch at several splits, and explain every difference from the batch in one piece.

    If `ranks` is above 1, also on that many devices of this process. The rest is as in `batchwright.runtime.check`.

    >>> task = JaxTask(
    ...     params={"w": jnp.ones(2)},
    ...     loss=lambda params, x: (((x @ params["w"]) ** 2).mean(), len(x)),  # a mean, but it must be a sum
    ...     optimizer=optax.sgd(0.1),
    ...     dataset=[np.float32([1, i]) for i in range(8)],
    ... )
    >>> report = check(task, global_batch_size=8, micro_batch_sizes=(2,))
    >>> report.ok, report.findings[0].cause, round(report.splits[0].relative_error, 3)
    (False, 'scaled-by-accumulation', 3.0)
    """
    size = global_batch_size or min(DEFAULT_BATCH, len(task.dataset))
    sizes = tuple(dict.fromkeys(micro_batch_sizes)) if micro_batch_sizes else default_sizes(size)
    allow = (allow,) if isinstance(allow, str) else allow
    check_request(size, sizes, ranks, "this process", allow)
    rig = JaxRig(task, size, seed)
    progress(f"{size} samples in one piece")
    reference = rig.reference(Variant())
    check_gradient(reference, "the whole batch in one piece")
    splits = [measure(rig, micro, reference, progress) for micro in sizes]
    progress("looking for causes")
    search = CauseSearch(rig, splits)
    findings = search.findings()
    if ranks > 1:
        progress(f"the same on {ranks} devices")
        more, wrong = _on_devices(rig, ranks, sizes, reference, search.tolerance, bool(findings))
        splits, findings = splits + more, findings + wrong
    findings += _step_counted(task, rig, ramp, lr_horizon_steps, budget_samples)
    return report(size, splits, findings, search.notes, allow)


def _on_devices(
    rig: JaxRig, ranks: int, sizes: Sequence[int], reference: Gradient, tolerance: float, known: bool
) -> tuple[list[Any], list[Finding]]:
    devices = jax.devices()
    if len(devices) < ranks:
        raise PlanError(
            f"ranks={ranks} needs as many devices, and this process has {len(devices)}. Nearest: {len(devices)}; on a CPU, "
            f"`jax.config.update('jax_num_cpu_devices', {ranks})` before JAX is used gives more.",
            field="ranks",
            given=ranks,
            nearest=(len(devices),),
        )
    wanted = sorted({min(micro, -(-rig.size // ranks)) for micro in sizes})
    runs = [micro for micro in wanted if rig.task.blank is not None or rig.size % (micro * ranks) == 0]
    if not runs:
        nearest = nearest_multiples(wanted[0] * ranks, rig.size)
        raise PlanError(
            f"{rig.size} samples on {ranks} devices in micro batches of {' or '.join(map(str, wanted))} are not whole micro "
            f"steps, so nothing can be compared on {ranks} devices. Nearest: global_batch_size {either(nearest)}; or give "
            "JaxTask.blank, a row that weighs nothing in the loss and fills batches.",
            field="global_batch_size",
            given=rig.size,
            nearest=nearest,
        )
    splits: list[Any] = []
    worst = None
    for micro in runs:
        gradient = rig.on_devices(micro, devices[:ranks])
        splits.append(compared(gradient, reference, micro, -(-rig.size // (micro * ranks)), ranks))
        scale = scale_of(gradient, reference, micro * ranks, rig.size)
        worst = scale if worst is None or scale.error > worst.error else worst
    if worst is None or known or worst.error <= max(tolerance, 1e-4):
        return splits, []
    message = (
        f"one device gives the full batch's gradient at every split, but {ranks} devices do not: off by {number(worst.error)}, "
        f"{number(worst.factor)}× along it. Does the loss reduce over devices, or depend on the device? Return the sum and the "
        "weight of the batch that it gets: the step sums over devices."
    )
    return splits, [Finding("rank-dependent", "error", message)]


def _step_counted(
    task: JaxTask, rig: JaxRig, ramp: Schedule | None, horizon_steps: int | None, budget: int | None
) -> list[Finding]:
    """Whether the optimizer has a schedule of optax, which counts steps."""
    state = jax.eval_shape(task.optimizer.init, rig.params)
    kinds: Any = (optax.ScaleByScheduleState, getattr(optax, "InjectStatefulHyperparamsState", ()))
    counted = any(isinstance(node, kinds) for node in jax.tree.leaves(state, is_leaf=lambda n: isinstance(n, kinds)))
    if not counted and (horizon_steps is None or ramp is None):
        return []
    what = f"the learning rate's horizon is given in steps ({horizon_steps})"
    if counted:
        what = "the optimizer has a schedule of optax, which changes its learning rate with every step"
    remedy = (
        "Count in samples: give the optimizer a constant rate, and the loop a `learning_rate` over samples (settings), which "
        "ends at the same sample for any batch size."
    )
    return [step_counted_schedule(what, remedy, _STEPS, ramp, horizon_steps, budget)]
