"""What kind of number a loss returns, by experiment: how its gradient changes if a micro batch is doubled or joined.

Let G(X) be the gradient of the loss for the samples X, and XX the same samples twice:

    G(XX) = 2 G(X)   it grows with the batch: a sum          G(XX) = G(X)   it does not: a mean
    A = G(XX) - G(X) is the part that is a sum               M = 2 G(X) - G(XX) is the part that is a mean

For two different pieces P and Q, a loss that can be split has G(PQ) in the span of G(P) and G(Q). If it is not in the
span, a sample's gradient depends on the other samples in its micro batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from batchwright.processes.endings import users_code

from .measured import Gradient, Measures, Variant, combine, dot, group_errors, norm

Kind = Literal["sum", "mean", "mixed", "other", "zero"]
# The samples of a piece, at most. The largest micro batch in the experiments is two pieces three times.
LARGEST_PIECE = 4


@dataclass(frozen=True)
class Structure:
    """What the experiments show about a loss and its weight; factors are those of a doubled batch."""

    loss: Kind
    loss_factor: float
    weight_factor: float
    weight_joined: float  # w(PQ) / (w(P) + w(Q)): 1 if weights add up
    shares: tuple[float, ...]  # the best fit G(PQ) = shares[0] G(P) + shares[1] G(Q)
    residual: float  # the distance of G(PQ) from that fit, relative to G(PQ)
    mean_modules: tuple[str, ...]  # the modules with the gradient of the mean inside a sum
    padding: bool | None  # whether `residual` is zero for samples that need no padding; None: unknown
    auxiliary: Kind | None
    auxiliary_joined: float  # the relative distance of the auxiliary of PQ from the weighted mean of P's and Q's


def structure(rig: Measures, variant: Variant, tolerance: float) -> Structure:
    """Run the experiments on the first samples of the batch."""
    half = max(1, min(LARGEST_PIECE, len(rig.rows) // 2))
    first, second = rig.rows[:half], rig.rows[half : 2 * half] or rig.rows[:half]
    both = [*first, *second]
    one, two, joined = (rig.piece(variant, rows) for rows in (first, second, both))
    doubled = rig.piece(variant, both * 2)
    kind, factor = kind_of(joined.loss, doubled.loss, tolerance)
    if kind == "mixed":  # a sum plus a mean grows linearly with the number of copies: its second difference is zero
        tripled = rig.piece(variant, both * 3).loss
        second_difference = norm(combine((1.0, tripled), (-2.0, doubled.loss), (1.0, joined.loss)))
        kind = "mixed" if second_difference <= tolerance * norm(doubled.loss) else "other"
    basis = [one.loss, two.loss]
    mean_part = combine((2.0, joined.loss), (-1.0, doubled.loss))
    if kind == "mixed":  # each piece has two parts that grow differently
        twice = [rig.piece(variant, rows * 2).loss for rows in (first, second)]
        basis += [combine((1.0, t), (-1.0, g)) for t, g in zip(twice, basis, strict=True)]
    shares, residual = fit(joined.loss, basis)
    auxiliary, auxiliary_joined = None, 0.0
    if joined.auxiliary is not None and doubled.auxiliary is not None:
        auxiliary, _ = kind_of(joined.auxiliary, doubled.auxiliary, tolerance)
        total = one.weight + two.weight
        means = combine((one.weight / total, one.auxiliary or {}), (two.weight / total, two.auxiliary or {}))
        gap = norm(combine((1.0, means), (-1.0, joined.auxiliary)))
        auxiliary_joined = gap / (norm(joined.auxiliary) or 1.0)
    return Structure(
        kind,
        factor,
        doubled.weight / joined.weight if joined.weight else 0.0,
        joined.weight / ((one.weight + two.weight) or 1.0),
        tuple(shares[:2]),
        residual,
        tuple(list(group_errors(mean_part, {}, norm(joined.loss)))[:3]) if kind == "mixed" else (),
        _padding(rig, variant, tolerance) if residual > tolerance and kind != "mixed" else None,
        auxiliary,
        auxiliary_joined,
    )


def kind_of(single: Gradient, doubled: Gradient, tolerance: float) -> tuple[Kind, float]:
    """Sum, mean, or a mixture, from the gradients of a batch and of the same batch twice.

    >>> g = {"a": np.array([3.0, 4.0])}
    >>> kind_of(g, combine((2.0, g)), 1e-8), kind_of(g, g, 1e-8)
    (('sum', 2.0), ('mean', 1.0))
    """
    size = norm(single)
    if size == 0:
        return "zero", 0.0
    factor = dot(doubled, single) / size**2
    if norm(combine((1.0, doubled), (-2.0, single))) <= tolerance * size:
        return "sum", factor
    if norm(combine((1.0, doubled), (-1.0, single))) <= tolerance * size:
        return "mean", factor
    along = norm(combine((1.0, doubled), (-factor, single))) <= tolerance * size
    return "other" if along else "mixed", factor


def fit(target: Gradient, basis: Sequence[Gradient]) -> tuple[list[float], float]:
    """The factors of the least-squares fit of the target, and the norm of the rest relative to the target.

    >>> a, b = {"a": np.array([1.0, 0.0])}, {"a": np.array([0.0, 1.0])}
    >>> factors, residual = fit({"a": np.array([3.0, 4.0])}, [a, b])
    >>> [round(f, 9) for f in factors], residual < 1e-12
    ([3.0, 4.0], True)
    """
    size = norm(target)
    if size == 0:
        return [0.0] * len(basis), 0.0
    sizes = [norm(b) or 1.0 for b in basis]
    gram = np.array([[dot(a, b) for b in basis] for a in basis])
    scale = np.array(sizes)
    right = np.array([dot(b, target) for b in basis])
    inverse = np.linalg.pinv(gram / np.outer(scale, scale), rcond=1e-12, hermitian=True)
    factors: list[float] = (inverse @ (right / scale) / scale).tolist()
    rest = combine((1.0, target), *((-f, b) for f, b in zip(factors, basis, strict=True)))
    return factors, norm(rest) / size


def _padding(rig: Measures, variant: Variant, tolerance: float) -> bool | None:
    """Whether two samples of the same shape do not affect each other, while others do: then padding is the cause."""
    rows = rig.rows[: 4 * LARGEST_PIECE]
    with users_code("collating single samples failed"):
        shapes = [rig.shapes([row]) for row in rows]
    pairs = [(i, j) for i in range(len(rows)) for j in range(i + 1, len(rows))]
    alike = next(((i, j) for i, j in pairs if shapes[i] == shapes[j]), None)
    if len(set(shapes)) == 1 or alike is None:
        return False if len(set(shapes)) == 1 else None
    i, j = (rows[k] for k in alike)
    one, two, joined = (rig.piece(variant, part).loss for part in ([i], [j], [i, j]))
    return fit(joined, [one, two])[1] <= tolerance
