"""`batchwright rl`."""

from __future__ import annotations

from typing import Any

import click

from batchwright.core import codec
from batchwright.core.errors import ConfigError, Violation, raise_violations
from batchwright.core.request import unknown_key
from batchwright.core.rl import RLPlan, rl

from . import text
from .options import json_option, number, print_json

# MaxText's keys; its micro batches count prompts, and -1 turns one off.
_MAXTEXT = {
    "batch_size": "prompts",
    "rl.num_generations": "generations",
    "num_generations": "generations",
    "train_micro_batch_size": "train_micro_prompts",
    "rollout_micro_batch_size": "rollout_micro_prompts",
    "rl.num_iterations": "iterations",
    "num_iterations": "iterations",
}


@click.command(epilog="\b\nExample:\n  batchwright rl --prompts 32 --generations 8 --train-micro-prompts 4")
@click.argument("words", nargs=-1, metavar="[KEY=VALUE]...")
@number("--prompts", "Prompts per round.")
@number("--generations", "Responses per prompt.")
@number("--train-micro-prompts", "Training micro batch of a rank, in prompts; -1 or none: all at once.")
@number("--train-micro-responses", "The same in responses.")
@number("--rollout-micro-prompts", "Prompts generated at once; -1 or none: all.")
@number("--updates", "Optimizer updates that share a round's prompts among them.  [default: 1]")
@number("--iterations", "Passes over a round.  [default: 1]")
@number("--rounds-ahead", "Rounds sampled before they are learned from.  [default: 0]")
@number("--data-parallel-size", "Ranks that train.  [default: 1]")
@json_option
def command(words: tuple[str, ...], as_json: bool, **flags: Any) -> None:
    """Batches of reinforcement learning: prompts -> responses -> updates -> micro batches.

    The effective batch is prompts × generations. Groups of responses are never split across an update. MaxText's keys
    (batch_size=32 rl.num_generations=8 train_micro_batch_size=4) are understood too.
    """
    made = rl(**_values(words, flags))
    if as_json:
        print_json({"schema": codec.SCHEMA, **codec.encode(made)})
    else:
        click.echo("\n".join(render(made)))


def _values(words: tuple[str, ...], flags: dict[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    wrong: list[Violation] = []
    for word in words:
        key, _, value = word.partition("=")
        name = _MAXTEXT.get(key, key)
        if name not in flags:
            wrong.append(unknown_key(key, value, [*_MAXTEXT, *flags]))
        elif values.setdefault(name, value) != value:
            message = f"{name} is given twice and differently: {values[name][:40]} and {value[:40]}. Leave one out."
            wrong.append(Violation(message, name, value[:40]))
    values |= {name: value for name, value in flags.items() if value is not None}
    for name in ("prompts", "generations"):
        if name not in values:
            wrong.append(Violation(f"{name} is needed: --{name} N.", name))
    raise_violations(ConfigError, wrong)
    return values


def render(made: RLPlan) -> list[str]:
    """The graph of a round, each count with its unit."""

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
            f"× {made.rollout_micro_steps} micro steps",
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
    return lines + (["", "notes:", *text.notes(made.notes)] if made.notes else [])
