"""The rules of a ramp. Each says where the batch changes; `schedule.walk` turns that into segments.

Linear      Megatron and NeMo: [start, increment, samples] to a target, by absolute position
PerDevice   MaxText: each stage counts its own equal share of the samples, rounded up to whole steps
Thresholds  Megatron's step schedule, Levanter's and OLMo-core's lists: from here on, this size
Doubling    twice the batch every N samples, tokens or steps
Constant    no ramp

A rule is checked when it is made, and one error lists everything that is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from math import ceil

from batchwright.core.errors import ConfigError, ScheduleError, Violation, raise_violations
from batchwright.core.numbers import LARGEST_COUNT, count, divisors, fraction, nearest_divisors

from .schedule import Rule, Schedule, Switch, Unit

Number = int | float | str | Fraction
UNITS: tuple[Unit, ...] = ("samples", "tokens", "steps")

# Far above any ramp in use (BLOOM had 117 stages); compiling this many takes less than a second.
MOST_STAGES = 100_000


@dataclass(frozen=True)
class Constant(Rule):
    """One batch size from the first step to the last.

    >>> Constant(1024).compile().at_step(3).start_sample
    3072
    """

    global_batch_size: int
    sequence_length: int | None = None

    def __post_init__(self) -> None:
        found = _whole(global_batch_size=self.global_batch_size) + _length(self.sequence_length)
        raise_violations(ScheduleError, found)

    def switches(self) -> tuple[Switch, ...]:
        return (Switch(0, self.global_batch_size, self.sequence_length),)


@dataclass(frozen=True)
class Linear(Rule):
    """Megatron's ramp: at `c` consumed samples the batch is `start + increment × min(n, c × n // samples)`.

    >>> ramp = Linear(start=256, increment=128, samples=50_000_000, target=1024).compile()
    >>> [s.global_batch_size for s in ramp.segments], ramp.ramp_steps
    ([256, 384, 512, 640, 768, 896, 1024], 103703)
    """

    start: int
    increment: int
    samples: int
    target: int
    sequence_length: int | None = None
    allow_falling: bool = False

    def __post_init__(self) -> None:
        found = _whole(start=self.start, increment=self.increment, target=self.target)
        found += _whole(least=0, samples=self.samples) + _length(self.sequence_length)
        raise_violations(ScheduleError, found)
        if self.start > self.target and not self.allow_falling:
            found.append(_falling(self.start, "target", self.target, allowed=True))
        span = abs(self.target - self.start)
        if span % self.increment:
            nearest = nearest_divisors(span, self.increment)
            found.append(_does_not_divide(self.increment, "target", self.target, self.start, nearest))
        elif span // self.increment >= MOST_STAGES:
            found.append(_too_many(span // self.increment, self.increment, span))
        raise_violations(ScheduleError, found)

    @property
    def num_increments(self) -> int:
        """How many times the batch changes."""
        return abs(self.target - self.start) // self.increment

    def switches(self) -> tuple[Switch, ...]:
        n, by = self.num_increments, self.increment if self.target > self.start else -self.increment
        if not n or not self.samples:
            return (Switch(0, self.target, self.sequence_length),)
        # c × n // samples reaches k exactly at c = k × samples / n, rounded up.
        return tuple(Switch(-(-k * self.samples // n), self.start + by * k, self.sequence_length) for k in range(n + 1))

    def notes(self) -> tuple[str, ...]:
        return _no_ramp(self.start, self.target, self.samples)


@dataclass(frozen=True)
class PerDevice(Rule):
    """MaxText's ramp: each per-device size trains on `samples / num_increments`, in whole steps, rounded up.

    Sizes per device may be fractions; the global ones, `size × devices × accumulation_steps`, are whole.

    >>> ramp = PerDevice(start=4, increment=2, end=12, samples=500, devices=8)
    >>> ramp.num_increments, ramp.samples_per_increment
    (4, Fraction(125, 1))
    >>> [(s.global_batch_size, s.steps) for s in ramp.compile().segments]
    [(32, 4), (48, 3), (64, 2), (80, 2), (96, None)]
    """

    start: Number
    increment: Number
    end: Number
    samples: int
    devices: int
    accumulation_steps: int = 1
    sequence_length: int | None = None

    # MaxText resumes by replaying steps, so its position is a step. Without annotation it is not a field.
    unit = "steps"

    def __post_init__(self) -> None:
        found = _whole(devices=self.devices, accumulation_steps=self.accumulation_steps)
        found += _whole(least=0, samples=self.samples) + _length(self.sequence_length)
        for field, value in (("start", self.start), ("increment", self.increment), ("end", self.end)):
            try:
                number = fraction(value, field)
            except ConfigError as error:
                found += error.violations
                continue
            if not 0 < number <= LARGEST_COUNT:
                message = f"{field}={value} is not above 0 and at most {LARGEST_COUNT:,}."
                found.append(Violation(message, field, str(value)))
            object.__setattr__(self, field, number)  # 0.5, "1/2" and Fraction(1, 2) are one rule
        raise_violations(ScheduleError, found)  # the checks below divide by these
        start, increment, end = (size * self._factor for size in self._sizes)
        for field, size in (("start", start), ("increment", increment), ("end", end)):
            if size.denominator != 1:
                found.append(self._not_whole(field, size))
        if start > end:
            found.append(_falling(self.start, "end", self.end))
        span = abs(end - start)
        if (span / increment).denominator != 1:
            whole = nearest_divisors(int(span), int(increment)) if span.denominator == 1 else ()
            nearest = tuple(_plain(Fraction(size, self._factor)) for size in whole)
            found.append(_does_not_divide(self.increment, "end", self.end, self.start, nearest))
        elif span / increment >= MOST_STAGES and increment.denominator == 1:
            found.append(_too_many(int(span / increment), self.increment, int(span), self._factor))
        raise_violations(ScheduleError, found)

    @property
    def num_increments(self) -> int:
        """How many times the batch grows."""
        start, increment, end = self._sizes
        return int((end - start) / increment)

    @property
    def samples_per_increment(self) -> Fraction:
        """The ramp's samples in each stage."""
        return Fraction(self.samples, self.num_increments) if self.num_increments else Fraction(0)

    def switches(self) -> tuple[Switch, ...]:
        start, increment, end = (int(size * self._factor) for size in self._sizes)
        if not self.samples:
            return (Switch(0, end, self.sequence_length),)
        found: list[Switch] = []
        step, share = 0, self.samples_per_increment
        for size in range(start, end, increment):
            found.append(Switch(step, size, self.sequence_length))
            step += ceil(share / size)
        return (*found, Switch(step, end, self.sequence_length))

    def notes(self) -> tuple[str, ...]:
        start, _, end = self._sizes
        return _no_ramp(int(start * self._factor), int(end * self._factor), self.samples)

    @property
    def _factor(self) -> int:
        """Global samples for each sample per device."""
        return self.devices * self.accumulation_steps

    @property
    def _sizes(self) -> tuple[Fraction, Fraction, Fraction]:
        return fraction(self.start, "start"), fraction(self.increment, "increment"), fraction(self.end, "end")

    def _not_whole(self, field: str, size: Fraction) -> Violation:
        whole = [n for n in (size.__floor__(), size.__ceil__()) if n]
        nearest = tuple(_plain(Fraction(n, self._factor)) for n in whole)
        given = _plain(size / self._factor)
        return Violation(
            f"{field}={given} per device is not a whole number of samples: {given} × {self.devices} devices × "
            f"{self.accumulation_steps} accumulation_steps = {float(size):g}. Nearest: "
            f"{' or '.join(f'{per_device} ({n})' for per_device, n in zip(nearest, whole, strict=True))}.",
            field,
            given,
            nearest,
        )


