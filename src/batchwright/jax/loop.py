"""The loop for a `JaxTask`: `train(task, schedule, settings)`, from its newest checkpoint to its end, a boundary or a signal.

It combines the parts of this room:

    saved = checkpoints.newest();  params, state, position = checkpoints.load(saved, …) if saved else …
    for step in Feed(dataset, order, schedule, …, mesh=mesh, start=position):
        gradient = accumulate(loss)(params, step.batches, step.count)         # one compiled function for all stages
        params, state = optimizer.update(gradient, state, params)
        ledger.fed(step.ids);  ledger.applied(…);  position = step.plan.end_sample
        save or stop if it is time

As a process: `python -m batchwright.jax.loop SPEC.json`, one per node, with the spec, the files and the exit codes of the
torch loop (`runtime/loop`).
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import jax
import jax.numpy as jnp

from batchwright.core.errors import RunError
from batchwright.core.ramp.schedule import Schedule, Step
from batchwright.processes.endings import users_code
from batchwright.rundir.status import Status
from batchwright.runtime.loop.base import finish, main_of, run_process
from batchwright.runtime.loop.settings import Settings, Spec
from batchwright.runtime.loop.signals import StopSignals

from .feed import Feed, StepBatch
from .gradient import checked_loss
from .process import join, maxima, total
from .session import Session, refuse
from .task import JaxTask, load_task


def train(task: JaxTask, schedule: Schedule, settings: Settings) -> Status:
    """Train `task` along `schedule`, from the newest checkpoint in the directory; every process of a job calls it."""
    refuse(settings)
    ranks = join()
    with ExitStack() as stack:
        signals = stack.enter_context(StopSignals())
        return finish(_Loop(task, schedule, settings, ranks, signals))


class _Loop(Session):
    """The training steps of a session."""

    def _compiled(self) -> Callable[..., Any]:
        """The step of the task, whose parameters stay where they are."""
        return self.task.compiled_step(self.mesh, self.arrays, self.settings.max_norm)

    def _train(self) -> str:
        settings, ledger = self.settings, self.ledger
        assert ledger is not None
        feed = Feed(
            self.task.dataset,
            self.order,
            self._limited(),
            self._micro_batch_size(),
            mesh=self.mesh,
            start=self.position,
            collate=self.task.collate,
            blank=self.task.blank,
            loading_hosts=settings.loading_hosts,
            read_retries=settings.read_retries,
        )
        self._check_blank()
        train_step, rate = self._compiled(), self._learning_rate()
        stage, reason, begun = None, None, self.position
        before = time.perf_counter()
        steps = iter(feed)
        step = next(steps, None)
        wait = _Reading(step).wait()
        while step is not None:
            plan = step.plan
            if plan.segment != stage:
                stage = plan.segment
                self._stage_event(plan)
            batches = step.batches
            with users_code("the loss or the optimizer failed"):
                params, state, numbers = train_step(
                    self.arrays["params"], self.arrays["optimizer"], batches, jnp.int32(step.count),
                    jnp.float32(rate(plan.start_sample)),
                )  # fmt: skip
            self.arrays = {"params": params, "optimizer": state}
            ledger.fed(step.ids)
            ledger.applied(plan.step, plan.start_sample, plan.global_batch_size)
            upcoming = next(steps, None)
            reading = _Reading(upcoming)
            loss, weight, auxiliary, norm = (float(number) for number in jax.device_get(numbers))
            self._check_weight(plan, weight)
            wait += reading.wait()
            last, self.position, self.step = self.position, plan.end_sample, plan.step + 1
            self._count(loss, weight)
            now = time.perf_counter()
            number, waits = maxima(self.signals.received, min(round(1e6 * wait), 2**31 - 1))
            self.waited_seconds += waits / 1e6
            if plan.step % settings.log_every == 0 or last == begun:
                self._step_event(step, loss, weight, auxiliary, norm, now - before, waits / 1e6, first=last == begun)
            self._check_finite()
            if reason := self._stop_reason(number):
                break
            if self._crossed(settings.checkpoint_every, last) and not self._at_end() and not self._broken():
                self._save()
            step, wait, before = upcoming, 0.0, time.perf_counter()
        rows = total(feed.reader.rows_read)
        hosts = jax.process_count()
        self._count_rows(rows, self.position - begun, feed.loading_hosts or hosts, hosts, feed.loading_hosts)
        return reason or ("end" if self.position == self.schedule.total_samples else "boundary")

    def _check_blank(self) -> None:
        """A blank row that weighs something would be trained."""
        if self.task.blank is None:
            return
        with users_code("the loss failed with a batch of blank rows"):
            # Compiled, so that nothing but the weight is computed, and sharded parameters stay where they are.
            weigh = jax.jit(lambda params, batch: checked_loss(self.task.loss(params, batch))[1])
            weight = float(weigh(self.arrays["params"], self.task.batch([self.task.blank])))
        if weight != 0:
            raise RunError(
                f"JaxTask.blank weighs {weight:g} in the loss. It must weigh nothing: it fills batches.",
                field="blank",
                given=weight,
            )

    def _check_weight(self, plan: Step, weight: float) -> None:
        if not weight > 0 and not math.isnan(weight):
            raise RunError(
                f"step {plan.step}: its weights add up to {weight:g}, and the loss sum is divided by them. Each must be 0 or "
                "more, and one of the step above 0.",
                field="weight",
                given=weight,
            )

    def _step_event(
        self, step: StepBatch, loss: float, weight: float, auxiliary: float, norm: float, seconds: float, wait: float,
        *, first: bool,
    ) -> None:  # fmt: skip
        plan = step.plan
        self.emit(
            "step",
            now=first,
            step=plan.step,
            samples=self.position,
            tokens=self.tokens,
            loss=loss,
            auxiliary=auxiliary,
            global_batch_size=plan.global_batch_size,
            micro_batch_size=step.feed.micro_batch_size(plan),
            accumulation_steps=step.count,
            samples_per_second=plan.global_batch_size / seconds,
            tokens_per_second=weight / seconds,
            step_seconds=seconds,
            wait_seconds=wait,
            learning_rate=None,  # optax does not say its own
            grad_norm=norm,
            mfu=None,
            stage=plan.segment,
            nodes=self.settings.nodes,
            ranks=self.ranks,
            noise_scale=None,
            noise_low=None,
            noise_high=None,
            outcome="applied",
            loss_scale=None,
        )


class _Reading(threading.Thread):
    """Reads the rows of a step while the devices compute the step before. A daemon: an error need not wait for a read."""

    def __init__(self, step: StepBatch | None) -> None:
        super().__init__(name="batchwright reading", daemon=True)
        self._step = step
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        """Read; an error is raised by `wait`."""
        try:
            _ = self._step and self._step.rows
        except BaseException as error:
            self._error = error

    def wait(self) -> float:
        """Wait until the rows are read; the seconds that it took."""
        before = time.perf_counter()
        self.join()
        if self._error is not None:
            raise self._error
        return time.perf_counter() - before


def _run(spec: Spec) -> Status:
    join()  # before the user's file looks for devices
    status = train(load_task(spec.task, spec.args), spec.schedule, spec.settings)
    if jax.distributed.is_initialized():
        jax.distributed.shutdown()  # after success only: it waits for all processes
    return status


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m batchwright.jax.loop SPEC.json`; the exit code."""
    return main_of(__doc__, arguments, _run)


if __name__ == "__main__":
    run_process(main, jax.distributed.is_initialized)
