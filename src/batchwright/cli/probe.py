"""`batchwright probe`."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from batchwright.core.batch.pipeline import HALF_SPEED_TOKENS
from batchwright.core.errors import ConfigError, RunError
from batchwright.core.numbers import count, format_bytes, positive

from . import text
from .naming import notes
from .options import (
    CommandLine,
    complete,
    counts,
    json_option,
    number,
    print_json,
    read_task,
    schedule_options,
    stack,
    task_arguments,
    task_option,
)

if TYPE_CHECKING:
    from batchwright.probe.records import Probe
    from batchwright.probe.speed import Curve

_WIDE = 76  # columns that the table of trials needs; below, each trial is a line
_limit_options = stack(
    number(
        "--memory",
        "Memory limit in bytes, such as 2GiB. CPU: above the size after importing torch. Else: of the "
        "device.  [default: of a task, half of the host's memory or what is free on the device; of a command, no limit]",
        "BYTES",
    ),
    number("--margin", "Memory to keep free, in bytes.  [default: 0]", "BYTES"),
    number("--max", "Largest micro batch to try, in samples.  [default: 16Mi]"),
    number("--multiple-of", "Try only multiples of this many samples.  [default: 1]"),
    click.option(
        "--exact", is_flag=True, help="Search until the next larger size fails.  [default: until one within 1% fails]"
    ),
    click.option("--longest", is_flag=True, help="Fill every batch with the longest sample of the dataset."),
    click.option(
        "--estimate/--no-estimate",
        default=True,
        help="Predict the memory of a task without running it: saves trials.  [default: --estimate]",
    ),
    click.option("--evaluation", is_flag=True, help="Also find the largest evaluation batch during training."),
    number(
        "--accumulation-steps", "1: no accumulation, so gradients need less memory; 2: any accumulation.  [default: 2]"
    ),
    number("--ranks", "Processes to start with torchrun; the smallest result counts.  [default: 1]"),
    number("--timeout", "Seconds after which a trial counts as hanging.  [default: 600]", "X"),
    number("--on", "cpu, or what torch calls the accelerator.  [default: the accelerator, if there is one]", "NAME"),
    click.option("--device", hidden=True),
)

_speed_options = stack(
    click.option("--limit-only", is_flag=True, help="Find the largest size only; do not measure throughput."),
    number("--seconds", "Seconds to measure each size.  [default: 2]", "X"),
    number("--workers", "Data loader workers while input speed is measured.  [default: 0]"),
    number(
        "--step-regex",
        "Matches a training step in the output of a command; its first group is the step number.",
        "REGEX",
    ),
    number("--peak-tflops", "Peak TFLOP/s of the device, for MFU.  [default: from a table of devices]", "X"),
)


_pipeline_options = stack(
    number(
        "--pipeline-microbatches",
        "Measure a pipeline instead: step time and idle share at these numbers of microbatches.",
        "M,M,...",
    ),
    number("--pipeline-parallel", "With --pipeline-microbatches: processes that hold the stages.  [default: 2]"),
    number("--global-batch-size", "With --pipeline-microbatches: samples of a step.  [default: the largest number]"),
    schedule_options,
)


@click.command(
    cls=CommandLine,
    epilog="\b\nExamples:\n  batchwright probe train.py:task --memory 2GiB\n"
    "  batchwright probe train.py:task --pipeline-microbatches 4,8,16 --global-batch-size 64\n"
    "  batchwright probe -- python train.py --per_device_train_batch_size {micro_batch_size}",
)
@click.argument(
    "target", required=False, metavar="FILE.py:FUNCTION | FILE.yaml | -- COMMAND...", shell_complete=complete
)
@_limit_options
@_speed_options
@_pipeline_options
@task_option
@click.option(
    "--dir", "dir", default=".batchwright", metavar="DIR", show_default=True, help="Directory of the journal."
)
@click.option("--fresh", is_flag=True, help="Ignore the journal of an earlier probe.")
@click.option("--plot/--no-plot", default=None, help="Draw plots.  [default: on a terminal]")
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    target: str | None,
    args: tuple[str, ...],
    limit_only: bool,
    device: str | None,
    plot: bool | None,
    as_json: bool,
    **flags: Any,
) -> None:
    """Measure which micro batch fits in memory, which is fast, and why.

    Runs a few trials, each in its own process: finds the largest micro batch that runs, measures throughput at sizes up
    to it, and names the bottleneck. Only sizes that ran are recommended. Every trial is saved in a journal, so that an
    interrupted probe continues where it stopped.
    """
    from batchwright.probe.display import TrialLines, TrialTable
    from batchwright.probe.prober import probe

    command = ctx.meta["command"]
    if bool(target) == bool(command):
        given = f"both {target!r} and a command are given" if target else "neither is given"
        raise ConfigError(
            f"probe needs either FILE.py:function, or -- and a command with {{micro_batch_size}} in it; {given}.",
            field="target",
            given=target,
        )
    if device is not None:
        raise ConfigError(
            f"--device={device!r} is a device to estimate for, and probe runs on this machine. --on is the device to run on "
            "(cpu, or what torch calls the accelerator), and --memory is a limit on it.",
            field="on",
            given=device,
            nearest=("auto", "cpu"),
        )
    target, arguments = read_task(target, args) if target else (None, task_arguments(args))
    names = ("pipeline_microbatches", "pipeline_parallel", "global_batch_size", "pipeline_schedule", "virtual_stages")
    pipeline = {name: flags.pop(name) for name in names}
    if pipeline["pipeline_microbatches"] is not None:
        used = {"target", "args", "on", "timeout", "as_json", *names}
        given = [
            p.name for p in ctx.command.params if ctx.get_parameter_source(p.name or "") is ParameterSource.COMMANDLINE
        ]
        if unused := [name for name in given if name and name not in used]:
            raise ConfigError(
                f"{' and '.join(unused)} cannot be used with pipeline_microbatches: that probe measures the time of steps, "
                "not memory.",
                field=unused[0],
            )
        _pipelined(target, arguments, pipeline, flags["on"], flags["timeout"], as_json)
        return
    if unused := [name for name in names if pipeline[name] is not None]:
        raise ConfigError(
            f"{unused[0]}={pipeline[unused[0]]} needs pipeline_microbatches, the numbers of microbatches to measure.",
            field=unused[0],
            given=pipeline[unused[0]],
        )
    # 0: a terminal that does not know its size.
    wide = sys.stderr.isatty() and not 0 < os.get_terminal_size(sys.stderr.fileno()).columns < _WIDE
    progress = TrialTable() if wide else TrialLines()
    try:
        made = probe(
            target or list(command),
            args=arguments,
            throughput=not limit_only,
            progress=progress,
            **flags,
        )
    except RunError as error:
        progress.close()
        for trace in getattr(error, "__notes__", ()):
            click.echo(trace, err=True)
        raise
    finally:
        progress.close()
    if as_json:
        print_json(made.to_json())
    else:
        click.echo("\n".join(render(made)))
        if plot or (plot is None and sys.stdout.isatty()):
            from batchwright.report.text_charts import text_charts

            click.echo("\n".join(text_charts("probe", made.to_json())))
    if made.journal_error:
        click.echo(
            f"error: the journal could not be written: {made.journal_error}. The results above are complete, but a later "
            "probe cannot continue from them. Free some space, or give another --dir.",
            err=True,
        )
        ctx.exit(4)


def _pipelined(
    target: str | None,
    arguments: dict[str, Any],
    given: dict[str, Any],
    on: str | None,
    timeout: str | None,
    as_json: bool,
) -> None:
    """Measure a pipeline, and print its times."""
    from batchwright.probe.pipeline import probe_pipeline

    if target is None:
        raise ConfigError(
            "pipeline_microbatches needs a task, FILE.py:function: a command has its own pipeline.", field="target"
        )
    microbatches = counts(given["pipeline_microbatches"], "pipeline_microbatches")
    numbers = {
        name: count(given[name], name)
        for name in ("pipeline_parallel", "global_batch_size", "virtual_stages")
        if given[name]
    }
    virtual = numbers.get("virtual_stages", 1)
    made = probe_pipeline(
        target,
        args=arguments,
        microbatches=microbatches,
        stages=numbers.get("pipeline_parallel", 2),
        global_batch_size=numbers.get("global_batch_size", max(microbatches)),
        schedule=given["pipeline_schedule"] or ("interleaved" if virtual > 1 else "1f1b"),
        virtual_stages=virtual,
        device=on or "auto",
        timeout=600.0 if timeout is None else positive(timeout, "timeout"),
    )
    if as_json:
        print_json(made.to_json())
        return
    rows = [
        (
            t.pipeline_microbatches,
            t.micro_batch_size,
            f"{1000 * t.step_seconds:.1f} ms",
            f"{t.idle_share:.0%}",
            f"{t.predicted_idle_share:.0%}",
        )
        for t in made.trials
    ]
    head = ("microbatches", "micro", "step", "idle", "predicted idle")
    lines = [
        f"{made.schedule} on {made.stages} ranks, {made.global_batch_size} samples ({made.tokens:,.0f} tokens) per step",
        "",
        *text.table(rows, head=head, right=range(5)),
        "",
        f"fastest: {made.best_microbatches} microbatches; plan chooses {made.planned_microbatches} of these",
    ]
    if made.half_speed_tokens is not None:
        lines.append(
            f"a microbatch of {made.half_speed_tokens:,} tokens runs at half speed (plan assumes {HALF_SPEED_TOKENS})"
        )
    click.echo("\n".join([*lines, *notes(made.notes)]))


def render(made: Probe) -> list[str]:
    """A probe as text: the answer, the trials, the speed, and notes."""
    from batchwright.probe.display import HEAD, row

    failing = made.first_failing_micro_batch_size
    lines = [
        f"micro_batch_size {made.max_micro_batch_size} is the largest that ran"
        + (f"; {failing} did not" if failing else "; larger sizes were not tried")
        + (f"; limit {format_bytes(made.memory_bytes)}" if made.memory_bytes else "")
        + (f", and {format_bytes(made.margin_bytes)} more are kept free" if made.margin_bytes else ""),
        "",
        *text.table([row(t) for t in made.trials], head=HEAD, right=[1, 3, 4, 5, 6]),
    ]
    if made.max_evaluation_batch_size:
        lines += ["", f"evaluation batch: {made.max_evaluation_batch_size} is the largest that ran"]
    if made.curve:
        lines += ["", *_speed(made, made.curve)]
    peak, limit = made.recommended_peak_memory_bytes, made.memory_bytes
    beside = f"; peak with your own allocator {format_bytes(peak)} of {format_bytes(limit)}" if peak and limit else ""
    size = made.recommended_micro_batch_size
    lines += ["", f"recommended: micro_batch_size {size}{beside}" if size else "recommended: no size (see the notes)"]
    if made.diagnosis:
        lines += text.bullets([f"bottleneck: {made.bottleneck}. {made.diagnosis.text}"])
    return lines + notes(made.notes)


def _speed(made: Probe, c: Curve) -> list[str]:
    gains = "  ".join(f"{g.smaller}→{g.larger} ×{g.gain:.2f}{'' if g.certain else '?'}" for g in c.gains)
    predicted = f"; the fit predicts {c.predicted_saturating}" if c.predicted_saturating else ""
    lines = [
        f"a step takes {1000 * c.fixed_seconds:.3g} ms + {1000 * c.per_sample_seconds:.3g} ms × micro_batch_size "
        f"(within {c.fit_error:.0%})",
        f"gains: {gains}" if gains else "gains: only one size was measured",
        f"90% of the best throughput from {c.saturating} on{predicted}; worth using up to {c.largest_worthwhile}",
    ]
    rates = [
        f"{made.tokens_per_second:,.0f} tokens/s" if made.tokens_per_second else "",
        f"{made.tflops_per_second:.3g} TFLOP/s" if made.tflops_per_second else "",
        f"MFU {made.mfu:.1%}" if made.mfu else "",
    ]
    if any(rates):
        lines.append(f"at {made.recommended_micro_batch_size}: " + ", ".join(r for r in rates if r))
    return lines
