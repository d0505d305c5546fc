"""`batchwright ramp`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import click

from batchwright.core import codec
from batchwright.core.batch.request import READERS, BatchRequest
from batchwright.core.errors import ConfigError
from batchwright.core.nodes.policies import arrows
from batchwright.core.numbers import count, human
from batchwright.core.ramp.ramp import Ramp, ramp
from batchwright.core.ramp.request import RAMP_READERS, RampRequest, read_ramp
from batchwright.core.ramp.schedule import Step

from . import text
from .config import PasteCommand, gather, read_file
from .options import batch_options, json_option, number, print_json, stack, world_options
from .ramp_options import node_options, rule_options

_rate_options = stack(
    number("--lr", "Peak learning rate at the first stage's batch.", "X"),
    number("--lr-scaling", "none | sqrt | linear with the batch.  [default: none]", "RULE"),
    number("--optimizer", "Its name, for the suggested rule.", "NAME"),
    number("--lr-horizon-steps", "Check where a schedule of so many steps really ends."),
    number("--lr-horizon-samples", "Check that a schedule of so many samples ends at the budget."),
)


@click.command(
    cls=PasteCommand,
    epilog="\b\nExamples:\n  batchwright ramp --linear 256,128,50M --global-batch-size 1024\n"
    "  batchwright ramp --recipe nemotron-4-15b --nodes 288 --node-policy constant-work\n"
    "  batchwright ramp model.global_batch_size=1024 'model.rampup_batch_size=[256, 128, 50000000]'",
)
@click.argument("words", nargs=-1, metavar="[FILE.yaml] [KEY=VALUE]...")
@rule_options
@number("--sequence-lengths", "Thresholds: the sequence length of each stage.", "L,L,...")
@click.option("--list-recipes", is_flag=True, help="The published schedules there are.")
@batch_options
@world_options
@number("--pipeline-schedule", "The pipeline's schedule, for its rules.", "NAME")
@number("--virtual-stages", "Interleaved and circular: visits of each device.")
@node_options
@_rate_options
@number("--at", "Where is the run at this sample?", "SAMPLE")
@number("--at-step", "Where is the run at this step?", "STEP")
@number("--compare", "Two dialects with the same numbers, such as linear,maxtext.", "A,B")
@click.option("--plot/--no-plot", default=None, help="The staircase, as a plot.  [default: on a terminal]")
@click.option("--csv", "as_csv", is_flag=True, help="Print the stages as CSV.")
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    words: tuple[str, ...],
    list_recipes: bool,
    from_probe: str | None,
    at: str | None,
    at_step: str | None,
    compare: str | None,
    plot: bool | None,
    as_csv: bool,
    as_json: bool,
    **flags: Any,
) -> None:
    """A batch that grows: every stage, where it runs and what it costs, before anything is submitted.

    One rule, an optional budget, and optionally a world: each stage is checked against it and placed on nodes by a
    policy. NeMo's, Megatron's and MaxText's own keys work as they are.
    """
    if list_recipes:
        _list_recipes(as_json)
        return
    _refuse_together({"at": at, "at-step": at_step, "compare": compare, "csv": as_csv})
    _refuse_together({"csv": as_csv, "json": as_json})
    gathered = gather(words, flags, ctx.meta["left_out"], own=[*READERS, *RAMP_READERS])
    probe = {"probe": read_file(from_probe)} if from_probe else {}
    wanted = read_ramp({name: value for name, value in gathered.values.items() if name in RAMP_READERS} | probe)
    request = gathered.request()
    if compare is not None:
        _compare(request, wanted, compare, as_json)
        return
    made = ramp(request, wanted)
    if at is not None or at_step is not None:
        step = (
            made.at_sample(count(at, "at", least=0))
            if at is not None
            else made.at_step(count(at_step or 0, "at_step", least=0))
        )
        _show_step(made, step, as_json)
    elif as_json:
        print_json(made.to_json())
    elif as_csv:
        click.echo("\n".join(_csv(made)))
    else:
        click.echo("\n".join(render(made)))
        if sys.stdout.isatty() if plot is None else plot:
            click.echo("\n" + draw(made, color=text.color()))


def render(made: Ramp) -> list[str]:
    """A ramp for people: stages, totals, learning rates, notes."""
    schedule, placed = made.schedule, made.placement
    head = ["stage", "global", "first step", "steps", "from sample", "to sample"]
    tokens = any(s.start_token is not None and s.sequence_length for s in schedule.segments)
    if tokens:
        head += ["from token", "to token"]
    if placed:
        head += [
            *["nodes"] * made.nodes_known,
            "ranks",
            "micro",
            "accum",
            *["ragged"] * any(s.ragged for s in placed.stages),
        ]
        if any(s.hours is not None for s in placed.stages):
            head += ["s/step", "hours", *["node-hours"] * made.nodes_known]
    if made.rates:
        head += ["lr before", "lr after"]
    rows: list[list[str]] = []
    for i, segment in enumerate(schedule.segments):
        row = [
            i + 1,
            segment.global_batch_size,
            segment.first_step,
            segment.steps,
            segment.start_sample,
            segment.end_sample,
        ]
        row += [segment.start_token, segment.end_token] if tokens else []
        if placed:
            stage = placed.stages[i]
            row += [*[stage.nodes] * made.nodes_known, stage.data_parallel_size, stage.micro_batch_size]
            row += [stage.accumulation_steps, *["yes" if stage.ragged else "no"] * ("ragged" in head)]
            if "hours" in head:
                row += [stage.step_seconds, stage.hours, *[stage.node_hours] * made.nodes_known]
        row += [made.rates[i].before, made.rates[i].after] if made.rates else []
        rows.append([_cell(value) for value in row])
    shown, left = _middle_left_out(rows)
    lines = [*text.fitted(_title(made)), "", *text.table(shown, head=head, right=range(len(head)), drop=_DROP)]
    if left:
        lines.append(f"  ({left} stages in between left out: --json or --csv lists them)")
    lines += ["", *text.fitted(_totals(made))]
    if made.notes:
        lines += ["", "notes:", *text.notes(made.notes)]
    return lines


def _title(made: Ramp) -> list[str]:
    first, last = made.schedule.segments[0], made.schedule.segments[-1]
    stages = f"{len(made.schedule.segments)} stage{'s' * (len(made.schedule.segments) > 1)}"
    if first is last:
        return [f"global batch {first.global_batch_size}, {stages}"]
    return [
        f"global batch {first.global_batch_size} -> {last.global_batch_size}, {stages}; the last starts at step "
        f"{last.first_step:,}, sample {last.start_sample:,}"
    ]


def _totals(made: Ramp) -> list[str]:
    schedule, placed = made.schedule, made.placement
    if schedule.total_steps is None:
        lines = ["total: open end (give --samples or --tokens)"]
    else:
        tokens = f", {schedule.total_tokens:,} tokens" if schedule.total_tokens else ""
        lines = [f"total: {schedule.total_steps:,} steps, {schedule.total_samples:,} samples{tokens}"]
    if placed is None or not made.nodes_known:
        return lines
    launches = f"{len(placed.launches)} launch{'es' * (len(placed.launches) > 1)}"
    lines.append(f"nodes: policy {placed.policy}, {launches}: " + arrows([one.nodes for one in placed.launches]))
    if placed.hours is not None and placed.node_hours is not None:
        lines.append(
            f"cost:  {_hours(placed.hours)} hours ({_hours(placed.hours / 24)} days), {_hours(placed.node_hours)} node-hours, "
            "restarts included"
        )
    if placed.saved_node_hours is not None and placed.full_cluster_node_hours:
        share = abs(placed.saved_node_hours) / placed.full_cluster_node_hours
        word = "saved: " if placed.saved_node_hours >= 0 else "extra: "
        lines.append(
            f"{word}{_hours(abs(placed.saved_node_hours))} node-hours ({share:.1%}) against all nodes in every stage, which "
            f"takes {_hours(placed.full_cluster_hours or 0.0)} hours"
        )
    return lines


def _hours(value: float) -> str:
    """Whole above a hundred, with a place after the point above one, else two digits that say something."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 or not value else f"{value:.2g}"


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.1f}" if value >= 100 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


