"""Devices and the memory a job can use on them: what the runtime reports, not the nominal size.

A driver reserves a part, so the capacity in torch's out-of-memory text is below the nominal size and depends a little on
driver and ECC. Each row is the smallest capacity in public logs (2024-2026), attributed by its size if a log does not
name the device; h100-80g is from an out-of-memory message.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches

from batchwright.core.errors import ConfigError, did_you_mean

GIB = 2**30


@dataclass(frozen=True)
class Device:
    """A device, its usable memory, and the source of that number."""

    name: str
    memory_bytes: int
    source: str


_TORCH = "total capacity in torch's out-of-memory text, the smallest in public logs"
_XLA = "HBM capacity in XLA's out-of-memory text, public logs"
_NOMINAL = "nominal, from the vendor: a driver reserves a part of it"
_ROWS: tuple[tuple[str, float, str], ...] = (
    ("a100-40g", 39.39, _TORCH),
    ("a100-80g", 79.14, _TORCH),
    ("a10g-24g", 22.05, _TORCH),
    ("b200-180g", 178.36, _TORCH),
    ("h100-80g", 79.1, "total capacity in torch's out-of-memory text"),
    ("h200-141g", 139.72, _TORCH),
    ("l4-24g", 22.03, _TORCH),
    ("l40s-48g", 44.34, _TORCH),
    ("mi250x-64g", 64.0, _NOMINAL + "; one of the two dies"),
    ("mi300x-192g", 191.69, _TORCH),
    ("rtx-3090-24g", 23.55, _TORCH),
    ("rtx-4090-24g", 23.52, _TORCH),
    ("rtx-a6000-48g", 47.40, _TORCH),
    ("t4-16g", 14.56, _TORCH),
    ("tpu-v4", 30.75, _XLA),
    ("tpu-v5e", 15.75, _XLA),
    ("tpu-v5p", 95.74, _XLA),
    ("tpu-v6e", 31.25, _XLA),
    ("v100-16g", 16.0, _NOMINAL),
    ("v100-32g", 31.73, _TORCH),
)
DEVICES: dict[str, Device] = {name: Device(name, int(gib * GIB), source) for name, gib, source in _ROWS}


def device(name: str) -> Device:
    """The device of that name.

    >>> device("h100-80g").memory_bytes / 2**30
    79.09999999962747
    """
    key = name.strip().lower()
    if key in DEVICES:
        return DEVICES[key]
    near = tuple(n for n in DEVICES if key and n.startswith(key)) or tuple(get_close_matches(key, DEVICES, n=3))
    raise ConfigError(
        f"device={name[:40]!r} is not in the table: {', '.join(DEVICES)}.{did_you_mean(near)} "
        "Or give its memory: --memory 80GiB.",
        field="device",
        given=name[:40],
        nearest=near,
    )
