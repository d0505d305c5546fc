"""The learning rate of a ramp: how it changes with the batch, and a schedule whose end does not depend on the ramp.

A horizon counted in steps ends at an earlier sample with a ramp than without one, since early steps are small. So the
horizon here is counted in samples, and `check_horizon` says how far off one counted in steps is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import cos, pi, sqrt
from numbers import Real

from batchwright.core.errors import ScheduleError, Violation, raise_violations
from batchwright.core.numbers import human

from .schedule import Segment

_FACTORS: tuple[tuple[str, Callable[[float], float]], ...] = (
    ("none", lambda ratio: 1.0),
    ("sqrt", sqrt),
    ("linear", lambda ratio: ratio),
)
RULES = tuple(name for name, _ in _FACTORS)
DECAYS = ("cosine", "linear", "constant")


def scale(rule: str, base_lr: float, base_batch: int, batch: int) -> float:
    """The learning rate at `batch`, given `base_lr` at `base_batch`.

    >>> scale("linear", 0.001, 2, 10), scale("sqrt", 0.001, 256, 1024), scale("none", 0.001, 2, 10)
    (0.005, 0.002, 0.001)
    """
    found: list[Violation] = []
    if rule not in RULES:
        message = f"lr_scaling={rule!r} is not one of {', '.join(RULES)}."
        found.append(Violation(message, "lr_scaling", rule, RULES))
    for name, value in (("base_lr", base_lr), ("base_batch", base_batch), ("batch", batch)):
        if value <= 0:
            found.append(Violation(f"{name}={value} must be above zero.", name, value))
    raise_violations(ScheduleError, found)
    return base_lr * dict(_FACTORS)[rule](batch / base_batch)


@dataclass(frozen=True)
class Suggestion:
    """A rule for an optimizer, and the reason. It is only shown; lr_scaling applies it.

    >>> suggested_rule("SGD").reason
    'SGD is plain gradient descent: the linear rule (Goyal 2017)'
    """

    rule: str
    reason: str


def suggested_rule(optimizer: str) -> Suggestion:
    """The usual rule for an optimizer by its name: adaptive ones `sqrt`, SGD `linear`, others `none`.

    >>> suggested_rule("torch.optim.AdamW").rule, suggested_rule("SGD").rule, suggested_rule("Muon").rule
    ('sqrt', 'linear', 'none')
    """
    name = optimizer.rsplit(".", 1)[-1].lower()
    # Malladi et al. 2022, "On the SDEs and Scaling Rules for Adaptive Gradient Algorithms"; OLMo-core does the same.
    if "adam" in name or "rmsprop" in name:
        return Suggestion("sqrt", f"{optimizer} is adaptive: the square-root rule keeps its noise scale (Malladi 2022)")
    # Goyal et al. 2017, "Accurate, Large Minibatch SGD"; it holds below the critical batch size.
    if "sgd" in name:
        return Suggestion("linear", f"{optimizer} is plain gradient descent: the linear rule (Goyal 2017)")
    return Suggestion("none", f"no established rule is known for {optimizer}")


@dataclass(frozen=True)
class StageRate:
    """The learning rate before and after one batch change; `factor` is relative to the base.

    >>> stage_rates([Segment(0, 0, 256, None)], "sqrt", 0.5, base_batch=1024)[0].factor
    0.5
    """

    index: int
    first_step: int
    start_sample: int
    global_batch_size: int
    factor: float
    before: float
    after: float


def stage_rates(
    segments: Sequence[Segment], rule: str, base_lr: float, base_batch: int | None = None
) -> tuple[StageRate, ...]:
    """The table of peak learning rates; `base_lr` is the rate at `base_batch`, by default the first stage's batch.

    >>> ramp = [Segment(0, 0, 256, 10), Segment(10, 2560, 1024, None)]
    >>> [(row.before, row.after) for row in stage_rates(ramp, "sqrt", 0.5)]
    [(0.5, 0.5), (0.5, 1.0)]
    """
    rows: list[StageRate] = []
    before: float | None = None
    for index, segment in enumerate(segments):
        batch = segment.global_batch_size
        after = scale(rule, base_lr, base_batch or segments[0].global_batch_size, batch)
        at = (index, segment.first_step, segment.start_sample, batch)
        rows.append(StageRate(*at, after / base_lr, after if before is None else before, after))
        before = after
    return tuple(rows)


@dataclass(frozen=True)
class SampleSchedule:
    """Warm-up and decay as a function of consumed samples: it ends at `end_sample` for any batch sizes.

    >>> schedule = SampleSchedule(peak_lr=1.0, end_sample=1000, warmup_samples=100, decay="linear")
    >>> [schedule.at(sample) for sample in (0, 50, 100, 550, 1000, 2000)]
    [0.0, 0.5, 1.0, 0.5, 0.0, 0.0]
    """

    peak_lr: float
    end_sample: int
    warmup_samples: int = 0
    decay: str = "cosine"
    min_lr: float = 0.0

    def __post_init__(self) -> None:
        values: dict[str, object] = {n: getattr(self, n) for n in ("peak_lr", "end_sample", "warmup_samples", "min_lr")}
        found = [
            Violation(f"{name}={str(value)[:40]!r}: must be a number.", name, str(value)[:40])
            for name, value in values.items()
            if isinstance(value, bool) or not isinstance(value, Real)
        ]
        raise_violations(ScheduleError, found)
        if self.decay not in DECAYS:
            message = f"decay={self.decay!r} is not one of {', '.join(DECAYS)}."
            found.append(Violation(message, "decay", self.decay, DECAYS))
        if not 0 <= self.warmup_samples <= self.end_sample:
            message = f"warmup_samples={self.warmup_samples} must be between 0 and end_sample={self.end_sample}."
            nearest = (min(max(0, self.warmup_samples), max(0, self.end_sample)),)
            found.append(Violation(message, "warmup_samples", self.warmup_samples, nearest))
        if not 0 <= self.min_lr <= self.peak_lr or self.peak_lr <= 0:
            message = f"min_lr={self.min_lr} must be between 0 and peak_lr={self.peak_lr}, and peak_lr above zero."
            found.append(Violation(message, "min_lr", self.min_lr))
        raise_violations(ScheduleError, found)

    def at(self, sample: int, factor: float = 1.0) -> float:
        """The rate of the step that starts at `sample`, times a stage's `factor`.

        >>> SampleSchedule(peak_lr=0.5, end_sample=1000, decay="constant").at(10, factor=2.0)
        1.0
        """
        if sample < self.warmup_samples:
            return self.peak_lr * factor * sample / self.warmup_samples
        if self.decay == "constant":
            return self.peak_lr * factor
        if sample >= self.end_sample:
            return self.min_lr * factor
        done = (sample - self.warmup_samples) / (self.end_sample - self.warmup_samples)
        height = 1 - done if self.decay == "linear" else (1 + cos(pi * done)) / 2
        return (self.min_lr + (self.peak_lr - self.min_lr) * height) * factor


@dataclass(frozen=True)
class HorizonCheck:
    """Where a learning-rate horizon ends relative to the budget; `off_by_samples` is negative if it ends early.

    >>> check_horizon([Segment(0, 0, 256, None)], 2560, steps=9).message
    'the horizon of 9 steps ends at sample 2,304, 256 before the budget of 2,560 (10.0%). Count it in samples: 2,560.'
    """

    ok: bool
    ends_at_sample: int
    budget_samples: int
    off_by_samples: int
    message: str


def check_horizon(
    segments: Sequence[Segment], budget_samples: int, *, samples: int | None = None, steps: int | None = None
) -> HorizonCheck:
    """Whether a horizon counted in `samples` or in `steps` ends exactly at the budget.

    >>> ramp = [Segment(0, 0, 256, 100), Segment(100, 25_600, 1024, None)]
    >>> check_horizon(ramp, 102_400, samples=102_400).ok
    True
    >>> check_horizon(ramp, 102_400, steps=100).off_by_samples  # 102,400 / 1024, as if there were no ramp
    -76800
    """
    if (samples is None) == (steps is None):
        message = "a learning-rate horizon needs exactly one of samples and steps."
        raise ScheduleError(message, field="samples", given=samples)
    given = f"{human(samples)} samples" if samples is not None else f"{steps:,} steps"
    end = samples if samples is not None else _sample_after(segments, steps or 0)
    off = end - budget_samples
    if not off:
        message = f"the horizon of {given} ends at the budget of {human(budget_samples)} samples."
    else:
        message = (
            f"the horizon of {given} ends at sample {end:,}, {abs(off):,} {'before' if off < 0 else 'after'} the budget "
            f"of {budget_samples:,} ({abs(off) / budget_samples:.1%}). Count it in samples: {budget_samples:,}."
        )
    return HorizonCheck(off == 0, end, budget_samples, off, message)


def _sample_after(segments: Sequence[Segment], steps: int) -> int:
    """The position after `steps` steps; after the end of the schedule the last batch continues."""
    for segment in segments:
        end_step, end_sample = segment.end_step, segment.end_sample
        if end_step is None or end_sample is None or steps < end_step:
            return segment.start_sample + (steps - segment.first_step) * segment.global_batch_size
    last = segments[-1]
    return (last.end_sample or 0) + (steps - (last.end_step or 0)) * last.global_batch_size
