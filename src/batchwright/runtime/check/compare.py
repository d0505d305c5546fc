"""Does a split change the gradient? Runs one global batch of a task whole and in several splits, and names the cause.

    report = check(task, global_batch_size=32, micro_batch_sizes=(1, 3, 16))
    report.ok, report.splits[0].relative_error, report.findings

The reference is the task on the whole batch as one micro batch, so `check` finds everything that depends on the split.
It cannot find a factor that the loss applies at every split, such as `/ 8`: that is part of the task.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from batchwright.core.codec import SCHEMA, encode
from batchwright.core.errors import PlanError, RunError, Violation, raise_violations
from batchwright.core.ramp.schedule import Schedule
from batchwright.runtime.task import Task

from .causes import CauseSearch, Finding, SplitResult, number, scale_of
from .gradients import Gradient, Rig, Variant, group_errors, norm, relative_error
from .names import unknown_causes
from .optimizer import accumulator, partial_window, step_counted

DEFAULT_BATCH = 16
MOST_RANKS = 1024
_SHOWN = 5  # modules listed per split


@dataclass(frozen=True)
class CheckReport:
    """The result of a check; `ok` unless a finding is an error."""

    ok: bool
    global_batch_size: int
    splits: tuple[SplitResult, ...]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The report as `--json` prints it."""
        return {"schema": SCHEMA, **encode(self)}


def check(
    task: Task,
    *,
    global_batch_size: int | None = None,
    micro_batch_sizes: Sequence[int] | None = None,
    ranks: int = 1,
    source: tuple[str, Mapping[str, Any]] | None = None,
    seed: int = 0,
    accumulate_dtype: torch.dtype | None = None,
    ramp: Schedule | None = None,
    lr_horizon_steps: int | None = None,
    budget_samples: int | None = None,
    allow: Collection[str] = (),
    progress: Callable[[str], None] = lambda line: None,
) -> CheckReport:
    """Run one global batch at several splits, and explain every difference from the batch in one piece.

    If `ranks` is above 1, also run it on that many processes, which load the task from `source`, the arguments of
    `load_task`. Causes in `allow` become notes. `ramp` is a compiled schedule; `check` reports what it does to a learning
    rate that counts steps.

    >>> rows = [(torch.ones(2) * i, torch.ones(1)) for i in range(8)]
    >>> def loss(model, batch):
    ...     return (model(batch[0]) - batch[1]).square().mean(), len(batch[0])  # a mean, but it must be a sum
    >>> task = Task(torch.nn.Linear(2, 1), rows, loss, lambda params: torch.optim.SGD(params, lr=0.1))
    >>> report = check(task, global_batch_size=8, micro_batch_sizes=(2,))
    >>> report.ok, report.findings[0].cause, round(report.splits[0].relative_error, 3)
    (False, 'scaled-by-accumulation', 3.0)
    """
    size = global_batch_size or min(DEFAULT_BATCH, len(task.dataset))
    sizes = tuple(dict.fromkeys(micro_batch_sizes)) if micro_batch_sizes else default_sizes(size)
    allow = (allow,) if isinstance(allow, str) else allow
    _check_request(size, sizes, ranks, source, allow)
    rig = Rig(task, size, seed, accumulate_dtype)
    progress(f"{size} samples in one piece")
    reference = rig.reference(Variant())
    _check_gradient(reference, "the whole batch in one piece")
    splits = [_measure(rig, micro, reference, progress) for micro in sizes]
    progress("looking for causes")
    search = CauseSearch(rig, splits)
    findings = search.findings()
    if ranks > 1 and source is not None:
        progress(f"the same on {ranks} processes")
        more, wrong = _on_ranks(rig, source, ranks, sizes, reference, search, findings)
        splits, findings = splits + more, findings + wrong
    findings += accumulator(rig, max(s.accumulation_steps for s in splits))
    findings += partial_window(rig)
    findings += step_counted(rig, ramp, lr_horizon_steps, budget_samples)
    findings = [replace(f, severity="note") if f.cause in allow else f for f in findings]
    findings.sort(key=lambda f: f.severity != "error")
    ok = all(f.severity != "error" for f in findings)
    return CheckReport(ok, size, tuple(splits), tuple(findings), tuple(search.notes))


