"""Which device this process trains on."""

from __future__ import annotations

import torch

from batchwright.core.errors import PlanError

from .ranks import Ranks


def choose(name: str, ranks: Ranks) -> torch.device:
    """The device called `name`; "auto" is CUDA where there is any, else the CPU. An accelerator always has an index.

    Without an index in `name`, it is the local rank where this process sees several devices, and 0 where it sees one: a
    launcher may have given each process a device of its own (`srun --gpus-per-task=1`).
    """
    there = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if name == "auto":
        name = "cuda" if there is not None and there.type == "cuda" else "cpu"
    known = ("cpu", *([there.type] if there else []))
    kind, _, index = name.partition(":")
    if kind not in known or (index and not index.isdecimal()) or (kind == "cpu" and index not in ("", "0")):
        raise PlanError(
            f"device={name[:40]!r} is not here: torch {torch.__version__} finds {' and '.join(known)}.",
            field="device",
            given=name[:40],
            nearest=known,
        )
    if kind == "cpu":
        return torch.device("cpu")
    count = torch.accelerator.device_count()
    number = int(index) if index else ranks.local_rank if count > 1 else 0
    if number >= count:
        asked, remedy = f"device={name!r}", ""
        if not index:
            asked = f"local rank {number}, which needs {kind}:{number},"
            remedy = f" Start at most {count} processes on a node, or let each see more devices."
        raise PlanError(
            f"{asked} is beyond the {count} {kind} device{'s' * (count != 1)} that this process sees: indices are 0 to "
            f"{count - 1}.{remedy}",
            field="device",
            given=name[:40],
            nearest=tuple(f"{kind}:{i}" for i in range(count)),
        )
    return torch.device(kind, number)
