"""What a probe is asked, read and checked before anything starts; and what it returns: trials and conclusions."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from batchwright.core import codec
from batchwright.core.errors import ConfigError, Violation, raise_violations
from batchwright.core.numbers import count, parse_bytes, positive
from batchwright.processes.target import expanded, split_target, task_file
from batchwright.report.notebook import Shown

from .speed import Curve, StepDiagnosis, Timing

PLACEHOLDER, STEPS = "{micro_batch_size}", "{steps}"


@dataclass(frozen=True)
class ProbeRequest:
    """A task or a command, the limits to keep, and how to measure."""

    target: str = ""
    command: tuple[str, ...] = ()
    args: Mapping[str, Any] = field(default_factory=dict[str, Any])
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
    on: str | None = None
    workers: int = 0
    seconds: float = 2.0
    throughput: bool = True
    step_regex: str | None = None
    directory: Path | None = Path(".batchwright")
    fresh: bool = False
    peak_tflops: float | None = None
    worker: tuple[str, ...] = ()
    """Another program instead of the worker: for tests of every way in which a trial can end."""

    @property
    def name(self) -> str:
        """The target in the name of its journal."""
        if self.command:
            return " ".join(self.command)
        file, colon, name = self.target.rpartition(":")
        path = expanded(file if colon else self.target).resolve()
        return f"{path}:{name}" if colon else str(path)


@dataclass(frozen=True)
class Trial:
    """One measured run of one size, in processes of its own.

    >>> Trial(8, "fits", "limit", peak_memory_bytes=2**30).fits
    True
    """

    micro_batch_size: int
    status: str
    """fits | oom | timeout | crash"""
    purpose: str
    """limit | throughput | evaluation"""
    peak_memory_bytes: int | None = None
    limit_bytes: int | None = None
    outside_bytes: int | None = None
    """Memory of the device that was kept free for what lies outside torch's allocator."""
    predicted_peak_memory_bytes: int | None = None
    samples_per_second: float | None = None
    step_seconds: float | None = None
    seconds: float | None = None
    """Wall time of the whole trial, start-up included."""
    cause: str | None = None
    """device-oom | host-oom | loader-worker | hang | compile | crash"""
    reason: str | None = None
    traceback: str | None = None
    rank: int | None = None
    """The rank that gave the verdict, if there are several."""
    timing: Timing | None = None
    contrasts: Mapping[str, Timing] | None = None
    """Timings of `cached`, `loader` (without an example batch) and `accumulate` (several ranks) steps, where compared."""
    flops: float | None = None
    """Of one step, forward and backward."""
    flops_type: str | None = None
    """The type that the step multiplies in, such as bfloat16; of several, the smallest."""
    tokens_per_sample: int | None = None
    allocator_retries: int | None = None
    reserved_bytes: int | None = None
    last_lines: tuple[str, ...] | None = None
    """The end of a command's output, if its speed was measured and its output showed too few steps; else None."""
    resumed: bool = False

    @property
    def held_bytes(self) -> int | None:
        """What the allocator held at most: on a device more than its tensors, and the limit is one of this."""
        return self.reserved_bytes or self.peak_memory_bytes

    @property
    def fits(self) -> bool:
        """Whether this size ran."""
        return self.status == "fits"


@dataclass(frozen=True)
class Probe(Shown):
    """The result. All sizes in it ran. `to_json()` is what `--json` prints; `chart()` draws it."""

    kind = "probe"

    trials: tuple[Trial, ...]
    max_micro_batch_size: int
    first_failing_micro_batch_size: int | None
    saturating_micro_batch_size: int | None
    recommended_micro_batch_size: int | None
    """None if no speed was measured, or if every size failed, or exceeded the limit, while its speed was measured."""
    largest_worthwhile_micro_batch_size: int | None
    bottleneck: str | None
    max_evaluation_batch_size: int | None = None
    curve: Curve | None = None
    diagnosis: StepDiagnosis | None = None
    recommended_peak_memory_bytes: int | None = None
    """Of the recommended size, without a limit and with the user's own allocator."""
    memory_bytes: int | None = None
    margin_bytes: int = 0
    ranks: int = 1
    tokens_per_second: float | None = None
    tflops_per_second: float | None = None
    mfu: float | None = None
    device: str | None = None
    target: str = ""
    identity: Mapping[str, Any] = field(default_factory=dict[str, Any])
    notes: tuple[str, ...] = ()
    journal: str | None = None
    journal_error: str | None = None
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """The probe as one JSON document; keys are added, never renamed."""
        return {"schema": codec.SCHEMA, **codec.encode(self)}


def read_request(target: str | Sequence[str], **given: Any) -> ProbeRequest:
    """A request from values as flags give them; one error lists everything that is wrong."""
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
        wrong += _check_together(ProbeRequest(**read))
    raise_violations(ConfigError, wrong)
    return ProbeRequest(**read)


def _regex(value: str, name: str) -> str:
    try:
        re.compile(value)
    except re.error as error:
        raise ConfigError(
            f"step_regex={value!r} is not a regular expression: {error}.", field=name, given=value
        ) from None
    return value


_READERS = {
    "memory": parse_bytes,
    "margin": lambda value, name: parse_bytes(value, name, least=0),
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
    if not split_target(target)[0].endswith(".py"):
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
    if not any(PLACEHOLDER in argument for argument in command):
        message = (
            f"the command has no {PLACEHOLDER}, so every trial would run the same size: {' '.join(command)[:120]!r}. "
            f"Put it where the batch size goes: --per_device_train_batch_size {PLACEHOLDER}."
        )
        found.append(Violation(message, "command", " ".join(command)[:120], (PLACEHOLDER,)))
    default = {"ranks": "1", "workers": "0"}
    for name in ("ranks", "longest", "evaluation", "accumulation_steps", "workers", "on", "args", "peak_tflops"):
        if given.get(name) not in (None, False, {}) and str(given[name]) != default.get(name):
            flag = name.replace("_", "-")
            why = "torch counts no operations of a command" if name == "peak_tflops" else "a command sets this itself"
            message = f"--{flag} is for tasks (FILE.py:function): {why}."
            found.append(Violation(message, name, str(given[name])))
    return found


def _check_together(request: ProbeRequest) -> list[Violation]:
    r = request
    found: list[Violation] = []
    if r.step_regex is not None and not r.command:
        message = f"step_regex={r.step_regex!r} is for commands: the steps of a task are known."
        found.append(Violation(message, "step_regex", r.step_regex))
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
