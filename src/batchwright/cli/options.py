"""Flags that several verbs share. Values stay text here: `core` reads them, so that every error is ours."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from batchwright.core.batch.pipeline import TORCH_RULES
from batchwright.core.errors import ConfigError, Violation, raise_violations

from .naming import Verb

if TYPE_CHECKING:
    from batchwright.launch.records import RunPlan

# Endings of the files that are read as configuration.
FILES = (".yaml", ".yml", ".toml", ".json")
FRAMEWORK = "NAME[@VERSION]"
Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def stack(*options: Decorator) -> Decorator:
    """Several options as one decorator, in the order they are listed."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """What a shell offers for a value: the names that the help lists (`local | slurm`), frameworks, files, or folders."""
    if listed := re.search(r"[\w-]+(?: \| [\w-]+)+", getattr(param, "help", None) or ""):
        return [CompletionItem(name) for name in listed[0].split(" | ") if name.startswith(incomplete)]
    if param.metavar == FRAMEWORK:
        from batchwright.dialects import frameworks

        return [CompletionItem(d.name) for d in frameworks() if d.name.startswith(incomplete)]
    kind = (
        "file" if re.search("FILE|CONFIG", param.metavar or "") else "dir" if "DIR" in (param.metavar or "") else None
    )
    return [CompletionItem(incomplete, type=kind)] if kind else []


def number(name: str, text: str, metavar: str = "N") -> Decorator:
    """A flag that takes a value, which stays text."""
    return click.option(name, metavar=metavar, help=text, shell_complete=complete)


class CommandLine(Verb):
    """A verb that keeps everything after `--` as it is: the user's command."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        at = args.index("--") if "--" in args else len(args)
        ctx.meta["command"] = tuple(args[at + 1 :])
        return super().parse_args(ctx, args[:at])


batch_options = stack(
    number("--global-batch-size", "Samples per optimizer step, over all ranks."),
    number("--global-batch-size-tokens", "The global batch in tokens; needs --sequence-length."),
    number("--sequence-length", "Tokens per sample."),
    number("--micro-batch-size", "Samples per rank per forward/backward pass.  [default: derived]"),
    number("--accumulation-steps", "Micro batches per rank per optimizer step.  [default: derived]"),
    number("--max-micro-batch-size", "The largest micro batch that fits in memory, in samples.  [default: no limit]"),
)

world_options = stack(
    number("--nodes", "Number of nodes."),
    number("--devices-per-node", "Devices (GPUs, TPU chips) in each node."),
    number("--devices", "Number of devices in total, instead of --nodes and --devices-per-node."),
    number("--data-parallel-size", "Number of ranks that hold different samples.  [default: derived]"),
    number("--tensor-parallel", "Devices that split each layer.  [default: 1]"),
    number("--pipeline-parallel", "Pipeline stages.  [default: 1]"),
    number("--context-parallel", "Devices that split each sequence.  [default: 1]"),
    number("--expert-parallel", "Devices that share the experts; does not change the batch.  [default: 1]"),
    number("--expert-tensor-parallel", "Devices that split one expert.  [default: --tensor-parallel]"),
)

schedule_options = stack(
    number(
        "--pipeline-schedule",
        "Of any framework: gpipe. By Megatron's rules: 1f1b | interleaved. By MaxText's: circular. By torch's: "
        f"{' | '.join(TORCH_RULES)}.  [default: 1f1b; interleaved with --virtual-stages]",
        "NAME",
    ),
    number("--virtual-stages", "Schedules that use a device several times: model chunks per device.  [default: 1]"),
)
inner_options = stack(
    number("--pipeline-microbatches", "Microbatches per pipeline pass.  [default: derived]"),
    number(
        "--pipeline-style",
        "What a pipeline microbatch is: accumulation (Megatron: an accumulation step) | inner (MaxText: a part of one).  "
        "[default: accumulation]",
        "NAME",
    ),
)

devices_options = stack(
    number("--devices", "Number of devices of the job, where the configuration does not say it."),
    number("--nodes", "Number of nodes, together with --devices-per-node."),
    number("--devices-per-node", "Devices (GPUs, TPU chips) in each node."),
    number("--sequence-length", "Tokens per sample, where the configuration does not say it."),
)
DEVICES = ("devices", "nodes", "devices_per_node", "sequence_length")
# The flags that `check` and `convert` read inside a pasted command line; all others are the program's.
CONFIGURATION_FLAGS = frozenset(
    {
        "--from", "--to", "--into", "--dry-run", "--partial", "--format", "--against", "--each", "--allow", "--json",
        "--devices", "--nodes", "--devices-per-node", "--sequence-length", "-h", "--help",
    }
)  # fmt: skip

memory_options = stack(
    number(
        "--device",
        "The device it must fit on, such as h100 or rtx-4090-24g; `estimate --device list` lists all.",
        "NAME",
    ),
    number("--memory", "Memory it must fit in, in bytes, such as 80GiB, instead of --device.", "BYTES"),
    number("--margin", "Memory to leave free, in bytes.  [default: 0]", "BYTES"),
    number("--context", "Memory of the device's context, in bytes.  [default: 512MiB on a GPU]", "BYTES"),
    number("--workspaces", "Scratch memory of the device's libraries, in bytes.  [default: 256MiB on a GPU]", "BYTES"),
    number("--fragmentation", "What the device's allocator loses, of the tensors.  [default: 3%]", "PERCENT"),
)

