"""A training process from start to end: set up, resume, record, stop. The steps in between are in train.py."""

from __future__ import annotations

import math
import signal
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from batchwright.core.codec import decode, encode
from batchwright.core.errors import BatchwrightError, ConfigError, PlanError, Violation, raise_violations
from batchwright.core.ramp.schedule import Schedule
from batchwright.processes.endings import users_code
from batchwright.rundir import names
from batchwright.rundir.fence import Fence
from batchwright.rundir.files import write_fault
from batchwright.rundir.status import Status, claim_launch, failure_record, last_seen, write_failure, write_status
from batchwright.rundir.trackers import require
from batchwright.runtime.data.order import GlobalOrder
from batchwright.runtime.data.readers import ReadingHosts
from batchwright.runtime.ranks import discover
from batchwright.runtime.state import generators
from batchwright.runtime.state.checkpoint import Checkpoints, Saved
from batchwright.runtime.state.fingerprint import Change, changes, fingerprint
from batchwright.runtime.state.ledger import Ledger
from batchwright.runtime.step.accumulate import StepResult
from batchwright.runtime.step.noise import NoiseScale, NoiseTerms
from batchwright.runtime.task import Task

from .evaluate import Part
from .events import Events, ProgressBar, Tracker
from .process import StopSignals, ThisProcess, wrapped
from .settings import Settings
from .trackers import open_tracker

OnStep = Callable[[StepResult, nn.Module, Optimizer], None]