@dataclass(frozen=True)
class Thresholds(Rule):
    """A size from each threshold on: pairs of (position, global batch), counted in samples, tokens or steps.

    A threshold in tokens is the sample that holds that token, so it needs `sequence_length`: one, or one per stage.

    >>> ramp = Thresholds(((0, 768), (250_000_000_000, 1536)), unit="tokens", sequence_length=4096).compile()
    >>> [(s.global_batch_size, s.start_sample) for s in ramp.segments]
    [(768, 0), (1536, 61035264)]
    """

    pairs: tuple[tuple[int, int], ...]
    unit: Unit = "samples"
    sequence_length: int | tuple[int, ...] | None = None
    allow_falling: bool = False

    def __post_init__(self) -> None:
        found: list[Violation] = []
        if not self.pairs:
            found.append(Violation("thresholds are empty. Give at least 0:SIZE.", "thresholds", ""))
        if self.unit not in UNITS:
            found.append(Violation(f"unit={self.unit!r} is not one of {', '.join(UNITS)}.", "unit", self.unit, UNITS))
        for at, size in self.pairs:
            found += _whole(least=0, threshold=at) + _whole(global_batch_size=size)
        lengths = self.sequence_length if isinstance(self.sequence_length, tuple) else (self.sequence_length,)
        for length in lengths:
            found += _length(length)
        if isinstance(self.sequence_length, tuple) and len(lengths) != len(self.pairs):
            found.append(
                Violation(
                    f"sequence_length has {len(lengths)} values for {len(self.pairs)} stages. Give one value, or one per stage.",
                    "sequence_length",
                    self.sequence_length,
                )
            )
        if self.unit == "tokens" and None in lengths:
            found.append(
                Violation(
                    "thresholds in tokens need sequence_length to convert them to samples.", "sequence_length", None
                )
            )
        raise_violations(ScheduleError, found)
        if self.pairs[0][0]:
            found.append(
                Violation(
                    f"the first threshold is {self.pairs[0][0]:,}, so the size before it is unknown. Nearest: 0.",
                    "threshold",
                    self.pairs[0][0],
                    (0,),
                )
            )
        found += self._disorder()
        raise_violations(ScheduleError, found)

    def switches(self) -> tuple[Switch, ...]:
        return tuple(Switch(at, size, length) for (at, size), length in zip(self.pairs, self._lengths(), strict=True))

    def _lengths(self) -> Sequence[int | None]:
        if isinstance(self.sequence_length, tuple):
            return self.sequence_length
        return (self.sequence_length,) * len(self.pairs)

    def _disorder(self) -> list[Violation]:
        """Violations for thresholds that do not rise, also in samples, and for sizes that fall without allow_falling."""
        found: list[Violation] = []
        exact = Fraction(0)  # the threshold in samples, as if no step overshot
        for ((at, size), (after, larger)), length in zip(pairwise(self.pairs), self._lengths(), strict=False):
            least, why = at + 1, "each threshold must be above the one before it"
            if self.unit == "tokens" and length:
                least = at + ceil((exact.__floor__() + 1 - exact) * length)
                why = (
                    f"with sequence_length {length}, sample {exact.__floor__() + 1:,} is the first after {at:,} tokens"
                )
                exact += Fraction(max(0, after - at), length)
            if after < least:
                message = f"threshold {after:,} is too close to {at:,}, the one before it: {why}. Nearest: {least:,}."
                found.append(Violation(message, "threshold", after, (least,)))
            if larger < size and not self.allow_falling:
                found.append(
                    Violation(
                        f"the global batch falls from {size} to {larger} at {after:,} {self.unit}. Nearest: {size}, "
                        "or allow_falling=True.",
                        "global_batch_size",
                        larger,
                        (size,),
                    )
                )
        return found


