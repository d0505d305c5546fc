"""A batch of any size from two small ones: which dimension counts samples is seen, not asked."""

from __future__ import annotations

from copy import copy
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from batchwright.core.errors import RunError
from batchwright.runtime.task import Task

# Enough to meet a long one in most data, few enough to read at once.
FIRST = 8


def collated(task: Task, size: int) -> Any:
    """A batch as training sees it: the task's own example, or the largest of the dataset's first samples, repeated."""
    if task.example_batch is not None:
        return task.example_batch(size)
    if len(task.dataset) < 1:
        raise RunError("Task.dataset is empty: there is no sample to see a batch's shape from.", field="dataset")
    from torch.utils.data import default_collate

    sample = max((task.dataset[i] for i in range(min(FIRST, len(task.dataset)))), key=_elements)
    # A collator may take its samples apart (`sample.pop("labels")`): each gets a container of its own.
    own = copy if isinstance(sample, (dict, list)) else lambda same: same
    return (task.collate or default_collate)([own(sample) for _ in range(size)])


def _elements(sample: Any) -> int:
    leaves = tree_leaves(sample)
    return sum(leaf.numel() if isinstance(leaf, torch.Tensor) else int(getattr(leaf, "size", 1)) for leaf in leaves)


class Batches:
    """Fake batches of any size for a task; the dataset is read for two and three samples only, where that suffices."""

    def __init__(self, task: Task, mode: FakeTensorMode) -> None:
        self.task, self.mode = task, mode
        two, self.spec = tree_flatten(collated(task, 2))
        three, spec = tree_flatten(collated(task, 3))
        shapes = [_shape(a, b) for a, b in zip(two, three, strict=False)]
        self.leaves = two
        # None: something in the batch is no tensor, or grows in a way of its own. Then batches are collated.
        self.shapes = shapes if spec == self.spec and len(two) == len(three) and all(shapes) else None

    def of(self, size: int) -> Any:
        """A fake batch of `size` samples."""
        if self.shapes is None:
            return tree_map_only(torch.Tensor, self._fake, collated(self.task, size))
        leaves: list[Any] = []
        with self.mode:
            for leaf, shape in zip(self.leaves, self.shapes, strict=True):
                if isinstance(leaf, torch.Tensor):
                    dims = [constant + per_sample * size for constant, per_sample in shape or ()]
                    leaves.append(torch.empty(dims, dtype=leaf.dtype))
                else:
                    leaves.append(leaf)
        return tree_unflatten(leaves, self.spec)

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if isinstance(tensor, torch._subclasses.FakeTensor) else self.mode.from_tensor(tensor)


def _shape(two: Any, three: Any) -> list[tuple[int, int]] | None:
    """Each dimension as (constant, per sample), from batches of two and of three; None where that does not explain it."""
    if not isinstance(two, torch.Tensor):
        same = type(two) is type(three) and isinstance(two, (int, float, str, bool, type(None))) and two == three
        return [(0, 0)] if same else None
    if not isinstance(three, torch.Tensor) or two.dim() != three.dim() or two.dtype != three.dtype:
        return None
    dims: list[tuple[int, int]] = []
    for a, b in zip(two.shape, three.shape, strict=True):
        if a == b:
            dims.append((int(a), 0))
        elif a * 3 == b * 2:
            dims.append((0, int(a) // 2))
        else:
            return None
    return dims or [(0, 0)]
