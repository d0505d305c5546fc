"""One real trial beside its estimate: the difference is the constant that tensors do not show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from batchwright.core.errors import EnvironmentFault

from . import process
from .devices import human
from .records import MOST, Calibration, Length, Point, Request

# Enough for activations to stand out from the constant, little enough to be done in seconds.
COMFORTABLE = 2**30


def calibrate(request: Request, points: Sequence[Point], lengths: Sequence[Length], *, timeout: float) -> Calibration:
    """Run the largest estimated size that this machine bears with ease, and compare."""
    last = lengths[-1]
    here = [p for p in points if p.sequence_length == last.sequence_length]
    chosen = choose([p for p in here if p.micro_batch_size <= (last.max_micro_batch_size or MOST)] or here, available())
    trial = replace(
        request,
        micro_batch_sizes=(chosen.micro_batch_size,),
        sequence_lengths=() if chosen.sequence_length is None else (chosen.sequence_length,),
    )
    estimated = chosen.peak_memory_bytes
    if request.accelerator:  # the trial is the CPU's: compare it with the CPU's estimate
        again = process.run("estimate", replace(trial, accelerator=False, memory_bytes=None), timeout=timeout)
        estimated = int(again["points"][0]["peak_memory_bytes"])
    measured = int(process.run("trial", trial, timeout=timeout)["measured_bytes"])
    limit = None
    if request.memory_bytes is not None and last.slope is not None and last.slope.bytes_per_sample > 0:
        room = request.memory_bytes - (measured - estimated) - last.slope.base_bytes
        limit = max(0, min(int(room // last.slope.bytes_per_sample), last.max_micro_batch_size or 0))
    return Calibration(
        chosen.micro_batch_size, chosen.sequence_length, estimated, measured, measured - estimated, limit
    )


def choose(points: Sequence[Point], free: int) -> Point:
    """The largest point within one GiB and half of the free memory, or the smallest there is if it fits at all."""
    small = [p for p in points if p.peak_memory_bytes <= min(COMFORTABLE, free // 2)]
    best = max(small, key=lambda p: p.peak_memory_bytes, default=None)
    best = best or min(points, key=lambda p: p.peak_memory_bytes)
    if best.peak_memory_bytes > free:
        raise EnvironmentFault(
            f"calibrate would run micro_batch_size={best.micro_batch_size}, estimated at "
            f"{human(best.peak_memory_bytes)}, and this machine has {human(free)} free. Give a smaller "
            "--micro-batch-size, or arguments that make the model smaller.",
            field="calibrate",
            given=best.micro_batch_size,
        )
    return best


def available() -> int:
    """Bytes this machine has free, by the kernel's own reckoning."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        raise EnvironmentFault("--calibrate reads /proc/meminfo, and this system has none: it needs Linux.") from None
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
