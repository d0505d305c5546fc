"""The names of the causes that `check` can find. Without torch, which takes seconds to import."""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches
from typing import Literal, get_args

from batchwright.core.errors import Violation

Cause = Literal[
    "scaled-by-accumulation",
    "ignores-num-items-in-batch",
    "mean-of-means",
    "partial-window",
    "ragged-tail",
    "padding",
    "in-batch-negatives",
    "auxiliary-scaled",
    "auxiliary-per-micro-batch",
    "batch-norm",
    "keeps-state",
    "dropout",
    "random-draws",
    "precision",
    "bf16-accumulator",
    "fp16-accumulator",
    "step-counted-schedule",
    "rank-dependent",
    "pipeline-stages",
    "unexplained",
]
CAUSES: tuple[str, ...] = get_args(Cause)


def unknown_causes(names: Collection[str], causes: Collection[str] = CAUSES) -> list[Violation]:
    """A violation for every name to allow that is not a cause.

    >>> unknown_causes(["batchnorm"])[0].message
    "allow='batchnorm' is not a cause that check can name. Nearest: batch-norm."
    """
    found: list[Violation] = []
    for name in names:
        if name not in causes:
            near = tuple(get_close_matches(name, causes, n=2))
            hint = f"Nearest: {', '.join(near)}." if near else f"The causes are: {', '.join(causes)}."
            text = f"allow={name[:40]!r} is not a cause that check can name. {hint}"
            found.append(Violation(text, "allow", name[:40], near or tuple(causes)))
    return found
