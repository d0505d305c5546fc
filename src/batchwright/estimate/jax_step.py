"""What a JAX file hands over: the step as a function, and its arguments for a batch size. No JAX is needed to say so."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class JaxStep:
    """One training step of JAX: `step(*arguments(micro_batch_size))`, compiled but not run.

    `arguments` gives arrays or `jax.ShapeDtypeStruct`s, parameters and optimizer state included; `donate` are the
    positions whose memory the outputs may reuse (`donate_argnums`). A step that is jitted already is taken as it is.

    >>> JaxStep(step=lambda x: x, arguments=lambda micro_batch_size: ((micro_batch_size, 4),)).donate
    ()
    """

    step: Callable[..., Any]
    arguments: Callable[[int], tuple[Any, ...]]
    donate: tuple[int, ...] = ()


def is_jax(source: str) -> bool:
    """Whether a file hands over a JaxStep: it imports the name.

    >>> is_jax("from batchwright.estimate import JaxStep"), is_jax("import torch")
    (True, False)
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return False  # importing it will say what is wrong
    return any(
        isinstance(node, ast.ImportFrom) and any(alias.name == "JaxStep" for alias in node.names)
        for node in ast.walk(tree)
    )
