"""Which steps an adapter trains, in which micro batches: from a rule, a plan or a ramp, or from the `batchwright run` around it.

The only file of `adapters` that reads the environment: `batchwright run` passes its numbers to a command in there.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchwright.core import codec
from batchwright.core.batch.plan import BatchPlan
from batchwright.core.errors import ConfigError, EnvironmentFault, RunError
from batchwright.core.nodes.policies import Stage
from batchwright.core.ramp.ramp import Ramp
from batchwright.core.ramp.rules import Constant
from batchwright.core.ramp.schedule import Rule, Schedule, Step
from batchwright.rundir import names
from batchwright.rundir.files import read_json


@dataclass(frozen=True)
class UnderRun:
    """What `batchwright run` tells the processes of a launch."""

    directory: Path
    launch: int
    status_file: Path
    start_sample: int
    end_sample: int
    stop_signal: signal.Signals = signal.SIGTERM
    """Asks the command to save and stop (`--stop-signal`)."""


def under_run(environment: Mapping[str, str] | None = None) -> UnderRun | None:
    """The launch of `batchwright run` that started this process; None if another program did.

    >>> under_run({})
    >>> under_run({"BATCHWRIGHT_RUN_DIR": "r", "BATCHWRIGHT_LAUNCH": "2", "BATCHWRIGHT_STATUS_FILE": "r/s",
    ...            "BATCHWRIGHT_START_SAMPLE": "64", "BATCHWRIGHT_END_SAMPLE": "128"}).end_sample
    128
    """
    env = os.environ if environment is None else environment
    if "BATCHWRIGHT_STATUS_FILE" not in env:
        return None
    texts = {name: env.get(f"BATCHWRIGHT_{name}", "") for name in ("LAUNCH", "START_SAMPLE", "END_SAMPLE")}
    for name, text in texts.items():
        if not text.isdecimal():
            raise EnvironmentFault(
                f"BATCHWRIGHT_{name}={text!r}: must be an integer, which batchwright run sets. Start the script with "
                "batchwright run, or remove BATCHWRIGHT_STATUS_FILE from its environment.",
                field=f"BATCHWRIGHT_{name}",
                given=text,
            )
    stop = env.get("BATCHWRIGHT_STOP_SIGNAL", "SIGTERM")
    if stop not in signal.Signals.__members__:
        raise EnvironmentFault(
            f"BATCHWRIGHT_STOP_SIGNAL={stop!r}: must be the name of a signal, such as SIGTERM.",
            field="BATCHWRIGHT_STOP_SIGNAL",
            given=stop,
        )
    return UnderRun(
        directory=Path(env.get("BATCHWRIGHT_RUN_DIR", "")),
        launch=int(texts["LAUNCH"]),
        status_file=Path(env["BATCHWRIGHT_STATUS_FILE"]),
        start_sample=int(texts["START_SAMPLE"]),
        end_sample=int(texts["END_SAMPLE"]),
        stop_signal=signal.Signals[stop],
    )


@dataclass(frozen=True)
class Course:
    """The steps of a run up to its end, and the micro batch of each segment; one number stands for all segments."""

    schedule: Schedule
    micro_batch_sizes: tuple[int, ...]
    allow_ragged: bool = False

    def micro(self, step: Step) -> int:
        """Samples of a micro batch in this step."""
        return self.micro_batch_sizes[step.segment if len(self.micro_batch_sizes) > 1 else 0]

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.schedule.total_steps or 0

    @property
    def samples(self) -> int:
        """Samples of the whole run."""
        return self.schedule.total_samples or 0

    def step_at(self, position: int) -> int:
        """Optimizer steps before `position`.

        >>> Course(Constant(8).compile().until(20), (4,)).step_at(20)
        3
        """
        return self.steps if position >= self.samples else self.schedule.at_sample(position).step


def course(
    source: Schedule | Rule | Ramp | BatchPlan | None,
    *,
    micro_batch_size: int,
    budget: Callable[[Schedule], int],
    allow_ragged: bool = False,
    run: UnderRun | None = None,
) -> Course:
    """The course of a run. A plan or a ramp also gives the micro batch; `micro_batch_size` is used where none does.

    `budget` says how many samples to train where the schedule has no end: what the framework's own settings mean.
    With `run` the schedule is that of the run, and `source` may be None; if given, it must be the same.

    >>> course(Constant(8), micro_batch_size=4, budget=lambda schedule: 24).steps
    3
    """
    micro, ragged = (micro_batch_size,), allow_ragged
    stages: tuple[Stage, ...] = ()
    planned = _planned(run, micro_batch_size, allow_ragged) if run else None
    if planned is not None:
        if source is not None and (given := course(source, micro_batch_size=1, budget=budget).schedule).segments != (
            planned.schedule.segments
        ):
            raise ConfigError(
                f"schedule={_told(given)}, but batchwright run trains {_told(planned.schedule)}. Leave schedule out: under "
                "batchwright run it is that of the run.",
                field="schedule",
                given=_told(given),
            )
        return planned
    if isinstance(source, Ramp):
        schedule = source.schedule
        if source.placement is not None:
            stages = source.placement.stages
            ragged = allow_ragged or any(s.ragged for s in stages)
    elif isinstance(source, BatchPlan):
        schedule = Constant(source.global_batch_size).compile()
        micro, ragged = (source.micro_batch_size,), allow_ragged or source.ragged
    elif isinstance(source, Rule):
        schedule = source.compile()
    elif isinstance(source, Schedule):
        schedule = source
    else:
        raise ConfigError(
            f"schedule={source!r}: must be a rule (batchwright.Thresholds(…)), a compiled schedule, a plan or a ramp"
            + (". It may be left out under batchwright run only." if source is None else "."),
            field="schedule",
            given=type(source).__name__,
        )
    if schedule.total_samples is None:
        schedule = schedule.until(samples=budget(schedule))
    return Course(schedule, _micro_batch_sizes(schedule, stages, micro_batch_size) if stages else micro, ragged)


def _micro_batch_sizes(schedule: Schedule, stages: Sequence[Stage], before: int) -> tuple[int, ...]:
    """The micro batch of each segment. A ramp with a past has no stages for what was trained: `before` stands there."""
    by_index, first = {stage.index: stage for stage in stages}, min(stage.index for stage in stages)
    for index, segment in enumerate(schedule.segments[first:], start=first):
        stage = by_index.get(index)
        placed = stage and (stage.global_batch_size, stage.start_sample)
        if placed != (segment.global_batch_size, segment.start_sample):
            raise ConfigError(
                f"segment {index} of the schedule has the global batch {segment.global_batch_size} from sample "
                f"{segment.start_sample:,} on, but the stage with this number has "
                + (f"{placed[0]} from sample {placed[1]:,} on." if placed else "none: it is missing."),
                field="schedule",
                given=index,
            )
    return tuple(by_index[i].micro_batch_size if i >= first else before for i in range(len(schedule.segments)))


def _planned(run: UnderRun, micro_batch_size: int, allow_ragged: bool) -> Course:
    """The schedule and the micro batches in the plan of a run."""
    document: Any = read_json(run.directory / names.PLAN)
    try:
        schedule = codec.read(Schedule, document["schedule"])
        stages = codec.read(tuple[Stage, ...], document["stages"])
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(f"{run.directory / names.PLAN} is damaged: {error}.", field=names.PLAN) from None
    sizes = _micro_batch_sizes(schedule, stages, micro_batch_size)
    return Course(schedule, sizes, allow_ragged or any(s.ragged for s in stages))


def _told(schedule: Schedule) -> str:
    sizes = " -> ".join(str(s.global_batch_size) for s in schedule.segments[:8])
    return f"global batch {sizes}, {schedule.total_samples or 0:,} samples"
