"""`batchwright plan`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import click

from batchwright.core import codec
from batchwright.core.batch.pipeline import SCHEDULES
from batchwright.core.batch.plan import BatchPlan, plan
from batchwright.core.errors import PlanError, Violation
from batchwright.core.numbers import percentage

from . import text
from .config import NOT_READ, PasteCommand, gather, read_file
from .naming import notes
from .options import batch_options, json_option, number, print_json, stack, world_options

if TYPE_CHECKING:
    from batchwright.core.batch.nearby import Nearby
    from batchwright.core.batch.request import BatchRequest
    from batchwright.core.nodes.throughput import Throughput

_pipeline_options = stack(
    number(
        "--pipeline-schedule", f"{' | '.join(SCHEDULES)}.  [default: 1f1b; interleaved with --virtual-stages]", "NAME"
    ),
    number("--pipeline-microbatches", "Microbatches per pipeline pass.  [default: derived]"),
    number(
        "--pipeline-style",
        "What a pipeline microbatch is: accumulation (Megatron: an accumulation step) | inner (MaxText: a part of one).  "
        "[default: accumulation]",
        "NAME",
    ),
    number("--pipeline-group", "Interleaved schedule: microbatches per group.  [default: the stages]"),
    number("--virtual-stages", "Interleaved and circular schedules: model chunks per device.  [default: 1]"),
    click.option("--delayed-forwarding", is_flag=True, help="Circular schedule: forward activations one step later."),
)

_loading_options = stack(
    number("--hosts", "Hosts that can read data.  [default: one per node]"),
    number(
        "--expansion-factor",
        "All hosts / reading hosts. Below 1: fewer hosts continue with more stored shards.  [default: 1]",
        "F",
    ),
    number("--loading-hosts", "Hosts that read data.  [default: all]"),
    number("--stored-hosts", "Hosts that stored the position from which this job continues.  [default: --hosts]"),
    click.option("--equal-rows", is_flag=True, help="Require that every reading host fetches the same number of rows."),
)


@click.command(
    cls=PasteCommand,
    epilog="\b\nExample:\n  batchwright plan --global-batch-size 1024 --nodes 16 --devices-per-node 8 \\\n"
    "      --tensor-parallel 2 --max-micro-batch-size 6",
)
@click.argument("arguments", nargs=-1, metavar="[FILE.yaml] [KEY=VALUE]...")
@batch_options
@world_options
@_pipeline_options
@_loading_options
@number(
    "--from-probe", "Output of batchwright probe --json: the largest size that fits, and measured times.", "FILE.json"
)
@number("--samples-per-second", "Measured throughput of the whole job, in samples per second.", "X")
@number("--step-seconds", "Measured time of one optimizer step, in seconds.", "X")
@number("--round", "down | up: round the global batch to the next one that divides.  [default: do not round]", "WAY")
@click.option(
    "--allow-ragged", is_flag=True, help="Accept a batch that does not divide: shares of ranks differ by one sample."
)
@number("--tolerance", "Also list valid batches and node counts within this distance, such as 10%.", "PERCENT")
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    arguments: tuple[str, ...],
    from_probe: str | None,
    tolerance: str | None,
    as_json: bool,
    **flags: Any,
) -> None:
    """Work out a batch from the numbers you know.

    global batch = micro batch × accumulation steps × data-parallel size. Give the numbers you have, as flags, as
    KEY=VALUE, in a file, or paste the command line of NeMo, MaxText or Hugging Face. plan derives the others and prints
    where each number comes from. Numbers can have a suffix: 4M is 4,000,000 and 4Mi is 4,194,304.
    """
    request = gather(arguments, flags, ctx.meta["left_out"]).request()
    times = None
    if from_probe:
        request, times = _probed(request, from_probe)
    near = None
    if tolerance is not None:
        from batchwright.core.batch.nearby import nearby

        near = nearby(request, percentage(tolerance))
    try:
        made = plan(request, times)
    except PlanError as error:
        # A key that was ignored may be the number that is missing.
        if unread := [note for note in request.notes if note.startswith(NOT_READ)]:
            error = PlanError(violations=[*error.violations, *(Violation(f"{note}.", "file") for note in unread)])
        if near and not as_json:
            click.echo("\n".join(["valid batches nearby:", *_nearby(near)]))
        if near is not None:
            error.nearby = codec.encode(near)  # type: ignore[attr-defined]
        raise error from None
    if as_json:
        extra = {} if near is None else {"nearby": codec.encode(near)}
        print_json(made.to_json() | extra)
    else:
        click.echo("\n".join(render(made, near)))


def _probed(request: BatchRequest, path: str) -> tuple[BatchRequest, Throughput]:
    """The request within what a probe measured, and the measured times."""
    from batchwright.core.batch.request import within_probe
    from batchwright.core.nodes.throughput import Throughput

    record = read_file(path)
    return within_probe(request, record, path), Throughput.from_probe(record)


def render(made: BatchPlan, near: tuple[Nearby, ...] | None = None) -> list[str]:
    """A plan as text: the equation, the numbers with their sources, alternatives and notes."""
    sign = "≤" if made.ragged else "="
    lines = [
        f"{made.global_batch_size} {sign} {made.micro_batch_size} micro × {made.accumulation_steps} accumulation × "
        f"{made.data_parallel_size} data-parallel" + ("   (ragged)" if made.ragged else ""),
        "",
    ]
    lines += _numbers(made, made, [name for name in made.sources if hasattr(made, name)])
    if made.pipeline:
        p = made.pipeline
        lines += ["", f"pipeline: {p.schedule}, {p.stages} stages", *_numbers(made, p, _PIPELINE)]
    load = made.loading
    if load.hosts > 1 or load.expansion_factor != 1:
        more = ["read_amplification"] * (load.read_amplification != 1)
        lines += ["", "loading:", *_numbers(made, load, [*_LOADING, *more])]
        if load.stored_shards:
            lines.append(f"  host h continues with stored shards h, h + {load.hosts}, … of {load.stored_shards}")
    if made.alternatives:
        lines += ["", "alternatives, best first:", *_alternatives(made)]
    if near is not None:
        lines += ["", "valid batches nearby:", *_nearby(near)]
    return lines + notes(made.notes)


_ALWAYS = {
    "global_batch_size",
    "micro_batch_size",
    "accumulation_steps",
    "data_parallel_size",
    "devices",
    "nodes",
    "hosts",
    "loading_hosts",
}
_PIPELINE = ("virtual_stages", "pipeline_microbatches", "bubble_fraction", "recommended_microbatches")
_LOADING = ("hosts", "loading_hosts", "expansion_factor", "load_batch_size", "rows_per_loading_host")
_FEW = 6
_ROWS = 12


def _alternatives(made: BatchPlan) -> list[str]:
    timed = made.alternatives[0].step_seconds is not None
    rows = [
        (
            a.micro_batch_size,
            a.accumulation_steps,
            a.data_parallel_size,
            *([_value(a.step_seconds)] if timed else []),
            a.reason,
        )
        for a in made.alternatives[:_FEW]
    ]
    head = ("micro", "accumulation", "data-parallel", *(["s/step"] if timed else []), "")
    lines = text.table(rows, head=head, right=range(len(head) - 1))
    more = len(made.alternatives) - _FEW
    return lines + ([f"  … and {more} more: --json lists them"] if more > 0 else [])


def _numbers(made: BatchPlan, part: object, names: Iterable[str]) -> list[str]:
    """Numbers of a part of a plan with their sources. Most defaults are left out."""
    return text.table(
        [
            (name, _value(getattr(part, name), name), made.sources[name], made.reasons.get(name, ""))
            for name in names
            if name in made.sources and (made.sources[name] != "default" or name in _ALWAYS)
        ],
        right=[1],
    )


def _value(value: object, name: str = "") -> str:
    # Shares that differ by one.
    if isinstance(value, tuple):
        return f"{value[0]} or {value[-1]}"
    if name.endswith("_fraction"):
        return f"{value:.1%}"
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 10_000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and value >= 10_000 else str(value)


def _nearby(rows: tuple[Nearby, ...]) -> list[str]:
    if not rows:
        return ["  nothing within the tolerance"]
    lines = text.table(
        [
            (
                n.global_batch_size,
                "" if n.nodes is None else n.nodes,
                n.data_parallel_size,
                "" if n.accumulation_steps is None else n.accumulation_steps,
                f"{n.batch_change:+.1%}",
                f"{n.ranks_change:+.1%}",
            )
            for n in rows[:_ROWS]
        ],
        head=("global", "nodes", "data-parallel", "accumulation", "batch", "ranks"),
        right=range(6),
        drop=("ranks", "accumulation", "batch"),
    )
    return lines + ([f"  … and {len(rows) - _ROWS} more: --json lists them"] if len(rows) > _ROWS else [])
