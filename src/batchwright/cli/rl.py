"""`batchwright rl`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from batchwright.core import codec
from batchwright.core.errors import ConfigError, Violation, either, raise_violations
from batchwright.core.fields import unknown_key
from batchwright.core.numbers import count, nearest_multiples
from batchwright.core.rl import RLPlan, rl
from batchwright.dialects import flatten

from . import text
from .config import read_file
from .naming import Verb, notes, remember
from .options import complete, json_option, number, print_json

# MaxText's keys. Its micro batches count prompts, and -1 switches them off.
_MAXTEXT = {
    "batch_size": "prompts",
    "rl.num_generations": "generations",
    "num_generations": "generations",
    "train_micro_batch_size": "train_micro_prompts",
    "rollout_micro_batch_size": "rollout_micro_prompts",
    "rl.num_iterations": "iterations",
    "num_iterations": "iterations",
}


@click.command(
    cls=Verb,
    epilog="\b\nExample:\n  batchwright rl --prompts 32 --generations 8 --train-micro-prompts 4",
)
@click.argument("arguments", nargs=-1, metavar="[FILE.yaml] [KEY=VALUE]...", shell_complete=complete)
@number("--prompts", "Prompts per round. Required.")
@number("--generations", "Responses per prompt. Required.")
@number("--train-micro-prompts", "Training micro batch per rank, in prompts; -1 is all at once.  [default: -1]")
@number("--train-micro-responses", "Training micro batch per rank, in responses.")
@number("--rollout-micro-prompts", "Prompts for which responses are generated at once; -1 is all.  [default: -1]")
@number(
    "--micro-batch-size",
    "Both micro batches as MaxText counts them, in prompts over all ranks; -1 is all at once.  [default: -1]",
)
@number("--updates", "Optimizer updates per round; they share its prompts.  [default: 1]")
@number("--iterations", "Training passes over the responses of a round.  [default: 1]")
@number("--rounds-ahead", "Rounds that are generated ahead of training.  [default: 0]")
@number("--data-parallel-size", "Number of ranks that train.  [default: 1]")
@json_option
def command(arguments: tuple[str, ...], as_json: bool, **flags: Any) -> None:
    """Plan batches of reinforcement learning: prompts -> responses -> updates -> micro batches.

    The effective batch is prompts × generations. The responses to one prompt always belong to the same update. Keys of
    MaxText (batch_size=8 num_generations=16 micro_batch_size=2) work, too.
    """
    values, sources = _gather(arguments, flags)
    made = rl(**values)
    if as_json:
        print_json({"schema": codec.SCHEMA, **codec.encode(made), "sources": sources})
    else:
        click.echo("\n".join(render(made)))


def _gather(arguments: tuple[str, ...], flags: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Values and where each was given. A flag wins over KEY=VALUE, which wins over a file."""
    known = _MAXTEXT | {name: name for name in flags} | {f"rl.{name}": name for name in flags}
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    wrong: list[Violation] = []
    for argument in sorted(arguments, key=lambda argument: "=" in argument):
        key, equals, value = argument.partition("=")
        keys = {key: value} if equals else flatten(read_file(argument))
        for key, value in keys.items():
            name, typed = known.get(key), f"{key}={value}" if equals else f"{argument}: {key}"
            if name is None:
                if equals:
                    wrong.append(unknown_key(key, value, known))
            elif equals and "=" in sources.get(name, "") and str(values[name]) != value:
                message = (
                    f"{name} is given twice and differently: {str(values[name])[:40]} and {value[:40]}. Leave one out."
                )
                wrong.append(Violation(message, name, value[:40]))
            else:
                values[name], sources[name] = value, typed
    for name, value in flags.items():
        if value is not None:
            values[name], sources[name] = value, f"--{name.replace('_', '-')}"
    for name in ("prompts", "generations"):
        if name not in values:
            wrong.append(Violation(f"{name} is required.", name))
    raise_violations(ConfigError, wrong)
    if sources.get("train_micro_prompts", "").startswith("train_micro_batch_size"):
        values["train_micro_prompts"] = _per_rank(values)
    remember(values, sources)
    return values, sources


def _per_rank(values: Mapping[str, Any]) -> Any:
    """The micro batch of one rank: MaxText counts that of all ranks."""
    ranks, whole = count(values.get("data_parallel_size", 1), "data_parallel_size"), values["train_micro_prompts"]
    if ranks == 1 or str(whole) == "-1":
        return whole
    prompts = count(whole, "train_micro_batch_size")
    if prompts % ranks:
        near = nearest_multiples(ranks, prompts)
        raise ConfigError(
            f"train_micro_batch_size={prompts} counts the prompts of all ranks and must be a multiple of "
            f"data_parallel_size {ranks}: {prompts} / {ranks} = {prompts / ranks:.2f}. Nearest: {either(near)}.",
            field="train_micro_batch_size",
            given=prompts,
            nearest=near,
        )
    return prompts // ranks


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
    return lines + notes(made.notes)
