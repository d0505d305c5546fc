"""What every loop does, whatever computes its gradients: its position, and the files of a launch. Without torch and JAX.

`runtime/loop` and `runtime/rl` (torch) and `jax/loop.py` add the model, its checkpoints and the steps.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import time
import traceback
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from typing import Any, NoReturn

from batchwright.core.codec import decode, encode
from batchwright.core.errors import BatchwrightError, PlanError, RunError, Violation, raise_violations
from batchwright.core.ramp.learning_rate import scale
from batchwright.core.ramp.schedule import Schedule, Step
from batchwright.rundir import names
from batchwright.rundir.fence import Fence
from batchwright.rundir.files import write_fault
from batchwright.rundir.status import Status, claim_launch, failure_record, last_seen, write_failure, write_status
from batchwright.rundir.trackers import require
from batchwright.runtime.data.order import GlobalOrder
from batchwright.runtime.state.fingerprint import Change, changes
from batchwright.runtime.state.ledger import Ledger
from batchwright.runtime.state.saved import Saved

from .events import Events, ProgressBar, Tracker, trackers_hang
from .settings import Settings, Spec, read_spec
from .signals import StopSignals
from .trackers import open_tracker


class LoopBase(ABC):
    """The position and the records of one launch on one rank, from the start of the process to its end."""

    order: GlobalOrder
    facts: dict[str, Any]

    def __init__(
        self,
        schedule: Schedule,
        settings: Settings,
        signals: StopSignals,
        *,
        rank: int,
        ranks: int,
        bare: bool,
        may_save: Callable[[], bool] | None = None,
    ) -> None:
        require(settings.tracker)
        self.schedule, self.settings, self.signals = schedule, settings, signals
        # The schedule as given. `self.schedule` of a resumed run begins with the run's own past.
        self.planned = schedule
        self.rank, self.ranks, self.bare, self.may_save = rank, ranks, bare, may_save
        self.began = time.time()
        self.step = self.position = 0
        self.skipped_steps: int = 0
        self.nonfinite_steps: int = 0
        self.nonfinite_in_a_row: int = 0
        self.tokens = 0.0
        self.loss: float | None = None
        self.evaluation_loss: float | None = None
        self.notes: list[str] = []
        self.last_seen: dict[str, Any] = {}
        self.saved: Saved | None = None
        self.times = {"setup_seconds": 0.0, "load_seconds": 0.0, "save_seconds": 0.0, "evaluation_seconds": 0.0}
        self.loading: dict[str, Any] = {}
        self.waited_seconds: float = 0.0
        self.events: Events | None = None
        self.ledger: Ledger | None = None
        self.launch = -1  # until it is claimed
        self.claimed = False

    def run(self) -> Status:
        """Set up, train, save, and return why the loop stopped."""
        self.set_up()
        reason = "end" if self.position == self.schedule.total_samples else None
        if reason is None and self.position == self.settings.end_sample:
            reason = "boundary"
        return self._stop(reason or self._stop_reason(0) or self._train())

    @abstractmethod
    def set_up(self) -> None:
        """Build what is trained, load the newest checkpoint, open the ledger and the events."""

    @abstractmethod
    def _train(self) -> str:
        """Train until there is a reason to stop."""

    @abstractmethod
    def _stop(self, reason: str) -> Status:
        """Save, and write why the loop stopped."""

    def _set_order(self, size: int, held: int = 0) -> None:
        """The order of the samples to train; `held` more are for evaluation."""
        settings = self.settings
        if settings.dataset_size not in (None, size) and not settings.accept_changes:
            raise PlanError(
                f"dataset_size={settings.dataset_size}, but the task has {size} samples to train"
                + (f" ({size + held} without the {held} of evaluation_samples)" if held else "")
                + f", so its epochs are counted wrongly. Nearest: {size}.",
                field="dataset_size",
                given=settings.dataset_size,
                nearest=(size,),
            )
        self.order = GlobalOrder(size, settings.seed, settings.shuffle)

    def _begin(self) -> None:
        """The position of a run without a checkpoint."""
        self.position = self.settings.start_sample
        self.step = self.schedule.at_sample(self.position).step if self.position else 0

    def _claim(self) -> None:
        """On rank 0: take the next number of a launch; from here on no other launch saves."""
        root = self.settings.root
        try:
            root.mkdir(parents=True, exist_ok=True)
            self.launch = claim_launch(root, self.settings.launch)
            self.last_seen = last_seen(root, self.launch)
            if self.may_save is None:
                self.may_save = Fence(root, self.launch).claim()
            self.claimed = True
            self._write_status(self._status("running", None))
        except OSError as error:
            raise write_fault(error, "the run directory", root, "Nothing was changed.") from error

    def _claimed(self, launch: int) -> None:
        """On every rank: the number that rank 0 took."""
        self.launch, self.claimed = launch, True
        self.may_save = self.may_save or Fence(self.settings.root, launch)

    def _check_resume(self, newest: Callable[[], Saved | None]) -> None:
        """Before the claim: a start that is refused must not stop a run that is training."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the look after the claim warns of damage
            self._changes(newest())

    def _changes(self, saved: Saved | None) -> tuple[Change, ...]:
        """What changed since a checkpoint; an error if this launch must not resume from it."""
        settings = self.settings
        if saved is None:
            return ()
        if not settings.resume:
            raise PlanError(
                f"{settings.root} has a checkpoint, {saved.name} at sample {saved.position:,}, and resume is off. Nothing "
                "was changed. Choose an empty directory, or set resume.",
                field="directory",
                given=settings.directory,
            )
        found = changes(saved.state.get("fingerprint", {}), self.facts, saved.position)
        remedy = "Change it back, start in another directory, or set accept_changes to resume anyway."
        broken = [
            Violation(f"cannot resume from {saved.name}: {c.message} {remedy}", c.field, self.facts.get(c.field))
            for c in found
            if c.severity == "breaks"
        ]
        raise_violations(PlanError, [] if settings.accept_changes else broken)
        return found

    def _continue(self, saved: Saved, found: Iterable[Change]) -> None:
        """Take the position and the past of a checkpoint, whose arrays are loaded."""
        state = saved.state
        self.step, self.position, self.tokens = saved.step, saved.position, float(state.get("tokens", 0.0))
        self.skipped_steps = int(state.get("skipped_steps", 0))
        self.nonfinite_steps = int(state.get("nonfinite_steps", 0))
        past = decode(Schedule, state["fingerprint"]["schedule"])
        if past != self.schedule:
            self.schedule = past.continued(self.position, self.schedule)
            self.facts["schedule"] = encode(self.schedule)
        self.notes = [change.message for change in found]

    def _open_ledger(self, rank: int, ranks: int) -> None:
        """The ledger of this rank; ranks that have the same samples share one."""
        self.ledger = Ledger(
            self.settings.ledger,
            self.order,
            launch=self.launch,
            rank=rank,
            ranks=ranks,
            start=(self.step, self.position),
            first_sample=self.settings.start_sample,
            parent=self.saved.launch if self.saved else None,
        )

    def _open_events(self, trackers: Iterable[Tracker] = (), **facts: Any) -> None:
        """Write the first event, on rank 0; `facts` are what the kind of loop knows of itself."""
        self.times["setup_seconds"] = time.time() - self.began
        settings = self.settings
        if self.rank:
            return
        trackers = [*trackers, *(open_tracker(name, settings.root) for name in settings.tracker)]
        if settings.progress:
            trackers.append(ProgressBar(self.schedule.total_samples))
        path = settings.root / names.EVENTS / names.events(self.launch)
        self.events = Events(path, trackers, launch=self.launch)
        self.emit(
            "launch",
            now=True,
            step=self.step,
            samples=self.position,
            nodes=settings.nodes,
            **facts,
            seed=settings.seed,
            dataset_size=self.order.size,
            total_samples=self.schedule.total_samples,
            notes=self.notes,
            resumed_from=self.saved.name if self.saved else None,
            skipped=list(self.saved.skipped) if self.saved else [],
            setup_seconds=self.times["setup_seconds"],
            load_seconds=self.times["load_seconds"],
            lost_seconds=time.time() - self.last_seen["time"] if self.last_seen else None,
            lost=dict(self.last_seen.get("times", {})),
        )

    def _micro_batch_size(self) -> Callable[[Step], int]:
        """One number for all steps, or one for each segment of the given schedule, also after a resume."""
        given, planned = self.settings.micro_batch_size, self.planned
        if isinstance(given, int):
            return lambda step: given
        if len(given) != len(planned.segments):
            raise PlanError(
                f"micro_batch_size has {len(given)} numbers, and the schedule has {len(planned.segments)} segments. Give one "
                "number for each segment, or one for all.",
                field="micro_batch_size",
                given=str(given),
            )
        return lambda step: given[planned.at_sample(step.start_sample).segment]

    def _limited(self) -> Schedule:
        """The schedule up to the end of this launch."""
        end, whole = self.settings.end_sample, self.schedule.total_samples
        if end is None or end == whole:
            return self.schedule
        step = self.schedule.at_sample(end)
        if step.start_sample != end or end < self.position:
            raise PlanError(
                f"end_sample={end:,} must be the end of a step, and not before the position of the run: step {step.step:,} "
                f"trains samples {step.start_sample:,} to {step.end_sample:,}, and the position is {self.position:,}. "
                f"Nearest: {step.start_sample:,} or {step.end_sample:,}.",
                field="end_sample",
                given=end,
                nearest=(step.start_sample, step.end_sample),
            )
        return self.schedule.until(end, last_step="drop")

    def _learning_rate(self) -> Callable[[int], float]:
        """By the first sample of a step: the factor of the optimizer's own rate."""
        shape, rule, schedule = self.settings.learning_rate, self.settings.lr_scaling, self.schedule
        base = schedule.segments[0].global_batch_size

        def factor(sample: int) -> float:
            segment = schedule.segments[schedule.at_sample(sample).segment]
            stage = scale(rule, 1.0, base, segment.global_batch_size)
            return stage if shape is None else shape.at(sample, stage) / shape.peak_lr

        return factor

    def _stage_event(self, plan: Step) -> None:
        """The first step of a stage."""
        size = self.schedule.segments[plan.segment].global_batch_size
        self.emit("stage", stage=plan.segment, step=plan.step, samples=plan.start_sample, global_batch_size=size)

    def _count(self, loss: float, weight: float) -> None:
        """The loss and the weight of an update."""
        self.tokens, self.loss = self.tokens + weight, loss
        self.nonfinite_in_a_row = 0 if math.isfinite(loss) else self.nonfinite_in_a_row + 1
        self.nonfinite_steps += bool(self.nonfinite_in_a_row)

    def _count_rows(self, read: int, trained: int, readers: int, hosts: int | None, loading_hosts: int | None) -> None:
        """Rows read from the dataset by all readers, against those that were trained."""
        self.loading = {
            "readers": readers,
            "hosts": hosts,
            "loading_hosts": loading_hosts,
            "rows_read": read,
            "rows_trained": trained,
            "read_amplification": read / trained if trained else None,
            "wait_seconds": self.waited_seconds,
        }

    def _at_end(self) -> bool:
        return self.position in (self.schedule.total_samples, self.settings.end_sample)

    def _crossed(self, every: int | None, last: int) -> bool:
        """Whether a multiple of `every` lies between the last position and this one."""
        return every is not None and last // every != self.position // every

    def _stop_reason(self, number: int) -> str | None:
        """Why to stop after a step, if a rank has received this signal; at the end of the schedule, the run is complete."""
        if number and self.position != self.schedule.total_samples:
            self.signals.received = number
            return "signal"
        limit = self.settings.max_tokens
        return "tokens" if limit is not None and self.tokens >= limit else None

    def _check_finite(self) -> None:
        """Fail if the loss was not finite in as many steps in a row as the user allows."""
        if self.nonfinite_in_a_row and self.nonfinite_in_a_row == self.settings.stop_after_nonfinite:
            self._fail_nonfinite()

    def _last_step(self) -> str:
        """The last step, as an error names it."""
        return f"step {self.step - 1:,}, at sample {self.position:,}"

    def _fail_nonfinite(self) -> NoReturn:
        steps = self.nonfinite_in_a_row
        saved = f"from checkpoint {self.saved.name} on" if self.saved else "from the start on"
        self.emit("nonfinite", now=True, step=self.step, samples=self.position, steps=steps)
        raise RunError(
            f"the loss was not finite in {steps} step{'s in a row' * (steps > 1)}: {self.loss} in {self._last_step()}. "
            f"The samples {saved} are not in a checkpoint. Look at the learning rate, the precision and the samples of these "
            "steps; stop_after_nonfinite sets the limit, and 0 removes it.",
            field="loss",
            given=str(self.loss),
        )

    def _state(self) -> dict[str, Any]:
        """What a checkpoint of any loop says of the run."""
        return {
            "tokens": self.tokens,
            "fingerprint": self.facts,
            "skipped_steps": self.skipped_steps,
            "nonfinite_steps": self.nonfinite_steps,
            **self.more_state(),
        }

    def more_state(self) -> dict[str, Any]:
        """What a loop of another kind adds to the state of a checkpoint."""
        return {}

    def _saved(self, saved: Saved | None, seconds: float) -> None:
        """Record a checkpoint that is complete."""
        if saved is None:
            return
        self.saved = saved
        self.emit("save", now=True, step=saved.step, samples=saved.position, checkpoint=saved.name, seconds=seconds)
        self._write_status(self._status("running", None))

    def _ended(self, reason: str) -> Status:
        """Write why the loop stopped, when everything is saved."""
        status = self._status("complete" if reason in ("end", "tokens") else "stopped", reason)
        self.emit(
            "stop", reason=reason, step=self.step, samples=self.position, next_stage=status.next_stage, **self.loading
        )
        self._write_status(status)
        return status

    def _status(self, state: str, reason: str | None, error: dict[str, Any] | None = None) -> Status:
        schedule, position = self.schedule, self.position
        next_stage = None
        if position != schedule.total_samples:
            ahead = schedule.at_sample(position)
            segment = schedule.segments[ahead.segment]
            next_stage = {
                "stage": ahead.segment,
                "step": ahead.step,
                "start_sample": position,
                "end_sample": segment.end_sample,
                "global_batch_size": segment.global_batch_size,
            }
        return Status(
            state=state,
            reason=reason,
            launch=self.launch,
            position=position,
            step=self.step,
            stage=schedule.at_sample(position - 1).segment if position else None,
            stages=len(schedule.segments),
            next_stage=next_stage,
            ranks=self.ranks,
            checkpoint=self.saved.name if self.saved else None,
            tokens=self.tokens,
            loss=self.loss,
            evaluation_loss=self.evaluation_loss,
            signal=signal.Signals(self.signals.received).name if reason == "signal" else None,
            times={**self.times, "started_at": self.began, "written_at": time.time()},
            error=error,
            bare=self.bare,
            skipped_steps=self.skipped_steps,
            nonfinite_steps=self.nonfinite_steps,
            loading=self.loading,
        )

    def _write_status(self, status: Status) -> None:
        """Write the status, on rank 0, unless a newer launch has taken over the run."""
        if self.rank == 0 and self.may_save is not None and self.may_save():
            write_status(self.settings.root, status)

    def failed(self, error: BaseException) -> None:
        """Write the error to the status files, on the rank that failed; only if this launch has claimed the run."""
        if not self.claimed:
            return
        record = failure_record(error, self.rank)
        with suppress(OSError, BatchwrightError):  # perhaps the disk has failed; the first error is raised in any case
            self._write_status(self._status("failed", "error", record))
            if self.rank and self.may_save is not None and self.may_save():
                write_failure(self.settings.root, self.launch, record)

    def close(self) -> None:
        """Close the files."""
        with ExitStack() as stack:
            if self.events is not None:
                stack.callback(self.events.close)
            if self.ledger is not None:
                stack.callback(self.ledger.finish)

    def emit(self, kind: str, *, now: bool = False, **values: Any) -> None:
        """Write an event, on rank 0 only; with `now`, before this returns."""
        if self.events is not None:
            self.events.emit(kind, now=now, **values)