def default_sizes(global_batch_size: int) -> tuple[int, ...]:
    """Micro batch sizes to try: 1, one that does not divide the batch, half, and the whole batch.

    >>> default_sizes(16), default_sizes(2), default_sizes(1)
    ((1, 3, 8, 16), (1, 2), (1,))
    """
    ragged = next((m for m in range(2, global_batch_size) if global_batch_size % m), 1)
    return tuple(sorted({1, ragged, max(1, global_batch_size // 2), global_batch_size}))


def _measure(rig: Rig, micro: int, reference: Gradient, progress: Callable[[str], None]) -> SplitResult:
    steps = -(-rig.size // micro)
    progress(f"{steps} micro batches of {micro}")
    try:
        gradient = rig.split(Variant(), micro)
    except RunError as error:
        # BatchNorm refuses a single value per channel: that is a finding. Any other failure is shown to the user.
        if error.__cause__ is None or not rig.uses_statistics(Variant()) or not _runs_frozen(rig, micro):
            raise
        return SplitResult(micro, steps, 1, None, {})
    _check_gradient(gradient, f"micro batches of {micro}", allow_zero=True)
    return _compared(gradient, reference, micro, steps, 1)


def _compared(gradient: Gradient, reference: Gradient, micro: int, steps: int, ranks: int) -> SplitResult:
    groups = dict(list(group_errors(gradient, reference).items())[:_SHOWN])
    return SplitResult(micro, steps, ranks, relative_error(gradient, reference), groups)


def _runs_frozen(rig: Rig, micro: int) -> bool:
    try:
        rig.split(Variant(statistics=False), micro)
        return True
    except RunError:
        return False


def _on_ranks(
    rig: Rig,
    source: tuple[str, Mapping[str, Any]],
    ranks: int,
    sizes: Sequence[int],
    reference: Gradient,
    search: CauseSearch,
    known: Sequence[Finding],
) -> tuple[list[SplitResult], list[Finding]]:
    from .ranks import on_ranks

    failed = {s.micro_batch_size for s in search.splits if s.relative_error is None}
    fitting = sorted({min(micro, -(-rig.size // ranks)) for micro in sizes} - failed)
    found = on_ranks(source, rig, ranks, fitting, (Variant(), search.variant))
    steps = {micro: -(-rig.size // (micro * ranks)) for micro in fitting}
    splits = [_compared(found[micro, 0], reference, micro, steps[micro], ranks) for micro in fitting]
    strict = rig.reference(search.variant)
    scales = [scale_of(found[micro, 1], strict, micro * ranks, rig.size) for micro in fitting]
    worst = max(scales, key=lambda s: s.error)
    if worst.error <= search.tolerance or any(f.severity == "error" for f in known):
        return splits, []
    message = (
        f"one process gives the full batch's gradient at every split, but {ranks} ranks do not: off by "
        f"{number(worst.error)}, {number(worst.factor)}× along it. Does the loss reduce over ranks, or depend on the rank? "
        "Return this rank's own sum and weight, without all_reduce: the step sums over ranks."
    )
    return splits, [Finding("rank-dependent", "error", message)]


def _check_request(size: int, sizes: Sequence[int], ranks: int, source: object, allow: Collection[str]) -> None:
    found: list[Violation] = []
    for name, value in (("global_batch_size", size), ("ranks", ranks)):
        if value < 1:
            found.append(Violation(f"{name}={value}: must be at least 1.", name, value, (1,)))
    if ranks > MOST_RANKS:
        text = f"ranks={ranks}: must be at most {MOST_RANKS}, since each is a process on this machine."
        found.append(Violation(text, "ranks", ranks, (MOST_RANKS,)))
    for micro in sizes:
        if not 1 <= micro <= size:
            near = min(max(micro, 1), size)
            text = f"micro_batch_size={micro}: must be 1 to {size}, since global_batch_size={size}. Nearest: {near}."
            found.append(Violation(text, "micro_batch_size", micro, (near,)))
    if ranks > 1 and source is None:
        text = f'ranks={ranks} needs source=("FILE.py:task", {{}}): a Task cannot be sent to other processes.'
        found.append(Violation(text, "source"))
    found += unknown_causes(allow)
    raise_violations(PlanError, found)


def _check_gradient(gradient: Gradient, where: str, allow_zero: bool = False) -> None:
    total = norm(gradient)
    if not math.isfinite(total):
        raise RunError(f"the gradient of {where} is not finite, so it cannot be compared.", field="loss")
    if total == 0 and not allow_zero:
        raise RunError(
            f"the gradient of {where} is zero, so it cannot be compared. Does the loss depend on the parameters, and is any "
            "token unmasked?",
            field="loss",
        )
