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
@click.argument("words", nargs=-1, metavar="[FILE.yaml] [KEY=VALUE]...")
@number("--prompts", "Prompts per round.")
@number("--generations", "Responses per prompt.")
@number("--train-micro-prompts", "Training micro batch of a rank, in prompts; -1 or none: all at once.")
@number("--train-micro-responses", "The same in responses.")
@number("--rollout-micro-prompts", "Prompts generated at once; -1 or none: all.")
@number(
    "--micro-batch-size", "Both micro batches, as MaxText counts them: prompts over all ranks; -1 or none: all at once."
)
@number("--updates", "Optimizer updates that share a round's prompts among them.  [default: 1]")
@number("--iterations", "Passes over a round.  [default: 1]")
@number("--rounds-ahead", "Rounds sampled before they are learned from.  [default: 0]")
@number("--data-parallel-size", "Ranks that train.  [default: 1]")
@json_option
def command(words: tuple[str, ...], as_json: bool, **flags: Any) -> None:
    """Batches of reinforcement learning: prompts -> responses -> updates -> micro batches.

    The effective batch is prompts × generations. Groups of responses are never split across an update. MaxText's keys
    (batch_size=8 num_generations=16 micro_batch_size=2) are understood too.
    """
    values, sources = _gather(words, flags)
    made = rl(**values)
    if as_json:
        print_json({"schema": codec.SCHEMA, **codec.encode(made), "sources": sources})
    else:
        click.echo("\n".join(render(made)))


def _gather(words: tuple[str, ...], flags: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Values and where each was given: a file's, then KEY=VALUE, then flags."""
    known = _MAXTEXT | {name: name for name in flags} | {f"rl.{name}": name for name in flags}
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    wrong: list[Violation] = []
    for word in sorted(words, key=lambda word: "=" in word):
        key, equals, value = word.partition("=")
        keys = {key: value} if equals else flatten(read_file(word))
        for key, value in keys.items():
            name, typed = known.get(key), f"{key}={value}" if equals else f"{word}: {key}"
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
            wrong.append(Violation(f"{name} is needed: --{name} N.", name))
    raise_violations(ConfigError, wrong)
    if sources.get("train_micro_prompts", "").startswith("train_micro_batch_size"):
        values["train_micro_prompts"] = _per_rank(values)
    return values, sources


def _per_rank(values: Mapping[str, Any]) -> Any:
    """MaxText counts a micro batch over all ranks; here it is one rank's."""
    ranks, whole = count(values.get("data_parallel_size", 1), "data_parallel_size"), values["train_micro_prompts"]
    if ranks == 1 or str(whole) == "-1":
        return whole
    prompts = count(whole, "train_micro_batch_size")
    if prompts % ranks:
        near = nearest_multiples(ranks, prompts)
        raise ConfigError(
            f"train_micro_batch_size={prompts} counts the prompts of all ranks: {prompts} / {ranks} data_parallel_size = "
            f"{prompts / ranks:.2f}. Nearest: {either(near)}.",
            field="train_micro_batch_size",
            given=prompts,
            nearest=near,
        )
    return prompts // ranks


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
