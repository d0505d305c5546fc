"""The records of a run: its plan, one manifest per launch, how a launch ended. All are JSON files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from batchwright.core import codec
from batchwright.core.batch.request import BatchRequest
from batchwright.core.nodes.feasibility import StageRules
from batchwright.core.nodes.policies import Launch, Stage
from batchwright.core.ramp.request import RampRequest
from batchwright.core.ramp.schedule import Schedule

TASK, COMMAND = "task", "command"


@dataclass(frozen=True)
class Options:
    """How a run is launched and supervised; every field is a flag or a key of the same name."""

    engine: str = "local"
    threads: int = 1  # per rank: one machine often has more ranks than cores
    max_retries: int = 3  # in a row, without a new checkpoint
    retry_seconds: float = 5.0  # before the first retry; doubled for each further one
    longest_retry_seconds: float = 300.0
    stall_seconds: float | None = 600.0  # without progress; None: never
    start_seconds: float = 1800.0  # until the first step, and for a save: compiling, loading and writing may take long
    grace_seconds: float = 60.0  # from the request for a checkpoint to the kill
    stop_signal: str = "SIGTERM"  # asks a command to save and stop; a task gets SIGUSR1
    checkpoint_samples: int | None = None  # None: at boundaries, and about twenty times in all
    keep: int = 3  # checkpoints
    strategy: str = "auto"
    seed: int = 0
    stop_after_nonfinite: int = 10  # steps in a row with a loss that is NaN or infinite; 0: never
    tracker: tuple[str, ...] = ()  # where a task records its numbers
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])  # of the loop, by its own names
    slurm: Mapping[str, Any] = field(default_factory=dict[str, Any])  # settings of the site: launch/slurm/site.py

    def retry_after(self, failures: int) -> float:
        """How long to wait after `failures` failures in a row."""
        return min(self.longest_retry_seconds, self.retry_seconds * 2 ** min(failures - 1, 60))


@dataclass(frozen=True)
class RunPlan:
    """All that a supervisor needs to start or to continue: what to train, in which stages, in which launches."""

    kind: str
    target: str  # FILE.py:function with an absolute path, or the program's name
    arguments: Mapping[str, Any]
    command: tuple[str, ...]
    position_command: tuple[str, ...]
    working_directory: str
    schedule: Schedule
    stages: tuple[Stage, ...]
    launches: tuple[Launch, ...]
    devices_per_node: int
    rules: StageRules  # how a stage may be split again: fewer nodes, smaller micro batches
    options: Options
    notes: tuple[str, ...] = ()
    batch: BatchRequest | None = None  # what was asked for, so that a part of it can be changed; None in older plans
    ramp: RampRequest | None = None
    schema: int = codec.SCHEMA

    @property
    def total_samples(self) -> int:
        """Where the run ends."""
        return self.schedule.total_samples or 0

    @property
    def start_sample(self) -> int:
        """Where the run begins: the samples before it were trained elsewhere."""
        return self.ramp.start_sample if self.ramp else 0

    def launch_at(self, position: int) -> Launch:
        """The launch that trains the sample at `position`."""
        return next(launch for launch in self.launches if launch.end_sample is None or position < launch.end_sample)

    def stage_at(self, position: int) -> Stage:
        """The stage that owns the sample at `position`; at the end, the last."""
        return next((s for s in self.stages if s.end_sample is None or position < s.end_sample), self.stages[-1])

    def stage_before(self, position: int, start: int = 0) -> Stage:
        """The stage of the last trained sample; at a boundary, the one that just ended."""
        return self.stage_at(max(position - 1, start))

    def step_at(self, position: int) -> int:
        """The number of optimizer steps before `position`."""
        if position >= self.total_samples:
            return self.schedule.total_steps or 0
        return self.schedule.at_sample(position).step

    def resplit(self, stage: Stage, nodes: int, limit: int) -> Stage | None:
        """The same global batch on `nodes` in micro batches of at most `limit`, or None where no split is valid.

        A stage that is not ragged does not become ragged: a command may compute another gradient then.
        """
        fit = replace(self.rules, allow_ragged=stage.ragged).resplit(stage.global_batch_size, nodes, limit)
        if fit is None:
            return None
        return replace(
            stage,
            nodes=fit.nodes,
            data_parallel_size=fit.data_parallel_size,
            micro_batch_size=fit.micro_batch_size,
            accumulation_steps=fit.accumulation_steps,
            ragged=fit.ragged,
            step_seconds=None,
            hours=None,
            node_hours=None,
        )

    def smaller(self, stage: Stage) -> list[Stage]:
        """The stage, then its splits on the same nodes in smaller and smaller micro batches, down to the smallest valid."""
        found = [stage]
        while made := self.resplit(stage, stage.nodes, found[-1].micro_batch_size - 1):
            found.append(made)
        return found

    def ranks(self, launch: Launch) -> int:
        """The number of processes of a launch: earlier launches may have had other devices per node."""
        world = self.rules.world
        replica = world.tensor_parallel * world.pipeline_parallel * world.context_parallel
        return self.stages[launch.stages[0]].data_parallel_size * replica


@dataclass(frozen=True)
class Manifest:
    """One started launch. `number` counts every start of the run, retries included; the fence compares it."""

    number: int
    launch: int
    nodes: int
    ranks: int
    start_sample: int
    end_sample: int
    command: tuple[str, ...]
    environment: Mapping[str, str]
    working_directory: str
    started: float
    handle: Mapping[str, Any] | None = None


_HANDLES: Mapping[str, Mapping[str, type]] = {
    "local": {"pid": int, "boot": str, "directory": str, "stop_signal": str},
    "slurm": {"job": str, "directory": str},
}


def is_handle(handle: Mapping[str, Any]) -> bool:
    """Whether a handle that was read from a file has what its engine needs."""
    needed = _HANDLES.get(str(handle.get("engine")))
    return needed is not None and all(isinstance(handle.get(name), kind) for name, kind in needed.items())


@dataclass(frozen=True)
class Failure:
    """Why a launch did not reach its end: the rank, how it ended, the last lines of its log."""

    reason: str
    rank: int | None = None
    code: int | None = None
    lines: tuple[str, ...] = ()
    kind: str = "crash"  # crash | oom | nonfinite | stalled | refused | overshot
    advice: str | None = None


@dataclass(frozen=True)
class Ending:
    """How a launch ended: done, stopped or failed, and the position of the run after it."""

    number: int
    outcome: str
    position: int
    ended: float
    code: int | None = None
    failure: Failure | None = None
    first_step: float | None = None  # when its first step ended
    last_step: float | None = None  # when its last step ended
    saved: float | None = None  # when its last checkpoint was complete
    loaded: float | None = None  # when it was ready to train
    load_seconds: float | None = None  # spent on loading the checkpoint before that


@dataclass(frozen=True)
class LaunchProgress:
    """How far a running launch is; times are seconds since the epoch, None where unknown."""

    position: int
    changed: float | None = None  # when its files last changed
    first_step: float | None = None
    last_step: float | None = None
    saved: float | None = None
    saved_position: int = 0
    saving: bool = False  # a save has begun and not ended
    nonfinite: bool = False  # it failed because its loss was not finite
    loaded: float | None = None
    load_seconds: float | None = None
    loss: float | None = None
    tokens_per_second: float | None = None
    samples_per_second: float | None = None
    trouble: str | None = None  # of a tracker, last
