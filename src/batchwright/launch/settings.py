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

from .engine import ENGINES
from .records import Options
from .slurm.site import can_be_passed, read_site


def _stall(value: Any, name: str) -> float | None:
    return None if str(value).strip().lower() in ("never", "off", "none") else positive(value, name)


def _signal(value: Any, name: str) -> str:
    wanted = str(value).upper()
    wanted = wanted if wanted.startswith("SIG") else f"SIG{wanted}"
    if wanted not in signal.Signals.__members__:
        raise ConfigError(
            f"{name}={str(value)[:40]!r} is not a signal.",
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
