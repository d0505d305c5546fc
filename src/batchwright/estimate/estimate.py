"""The estimate: what was asked, checked; points from the estimating process; lines, limits and frontier from those."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from batchwright.core import codec
from batchwright.core.errors import NothingFitsError, PlanError, Violation, raise_violations

from . import process
from .calibrate import calibrate as _calibrate
from .devices import Device, human
from .devices import device as find_device
from .fit import WORST_FIT, frontier, line, three_coefficients
from .records import Estimate, Fit, FrontierRow, Length, Point, Request, Slope

PRECISIONS = ("fp32", "bf16")
TIMEOUT = 1800.0


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
    """Peak memory by micro batch for `FILE.py:function`, without running it and without a device.

    >>> estimate("train.py:task", device="h100-80g", memory_bytes=2**30)
    Traceback (most recent call last):
    batchwright.core.errors.PlanError: device=h100-80g and memory_bytes=1073741824 both say how much there is; give one.
    """
    found = find_device(device) if isinstance(device, str) else device
    _check(found, memory_bytes, margin_bytes, micro_batch_sizes, sequence_lengths, precision, ranks,
           accumulation_steps, calibrate)  # fmt: skip
    memory = found.memory_bytes if found else memory_bytes
    request = Request(
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
    result = process.run("estimate", request, timeout=timeout)
    points = tuple(codec.decode(Point, p) for p in result["points"])
    lengths = _lengths(points, result)
    if request.memory_bytes is not None and not any(row.max_micro_batch_size for row in lengths):
        raise _nothing_fits(request, found, points[0])
    fit, rows, notes = _frontier(points, lengths, request)
    calibration = _calibrate(request, points, lengths, timeout=timeout) if calibrate else None
    return Estimate(
        task, result["framework"], found, memory, margin_bytes, precision, checkpoint_activations, ranks,
        accumulation_steps, points, lengths, lengths[-1].max_micro_batch_size, fit, rows, calibration,
        _assumptions(request, result["framework"], found), (*result["notes"], *notes),
    )  # fmt: skip


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
    """Bytes per sample and the base, for the prober: a line on the activation-bound segment, as the CPU has it.

    With `memory_bytes`, the line near that limit. Raises PlanError for a task that fake tensors cannot follow and
    RunError for one that fails: the prober then takes its slope from two real trials.
    """
    request = Request(
        task, dict(args or {}), memory_bytes=memory_bytes, precision=precision, ranks=ranks,
        checkpoint_activations=checkpoint_activations, accumulation_steps=accumulation_steps,
    )  # fmt: skip
    result = process.run("estimate", request, timeout=timeout)
    points = tuple(codec.decode(Point, p) for p in result["points"])
    slope = _lengths(points, result)[-1].slope
    if slope is None:
        raise _nothing_fits(request, None, points[0])
    return slope


def _check(
    device: Device | None, memory: int | None, margin: int, sizes: Sequence[int], lengths: Sequence[int],
    precision: str, ranks: int, accumulation: int, calibrate: bool,
) -> None:  # fmt: skip
    wrong: list[Violation] = []
    if device is not None and memory is not None:
        wrong.append(Violation(
            f"device={device.name} and memory_bytes={memory} both say how much there is; give one.",
            "memory", memory, (device.memory_bytes,)))  # fmt: skip
    total = device.memory_bytes if device else memory
    if total is not None and not 0 <= margin < total:
        wrong.append(Violation(
            f"margin={human(margin)} leaves nothing of {human(total)}.", "margin", margin, (0,)))  # fmt: skip
    if precision not in PRECISIONS:
        wrong.append(
            Violation(
                f"precision={precision!r} is not one of {', '.join(PRECISIONS)}.", "precision", precision, PRECISIONS
            )
        )
    for name, values in (("micro_batch_size", sizes), ("sequence_length", lengths), ("ranks", (ranks,)),
                         ("accumulation_steps", (accumulation,))):  # fmt: skip
        wrong += [Violation(f"{name}={v} is too small: the least is 1.", name, v, (1,)) for v in values if v < 1]
    if calibrate and ranks > 1:
        wrong.append(Violation(
            f"calibrate runs one real process, and ranks={ranks} are {ranks}: their shards cannot be measured in it. "
            f"Calibrate with ranks=1, or probe with --ranks {ranks}.", "calibrate", True, (False,)))  # fmt: skip
    raise_violations(PlanError, wrong)


def _lengths(points: Sequence[Point], result: Mapping[str, Any]) -> tuple[Length, ...]:
    return tuple(
        Length(row["sequence_length"], _slope(points, row, result["framework"]), row["max_micro_batch_size"])
        for row in result["limits"]
    )


def _slope(points: Sequence[Point], limit: Mapping[str, Any], framework: str) -> Slope | None:
    """The line at the limit, or at the largest sizes where there is none.

    Peaks are convex, so of the lines around the limit the one reaching over it is the true one; XLA's are not, and
    there only a wide chord means anything.
    """
    here = {p.micro_batch_size: p.peak_memory_bytes for p in points if p.sequence_length == limit["sequence_length"]}
    most = limit["max_micro_batch_size"] or 0
    within = {b: peak for b, peak in here.items() if b <= most}
    over = min((b for b in here if b > most), default=None)
    if framework == "torch" and within and over is not None:
        within = {most: here[most], over: here[over]}
    chosen = within if len(within) > 1 else here
    return line(chosen) if len(chosen) > 1 else None


def _nothing_fits(request: Request, device: Device | None, smallest: Point) -> NothingFitsError:
    parts = ", ".join(f"{name} {human(size)}" for name, size in smallest.breakdown.items() if size)
    where = "" if smallest.sequence_length is None else f" at sequence_length={smallest.sequence_length}"
    ways = [
        "--checkpoint-activations" if not request.checkpoint_activations else "",
        "--precision bf16" if request.precision == "fp32" else "",
        f"--ranks {request.ranks * 2} (sharded)",
        "a shorter sequence",
    ]
    return NothingFitsError(
        f"nothing fits: micro_batch_size={smallest.micro_batch_size}{where} needs an estimated "
        f"{human(smallest.peak_memory_bytes)} ({parts}), and {device.name if device else 'the memory given'} has "
        f"{human(request.memory_bytes or 0)}. What would need less: {', '.join(w for w in ways if w)}.",
        field="memory",
        given=request.memory_bytes,
        nearest=(smallest.peak_memory_bytes,),
    )


def _frontier(
    points: Sequence[Point], lengths: Sequence[Length], request: Request
) -> tuple[Fit | None, tuple[FrontierRow, ...], tuple[str, ...]]:
    if len(lengths) < 2:
        return None, (), ()
    lines = {row.sequence_length: row.slope for row in lengths if row.sequence_length and row.slope}
    fit = three_coefficients(lines, points)
    if fit is None:
        return None, (), ("No frontier: it takes two micro batch sizes at each of two sequence lengths.",)
    if fit.error > WORST_FIT:
        return fit, (), (
            f"No frontier: constant + B·T + B·T² misses the estimates by up to {fit.error:.1%}, so other lengths are "
            "not predicted from it.",
        )  # fmt: skip
    if request.memory_bytes is None:
        return fit, (), ()
    known = {row.sequence_length: row.max_micro_batch_size or 0 for row in lengths if row.sequence_length is not None}
    return fit, frontier(fit, request.memory_bytes, known), ()


def _assumptions(request: Request, framework: str, device: Device | None) -> tuple[str, ...]:
    if framework == "jax":
        return (
            "XLA's plan for the CPU stands in for the device's: not validated on one here. It is made anew for every "
            "shape, so neighbouring sizes may jump by a few percent.",
            "Per device, as the function is: sharding inside it counts only if it has the devices to compile for.",
        )
    lines = [
        "CPU kernels stand in for the device's: not validated on one here. What the device adds is not in it: its "
        "context, workspaces of its kernels, fragmentation of its allocator.",
        "Every sample is as large as the largest of the dataset's first 8 (or as example_batch makes them).",
    ]
    if request.precision == "bf16" and request.ranks == 1:
        lines.append("bf16: autocast; parameters, gradients and optimizer state stay as the task makes them.")
    if request.precision == "bf16" and request.ranks > 1:
        lines.append("bf16: FSDP2's MixedPrecisionPolicy, parameters gathered in bf16 and gradients reduced in fp32.")
    if request.ranks > 1:
        lines.append(f"Sharded by FSDP2 over {request.ranks} ranks: every repeated block, then the rest. Per rank.")
    if device is not None:
        lines.append("The optimizer updates all parameters at once (foreach), as torch does on devices.")
    if request.accumulation_steps == 1:
        lines.append(
            "One micro batch per step; with accumulation_steps above 1 gradients live through the forward too."
        )
    return tuple(lines)
