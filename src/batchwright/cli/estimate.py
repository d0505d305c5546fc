"""`batchwright estimate`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from batchwright.core.codec import encode
from batchwright.core.errors import BatchwrightError
from batchwright.core.numbers import format_bytes

from . import text
from .naming import Verb, notes
from .options import (
    complete,
    json_option,
    memory_options,
    number,
    print_json,
    read_task,
    read_training,
    task_arguments,
    task_option,
    training_options,
)

if TYPE_CHECKING:
    from batchwright.estimate import Estimate, Placement


@click.command(
    cls=Verb,
    epilog="\b\nExamples:\n  batchwright estimate train.py:task --device h100 --sequence-length 1024,2048 \\\n"
    "      --precision bf16 --checkpoint-activations\n"
    "  batchwright estimate --model ./llama-7b --device 4090 --sequence-length 2048 --lora 16 \\\n"
    "      --precision bf16-pure --checkpoint-activations",
)
@click.argument("task", metavar="FILE.py:FUNCTION | FILE.yaml", required=False, shell_complete=complete)
@number("--model", "A Hugging Face model instead of a task: config.json, its folder, or a name of the hub.", "MODEL")
@memory_options
@number(
    "--micro-batch-size",
    "Micro batches to estimate, in samples, such as 1,2,4.  [default: chosen by a search]",
    "N,...",
)
@number(
    "--sequence-length", "Tokens per sample, such as 1024,2048; passed to the function as sequence_length.", "N,..."
)
@training_options
@click.option("--checkpoint-activations", is_flag=True, help="Recompute each repeated block in the backward pass.")
@click.option("--quantize-frozen", is_flag=True, help="Count frozen linear layers at 4 bits (QLoRA), by rule.")
@number("--ranks", "Shard over this many ranks with FSDP2, and estimate one rank.  [default: 1]")
@number("--tensor-parallel", "With --model: devices that split each layer, by rule.  [default: 1]")
@number("--accumulation-steps", "Above 1, gradients stay in memory during the forward pass.  [default: 1]")
@task_option
@click.option("--calibrate", is_flag=True, help="Also run one real trial on this CPU and compare it with its estimate.")
@number("--timeout", "Stop the estimating process after this many seconds.  [default: 1800]", "S")
@click.option("--plot/--no-plot", default=None, help="Draw the parts of the memory.  [default: on a terminal]")
@json_option
def command(task: str | None, plot: bool | None, as_json: bool, **flags: Any) -> None:
    """Predict peak memory by micro batch, without training and without a GPU.

    Takes a function that returns a Task (or a JaxStep), or the configuration of a Hugging Face model, follows two training
    steps on fake tensors, and prints what the peak consists of, how it grows, and the largest micro batch that fits. All
    numbers are predicted: measure with batchwright probe before you use one.
    """
    from batchwright.estimate import estimate

    if flags["device"] == "list":
        _devices(as_json)
        return
    if task is None and flags["model"] is None:
        raise click.UsageError("estimate needs a task (FILE.py:FUNCTION) or --model.", ctx=click.get_current_context())
    arguments: dict[str, Any] = {}
    if task is not None:
        task, arguments = read_task(task, flags["args"])
    else:
        arguments = task_arguments(flags["args"])
    names = ("micro_batch_size", "sequence_length", "ranks", "tensor_parallel", "accumulation_steps", "timeout")
    given = read_training(flags, {name: flags[name] for name in names})
    given |= {name: flags[name] for name in ("model", "checkpoint_activations", "quantize_frozen", "calibrate")}
    try:
        made = estimate(task, args=arguments, progress=True, **given)
    except BatchwrightError as error:
        show_trace(error)
        show_remedies(error, as_json)
        raise
    if as_json:
        print_json(made.to_json())
    else:
        click.echo("\n".join(render(made)))
        if sys.stdout.isatty() if plot is None else plot:
            from batchwright.report.text_charts import text_charts

            click.echo("\n".join(text_charts("estimate", made.to_json())))


def _devices(as_json: bool) -> None:
    from batchwright.estimate.devices import DEVICES

    if as_json:
        print_json({"schema": 1, "devices": encode(list(DEVICES.values()))})
        return
    click.echo(
        "\n".join(text.table([(d.name, format_bytes(d.memory_bytes), d.source) for d in DEVICES.values()], right=[1]))
    )


_FITS = {"fits": "yes", "does not fit safely": "not safely", "does not fit": "no"}


def where(made: Estimate | Placement) -> str:
    """The memory that something fits in, and what is kept free of it."""
    kept = [f"{format_bytes(made.margin_bytes)} of it kept free"] if made.margin_bytes else []
    if (made.usable_bytes or 0) < (made.memory_bytes or 0) - made.margin_bytes:
        kept.append(f"{format_bytes(made.usable_bytes)} usable")
    name = f" of {made.device.name}" if made.device else ""
    return f"{format_bytes(made.memory_bytes)}{name}" + (f" ({', '.join(kept)})" if kept else "")


def show_trace(error: BatchwrightError) -> None:
    """The traceback of the user's code, on standard error."""
    for trace in getattr(error, "__notes__", ()):
        click.echo(trace, err=True)


def show_remedies(error: BatchwrightError, as_json: bool) -> None:
    """The changes that were estimated because nothing fits."""
    tried = getattr(error, "remedies", ())
    if tried and not as_json:
        names = ("precision", "lora", "optimizer", "ranks", "devices", "nodes")
        flag = {f"{name}=": f"--{name} " for name in names} | {"shard": "--shard"}
        rows: list[tuple[str, ...]] = []
        for change in tried:
            spelled = change["change"].replace("checkpoint_activations", "--checkpoint-activations")
            for name, written in flag.items():
                spelled = spelled.replace(name, written)
            rows.append(
                (
                    spelled.replace(" + ", " "),
                    format_bytes(change["peak_memory_bytes"]),
                    "yes" if change["fits"] else "no",
                    change["source"],
                )
            )
        click.echo(
            "\n".join(["with these changes:", *text.table(rows, head=("change", "peak", "fits", ""), right=[1])])
        )


def render(made: Estimate) -> list[str]:
    """An estimate as text: the answer, the table, the line, the frontier, the trial, and the assumptions."""
    several = len(made.lengths) > 1
    lines: list[str] = []
    if made.usable_bytes is not None:
        length = f" at sequence_length {made.lengths[-1].sequence_length}" if several else ""
        lines += [
            f"max_micro_batch_size {made.max_micro_batch_size}{length}, predicted, in {where(made)}",
            "",
        ]
    by_rule = any(p.source == "rule" for p in made.points)
    kinds = [k for k in made.points[0].breakdown if any(p.breakdown.get(k) for p in made.points)]
    head = (
        *(["length"] if several else []),
        "micro",
        "peak",
        *kinds,
        *(["fits"] if made.usable_bytes is not None else []),
        *([""] if by_rule else []),
    )
    rows = [
        (
            *([p.sequence_length] if several else []),
            p.micro_batch_size,
            format_bytes(p.peak_memory_bytes),
            *(format_bytes(p.breakdown.get(k, 0)) if p.breakdown.get(k, 0) else "-" for k in kinds),
            *([_FITS[verdict]] if (verdict := made.verdict(p)) else []),
            *([p.source] if by_rule else []),
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
