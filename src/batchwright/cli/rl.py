"""`batchwright rl`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import click

from batchwright.core import codec
from batchwright.core.errors import ConfigError, Violation, raise_violations
from batchwright.core.rl import UNITS, RLPlan, rl
from batchwright.dialects import detect, resolve
from batchwright.dialects.record import PARALLEL_FIELDS, RL_FIELDS, WORLD_FIELDS, Given

from . import text
from .config import PasteCommand, without_others
from .files import not_read, read_arguments, without_deleted, words_of
from .naming import notes, remember
from .options import complete, json_option, number, print_json


class RLCommand(PasteCommand):
    """A verb that accepts the flags and command lines of frameworks for reinforcement learning."""

    kind = "rl"


@click.command(
    cls=RLCommand,
    epilog="\b\nExamples:\n  batchwright rl --prompts 32 --generations 8 --train-micro-prompts 4\n"
    "  batchwright rl verl.yaml actor_rollout_ref.rollout.n=16",
)
@click.argument("arguments", nargs=-1, metavar="[FILE.yaml] [KEY=VALUE]...", shell_complete=complete)
@number("--prompts", "Prompts per round. Required.")
@number("--generations", "Responses per prompt. Required.")
@number("--train-micro-prompts", "Training micro batch per rank, in prompts; -1 is all at once.  [default: -1]")
@number("--train-micro-responses", "Training micro batch per rank, in responses.")
@number("--rollout-micro-prompts", "Prompts for which responses are generated at once; -1 is all.  [default: -1]")
@number(
    "--micro-batch-size",
    "Both micro batches, as MaxText's one key, over all ranks; -1 is all at once.  [default: -1]",
)
@number(
    "--micro-batch-unit",
    "What --micro-batch-size counts: prompts (MaxText's code) or responses (its page).  [default: prompts]",
    "|".join(UNITS),
)
@number("--updates", "Optimizer updates per round; they share its prompts.  [default: 1]")
@number("--iterations", "Training passes over the responses of a round.  [default: 1]")
@number("--rounds-ahead", "Rounds that are generated ahead of training.  [default: 0]")
@number("--data-parallel-size", "Number of ranks that train.  [default: 1]")
@json_option
@click.pass_context
def command(ctx: click.Context, arguments: tuple[str, ...], as_json: bool, **flags: Any) -> None:
    """Plan batches of reinforcement learning: prompts -> responses -> updates -> micro batches.

    The effective batch is prompts × generations. The responses to one prompt always belong to the same update. Keys of
    MaxText (batch_size=8 num_generations=16 micro_batch_size=2), TRL, verl, OpenRLHF and NeMo-RL work, too, in files and in
    pasted command lines.
    """
    values, sources, read = _gather(arguments, flags, ctx.meta["left_out"])
    made = rl(**values)
    made = replace(made, notes=(*read, *made.notes))
    if as_json:
        print_json({"schema": codec.SCHEMA, **codec.encode(made), "sources": sources})
    else:
        click.echo("\n".join(render(made)))


def _gather(
    arguments: tuple[str, ...], flags: Mapping[str, Any], left_out: tuple[str, ...]
) -> tuple[dict[str, Any], dict[str, str], tuple[str, ...]]:
    """Values, where each was given, and notes. A flag wins over KEY=VALUE, which wins over a file."""
    entries: list[tuple[str, Given]] = []
    inside: set[str] = set()  # keys of files, where unknown ones are passed over
    for _, is_key, found in read_arguments(arguments, left_out):
        entries += [(_own(key, flags), given) for key, given in found]
        inside |= set() if is_key else {key for key, _ in found}
    entries = without_deleted(entries, (*arguments, *left_out))
    unread = not_read(arguments, left_out, entries)
    own = {*flags, *WORLD_FIELDS, *PARALLEL_FIELDS}
    framework, _ = detect([key for key, _ in entries], (*left_out, *words_of(arguments)), "rl")
    entries += [
        (name, Given(value, f"--{name.replace('_', '-')}", 2)) for name, value in flags.items() if value is not None
    ]
    if framework is None and not left_out:
        entries = [(key, given) for key, given in entries if key not in inside or key in own]
    entries, _ = without_others(entries, own, left_out, framework, "rl")
    lenient = bool(framework or left_out)
    resolved = resolve(entries, own=own, lenient=lenient, kind="rl", framework=framework)
    fields = {name: given for name, given in resolved.fields.items() if name in RL_FIELDS}
    values = {name: given.value for name, given in fields.items()}
    sources = {name: given.origin for name, given in fields.items()}
    required = ("prompts", "generations")
    raise_violations(ConfigError, [Violation(f"{n} is required.", n) for n in required if n not in values])
    remember(values, sources)
    return values, sources, (*resolved.notes, *unread)


def _own(key: str, flags: Mapping[str, Any]) -> str:
    """A key of batchwright's own file, `rl.prompts`, by its name."""
    name = key.removeprefix("rl.")
    return name if name in flags else key


def render(made: RLPlan) -> list[str]:
    """The counts of a round as text, each with its unit."""

    def plural(number: int, unit: str) -> str:
        return f"{number:,} {unit}{'s' * (number != 1)}"

    groups = f"× {made.generations_per_prompt} generations"
    micro = f"× {made.accumulation_steps} accumulation × {plural(made.data_parallel_size, 'rank')}"
    update, rollout = plural(made.responses_per_update, "response"), plural(made.rollout_micro_responses, "response")
    rows = [
        ("round", plural(made.prompts_per_round, "prompt"), groups, plural(made.responses_per_round, "response"), ""),
        (
            "rollout",
            plural(made.rollout_micro_prompts, "prompt"),
            groups,
            rollout,
            f"× {plural(made.rollout_micro_steps, 'micro step')}",
        ),
        ("update", plural(made.prompts_per_update, "prompt"), groups, update, f"× {made.updates_per_round} per round"),
        ("micro", plural(made.train_micro_responses, "response"), micro, update, ""),
    ]
    verdict = (
        "on-policy"
        if made.on_policy
        else f"off-policy: at worst {plural(made.worst_policy_lag_updates, 'update')} behind"
    )
    lines = [
        f"effective batch {made.responses_per_update:,} responses = {made.prompts_per_update} prompts × "
        f"{made.generations_per_prompt} generations; {verdict}",
        "",
        *text.table([(*row[:3], f"= {row[3]}", row[4]) for row in rows]),
    ]
    return lines + notes(made.notes)