class Session:
    """The model, position and records of one launch on one rank, from the start of the process to its end."""

    def __init__(
        self,
        task: Task,
        schedule: Schedule,
        settings: Settings,
        process: ThisProcess,
        signals: StopSignals,
        evaluation: Any,
        trackers: Sequence[Tracker],
        may_save: Callable[[], bool] | None,
        on_step: OnStep | None,
    ) -> None:
        self.task, self.schedule, self.settings, self.process, self.signals = task, schedule, settings, process, signals
        # The schedule as given. `self.schedule` of a resumed run begins with the run's own past.
        self.planned = schedule
        self.on_step, self.began = on_step, time.time()
        held = settings.evaluation_samples if evaluation is None else 0
        require(settings.tracker)
        size = len(task.dataset) - held
        self.dataset = Part(task.dataset, 0, size) if held else task.dataset
        self.evaluation = Part(task.dataset, size, held) if held else evaluation
        if settings.dataset_size not in (None, size) and not settings.accept_changes:
            raise PlanError(
                f"dataset_size={settings.dataset_size}, but the task has {size} samples to train"
                + (f" ({size + held} without the {held} of evaluation_samples)" if held else "")
                + f", so its epochs are counted wrongly. Nearest: {size}.",
                field="dataset_size",
                given=settings.dataset_size,
                nearest=(size,),
            )
        if settings.evaluate_every and self.evaluation is None:
            raise ConfigError(
                f"evaluate_every={settings.evaluate_every} has nothing to evaluate: evaluation_samples is 0, and there is "
                "no evaluation dataset.",
                field="evaluation_samples",
                given=0,
            )
        self.order = GlobalOrder(size, settings.seed, settings.shuffle)
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
        self.saved_position: int | None = None
        self.evaluated_position: int | None = None
        self.times = {"setup_seconds": 0.0, "load_seconds": 0.0, "save_seconds": 0.0, "evaluation_seconds": 0.0}
        self.reading: ReadingHosts | None = None
        self.loading: dict[str, Any] = {}
        self.waited_seconds: float = 0.0
        self.events: Events | None = None
        self.ledger: Ledger | None = None
        self.given_trackers = tuple(trackers)
        self.launch = -1  # until it is claimed
        self.claimed = False
        self.may_save = may_save

    def set_up(self) -> None:
        """Build and wrap the model, load the newest checkpoint, open the ledger and the events."""
        settings, process = self.settings, self.process
        if settings.loading_hosts is not None:
            self.reading = ReadingHosts(
                settings.loading_hosts,
                rank=process.rank,
                ranks=process.ranks,
                ranks_per_host=settings.ranks_per_host or discover().local_size,
            )
        self.accumulate_dtype: torch.dtype | None = getattr(torch, settings.accumulate_dtype or "", None)
        self.model = wrapped(self.task.build_model(settings.seed), settings.strategy, process, self.accumulate_dtype)
        self.scaler = None
        if settings.grad_scaler is not None:
            self.scaler = torch.amp.GradScaler(process.device.type, init_scale=settings.grad_scaler)
        with users_code("Task.optimizer failed"):
            self.optimizer = self.task.optimizer(self.model.parameters())
        for group in self.optimizer.param_groups:
            if not 0 <= float(group["lr"]) < math.inf:
                raise ConfigError(
                    f"the optimizer has lr={float(group['lr'])}: must be a finite number, 0 or more.",
                    field="lr",
                    given=float(group["lr"]),
                )
            # Before loading: the rate in a checkpoint is already scaled.
            group.setdefault("initial_lr", float(group["lr"]))
        self.noise = NoiseScale(every=settings.noise_every) if settings.noise_every else None
        self.parameters = sum(p.numel() for p in self.model.parameters())
        self.checkpoints = Checkpoints(
            settings.checkpoints,
            keep=settings.keep,
            asynchronous=settings.asynchronous,
            group=process.saving,
            may_save=lambda: self.may_save is None or self.may_save(),
        )
        self.facts = self._facts()
        with warnings.catch_warnings():
            # The second call of `newest`, below, warns of damage.
            warnings.simplefilter("ignore")
            # Before the claim: a start that is refused must not stop a run that is training.
            self._changes(self.checkpoints.newest(verify=False))
        if process.rank == 0:
            self._claim()
        self.launch = process.broadcast(self.launch)  # from here on no other launch saves
        self.may_save = self.may_save or Fence(settings.root, self.launch)
        self.claimed = True
        saved = self.checkpoints.newest()
        self.saved = saved
        if saved is None:
            generators.seed_rank(settings.seed, 0, process.rank)
        else:
            self._resume(saved)
        self.ledger = Ledger(
            settings.ledger,
            self.order,
            launch=self.launch,
            rank=process.rank,
            ranks=process.ranks,
            start=(self.step, self.position),
            parent=saved.launch if saved else None,
        )
        self.times["setup_seconds"] = time.time() - self.began
        self._open_events()

    def _claim(self) -> None:
        settings = self.settings
        try:
            settings.root.mkdir(parents=True, exist_ok=True)
            self.launch = claim_launch(settings.root, settings.launch)
            self.last_seen = last_seen(settings.root, self.launch)
            if self.may_save is None:
                self.may_save = Fence(settings.root, self.launch).claim()
            self.claimed = True
            self.write_status(self.status("running", None))
        except OSError as error:
            raise write_fault(error, "the run directory", settings.root, "Nothing was changed.") from error

    def _facts(self) -> dict[str, Any]:
        settings = self.settings
        options = {
            # JSON has no NaN and no infinity.
            name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in self.optimizer.defaults.items()
            if isinstance(value, (int, float, str))
        }
        return fingerprint(
            self.order,
            self.schedule,
            self.model,
            self.dataset,
            ranks=self.process.ranks,
            strategy=settings.strategy,
            micro_batch_size=encode(settings.micro_batch_size),
            threads=torch.get_num_threads(),
            optimizer={"name": type(self.optimizer).__name__, **options},
            learning_rate={"shape": encode(settings.learning_rate), "lr_scaling": settings.lr_scaling},
            accumulate_dtype=settings.accumulate_dtype or "that of the parameters",
            grad_scaler="off" if settings.grad_scaler is None else "on",
        )

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
        broken = [c for c in found if c.severity == "breaks"]
        if broken and not settings.accept_changes:
            remedy = "Change it back, start in another directory, or set accept_changes to resume anyway."
            raise_violations(
                PlanError,
                [
                    Violation(
                        f"cannot resume from {saved.name}: {c.message} {remedy}", c.field, self.facts.get(c.field)
                    )
                    for c in broken
                ],
            )
        return found

    def _resume(self, saved: Saved) -> None:
        settings, state, found = self.settings, saved.state, self._changes(saved)
        before = time.time()
        restored = self.checkpoints.load(saved, self.model, self.optimizer)
        if not restored:
            generators.seed_rank(settings.seed, saved.position, self.process.rank)
        self.times["load_seconds"] = time.time() - before
        self.step, self.position, self.tokens = saved.step, saved.position, float(state.get("tokens", 0.0))
        self.saved_position, self.evaluation_loss = saved.position, state.get("evaluation_loss")
        self.skipped_steps = int(state.get("skipped_steps", 0))
        self.nonfinite_steps = int(state.get("nonfinite_steps", 0))
        if self.scaler is not None and state.get("scaler"):
            self.scaler.load_state_dict(dict(state["scaler"]))
        if self.noise is not None:
            self.noise.terms.extend(NoiseTerms(*terms) for terms in state.get("noise", ()))
        past = decode(Schedule, state["fingerprint"]["schedule"])
        if past != self.schedule:
            self.schedule = past.continued(self.position, self.schedule)
            self.facts["schedule"] = encode(self.schedule)
        self.notes = [c.message for c in found]

    def _open_events(self) -> None:
        settings, process = self.settings, self.process
        if process.rank:
            return
        trackers: list[Tracker] = [*self.given_trackers, *(open_tracker(n, settings.root) for n in settings.tracker)]
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
            ranks=process.ranks,
            strategy=settings.strategy,
            device=str(process.device),
            parameters=self.parameters,
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

    def status(self, state: str, reason: str | None, error: dict[str, Any] | None = None) -> Status:
        """The present status."""
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
            ranks=self.process.ranks,
            checkpoint=self.saved.name if self.saved else None,
            tokens=self.tokens,
            loss=self.loss,
            evaluation_loss=self.evaluation_loss,
            signal=signal.Signals(self.signals.received).name if reason == "signal" else None,
            times={**self.times, "started_at": self.began, "written_at": time.time()},
            error=error,
            bare=self.process.bare,
            skipped_steps=self.skipped_steps,
            nonfinite_steps=self.nonfinite_steps,
            loading=self.loading,
        )

    def write_status(self, status: Status) -> None:
        """Write the status, unless a newer launch has taken over the run."""
        if self.may_save is not None and self.may_save():
            write_status(self.settings.root, status)

    def failed(self, error: BaseException) -> None:
        """Write the error to the status files, on the rank that failed; only if this launch has claimed the run."""
        if not self.claimed:
            return
        rank = self.process.rank
        record = failure_record(error, rank)
        try:
            if rank == 0:
                self.write_status(self.status("failed", "error", record))
            elif self.may_save is not None and self.may_save():
                write_failure(self.settings.root, self.launch, record)
        except (OSError, BatchwrightError):  # perhaps the disk has failed; the first error is raised in any case
            pass

    def close(self) -> None:
        """Wait for a save in the background, which needs the process group, and close the files."""
        with ExitStack() as stack:
            if self.events is not None:
                stack.callback(self.events.close)
            if self.ledger is not None:
                stack.callback(self.ledger.finish)
            if hasattr(self, "checkpoints"):
                self.checkpoints.wait()

    def emit(self, kind: str, *, now: bool = False, **values: Any) -> None:
        """Write an event, on rank 0 only; with `now`, before this returns."""
        if self.events is not None:
            self.events.emit(kind, now=now, **values)
