"""The measurements of `check`: the gradient of one global batch, whole or split, with parts of the model switched off.

The reference is plain autograd on the whole batch as one micro batch; a split uses the real loader and step. A `Variant`
says what is switched: random draws, batch statistics, the auxiliary mean, and the arithmetic (fp64 throughout).
"""

# pyright: reportUnknownMemberType=false
# torch's annotations are incomplete.

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from batchwright.core.ramp.rules import Constant
from batchwright.processes.endings import users_code
from batchwright.runtime.data.loader import Loader, Micro, default_collate
from batchwright.runtime.data.order import GlobalOrder
from batchwright.runtime.data.sampler import StepSampler
from batchwright.runtime.device import to_device
from batchwright.runtime.state.generators import set_seeds
from batchwright.runtime.step.accumulate import accumulate
from batchwright.runtime.task import FrameworkTask, Task

from .measured import Gradient as Gradient
from .measured import Piece as Piece
from .measured import Variant as Variant
from .measured import norm as norm
from .measured import relative_error as relative_error
from .switches import AllFp64, Deterministic, freeze_statistics, without_dropout


class Rig:
    """One task and one global batch: all measurements of `check` are made here.

    >>> rows = [torch.tensor([1.0]), torch.tensor([3.0])]
    >>> task = Task(nn.Linear(1, 1), rows, lambda m, x: (m(x).sum(), len(x)), torch.optim.SGD)
    >>> rig = Rig(task, global_batch_size=2)
    >>> rig.reference(Variant())["weight"].item(), rig.split(Variant(), micro_batch_size=1)["weight"].item()
    (2.0, 2.0)
    """

    def __init__(
        self, task: Task, global_batch_size: int, seed: int = 0, accumulate_dtype: torch.dtype | None = None
    ) -> None:
        self.task, self.size, self.seed, self.accumulate_dtype = task, global_batch_size, seed, accumulate_dtype
        with users_code("building the model failed"):
            self.model = task.build_model(seed)
        self.device = next((p.device for p in self.model.parameters()), torch.device("cpu"))
        self.dtypes = {p.dtype for p in self.model.parameters() if p.requires_grad}
        self.kinds = {str(kind).removeprefix("torch.") for kind in self.dtypes}
        self.framework = task.framework if isinstance(task, FrameworkTask) else ""
        self._rows: list[Any] | None = None

    def reference(self, variant: Variant, seed: int | None = None) -> Gradient:
        """The gradient of the whole batch in one piece, by plain autograd: the reference for every split."""
        (micro,) = self._micros(variant, self.size)
        with self._run(variant, seed) as model:
            loss_sum, weight, auxiliary = self._loss(model, micro.data, variant)
            objective = loss_sum / weight if auxiliary is None else loss_sum / weight + auxiliary
            objective.backward()
            return gradients(model)

    def split(
        self,
        variant: Variant,
        micro_batch_size: int,
        rank: int = 0,
        ranks: int = 1,
        wrap: Callable[[nn.Module], nn.Module] | None = None,
    ) -> Gradient:
        """The gradient that reaches `optimizer.step` if the batch is run in micro batches, on `ranks` ranks."""
        micros = self._micros(variant, micro_batch_size, rank, ranks)
        with self._run(variant, micro=micro_batch_size) as inner:
            model = inner if wrap is None else wrap(inner)
            # The step is applied with a learning rate of zero, so it changes nothing.
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
            for step in accumulate(micros, model, accumulate_dtype=self.accumulate_dtype):
                for micro in step:
                    step.backward(*self._loss(model, micro.data, variant))
                step.apply(optimizer)
            return gradients(inner)

    def micro_gradients(self, variant: Variant, micro_batch_size: int) -> list[Tensor]:
        """The gradient of each single micro batch, flat and in the precision of the parameters."""
        found: list[Tensor] = []
        micros = self._micros(variant, micro_batch_size)
        with self._run(variant, micro=micro_batch_size) as model:
            for micro in micros:
                loss_sum, weight, auxiliary = self._loss(model, micro.data, variant)
                (loss_sum if auxiliary is None else loss_sum + weight * auxiliary).backward()
                held = [p for p in model.parameters() if p.grad is not None]
                found.append(torch.cat([p.grad.detach().reshape(-1) for p in held if p.grad is not None]).cpu())
                model.zero_grad()
        return found

    def piece(self, variant: Variant, rows: Sequence[Any]) -> Piece:
        """The weight of some samples, and the gradient of each part of their loss."""
        with self._run(variant, micro=len(rows)) as model:
            loss_sum, weight, auxiliary = self._loss(model, list(rows), replace(variant, random=False))
            parts: list[Gradient | None] = []
            for part in (loss_sum, auxiliary):
                model.zero_grad()
                if part is not None and part.requires_grad:
                    part.sum().backward(retain_graph=True)
                parts.append(None if part is None else gradients(model))
            return Piece(parts[0] or {}, float(weight), parts[1])

    def uses_statistics(self, variant: Variant) -> bool:
        """Whether a forward of the whole batch uses batch statistics."""
        counter = Deterministic(random=False, statistics=False, device=self.device)
        (micro,) = self._micros(variant, self.size)
        with self._run(variant) as model, counter:
            self._loss(model, micro.data, variant)
        return counter.statistics_uses > 0

    def keeps_state(self, variant: Variant) -> float:
        """The relative change of the gradient if the same model runs the same batch a second time."""
        (micro,) = self._micros(variant, self.size)
        with self._run(variant) as model:
            found: list[Gradient] = []
            for _ in range(2):
                model.zero_grad()
                set_seeds(self.seed)
                self._loss(model, micro.data, variant)[0].backward()
                found.append(gradients(model))
            return relative_error(found[1], found[0]) if norm(found[0]) else 0.0

    def collate_draws(self, variant: Variant) -> bool:
        """Whether collating the same rows twice gives different tensors, for example by random masking."""
        rows, found = self.rows, list[list[Any]]()
        for seed in (self.seed, self.seed + 1):
            with self._run(variant, seed):
                found.append(tree_leaves(self.collate(rows)))
        pairs = [(a, b) for a, b in zip(*found, strict=False) if isinstance(a, Tensor) and isinstance(b, Tensor)]
        return any(a.shape != b.shape or not torch.equal(a, b) for a, b in pairs)

    def collate(self, rows: Sequence[Any]) -> Any:
        """Collate rows as the task does."""
        return (self.task.collate or default_collate)(list(rows))

    def shapes(self, rows: Sequence[Any]) -> tuple[Any, ...]:
        """The shapes of the tensors of a batch of these rows, without the number of rows."""
        return tuple(tuple(leaf.shape[1:]) for leaf in tree_leaves(self.collate(rows)) if isinstance(leaf, Tensor))

    @property
    def rows(self) -> list[Any]:
        """The samples of the batch, as the dataset returns them."""
        if self._rows is None:
            with users_code("reading the dataset failed"):
                loader = Loader(self.task.dataset, self._order, self._sampler(1, 0, 1), collate=list)
                self._rows = [micro.data[0] for micro in loader]
        return self._rows

    @property
    def _order(self) -> GlobalOrder:
        return GlobalOrder(len(self.task.dataset), seed=self.seed)

    def _sampler(self, micro_batch_size: int, rank: int, ranks: int) -> StepSampler:
        schedule = Constant(self.size).compile().until(self.size)
        return StepSampler(schedule, micro_batch_size, rank, ranks, allow_ragged=True)

    def _micros(self, variant: Variant, micro_batch_size: int, rank: int = 0, ranks: int = 1) -> list[Micro]:
        """The micro batches of the batch; if draws are fixed, their rows, which `_loss` collates while draws are fixed."""
        collate = self.task.collate if variant.random else list[Any]
        sampler = self._sampler(micro_batch_size, rank, ranks)
        with users_code("reading and collating the samples failed"):
            return list(Loader(self.task.dataset, self._order, sampler, collate=collate))

    def _loss(self, model: nn.Module, batch: Any, variant: Variant) -> tuple[Tensor, Any, Tensor | None]:
        batch = batch if variant.random else self.collate(batch)
        batch = to_device(batch, self.device)
        if variant.exact:
            batch = tree_map_only(Tensor, lambda t: t.double() if t.is_floating_point() else t, batch)
        loss_sum, weight, auxiliary = self.task.loss_of(model, batch)
        return loss_sum, weight, auxiliary if variant.auxiliary else None

    @contextmanager
    def _run(self, variant: Variant, seed: int | None = None, micro: int | None = None) -> Generator[nn.Module]:
        """Yield a copy of the model in training mode, switched to the variant; seed the generators."""
        pieces = "in one micro batch" if micro in (None, self.size) else f"in micro batches of {micro}"
        with ExitStack() as stack:
            precision = ", in fp64" if variant.exact else ""
            stack.enter_context(users_code(f"the task failed with {self.size} samples {pieces}{precision}"))
            model = copy.deepcopy(self.model).train()
            model.zero_grad()
            if variant.exact:
                model.double()
                stack.enter_context(_default_dtype(torch.float64))
            if not variant.random:
                without_dropout(model)
            if not variant.statistics:
                freeze_statistics(model)
            stack.enter_context(
                Deterministic(random=not variant.random, statistics=not variant.statistics, device=self.device)
            )
            if variant.exact:
                stack.enter_context(AllFp64())
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")  # the user's own run shows them; here they would repeat many times
            set_seeds(self.seed if seed is None else seed)
            yield model


def gradients(model: nn.Module) -> Gradient:
    """The gradients of a model, by parameter name."""
    named = ((name, p.grad) for name, p in model.named_parameters())
    return {name: g.detach().to("cpu", torch.float64, copy=True) for name, g in named if g is not None}


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Generator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
