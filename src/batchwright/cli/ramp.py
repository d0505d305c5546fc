"""`batchwright ramp`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import click

from batchwright.core import codec
from batchwright.core.batch.request import READERS, BatchRequest
from batchwright.core.errors import ConfigError
from batchwright.core.nodes.policies import POLICIES
from batchwright.core.numbers import arrows, count, human
from batchwright.core.ramp.ramp import Ramp, ramp
from batchwright.core.ramp.request import RAMP_READERS, RampRequest, read_ramp
from batchwright.core.ramp.schedule import Step

from . import text
from .config import PasteCommand, gather
from .naming import notes
from .options import batch_options, complete, json_option, number, print_json, schedule_options, stack, world_options
from .parse import read_file

# `run` takes these, too: the rule of a schedule, and how its stages get their nodes.
rule_options = stack(
    number(
        "--linear",
        "Grow by INC samples per stage, in equal shares of SAMPLES, from START to --global-batch-size.",
        "START,INC,SAMPLES",
    ),
    number(
        "--per-device",
        "MaxText's rule: START, INC and END are samples per device; all increments share SAMPLES.",
        "START,INC,END,SAMPLES",
    ),
    number("--thresholds", 'From sample AT on, a batch of SIZE samples, such as "0:768 60M:1536".', '"AT:SIZE ..."'),
    number("--thresholds-tokens", 'The same with AT in tokens, such as "0:768 250B:1536".', '"AT:SIZE ..."'),
    number("--thresholds-steps", "The same with AT in optimizer steps.", '"AT:SIZE ..."'),
    number(
        "--doubling",
        "Double the batch every EVERY samples (UNIT: samples | tokens | steps), up to --global-batch-size.",
        "START,EVERY[,UNIT]",
    ),
    number("--recipe", "A published schedule; batchwright ramp --list-recipes prints all names.", "NAME"),
    number("--sequence-lengths", "With thresholds: tokens per sample in each stage.", "L,L,..."),
    click.option("--allow-falling", is_flag=True, help="Accept a batch that becomes smaller."),
    number("--samples", "Training budget in samples.  [default: open end]"),
    number("--tokens", "Training budget in tokens.  [default: open end]"),
    number("--epochs", "Training budget in passes over the dataset, such as 3 or 1.5.  [default: open end]"),
    number("--dataset-size", "With --epochs: samples in the dataset.  [default: that of the task]"),
    number(
        "--last-step",
        "What to do with the step in which the budget ends: shorten | drop | overshoot.  [default: shorten]",
        "POLICY",
    ),
)
node_options = stack(
    number(
        "--node-policy",
        f"How many nodes each stage gets: {' | '.join(POLICIES)}.  "
        "[default: launcher with --micro-batch-size, else constant-work]",
        "NAME",
    ),
    number("--micro-step-seconds", "Time of a micro step: A + B × micro batch, in seconds.", "A,B"),
    number(
        "--sync-seconds",
        "Gradient synchronisation between nodes: seconds per tree level, and seconds to send all gradients once.",
        "LATENCY,ALL",
    ),
    number("--stage-seconds", "Measured time of an optimizer step in each stage, in seconds.", "S,S,..."),
    number("--from-probe", "Output of batchwright probe --json: measured times, and the largest size.", "FILE.json"),
    number("--restart-seconds", "Time from stopping a launch until the next one trains.  [default: 300]", "S"),
    number("--deadline-hours", "Policy min-node-hours: the longest time, in hours.  [default: no limit]", "H"),
    number("--node-hours-budget", "Policy min-time: the most node-hours.  [default: no limit]", "NH"),
    click.option("--stop-every-stage", is_flag=True, help="Start a new launch for every stage, as NeMo does."),
    click.option("--allow-ragged", is_flag=True, help="Accept stages that do not divide: shares differ by one sample."),
)
_rate_options = stack(
    number("--lr", "Peak learning rate at the batch of the first stage.", "X"),
    number(
        "--lr-scaling", "How the learning rate grows with the batch: none | sqrt | linear.  [default: none]", "RULE"
    ),
    number("--optimizer", "Name of the optimizer, such as adam: selects the suggested --lr-scaling.", "NAME"),
    number("--lr-horizon-steps", "Show where a learning-rate schedule of this many steps ends."),
    number("--lr-horizon-samples", "Check that a learning-rate schedule of this many samples ends at the budget."),
)


@click.command(
    cls=PasteCommand,
    epilog="\b\nExamples:\n  batchwright ramp --linear 256,128,50M --global-batch-size 1024\n"
    "  batchwright ramp --recipe nemotron-4-15b --nodes 288 --node-policy constant-work\n"
    "  batchwright ramp model.global_batch_size=1024 'model.rampup_batch_size=[256, 128, 50000000]'",
)
@click.argument("arguments", nargs=-1, metavar="[FILE.yaml] [KEY=VALUE]...", shell_complete=complete)
@rule_options
@click.option("--list-recipes", is_flag=True, help="Print the published schedules that --recipe knows.")
@batch_options
@world_options
@schedule_options
@node_options
@_rate_options
@number("--start-sample", "Plan only what is left from this sample on (counted from 0).", "SAMPLE")
@number("--at", "Print only the step that contains this sample (counted from 0).", "SAMPLE")
@number("--at-step", "Print only this step (counted from 0).", "STEP")
@number("--compare", "Compare how two frameworks read the same numbers, such as linear,maxtext.", "A,B")
@click.option("--plot/--no-plot", default=None, help="Draw the schedule.  [default: on a terminal]")
@click.option("--csv", "as_csv", is_flag=True, help="Print the stages as CSV.")
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    arguments: tuple[str, ...],
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
    """Plan a batch that grows: every stage, its nodes and its cost, before anything is submitted.

    Give one rule (such as --linear), a budget if there is one, and the nodes if the stages should be placed on them.
    Every stage is checked, and a policy chooses its nodes. Keys of NeMo, Megatron, MaxText, OLMo-core and Levanter
    work, too.
    """
    if list_recipes:
        _list_recipes(as_json)
        return
    _refuse_together({"at": at, "at-step": at_step, "compare": compare, "csv": as_csv})
    _refuse_together({"csv": as_csv, "json": as_json})
    own = [*READERS, *RAMP_READERS]
    gathered = gather(arguments, flags, ctx.meta["left_out"], own, defaults=from_probe is None)
    probe = {"probe": read_file(from_probe)} if from_probe else {}
    wanted = read_ramp({name: value for name, value in gathered.values.items() if name in RAMP_READERS} | probe)
    request = gathered.request()
    if compare is not None:
        _refuse_together({"compare": compare, "start-sample": bool(wanted.start_sample)})
        _compare(request, wanted, compare, as_json)
        return
    made = ramp(request, wanted)
    if wanted.start_sample:
        _refuse_together({"start-sample": True, "at": at, "at-step": at_step})
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
    """A ramp as text: stages, totals, learning rates, notes."""
    segments, placed = made.left, made.placement
    head = ["stage", "global", "first step", "steps", "from sample", "to sample"]
    tokens = any(s.start_token is not None and s.sequence_length for s in segments)
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
    for i, segment in enumerate(segments):
        row = [
            made.first_stage + i + 1,
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
        rates = made.rates[made.first_stage + i] if made.rates else None
        row += [rates.before, rates.after] if rates else []
        rows.append([_cell(value) for value in row])
    shown, left = _middle_left_out(rows)
    lines = [*text.fitted(_title(made)), "", *text.table(shown, head=head, right=range(len(head)), drop=_DROP)]
    if left:
        lines.append(f"  ({left} stages in between are not shown: --json or --csv lists them)")
    lines += ["", *text.fitted(_totals(made))]
    return lines + notes(made.notes)


def _title(made: Ramp) -> list[str]:
    first, last = made.left[0], made.left[-1]
    number = len(made.schedule.segments)
    stages = f"{number} stage{'s' * (number > 1)}"
    if made.start_sample:
        stages = f"{len(made.left)} of {stages} left from step {first.first_step:,}, sample {made.start_sample:,} on"
    if first is last:
        return [f"global batch {first.global_batch_size}, {stages}"]
    return [
        f"global batch {first.global_batch_size} -> {last.global_batch_size}, {stages}; the last starts at step "
        f"{last.first_step:,}, sample {last.start_sample:,}"
    ]


def _totals(made: Ramp) -> list[str]:
    schedule, placed = made.schedule, made.placement
    if schedule.total_steps is None:
        lines = ["total: open end (give --samples, --tokens or --epochs)"]
    else:
        tokens = f", {schedule.total_tokens:,} tokens" if schedule.total_tokens else ""
        lines = [f"total: {schedule.total_steps:,} steps, {schedule.total_samples:,} samples{tokens}"]
        if made.start_sample:
            lines.append(f"left:  {made.remaining_steps:,} steps, {made.remaining_samples:,} samples")
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
        label = "saved: " if placed.saved_node_hours >= 0 else "extra: "
        lines.append(
            f"{label}{_hours(abs(placed.saved_node_hours))} node-hours ({share:.1%}) compared with all nodes in every stage, "
            f"which takes {_hours(placed.full_cluster_hours or 0.0)} hours"
        )
    return lines


def _hours(value: float) -> str:
    """A time with about three significant digits, and no more than two below one."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 or not value else f"{value:.2g}"


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.1f}" if value >= 100 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


