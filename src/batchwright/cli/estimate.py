"""`batchwright estimate`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from batchwright.core.errors import BatchwrightError
from batchwright.core.numbers import count, format_bytes, parse_bytes, positive

from . import text
from .naming import Verb, notes
from .options import counts, json_option, number, print_json, read_task, task_option

if TYPE_CHECKING:
    from batchwright.estimate import Estimate


@click.command(
    cls=Verb,
    epilog="\b\nExample:\n  batchwright estimate train.py:task --device h100-80g --sequence-length 1024,2048 \\\n"
    "      --precision bf16 --checkpoint-activations",
)
@click.argument("task", metavar="FILE.py:FUNCTION | FILE.yaml", required=False)
@number("--device", "The device it must fit on, such as h100-80g; `--device list` prints all names.", "NAME")
@number("--memory", "Memory it must fit in, in bytes, such as 80GiB, instead of --device.", "BYTES")
@number("--margin", "Memory to leave free, in bytes.  [default: 0]", "BYTES")
@number(
    "--micro-batch-size",
    "Micro batches to estimate, in samples, such as 1,2,4.  [default: chosen by a search]",
    "N,...",
)
@number(
    "--sequence-length", "Tokens per sample, such as 1024,2048; passed to the function as sequence_length.", "N,..."
)
@click.option(
    "--precision",
    metavar="NAME",
    default="fp32",
    show_default=True,
    help="fp32, bf16 or fp16 (autocast), bf16-pure or fp16-pure (the model itself is converted).",
)
@click.option("--checkpoint-activations", is_flag=True, help="Recompute each repeated block in the backward pass.")
@click.option("--quantize-frozen", is_flag=True, help="Count frozen linear layers at 4 bits (QLoRA), by rule.")
@number("--ranks", "Shard over this many ranks with FSDP2, and estimate one rank.  [default: 1]")
@number("--accumulation-steps", "Above 1, gradients stay in memory during the forward pass.  [default: 1]")
@task_option
@click.option("--calibrate", is_flag=True, help="Also run one real trial on this CPU and compare it with its estimate.")
@number("--timeout", "Stop the estimating process after this many seconds.  [default: 1800]", "S")
@json_option
def command(task: str | None, as_json: bool, **flags: Any) -> None:
    """Predict peak memory by micro batch, without training and without a GPU.

    Takes a function that returns a Task (or a JaxStep), follows two training steps on fake tensors, and prints what the
    peak consists of, how it grows, and the largest micro batch that fits. All numbers are predicted: measure with
    batchwright probe before you use one.
    """
    from batchwright.estimate import estimate

    if flags["device"] == "list":
        _devices(as_json)
        return
    if task is None:
        raise click.UsageError("estimate needs a task: FILE.py:FUNCTION.", ctx=click.get_current_context())
    task, arguments = read_task(task, flags["args"])
    given = {
        "device": flags["device"],
        "memory_bytes": None if flags["memory"] is None else parse_bytes(flags["memory"]),
        "margin_bytes": 0 if flags["margin"] is None else parse_bytes(flags["margin"], "margin"),
        "micro_batch_sizes": counts(flags["micro_batch_size"], "micro_batch_size"),
        "sequence_lengths": counts(flags["sequence_length"], "sequence_length"),
        "ranks": count(flags["ranks"] or 1, "ranks"),
        "accumulation_steps": count(flags["accumulation_steps"] or 1, "accumulation_steps"),
        "args": arguments,
    } | {name: flags[name] for name in ("precision", "checkpoint_activations", "quantize_frozen", "calibrate")}
    if flags["timeout"] is not None:
        given["timeout"] = positive(flags["timeout"], "timeout")
    try:
        made = estimate(task, progress=True, **given)
    except BatchwrightError as error:
        # The traceback of the user's code.
        for trace in getattr(error, "__notes__", ()):
            click.echo(trace, err=True)
        raise
    if as_json:
        print_json(made.to_json())
    else:
        click.echo("\n".join(render(made)))


def _devices(as_json: bool) -> None:
    from batchwright.estimate.devices import DEVICES

    if as_json:
        print_json({"schema": 1, "devices": [vars(d) for d in DEVICES.values()]})
        return
    click.echo(
        "\n".join(text.table([(d.name, format_bytes(d.memory_bytes), d.source) for d in DEVICES.values()], right=[1]))
    )


def render(made: Estimate) -> list[str]:
    """An estimate as text: the answer, the table, the line, the frontier, the trial, and the assumptions."""
    several = len(made.lengths) > 1
    limit = None if made.memory_bytes is None else made.memory_bytes - made.margin_bytes
    lines: list[str] = []
    if limit is not None:
        where = (
            f"{format_bytes(made.memory_bytes or 0)} of {made.device.name}"
            if made.device
            else format_bytes(made.memory_bytes or 0)
        )
        left = f" ({format_bytes(made.margin_bytes)} of it kept free)" if made.margin_bytes else ""
        length = f" at sequence_length {made.lengths[-1].sequence_length}" if several else ""
        lines += [f"max_micro_batch_size {made.max_micro_batch_size}{length}, predicted, in {where}{left}", ""]
    kinds = [k for k in made.points[0].breakdown if any(p.breakdown.get(k) for p in made.points)]
    head = (*(["length"] if several else []), "micro", "peak", *kinds, *(["fits"] if limit is not None else []))
    rows = [
        (
            *([p.sequence_length] if several else []),
            p.micro_batch_size,
            format_bytes(p.peak_memory_bytes),
            *(format_bytes(p.breakdown.get(k, 0)) if p.breakdown.get(k, 0) else "-" for k in kinds),
            *(["yes" if p.peak_memory_bytes <= limit else "no"] if limit is not None else []),
        )
        for p in made.points
    ]
    lines += ["estimated peak memory, and what it consists of:"]
    lines += text.table(rows, head=head, right=range(len(head)))
    for row in made.lengths:
        if row.slope is not None:
            length = f"sequence_length {row.sequence_length}: " if several else ""
            low, high = row.slope.micro_batch_sizes
            lines += [
                *([""] if row is made.lengths[0] else []),
                f"{length}{format_bytes(row.slope.bytes_per_sample)} per sample over {format_bytes(row.slope.base_bytes)} "
                f"(line through {low} and {high})",
            ]
    if made.frontier and made.fit:
        lines += [
            "",
            f"frontier, from peak = {format_bytes(made.fit.constant)} + {made.fit.linear:.6g}·B·T + "
            f"{made.fit.quadratic:.6g}·B·T² bytes (within {made.fit.error:.2%} of the estimates):",
        ]
        lines += text.table(
            [
                (r.sequence_length, r.max_micro_batch_size, r.sequence_length * r.max_micro_batch_size, r.source)
                for r in made.frontier
            ],
            head=("length", "micro", "tokens", ""),
            right=range(3),
        )
    if made.calibration:
        lines += ["", *_calibration(made)]
    lines += ["", "assumptions:", *text.bullets(made.assumptions)]
    predicted = "All sizes are predicted, not measured: measure them with batchwright probe."
    return lines + notes([*made.notes, predicted])


def _calibration(made: Estimate) -> list[str]:
    trial = made.calibration
    assert trial is not None
    lines = [
        f"one real trial on this CPU, micro_batch_size {trial.micro_batch_size}"
        + (f", sequence_length {trial.sequence_length}" if trial.sequence_length else "")
        + ":",
        *text.table(
            [
                ("estimated", format_bytes(trial.estimated_bytes)),
                ("measured", format_bytes(trial.measured_bytes)),
                ("difference", format_bytes(trial.difference_bytes)),
            ],
            right=[1],
        ),
    ]
    if trial.max_micro_batch_size is not None:
        lines.append(
            f"  with the difference added, max_micro_batch_size would be {trial.max_micro_batch_size} (predicted)"
        )
    return lines
