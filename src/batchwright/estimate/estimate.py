"""The estimate: the request is checked, the estimating process returns points; lines, limits and frontier follow from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from batchwright.core import codec
from batchwright.core.errors import EnvironmentFault, NothingFitsError, PlanError, Violation, raise_violations
from batchwright.core.numbers import format_bytes
from batchwright.processes.memory import available_memory

from . import worker
from .devices import Device
from .devices import device as find_device
from .fit import WORST_FIT, frontier, line, three_coefficients
from .records import (
    MOST,
    Calibration,
    Estimate,
    EstimateRequest,
    FrontierFit,
    FrontierRow,
    Length,
    Point,
    Slope,
)

PRECISIONS = ("fp32", "bf16")
TIMEOUT = 1800.0
MOST_RANKS = 2**14  # torch's fake group takes time for each rank: 16 s in all for this many (measured)
# A calibration should need this much memory at most: activations are larger than the constant, and it takes seconds.
COMFORTABLE = 2**30


def estimate(
    task: str,
    *,
    args: Mapping[str, Any] | None = None,
    device: str | Device | None = None,
    memory_bytes: int | None = None,
    margin_bytes: int = 0,
    micro_batch_sizes: Sequence[int] = (),
    sequence_lengths: Sequence[int] = (),
    precision: str = "fp32",
    checkpoint_activations: bool = False,
    ranks: int = 1,
    accumulation_steps: int = 1,
    calibrate: bool = False,
    timeout: float = TIMEOUT,
    progress: bool = False,
) -> Estimate:
    """Peak memory by micro batch size of `FILE.py:function`, without running it and without a device.

    >>> estimate("train.py:task", device="h100-80g", memory_bytes=2**30)
    Traceback (most recent call last):
    batchwright.core.errors.PlanError: device=h100-80g and memory_bytes=1073741824 are mutually exclusive.
    """
    found = find_device(device) if isinstance(device, str) else device
    memory = found.memory_bytes if found else memory_bytes
    request = EstimateRequest(
        task=task,
        args=dict(args or {}),
        micro_batch_sizes=tuple(sorted(set(micro_batch_sizes))),
        sequence_lengths=tuple(sorted(set(sequence_lengths))),
        memory_bytes=None if memory is None else memory - margin_bytes,
        precision=precision,
        checkpoint_activations=checkpoint_activations,
        ranks=ranks,
        accumulation_steps=accumulation_steps,
        accelerator=found is not None,
        progress=progress,
    )
    _check(request, found, memory_bytes, margin_bytes, calibrate)
    result = worker.run("estimate", request, timeout=timeout)
    points = tuple(codec.decode(Point, p) for p in result["points"])
    lengths = _lengths(points, result)
    if request.memory_bytes is not None and not any(row.max_micro_batch_size for row in lengths):
        raise _nothing_fits(request, found, points[0])
    fit, rows, notes = _frontier(points, lengths, request)
    calibration = _calibrate(request, points, lengths, timeout=timeout) if calibrate else None
    return Estimate(
        task=task,
        framework=result["framework"],
        device=found,
        memory_bytes=memory,
        margin_bytes=margin_bytes,
        precision=precision,
        checkpoint_activations=checkpoint_activations,
        ranks=ranks,
        accumulation_steps=accumulation_steps,
        points=points,
        lengths=lengths,
        max_micro_batch_size=lengths[-1].max_micro_batch_size,
        fit=fit,
        frontier=rows,
        calibration=calibration,
        assumptions=_assumptions(request, result["framework"], found),
        notes=(*result["notes"], *notes),
    )


def predict_slope(
    task: str,
    args: Mapping[str, Any] | None = None,
    *,
    memory_bytes: int | None = None,
    precision: str = "fp32",
    checkpoint_activations: bool = False,
    ranks: int = 1,
    accumulation_steps: int = 1,
    timeout: float = TIMEOUT,
) -> Slope:
    """Bytes per sample and the base, for the prober: a line on the activation-bound segment, estimated for the CPU.

    With `memory_bytes`, the line near that limit. Raises PlanError for a task that fake tensors cannot follow and
    RunError for a task that fails: the prober then takes its slope from two real trials.
    """
    request = EstimateRequest(
        task,
        dict(args or {}),
        memory_bytes=memory_bytes,
        precision=precision,
        ranks=ranks,
        checkpoint_activations=checkpoint_activations,
        accumulation_steps=accumulation_steps,
    )
    result = worker.run("estimate", request, timeout=timeout)
    points = tuple(codec.decode(Point, p) for p in result["points"])
    slope = _lengths(points, result)[-1].slope
    if slope is None:
        raise _nothing_fits(request, None, points[0])
    return replace(slope, peaks={p.micro_batch_size: p.peak_memory_bytes for p in points})


def _check(r: EstimateRequest, device: Device | None, memory: int | None, margin: int, calibrate: bool) -> None:
    wrong: list[Violation] = []
    if device is not None and memory is not None:
        message = f"device={device.name} and memory_bytes={memory} are mutually exclusive."
        wrong.append(Violation(message, "memory", memory, (device.memory_bytes,)))
    total = device.memory_bytes if device else memory
    if total is not None and not 0 <= margin < total:
        message = f"margin={format_bytes(margin)} leaves nothing of {format_bytes(total)}."
        wrong.append(Violation(message, "margin", margin, (0,)))
    if r.precision not in PRECISIONS:
        message = f"precision={r.precision!r} is not one of {', '.join(PRECISIONS)}."
        wrong.append(Violation(message, "precision", r.precision, PRECISIONS))
    counts = {
        "micro_batch_size": r.micro_batch_sizes,
        "sequence_length": r.sequence_lengths,
        "ranks": (r.ranks,),
        "accumulation_steps": (r.accumulation_steps,),
    }
    for name, values in counts.items():
        wrong += [Violation(f"{name}={v}: must be at least 1.", name, v, (1,)) for v in values if v < 1]
    if r.ranks > MOST_RANKS:
        message = f"ranks={r.ranks}: must be at most {MOST_RANKS:,}."
        wrong.append(Violation(message, "ranks", r.ranks, (MOST_RANKS,)))
    if calibrate and r.ranks > 1:
        message = (
            f"calibrate runs one real process, which cannot measure the shards of ranks={r.ranks}. Calibrate with "
            f"ranks=1, or probe with --ranks {r.ranks}."
        )
        wrong.append(Violation(message, "calibrate", True, (False,)))
    raise_violations(PlanError, wrong)


def _lengths(points: Sequence[Point], result: Mapping[str, Any]) -> tuple[Length, ...]:
    return tuple(
        Length(row["sequence_length"], _slope(points, row, result["framework"]), row["max_micro_batch_size"])
        for row in result["limits"]
    )


def _slope(points: Sequence[Point], limit: Mapping[str, Any], framework: str) -> Slope | None:
    """The line at the limit, or at the largest sizes if there is no limit.

    Torch's peaks are convex, so the line through the sizes below and above the limit is right there. XLA's are not
    convex, so only a line over a wide range is meaningful.
    """
    here = {p.micro_batch_size: p.peak_memory_bytes for p in points if p.sequence_length == limit["sequence_length"]}
    most = limit["max_micro_batch_size"] or 0
    within = {b: peak for b, peak in here.items() if b <= most}
    over = min((b for b in here if b > most), default=None)
    if framework == "torch" and within and over is not None:
        within = {most: here[most], over: here[over]}
    chosen = within if len(within) > 1 else here
    return line(chosen) if len(chosen) > 1 else None


def _nothing_fits(request: EstimateRequest, device: Device | None, smallest: Point) -> NothingFitsError:
    parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in smallest.breakdown.items() if size)
    where = "" if smallest.sequence_length is None else f" at sequence_length={smallest.sequence_length}"
    ways = [
        "--checkpoint-activations" if not request.checkpoint_activations else "",
        "--precision bf16" if request.precision == "fp32" else "",
        f"--ranks {request.ranks * 2} (sharded)",
        "a shorter sequence",
    ]
    return NothingFitsError(
        f"nothing fits: micro_batch_size={smallest.micro_batch_size}{where} needs an estimated "
        f"{format_bytes(smallest.peak_memory_bytes)} ({parts}), and {device.name if device else 'the memory given'} has "
        f"{format_bytes(request.memory_bytes or 0)}. These need less: {', '.join(w for w in ways if w)}.",
        field="memory",
        given=request.memory_bytes,
        nearest=(smallest.peak_memory_bytes,),
    )


def _frontier(
    points: Sequence[Point], lengths: Sequence[Length], request: EstimateRequest
) -> tuple[FrontierFit | None, tuple[FrontierRow, ...], tuple[str, ...]]:
    if len(lengths) < 2:
        return None, (), ()
    lines = {row.sequence_length: row.slope for row in lengths if row.sequence_length and row.slope}
    fit = three_coefficients(lines, points)
    if fit is None:
        return None, (), ("No frontier: it needs two micro batch sizes at each of two sequence lengths.",)
    if fit.error > WORST_FIT:
        note = (
            f"No frontier: constant + B·T + B·T² differs from the estimates by up to {fit.error:.1%}, so it does not "
            "predict other lengths."
        )
        return fit, (), (note,)
    if request.memory_bytes is None:
        return fit, (), ()
    known = {row.sequence_length: row.max_micro_batch_size or 0 for row in lengths if row.sequence_length is not None}
    return fit, frontier(fit, request.memory_bytes, known), ()


def _assumptions(request: EstimateRequest, framework: str, device: Device | None) -> tuple[str, ...]:
    if framework == "jax":
        return (
            "XLA's plan for the CPU is used instead of the device's: not validated on a device. XLA plans every shape "
            "separately, so neighbouring sizes may differ by a few percent.",
            "Per device: sharding inside the function counts only if it has the devices to compile for.",
        )
    lines = [
        "CPU kernels are used instead of the device's: not validated on a device. The estimate does not include the "
        "device's context, workspaces of its kernels, fragmentation of its allocator.",
        "Every sample is as large as the largest of the dataset's first 8 (or as example_batch makes them).",
    ]
    if request.precision == "bf16" and request.ranks == 1:
        lines.append("bf16: autocast; parameters, gradients and optimizer state keep the task's dtypes.")
    if request.precision == "bf16" and request.ranks > 1:
        lines.append("bf16: FSDP2's MixedPrecisionPolicy, parameters gathered in bf16 and gradients reduced in fp32.")
    if request.ranks > 1:
        lines.append(f"Sharded by FSDP2 over {request.ranks} ranks: every repeated block, then the rest. Per rank.")
    if device is not None:
        lines.append("The optimizer updates all parameters at once (foreach), as torch does on devices.")
    if request.accumulation_steps == 1:
        lines.append(
            "One micro batch per step; with accumulation_steps above 1 gradients also exist during the forward."
        )
    return tuple(lines)


def _calibrate(
    request: EstimateRequest, points: Sequence[Point], lengths: Sequence[Length], *, timeout: float
) -> Calibration:
    """Run the largest estimated size that this machine can easily run, and compare."""
    last = lengths[-1]
    here = [p for p in points if p.sequence_length == last.sequence_length]
    chosen = choose(
        [p for p in here if p.micro_batch_size <= (last.max_micro_batch_size or MOST)] or here, available_memory()
    )
    trial = replace(
        request,
        micro_batch_sizes=(chosen.micro_batch_size,),
        sequence_lengths=() if chosen.sequence_length is None else (chosen.sequence_length,),
    )
    estimated = chosen.peak_memory_bytes
    if request.accelerator:  # the trial runs on the CPU: compare it with an estimate for the CPU
        again = worker.run("estimate", replace(trial, accelerator=False, memory_bytes=None), timeout=timeout)
        estimated = int(again["points"][0]["peak_memory_bytes"])
    measured = int(worker.run("trial", trial, timeout=timeout)["measured_bytes"])
    limit = None
    if request.memory_bytes is not None and last.slope is not None and last.slope.bytes_per_sample > 0:
        room = request.memory_bytes - (measured - estimated) - last.slope.base_bytes
        limit = max(0, min(int(room // last.slope.bytes_per_sample), last.max_micro_batch_size or 0))
    return Calibration(
        chosen.micro_batch_size, chosen.sequence_length, estimated, measured, measured - estimated, limit
    )


def choose(points: Sequence[Point], free: int) -> Point:
    """The largest point within one GiB and half of the free memory, else the smallest one."""
    small = [p for p in points if p.peak_memory_bytes <= min(COMFORTABLE, free // 2)]
    best = max(small, key=lambda p: p.peak_memory_bytes, default=None)
    best = best or min(points, key=lambda p: p.peak_memory_bytes)
    if best.peak_memory_bytes > free:
        raise EnvironmentFault(
            f"calibrate would run micro_batch_size={best.micro_batch_size}, estimated at "
            f"{format_bytes(best.peak_memory_bytes)}, and this machine has {format_bytes(free)} free. Give a smaller "
            "--micro-batch-size, or arguments that make the model smaller.",
            field="calibrate",
            given=best.micro_batch_size,
        )
    return best
