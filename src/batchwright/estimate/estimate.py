"""The estimate: the request is checked, the estimating process returns points; lines, limits and frontier follow from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from batchwright.core import codec
from batchwright.core.errors import (
    ConfigError,
    EnvironmentFault,
    NothingFitsError,
    PlanError,
    Violation,
    raise_violations,
)
from batchwright.core.numbers import format_bytes
from batchwright.processes.memory import available_memory

from . import worker
from .devices import NO_ALLOWANCE, Device
from .devices import device as find_device
from .fit import WORST_FIT, frontier, line, three_coefficients
from .model import find_config
from .records import (
    MOST,
    OPTIMIZERS,
    PRECISIONS,
    Calibration,
    Estimate,
    EstimateRequest,
    FrontierFit,
    FrontierRow,
    Length,
    Point,
    Remedy,
    Room,
    Slope,
)

TIMEOUT = 1800.0
MOST_RANKS = 2**14  # torch's fake group takes time for each rank: 16 s in all for this many (measured)
# A calibration should need this much memory at most: activations are larger than the constant, and it takes seconds.
COMFORTABLE = 2**30


def estimate(
    task: str | None = None,
    *,
    model: str | None = None,
    args: Mapping[str, Any] | None = None,
    device: str | Device | None = None,
    memory_bytes: int | None = None,
    margin_bytes: int = 0,
    context_bytes: int | None = None,
    workspace_bytes: int | None = None,
    fragmentation_percent: float | None = None,
    micro_batch_sizes: Sequence[int] = (),
    sequence_lengths: Sequence[int] = (),
    precision: str = "fp32",
    optimizer: str | None = None,
    lora: int = 0,
    checkpoint_activations: bool = False,
    quantize_frozen: bool = False,
    ranks: int = 1,
    tensor_parallel: int = 1,
    accumulation_steps: int = 1,
    calibrate: bool = False,
    timeout: float = TIMEOUT,
    progress: bool = False,
) -> Estimate:
    """Peak memory by micro batch size of a `task` (`FILE.py:function`), or of a `model` (a Hugging Face configuration).

    Nothing is trained, and no device is needed. `optimizer`, `lora` and `tensor_parallel` are for a model.

    >>> estimate("train.py:task", device="h100-80g", memory_bytes=2**30)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    batchwright.core.errors.PlanError: device and memory are mutually exclusive: h100-80g has ...
    """
    room, wrong = find_room(device, memory_bytes, margin_bytes, context_bytes, workspace_bytes, fragmentation_percent)
    request = EstimateRequest(
        task=task or "",
        args=dict(args or {}),
        micro_batch_sizes=tuple(sorted(set(micro_batch_sizes))),
        sequence_lengths=tuple(sorted(set(sequence_lengths))),
        memory_bytes=room.usable_bytes,
        precision=precision,
        checkpoint_activations=checkpoint_activations,
        quantize_frozen=quantize_frozen,
        ranks=ranks,
        accumulation_steps=accumulation_steps,
        accelerator=room.device is not None,
        progress=progress,
        model=model,
        optimizer=optimizer or "adamw",
        lora=lora,
        tensor_parallel=tensor_parallel,
    )
    raise_violations(PlanError, [*wrong, *check_request(request, optimizer, calibrate)])
    if model is not None:
        request = replace(request, model=find_config(model, lora))
    result = worker.run("estimate", request, timeout=timeout)
    points = tuple(codec.decode(Point, p) for p in result["points"])
    lengths = _lengths(points, result)
    if request.memory_bytes is not None and not any(row.max_micro_batch_size for row in lengths):
        raise nothing_fits(room, points[0], result.get("remedies", ()))
    fit, rows, notes = _frontier(points, lengths, request, result.get("longest_sequence"))
    largest = {p.micro_batch_size: p.peak_memory_bytes for p in points}.get(MOST)
    if largest is not None and not micro_batch_sizes and largest <= (request.memory_bytes or 0):
        notes += (f"{MOST:,} is the largest micro batch that is searched, not the limit.",)
    calibration = _calibrate(request, points, lengths, timeout=timeout) if calibrate else None
    return Estimate(
        task=task or "",
        framework=result["framework"],
        device=room.device,
        memory_bytes=room.memory_bytes,
        margin_bytes=margin_bytes,
        allowance=room.allowance,
        usable_bytes=room.usable_bytes,
        precision=precision,
        checkpoint_activations=checkpoint_activations,
        ranks=ranks,
        accumulation_steps=accumulation_steps,
        model=model,
        optimizer=request.optimizer if model else None,
        lora=lora,
        tensor_parallel=tensor_parallel,
        points=points,
        lengths=lengths,
        max_micro_batch_size=lengths[-1].max_micro_batch_size,
        fit=fit,
        frontier=rows,
        calibration=calibration,
        args={key: str(value) for key, value in sorted((args or {}).items())},
        assumptions=(*assumptions(request, result["framework"], room), *result.get("rules", ())),
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
    longest: bool = False,
    timeout: float = TIMEOUT,
) -> Slope:
    """Bytes per sample and the base, for the prober: a line on the activation-bound segment, estimated for the CPU.

    With `memory_bytes`, the line near that limit; with `longest`, of batches of the dataset's longest sample. Raises
    PlanError for a task that fake tensors cannot follow and RunError for a task that fails: the prober then takes its slope
    from two real trials.
    """
    request = EstimateRequest(
        task,
        dict(args or {}),
        memory_bytes=memory_bytes,
        precision=precision,
        ranks=ranks,
        checkpoint_activations=checkpoint_activations,
        accumulation_steps=accumulation_steps,
        longest=longest,
    )
    result = worker.run("slope", request, timeout=timeout)
    points = tuple(codec.decode(Point, p) for p in result["points"])
    slope = _lengths(points, result)[-1].slope
    if slope is None:
        raise nothing_fits(Room(None, memory_bytes, 0, NO_ALLOWANCE, memory_bytes), points[0], ())
    return replace(slope, peaks={p.micro_batch_size: p.peak_memory_bytes for p in points})


def find_room(
    device: str | Device | None,
    memory: int | None,
    margin: int,
    context: int | None,
    workspaces: int | None,
    fragmentation: float | None,
) -> tuple[Room, list[Violation]]:
    """The memory to fit in, and what is wrong with it. Without a device, nothing is left for one unless it is given."""
    wrong: list[Violation] = []
    found = device if isinstance(device, Device) else None
    if isinstance(device, str):
        try:
            found = find_device(device)
        except ConfigError as error:
            wrong += error.violations
    if found is not None and memory is not None:
        given = f"{found.name} has {found.memory_bytes:,} bytes, and {memory:,} are given"
        message = f"device and memory are mutually exclusive: {given}."
        wrong.append(Violation(message, "memory", memory, (found.memory_bytes,)))
    given = {"context_bytes": context, "workspace_bytes": workspaces, "fragmentation_percent": fragmentation}
    base = found.allowance if found else NO_ALLOWANCE
    allowance = replace(base, **{name: value for name, value in given.items() if value is not None})
    total = found.memory_bytes if found else memory
    if total is None and not wrong:
        kept = {"margin": margin or None, "context": context, "workspaces": workspaces, "fragmentation": fragmentation}
        for name, value in kept.items():
            if value is not None:
                message = f"{name}={value:,} has no effect without device or memory: it is kept free of one of them."
                wrong.append(Violation(message, name, value))
    if total is not None and not 0 <= margin < total:
        message = f"margin={format_bytes(margin)} leaves nothing of {format_bytes(total)}."
        wrong.append(Violation(message, "margin", margin, (0,)))
        margin = 0
    usable = None if total is None else allowance.usable(total - margin)
    if usable is not None and usable < 1:
        message = f"{allowance.text()} leave nothing of {format_bytes(total)}."
        wrong.append(Violation(message, "context", allowance.context_bytes, (0,)))
    return Room(found, total, margin, allowance, usable), wrong


def check_request(r: EstimateRequest, optimizer: str | None, calibrate: bool = False) -> list[Violation]:
    """What is wrong with a request, all of it."""
    wrong: list[Violation] = []
    if bool(r.task) == (r.model is not None):
        given = "both are given" if r.task else "neither is given"
        wrong.append(Violation(f"Give a task (FILE.py:function) or a model; {given}.", "task", r.task or None))
    if r.precision not in PRECISIONS:
        message = f"precision={r.precision!r} is not one of {', '.join(PRECISIONS)}."
        wrong.append(Violation(message, "precision", r.precision, PRECISIONS))
    if r.optimizer not in OPTIMIZERS:
        message = f"optimizer={r.optimizer!r} is not one of {', '.join(OPTIMIZERS)}."
        wrong.append(Violation(message, "optimizer", r.optimizer, OPTIMIZERS))
    if r.model is None:
        own = {"optimizer": (optimizer, None), "lora": (r.lora, 0), "tensor_parallel": (r.tensor_parallel, 1)}
        for name, (value, neutral) in own.items():
            if value != neutral:
                message = f"{name}={value} needs model: a task decides itself."
                wrong.append(Violation(message, name, value))
    elif not r.sequence_lengths:
        message = "model needs sequence_length: the tokens of one sample, such as 2048."
        wrong.append(Violation(message, "sequence_length", None, (2048,)))
    if r.model is not None and r.args:
        names = ", ".join(r.args)
        wrong.append(Violation(f"arg: {names} cannot be passed to a model: it has no function.", "arg", names))
    counts = {
        "micro_batch_size": r.micro_batch_sizes,
        "sequence_length": r.sequence_lengths,
        "ranks": (r.ranks,),
        "tensor_parallel": (r.tensor_parallel,),
        "accumulation_steps": (r.accumulation_steps,),
    }
    for name, values in counts.items():
        wrong += [Violation(f"{name}={v}: must be at least 1.", name, v, (1,)) for v in values if v < 1]
    if r.lora < 0:
        wrong.append(Violation(f"lora={r.lora}: must be at least 1.", "lora", r.lora, (1,)))
    if r.ranks > MOST_RANKS:
        message = f"ranks={r.ranks}: must be at most {MOST_RANKS:,}."
        wrong.append(Violation(message, "ranks", r.ranks, (MOST_RANKS,)))
    if calibrate and r.quantize_frozen:
        message = "calibrate runs the task as it is, and quantize_frozen is a rule: choose one of them."
        wrong.append(Violation(message, "calibrate", True, (False,)))
    if calibrate and r.ranks * r.tensor_parallel > 1:
        message = (
            f"calibrate runs one real process, which cannot measure the shards of ranks={r.ranks} and "
            f"tensor_parallel={r.tensor_parallel}. Calibrate with ranks=1, or probe with --ranks {r.ranks}."
        )
        wrong.append(Violation(message, "calibrate", True, (False,)))
    return wrong


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


def nothing_fits(room: Room, smallest: Point, changes: Sequence[Mapping[str, Any]], way: str = "") -> NothingFitsError:
    """The error for a model that fits at no size, with what would make it fit; `way`: how it is trained at that peak."""
    parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in smallest.breakdown.items() if size)
    where = "" if smallest.sequence_length is None else f" at sequence_length={smallest.sequence_length}"
    usable = room.usable_bytes or 0
    safely = room.memory_bytes is not None and smallest.peak_memory_bytes <= room.memory_bytes
    found = [codec.decode(Remedy, change) for change in changes]
    fitting = [f"{r.change} ({format_bytes(r.peak_memory_bytes)})" for r in found if r.fits]
    smaller = "a smaller micro_batch_size, " if smallest.micro_batch_size > 1 else ""
    would = f"Use {smaller}a shorter sequence or a smaller model."
    if fitting:
        would = f"{len(fitting)} of {len(found)} changes would fit. Nearest: {fitting[0]}."
    elif found:
        would = f"None of {len(found)} changes would fit: {'; '.join(r.change for r in found)}. {would}"
    kept = "" if usable == room.memory_bytes else f" of {format_bytes(room.memory_bytes)}"
    error = NothingFitsError(
        f"nothing fits{' safely' if safely else ''}: micro_batch_size={smallest.micro_batch_size}{where}{way} needs an estimated "
        f"{format_bytes(smallest.peak_memory_bytes)} ({parts}), and {room.device.name if room.device else 'the memory given'} "
        f"has {format_bytes(usable)}{kept} for it. {would}",
        field="memory",
        given=room.usable_bytes,
        nearest=(smallest.peak_memory_bytes,),
    )
    error.remedies = codec.encode(found)  # type: ignore[attr-defined]
    return error


def _frontier(
    points: Sequence[Point], lengths: Sequence[Length], request: EstimateRequest, longest: int | None
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
    rows = frontier(fit, request.memory_bytes, known)
    # A longer sequence has no positions.
    return fit, tuple(row for row in rows if longest is None or row.sequence_length <= longest), ()


def assumptions(request: EstimateRequest, framework: str, room: Room) -> tuple[str, ...]:
    """What an estimate assumes, as its output says it."""
    beside = ()
    if room.memory_bytes is not None and room.allowance != NO_ALLOWANCE:
        beside = (
            f"Left free beside tensors: {room.allowance.text()}; not measured. Change it with --context, --workspaces "
            "and --fragmentation.",
        )
    if framework == "jax":
        return (
            "XLA's plan for the CPU is used instead of the device's: not validated on a device. XLA plans every shape "
            "separately, so neighbouring sizes may differ by a few percent.",
            "Per device: sharding inside the function counts only if it has the devices to compile for.",
            *beside,
        )
    lines = ["CPU kernels are used instead of the device's: not validated on a device.", *beside]
    if request.model is None:
        lines.append(
            "Every sample is as large as the largest of the dataset's first 8 (or as example_batch makes them)."
        )
    kind, pure = request.precision.partition("-")[0], request.precision.endswith("-pure")
    if pure:
        states = "the frozen parameters are" if request.lora else "parameters, gradients and optimizer state are"
        lines.append(f"{request.precision}: {states} {kind}.")
    elif kind != "fp32" and request.ranks == 1:
        lines.append(f"{kind}: autocast; parameters, gradients and optimizer state keep the task's dtypes.")
    elif kind != "fp32":
        lines.append(
            f"{kind}: FSDP2's MixedPrecisionPolicy, parameters gathered in {kind} and gradients reduced in fp32. Accelerate, "
            f"and so transformers' Trainer, reduces them in {kind} by default, which needs no more memory."
        )
    if request.lora:
        lines.append(
            f"LoRA of rank {request.lora} on all linear layers, adapters in fp32 as peft makes them; everything else is frozen."
        )
    if request.model is not None and request.optimizer == "adamw-8bit":
        lines.append(
            "adamw-8bit: by rule, each state of bitsandbytes is a byte and 1/64 for scales; those of embeddings are fp32, as "
            "in transformers' Trainer."
        )
    if request.model is not None and request.checkpoint_activations:
        lines.append("Every layer is computed again in the backward pass (gradient checkpointing of transformers).")
    if request.tensor_parallel > 1:
        lines.append(
            f"By rule: tensor parallelism over {request.tensor_parallel} devices divides parameters, gradients, optimizer "
            "state and activations evenly. Sequence parallelism must be on: without it, activations are not divided."
        )
    if request.replicas > 1:
        lines.append(
            f"By rule: on {request.replicas} ranks that are not sharded, DDP's buckets are as large as the gradients that are "
            "trained (gradient_as_bucket_view=False)."
        )
    if request.ranks > 1:
        lines.append(f"Sharded by FSDP2 over {request.ranks} ranks: every repeated block, then the rest. Per rank.")
        if request.accumulation_steps > 1:
            lines.append(
                "Gradients are reduced after every micro batch. A trainer that reduces once per step (no_sync) holds the "
                "gradients of the whole model on every rank."
            )
    if room.device is not None:
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
    chosen = trial_point(
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


def trial_point(points: Sequence[Point], free: int) -> Point:
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
