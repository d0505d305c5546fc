"""A ramp as other frameworks write it: Megatron's triple, thresholds, and the sizes of a schedule."""

from __future__ import annotations

from itertools import pairwise

from batchwright.core.ramp.rules import Linear, PerDevice, Thresholds

from .record import Job


def triple(job: Job) -> tuple[int, int, int] | None:
    """[start, increment, samples] of a ramp that grows by equal increments; None if it does not.

    The positions are as near as a triple can be: reading it back shows whether they are the same.
    """
    rule, schedule = job.rule, job.schedule
    if schedule is None or len(schedule.segments) < 2:
        return None
    if isinstance(rule, Linear):
        return rule.start, rule.increment, rule.samples
    sizes = list(dict.fromkeys(switch.global_batch_size for switch in rule.switches())) if rule else []
    steps = {b - a for a, b in pairwise(sizes)}
    if len(steps) != 1 or min(steps) < 1:
        return None
    if isinstance(rule, PerDevice):
        return sizes[0], min(steps), rule.samples
    # The first stage gives the share of each: the others have the same if they are equally far apart.
    return sizes[0], min(steps), schedule.segments[1].start_sample * (len(sizes) - 1)


def token_thresholds(job: Job, length: int) -> list[tuple[int, int]]:
    """(token, global batch) of every stage, as the rule states it where it counts samples or tokens."""
    rule, schedule = job.rule, job.schedule
    assert schedule is not None
    if isinstance(rule, Thresholds) and rule.unit == "tokens" and rule.sequence_length == length:
        return [(switch.at, switch.global_batch_size) for switch in rule.switches()]
    if isinstance(rule, Linear) or (isinstance(rule, Thresholds) and rule.unit == "samples"):
        return [(switch.at * length, switch.global_batch_size) for switch in rule.switches()]
    return [(segment.start_sample * length, segment.global_batch_size) for segment in schedule.segments]


def by_step(job: Job) -> list[tuple[int, int]]:
    """(step, global batch) of every stage."""
    assert job.schedule is not None
    return [(segment.first_step, segment.global_batch_size) for segment in job.schedule.segments]