_FEW = 16
# The columns that a narrow terminal leaves out, in this order: first those that follow from others.
_DROP = (
    "from token",
    "to sample",
    "lr before",
    "first step",
    "ranks",
    "to token",
    "from sample",
    "s/step",
    "ragged",
    "accum",
    "hours",
    "micro",
)


def _middle_left_out(rows: list[list[str]]) -> tuple[list[list[str]], int]:
    if len(rows) <= _FEW:
        return rows, 0
    return [*rows[: _FEW // 2], ["…"] * len(rows[0]), *rows[-_FEW // 2 + 1 :]], len(rows) - _FEW + 1


def _csv(made: Ramp) -> list[str]:
    rows = made.stages()
    return [",".join(rows[0]), *(",".join("" if v is None else str(v) for v in row.values()) for row in rows)]


def draw(made: Ramp, *, color: bool) -> str:
    """Batch (and nodes) against samples, as a plot; an open end is drawn a little further."""
    from batchwright.report.plots import staircase

    segments = made.left
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
        raise ConfigError(f"{' and '.join(used)} are mutually exclusive.", field=used[1][2:])


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
        raise ConfigError("--compare needs --linear START,INC,SAMPLES and --global-batch-size.", field="compare")
    start, increment, samples = (count(part, "linear", least=0) for part in wanted.linear)
    target = request.global_batch_size
    rules: Mapping[str, Any] = {
        "linear": lambda: Linear(start, increment, samples, target, allow_falling=wanted.allow_falling),
        "maxtext": lambda: PerDevice(start, increment, target, samples, devices=1),
    }
    aliases = {"megatron": "linear", "nemo": "linear", "per-device": "maxtext"}
    chosen = [aliases.get(name.strip(), name.strip()) for name in names.split(",")]
    if len(chosen) != 2 or any(name not in rules for name in chosen):
        raise ConfigError(
            f"compare={names[:60]!r} must be two of {', '.join([*rules, *aliases])}.",
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
