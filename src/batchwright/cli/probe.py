"""`batchwright probe`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import click

from batchwright.core.errors import ConfigError, RunError
from batchwright.core.numbers import format_bytes, parse_bytes

from . import text
from .options import CommandLine, json_option, number, print_json, read_task, stack, task_arguments

_limit_options = stack(
    number(
        "--memory", "Budget, such as 2GiB. CPU: above the size after importing torch. CUDA: of the device.", "BYTES"
    ),
    number("--margin", "Keep this much of it free.", "BYTES"),
    number("--max", "Try nothing larger."),
    number("--multiple-of", "Only multiples of this."),
    click.option("--exact", is_flag=True, help="The first failing size is one above the answer, not within 1%."),
    click.option("--longest", is_flag=True, help="Fill batches with the longest sample, so that none fails later."),
    click.option("--estimate", is_flag=True, help="Take memory per sample from the estimate: one trial fewer."),
    click.option("--evaluation", is_flag=True, help="Also the largest evaluation batch, amid training."),
    number("--accumulation-steps", "1: never accumulates, so gradients need no room. Default: 2, right for any more."),
    number("--ranks", "Processes, started by torchrun; the smallest verdict wins."),
    number("--timeout", "Seconds after which a trial hangs. Default: 600.", "X"),
    number("--device", "cpu | cuda. Default: cuda where there is one.", "NAME"),
)

_speed_options = stack(
    click.option("--limit-only", is_flag=True, help="Find what fits; measure no throughput."),
    number("--seconds", "Time to measure each size for. Default: 2.", "X"),
    number("--workers", "Loader workers while measuring the input. Default: 0."),
    number("--step-regex", "What a step looks like in a command's output; its first group counts steps.", "REGEX"),
    number("--peak-tflops", "The device's peak, for MFU where it is not in the table.", "X"),
)


@click.command(
    cls=CommandLine,
    epilog="\b\nExample:\n  batchwright probe train.py:task --memory 2GiB\n"
    "  batchwright probe -- python train.py --per_device_train_batch_size {micro_batch_size}",
)
@click.argument("target", required=False, metavar="FILE.py:FUNCTION | FILE.yaml | -- COMMAND...")
@_limit_options
@_speed_options
@click.option("--arg", "args", multiple=True, metavar="KEY=VALUE", help="An argument of the task's function.")
@click.option("--dir", "dir", default=".batchwright", metavar="DIR", show_default=True, help="Where the journal lies.")
@click.option("--fresh", is_flag=True, help="Do not resume from the journal.")
@click.option("--plot/--no-plot", default=None, help="Plots. Default: on a terminal.")
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    target: str | None,
    args: tuple[str, ...],
    limit_only: bool,
    estimate: bool,
    plot: bool | None,
    as_json: bool,
    **flags: Any,
) -> None:
    """What fits, what is fast, and why: a few trials, each in processes of its own.

    Finds the largest micro batch that runs by prediction and verification, measures throughput at sizes up to it, and
    names the bottleneck. Only sizes that ran are recommended. Every trial goes to a journal, from which an interrupted
    probe goes on.
    """
    from batchwright.probe.display import TrialLines, TrialTable
    from batchwright.probe.prober import probe

    words = ctx.meta["command"]
    if bool(target) == bool(words):
        given = f"got both {target!r} and a command" if target else "got neither"
        raise ConfigError(
            f"a probe needs FILE.py:function, or -- and a command with {{micro_batch_size}} in it; {given}.",
            field="target",
            given=target,
        )
    if estimate and words:
        raise ConfigError(
            "--estimate is for tasks (FILE.py:function): there is nothing to estimate a command's memory from.",
            field="estimate",
            given=True,
        )
    target, arguments = read_task(target, args) if target else (None, task_arguments(args))
    slope = _estimated(target, arguments, flags) if estimate and target else None
    progress = TrialTable() if sys.stderr.isatty() else TrialLines()
    try:
        made = probe(
            target or list(words),
            args=arguments,
            throughput=not limit_only,
            predict_slope=slope,
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
            from batchwright.probe.display import plots

            click.echo("\n".join(plots(made, min(100, text_width()))))
    if made.journal_error:
        click.echo(
            f"error: the journal could not be written: {made.journal_error}. The results above are complete, but a later "
            "probe cannot go on from them. Free some space, or give another --dir.",
            err=True,
        )
        ctx.exit(4)


def _estimated(target: str, args: dict[str, Any], flags: dict[str, Any]) -> Callable[[], float]:
    """Bytes per sample from the estimate, asked for when the search begins."""

    def slope() -> float:
        from batchwright.estimate import predict_slope

        memory = flags["memory"] and parse_bytes(flags["memory"], "memory")
        return predict_slope(target, args, memory_bytes=memory).bytes_per_sample

    return slope


def text_width() -> int:
    """Columns of the terminal."""
    import shutil

    return shutil.get_terminal_size().columns


def render(made: Any) -> list[str]:
    """A probe for people: the answer, the trials behind it, the speed, and notes."""
    from batchwright.probe.display import HEAD, row

    failing = made.first_failing_micro_batch_size
    lines = [
        f"micro_batch_size {made.max_micro_batch_size} is the largest that ran"
        + (f"; {failing} did not" if failing else " (the cap)")
        + (f"; limit {format_bytes(made.memory_bytes)}" if made.memory_bytes else "")
        + (f", of which {format_bytes(made.margin_bytes)} kept free" if made.margin_bytes else ""),
        "",
        *text.table([row(t) for t in made.trials], head=HEAD, right=[1, 3, 4, 5, 6]),
    ]
    if made.max_evaluation_batch_size:
        lines += ["", f"evaluation batch: {made.max_evaluation_batch_size} is the largest that ran"]
    if made.curve:
        lines += ["", *_speed(made)]
    lines += ["", f"recommended: micro_batch_size {made.recommended_micro_batch_size}"]
    if made.diagnosis:
        lines += text.notes([f"bottleneck: {made.bottleneck}. {made.diagnosis.text}"])
    if made.notes:
        lines += ["", "notes:", *text.notes(made.notes)]
    return lines


def _speed(made: Any) -> list[str]:
    c = made.curve
    gains = "  ".join(f"{g.smaller}→{g.larger} ×{g.gain:.2f}{'' if g.certain else '?'}" for g in c.gains)
    predicted = f"; the fit predicts {c.predicted_saturating}" if c.predicted_saturating else ""
    lines = [
        f"a step takes {1000 * c.fixed_seconds:.3g} ms + {1000 * c.per_sample_seconds:.3g} ms × micro_batch_size "
        f"(within {c.fit_error:.0%})",
        f"gains: {gains}" if gains else "gains: one size only",
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
