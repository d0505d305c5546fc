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
import os
import sys
import time
import traceback
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, suppress
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from batchwright.core.errors import BatchwrightError, PlanError, RunError
from batchwright.core.ramp.learning_rate import scale
from batchwright.core.ramp.schedule import Schedule, Step
from batchwright.rundir.status import Status
from batchwright.runtime.data.loader import Loader
from batchwright.runtime.data.sampler import StepSampler, micro_steps
from batchwright.runtime.device import pins, to_device
from batchwright.runtime.state.checkpoint import Saved
from batchwright.runtime.step.accumulate import Accumulator, GradientStep, StepResult
from batchwright.runtime.task import Task, load_task

from .evaluate import evaluate
from .events import Tracker, trackers_hang
from .process import StopSignals, joined, without_worker_failures
from .session import OnStep, Session
from .settings import Settings, read_spec

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
        process = stack.enter_context(joined(settings.device, settings.strategy))
        signals = stack.enter_context(StopSignals())
        loop = _Loop(task, schedule, settings, process, signals, evaluation, trackers, may_save, on_step)
        try:
            status = loop.run()
        except BaseException as error:
            loop.failed(error)
            # The first error is raised, not one of closing.
            with suppress(Exception):
                loop.close()
            raise
        loop.close()
        return status


