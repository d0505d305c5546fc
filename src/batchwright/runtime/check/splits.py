"""The splits of a check, whatever the framework: which are tried, what each is compared with, and the report."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from batchwright.core.codec import SCHEMA, encode
from batchwright.core.errors import PlanError, RunError, Violation, raise_violations

from .causes import Finding, SplitResult
from .measured import Gradient, Measures, Variant, group_errors, norm, relative_error
from .names import unknown_causes

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


def report(
    size: int, splits: Sequence[SplitResult], findings: Sequence[Finding], notes: Sequence[str], allow: Collection[str]
) -> CheckReport:
    """The report; causes in `allow` are notes, and errors come first."""
    allowed = [replace(f, severity="note") if f.cause in allow else f for f in findings]
    allowed.sort(key=lambda f: f.severity != "error")
    ok = all(f.severity != "error" for f in allowed)
    return CheckReport(ok, size, tuple(splits), tuple(allowed), tuple(notes))


def default_sizes(global_batch_size: int) -> tuple[int, ...]:
    """Micro batch sizes to try: 1, one that does not divide the batch, half, and the whole batch.

    >>> default_sizes(16), default_sizes(2), default_sizes(1)
    ((1, 3, 8, 16), (1, 2), (1,))
    """
    ragged = next((m for m in range(2, global_batch_size) if global_batch_size % m), 1)
    return tuple(sorted({1, ragged, max(1, global_batch_size // 2), global_batch_size}))


def measure(rig: Measures, micro: int, reference: Gradient, progress: Callable[[str], None]) -> SplitResult:
    steps = -(-rig.size // micro)
    progress(f"{steps} micro batch{'es' * (steps != 1)} of {micro}")
    try:
        gradient = rig.split(Variant(), micro)
    except RunError as error:
        # BatchNorm refuses a single value per channel: that is a finding. Any other failure is shown to the user.
        if error.__cause__ is None or not rig.uses_statistics(Variant()) or not _runs_frozen(rig, micro):
            raise
        return SplitResult(micro, steps, 1, None, {})
    check_gradient(gradient, f"micro batches of {micro}", allow_zero=True)
    return compared(gradient, reference, micro, steps, 1)


def compared(gradient: Gradient, reference: Gradient, micro: int, steps: int, ranks: int) -> SplitResult:
    groups = dict(list(group_errors(gradient, reference).items())[:_SHOWN])
    return SplitResult(micro, steps, ranks, relative_error(gradient, reference), groups)


def _runs_frozen(rig: Measures, micro: int) -> bool:
    try:
        rig.split(Variant(statistics=False), micro)
        return True
    except RunError:
        return False


def check_request(size: int, sizes: Sequence[int], ranks: int, source: object, allow: Collection[str]) -> None:
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


def check_gradient(gradient: Gradient, where: str, allow_zero: bool = False) -> None:
    total = norm(gradient)
    if not math.isfinite(total):
        raise RunError(f"the gradient of {where} is not finite, so it cannot be compared.", field="loss")
    if total == 0 and not allow_zero:
        raise RunError(
            f"the gradient of {where} is zero, so it cannot be compared. Does the loss depend on the parameters, and is any "
            "token unmasked?",
            field="loss",
        )
