"""The hash that the ledger adds up: 128 bits per (step, id), summed in two lanes; the same for writer and audit.

    key  = mix'((step + 1) × 0x9E3779B97F4A7C15)         # 64-bit arithmetic throughout
    x    = (id + 1) × 0x9E3779B97F4A7C15 + key           # + 1, because 0 is a fixed point of mixing: it would not count
    low  = mix(x)                                        # splitmix64's finaliser (Steele et al. 2014)
    high = mix'(x)                                       # Moremur's constants (Pelle Evensen, 2019): another bijection

It finds mistakes, not forgers: who can write the ledger can write a ledger that fits.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]
_SPREAD = np.uint64(0x9E3779B97F4A7C15)
_LOW = (30, 0xBF58476D1CE4E5B9, 27, 0x94D049BB133111EB, 31)
_HIGH = (27, 0x3C79AC492BA7B653, 33, 0x1C69B3F74AC4AE35, 27)
_MASK = 2**64 - 1
# As in order.py: what fits a core's L2 cache.
_CHUNK = 16_384


def marks(step: int | NDArray[np.int64], ids: NDArray[np.int64]) -> tuple[Words, Words]:
    """The two lanes of each id's mark; `step` is one number, or one for each id.

    >>> low, high = marks(3, np.array([5, 6]))
    >>> combine(low, high) == combine(*(a + b for a, b in zip(marks(3, np.array([5])), marks(3, np.array([6])))))
    True
    >>> combine(low, high) == combine(*marks(4, np.array([5, 6])))
    False
    """
    x = ids.astype(np.uint64) * _SPREAD
    x += _SPREAD
    x += (
        np.uint64(_scramble(step))
        if isinstance(step, int)
        else _mixed(step.astype(np.uint64) * _SPREAD + _SPREAD, *_HIGH)
    )
    return _mixed(x, *_LOW), _mixed(x, *_HIGH)


def combine(low: Words, high: Words) -> tuple[int, int]:
    """The sums of both lanes."""
    return int(low.sum(dtype=np.uint64)), int(high.sum(dtype=np.uint64))


def span_hash(ids: NDArray[np.int64], first_step: int, global_batch_size: int) -> tuple[int, int]:
    """The sums over a span of whole steps, whose ids are given in the order of positions."""
    total_low = total_high = 0
    for start in range(0, len(ids), _CHUNK):
        part = ids[start : start + _CHUNK]
        steps = first_step + np.arange(start, start + len(part), dtype=np.int64) // global_batch_size
        low, high = combine(*marks(steps, part))
        total_low, total_high = total_low + low, total_high + high
    return total_low & _MASK, total_high & _MASK


def _scramble(step: int) -> int:
    """`_mixed` of one number, in Python's integers: a dozen numpy calls for a single step would cost more."""
    a, b, c, d, e = _HIGH
    x = (step + 1) * int(_SPREAD) & _MASK
    x = (x ^ (x >> a)) * b & _MASK
    x = (x ^ (x >> c)) * d & _MASK
    return x ^ (x >> e)


def _mixed(x: Words, a: int, b: int, c: int, d: int, e: int) -> Words:
    t = x ^ (x >> np.uint64(a))
    t *= np.uint64(b)
    t ^= t >> np.uint64(c)
    t *= np.uint64(d)
    t ^= t >> np.uint64(e)
    return t
