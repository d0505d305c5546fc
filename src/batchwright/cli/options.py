"""Flags that several verbs share. Values stay text here: `core.request` reads them, so that every error is ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import click

from batchwright.core.errors import ConfigError, Violation, raise_violations

FILES = (".yaml", ".yml", ".toml", ".json")  # that are read as configuration
Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def stack(*options: Decorator) -> Decorator:
    """Several options as one decorator, in the order they are listed."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def number(name: str, text: str, metavar: str = "N") -> Decorator:
    """A flag that takes a number, possibly with a suffix."""
    return click.option(name, metavar=metavar, help=text)


class CommandLine(click.Command):
    """A verb that keeps everything after `--` as it is: the user's command."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        at = args.index("--") if "--" in args else len(args)
        ctx.meta["command"] = tuple(args[at + 1 :])
        return super().parse_args(ctx, args[:at])


batch_options = stack(
    number("--global-batch-size", "Samples per optimizer step."),
    number("--global-batch-size-tokens", "The same in tokens; needs --sequence-length."),
    number("--sequence-length", "Tokens per sample."),
    number("--micro-batch-size", "Samples per rank per forward/backward."),
    number("--accumulation-steps", "Micro batches per rank per optimizer step."),
    number("--max-micro-batch-size", "The largest micro batch that fits in memory."),
)

world_options = stack(
    number("--nodes", "Nodes."),
    number("--devices-per-node", "Devices (GPUs, TPU chips) in each node."),
    number("--devices", "All devices, where nodes do not matter."),
    number("--data-parallel-size", "Ranks that hold different samples."),
    number("--tensor-parallel", "Devices that split each layer."),
    number("--pipeline-parallel", "Pipeline stages."),
    number("--context-parallel", "Devices that split each sequence."),
    number("--expert-parallel", "Devices that share the experts. It does not change the batch."),
    number("--expert-tensor-parallel", "Devices that share one expert.  [default: the tensor-parallel size]"),
)


def print_json(document: dict[str, Any]) -> None:
    """Print one JSON document; everything printed with --json goes through here."""
    import json

    click.echo(json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False))


json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")


def mapping(value: Any, field: str) -> dict[str, Any]:
    """A part of a project file that has keys, or nothing."""
    if value is not None and not isinstance(value, Mapping):
        raise ConfigError(f"{field} has to be KEY: VALUE, not {str(value)[:60]!r}.", field=field, given=str(value)[:60])
    return dict(value or {})


def read_task(target: str, words: tuple[str, ...]) -> tuple[str, dict[str, Any]]:
    """`FILE.py:function`, or the `task` section of a project file, and the function's arguments (`--arg` wins)."""
    if not target.endswith(FILES):
        _look_for(target)
        return target, task_arguments(words)
    from .config import read_file

    section = read_file(target).get("task")
    named = section.get("target") if isinstance(section, Mapping) else None
    if not isinstance(section, Mapping) or not isinstance(named, str):
        raise ConfigError(
            f"{target} names no task: its `task` section has to hold `target: FILE.py:function`.",
            field="task.target",
            given=None if named is None else str(named)[:80],
        )
    arguments = {**mapping(section.get("args"), "task.args"), **task_arguments(words)}
    _look_for(named)
    return named, arguments


def _look_for(target: str) -> None:
    """Say that a task's file is not there before torch is imported, which takes seconds."""
    if ".py" in target:
        from batchwright.processes.target import task_file

        task_file(target)


def task_arguments(words: tuple[str, ...]) -> dict[str, Any]:
    """`--arg KEY=VALUE` as the task's function gets it: JSON where it is (`2`, `1e-4`, `true`, `[1, 2]`), else text.

    >>> task_arguments(("layers=2", "lr=1e-4", "causal=true", "name=gpt"))
    {'layers': 2, 'lr': 0.0001, 'causal': True, 'name': 'gpt'}
    """
    import json

    wrong = [
        Violation(f"--arg {w[:60]!r} is not KEY=VALUE.", "arg", w[:60], (f"{w[:60]}=...",))
        for w in words
        if "=" not in w
    ]
    raise_violations(ConfigError, wrong)
    read: dict[str, Any] = {}
    for key, _, value in (word.partition("=") for word in words):
        try:
            read[key.strip()] = json.loads(value)
        except ValueError:
            read[key.strip()] = value
    return read
