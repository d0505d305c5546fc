"""A ramp as other frameworks write it: Megatron's triple, thresholds, and the sizes of a schedule."""

from __future__ import annotations

from itertools import pairwise
from math import gcd

from batchwright.core.ramp.rules import MOST_STAGES, Linear, PerDevice, Thresholds

from .record import Job


def triple(job: Job) -> tuple[int, int, int] | None:
    """[start, increment, samples] of a ramp that only grows; None without one.

    If a triple has the same stages, it is one of those; otherwise the nearest with the same sizes. Reading it back shows
    which.
    """
    rule, schedule = job.rule, job.schedule
    if schedule is None or len(schedule.segments) < 2:
        return None
    if isinstance(rule, Linear):
        return rule.start, rule.increment, rule.samples
    sizes = [segment.global_batch_size for segment in schedule.segments]
    changes = [b - a for a, b in pairwise(sizes)]
    if min(changes) < 1:
        return None
    increment = gcd(*changes)
    n = (sizes[-1] - sizes[0]) // increment
    if n >= MOST_STAGES or (n > len(changes) and isinstance(rule, PerDevice)):
        return None
    if isinstance(rule, PerDevice):
        return sizes[0], increment, rule.samples
    low, high = 0, None
    for before, segment in pairwise(schedule.segments):
        # At `k × samples / n` the batch has grown k times: at the start of the stage, and not one step before.
        k, start, last = (
            (segment.global_batch_size - sizes[0]) // increment,
            segment.start_sample,
            before.global_batch_size,
        )
        least = [(start - last) * n // ((last - sizes[0]) // increment + 1)]
        if k < n:
            least.append(start * n // (k + 1))
        low, high = max(low, *least), min(high or start * n // k, start * n // k)
    assert high is not None
    return sizes[0], increment, _roundest(low + 1, high) if low < high else high


def _roundest(low: int, high: int) -> int:
    """The number from `low` to `high` with the most zeros at its end.

    >>> _roundest(9_999_100, 10_000_900), _roundest(41, 47)
    (10000000, 47)
    """
    for power in range(18, 0, -1):
        number = high // 10**power * 10**power
        if number >= low:
            return number
    return high


def micro_of_all_stages(job: Job) -> int | None:
    """The micro batch for a framework that keeps it in a ramp: MaxText's stages have smaller ones than the last."""
    micro, ranks = job.get("micro_batch_size"), job.get("data_parallel_size")
    if not isinstance(job.rule, PerDevice) or micro is None or ranks is None:
        return micro
    return gcd(micro, *(switch.global_batch_size // ranks for switch in job.rule.switches()))


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