_FEW = 16
# On a narrow terminal: first what follows from other columns, last what is decided here.
_DROP = (
    "from token", "to sample", "lr before", "first step", "ranks", "to token", "from sample", "s/step", "ragged", "accum",
    "hours", "micro",
)  # fmt: skip


def _middle_left_out(rows: list[list[str]]) -> tuple[list[list[str]], int]:
    if len(rows) <= _FEW:
        return rows, 0
    return [*rows[: _FEW // 2], ["…"] * len(rows[0]), *rows[-_FEW // 2 + 1 :]], len(rows) - _FEW + 1


def _csv(made: Ramp) -> list[str]:
    rows = made.stages()
    return [",".join(rows[0]), *(",".join("" if v is None else str(v) for v in row.values()) for row in rows)]


def draw(made: Ramp, *, color: bool) -> str:
    """The staircase of batch (and nodes) against samples; an open end is drawn a little further."""
    from batchwright.report.plots import staircase

    segments = made.schedule.segments
    last = segments[-1]
    end = last.end_sample
    if end is None:
        end = max(last.start_sample + max(1, last.start_sample // 4), last.start_sample + last.global_batch_size)
    edges = [*(s.start_sample for s in segments), end]
    series = {"global batch": [s.global_batch_size for s in segments]}
    if made.placement and made.nodes_known:
        series["nodes"] = [s.nodes for s in made.placement.stages]
    return staircase(edges, series, xlabel="samples", color=color)


def _refuse_together(flags: Mapping[str, object]) -> None:
    used = [f"--{name}" for name, value in flags.items() if value not in (None, False)]
    if len(used) > 1:
        raise ConfigError(f"{' and '.join(used)} are two different answers: ask for one.", field=used[1][2:])


def _show_step(made: Ramp, step: Step, as_json: bool) -> None:
    segment = made.schedule.segments[step.segment]
    if as_json:
        print_json({"schema": codec.SCHEMA, **codec.encode(step), "end_sample": step.end_sample, "stage": step.segment})
        return
    click.echo(
        f"step {step.step:,}: samples {step.start_sample:,} to {step.end_sample:,}, global batch {step.global_batch_size}, "
        f"stage {step.segment + 1} of {len(made.schedule.segments)}"
        + (f" (until sample {human(segment.end_sample)})" if segment.end_sample else " (open end)")
    )


def _compare(request: BatchRequest, wanted: RampRequest, names: str, as_json: bool) -> None:
    """The same numbers as Megatron and as MaxText read them."""
    from batchwright.core.ramp.rules import Linear, PerDevice, compare

    if wanted.linear is None or request.global_batch_size is None:
        raise ConfigError(
            "--compare takes the numbers of --linear START,INC,SAMPLES and --global-batch-size.", field="compare"
        )
    start, increment, samples = (count(word, "linear", least=0) for word in wanted.linear)
    target = request.global_batch_size
    rules: Mapping[str, Any] = {
        "linear": lambda: Linear(start, increment, samples, target, allow_falling=wanted.allow_falling),
        "maxtext": lambda: PerDevice(start, increment, target, samples, devices=1),
    }
    aliases = {"megatron": "linear", "nemo": "linear", "per-device": "maxtext"}
    chosen = [aliases.get(name.strip(), name.strip()) for name in names.split(",")]
    if len(chosen) != 2 or any(name not in rules for name in chosen):
        raise ConfigError(
            f"compare={names[:60]!r} is not two of {', '.join([*rules, *aliases])}.",
            field="compare",
            given=names[:60],
            nearest=["linear,maxtext"],
        )
    first, second = (rules[name]().compile() for name in chosen)
    rows = compare(first, second)
    if as_json:
        print_json(
            {
                "schema": codec.SCHEMA,
                "dialects": chosen,
                "ramp_steps": [first.ramp_steps, second.ramp_steps],
                "stages": [codec.encode(row) | {"difference": row.difference} for row in rows],
            }
        )
        return
    lines = text.table(
        [
            [row.global_batch_size, *(_cell(v) for v in (row.first_steps, row.second_steps, row.difference))]
            for row in rows
        ],
        head=["global", f"{chosen[0]} steps", f"{chosen[1]} steps", "difference"],
        right=range(4),
    )
    lines += [
        "",
        f"steps before the full batch: {first.ramp_steps:,} ({chosen[0]}), {second.ramp_steps:,} ({chosen[1]})",
    ]
    click.echo("\n".join(lines))


def _list_recipes(as_json: bool) -> None:
    from batchwright.core.ramp.recipes import RECIPES

    if as_json:
        print_json(
            {
                "schema": codec.SCHEMA,
                "recipes": [{"name": r.name, "title": r.title, "source": r.source} for r in RECIPES],
            }
        )
    else:
        click.echo("\n".join(text.table([(r.name, r.title, r.source) for r in RECIPES])))
