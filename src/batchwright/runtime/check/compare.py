"""Does a split change the gradient? Runs one global batch of a task whole and in several splits, and names the cause.

    report = check(task, global_batch_size=32, micro_batch_sizes=(1, 3, 16))
    report.ok, report.splits[0].relative_error, report.findings

The reference is the task on the whole batch as one micro batch, so `check` finds everything that depends on the split.
It cannot find a factor that the loss applies at every split, such as `/ 8`: that is part of the task.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from batchwright.core.batch.pipeline import PipelineRule
from batchwright.core.ramp.schedule import Schedule
from batchwright.runtime.task import Task

from .causes import CauseSearch, Finding, SplitResult, number, scale_of
from .gradients import Rig
from .measured import Gradient, Variant, group_errors, relative_error
from .optimizer import accumulator, partial_window, step_counted
from .splits import DEFAULT_BATCH, check_gradient, check_request, compared, default_sizes, measure, report
from .splits import CheckReport as CheckReport


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
    pipeline: PipelineRule | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> CheckReport:
    """Run one global batch at several splits, and explain every difference from the batch in one piece.

    If `ranks` is above 1, also run it on that many processes, which load the task from `source`, the arguments of
    `load_task`. With `pipeline`, also run it on the stages of a pipeline, each on `ranks` processes, and compare it with the
    whole model. Causes in `allow` become notes. `ramp` is a compiled schedule; `check` reports what it does to a learning rate
    that counts steps.

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
    check_request(size, sizes, ranks * (pipeline.stages if pipeline else 1), source, allow)
    rig = Rig(task, size, seed, accumulate_dtype)
    progress(f"{size} samples in one piece")
    reference = rig.reference(Variant())
    check_gradient(reference, "the whole batch in one piece")
    splits = [measure(rig, micro, reference, progress) for micro in sizes]
    progress("looking for causes")
    search = CauseSearch(rig, splits)
    findings = search.findings()
    if ranks > 1 and source is not None:
        progress(f"the same on {ranks} processes")
        more, wrong = _on_ranks(rig, source, ranks, sizes, reference, search, findings)
        splits, findings = splits + more, findings + wrong
    if pipeline is not None and source is not None:
        progress(f"the same in a pipeline of {pipeline.stages} × {ranks} processes")
        more, wrong = _in_stages(rig, source, ranks, pipeline, sizes, reference, search)
        splits, findings = splits + more, findings + wrong
    findings += accumulator(rig, max(s.accumulation_steps for s in splits))
    findings += partial_window(rig)
    findings += step_counted(rig, ramp, lr_horizon_steps, budget_samples)
    return report(size, splits, findings, search.notes, allow)


_NONE_RUNS = "the task runs none of the micro batches that are possible there."


def _failed(search: CauseSearch) -> set[int]:
    """The micro batch sizes that the task cannot run, for which there is a finding."""
    return {s.micro_batch_size for s in search.splits if s.relative_error is None}


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

    fitting = sorted({min(micro, -(-rig.size // ranks)) for micro in sizes} - _failed(search))
    if not fitting:
        search.notes.append(f"Nothing was compared on {ranks} ranks: {_NONE_RUNS}")
        return [], []
    found = on_ranks(source, rig, ranks, fitting, (Variant(), search.variant))
    steps = {micro: -(-rig.size // (micro * ranks)) for micro in fitting}
    splits = [compared(found[micro, 0], reference, micro, steps[micro], ranks) for micro in fitting]
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


def _in_stages(
    rig: Rig,
    source: tuple[str, Mapping[str, Any]],
    ranks: int,
    rule: PipelineRule,
    sizes: tuple[int, ...],
    reference: Gradient,
    search: CauseSearch,
) -> tuple[list[SplitResult], list[Finding]]:
    from .pipeline import legal_sizes
    from .ranks import on_ranks

    failed = _failed(search)
    legal = legal_sizes(rule, rig.size, ranks, [micro for micro in sizes if micro not in failed])
    fitting = [micro for micro in legal if micro not in failed]
    if not fitting:
        search.notes.append(f"Nothing was compared in the pipeline: {_NONE_RUNS}")
        return [], []
    found = on_ranks(source, rig, ranks, fitting, (Variant(), search.variant), rule)
    steps = {micro: rig.size // (micro * ranks) for micro in fitting}
    splits = [
        replace(compared(found[m, 0], reference, m, steps[m], ranks), pipeline_parallel=rule.stages) for m in fitting
    ]
    # The whole model in the same micro batches: what depends on the split is found elsewhere.
    whole = {micro: rig.split(search.variant, micro) for micro in fitting}
    errors = {micro: relative_error(found[micro, 1], whole[micro]) for micro in fitting}
    worst = max(errors, key=lambda micro: errors[micro])
    if errors[worst] <= search.tolerance:
        return splits, []
    parts = ", ".join(list(group_errors(found[worst, 1], whole[worst]))[:3])
    message = (
        f"the stages of the pipeline do not compute what the whole model computes: their gradient is off by "
        f"{number(errors[worst])}, most in {parts}. Is a weight in two stages, does a stage leave out a layer, does the loss "
        f"use more of the model than one call, or does {rule.schedule} lose gradients of this model (try gpipe)?"
    )
    return splits, [Finding("pipeline-stages", "error", message)]