class _Loop(Session):
    """The training steps of a session."""

    def run(self) -> Status:
        """Set up, train, save, and return why the loop stopped."""
        self.set_up()
        whole = self.schedule.total_samples
        limit = self.settings.max_tokens
        reason = "end" if self.position == whole else "boundary" if self.position == self.settings.end_sample else None
        if reason is None and limit is not None and self.tokens >= limit:
            reason = "tokens"
        if reason is None:
            reason = self._train()
        return self._stop(reason)

    def _train(self) -> str:
        settings, process, ledger = self.settings, self.process, self.ledger
        assert ledger is not None
        micro_of = self._micro_batch_size()
        sampler = StepSampler(
            self._limited(), micro_of, process.rank, process.ranks, self.position, allow_ragged=settings.allow_ragged
        )
        loader = Loader(
            self.dataset,
            self.order,
            sampler,
            collate=self.task.collate,
            num_workers=settings.num_workers,
            pin_memory=pins(process.device),
            loading_hosts=self.reading,
            read_ahead=settings.read_ahead,
            read_timeout=settings.read_timeout,
            read_retries=settings.read_retries,
        )
        waited = 0.0
        accumulator = Accumulator(
            self.model,
            max_norm=settings.max_norm,
            noise=self.noise,
            scaler=self.scaler,
            # FSDP2 does it itself: `wrapped` passes the type.
            accumulate_dtype=None if settings.strategy == "fsdp2" else self.accumulate_dtype,
        )
        rate, device = self._learning_rate(), process.device
        stage: int | None = None
        steps = cast(Generator[GradientStep], accumulator.steps(loader))
        reason, begun, before = None, self.position, time.perf_counter()
        for step in steps:
            plan = step.plan
            if plan.segment != stage:
                stage = plan.segment
                size = self.schedule.segments[stage].global_batch_size
                self.emit("stage", stage=stage, step=plan.step, samples=plan.start_sample, global_batch_size=size)
            for micro in step:
                step.backward(*self.task.loss_of(self.model, to_device(micro.data, device)))
                if not micro.filler:
                    ledger.fed(micro.ids)
            result = step.apply(self.optimizer, learning_rate=rate)
            ledger.applied(plan.step, plan.start_sample, plan.global_batch_size, result.outcome)
            last, self.position, self.step = self.position, result.end_sample, plan.step + 1
            self.tokens, self.loss = self.tokens + result.weight, result.loss
            self.skipped_steps += result.skipped
            self.nonfinite_in_a_row = 0 if math.isfinite(result.loss) else self.nonfinite_in_a_row + 1
            self.nonfinite_steps += bool(self.nonfinite_in_a_row)
            now = time.perf_counter()
            if self.on_step is not None:
                self.on_step(result, self.model, self.optimizer)
            number, waits = process.maxima(self.signals.received, round(1e6 * (loader.waited_seconds - waited)))
            waited, wait_seconds = loader.waited_seconds, waits / 1e6
            self.waited_seconds += wait_seconds
            # The first step of a launch is always shown, at once: from then on the supervisor's limit for a step applies.
            if plan.step % settings.log_every == 0 or last == begun:
                self._step_event(plan, result, now - before, wait_seconds, micro_of(plan), first=last == begun)
            if self.nonfinite_in_a_row and self.nonfinite_in_a_row == settings.stop_after_nonfinite:
                self._fail_nonfinite()
            # At the end of the schedule the run is complete, not stopped.
            if number and self.position != self.schedule.total_samples:
                self.signals.received, reason = number, "signal"
            elif settings.max_tokens is not None and self.tokens >= settings.max_tokens:
                reason = "tokens"
            if reason:
                break
            if _crossed(settings.evaluate_every, last, self.position):
                self._evaluate()
            if _crossed(settings.checkpoint_every, last, self.position) and not self._at_end() and not self._broken():
                self._save()
            before = time.perf_counter()
        steps.close()
        self._count_rows(loader.rows_read, self.position - begun)
        return reason or ("end" if self.position == self.schedule.total_samples else "boundary")

    def _count_rows(self, read: int, trained: int) -> None:
        """Rows that all ranks have read from the dataset, against those that were trained."""
        rows, reading = self.process.total(read), self.reading
        self.loading = {
            "hosts": len(set(reading.hosts.of_rank)) if reading else None,
            "loading_hosts": len(reading.readers) if reading else None,
            "rows_read": rows,
            "rows_trained": trained,
            "read_amplification": rows / trained if trained else None,
            "wait_seconds": self.waited_seconds,
        }

    def _at_end(self) -> bool:
        return self.position in (self.schedule.total_samples, self.settings.end_sample)

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
        shape, rule, schedule = self.settings.learning_rate, self.settings.lr_scaling, self.schedule
        base = schedule.segments[0].global_batch_size

        def factor(sample: int) -> float:
            segment = schedule.segments[schedule.at_sample(sample).segment]
            stage = scale(rule, 1.0, base, segment.global_batch_size)
            return stage if shape is None else shape.at(sample, stage) / shape.peak_lr

        return factor

    def _broken(self) -> bool:
        """Whether the last loss and the weights are not finite: that is not saved, unless the user has set no limit."""
        if not self.nonfinite_in_a_row or not self.settings.stop_after_nonfinite:
            return False
        local = (cast(Any, p).to_local() if isinstance(p, DTensor) else p for p in self.model.parameters())
        return bool(self.process.maximum(int(any(not bool(torch.isfinite(p).all()) for p in local))))

    def _fail_nonfinite(self) -> NoReturn:
        steps = self.nonfinite_in_a_row
        saved = f"from checkpoint {self.saved.name} on" if self.saved else "from the start on"
        self.emit("nonfinite", now=True, step=self.step, samples=self.position, steps=steps)
        raise RunError(
            f"the loss was not finite in {steps} step{'s in a row' * (steps > 1)}: {self.loss} in step {self.step - 1:,}, at "
            f"sample {self.position:,}. The samples {saved} are not in a checkpoint. Look at the learning rate, the precision "
            "and the samples of these steps; stop_after_nonfinite sets the limit, and 0 removes it.",
            field="loss",
            given=str(self.loss),
        )

    def _step_event(
        self, plan: Step, result: StepResult, seconds: float, wait: float, micro: int, *, first: bool = False
    ) -> None:
        if self.events is None:
            return
        ranks, peak = self.process.ranks, self.settings.peak_flops
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
            accumulation_steps=micro_steps(plan.global_batch_size, ranks, micro),
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
        size = self.settings.evaluation_batch_size or self._micro_batch_size()(self.schedule.at_step(0))
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
        assert self.ledger is not None
        before = time.time()
        self.ledger.close()
        state = {
            "tokens": self.tokens,
            "fingerprint": self.facts,
            "evaluation_loss": self.evaluation_loss,
            "noise": [[t.trace, t.signal] for t in self.noise.terms] if self.noise else [],
            "skipped_steps": self.skipped_steps,
            "nonfinite_steps": self.nonfinite_steps,
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

    def _saved(self, saved: Saved | None, seconds: float) -> None:
        if saved is None:
            return
        self.saved = saved
        self.emit("save", now=True, step=saved.step, samples=saved.position, checkpoint=saved.name, seconds=seconds)
        if self.process.rank == 0:
            self.write_status(self.status("running", None))

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
        status = self.status("complete" if reason in ("end", "tokens") else "stopped", reason)
        self.emit(
            "stop", reason=reason, step=self.step, samples=self.position, next_stage=status.next_stage, **self.loading
        )
        if self.process.rank == 0:
            self.write_status(status)
        self.process.maximum(0)  # no rank exits before the status is written
        return status


def _crossed(every: int | None, before: int, after: int) -> bool:
    return every is not None and before // every != after // every


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m batchwright.runtime.loop SPEC.json`; the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if len(given) != 1 or given[0].startswith("-"):
        print(__doc__, file=sys.stderr)
        return 2
    try:
        spec = read_spec(given[0])
        return train(load_task(spec.task, spec.args), spec.schedule, spec.settings).exit_code
    except BatchwrightError as error:
        if error.__cause__ is not None and error.field == "task":
            traceback.print_exception(error.__cause__)
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code


def run_process() -> None:
    """Run `main` and exit with its code."""
    try:
        code = main()
    except BaseException as error:
        if not dist.is_initialized():
            raise
        # stderr may be a closed file, or on a full disk.
        with suppress(OSError, ValueError):
            traceback.print_exc()
        code = 130 if isinstance(error, KeyboardInterrupt) else 1
        if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
            code = error.code or 0
    leave(code)


def leave(code: int) -> NoReturn:
    """Exit with a code, without shutting the interpreter down if that would wait.

    After an error that left the process group in place, it would destroy the group, which waits for ranks that are blocked
    in a collective. A tracker that hangs may have registered a function that waits for its server.
    """
    if not dist.is_initialized() and not trackers_hang():
        sys.exit(code)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