def finish(loop: LoopBase) -> Status:
    """Run a loop to its end and close its files; an error is written to the status files, and raised."""
    try:
        status = loop.run()
    except BaseException as error:
        loop.failed(error)
        with suppress(Exception):  # the first error is raised, not one of closing
            loop.close()
        raise
    loop.close()
    return status


def main_of(usage: str | None, arguments: Sequence[str] | None, run: Callable[[Spec], Status]) -> int:
    """`python -m LOOP SPEC.json`: run the spec, or print the usage or the error; the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if len(given) != 1 or given[0].startswith("-"):
        print(usage, file=sys.stderr)
        return 2
    try:
        return run(read_spec(given[0])).exit_code
    except BatchwrightError as error:
        if error.__cause__ is not None and error.field == "task":
            traceback.print_exception(error.__cause__)
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code


def run_process(main: Callable[[], int], joined: Callable[[], bool]) -> NoReturn:
    """Run `main` and exit with its code. `joined`: whether this process is still in a group with others."""
    try:
        code = main()
    except BaseException as error:
        if not joined():
            raise
        # stderr may be a closed file, or on a full disk.
        with suppress(OSError, ValueError):
            traceback.print_exc()
        code = 130 if isinstance(error, KeyboardInterrupt) else 1
        if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
            code = error.code or 0
    leave(code, waits=joined())


def leave(code: int, *, waits: bool = False) -> NoReturn:
    """Exit with a code, without shutting the interpreter down if that would wait.

    After an error that left the group of processes in place, it would leave the group, which waits for processes that are
    blocked in a collective. A tracker that hangs may have registered a function that waits for its server.
    """
    if not waits and not trackers_hang():
        sys.exit(code)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