def parse_thresholds(
    text: str,
    unit: Unit = "samples",
    sequence_length: int | tuple[int, ...] | None = None,
    *,
    allow_falling: bool = False,
) -> Thresholds:
    """Megatron's step schedule: `THRESHOLD:SIZE` pairs, separated by spaces or commas, in any order, with K, M, B, T.

    >>> parse_thresholds("1M:2K 0:1K").pairs
    ((0, 1000), (1000000, 2000))
    """
    found: list[Violation] = []
    pairs: list[tuple[int, int]] = []
    for entry in text.replace(",", " ").split():
        at, colon, size = entry.partition(":")
        if not colon:
            found.append(Violation(f"{entry!r} is not THRESHOLD:SIZE, such as 250B:1536.", "thresholds", entry))
            continue
        try:
            pairs.append((count(at, "threshold", least=0), count(size, "global_batch_size")))
        except ConfigError as error:
            found += [Violation(f"in {entry!r}: {v.message}", v.field, v.given, v.nearest) for v in error.violations]
    raise_violations(ScheduleError, found)
    return Thresholds(tuple(sorted(pairs)), unit, sequence_length, allow_falling)


@dataclass(frozen=True)
class Doubling(Rule):
    """Twice the batch every `every` samples, tokens or steps, from `start` to `target`.

    >>> [(s.global_batch_size, s.steps) for s in Doubling(256, 1024, every=1000, unit="steps").compile().segments]
    [(256, 1000), (512, 1000), (1024, None)]
    """

    start: int
    target: int
    every: int
    unit: Unit = "samples"
    sequence_length: int | None = None

    def __post_init__(self) -> None:
        found = _whole(start=self.start, target=self.target, every=self.every) + _length(self.sequence_length)
        raise_violations(ScheduleError, found)
        if self.unit == "tokens" and self.sequence_length and self.every < self.sequence_length:
            message = f"every={self.every} tokens is less than one sample of {self.sequence_length}. Nearest: "
            nearest = (self.sequence_length,)
            found.append(Violation(f"{message}{nearest[0]}.", "every", self.every, nearest))
        if self.start > self.target:
            found.append(_falling(self.start, "target", self.target))
        elif self._sizes()[-1] != self.target:
            below = self._sizes()[-1]
            times = len(self._sizes()) - 1
            found.append(
                Violation(
                    f"target={self.target} is not start {self.start} doubled: {self.start} × 2^{times} = {below} and "
                    f"{self.start} × 2^{times + 1} = {below * 2}. Nearest: {below} or {below * 2}.",
                    "target",
                    self.target,
                    (below, below * 2),
                )
            )
        raise_violations(ScheduleError, found)
        self._thresholds()  # checks the unit, and that tokens come with a sequence length

    def switches(self) -> tuple[Switch, ...]:
        return self._thresholds().switches()

    def _sizes(self) -> list[int]:
        return [self.start << k for k in range((self.target // self.start).bit_length())]

    def _thresholds(self) -> Thresholds:
        pairs = tuple((k * self.every, size) for k, size in enumerate(self._sizes()))
        return Thresholds(pairs, self.unit, self.sequence_length)


@dataclass(frozen=True)
class Compared:
    """One batch size in two schedules: the steps each spends at it (0 if it has no such stage, None if it has no end).

    >>> Compared(512, 2790, 2791).difference
    1
    """

    global_batch_size: int
    first_steps: int | None
    second_steps: int | None

    @property
    def difference(self) -> int | None:
        """How many more steps the second has than the first; None if only one of them has an end."""
        if self.first_steps is None or self.second_steps is None:
            return 0 if self.first_steps == self.second_steps else None
        return self.second_steps - self.first_steps


def compare(first: Schedule, second: Schedule) -> tuple[Compared, ...]:
    """Two schedules compared by batch size, in order of appearance.

    >>> linear = Linear(256, 256, 10_000_000, target=2048).compile()
    >>> maxtext = PerDevice(start=1, increment=1, end=8, samples=10_000_000, devices=256).compile()
    >>> linear.ramp_steps, maxtext.ramp_steps, [row.difference for row in compare(linear, maxtext)]
    (14470, 14475, [0, 1, 0, 1, 1, 1, 1, 0])
    """
    steps: dict[int, list[int | None]] = {}
    # Sorted by step, so that a size of the second schedule alone appears in its place.
    both = [(s, side) for side, schedule in enumerate((first, second)) for s in schedule.segments]
    for segment, side in sorted(both, key=lambda entry: entry[0].first_step):
        row = steps.setdefault(segment.global_batch_size, [0, 0])
        so_far = row[side]
        row[side] = None if so_far is None or segment.steps is None else so_far + segment.steps
    return tuple(Compared(size, *row) for size, row in steps.items())


def _whole(least: int = 1, **fields: object) -> list[Violation]:
    found: list[Violation] = []
    for field, value in fields.items():
        if not isinstance(value, int) or isinstance(value, bool):
            found.append(Violation(f"{field}={value!r} is not a whole number.", field, value))
        elif value < least:
            found.append(Violation(f"{field}={value}: must be at least {least}.", field, value, (least,)))
        elif value > LARGEST_COUNT:
            message = f"{field}={value:,}: must be at most {LARGEST_COUNT:,}."
            found.append(Violation(message, field, value, (LARGEST_COUNT,)))
    return found


def _length(sequence_length: object) -> list[Violation]:
    return [] if sequence_length is None else _whole(sequence_length=sequence_length)


def _no_ramp(start: int, target: int, samples: int) -> tuple[str, ...]:
    if samples or start == target:
        return ()
    return (f"The ramp has 0 samples: the run starts at its target, {target}, not at {start}.",)


def _falling(start: Number, field: str, target: Number, *, allowed: bool = False) -> Violation:
    start, target = _plain(start), _plain(target)
    hint = ", or allow_falling=True" if allowed else ""
    return Violation(
        f"start={start} is above {field}={target}: the batch would fall. Nearest: {target}{hint}.",
        "start",
        start,
        (target,),
    )


def _does_not_divide(
    increment: Number, field: str, target: Number, start: Number, nearest: Sequence[int | float | str]
) -> Violation:
    span = fraction(target) - fraction(start)
    times = float(span / fraction(increment))
    choices = " or ".join(f"{n} ({abs(span) / fraction(n)} increments)" for n in nearest)
    return Violation(
        f"increment={_plain(increment)} does not divide the ramp: {field} {_plain(target)} − start {_plain(start)} = "
        f"{_plain(span)}, and {_plain(span)} / {_plain(increment)} = {times:.2f}."
        + (f" Nearest: {choices}." if nearest else ""),
        "increment",
        _plain(increment),
        tuple(nearest),
    )


def _too_many(stages: int, increment: Number, span: int, factor: int = 1) -> Violation:
    """`span` is in global samples, `increment` in samples per device: `factor` global ones each."""
    least = _plain(Fraction(next(d for d in divisors(span) if span // d < MOST_STAGES), factor))
    return Violation(
        f"increment={_plain(increment)} makes {stages + 1:,} stages, and at most {MOST_STAGES:,} are allowed. Nearest: {least}.",
        "increment",
        _plain(increment),
        (least,),
    )


def _plain(number: Number) -> int | float | str:
    """The number as a JSON value that `fraction` reads back exactly.

    >>> _plain(Fraction(4)), _plain(Fraction(1, 8)), _plain(Fraction(1, 3))
    (4, 0.125, '1/3')
    """
    exact = fraction(number)
    if exact.denominator == 1:
        return int(exact)
    return float(exact) if fraction(float(exact)) == exact else str(exact)
