"""Pipeline microbatches: which numbers a schedule allows, how long its stages are idle, which number is best.

With p stages, m microbatches, v virtual stages per device and d = 2 under delayed forwarding (else 1), where F, B and
W (backward for input and for weights) take equal time:

    schedule      idle share of a step            rule for m
    gpipe, 1f1b   (p-1) / (m + p-1)               m ≥ 1
    interleaved   (p-1) / (v·m + p-1)             p ≤ group ≤ m; m mod group = 0 or ≥ p; group defaults to p
    circular      d(p-1) / (v·m + d(p-1))         m mod p = 0; m ≥ 2p under delayed forwarding
    zero-bubble   w / (3m + w)                    m mod max(1, m // p) = 0   (ZB1P)

w = p-1 + max(0, p-m): with fewer microbatches than stages there is not enough weight work to fill the wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import count

from batchwright.core.errors import PlanError

SCHEDULES = ("gpipe", "1f1b", "interleaved", "circular", "zero-bubble")

# A microbatch of this many tokens runs at half its best speed: t₀ in `cost`. An assumption about how matrix units
# saturate; a probe replaces it by a measurement.
HALF_SPEED_TOKENS = 512


@dataclass(frozen=True)
class PipelineRule:
    """A pipeline schedule with its sizes, before the number of microbatches is known.

    >>> rule = PipelineRule(schedule="1f1b", stages=4)
    >>> rule.bubble(8)
    Fraction(3, 11)
    """

    schedule: str
    stages: int
    virtual_stages: int = 1
    group: int | None = None
    delayed: bool = False

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise PlanError(
                f"pipeline_schedule={self.schedule!r} is not one of {', '.join(SCHEDULES)}.",
                field="pipeline_schedule",
                given=self.schedule,
                nearest=SCHEDULES,
            )
        if self.virtual_stages > 1 and self.schedule not in ("interleaved", "circular"):
            raise PlanError(
                f"virtual_stages={self.virtual_stages} needs a schedule that uses a device more than once per microbatch: "
                f"{self.schedule} does not. Nearest: virtual_stages=1, or pipeline_schedule interleaved or circular.",
                field="virtual_stages",
                given=self.virtual_stages,
                nearest=(1,),
            )
        if self.delayed and self.schedule != "circular":
            raise PlanError(
                f"delayed_forwarding needs pipeline_schedule circular, not {self.schedule}.",
                field="delayed_forwarding",
                given=True,
                nearest=(False,),
            )
        if self.group is not None and self.schedule != "interleaved":
            raise PlanError(
                f"pipeline_group={self.group} needs pipeline_schedule interleaved: {self.schedule} has no groups.",
                field="pipeline_group",
                given=self.group,
            )
        if self.group is not None and self.group < self.stages:
            raise PlanError(
                f"pipeline_group={self.group} is smaller than the {self.stages} stages: the rule is stages ≤ group ≤ "
                f"microbatches. Nearest: {self.stages}.",
                field="pipeline_group",
                given=self.group,
                nearest=(self.stages,),
            )

    def refusal(self, microbatches: int) -> str | None:
        """Why this schedule does not run with this number of microbatches, or None if it does.

        >>> PipelineRule("circular", stages=4).refusal(6)
        'circular needs a multiple of the 4 stages: 6 / 4 = 1.50'
        """
        m, p = microbatches, self.stages
        if m < 1:
            return "the pipeline needs at least 1 microbatch"
        if self.schedule == "interleaved" and p > 1:
            group = self.group or p
            if not p <= group <= m:
                return f"interleaved needs stages ≤ group ≤ microbatches: {p} ≤ {group} ≤ {m} does not hold"
            if 0 < m % group < p:
                return f"interleaved leaves a group of {m} mod {group} = {m % group}, fewer than the {p} stages"
        if self.schedule == "circular":
            if m % p:
                return f"circular needs a multiple of the {p} stages: {m} / {p} = {m / p:.2f}"
            if self.delayed and m < 2 * p:
                return f"circular with delayed forwarding needs at least 2 × {p} = {2 * p} microbatches, not {m}"
        if self.schedule == "zero-bubble" and m % max(1, m // p):
            return f"zero-bubble needs equal rounds: {m} mod ({m} // {p}) = {m % (m // p)}"
        return None

    def bubble(self, microbatches: int) -> Fraction:
        """The share of a step in which a stage is idle."""
        idle = self.idle(microbatches)
        return idle / (self.virtual_stages * microbatches + idle)

    def idle(self, microbatches: int) -> Fraction:
        """Idle time of a stage, in units of one microbatch's time on one virtual stage.

        >>> PipelineRule("zero-bubble", stages=4).idle(8)
        Fraction(1, 1)
        """
        waits = Fraction(self.stages - 1)
        if self.schedule == "circular" and self.delayed:
            return 2 * waits
        if self.schedule == "zero-bubble":
            return (waits + max(0, self.stages - microbatches)) / 3
        return waits

    def idle_steps(self, accumulation_steps: int, inner_microbatches: int | None = None) -> float:
        """Idle time of a stage in an optimizer step, in micro steps.

        The accumulation steps are the microbatches, or each of them fills and empties a pipeline of its own, with
        `inner_microbatches`.

        >>> rule = PipelineRule("circular", stages=4)
        >>> rule.idle_steps(16), rule.idle_steps(16, inner_microbatches=8)
        (3.0, 6.0)
        """
        if inner_microbatches is None:
            return float(self.idle(accumulation_steps) / self.virtual_stages)
        return float(accumulation_steps * self.idle(inner_microbatches) / (self.virtual_stages * inner_microbatches))

    @property
    def fewest(self) -> int:
        """The smallest valid number of microbatches that fills the stages.

        >>> PipelineRule("circular", stages=4, delayed=True).fewest
        8
        """
        return next(m for m in count(self.stages) if self.refusal(m) is None)

    def cost(self, microbatches: int, tokens: int) -> Fraction:
        """Relative time of a step of `tokens` per replica: (1 + idle/(v·m)) × (1 + m·t₀/tokens)."""
        waiting = 1 + self.idle(microbatches) / (self.virtual_stages * microbatches)
        return waiting * (1 + Fraction(microbatches * HALF_SPEED_TOKENS, tokens))

    def best(self, candidates: Sequence[int], tokens: int) -> int | None:
        """The valid number of microbatches with the least cost; if it fills the stages, it is next to √(tokens·idle / (v·t₀)).

        >>> PipelineRule("1f1b", stages=8).best([16, 32, 48, 64], tokens=131_072)
        48
        """
        valid = [m for m in candidates if self.refusal(m) is None]
        return min(valid, key=lambda m: (self.cost(m, tokens), m), default=None)

    def nearest(self, microbatches: int, most: int | None = None) -> tuple[int, ...]:
        """The valid numbers closest to `microbatches` on both sides; every schedule has one within 2p + group of it."""
        reach = 2 * self.stages + (self.group or 0) + 1
        below = (m for m in range(microbatches, max(0, microbatches - reach), -1) if self.refusal(m) is None)
        above = (m for m in range(microbatches + 1, microbatches + reach + 1) if self.refusal(m) is None)
        found = (next(below, None), next(above, None))
        return tuple(m for m in found if m is not None and (most is None or m <= most))


@dataclass(frozen=True)
class Pipeline:
    """The pipeline part of a plan. `pipeline_style` says whether its microbatches are the accumulation steps
    (`accumulation`: Megatron, DeepSpeed, NeoX) or a factor inside one of them (`inner`: MaxText)."""

    schedule: str
    stages: int
    virtual_stages: int
    pipeline_microbatches: int
    bubble_fraction: float
    pipeline_style: str
    recommended_microbatches: int | None = None
