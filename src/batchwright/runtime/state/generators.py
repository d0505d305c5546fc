"""The random generators of a process, Python's, numpy's and torch's: as JSON and back, and put aside for a while."""

from __future__ import annotations

import base64
import ctypes
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

import numpy as np
import torch

from batchwright.core.errors import RunError

# numpy's `mt19937_state`: 624 words, and how many of them are used up.
_WORDS, _BYTES = 624 * 4, 624 * 4 + 4


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
    set_seeds(number)


def set_seeds(seed: int) -> None:
    """Seed Python's, numpy's and torch's generators, those of the accelerators included."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)  # pyright: ignore[reportUnknownMemberType]


def seed_sample(seed: int, position: int) -> None:
    """What `dataset[i]` draws at a position: a pure function of (seed, position)."""
    text = b"batchwright sample 1: seed %d, position %d" % (seed, position)
    number = int.from_bytes(blake2b(text, digest_size=8).digest(), "little")
    random.seed(number)
    np.random.seed(number % 2**32)
    # Not torch.manual_seed, which would reset the accelerator's generators as well.
    torch.default_generator.manual_seed(number)


@contextmanager
def put_back() -> Iterator[None]:
    """Put the three back to where they are now, exactly, when the block ends; a cached normal of numpy's included.

    >>> random.seed(1); expected = random.random(); random.seed(1)
    >>> with put_back(): seed_sample(seed=0, position=7)
    >>> random.random() == expected
    True
    """
    state, torch_state, numpy_state = random.getstate(), torch.default_generator.get_state(), _numpy_state()
    try:
        yield
    finally:
        random.setstate(state)
        torch.default_generator.set_state(torch_state)
        _set_numpy_state(*numpy_state)


# numpy copies its state number by number, 90 µs for there and back: more than reading many a micro batch. So the memory
# that `ctypes.state_address` names is copied. What it lacks is the second of a pair of normals, which numpy keeps for the
# next call: drawing one shows it, since a draw that leaves the state as it was came from there.
def _numpy_state() -> tuple[bytes, float | None]:
    address = _numpy_address()
    state, normal = ctypes.string_at(address, _BYTES), np.random.standard_normal()
    return state, float(normal) if ctypes.string_at(address, _BYTES) == state else None


def _set_numpy_state(state: bytes, normal: float | None) -> None:
    if normal is not None:
        words, place = np.frombuffer(state[:_WORDS], np.uint32), int.from_bytes(state[_WORDS:], sys.byteorder)
        np.random.set_state(("MT19937", words, place, 1, normal))
        return
    np.random.seed(0)  # forgets a normal that was kept meanwhile
    ctypes.memmove(_numpy_address(), state, _BYTES)


def _numpy_address() -> int:
    held: Any = np.random.get_bit_generator()  # pyright: ignore[reportAttributeAccessIssue]
    if type(held) is not np.random.MT19937:
        raise RunError(
            f"numpy's global generator was replaced by {type(held).__name__}, which cannot be seeded by position. Put "
            "MT19937 back, numpy's default, and draw from a Generator of your own.",
            field="numpy",
            given=type(held).__name__,
            nearest=("MT19937",),
        )
    return held.ctypes.state_address


def _packed(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
