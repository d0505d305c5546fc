"""What to probe, read and checked before anything starts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

from batchwright.core.errors import ConfigError, Violation, raise_violations
from batchwright.core.numbers import count, positive
from batchwright.processes.target import task_file

PLACEHOLDER, STEPS = "{micro_batch_size}", "{steps}"
_BYTES = re.compile(r"(?<=[kKmMgGtTi])B$")


@dataclass(frozen=True)
class Request:
    """A task or a command, the limits to keep, and how to measure."""

    target: str = ""
    command: tuple[str, ...] = ()
    args: Mapping[str, Any] = field(default_factory=dict)
    memory: int | None = None
    margin: int = 0
    largest: int | None = None
    multiple_of: int = 1
    exact: bool = False
    longest: bool = False
    evaluation: bool = False
    accumulation_steps: int = 2
    ranks: int = 1
    timeout: float = 600.0
    device: str | None = None
    workers: int = 0
    seconds: float = 2.0
    throughput: bool = True
    step_regex: str | None = None
    directory: Path | None = Path(".batchwright")
    fresh: bool = False
    peak_tflops: float | None = None
    worker: tuple[str, ...] = ()
    """Another program in the worker's place: for tests of every death."""

    @property
    def name(self) -> str:
        """The target as a journal knows it."""
        return " ".join(self.command) if self.command else _resolved(self.target)


def read_bytes(value: Any, field: str) -> int:
    """Bytes as people write them: `2GiB`, `500MB`, `1.5Gi`, `2147483648`.

    >>> read_bytes("2GiB", "memory"), read_bytes("1.5G", "memory")
    (2147483648, 1500000000)
    """
    return count(_BYTES.sub("", value.strip()) if isinstance(value, str) else value, field)


def read_request(target: str | Sequence[str], **given: Any) -> Request:
    """A request from values as flags give them; everything wrong with it is said at once."""
    wrong: list[Violation] = []
    read: dict[str, Any] = {}
    if isinstance(target, str):
        read["target"] = target
        wrong += _check_target(target)
    else:
        read["command"] = tuple(target)
        wrong += _check_command(tuple(target), given)
    for name, value in given.items():
        if value is None and name != "directory":
            continue
        try:
            read[name] = _READERS[name](value, name) if name in _READERS else value
        except ConfigError as error:
            wrong.extend(error.violations)
    if not wrong:
        wrong += _check_together(Request(**read))
    raise_violations(ConfigError, wrong)
    return Request(**read)


def _zero_or_bytes(value: Any, name: str) -> int:
    return 0 if str(value).strip() == "0" else read_bytes(value, name)


def _regex(value: str, name: str) -> str:
    try:
        re.compile(value)
    except re.error as error:
        raise ConfigError(
            f"step_regex={value!r} is not a regular expression: {error}.", field=name, given=value
        ) from None
    return value


_READERS = {
    "memory": read_bytes,
    "margin": _zero_or_bytes,
    "largest": lambda value, _: count(value, "max", most=2**24),
    "multiple_of": lambda value, name: count(value, name, most=2**20),
    "accumulation_steps": lambda value, name: count(value, name, most=2**24),
    "ranks": lambda value, name: count(value, name, most=1024),
    "workers": lambda value, name: count(value, name, least=0, most=1024),
    "timeout": positive,
    "seconds": positive,
    "peak_tflops": positive,
    "step_regex": _regex,
    "directory": lambda value, _: None if value is None else Path(value),
}


def _check_target(target: str) -> list[Violation]:
    file = target.rpartition(":")[0] if not target.endswith(".py") else target
    if not file.endswith(".py"):
        message = (
            f"task={target!r} is neither FILE.py:function nor a command. Write `batchwright probe train.py:task`, or "
            f"`batchwright probe -- python train.py --batch-size {PLACEHOLDER}`."
        )
        return [Violation(message, "task", target)]
    try:
        task_file(target)
    except ConfigError as error:
        return list(error.violations)
    return []


def _check_command(command: tuple[str, ...], given: Mapping[str, Any]) -> list[Violation]:
    found: list[Violation] = []
    if not any(PLACEHOLDER in word for word in command):
        message = (
            f"the command has no {PLACEHOLDER}, so every trial would run the same size: {' '.join(command)[:120]!r}. "
            f"Put it where the batch size goes: --per_device_train_batch_size {PLACEHOLDER}."
        )
        found.append(Violation(message, "command", " ".join(command)[:120], (PLACEHOLDER,)))
    for name in ("ranks", "longest", "evaluation", "accumulation_steps", "workers", "device", "args"):
        if given.get(name) is True or given.get(name) not in (None, False, (), {}, 1, "1", 0, "0"):  # True equals 1
            flag = name.replace("_", "-")
            message = f"--{flag} is for tasks (FILE.py:function): a command decides that itself, as torchrun does."
            found.append(Violation(message, name, str(given[name])))
    return found


def _check_together(request: Request) -> list[Violation]:
    r = request
    found: list[Violation] = []
    if r.memory is not None and r.margin >= r.memory:
        message = f"margin={r.margin:,} leaves nothing of memory={r.memory:,} bytes. Nearest: below {r.memory:,}."
        found.append(Violation(message, "margin", r.margin, (r.memory // 10,)))
    if r.largest is not None and r.largest < r.multiple_of:
        message = (
            f"max={r.largest} is below the smallest multiple of {r.multiple_of}. Nearest: max={r.multiple_of}, or "
            f"multiple_of={r.largest}."
        )
        found.append(Violation(message, "max", r.largest, (r.multiple_of,)))
    return found


def _resolved(target: str) -> str:
    file, colon, name = target.rpartition(":")
    return f"{Path(file).expanduser().resolve()}:{name}" if colon else str(Path(target).expanduser().resolve())


def megabytes(size: int | Fraction | None) -> str:
    """Bytes for people: MiB below one GiB, GiB above.

    >>> megabytes(2**30), megabytes(3 * 2**20), megabytes(None)
    ('1.00 GiB', '3.0 MiB', '-')
    """
    if size is None:
        return "-"
    return f"{float(size) / 2**30:.2f} GiB" if size >= 2**30 else f"{float(size) / 2**20:.1f} MiB"
