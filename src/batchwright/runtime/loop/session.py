"""One life of a training process: built, resumed, recorded, ended. What it does in between is loop.py's."""

from __future__ import annotations

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
from batchwright.rundir import names
from batchwright.rundir.fence import Fence
from batchwright.rundir.files import write_fault, write_json
from batchwright.rundir.status import Status, error_record, last_seen, write_status
from batchwright.runtime.data.order import GlobalOrder
from batchwright.runtime.state import generators
from batchwright.runtime.state.checkpoint import Checkpoints, Saved
from batchwright.runtime.state.fingerprint import Change, changes, fingerprint
from batchwright.runtime.state.ledger import Ledger, next_launch
from batchwright.runtime.step.accumulate import StepResult
from batchwright.runtime.step.noise import NoiseScale, NoiseTerms
from batchwright.runtime.task import Task

from .evaluate import Part
from .events import Events, TensorBoard, Tracker
from .process import StopSignals, World, wrapped
from .progress import Progress
from .settings import Settings

OnStep = Callable[[StepResult, nn.Module, Optimizer], None]


class Life:
    """A model, its position and its records, from the start of a process to its end."""

    def __init__(
        self,
        task: Task,
        schedule: Schedule,
        settings: Settings,
        world: World,
        signals: StopSignals,
        evaluation: Any,
        trackers: Sequence[Tracker],
        may_save: Callable[[], bool] | None,
        on_step: OnStep | None,
    ) -> None:
        self.task, self.schedule, self.settings, self.world, self.signals = task, schedule, settings, world, signals
        self.planned = schedule  # as it was given: what a run resumed makes of it has its own past before it
        self.on_step, self.began = on_step, time.time()
        held = settings.evaluation_samples if evaluation is None else 0
        size = len(task.dataset) - held
        self.dataset = Part(task.dataset, 0, size) if held else task.dataset
        self.evaluation = Part(task.dataset, size, held) if held else evaluation
        if settings.evaluate_every and self.evaluation is None:
            raise ConfigError(
                f"evaluate_every={settings.evaluate_every} has nothing to evaluate: evaluation_samples is 0, and no "
                "evaluation dataset was given.",
                field="evaluation_samples",
                given=0,
            )
        self.order = GlobalOrder(size, settings.seed, settings.shuffle)
        self.step = self.position = self.skipped_steps = 0
        self.tokens, self.loss, self.evaluation_loss = 0.0, None, None
        self.saved: Saved | None = None
        self.saved_position: int | None = None
        self.evaluated_position: int | None = None
        self.times = {"setup_seconds": 0.0, "load_seconds": 0.0, "save_seconds": 0.0, "evaluation_seconds": 0.0}
        self.events: Events | None = None
        self.ledger: Ledger | None = None
        self.given_trackers = tuple(trackers)
        number = settings.launch
        if number is None:
            current = Fence.current(settings.root) if world.rank == 0 else None
            number = max(next_launch(settings.ledger), (-1 if current is None else current) + 1)
        self.launch, self.claimed = world.tell(number), False
        self.may_save = may_save or Fence(settings.root, self.launch)

    def set_up(self) -> None:
        """Build, wrap, load what was saved last, open the ledger and the events."""
        settings, world = self.settings, self.world
        self.accumulate_dtype: torch.dtype | None = getattr(torch, settings.accumulate_dtype or "", None)
        self.model = wrapped(self.task.build_model(settings.seed), settings.strategy, world, self.accumulate_dtype)
        self.scaler = None
        if settings.grad_scaler is not None:
            self.scaler = torch.amp.GradScaler(world.device.type, init_scale=settings.grad_scaler)
        self.optimizer = self.task.optimizer(self.model.parameters())
        for group in self.optimizer.param_groups:
            group.setdefault("initial_lr", float(group["lr"]))  # before loading: the checkpoint's is the base, too
        self.noise = NoiseScale(every=settings.noise_every) if settings.noise_every else None
        self.parameters = sum(p.numel() for p in self.model.parameters())
        self.checkpoints = Checkpoints(
            settings.checkpoints, keep=settings.keep, asynchronous=settings.asynchronous, group=world.saving,
            may_save=self.may_save,
        )  # fmt: skip
        self.facts = self._facts()
        with warnings.catch_warnings():  # damage is named below, once
            warnings.simplefilter("ignore")
            self._changes(self.checkpoints.newest(verify=False))  # a refused start leaves a live run alone
        if world.rank == 0:
            self._claim()
        world.largest(0)  # from here on no other launch saves
        self.claimed = True
        saved = self.checkpoints.newest()
        self.saved = saved
        if saved is None:
            generators.seed_rank(settings.seed, 0, world.rank)
        else:
            self._resume(saved)
        self.ledger = Ledger(
            settings.ledger, self.order, launch=self.launch, rank=world.rank, ranks=world.ranks,
            start=(self.step, self.position), parent=saved.launch if saved else None,
        )  # fmt: skip
        self.times["setup_seconds"] = time.time() - self.began
        self._open_events()

    def _claim(self) -> None:
        settings = self.settings
        try:
            settings.root.mkdir(parents=True, exist_ok=True)
            self.last_seen = last_seen(settings.root, self.launch)
            if isinstance(self.may_save, Fence):
                self.may_save.claim()
            self.claimed = True
            self.write_status(self.status("running", None))
        except OSError as error:
            raise write_fault(error, "the run directory", settings.root, "Nothing was changed.") from error

    def _facts(self) -> dict[str, Any]:
        settings = self.settings
        options = {k: v for k, v in self.optimizer.defaults.items() if isinstance(v, (int, float, str))}
        return fingerprint(
            self.order, self.schedule, self.model, self.dataset, ranks=self.world.ranks, strategy=settings.strategy,
            micro_batch_size=encode(settings.micro_batch_size), threads=torch.get_num_threads(),
            optimizer={"name": type(self.optimizer).__name__, **options},
            learning_rate={"shape": encode(settings.learning_rate), "lr_scaling": settings.lr_scaling},
            accumulate_dtype=settings.accumulate_dtype or "that of the parameters",
            grad_scaler="off" if settings.grad_scaler is None else "on",
        )  # fmt: skip

    def _changes(self, saved: Saved | None) -> tuple[Change, ...]:
        """What changed since a checkpoint; raises where this launch must not go on from it."""
        settings = self.settings
        if saved is None:
            return ()
        if not settings.resume:
            raise PlanError(
                f"{settings.root} has a checkpoint, {saved.name} at sample {saved.position:,}, and resume is off: nothing "
                "was changed. Choose an empty directory, or let it go on.",
                field="directory",
                given=settings.directory,
            )
        found = changes(saved.state.get("fingerprint", {}), self.facts, saved.position)
        broken = [c for c in found if c.severity == "breaks"]
        if broken and not settings.accept_changes:
            raise_violations(PlanError, [
                Violation(f"cannot go on from {saved.name}: {c.message} Restore it, start in another directory, or set "
                          "accept_changes to go on all the same.", c.field, self.facts.get(c.field)) for c in broken
            ])  # fmt: skip
        return found

    def _resume(self, saved: Saved) -> None:
        settings, state, found = self.settings, saved.state, self._changes(saved)
        before = time.time()
        restored = self.checkpoints.load(saved, self.model, self.optimizer)
        if not restored:
            generators.seed_rank(settings.seed, saved.position, self.world.rank)
        self.times["load_seconds"] = time.time() - before
        self.step, self.position, self.tokens = saved.step, saved.position, float(state.get("tokens", 0.0))
        self.saved_position, self.evaluation_loss = saved.position, state.get("evaluation_loss")
        self.skipped_steps = int(state.get("skipped_steps", 0))
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
        settings, world = self.settings, self.world
        if world.rank:
            return
        trackers = list(self.given_trackers)
        if settings.tensorboard:
            trackers.append(TensorBoard(settings.root / "tensorboard"))
        if settings.progress:
            trackers.append(Progress(self.schedule.total_samples))
        path = settings.root / names.EVENTS / names.events(self.launch)
        self.events = Events(path, trackers, launch=self.launch)
        lost = time.time() - self.last_seen["time"] if self.last_seen else None
        self.emit(
            "launch", step=self.step, samples=self.position, ranks=world.ranks, strategy=settings.strategy,
            device=str(world.device), parameters=self.parameters, notes=getattr(self, "notes", []),
            resumed_from=self.saved.name if self.saved else None, skipped=list(self.saved.skipped) if self.saved else [],
            setup_seconds=self.times["setup_seconds"], load_seconds=self.times["load_seconds"], lost_seconds=lost,
            lost=dict(self.last_seen.get("times", {})) if self.last_seen else {},
        )  # fmt: skip

    def status(self, state: str, reason: str | None, error: dict[str, Any] | None = None) -> Status:
        """The status as it is now."""
        number, end = self.signals.received, self.schedule.total_samples
        ahead = None if self.position == end else self.schedule.at_sample(self.position)
        following = None
        if ahead is not None:
            segment = self.schedule.segments[ahead.segment]
            following = {"stage": ahead.segment, "step": ahead.step, "start_sample": self.position,
                         "end_sample": segment.end_sample, "global_batch_size": segment.global_batch_size}  # fmt: skip
        stage = self.schedule.at_sample(self.position - 1).segment if self.position else None
        return Status(
            state, reason, self.launch, self.position, self.step, stage, len(self.schedule.segments), following,
            self.world.ranks, self.saved.name if self.saved else None, self.tokens, self.loss, self.evaluation_loss,
            signal.Signals(number).name if reason == "signal" else None,
            {**self.times, "started_at": self.began, "written_at": time.time()}, error, self.world.bare,
            skipped_steps=self.skipped_steps,
        )  # fmt: skip

    def write_status(self, status: Status) -> None:
        """Write the status, unless a newer launch writes there now."""
        if self.may_save():
            write_status(self.settings.root, status)

    def failed(self, error: BaseException) -> None:
        """Leave word of what went wrong, on whichever rank it did; not over a run that this launch never took over."""
        if not self.claimed:
            return
        record, root = error_record(error, self.world.rank), self.settings.root
        try:
            if self.world.rank == 0:
                self.write_status(self.status("failed", "error", record))
            elif self.may_save():
                path = root / names.status(self.launch, self.world.rank)
                write_json(path, {"schema": 1, "state": "failed", "error": record})
        except (OSError, BatchwrightError):
            pass  # the disk may be what failed; the error itself is raised

    def close(self) -> None:
        """Wait for a save in the background, while there is a group for it, and close the files."""
        with ExitStack() as stack:
            for part in (self.events and self.events.close, self.ledger and self.ledger.finish):
                if part:
                    stack.callback(part)
            if hasattr(self, "checkpoints"):
                self.checkpoints.wait()

    def emit(self, kind: str, **values: Any) -> None:
        """An event, from rank 0."""
        if self.events is not None:
            self.events.emit(kind, **values)