training_options = stack(
    number("--precision", "fp32 | bf16 | fp16 (autocast) | bf16-pure | fp16-pure.  [default: fp32]", "NAME"),
    number("--optimizer", "With --model: adamw | adamw-8bit | sgd | adafactor.  [default: adamw]", "NAME"),
    number("--lora", "With --model: train LoRA adapters of this rank instead of all parameters.", "RANK"),
)


def read_training(flags: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """The flags of memory and training, and `more` by name, as `estimate` takes them; everything wrong at once."""
    from functools import partial

    from batchwright.core.fields import read_fields
    from batchwright.core.numbers import count, parse_bytes, percentage, positive

    def several(value: str, name: str) -> tuple[int, ...]:
        return counts(value, name)

    readers: dict[str, Callable[[Any, str], Any]] = {
        "device": lambda value, name: value,
        "memory": parse_bytes,
        "margin": partial(parse_bytes, least=0),
        "context": partial(parse_bytes, least=0),
        "workspaces": partial(parse_bytes, least=0),
        "fragmentation": lambda value, name: float(percentage(value, name) * 100),
        "precision": lambda value, name: value,
        "optimizer": lambda value, name: value,
        "lora": count,
        "micro_batch_size": several,
        "sequence_length": several,
        "ranks": count,
        "tensor_parallel": count,
        "accumulation_steps": count,
        "timeout": positive,
    }
    names = {
        "memory": "memory_bytes", "margin": "margin_bytes", "context": "context_bytes", "workspaces": "workspace_bytes",
        "fragmentation": "fragmentation_percent", "micro_batch_size": "micro_batch_sizes",
        "sequence_length": "sequence_lengths",
    }  # fmt: skip
    own = ("device", "memory", "margin", "context", "workspaces", "fragmentation", "precision", "optimizer", "lora")
    read = read_fields({**{name: flags[name] for name in own}, **more}, readers)
    return {names.get(name, name): value for name, value in read.items()}


json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of text.")
task_option = click.option(
    "--arg", "args", multiple=True, metavar="KEY=VALUE", help="An argument for the task's function; repeatable."
)


def print_json(document: dict[str, Any]) -> None:
    """Print one JSON document; everything printed with --json goes through here."""
    import json

    click.echo(json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False))


def mapping(value: Any, field: str) -> dict[str, Any]:
    """A section of a project file: its keys, none where it is empty."""
    if value is not None and not isinstance(value, Mapping):
        raise ConfigError(f"{field} must be KEY: VALUE, not {str(value)[:60]!r}.", field=field, given=str(value)[:60])
    # YAML reads the key 1 as a number; a keyword and a key of JSON are text.
    return {str(key): item for key, item in (value or {}).items()}


def read_task(target: str, args: tuple[str, ...]) -> tuple[str, dict[str, Any]]:
    """`FILE.py:function`, or the `task` section of a project file, and the function's arguments (`--arg` wins)."""
    if not target.endswith(FILES):
        _look_for(target)
        return target, task_arguments(args)
    from .parse import read_file

    section = read_file(target).get("task")
    named = section.get("target") if isinstance(section, Mapping) else None
    if not isinstance(section, Mapping) or not isinstance(named, str):
        raise ConfigError(
            f"{target} names no task: its `task` section must contain `target: FILE.py:function`.",
            field="task.target",
            given=None if named is None else str(named)[:80],
        )
    arguments = {**mapping(section.get("args"), "task.args"), **task_arguments(args)}
    _look_for(named)
    return named, arguments


def _look_for(target: str) -> None:
    """Refuse a missing task file before torch is imported, which takes seconds, and a FIFO, which would never end."""
    if ".py" in target or (os.path.exists(target) and not os.path.isdir(target)):
        from batchwright.processes.target import task_file

        task_file(target)


def task_arguments(args: tuple[str, ...]) -> dict[str, Any]:
    """`--arg KEY=VALUE` as the task's function gets it: JSON where it is (`2`, `1e-4`, `true`, `[1, 2]`), else text.

    >>> task_arguments(("layers=2", "lr=1e-4", "causal=true", "name=gpt"))
    {'layers': 2, 'lr': 0.0001, 'causal': True, 'name': 'gpt'}
    """
    import json

    from .parse import refuse_deep

    wrong = [
        Violation(f"--arg {arg[:60]!r} is not KEY=VALUE.", "arg", arg[:60], (f"{arg[:60]}=...",))
        for arg in args
        if "=" not in arg
    ]
    raise_violations(ConfigError, wrong)
    read: dict[str, Any] = {}
    for key, _, value in (arg.partition("=") for arg in args):
        try:
            read[key.strip()] = json.loads(value)
        except ValueError:
            read[key.strip()] = value
        except RecursionError:
            raise ConfigError(f"--arg {key[:60]} is nested too deeply.", field="arg", given=key[:60]) from None
        refuse_deep(f"--arg {key}", read[key.strip()])
    return read


def counts(text: str | None, field: str) -> tuple[int, ...]:
    """Several whole numbers from one flag: `1,2,4`."""
    from batchwright.core.numbers import count

    return tuple(count(part, field) for part in (text or "").replace(",", " ").split())


def check_settings(plan: RunPlan) -> RunPlan:
    """The plan; an error for settings of a task that the loop would refuse, before anything is written."""
    from batchwright.launch.work import pipeline_settings

    more = pipeline_settings(plan)
    if plan.kind == "task" and (plan.options.settings or more):
        from batchwright.runtime.loop.settings import read_settings

        first = {"directory": "", "micro_batch_size": 1, "strategy": plan.options.strategy}
        read_settings({**first, **plan.options.settings, **more}, "task.settings")
    return plan
