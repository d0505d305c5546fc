"""The settings of a launch, read strictly: from the `launch` section of a file, `launch.key=value` and flags."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

from batchwright.core.errors import ConfigError, Violation, raise_violations
from batchwright.core.fields import Readers, choice, read_fields, seconds
from batchwright.core.numbers import count, positive
from batchwright.rundir.trackers import TRACKERS

from .engine import ENGINES
from .records import COMMAND, TASK, Options, RunPlan
from .slurm.site import can_be_passed, read_site


def _stall(value: Any, name: str) -> float | None:
    return None if str(value).strip().lower() in ("never", "off", "none") else positive(value, name)


def _signal(value: Any, name: str) -> str:
    wanted = str(value).upper()
    wanted = wanted if wanted.startswith("SIG") else f"SIG{wanted}"
    if wanted not in signal.Signals.__members__ or wanted in ("SIGKILL", "SIGSTOP"):
        raise ConfigError(
            f"{name}={str(value)[:40]!r} is not a signal that a command can act on.",
            field=name,
            given=str(value)[:40],
            nearest=("SIGTERM", "SIGUSR1"),
        )
    return wanted


def _environment(value: Any, name: str) -> dict[str, str]:
    """From a mapping, or from KEY=VALUE arguments."""
    pairs: list[tuple[str, str]]
    if isinstance(value, Mapping):
        pairs = [(str(key), str(text)) for key, text in cast("Mapping[Any, Any]", value).items()]
    else:
        pairs = []
        for argument in split_command(value, name):
            key, equals, text = argument.partition("=")
            if not equals:
                raise ConfigError(
                    f"{name}: {argument[:60]!r} has no value. Write KEY=VALUE.", field=name, given=argument[:60]
                )
            pairs.append((key, text))
    for key, text in pairs:
        if not key.strip() or {"=", "\0", " ", "\n"} & set(key) or not can_be_passed(key + text):
            raise ConfigError(f"{name}: {key[:60]!r} is not the name of a variable. Write KEY=VALUE.", field=name)
    return dict(pairs)


def _mapping(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"launch.{name} must be a mapping.", field=name, given=str(value)[:40])
    return {str(key): item for key, item in cast("Mapping[Any, Any]", value).items()}


# The settings of the loop that a run sets itself, and the flag for the same thing.
_OWN = {
    "directory": "--dir",
    "micro_batch_size": "--micro-batch-size",
    "allow_ragged": "--allow-ragged",
    "launch": "",
    "end_sample": "--samples",
    "nodes": "--nodes",
    "dataset_size": "--dataset-size",
    "pipeline_parallel": "--pipeline-parallel",
    "pipeline_schedule": "--pipeline-schedule",
    "virtual_stages": "--virtual-stages",
    "inner_microbatches": "--pipeline-microbatches",
}


def _settings(value: Any, name: str) -> dict[str, Any]:
    """The settings of the loop, without those that a run would replace."""
    read = _mapping(value, name)
    wrong = [
        Violation(
            f"task.settings.{key} is set by the run itself: leave it out{f', or give {_OWN[key]}' * bool(_OWN[key])}.",
            f"task.settings.{key}",
            str(read[key])[:40],
        )
        for key in read
        if key in _OWN
    ]
    raise_violations(ConfigError, wrong)
    return read


def _trackers(value: Any, name: str) -> tuple[str, ...]:
    """From one name, or from a list of names."""
    given: Sequence[Any] = cast("Sequence[Any]", value) if isinstance(value, (list, tuple)) else [value]
    return tuple(dict.fromkeys(choice(*TRACKERS)(one, name) for one in given))


def _slurm(value: Any, name: str) -> dict[str, Any]:
    """The mapping as given, after a check of all of it."""
    read_site(made := _mapping(value, name))
    return made


TASK_KEYS = ("target", "args", "settings")  # of the section `task`
_SMALL: Callable[..., int] = partial(count, most=10_000)

READERS: Readers = {
    "engine": choice(*ENGINES),
    "threads": _SMALL,
    "max_retries": partial(count, least=0, most=10_000),
    "retry_seconds": seconds,
    "longest_retry_seconds": seconds,
    "stall_seconds": _stall,
    "start_seconds": positive,
    "grace_seconds": seconds,
    "stop_signal": _signal,
    "checkpoint_samples": count,
    "keep": _SMALL,
    "strategy": choice("auto", "ddp", "fsdp2", "none"),
    "seed": partial(count, least=0),
    "stop_after_nonfinite": partial(count, least=0),
    "tracker": _trackers,
    "environment": _environment,
    "settings": _settings,
    "slurm": _slurm,
}


def read_options(values: Mapping[str, Any], base: Options | None = None, *, command: bool = False) -> Options:
    """Options from raw values, on top of `base`; one error lists everything that is wrong.

    A command may report nothing for hours: it has no `stall_seconds` unless one is given.

    >>> read_options({"max_retries": "5", "stall_seconds": "never"}).max_retries
    5
    """
    read = read_fields(values, READERS, "launch.")
    known = base or Options(stall_seconds=None if command else Options.stall_seconds)
    if "environment" in read:
        read["environment"] = {**known.environment, **read["environment"]}
    return Options(**{**vars(known), **read})


def checked(plan: RunPlan) -> RunPlan:
    """A plan that was read from a file, if its parts agree; else a ValueError that says what is wrong."""
    if plan.kind not in (TASK, COMMAND) or (plan.kind == COMMAND) != bool(plan.command):
        raise ValueError(f"kind is {plan.kind[:40]!r}, and the command has {len(plan.command)} words")
    if not plan.total_samples > 0:
        raise ValueError("the schedule has no end")
    for name, parts, first in (("stages", plan.stages, 0), ("launches", plan.launches, plan.start_sample)):
        ends = [plan.total_samples if part.end_sample is None else part.end_sample for part in parts]
        spans = [(part.start_sample, end) for part, end in zip(parts, ends, strict=True)]
        if [start for start, _ in spans] != [first, *ends[:-1]] or ends[-1:] != [plan.total_samples]:
            raise ValueError(
                f"{name} do not follow each other from sample {first} to {plan.total_samples}: {spans}"[:400]
            )
        if [part.index for part in parts] != [*range(len(parts))] or any(start >= end for start, end in spans):
            raise ValueError(f"{name} are not in order")
    sizes = [
        plan.devices_per_node,
        *(launch.nodes for launch in plan.launches),
        *(s.nodes for s in plan.stages),
        *(s.data_parallel_size for s in plan.stages),
        *(s.global_batch_size for s in plan.stages),
        *(s.micro_batch_size for s in plan.stages),
        *(s.accumulation_steps for s in plan.stages),
    ]
    if min(sizes) < 1:
        raise ValueError("a number of nodes, devices or samples is below 1")
    if any(not launch.stages or not set(launch.stages) <= {*range(len(plan.stages))} for launch in plan.launches):
        raise ValueError("a launch has stages that do not exist")
    read_options({name: value for name, value in vars(plan.options).items() if value is not None})
    for words in (plan.command, plan.position_command, [plan.target, plan.working_directory]):
        split_command(words)
    return plan


def split_command(given: Any, name: str = "command") -> tuple[str, ...]:
    """A command from a list of arguments, or from one line, split as a shell does; no shell runs it.

    >>> split_command("where 'my run'")
    ('where', 'my run')
    """
    if not isinstance(given, (str, list, tuple)):
        shown = repr(given)[:60]
        raise ConfigError(f"{name}={shown} must be text or a list of texts.", field=name, given=shown)
    try:
        arguments = shlex.split(given) if isinstance(given, str) else cast("Sequence[Any]", given)
    except ValueError as error:
        raise ConfigError(f"{given[:80]!r} is not a command: {error}.", field=name, given=given[:80]) from None
    read = tuple(str(argument) for argument in arguments)
    if wrong := [argument[:60] for argument in read if not can_be_passed(argument)]:
        message = f"{name}: {wrong[0]!r} contains a character that no process can get."
        raise ConfigError(message, field=name, given=wrong[0])
    return read
