"""`batchwright probe`."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import click

from batchwright.core.errors import ConfigError, RunError
from batchwright.core.numbers import format_bytes

from . import text
from .naming import notes
from .options import (
    CommandLine,
    complete,
    json_option,
    number,
    print_json,
    read_task,
    stack,
    task_arguments,
    task_option,
)

if TYPE_CHECKING:
    from batchwright.probe.records import Probe
    from batchwright.probe.speed import Curve

_limit_options = stack(
    number(
        "--memory",
        "Memory limit in bytes, such as 2GiB. CPU: above the size after importing torch. Else: of the "
        "device.  [default: half of the host's memory; what is free on the device]",
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


@click.command(
    cls=CommandLine,
    epilog="\b\nExamples:\n  batchwright probe train.py:task --memory 2GiB\n"
    "  batchwright probe -- python train.py --per_device_train_batch_size {micro_batch_size}",
)
@click.argument(
    "target", required=False, metavar="FILE.py:FUNCTION | FILE.yaml | -- COMMAND...", shell_complete=complete
)
@_limit_options
@_speed_options
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
    progress = TrialTable() if sys.stderr.isatty() else TrialLines()
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
            click.echo("\n".join(draw(made)))
    if made.journal_error:
        click.echo(
            f"error: the journal could not be written: {made.journal_error}. The results above are complete, but a later "
            "probe cannot continue from them. Free some space, or give another --dir.",
            err=True,
        )
        ctx.exit(4)


def draw(made: Probe) -> list[str]:
    """Throughput and memory against the micro batch, as plots; nothing where there are fewer than two points."""
    from shutil import get_terminal_size

    from batchwright.report.plots import curve

    width = min(100, get_terminal_size().columns)
    ran = [t for t in made.trials if t.fits]
    speed = _best([(t.micro_batch_size, t.samples_per_second or 0.0) for t in ran])
    memory = _best([(t.micro_batch_size, (t.peak_memory_bytes or 0) / 2**20) for t in ran if t.purpose == "limit"])
    lines: list[str] = []
    if len(speed) > 1:
        knee = made.saturating_micro_batch_size
        points = [(knee, speed[knee], f"knee {knee}", "◆")] if knee in speed else []
        lines += ["", *curve("samples/s against micro_batch_size (knee: 90% of the best)", speed, points, width=width)]
    # Without a limit, the peak of a command is only its memory on the host.
    if len(memory) > 1 and made.memory_bytes:
        size = made.first_failing_micro_batch_size
        points = [(size, made.memory_bytes / 2**20, f"fails {size}", "×")] if size else []
        lines += ["", *curve("peak memory, MiB, against micro_batch_size", memory, points, width=width)]
    return lines


def _best(points: Iterable[tuple[int, float]]) -> dict[int, float]:
    """The largest value of each size, without zeros."""
    found: dict[int, float] = {}
    for size, value in sorted(points):
        if value > 0:
            found[size] = max(found.get(size, 0.0), value)
    return found


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
