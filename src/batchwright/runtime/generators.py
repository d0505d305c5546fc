"""The random generators of a process as JSON and back: Python's, numpy's, torch's, and those of its CUDA device."""

from __future__ import annotations

import base64
import random
from hashlib import blake2b
from typing import Any

import numpy as np
import torch


def capture() -> dict[str, Any]:
    """The state of all generators, as plain JSON."""
    version, internal, gauss = random.getstate()
    name, keys, place, has_gauss, cached = np.random.get_state(legacy=True)  # type: ignore[misc]
    state: dict[str, Any] = {
        "python": [version, list(internal), gauss],
        "numpy": [str(name), _packed(np.asarray(keys, "<u4").tobytes()), int(place), int(has_gauss), float(cached)],
        "torch": _packed(torch.get_rng_state().numpy().tobytes()),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = _packed(torch.cuda.get_rng_state().numpy().tobytes())
    return state


def restore(state: dict[str, Any]) -> bool:
    """Put all generators back to where `capture` saw them.

    >>> kept = capture(); drawn = torch.rand(3), random.random(), np.random.rand()
    >>> restore(kept) and (torch.rand(3).equal(drawn[0]), random.random(), np.random.rand()) == (True, *drawn[1:])
    True
    """
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, place, has_gauss, cached = state["numpy"]
    np.random.set_state(
        (name, np.frombuffer(base64.b64decode(keys), "<u4").astype(np.uint32), place, has_gauss, cached)
    )
    torch.set_rng_state(_tensor(state["torch"]))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(_tensor(state["cuda"]))
    return True


def reseed(seed: int, position: int, rank: int) -> None:
    """Generators for a rank that has none to restore: a pure function of (seed, position, rank)."""
    text = f"batchwright rank 1: seed {seed}, position {position}, rank {rank}"
    number = int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.manual_seed(number)


def _packed(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
