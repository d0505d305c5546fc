"""What is wanted of a ramp, read strictly: the rule, the budget, the policy, the times and the learning rate."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

from .errors import ConfigError, Violation, raise_violations
from .nodes import POLICIES
from .record import record
from .request import choice, switch, unknown_key
from .scaling import RULES
from .schedule import POLICIES as LAST_STEPS
from .units import count, positive

# The flags that name a rule; at most one of them.
RULE_FLAGS = ("linear", "per_device", "thresholds", "thresholds_tokens", "thresholds_steps", "doubling", "recipe")


@record
class RampRequest:
    """What is wanted beside the batch and the world; at most one rule. Numbers are as `read_ramp` reads them."""

    linear: tuple[str, ...] | None = None
    per_device: tuple[str, ...] | None = None
    thresholds: str | None = None
    thresholds_tokens: str | None = None
    thresholds_steps: str | None = None
    doubling: tuple[str, ...] | None = None
    recipe: str | None = None
    sequence_lengths: tuple[int, ...] | None = None
    allow_falling: bool = False
    samples: int | None = None
    tokens: int | None = None
    last_step: str = "shorten"
    node_policy: str | None = None
    micro_step_seconds: tuple[float, ...] | None = None
    sync_seconds: tuple[float, ...] | None = None
    stage_seconds: tuple[float, ...] | None = None
    probe: Mapping[str, Any] | None = None
    restart_seconds: float | None = None
    deadline_hours: float | None = None
    node_hours_budget: float | None = None
    stop_every_stage: bool = False
    lr: float | None = None
    lr_scaling: str | None = None
    optimizer: str | None = None
    lr_horizon_steps: int | None = None
    lr_horizon_samples: int | None = None


def _words(value: Any, name: str, shape: str) -> list[str]:
    if isinstance(value, str):
        return [word.strip() for word in value.strip("[]() ").split(",")]
    if not isinstance(value, Sequence):
        raise ConfigError(f"{name}={value!s:.60} is not {shape}.", field=name, given=str(value)[:60])
    return [str(word) for word in cast("Sequence[Any]", value)]


def _parts(least: int, most: int, shape: str) -> Callable[[Any, str], tuple[str, ...]]:
    def read(value: Any, name: str) -> tuple[str, ...]:
        words = _words(value, name, shape)
        if not least <= len(words) <= most:
            raise ConfigError(f"{name}={value!s:.60} is not {shape}.", field=name, given=str(value)[:60])
        return tuple(words)

    return read


def _seconds(most: int, shape: str) -> Callable[[Any, str], tuple[float, ...]]:
    def read(value: Any, name: str) -> tuple[float, ...]:
        return tuple(_not_negative(word, name) for word in _parts(1, most, shape)(value, name))

    return read


def _not_negative(value: Any, name: str) -> float:
    return 0.0 if str(value).strip() in ("0", "0.0") else positive(value, name)


def _lengths(value: Any, name: str) -> tuple[int, ...]:
    return tuple(count(word, name, most=10**9) for word in _words(value, name, "LENGTH,LENGTH,..."))


def _text(value: Any, name: str) -> str:
    return str(value)


RAMP_READERS: Mapping[str, Callable[[Any, str], Any]] = {
    "linear": _parts(3, 3, "START,INCREMENT,SAMPLES"),
    "per_device": _parts(4, 4, "START,INCREMENT,END,SAMPLES"),
    "thresholds": _text,
    "thresholds_tokens": _text,
    "thresholds_steps": _text,
    "doubling": _parts(2, 3, "START,EVERY or START,EVERY,samples|tokens|steps"),
    "recipe": _text,
    "sequence_lengths": _lengths,
    "allow_falling": switch,
    "samples": count,
    "tokens": partial(count, most=10**18),
    "last_step": choice(*LAST_STEPS),
    "node_policy": choice(*POLICIES),
    "micro_step_seconds": _seconds(2, "FIXED,PER_SAMPLE"),
    "sync_seconds": _seconds(2, "LATENCY,ALL"),
    "stage_seconds": _seconds(100_000, "SECONDS,SECONDS,..."),
    "probe": lambda value, name: value,
    "restart_seconds": _not_negative,
    "deadline_hours": positive,
    "node_hours_budget": positive,
    "stop_every_stage": switch,
    "lr": positive,
    "lr_scaling": choice(*RULES),
    "optimizer": _text,
    "lr_horizon_steps": count,
    "lr_horizon_samples": count,
}


def read_ramp(values: Mapping[str, Any]) -> RampRequest:
    """A RampRequest from raw values; all that is wrong with them is said at once.

    >>> read_ramp({"linear": "256,128,50M"}).linear
    ('256', '128', '50M')
    """
    wrong: list[Violation] = []
    read: dict[str, Any] = {}
    for name, value in values.items():
        if value is None:
            continue
        if name not in RAMP_READERS:
            wrong.append(unknown_key(name, value, RAMP_READERS))
            continue
        try:
            read[name] = RAMP_READERS[name](value, name)
        except ConfigError as error:
            wrong.extend(error.violations)
    raise_violations(ConfigError, wrong)
    return RampRequest(**read)
