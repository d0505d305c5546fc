"""The request for a ramp, read strictly: the rule, the budget, the policy, the times and the learning rate."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Any, cast

from batchwright.core.batch.plan import plan
from batchwright.core.batch.request import BatchRequest, batch_in_samples, resolve_ranks, world_of
from batchwright.core.errors import ConfigError, ScheduleError, Violation, either, raise_violations
from batchwright.core.fields import Readers, choice, read_fields, switch
from batchwright.core.nodes.policies import POLICIES
from batchwright.core.numbers import LARGEST_COUNT, count, decimal, fraction, human, positive

from .learning_rate import RULES
from .recipes import Recipe
from .rules import Constant, Doubling, Linear, PerDevice, parse_thresholds
from .schedule import LAST_STEPS, LastStep, Rule, Schedule, Unit

# The flags that name a rule; at most one of them.
RULE_FLAGS = ("linear", "per_device", "thresholds", "thresholds_tokens", "thresholds_steps", "doubling", "recipe")
# The ways to give a budget; at most one of them.
BUDGETS = ("samples", "tokens", "epochs")


@dataclass(frozen=True)
class RampRequest:
    """The options of a ramp besides the batch and the world; at most one rule. `read_ramp` reads the values."""

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
    epochs: Fraction | None = None
    dataset_size: int | None = None
    last_step: str = "shorten"
    start_sample: int = 0
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

    @property
    def budgets(self) -> list[str]:
        """The names of the budgets that are given."""
        return [name for name in BUDGETS if getattr(self, name) is not None]

    def budget(self) -> int | None:
        """The budget in samples; None if there is none, or if it is in tokens.

        >>> read_ramp({"epochs": "1.5", "dataset_size": 4096}).budget()
        6144
        """
        if len(named := self.budgets) > 1:
            raise ConfigError(
                f"{' and '.join(named)} are mutually exclusive: a ramp has one budget.",
                field=named[1],
                given=str(getattr(self, named[1])),
            )
        if self.epochs is None:
            return self.samples
        if self.dataset_size is None:
            raise ScheduleError(
                f"epochs={decimal(self.epochs)} needs dataset_size, the number of samples in the dataset.",
                field="dataset_size",
            )
        exact = self.epochs * self.dataset_size
        if exact.denominator == 1:
            return count(exact, "epochs × dataset_size")
        near = dict.fromkeys(Fraction(max(1, n), self.dataset_size) for n in (exact.__floor__(), exact.__ceil__()))
        shown = [f"{decimal(epochs)} ({human(int(epochs * self.dataset_size))} samples)" for epochs in near]
        epochs = decimal(self.epochs)
        raise ScheduleError(
            f"epochs={epochs} is not a whole number of samples: {epochs} × dataset_size {self.dataset_size} = "
            f"{float(exact):.10g}. Nearest: {either(shown)}.",
            field="epochs",
            given=epochs,
            nearest=[decimal(epochs) for epochs in near],
        )


def _items(value: Any, name: str, shape: str) -> list[str]:
    if isinstance(value, str):
        return [item.strip() for item in value.strip("[]() ").split(",")]
    if not isinstance(value, Sequence):
        raise ConfigError(f"{name}={value!s:.60} is not {shape}.", field=name, given=str(value)[:60])
    return [str(item) for item in cast("Sequence[Any]", value)]


def _parts(least: int, most: int, shape: str) -> Callable[[Any, str], tuple[str, ...]]:
    def read(value: Any, name: str) -> tuple[str, ...]:
        items = _items(value, name, shape)
        if not least <= len(items) <= most:
            raise ConfigError(f"{name}={value!s:.60} is not {shape}.", field=name, given=str(value)[:60])
        return tuple(items)

    return read


def _seconds(most: int, shape: str) -> Callable[[Any, str], tuple[float, ...]]:
    def read(value: Any, name: str) -> tuple[float, ...]:
        return tuple(_not_negative(item, name) for item in _parts(1, most, shape)(value, name))

    return read


def _not_negative(value: Any, name: str) -> float:
    return 0.0 if str(value).strip() in ("0", "0.0") else positive(value, name)


def _lengths(value: Any, name: str) -> tuple[int, ...]:
    return tuple(count(item, name, most=10**9) for item in _items(value, name, "LENGTH,LENGTH,..."))


def _epochs(value: Any, name: str) -> Fraction:
    epochs = fraction(value, name)
    if not 0 < epochs <= LARGEST_COUNT:
        raise ConfigError(
            f"{name}={str(value)[:40]}: must be above 0 and at most {LARGEST_COUNT:,}.",
            field=name,
            given=str(value)[:40],
            nearest=[1 if epochs <= 0 else LARGEST_COUNT],
        )
    return epochs


def _text(value: Any, name: str) -> str:
    return str(value)


def _record(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        shown = str(value)[:60]
        raise ConfigError(
            f"{name}={shown!r} is not the record that a probe prints with --json.", field=name, given=shown
        )
    return cast("Mapping[str, Any]", value)


RAMP_READERS: Readers = {
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
    "epochs": _epochs,
    "dataset_size": count,
    "last_step": choice(*LAST_STEPS),
    "start_sample": partial(count, least=0),
    "node_policy": choice(*POLICIES),
    "micro_step_seconds": _seconds(2, "FIXED,PER_SAMPLE"),
    "sync_seconds": _seconds(2, "LATENCY,ALL"),
    "stage_seconds": _seconds(100_000, "SECONDS,SECONDS,..."),
    "probe": _record,
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
    """A RampRequest from raw values; one error lists everything that is wrong.

    >>> read_ramp({"linear": "256,128,50M"}).linear
    ('256', '128', '50M')
    """
    return RampRequest(**read_fields(values, RAMP_READERS))


UNIT_OF = {"thresholds": "samples", "thresholds_tokens": "tokens", "thresholds_steps": "steps"}


def compile_schedule(request: BatchRequest, wanted: RampRequest, published: Recipe | None) -> tuple[Schedule, Rule]:
    """The schedule, and the rule it was compiled from."""
    named = [name for name in RULE_FLAGS if getattr(wanted, name) is not None]
    if len(named) > 1:
        raise ConfigError(f"{' and '.join(named)} are mutually exclusive: a ramp has one rule.", field=named[1])
    samples = wanted.budget()
    ends = samples is not None or wanted.tokens is not None
    if published:
        compiled, rule = (
            (replace(published, samples=None, tokens=None) if ends else published).schedule(),
            published.rule,
        )
    else:
        rule = _rule(request, wanted, named[0] if named else None)
        compiled = rule.compile()
    _refuse_unused(request, wanted, compiled, named[0] if named else None)
    if not ends:
        return compiled, rule
    policy = cast(LastStep, wanted.last_step)
    return compiled.until(samples, tokens=wanted.tokens, last_step=policy), rule


def _rule(request: BatchRequest, wanted: RampRequest, name: str | None) -> Rule:
    length = request.sequence_length
    if name is None:
        # No rule: a constant batch, given or planned from the other numbers.
        target = batch_in_samples(request)
        return Constant(plan(request).global_batch_size if target is None else target, length)
    if wanted.linear:
        start, increment, samples = wanted.linear
        return Linear(
            count(start, "start"),
            count(increment, "increment", least=0),
            count(samples, "samples", least=0),
            _target(request, "a linear ramp"),
            length,
            wanted.allow_falling,
        )
    if wanted.per_device:
        start, increment, end, samples = wanted.per_device
        ramp_samples, steps = count(samples, "samples", least=0), request.accumulation_steps or 1
        return PerDevice(start, increment, end, ramp_samples, _devices(request), steps, length)
    if wanted.doubling:
        start, every, *rest = wanted.doubling
        unit = cast(Unit, choice("samples", "tokens", "steps")(rest[0], "doubling") if rest else "samples")
        return Doubling(count(start, "start"), _target(request, "a doubling"), count(every, "every"), unit, length)
    lengths = wanted.sequence_lengths or length
    return parse_thresholds(
        getattr(wanted, name), cast(Unit, UNIT_OF[name]), lengths, allow_falling=wanted.allow_falling
    )


def _target(request: BatchRequest, what: str) -> int:
    target = batch_in_samples(request)
    if target is None:
        raise ScheduleError(f"{what} needs global_batch_size, the batch at its end.", field="global_batch_size")
    return target


def _devices(request: BatchRequest) -> int:
    ranks = resolve_ranks(request)
    if ranks is None:
        raise ScheduleError(
            "a per-device ramp needs the number of devices: devices, or nodes and devices_per_node.", field="devices"
        )
    return world_of(request, ranks).devices


def _refuse_unused(request: BatchRequest, wanted: RampRequest, compiled: Schedule, name: str | None) -> None:
    """Refuse options that contradict the rule or have no effect with it."""
    wrong: list[Violation] = []
    target, last = batch_in_samples(request), compiled.segments[-1].global_batch_size
    if target is not None and target != last:
        wrong.append(
            Violation(
                f"global_batch_size={target} contradicts {name}, which ends at {last}. Nearest: {last}. Or leave it out.",
                "global_batch_size",
                target,
                (last,),
            )
        )
    if name == "recipe" and request.sequence_length is not None:
        lengths = sorted({s.sequence_length for s in compiled.segments if s.sequence_length})
        if lengths != [request.sequence_length]:
            message = f"sequence_length={request.sequence_length} contradicts the recipe's {lengths}: leave it out."
            wrong.append(Violation(message, "sequence_length", request.sequence_length, tuple(lengths)))
    if wanted.sequence_lengths and name not in UNIT_OF:
        message = "sequence_lengths needs thresholds: one length per threshold."
        wrong.append(Violation(message, "sequence_lengths", str(wanted.sequence_lengths)))
    if wanted.allow_falling and name in ("per_device", "doubling", "recipe", None):
        wrong.append(Violation("allow_falling has no effect: this rule never falls.", "allow_falling", True))
    if wanted.dataset_size is not None and wanted.epochs is None:
        wrong.append(Violation("dataset_size has no effect without epochs.", "dataset_size", wanted.dataset_size))
    raise_violations(ConfigError, wrong)
