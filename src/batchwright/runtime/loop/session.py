"""A training process from start to end: set up, resume, record, stop. The steps in between are in train.py."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from batchwright.core.batch.pipeline import SPLIT_BACKWARD
from batchwright.core.codec import encode
from batchwright.core.errors import ConfigError, PlanError, Violation, raise_violations
from batchwright.core.numbers import nearest_multiples
from batchwright.core.ramp.schedule import Schedule, Step
from batchwright.processes.endings import users_code
from batchwright.runtime.data.loader import default_collate
from batchwright.runtime.data.order import same_length
from batchwright.runtime.data.readers import ReadingHosts
from batchwright.runtime.data.windows import Window
from batchwright.runtime.stages import Stages, build_stages, refuse_tied
from batchwright.runtime.state import generators
from batchwright.runtime.state.checkpoint import Checkpoints, Saved
from batchwright.runtime.state.fingerprint import READING_DIGEST, dataset_digest, fingerprint
from batchwright.runtime.step.accumulate import Accumulator, StepResult
from batchwright.runtime.step.noise import NoiseScale, NoiseTerms
from batchwright.runtime.step.pipeline import stage_indices
from batchwright.runtime.step.pipeline_calls import asked_of
from batchwright.runtime.task import Task

from .base import LoopBase
from .evaluate import Part
from .events import Tracker
from .process import ThisProcess, wrapped, wrapped_stage
from .settings import Settings
from .signals import StopSignals

OnStep = Callable[[StepResult, nn.Module, Optimizer], None]


class Session(LoopBase):
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
        super().__init__(
            schedule,
            settings,
            signals,
            rank=process.rank,
            ranks=process.ranks,
            bare=process.bare,
            may_save=may_save,
        )
        self.task, self.process, self.on_step = task, process, on_step
        held = settings.evaluation_samples if evaluation is None else 0
        self.reading: ReadingHosts | None = None
        if settings.loading_hosts is not None:
            self.reading = ReadingHosts(
                settings.loading_hosts,
                rank=process.rank,
                ranks=process.ranks,
                ranks_per_host=settings.ranks_per_host,
                open_timeout=settings.open_timeout,
            )
        if self.reading is not None:
            length = self.reading.length(task.dataset)
        else:
            length = same_length(process.from_all("len(dataset)", lambda: len(task.dataset)))
        size = length - held
        self.dataset = Part(task.dataset, 0, size, length=length) if held else task.dataset
        self.evaluation = Part(task.dataset, size, held, length=length) if held else evaluation
        self._set_order(size, held)
        if settings.evaluate_every and self.evaluation is None:
            raise ConfigError(
                f"evaluate_every={settings.evaluate_every} has nothing to evaluate: evaluation_samples is 0, and there is "
                "no evaluation dataset.",
                field="evaluation_samples",
                given=0,
            )
        self.saved_position: int | None = None
        self.evaluated_position: int | None = None
        self.accumulator: Accumulator | None = None
        # The micro batch size for which torch's tracer has split the model.
        self.traced_size: int | None = None
        self.given_trackers = tuple(trackers)

    def set_up(self) -> None:
        """Build and wrap the model, load the newest checkpoint, open the ledger and the events."""
        settings, process = self.settings, self.process
        self.accumulate_dtype: torch.dtype | None = getattr(torch, settings.accumulate_dtype or "", None)
        if process.mesh is None:
            self.model = wrapped(
                self.task.build_model(settings.seed), settings.strategy, process, self.accumulate_dtype
            )
        else:
            self.model = self._stages()
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
        described = self.model.described() if isinstance(self.model, Stages) else ()
        untested = None
        if isinstance(self.model, Stages) and self.task.stage is not None:
            untested = refuse_tied(self.task, self.model)
        own = sum(p.numel() for p in self.model.parameters())
        self.parameters = sum(math.prod(shape) for _, shape, _ in described) or own
        self.checkpoints = Checkpoints(
            settings.checkpoints,
            keep=settings.keep,
            asynchronous=settings.asynchronous,
            group=process.saving,
            may_save=lambda: self.may_save is None or self.may_save(),
        )
        self.facts = self._facts()
        self._check_resume(lambda: self.checkpoints.newest(verify=False))
        if process.rank == 0:
            self._claim()
        self._claimed(process.broadcast(self.launch))
        saved = self.checkpoints.newest()
        self.saved = saved
        if saved is None:
            self._begin()
            generators.seed_rank(settings.seed, self.position, process.rank)
        else:
            self._resume(saved)
        self.notes += [untested] if untested else []
        if process.records:
            self._open_ledger(process.data_rank, process.data_ranks)
        self._open_events(
            self.given_trackers,
            ranks=process.ranks,
            strategy=settings.strategy,
            device=str(process.device),
            parameters=self.parameters,
        )

    def _stages(self) -> Stages:
        """This rank's stages of a pipelined model."""
        settings, mesh, process = self.settings, self.process.mesh, self.process
        assert mesh is not None
        ranks, several = mesh["pp"].size(), settings.virtual_stages
        indices = stage_indices(settings.pipeline_schedule, mesh.get_local_rank("pp"), ranks, several)

        def example() -> Any:
            """The arguments of the model for one micro batch, to trace it."""
            sizes = settings.micro_batch_size
            sizes = {sizes} if isinstance(sizes, int) else {*sizes}
            if len(sizes) > 1:
                raise PlanError(
                    f"a model that torch's tracer splits takes micro batches of one size, not of {sorted(sizes)}. Give "
                    "Task.stage, a function that builds a stage, or one micro_batch_size.",
                    field="micro_batch_size",
                    given=sorted(sizes),
                )
            size = self.traced_size = sizes.pop() // (settings.inner_microbatches or 1)
            raise_violations(PlanError, self._not_traced(size))
            rows = [self.dataset[index % len(self.dataset)] for index in range(size)]
            batch = (self.task.collate or default_collate)(rows)
            return asked_of(
                self.task.loss_of, Window(batch, Step(0, 0, size, 0), 0, 1, range(size)), torch.device("cpu")
            )

        modules = build_stages(self.task, settings.seed, indices, ranks * several, example)
        split = settings.pipeline_schedule in SPLIT_BACKWARD
        plain = split or process.data_ranks == 1 or settings.noise_every or settings.accumulate_dtype
        wrapper = "sharded" if settings.strategy == "fsdp2" else "ours" if plain else "ddp"
        parts = [wrapped_stage(module, wrapper, process, self.accumulate_dtype) for module in modules]
        return Stages(parts, indices, ranks * several, mesh.get_group("pp"))

    def _not_traced(self, size: int) -> list[Violation]:
        """Evaluations of other micro batches than those of a traced model: it may have fixed their size."""
        found: list[Violation] = []
        given, whole = self.settings.evaluation_batch_size, size * self.process.data_ranks
        if self.evaluation is None:
            return found
        why = f"torch's tracer splits the model for micro batches of {size}, and evaluation passes the same stages"
        if given not in (None, size):
            message = f"evaluation_batch_size={given}: {why}. Nearest: {size}; or give Task.stage."
            found.append(Violation(message, "evaluation_batch_size", given, (size,)))
        if rest := len(self.evaluation) % whole:
            count = len(self.evaluation)
            near = nearest_multiples(whole, count)
            message = (
                f"evaluation_samples={count}: {why}; on {self.process.data_ranks} data-parallel ranks {count} samples leave "
                f"{rest} of {whole}. Nearest: {' or '.join(map(str, near))}; or give Task.stage."
            )
            found.append(Violation(message, "evaluation_samples", count, near))
        return found

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
            self._dataset_digest(),
            ranks=self.process.ranks,
            strategy=settings.strategy,
            micro_batch_size=encode(settings.micro_batch_size),
            threads=torch.get_num_threads(),
            optimizer={"name": type(self.optimizer).__name__, **options},
            learning_rate={"shape": encode(settings.learning_rate), "lr_scaling": settings.lr_scaling},
            accumulate_dtype=settings.accumulate_dtype or "that of the parameters",
            grad_scaler="off" if settings.grad_scaler is None else "on",
            pipeline=f"{settings.pipeline_parallel} ranks, {settings.virtual_stages} stages each",
        )

    def _dataset_digest(self) -> str | None:
        """Read by one rank: 10,000 that read the same samples would be a burden for the storage, and some may not read."""

        def digest() -> str | None:
            return dataset_digest(self.dataset, self.order.size)

        if self.reading is not None:
            return self.reading.from_first(READING_DIGEST, digest)
        return self.process.from_first(READING_DIGEST, digest)

    def _resume(self, saved: Saved) -> None:
        settings, state, found = self.settings, saved.state, self._changes(saved)
        before = time.time()
        restored = self.checkpoints.load(saved, self.model, self.optimizer)
        if not restored:
            generators.seed_rank(settings.seed, saved.position, self.process.rank)
        self.times["load_seconds"] = time.time() - before
        self._continue(saved, found)
        self.saved_position, self.evaluation_loss = saved.position, state.get("evaluation_loss")
        if self.scaler is not None and state.get("scaler"):
            self.scaler.load_state_dict(dict(state["scaler"]))
        if self.noise is not None:
            self.noise.terms.extend(NoiseTerms(*terms) for terms in state.get("noise", ()))

    def close(self) -> None:
        """Wait for a save in the background, which needs the process group, and close the files."""
        with ExitStack() as stack:
            stack.callback(super().close)
            if hasattr(self, "checkpoints"):
                self.checkpoints.wait()
