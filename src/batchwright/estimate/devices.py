"""Devices and the memory a job can use on them: what the runtime reports, not the nominal size.

A driver reserves a part, so the capacity in torch's out-of-memory text is below the nominal size and depends a little on
driver and ECC. Each row is the smallest capacity in public logs (2024-2026), attributed by its size if a log does not
name the device; h100-80g is from an out-of-memory message.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches

from batchwright.core.errors import ConfigError, did_you_mean
from batchwright.core.numbers import format_bytes

GIB, MIB = 2**30, 2**20


@dataclass(frozen=True)
class Allowance:
    """Memory that a device needs beside the tensors of a job: an assumption, not a measurement.

    >>> Allowance(512 * 2**20, 256 * 2**20, 3.0).usable(24 * 2**30) / 2**30
    22.572815533727407
    """

    context_bytes: int = 0  # the device's context and the code of its kernels
    workspace_bytes: int = 0  # scratch memory of libraries
    fragmentation_percent: float = 0.0  # of the tensors: what the allocator cannot use

    def usable(self, memory_bytes: int) -> int:
        """The bytes of tensors that fit safely; below 1 if nothing does."""
        room = memory_bytes - self.context_bytes - self.workspace_bytes
        return int(room / (1 + self.fragmentation_percent / 100))

    def text(self) -> str:
        """The parts, as output shows them."""
        return (
            f"{format_bytes(self.context_bytes)} context, {format_bytes(self.workspace_bytes)} workspaces and "
            f"{self.fragmentation_percent:g}% fragmentation"
        )


NO_ALLOWANCE = Allowance()
# Assumptions. A CUDA context with loaded kernels takes a few hundred MiB, cuBLAS's workspaces tens to hundreds.
_GPU = Allowance(512 * MIB, 256 * MIB, 3.0)
# XLA reports its capacity without its own reservations, and plans all memory ahead.
_TPU = Allowance(0, 0, 3.0)


@dataclass(frozen=True)
class Device:
    """A device, its usable memory, the source of that number, and what it needs beside tensors."""

    name: str
    memory_bytes: int
    source: str
    allowance: Allowance = _GPU


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
DEVICES: dict[str, Device] = {
    name: Device(name, int(gib * GIB), source, _TPU if source == _XLA else _GPU) for name, gib, source in _ROWS
}


def device(name: str) -> Device:
    """The device of that name, or of a part of it that only one name has.

    >>> device("h100").name, device("RTX 4090").name, device("a100-80gb").name
    ('h100-80g', 'rtx-4090-24g', 'a100-80g')
    """
    wanted = re.sub(r"(?<=\d)gb?$", "g", re.sub(r"[\s_-]+", "-", name.strip().lower()))
    if wanted in DEVICES:
        return DEVICES[wanted]
    if size := re.fullmatch(r"(\d+)-?(?:g|gb|gib)", wanted):
        having = tuple(known for known in DEVICES if known.endswith(f"-{size[1]}g"))
        whose = f" of {' and '.join(having)}" if having else ""
        raise ConfigError(
            f"device={name[:40]!r} is a size{whose}, and not a name. Give a name, or --memory {size[1]}GiB.",
            field="device",
            given=name[:40],
            nearest=having,
        )
    short = tuple(known for known in DEVICES if wanted and wanted.replace("-", "") in _parts(known))
    if len(short) == 1:
        return DEVICES[short[0]]
    if short:
        raise ConfigError(
            f"device={name[:40]!r} is ambiguous: {', '.join(short)}. Give one of these names.",
            field="device",
            given=name[:40],
            nearest=short,
        )
    near = tuple(get_close_matches(wanted, DEVICES, n=3))
    raise ConfigError(
        f"device={name[:40]!r} is not in the table: {', '.join(DEVICES)}.{did_you_mean(near)} "
        "Or give its memory: --memory 80GiB.",
        field="device",
        given=name[:40],
        nearest=near,
    )


def _parts(name: str) -> set[str]:
    """Every run of whole words of a name, without its dashes: `rtx-4090-24g` is also `4090` and `rtx4090`."""
    words = name.split("-")
    return {"".join(words[i:j]) for i in range(len(words)) for j in range(i + 1, len(words) + 1)}
