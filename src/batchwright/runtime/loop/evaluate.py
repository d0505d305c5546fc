"""Evaluation: the loss over held-out samples, the same for any batch size and any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

from batchwright.core.errors import PlanError
from batchwright.core.ramp.rules import Constant
from batchwright.core.ramp.schedule import Schedule, Segment
from batchwright.runtime.data.loader import READ_RETRIES, READ_TIMEOUT, Loader
from batchwright.runtime.data.order import GlobalOrder
from batchwright.runtime.data.readers import ReadingHosts
from batchwright.runtime.data.sampler import StepSampler
from batchwright.runtime.device import pins, to_device, widest_float
from batchwright.runtime.state import generators
from batchwright.runtime.step.pipeline import PipelineAccumulator
from batchwright.runtime.task import Task

from .process import ThisProcess, collectives

_OFFERED = ("__getitems__", "describe", "retries_itself")


class Part:
    """A contiguous part of a map-style dataset, with ids from 0.

    >>> part = Part("abcdef", 4, 2)
    >>> len(part), part[0], part[1]
    (2, 'e', 'f')
    """

    def __init__(self, dataset: Any, start: int, size: int, *, length: int | None = None) -> None:
        length = len(dataset) if length is None else length  # given where this host must not open the dataset
        if size < 1 or start < 0 or start + size > length:
            raise PlanError(
                f"samples {start:,} to {start + size:,} are not a part of the dataset, which has {length:,}: "
                "training and evaluation need at least one sample each.",
                field="evaluation_samples",
                given=size,
                nearest=(max(1, min(size, length - 1)),),
            )
        self.dataset, self.start, self.size = dataset, start, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self.size:
            raise IndexError(index)
        return self.dataset[self.start + index]

    def __getattr__(self, name: str) -> Any:
        """What a dataset may offer to a reader, with the ids of this part."""
        inner = getattr(self.__dict__["dataset"], name) if name in _OFFERED and "dataset" in self.__dict__ else None
        if inner is None:
            raise AttributeError(name)

        def rows(ids: list[int]) -> Any:
            return inner([self.start + id for id in ids])

        def named(id: int) -> str:
            return inner(self.start + id)

        return rows if name == "__getitems__" else named if name == "describe" else inner


class Unread:
    """Stands for a dataset on a rank of a pipeline that needs no data.

    >>> len(Unread(3)), Unread(3)[2]
    (3, None)
    """

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> None:
        return None


def evaluate(
    task: Task,
    model: nn.Module,
    dataset: Any,
    batch_size: int,
    process: ThisProcess,
    *,
    seed: int = 0,
    progress: Callable[[int], None] = lambda samples: None,
    reading: ReadingHosts | None = None,
    read_timeout: float = READ_TIMEOUT,
    read_retries: int = READ_RETRIES,
    pipeline: PipelineAccumulator | None = None,
) -> tuple[float, float]:
    """Σ loss / Σ weight over a dataset, and Σ weight: one step that all ranks share, without gradients.

    `progress` is called before each micro batch, with the number of samples that this rank has evaluated. In a pipeline, micro
    batches pass the stages one by one: they may have different shapes.
    """
    has_data = pipeline is None or pipeline.first or pipeline.last
    size = len(dataset) if reading is None else reading.length(dataset)
    whole = Schedule((Segment(0, 0, size, 1),))
    if reading is not None:  # all rows of a step are held at once
        whole = Constant(min(size, batch_size * process.ranks)).compile().until(size)
    sampler = StepSampler(whole, min(batch_size, size), process.data_rank, process.data_ranks, allow_ragged=True)
    device, order = process.device, GlobalOrder(size, seed, shuffle=False)
    # On the device, so that the host waits for it once, at the end; weights that the host knows are added there.
    losses, weights = torch.zeros(2, dtype=widest_float(device), device=device)
    known = 0.0
    training, kept, evaluated = model.training, generators.capture(device), 0
    model.eval()
    try:
        with torch.no_grad():
            for micro in Loader(
                dataset if has_data else Unread(size),
                order,
                sampler,
                collate=task.collate if has_data else len,
                pin_memory=pins(device),
                loading_hosts=reading,
                read_timeout=read_timeout,
                read_retries=read_retries,
            ):
                progress(evaluated)
                evaluated += len(micro.positions)
                if pipeline is not None:
                    ((loss_sum, weight, _),) = pipeline.flow([micro], backward=False)
                    loss_sum = torch.as_tensor(loss_sum)
                else:
                    loss_sum, weight, _ = task.loss_of(model, to_device(micro.data, device))
                if micro.filler:
                    continue
                losses += loss_sum.detach().reshape(())
                if isinstance(weight, torch.Tensor) and weight.device == device:
                    weights += weight.detach().reshape(())
                else:
                    known += float(weight)
    finally:
        model.train(training)
        # How often a run is evaluated must not change what it trains.
        generators.restore(kept, device)
    sums = torch.stack([losses, weights + known])
    if process.ranks > 1:
        collectives.all_reduce(sums)
    loss, weight = cast(Any, sums).tolist()
    return loss / weight if weight else float("nan"), weight
