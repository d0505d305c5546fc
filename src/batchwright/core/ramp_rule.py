"""From what was asked to a schedule: which rule it is, and whether everything given has a meaning beside it."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from .errors import ConfigError, ScheduleError, Violation, raise_violations
from .plan import plan
from .ramp_request import RULE_FLAGS, RampRequest
from .recipes import Recipe
from .request import Request, batch_in_samples, choice, resolve_ranks, world_of
from .rules import Constant, Doubling, Linear, PerDevice, parse_thresholds
from .schedule import LastStep, Rule, Schedule, Unit
from .units import count

UNIT_OF = {"thresholds": "samples", "thresholds_tokens": "tokens", "thresholds_steps": "steps"}


def compile_schedule(request: Request, wanted: RampRequest, published: Recipe | None) -> tuple[Schedule, Rule]:
    """The schedule, and the rule it was compiled from."""
    named = [name for name in RULE_FLAGS if getattr(wanted, name) is not None]
    if len(named) > 1:
        raise ConfigError(f"{' and '.join(named)} are two rules: give one.", field=named[1])
    if published:
        budget = wanted.samples or wanted.tokens
        compiled, rule = (
            (replace(published, samples=None, tokens=None) if budget else published).schedule(),
            published.rule,
        )
    else:
        rule = _rule(request, wanted, named[0] if named else None)
        compiled = rule.compile()
    _refuse_unused(request, wanted, compiled, named[0] if named else None)
    if wanted.samples is None and wanted.tokens is None:
        return compiled, rule
    policy = cast(LastStep, wanted.last_step)
    return compiled.until(wanted.samples, tokens=wanted.tokens, last_step=policy), rule


def _rule(request: Request, wanted: RampRequest, name: str | None) -> Rule:
    length = request.sequence_length
    if name is None:
        # No rule: a constant batch, from whatever numbers give one.
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


def _target(request: Request, what: str) -> int:
    target = batch_in_samples(request)
    if target is None:
        raise ScheduleError(f"{what} grows to global_batch_size, and it is not given.", field="global_batch_size")
    return target


def _devices(request: Request) -> int:
    ranks = resolve_ranks(request)
    if ranks is None:
        raise ScheduleError(
            "a per-device ramp needs the number of devices: devices, or nodes and devices_per_node.", field="devices"
        )
    return world_of(request, ranks).devices


def _refuse_unused(request: Request, wanted: RampRequest, compiled: Schedule, name: str | None) -> None:
    """What is given and would mean nothing is a mistake of somebody: say so."""
    wrong: list[Violation] = []
    target, last = batch_in_samples(request), compiled.segments[-1].global_batch_size
    if target is not None and target != last:
        wrong.append(
            Violation(
                f"global_batch_size={target} contradicts {name}, which ends at {last}. Nearest: {last}, or leave it out.",
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
        message = "sequence_lengths are one per threshold: they need a rule of thresholds."
        wrong.append(Violation(message, "sequence_lengths", str(wanted.sequence_lengths)))
    if wanted.allow_falling and name in ("per_device", "doubling", "recipe", None):
        wrong.append(Violation("allow_falling means nothing here: this rule only grows.", "allow_falling", True))
    raise_violations(ConfigError, wrong)
