"""A ramp as segments, with two lookups, by step and by sample, each the exact inverse of the other.

Every rule of a ramp is a list of *switches*: from this position on, this global batch. A switch takes effect at the
first step that starts at or after it, because a step is never split. `walk` turns the switches into segments; the
steps of a segment take one division, however many there are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, takewhile
from operator import attrgetter
from typing import Literal

from batchwright.core.errors import ScheduleError, Violation, raise_violations
from batchwright.core.numbers import human

Unit = Literal["samples", "tokens", "steps"]
LastStep = Literal["shorten", "drop", "overshoot"]

LAST_STEPS = ("shorten", "drop", "overshoot")

_first_step = attrgetter("first_step")
_start_sample = attrgetter("start_sample")
_kind = attrgetter("global_batch_size", "sequence_length")


@dataclass(frozen=True)
class Segment:
    """Steps with one global batch and one sequence length; an open end has `steps=None`.

    >>> Segment(first_step=6, start_sample=96, global_batch_size=32, steps=5).end_sample
    256
    """

    first_step: int
    start_sample: int
    global_batch_size: int
    steps: int | None
    sequence_length: int | None = None
    start_token: int | None = None  # None if a sequence length before it is unknown
    shortfall: int = 0  # samples missing from the last step because the budget ends inside it

    @property
    def samples(self) -> int | None:
        """Samples of the whole segment."""
        return None if self.steps is None else self.steps * self.global_batch_size - self.shortfall

    @property
    def end_step(self) -> int | None:
        """The first step after it."""
        return None if self.steps is None else self.first_step + self.steps

    @property
    def end_sample(self) -> int | None:
        """The first sample after it."""
        return None if self.samples is None else self.start_sample + self.samples

    @property
    def end_token(self) -> int | None:
        """The first token after it, where sequence lengths are known."""
        if self.samples is None or self.sequence_length is None or self.start_token is None:
            return None
        return self.start_token + self.samples * self.sequence_length


@dataclass(frozen=True)
class Step:
    """The span of samples that one optimizer step owns: `[start_sample, end_sample)`.

    >>> Step(step=7, start_sample=128, global_batch_size=32, segment=1).end_sample
    160
    """

    step: int
    start_sample: int
    global_batch_size: int
    segment: int

    @property
    def end_sample(self) -> int:
        """The first sample of the next step."""
        return self.start_sample + self.global_batch_size


@dataclass(frozen=True)
class Switch:
    """From position `at` on, steps take `global_batch_size` samples.

    >>> Switch(at=96, global_batch_size=32).at
    96
    """

    at: int
    global_batch_size: int
    sequence_length: int | None = None


class Rule(ABC):
    """How the batch grows; a rule only has to define `switches`.

    >>> from batchwright.core.ramp.rules import Constant
    >>> Constant(32).switches()
    (Switch(at=0, global_batch_size=32, sequence_length=None),)
    """

    unit: Unit = "samples"

    @abstractmethod
    def switches(self) -> tuple[Switch, ...]:
        """Where the batch changes: absolute positions counted in `unit`, the first at 0, never falling."""

    def notes(self) -> tuple[str, ...]:
        """Notes for the reader of the compiled schedule."""
        return ()

    def compile(self) -> Schedule:
        """The schedule of a run that starts at sample 0.

        >>> from batchwright.core.ramp.rules import Linear
        >>> [(s.global_batch_size, s.steps) for s in Linear(16, 8, 96, target=32).compile().segments]
        [(16, 3), (24, 2), (32, None)]
        """
        segments, skipped = walk(self.switches(), self.unit)
        return Schedule(tuple(segments), self.notes() + skipped)


@dataclass(frozen=True)
class Schedule:
    """The steps of a run: those of its past, which never change, and those of its future.

    >>> from batchwright.core.ramp.rules import Linear
    >>> schedule = Linear(start=16, increment=16, samples=96, target=32).compile()
    >>> schedule.at_step(7)
    Step(step=7, start_sample=128, global_batch_size=32, segment=1)
    >>> schedule.at_sample(159) == schedule.at_step(7)
    True
    >>> schedule.until(samples=250).total_steps
    11
    """

    segments: tuple[Segment, ...]
    notes: tuple[str, ...] = ()
    samples: int | None = None  # the budget
    last_step: LastStep = "shorten"  # what happens to the step in which the budget ends

    def __post_init__(self) -> None:
        raise_violations(ScheduleError, _broken_chain(self.segments))

    @property
    def total_steps(self) -> int | None:
        """Steps to the end, or None if there is no end."""
        return self.segments[-1].end_step

    @property
    def total_samples(self) -> int | None:
        """Samples to the end, or None if there is no end."""
        return self.segments[-1].end_sample

    @property
    def total_tokens(self) -> int | None:
        """Tokens to the end, or None if there is no end or a sequence length is unknown."""
        return self.segments[-1].end_token

    @property
    def ending(self) -> str | None:
        """What the budget does to the last step, as text.

        >>> from batchwright.core.ramp.rules import Constant
        >>> Constant(32).compile().until(250).ending
        'The last step is shortened to 26 of 32 samples.'
        """
        last, size = self.segments[-1], self.segments[-1].global_batch_size
        over = 0 if self.samples is None or last.end_sample is None else last.end_sample - self.samples
        if last.shortfall:
            return f"The last step is shortened to {size - last.shortfall} of {size} samples."
        if over:
            return f"The last step overshoots by {over}." if over > 0 else f"The last {-over} samples are dropped."
        return None

    @property
    def ramp_steps(self) -> int:
        """How long the run is not yet at its final batch.

        >>> from batchwright.core.ramp.rules import Constant, Linear
        >>> Linear(16, 16, 96, target=32).compile().ramp_steps, Constant(32).compile().ramp_steps
        (6, 0)
        """
        final = takewhile(lambda s: s.global_batch_size == self.segments[-1].global_batch_size, reversed(self.segments))
        return min(segment.first_step for segment in final)

    def at_step(self, step: int) -> Step:
        """The span of samples that optimizer step `step` owns.

        >>> from batchwright.core.ramp.rules import Constant
        >>> Constant(32).compile().at_step(10**12).start_sample
        32000000000000
        """
        self._check_inside("step", step, self.total_steps)
        index = bisect_right(self.segments, step, key=_first_step) - 1
        return self._nth(index, step - self.segments[index].first_step)

    def at_sample(self, sample: int) -> Step:
        """The step that trains on the sample at position `sample`: the inverse of `start_sample`.

        >>> from batchwright.core.ramp.rules import Constant
        >>> Constant(32).compile().at_sample(63).step
        1
        """
        self._check_inside("sample", sample, self.total_samples)
        index = bisect_right(self.segments, sample, key=_start_sample) - 1
        segment = self.segments[index]
        return self._nth(index, (sample - segment.start_sample) // segment.global_batch_size)

    def sample_at_token(self, token: int) -> int:
        """The sample that holds the token at position `token`; at the end of the schedule, the end sample.

        >>> from batchwright.core.ramp.rules import Constant
        >>> Constant(32, sequence_length=4096).compile().sample_at_token(10_000)
        2
        """
        starts = [s.start_token for s in self.segments if s.sequence_length and s.start_token is not None]
        if len(starts) < len(self.segments):
            raise ScheduleError(
                "tokens are unknown: a segment has no sequence_length. Give the rule one.",
                field="sequence_length",
            )
        self._check_inside("token", token, None if self.total_tokens is None else self.total_tokens + 1)
        index = bisect_right(starts, token) - 1
        segment = self.segments[index]
        return segment.start_sample + (token - starts[index]) // (segment.sequence_length or 1)

    def until(
        self, samples: int | None = None, *, tokens: int | None = None, last_step: LastStep = "shorten"
    ) -> Schedule:
        """The schedule with a budget; the step in which it ends is shortened, dropped, or runs whole (`overshoot`).

        >>> from batchwright.core.ramp.rules import Constant
        >>> run = Constant(32, sequence_length=2048).compile()
        >>> [run.until(250, last_step=policy).total_samples for policy in ("shorten", "drop", "overshoot")]
        [250, 224, 256]
        >>> run.until(tokens=1_000_000).total_samples
        488
        """
        end = self.total_samples
        again = last_step == self.last_step == "drop" and tokens is None
        if again and samples and end and end < samples <= (self.samples or 0):
            return replace(self, samples=samples)  # the same end, with the step that this schedule dropped
        budget = self._budget(samples, tokens)
        if last_step not in LAST_STEPS:
            raise ScheduleError(
                f"last_step={last_step!r} is not one of {', '.join(LAST_STEPS)}.",
                field="last_step",
                given=last_step,
                nearest=LAST_STEPS,
            )
        index = bisect_right(self.segments, budget - 1, key=_start_sample) - 1
        kept, segment = self.segments[:index], self.segments[index]
        size = segment.global_batch_size
        steps, rest = divmod(budget - segment.start_sample, size)
        if budget == segment.end_sample:
            pass  # the segment ends here already, maybe with a shortened step
        elif rest and last_step == "shorten":
            segment = replace(segment, steps=steps + 1, shortfall=size - rest)
        elif rest and last_step == "overshoot":
            # The step runs whole, unless an earlier budget shortened it.
            past = segment.shortfall if segment.steps == steps + 1 else 0
            segment = replace(segment, steps=steps + 1, shortfall=past)
        else:
            segment = replace(segment, steps=steps, shortfall=0)
        if segment.steps:
            kept += (segment,)
        if not kept:
            raise ScheduleError(
                f"samples={budget} is less than the first step of {size} samples, and last_step='drop' leaves out a step that "
                f"the budget does not fill. Nearest: {size} (1 step).",
                field="samples",
                given=budget,
                nearest=(size,),
            )
        return Schedule(kept, self.notes, budget, last_step)

    def continued(self, position: int, rule: Rule | Schedule) -> Schedule:
        """The same past up to sample `position`, then `rule`, whose positions count from the start of the run.

        The budget stays, unless it ends at `position` or `rule` is a schedule with its own. A segment that continues
        unchanged stays one segment, so a schedule continued with itself is equal to itself.

        >>> from batchwright.core.ramp.rules import Constant, Linear
        >>> run = Linear(16, 16, 96, target=32).compile()
        >>> [(s.global_batch_size, s.start_sample) for s in run.continued(160, Constant(64)).segments]
        [(16, 0), (32, 96), (64, 160)]
        >>> run.continued(160, run) == run
        True
        """
        past = self._past(position)
        if isinstance(rule, Schedule):
            planned, notes = rule, rule.notes
            # A step that the new schedule dropped at its end stays dropped.
            budget = min((n for n in (rule.samples, rule.total_samples) if n is not None), default=None)
            if budget is not None and budget <= position:
                raise ScheduleError(
                    f"position={position:,} is not before the end of the new schedule, which ends at sample "
                    f"{budget:,}.",
                    field="position",
                    given=position,
                    nearest=(self.at_sample(budget - 1).start_sample,),
                )
            if rule.at_sample(position).start_sample == position:  # keep its steps, also shortened ones
                segments = _joined(past, rule._after(position, past), planned)
                return Schedule(segments, tuple(dict.fromkeys((*self.notes, *notes))), rule.samples, rule.last_step)
            switches = tuple(Switch(s.start_sample, s.global_batch_size, s.sequence_length) for s in rule.segments)
            unit, policy = "samples", rule.last_step
        else:
            planned, notes, switches, unit, policy = (
                rule.compile(),
                rule.notes(),
                rule.switches(),
                rule.unit,
                self.last_step,
            )
            budget = self.total_samples if self.samples is None else self.samples
            budget = None if budget is None or budget <= position else budget
        future, skipped = walk(switches, unit, past)
        joined = Schedule(_joined(past, future, planned), tuple(dict.fromkeys((*self.notes, *notes, *skipped))))
        return joined if budget is None else joined.until(budget, last_step=policy)

    def _budget(self, samples: int | None, tokens: int | None) -> int:
        """The budget in samples, inside the schedule."""
        if samples is not None and tokens is None:
            field, given, least, budget = "samples", samples, 1, samples
        elif tokens is not None and samples is None:
            least = self.segments[0].sequence_length or 1
            field, given, budget = "tokens", tokens, self.sample_at_token(tokens) if tokens >= least else 0
        else:
            raise ScheduleError("a budget needs exactly one of samples and tokens.", field="samples")
        if budget < 1:
            raise ScheduleError(
                f"{field}={given}: must be at least {least}, one whole sample.",
                field=field,
                given=given,
                nearest=(least,),
            )
        end = self.total_samples
        if end is not None and budget > end:
            raise ScheduleError(
                f"samples={budget:,} is after the end of this schedule, sample {end:,}. Set the budget on the schedule "
                f"without an end, or continue it from {end:,}.",
                field="samples",
                given=budget,
                nearest=(end,),
            )
        return budget

    def _past(self, position: int) -> tuple[Segment, ...]:
        """The segments before `position`, which must be between two steps."""
        if position == self.total_samples:
            return self.segments
        self._check_inside("position", position, self.total_samples)
        step = self.at_sample(position)
        if step.start_sample != position:
            raise ScheduleError(
                f"position={position:,} is inside a step: step {step.step:,} owns samples {step.start_sample:,} to "
                f"{step.end_sample:,}. Nearest: {step.start_sample:,} (before it) or {step.end_sample:,} (after it).",
                field="position",
                given=position,
                nearest=(step.start_sample, step.end_sample),
            )
        segment = self.segments[step.segment]
        cut = (replace(segment, steps=step.step - segment.first_step, shortfall=0),)
        return self.segments[: step.segment] + (cut if cut[0].steps else ())

    def _after(self, position: int, past: Sequence[Segment]) -> list[Segment]:
        """The segments from `position` on, which is between two steps, numbered to follow `past`."""
        at = self.at_sample(position)
        step, token = (past[-1].end_step or 0, past[-1].end_token) if past else (0, 0)
        found: list[Segment] = []
        for segment in self.segments[at.segment :]:
            done = max(0, at.step - segment.first_step)
            steps, start = None if segment.steps is None else segment.steps - done, max(position, segment.start_sample)
            found.append(replace(segment, first_step=step, start_sample=start, steps=steps, start_token=token))
            step, token = found[-1].end_step or 0, found[-1].end_token
        return found

    def _nth(self, index: int, offset: int) -> Step:
        segment = self.segments[index]
        size = segment.global_batch_size
        short = segment.shortfall if offset + 1 == segment.steps else 0
        return Step(segment.first_step + offset, segment.start_sample + offset * size, size - short, index)

    def _check_inside(self, field: str, given: int, end: int | None) -> None:
        if given < 0 or (end is not None and given >= end):
            last = None if end is None else end - 1
            raise ScheduleError(
                f"{field}={given:,} is outside the schedule: its {field}s are counted from 0"
                + (f" to {last:,}. Nearest: {0 if given < 0 else last:,}." if last is not None else ". Nearest: 0."),
                field=field,
                given=given,
                nearest=(0 if given < 0 or last is None else last,),
            )


def walk(switches: Sequence[Switch], unit: Unit, past: Sequence[Segment] = ()) -> tuple[list[Segment], tuple[str, ...]]:
    """The segments that `switches` give after `past`, and a note on the stages that one step skips.

    >>> segments, notes = walk((Switch(0, 16), Switch(10, 24), Switch(12, 32)), "samples")
    >>> [(s.global_batch_size, s.steps) for s in segments], notes
    ([(16, 1), (32, None)], ('One step skips the stage of 24 from 10 samples.',))
    """
    last = past[-1] if past else Segment(0, 0, 1, steps=0, sequence_length=1, start_token=0)
    step, sample, token = last.end_step or 0, last.end_sample or 0, last.end_token
    if unit == "tokens" and token is None:
        raise ScheduleError(
            "thresholds in tokens cannot continue this run: its past has no sequence_length, so the number of tokens is "
            "unknown. Give the earlier rule a sequence_length, or count in samples.",
            field="sequence_length",
        )
    segments: list[Segment] = []
    skipped: list[str] = []
    for index, switch in enumerate(switches):
        size, length = switch.global_batch_size, switch.sequence_length
        steps = None
        if index + 1 < len(switches):
            until = switches[index + 1].at
            if unit == "steps":
                steps = until - step
            elif unit == "samples":
                steps = -((sample - until) // size)  # rounded up: the step that crosses the switch is not split
            else:  # whole samples only, so a threshold in tokens floors to the sample that holds it, as in Megatron
                steps = -(-((until - (token or 0)) // (length or 1)) // size)
            if steps <= 0:
                if segments:  # a switch before the first segment is in the past, not skipped
                    skipped.append(f"{size} from {human(switch.at)} {unit}")
                continue
        segments.append(Segment(step, sample, size, steps, length, token))
        if steps is not None:
            step, sample, token = step + steps, sample + steps * size, segments[-1].end_token
    if not skipped:
        return segments, ()
    shown = ", ".join(skipped[:3]) + (f" and {len(skipped) - 3} more" if len(skipped) > 3 else "")
    return segments, (f"One step skips the stage{'s' * (len(skipped) > 1)} of {shown}.",)


def _joined(past: Sequence[Segment], future: Sequence[Segment], planned: Schedule) -> tuple[Segment, ...]:
    """Past and future; the last segment continues if nothing changes, unless `planned` has a boundary there."""
    last, first = past[-1] if past else None, future[0]
    if last is None or last.steps is None or last.shortfall or _kind(last) != _kind(first):
        return (*past, *future)
    steps = range(first.start_sample - last.global_batch_size + 1, first.start_sample + 1)
    if any(_kind(a) == _kind(b) and b.start_sample in steps for a, b in pairwise(planned.segments)):
        return (*past, *future)
    more = None if first.steps is None else last.steps + first.steps
    return (*past[:-1], replace(last, steps=more, shortfall=first.shortfall), *future[1:])


def _broken_chain(segments: Sequence[Segment]) -> list[Violation]:
    """Violations where the segments do not follow each other: a schedule may come from a file."""
    if not segments:
        return [Violation("a schedule needs at least one segment.", "segments", ())]
    found: list[Violation] = []
    step: int | None = 0
    sample: int | None = 0
    for index, s in enumerate(segments):
        if (s.first_step, s.start_sample) != (step, sample):
            found.append(
                Violation(
                    f"segment {index} starts at step {s.first_step}, sample {s.start_sample}, but the one before it "
                    f"ends at step {step}, sample {sample}.",
                    "segments",
                    index,
                )
            )
        if s.global_batch_size < 1 or (s.steps is not None and s.steps < 1):
            found.append(
                Violation(f"segment {index} has {s.steps} steps of {s.global_batch_size} samples.", "segments", index)
            )
        if not 0 <= s.shortfall < max(1, s.global_batch_size):
            found.append(
                Violation(
                    f"segment {index} has shortfall={s.shortfall}: must be from 0 to {s.global_batch_size - 1}.",
                    "segments",
                    index,
                )
            )
        step, sample = s.end_step, s.end_sample
    return found
