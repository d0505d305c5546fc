"""The causes that `check` can name, so that one can be allowed by name before anything is run."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal, get_args

from .errors import Violation

Cause = Literal[
    "scaled-by-accumulation", "mean-of-means", "ragged-tail", "padding", "in-batch-negatives", "auxiliary-scaled",
    "auxiliary-per-micro-batch", "batch-norm", "keeps-state", "dropout", "random-draws", "precision", "bf16-accumulator",
    "fp16-accumulator", "step-counted-schedule", "rank-dependent", "unexplained",
]  # fmt: skip
CAUSES: tuple[str, ...] = get_args(Cause)


def unknown_causes(names: Collection[str]) -> list[Violation]:
    """What is wrong with causes to allow.

    >>> unknown_causes(["batchnorm"])[0].message
    "allow='batchnorm' is no cause that check can name. Nearest: batch-norm."
    """
    from difflib import get_close_matches  # only wrong input pays for it

    found: list[Violation] = []
    for name in names:
        if name not in CAUSES:
            near = tuple(get_close_matches(name, CAUSES, n=2))
            there = f"Nearest: {', '.join(near)}." if near else f"There are: {', '.join(CAUSES)}."
            text = f"allow={name[:40]!r} is no cause that check can name. {there}"
            found.append(Violation(text, "allow", name[:40], near or CAUSES))
    return found
