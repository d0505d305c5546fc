"""Pipeline microbatches: which numbers a schedule allows, how long its stages are idle, which number is best.

With p stages (ranks of the pipeline), m microbatches, v virtual stages per device, d = 2 under delayed forwarding (else 1)
and f = max(0, p - m), the microbatches that are missing to fill the stages, where F, B and W (backward for input and for
weights) take equal time:

    schedule             whose rules   idle share of a step            rule for m
    gpipe                all           (p-1) / (m + p-1)               m ≥ 1
    1f1b                 Megatron      (p-1) / (m + p-1)               m ≥ 1
    torch-1f1b           torch         (p-1) / (m + p-1)               m ≥ p
    interleaved          Megatron      (p-1) / (v·m + p-1)             p ≤ group ≤ m; m mod group = 0 or ≥ p; group defaults to p
    torch-interleaved    torch         w / (v·m + w)                   m mod max(1, m // p) = 0
    looped-bfs           torch         w / (v·m + w)                   m ≥ 1
    circular             MaxText       d(p-1) / (v·m + d(p-1))         m mod p = 0; m ≥ 2p under delayed forwarding
    zero-bubble          torch         z / (3·v·m + z)                 m mod max(1, m // p) = 0   (ZB1P)
    zbv                  torch         y / (6m + y)                    m ≥ 1; v = 2
    dualpipev            torch         (p-1) / (6m + p-1)              m ≥ 2p; v = 2

    w = p-1 + (v-1)·f       z = p-1 + v·f + (v-1)·max(0, 2f - p)       y = max(p-1, 2(2p - 1 - m))

The formulas of torch's schedules are those of a simulation of torch's own order (tests/runtime/step/test_pipeline_order.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import count

from batchwright.core.errors import PlanError

SCHEDULES = (
    "gpipe",
    "1f1b",
    "interleaved",
    "circular",
    "zero-bubble",
    "torch-1f1b",
    "torch-interleaved",
    "looped-bfs",
    "zbv",
    "dualpipev",
)
# Schedules whose rules are torch's: of torch.distributed.pipelining, which torchtitan uses, too.
TORCH_RULES = ("torch-1f1b", "torch-interleaved", "looped-bfs", "zero-bubble", "zbv", "dualpipev")
# The schedules that torch runs, and the rules that hold then.
RUN_BY_TORCH = {
    "gpipe": "gpipe",
    "1f1b": "torch-1f1b",
    "interleaved": "torch-interleaved",
    **{name: name for name in TORCH_RULES},
}
# Schedules that compute the gradients of weights apart from those of inputs, without autograd's hooks.
SPLIT_BACKWARD = ("zero-bubble", "zbv", "dualpipev")
_ONE_STAGE = ("gpipe", "1f1b", "torch-1f1b")
_TWO_STAGES = ("zbv", "dualpipev")

# A microbatch of this many tokens runs at half its best speed: t₀ in `cost`. An assumption about how matrix units
# saturate; a probe replaces it by a measurement.
HALF_SPEED_TOKENS = 512
ASSUMED_LENGTH = 4096  # tokens of a sample, where no sequence length is given


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
    half_speed_tokens: int = HALF_SPEED_TOKENS

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise PlanError(
                f"pipeline_schedule={self.schedule!r} is not one of {', '.join(SCHEDULES)}.",
                field="pipeline_schedule",
                given=self.schedule,
                nearest=SCHEDULES,
            )
        wanted = 1 if self.schedule in _ONE_STAGE else 2 if self.schedule in _TWO_STAGES else self.virtual_stages
        if self.virtual_stages != wanted:
            several = (
                "uses a device once per microbatch" if wanted == 1 else "goes through the devices forwards and back"
            )
            raise PlanError(
                f"virtual_stages={self.virtual_stages} does not fit pipeline_schedule {self.schedule}, which {several}. "
                f"Nearest: virtual_stages={wanted}"
                + (", or pipeline_schedule interleaved or circular." if wanted == 1 else "."),
                field="virtual_stages",
                given=self.virtual_stages,
                nearest=(wanted,),
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
        if self.schedule in ("zero-bubble", "torch-interleaved") and m % max(1, m // p):
            return f"{self.schedule} needs equal rounds: {m} mod ({m} // {p}) = {m % (m // p)}"
        if self.schedule == "torch-1f1b" and m < p:
            return f"torch's 1F1B needs at least as many microbatches as the {p} stages, not {m}"
        if self.schedule == "dualpipev" and m < 2 * p:
            return f"dualpipev needs at least 2 × {p} = {2 * p} microbatches, not {m}"
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
        p, v, m = self.stages, self.virtual_stages, microbatches
        waits, few = Fraction(p - 1), max(0, p - m)
        if self.schedule == "circular" and self.delayed:
            return 2 * waits
        if self.schedule == "zero-bubble":
            return (waits + v * few + (v - 1) * max(0, 2 * few - p)) / 3
        if self.schedule == "zbv":
            return max(waits, Fraction(2 * (2 * p - 1 - m))) / 3
        if self.schedule == "dualpipev":
            return waits / 3
        return waits + (v - 1) * few if self.schedule in ("torch-interleaved", "looped-bfs") else waits

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
        return waiting * (1 + Fraction(microbatches * self.half_speed_tokens, tokens))

    def fit_half_speed(self, seconds: Mapping[int, float], tokens: float) -> int | None:
        """t₀ from the times of steps of `tokens` at several numbers of microbatches, by least squares: seconds without the
        predicted waiting are a line in m. None if there are fewer than two numbers, or the line starts below 0.

        >>> rule = PipelineRule("1f1b", stages=4)
        >>> rule.fit_half_speed({m: 3 * float(rule.cost(m, 65_536)) for m in (4, 8, 16, 32)}, 65_536)
        512
        """
        points = [(m, t / float(1 + self.idle(m) / (self.virtual_stages * m))) for m, t in seconds.items()]
        if len(points) < 2:
            return None
        mean_m, mean_t = (sum(point[i] for point in points) / len(points) for i in (0, 1))
        spread = sum((m - mean_m) ** 2 for m, _ in points)
        slope = sum((m - mean_m) * (t - mean_t) for m, t in points) / spread
        start = mean_t - slope * mean_m
        return max(0, round(tokens * slope / start)) if start > 0 else None

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
