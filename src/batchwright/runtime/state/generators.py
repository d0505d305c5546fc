"""The random generators of a process: Python's, numpy's and torch's. Seed them, save them as JSON, set them aside.

torch's generators are left out as long as nobody has imported torch, so that a program without it reads data as well.
"""

from __future__ import annotations

import base64
import random
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from batchwright.core.errors import RunError

if TYPE_CHECKING:
    import torch

# numpy's type stubs do not know these two functions.
_bit_generator = cast(Any, np.random).get_bit_generator
_set_bit_generator = cast(Any, np.random).set_bit_generator
# Generators that numpy's functions draw from inside `put_back`. Making one takes 100 µs.
_SPARES: list[np.random.MT19937] = []


def set_seeds(seed: int, *, accelerator: bool = True) -> None:
    """Seed the three generators: the only place in this package that does. `accelerator`: the devices' generators, too.

    >>> import torch
    >>> set_seeds(3); first = random.random(), np.random.rand(), float(torch.rand(()))
    >>> import torch
    >>> set_seeds(3); first == (random.random(), np.random.rand(), float(torch.rand(())))
    True
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    if (torch := _torch()) is None:
        return
    if accelerator:
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def seed_rank(seed: int, position: int, rank: int) -> None:
    """Seed a rank that has no saved generators to restore: a pure function of (seed, position, rank)."""
    set_seeds(_hashed(b"batchwright rank 1: seed %d, position %d, rank %d" % (seed, position, rank)) >> 1)


def seed_sample(seed: int, position: int, *, accelerator: bool = False) -> None:
    """Seed what `dataset[i]`, or a rollout, draws at a position: a pure function of (seed, position)."""
    set_seeds(_hashed(b"batchwright sample 1: seed %d, position %d" % (seed, position)), accelerator=accelerator)


def seed_collate(seed: int, position: int) -> None:
    """Seed what `collate` draws for a micro batch whose last sample is at a position. Who read the samples does not matter."""
    set_seeds(_hashed(b"batchwright collate 1: seed %d, position %d" % (seed, position)), accelerator=False)


def seen() -> tuple[Any, ...]:
    """The three generators' state, to compare: has a read drawn from them?

    >>> import torch
    >>> before = seen(); before == seen(), bool(torch.rand(())) and before == seen()
    (True, False)
    """
    numpy = np.random.get_state(legacy=False)
    key = numpy["state"]["key"].tobytes()
    torch = _torch()
    cpu = torch.default_generator.get_state().numpy().tobytes() if torch else b""
    return random.getstate(), key, numpy["state"]["pos"], numpy["has_gauss"], cpu


def capture(device: torch.device | None = None) -> dict[str, Any]:
    """The state of all generators, as plain JSON; with the one of `device`, if it is an accelerator."""
    import torch

    from batchwright.runtime.device import generator_state

    version, internal, gauss = random.getstate()
    numpy = np.random.get_state(legacy=False)
    if numpy["bit_generator"] != "MT19937":
        raise _replaced(numpy["bit_generator"])
    key = _packed(np.asarray(numpy["state"]["key"], "<u4").tobytes())
    state: dict[str, Any] = {
        "python": [version, list(internal), gauss],
        "numpy": ["MT19937", key, numpy["state"]["pos"], numpy["has_gauss"], numpy["gauss"]],
        "torch": _packed(torch.get_rng_state().numpy().tobytes()),
    }
    if device is not None and device.type != "cpu":
        state[device.type] = _packed(generator_state(device).numpy().tobytes())
    return state


def restore(state: Mapping[str, Any], device: torch.device | None = None) -> bool:
    """Set all generators to a state that `capture` returned; if it is that of another kind of device, change nothing: False.

    >>> import torch
    >>> kept = capture(); drawn = torch.rand(3), random.random(), np.random.rand()
    >>> restore(kept), (torch.rand(3).equal(drawn[0]), random.random(), np.random.rand()) == (True, *drawn[1:])
    (True, True)
    """
    import torch

    from batchwright.runtime.device import set_generator_state

    accelerator = None if device is None or device.type == "cpu" else device
    if set(state) - {"python", "numpy", "torch"} != ({accelerator.type} if accelerator else set()):
        return False
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, packed, place, has_gauss, cached = state["numpy"]
    key = np.frombuffer(base64.b64decode(packed), "<u4").astype(np.uint32)
    np.random.set_state((name, key, place, has_gauss, cached))
    torch.set_rng_state(_tensor(state["torch"]))
    if accelerator is not None:
        set_generator_state(accelerator, _tensor(state[accelerator.type]))
    return True


@contextmanager
def put_back() -> Generator[None]:
    """Restore the three generators exactly when the block ends, including the normal that numpy keeps for the next call.

    >>> random.seed(1); expected = random.random(); random.seed(1)
    >>> with put_back(): seed_sample(seed=0, position=7)
    >>> random.random() == expected
    True
    """
    own = _bit_generator()
    if type(own) is not np.random.MT19937:
        raise _replaced(type(own).__name__)
    torch, python, numpy = _torch(), random.getstate(), np.random.get_state(legacy=False)
    cpu = torch.default_generator.get_state() if torch else None
    # Writing a state into numpy's generator takes 35 µs. Exchanging the generator takes 0.3 µs, but forgets the normal.
    spare = _SPARES.pop() if _SPARES else np.random.MT19937(0)
    try:
        _set_bit_generator(spare)
        yield
    finally:
        random.setstate(python)
        if torch:
            torch.default_generator.set_state(cpu)
        _set_bit_generator(own)
        _SPARES.append(spare)
        if numpy["has_gauss"]:
            np.random.set_state(numpy)


@contextmanager
def draws_of_loss(seed: int, step: int, sample: int, device: torch.device) -> Generator[None]:
    """What a loss draws in the block, on the host and on `device`, is a pure function of (seed, step, first sample). After it,
    all generators go on as if nothing had been drawn."""
    from batchwright.runtime.device import drawing_from

    number = _hashed(b"batchwright loss 1: seed %d, step %d, sample %d" % (seed, step, sample))
    with put_back(), drawing_from(device, number):
        set_seeds(number, accelerator=False)
        yield


def _torch() -> Any:
    """torch, if it was imported."""
    return sys.modules.get("torch")


def _replaced(kind: str) -> RunError:
    return RunError(
        f"numpy's global generator was replaced by {kind}, which cannot be seeded by position. Put MT19937 back, numpy's "
        "default, and draw from your own Generator.",
        field="numpy",
        given=kind,
        nearest=("MT19937",),
    )


def _hashed(text: bytes) -> int:
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little")


def _packed(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _tensor(text: str) -> torch.Tensor:
    import torch

    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
