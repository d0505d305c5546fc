"""The loop: `train(task, schedule, settings)`, from its newest checkpoint to its end, a boundary or a signal.

It combines the parts of `runtime` (docs/own_loop.md builds the same loop step by step):

    saved = checkpoints.newest();  position = checkpoints.load(saved, …) if saved else 0
    for step in accumulator.steps(Loader(dataset, order, StepSampler(schedule, …, start=position))):
        for micro in step:
            step.backward(*task.loss_of(model, micro.data));  ledger.fed(micro.ids)
        result = step.apply(optimizer, learning_rate=…)
        ledger.applied(…);  position = result.end_sample
        evaluate, save or stop if it is time

The position advances with the optimizer's step and is saved with the weights. Samples that were only prefetched or
accumulated when a process dies do not count as trained.

As a process: `python -m batchwright.runtime.loop SPEC.json`, alone or under torchrun (`settings.py` has the format).
`RUN/status.json` says why it ended. Exit codes: 0 if the run is complete, or if a launcher started the process and it
stopped as asked; without a launcher 75 at the end of a launch and 130 after a signal; errors 2, 4, 5 as everywhere.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor

from batchwright.core.ramp.schedule import Schedule, Step
from batchwright.rundir.status import Status
from batchwright.runtime.data.loader import Loader
from batchwright.runtime.data.sampler import StepSampler, micro_steps
from batchwright.runtime.device import pins, to_device
from batchwright.runtime.stages import Stages
from batchwright.runtime.step.accumulate import Accumulator, GradientStep, StepResult
from batchwright.runtime.step.pipeline import PipelineAccumulator, PipelineStep, check_steps
from batchwright.runtime.task import Task, load_task

from .base import finish, main_of
from .evaluate import Unread, evaluate
from .events import Tracker
from .process import joined, without_worker_failures
from .session import OnStep, Session
from .settings import Settings
from .signals import StopSignals

_ALIVE_SECONDS = 1.0  # between two events of a long evaluation

__all__ = ["Settings", "Status", "main", "train"]


def train(
    task: Task,
    schedule: Schedule,
    settings: Settings,
    *,
    evaluation: Any = None,
    trackers: Sequence[Tracker] = (),
    may_save: Callable[[], bool] | None = None,
    on_step: OnStep | None = None,
) -> Status:
    """Train `task` along `schedule`, from the newest checkpoint in the directory; alone, or on every rank of a group.

    `evaluation`: a dataset to use instead of the held-out samples. `may_save`: a function to use instead of the fence
    `RUN/launch.json`. `on_step` is called with every result, on every rank.
    """
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    with ExitStack() as stack:
        process = stack.enter_context(joined(settings.device, settings.strategy, settings.pipeline_parallel))
        signals = stack.enter_context(StopSignals())
        loop = Loop(task, schedule, settings, process, signals, evaluation, trackers, may_save, on_step)
        return finish(loop)


class Loop(Session):
    """The training steps of a session."""

    def _train(self) -> str:
        settings, process, ledger = self.settings, self.process, self.ledger
        accumulator = self._accumulator()
        micro_of = self._micro_batch_size()
        sampler = StepSampler(
            self._limited(),
            micro_of,
            process.data_rank,
            process.data_ranks,
            self.position,
            allow_ragged=settings.allow_ragged,
        )
        if isinstance(accumulator, PipelineAccumulator):
            check_steps(accumulator.rule, sampler, settings.inner_microbatches)
        loader = Loader(
            self.dataset if _has_data(accumulator) else Unread(len(self.dataset)),
            self.order,
            sampler,
            collate=self.task.collate if _has_data(accumulator) else len,
            num_workers=settings.num_workers,
            pin_memory=pins(process.device),
            loading_hosts=self.reading,
            read_ahead=settings.read_ahead,
            read_timeout=settings.read_timeout,
            read_retries=settings.read_retries,
        )
        waited = 0.0
        rate, device = self._learning_rate(), process.device
        stage: int | None = None
        steps = cast(Generator[GradientStep], accumulator.steps(loader))
        reason, begun, before = None, self.position, time.perf_counter()
        for step in steps:
            plan = step.plan
            if plan.segment != stage:
                stage = plan.segment
                self._stage_event(plan)
            for micro in step.run() if isinstance(step, PipelineStep) else step:
                if not isinstance(step, PipelineStep):
                    step.backward(*self.task.loss_of(self.model, to_device(micro.data, device)))
                if ledger is not None and not micro.filler:
                    ledger.fed(micro.ids)
            result = step.apply(self.optimizer, learning_rate=rate)
            if ledger is not None:
                ledger.applied(plan.step, plan.start_sample, plan.global_batch_size, result.outcome)
            last, self.position, self.step = self.position, result.end_sample, plan.step + 1
            self._count(result.loss, result.weight)
            self.skipped_steps += result.skipped
            now = time.perf_counter()
            if self.on_step is not None:
                self.on_step(result, self.model, self.optimizer)
            number, waits = process.maxima(self.signals.received, round(1e6 * (loader.waited_seconds - waited)))
            waited, wait_seconds = loader.waited_seconds, waits / 1e6
            self.waited_seconds += wait_seconds
            # The first step of a launch is always shown, at once: from then on the supervisor's limit for a step applies.
            if plan.step % settings.log_every == 0 or last == begun:
                self._step_event(plan, result, now - before, wait_seconds, micro_of(plan), first=last == begun)
            self._check_finite()
            if reason := self._stop_reason(number):
                break
            if self._crossed(settings.evaluate_every, last):
                self._evaluate()
            if self._crossed(settings.checkpoint_every, last) and not self._at_end() and not self._broken():
                self._save()
            before = time.perf_counter()
        steps.close()
        rows, reading = process.total(loader.rows_read if _has_data(accumulator) else 0), self.reading
        readers = len(reading.readers) if reading else process.total(int(_has_data(accumulator)))
        hosts = (len(set(reading.hosts.of_rank)), readers) if reading else (None, None)
        self._count_rows(rows, self.position - begun, readers, *hosts)
        return reason or ("end" if self.position == self.schedule.total_samples else "boundary")

    def _accumulator(self) -> Accumulator:
        """The accumulator of the model, or of this rank's stages of it; made once."""
        if self.accumulator is None:
            settings, model, mesh = self.settings, self.model, self.process.mesh
            options: dict[str, Any] = {
                "max_norm": settings.max_norm,
                "noise": self.noise,
                "scaler": self.scaler,
                # FSDP2 does it itself: `wrapped` passes the type.
                "accumulate_dtype": None if settings.strategy == "fsdp2" else self.accumulate_dtype,
            }
            if isinstance(model, Stages) and mesh is not None:
                self.accumulator = PipelineAccumulator(
                    list(model.parts),
                    self.task.loss_of,
                    pipeline=mesh["pp"],
                    group=mesh["dp"],
                    schedule=settings.pipeline_schedule,
                    inner_microbatches=settings.inner_microbatches,
                    seed=settings.seed,
                    **options,
                )
            else:
                self.accumulator = Accumulator(model, **options)
        return self.accumulator

    def _broken(self) -> bool:
        """Whether the last loss and the weights are not finite: that is not saved, unless the user has set no limit."""
        if not self.nonfinite_in_a_row or not self.settings.stop_after_nonfinite:
            return False
        local = (cast(Any, p).to_local() if isinstance(p, DTensor) else p for p in self.model.parameters())
        return bool(self.process.maximum(int(any(not bool(torch.isfinite(p).all()) for p in local))))

    def _step_event(
        self, plan: Step, result: StepResult, seconds: float, wait: float, micro: int, *, first: bool = False
    ) -> None:
        if self.events is None:
            return
        ranks, data_ranks, peak = self.process.ranks, self.process.data_ranks, self.settings.peak_flops
        tokens = result.weight / seconds
        noise = self.noise.estimate() if self.noise and self.noise.measures(plan.step) else None
        self.events.emit(
            "step",
            now=first,
            step=plan.step,
            samples=self.position,
            tokens=self.tokens,
            loss=result.loss,
            auxiliary=result.auxiliary,
            global_batch_size=plan.global_batch_size,
            micro_batch_size=micro,
            accumulation_steps=micro_steps(plan.global_batch_size, data_ranks, micro),
            samples_per_second=result.samples / seconds,
            tokens_per_second=tokens,
            step_seconds=seconds,
            wait_seconds=wait,
            learning_rate=float(self.optimizer.param_groups[0]["lr"]),
            grad_norm=result.grad_norm,
            mfu=6 * self.parameters * tokens / (ranks * peak) if peak else None,
            stage=plan.segment,
            nodes=self.settings.nodes,
            ranks=ranks,
            noise_scale=noise and noise.noise_scale,
            noise_low=noise and noise.low,
            noise_high=noise and noise.high,
            outcome=result.outcome,
            loss_scale=self.scaler.get_scale() if self.scaler else None,
        )

    def _evaluate(self) -> None:
        if self.evaluated_position == self.position:
            return
        before, self.evaluated_position = time.time(), self.position
        size = self.settings.evaluation_batch_size or self.traced_size
        size = size or self._micro_batch_size()(self.schedule.at_step(0))
        shown = time.monotonic()

        def progress(samples: int) -> None:
            """Say once a second that the evaluation has not stopped."""
            nonlocal shown
            if not samples or time.monotonic() - shown > _ALIVE_SECONDS:
                shown = time.monotonic()
                self.emit("evaluating", now=True, step=self.step, samples=self.position, evaluated=samples)

        loss, weight = evaluate(
            self.task,
            self.model,
            self.evaluation,
            size,
            self.process,
            seed=self.settings.seed,
            progress=progress,
            reading=self.reading,
            read_timeout=self.settings.read_timeout,
            read_retries=self.settings.read_retries,
            pipeline=pipeline if isinstance(pipeline := self._accumulator(), PipelineAccumulator) else None,
        )
        # A checkpoint's state is JSON, which has no NaN.
        self.evaluation_loss = loss if math.isfinite(loss) else None
        seconds = time.time() - before
        self.times["evaluation_seconds"] += seconds
        self.emit("evaluation", step=self.step, samples=self.position, loss=loss, weight=weight, seconds=seconds)

    def _save(self, *, wait: bool = False) -> None:
        with without_worker_failures():
            self._save_all(wait=wait)

    def _save_all(self, *, wait: bool) -> None:
        self.emit("saving", now=True, step=self.step, samples=self.position)
        if earlier := self.checkpoints.wait():  # in the background
            self._saved(earlier, 0.0)
            self.emit("saving", now=True, step=self.step, samples=self.position)
        if self.saved_position == self.position:
            return
        before = time.time()
        if self.ledger is not None:
            self.ledger.close()
        state = {
            **self._state(),
            "evaluation_loss": self.evaluation_loss,
            "noise": [[t.trace, t.signal] for t in self.noise.terms] if self.noise else [],
            "scaler": self.scaler.state_dict() if self.scaler else None,
        }
        saved = self.checkpoints.save(
            self.model, self.optimizer, step=self.step, position=self.position, launch=self.launch, state=state
        )
        self.saved_position = self.position
        saved = self.checkpoints.wait() or saved if wait else saved
        seconds = time.time() - before
        self.times["save_seconds"] += seconds
        self._saved(saved, seconds)

    def _stop(self, reason: str) -> Status:
        ended = time.time()
        broken = self._broken()
        if broken and reason != "signal":
            self._fail_nonfinite()
        # After a signal there may be time for the save only: a time limit, or a preemption.
        if reason != "signal" and self.evaluation is not None and self.saved_position != self.position:
            self._evaluate()
        if not broken:
            self._save(wait=True)
        self.times["stop_seconds"] = time.time() - ended
        status = self._ended(reason)
        self.process.maximum(0)  # no rank exits before the status is written
        return status


def _has_data(accumulator: Accumulator) -> bool:
    """Whether this rank needs samples: stages between the first and the last of a pipeline do not."""
    return not isinstance(accumulator, PipelineAccumulator) or accumulator.first or accumulator.last


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m batchwright.runtime.loop SPEC.json`; the exit code."""
    return main_of(
        __doc__, arguments, lambda spec: train(load_task(spec.task, spec.args), spec.schedule, spec.settings)
    )
