"""The supervisor: starts launch after launch until the end of the ramp, and retries after crashes.

    while position < end:
        fence, manifest, start;  watch until it has ended;  read the position;  done, stopped or failed

The position of the run is read from checkpoints and status files after every launch and at every start: never from an
exit code, a log or memory. So a supervisor may be killed at any line, and the next one continues.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from batchwright.core.errors import BatchwrightError, EnvironmentFault, RunError
from batchwright.core.nodes.policies import Launch
from batchwright.rundir import names
from batchwright.rundir.files import find_object

from .directory import RunDirectory, write_json
from .engine import Action, Engine, Handle, Job, Poll, RankLog, all_ended, engine, tail
from .failure import explain, hopeless, memory_advice, stopped, stuck
from .interrupts import Interrupts
from .records import COMMAND, TASK, Ending, Failure, LaunchProgress, Manifest, RunPlan
from .show import Speeds, remaining_seconds
from .work import Work, launch_end, work

POLL_SECONDS = 0.5
ENDING_SECONDS = 0.1  # between two polls of a launch that has saved its last sample
FULL_BYTES = 1 << 20  # with less free space the disk counts as full
ABSENT_SECONDS = 1.0  # a longer delay of a poll: this process did not run
TRACE_SECONDS = 3.0  # for ranks to write their stacks before they are killed
SILENT = (
    "The command has not reported its position: it must write the number of samples trained and saved to the file that "
    'BATCHWRIGHT_STATUS_FILE names, as a number or as {"consumed_samples": N}, or --position-command must print it.'
)


class Listener(Protocol):
    """What the supervisor reports to: `show.py` has a bar and lines."""

    def launched(self, plan: RunPlan, manifest: Manifest) -> None: ...
    def progress(self, plan: RunPlan, manifest: Manifest, progress: LaunchProgress, eta: float | None) -> None: ...
    def ended(self, plan: RunPlan, manifest: Manifest, ending: Ending) -> None: ...
    def note(self, text: str) -> None: ...


def supervise(directory: RunDirectory, plan: RunPlan, listener: Listener, *, owns_process: bool = False) -> str:
    """Run all launches of a plan with its engine; returns complete, stopped or failed.

    `owns_process`: this process does nothing else; see `LocalEngine`.
    """
    if plan.options.engine == "slurm":
        from .slurm import control

        return control.supervise(directory, plan, listener)
    started_by = engine(plan.options.engine, owns_process=owns_process)
    return Supervisor(directory, plan, started_by, listener).run()


class Supervisor:
    """Supervises one run; `run` returns complete, stopped or failed."""

    launcher = "torchrun"  # what starts the ranks of a task

    def __init__(
        self,
        directory: RunDirectory,
        plan: RunPlan,
        engine: Engine,
        listener: Listener,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._directory, self._plan, self._engine, self._listener = directory, plan, engine, listener
        self._clock = clock
        self._work: Work = work(directory, plan, self._pause)
        self._speeds, self._boundary = Speeds(), None
        self._interrupts = Interrupts()
        self._last: Ending | None = None

    def run(self) -> str:
        """Supervise until the end, with the lock held all the time."""
        self._directory.lock(fresh=True)
        try:
            with self._interrupts:
                (self._directory.path / names.OUTCOME).unlink(missing_ok=True)
                self._directory.event("supervising", launches=len(self._plan.launches))
                try:
                    state, failure = self._run_launches()
                except BatchwrightError as error:
                    self._directory.check_kept()  # else the outcome would be written to a new directory
                    self._finish("failed", Failure(str(error)))
                    raise
                self._finish(state, failure)
                return state
        finally:
            self._directory.unlock()

    def _run_launches(self) -> tuple[str, Failure | None]:
        self._adopt()
        failures, furthest, doubt, before = 0, self._work.position(), True, None
        while True:
            self._directory.check_kept()
            # At the start and after a failure the checkpoint is read completely: it may be damaged.
            position = self._work.position(verify=doubt)
            if position == self._plan.start_sample:
                self._refuse_to_start_again()
            if position >= self._plan.total_samples:
                return "complete", None
            if self._stop_requests():
                return "stopped", None
            try:
                ending = self._launch(self._plan.launch_at(position), position)
            except OSError as error:  # such as a full disk
                ending = Ending(0, "failed", position, self._clock(), failure=Failure(f"cannot write: {error}"))
                self._listener.note(f"{error}")
            if ending.outcome == "stopped":
                return "stopped", None
            if ending.outcome == "done":
                failures, furthest, doubt = 0, max(furthest, ending.position), False
                continue
            failure = ending.failure or Failure("failed for an unknown reason")
            if ending.code == 0 and ending.position > furthest and failure.kind == "crash":
                # A time limit, its own or the queue's: it saved and exited with 0. This does not count as a failure.
                failures, furthest, doubt = 0, ending.position, True
                continue
            failures = 0 if ending.position > furthest else failures
            # After a loss that was not finite, a new position is no progress: its loss was not finite either.
            final = hopeless(failure, before if failures or failure.kind == "nonfinite" else None)
            furthest, doubt, before = max(furthest, ending.position), True, failure
            failures += 1
            if final or failures > self._plan.options.max_retries:
                return "failed", failure
            self._back_off(failures)

    def _refuse_to_start_again(self) -> None:
        """An error if a task has saved and no complete checkpoint is left."""
        manifests = [self._directory.manifest(n) for n in self._directory.numbers()] if self._plan.kind == TASK else []
        saved = start = self._plan.start_sample
        for manifest in manifests:
            if manifest is not None:
                ending, progress = self._directory.ending(manifest.number), self._work.progress(manifest)
                saved = max(saved, manifest.start_sample, ending.position if ending else 0, progress.saved_position)
        if saved > start:
            folder = self._directory.path / names.CHECKPOINTS
            raise EnvironmentFault(
                f"{folder} holds no complete checkpoint, and this run had saved {saved:,} samples: it does not start again "
                f"at sample {start:,} by itself. Restore the checkpoints, or start a new run in another directory (--dir).",
                field="dir",
                given=str(self._directory.path),
            )

    def _launch(self, launch: Launch, position: int) -> Ending:
        """Start one launch and wait until it ends."""
        number = self._directory.next_number()
        job = self._work.job(launch, number, position)
        manifest = self._manifest(number, launch, job, position)
        # The fence first: from here on no older launch can save, even if it still runs.
        self._directory.fence(number)
        self._work.prepare(launch, number, position)
        write_json(self._directory.launch(number) / "manifest.json", manifest)
        handle = self._engine.start(job)
        try:
            manifest = replace(manifest, handle=handle)
            write_json(self._directory.launch(number) / "manifest.json", manifest)
            self._report_start(manifest)
            return self._wait_for_end(manifest, handle)
        except BaseException:
            self._until_ended(handle, 30.0, "kill")
            raise

    def _manifest(self, number: int, launch: Launch, job: Job, position: int, handle: Handle | None = None) -> Manifest:
        return Manifest(
            number=number,
            launch=launch.index,
            nodes=launch.nodes,
            ranks=self._plan.ranks(launch),
            start_sample=position,
            end_sample=launch_end(self._plan, launch),
            command=job.argv,
            environment=job.environment,
            working_directory=str(job.working_directory),
            started=self._clock(),
            handle=handle,
        )

    def _report_start(self, manifest: Manifest) -> None:
        self._directory.event(
            "launch",
            number=manifest.number,
            launch=manifest.launch,
            stage=self._plan.stage_at(manifest.start_sample).index,
            nodes=manifest.nodes,
            ranks=manifest.ranks,
            start_sample=manifest.start_sample,
            end_sample=manifest.end_sample,
        )
        self._listener.launched(self._plan, manifest)
        self._speeds.restart()

    def _adopt(self) -> None:
        """Wait for the end of a launch that an earlier supervisor started and did not record."""
        number = max(self._directory.numbers(), default=0)
        manifest = self._directory.manifest(number)
        if manifest is None or manifest.handle is None or self._directory.ending(number) is not None:
            return
        running = self._engine.poll(manifest.handle).state != "ended"
        if running:
            self._listener.note(f"launch {number} still runs; waiting until it ends")
        if running or self._engine.name == "slurm":  # a job outlives its supervisor and records its own end
            self._wait_for_end(manifest, manifest.handle)
        else:
            left = Failure("its supervisor ended, and the launch with it")
            self._record(manifest, Poll("ended"), self._work.progress(manifest), left, stopping=False)

    def _wait_for_end(self, manifest: Manifest, handle: Handle) -> Ending:
        progress, failure, stopping = self._watch(manifest, handle)
        return self._record(manifest, self._engine.poll(handle), progress, failure, stopping, handle)

    def _watch(self, manifest: Manifest, handle: Handle) -> tuple[LaunchProgress, Failure | None, bool]:
        """Watch a running launch until it has ended; end it if it stalls or a stop is requested."""
        options = self._plan.options
        before = LaunchProgress(manifest.start_sample)
        changed, finished, asked = time.monotonic(), 0.0, 0.0
        first: float | None = None  # when its first step ended
        noted: set[str] = set()  # the reasons why it waits, and trackers that failed
        polled_at, pause = changed, 0.0
        while True:
            self._directory.check_kept()
            polled, progress, now = self._engine.poll(handle), self._work.progress(manifest), time.monotonic()
            if (absent := now - polled_at - pause) > ABSENT_SECONDS and not self._plan.position_command:
                # This machine was suspended, and the ranks with it. With a position command, that may just be slow.
                changed, asked, finished = changed + absent, asked and asked + absent, finished and finished + absent
            polled_at, pause = now, POLL_SECONDS
            if progress != before:
                changed, before = now, progress
                if progress.position > manifest.start_sample and first is None:
                    first = progress.first_step or self._clock()
                self._show(manifest, progress)
            if progress.trouble and progress.trouble not in noted:
                noted.add(progress.trouble)
                self._listener.note(progress.trouble)
            progress = replace(progress, first_step=first)
            if polled.state == "ended":  # a stop signal to the whole group may reach the ranks before this process
                return progress, None, bool(asked or self._stop_requests())
            if polled.state == "pending":
                changed = now
                if polled.detail and polled.detail not in noted:
                    noted.add(polled.detail)
                    self._listener.note(polled.detail)
            stop_requests = self._stop_requests()
            if stop_requests > 1 or (asked and now - asked > options.grace_seconds):
                self._engine.signal(handle, "kill")
            elif stop_requests:
                # A task has nothing to save before its first step; a command may have.
                saves = first is not None or self._plan.kind == COMMAND
                if not asked:
                    asked = now
                    grace = f": a checkpoint first (up to {options.grace_seconds:.0f} s)" if saves else ""
                    self._listener.note(f"stopping{grace}")
                # On every poll: a rank may not handle the signal yet. The engine sends it to a command only once.
                self._engine.signal(handle, "checkpoint" if saves else "kill")
            elif progress.saved_position >= manifest.end_sample and self._plan.kind != COMMAND:
                # Everything is saved: do not wait for a rank that hangs at its exit, or a launcher without ranks.
                # A command may have more to do, such as an export; only stall_seconds limits it.
                finished, pause = finished or now, ENDING_SECONDS
                if now - finished > options.grace_seconds or all_ended(self._directory.launch(manifest.number)):
                    self._engine.signal(handle, "kill")
            else:
                stall = options.stall_seconds
                # Before its first step a launch compiles and loads. A save reports only its end.
                long = first is None or progress.saving
                limit = max(options.start_seconds, stall) if long and stall is not None else stall
                if limit is not None and now - changed > limit:
                    return progress, self._end_stalled(handle, now - changed, progress.saving), False
            self._interrupts.sleep(pause)

    def _end_stalled(self, handle: Handle, seconds: float, saving: bool) -> Failure:
        what = f"no progress for {seconds:.0f} s{' in a save' * saving}"
        failure = stopped(self._engine.logs(handle), what)
        self._engine.signal(handle, "trace")
        self._until_ended(handle, TRACE_SECONDS)
        failure = failure or stuck(self._engine.logs(handle), what)
        self._until_ended(handle, 30.0, "kill")
        return failure

    def _until_ended(self, handle: Handle, seconds: float, action: Action | None = None) -> None:
        """Wait for the end of a launch; the action is repeated, as a signal may come before its handler."""
        now = again = time.monotonic()
        deadline = now + seconds
        while self._engine.poll(handle).state != "ended" and (now := time.monotonic()) < deadline:
            if action is not None and now >= again:
                self._engine.signal(handle, action)
                again = now + 1.0
            time.sleep(0.05)

    def _engine_reason(self, polled: Poll, ranks: Sequence[RankLog]) -> Failure | None:
        """Why a launch failed, if its engine reports it."""
        return None

    def _record(
        self,
        manifest: Manifest,
        polled: Poll,
        progress: LaunchProgress,
        failure: Failure | None,
        stopping: bool,
        handle: Handle | None = None,
    ) -> Ending:
        """Record how a launch ended, by the position that the files give now."""
        position = self._work.position()
        final = self._work.progress(manifest)
        progress = replace(final, first_step=progress.first_step or final.first_step)
        outcome = "done" if position >= manifest.end_sample else "stopped" if stopping and failure is None else "failed"
        if outcome == "done" and position > manifest.end_sample and self._plan.kind == COMMAND:
            outcome, failure = "failed", self._overshot(manifest, position)
        ranks = self._engine.logs(handle) if handle and outcome == "failed" and failure is None else ()
        if outcome == "failed" and failure is None:
            failure = self._engine_reason(polled, ranks)
        if outcome == "failed" and failure is None:
            who = "the command" if self._plan.kind == COMMAND else self.launcher
            launcher = tail(self._directory.launch(manifest.number) / "logs" / "launcher.log")
            failure = explain(polled, ranks, launcher, who)
            if (free := self._directory.free_bytes()) < FULL_BYTES:
                failure = replace(failure, reason=f"{failure.reason}; the disk is full ({free:,} bytes left)")
            if self._plan.kind == COMMAND and not self._plan.position_command and progress.saved is None:
                failure = replace(failure, advice=SILENT)
            if failure.kind == "crash" and progress.nonfinite:
                failure = replace(failure, kind="nonfinite")
            if failure.kind == "oom":
                stage = self._plan.stage_at(max(position, progress.position))
                failure = replace(
                    failure, advice=memory_advice(self._plan, stage, shlex.quote(str(self._directory.path)))
                )
        if outcome == "stopped" and (lost := progress.position - position) > 0:
            self._listener.note(
                f"no checkpoint was made: {lost:,} samples, from {position:,} to {progress.position:,}, will be repeated"
            )
        ending = Ending(
            number=manifest.number,
            outcome=outcome,
            position=position,
            ended=self._clock(),
            code=polled.code,
            failure=failure,
            first_step=progress.first_step,
            last_step=progress.last_step,
            saved=progress.saved,
            loaded=progress.loaded,
            load_seconds=progress.load_seconds,
        )
        self._boundary_of(manifest, ending)
        try:
            write_json(self._directory.launch(manifest.number) / "ending.json", ending)
        except OSError as error:
            self._listener.note(f"{error}")
        self._directory.event("ended", **vars(ending))
        self._listener.ended(self._plan, manifest, ending)
        self._last = ending
        return ending

    def _overshot(self, manifest: Manifest, position: int) -> Failure:
        return Failure(
            f"the command trained to sample {position:,}, {position - manifest.end_sample:,} past its end_sample "
            f"{manifest.end_sample:,}: those samples had the batch of the stage before. It must stop at {{end_sample}}",
            kind="overshot",
        )

    def _boundary_of(self, manifest: Manifest, ending: Ending) -> None:
        """Record what the change to this launch cost: the time from the last step before it to its first step."""
        last = self._last or (self._directory.ending(manifest.number - 1) if manifest.number > 1 else None)
        if last is None or last.last_step is None or ending.first_step is None:
            return
        saved = max(last.saved or 0.0, last.last_step)
        total, load = ending.first_step - last.last_step, ending.load_seconds or 0.0
        parts = {
            "save_seconds": saved - last.last_step,
            "stop_seconds": max(0.0, last.ended - saved),
            "start_seconds": max(0.0, ending.first_step - last.ended - load),
            "load_seconds": load,
        }
        planned = last.outcome == "done"
        if planned:
            self._boundary = total
        self._directory.event(
            "boundary",
            number=manifest.number,
            position=manifest.start_sample,
            planned=planned,
            lost_seconds=total,
            **parts,
        )

    def _show(self, manifest: Manifest, progress: LaunchProgress) -> None:
        stage = self._plan.stage_before(progress.position, manifest.start_sample)
        when = progress.last_step or self._clock()
        self._speeds.seen(stage.index, progress.position, when, progress.samples_per_second)
        eta = remaining_seconds(self._plan, progress.position, self._speeds.by_stage, self._boundary)
        self._listener.progress(self._plan, manifest, progress, eta)

    def _stop_requests(self) -> int:
        """0: continue; 1: save and stop; 2: stop now."""
        stop_requests = min(2, self._interrupts.stop_requests)
        path = self._directory.path / names.STOP
        if stop_requests > 1 or not path.exists():
            return stop_requests
        return 2 if (find_object(path) or {}).get("now") else 1

    def _back_off(self, failures: int) -> None:
        options = self._plan.options
        wait = options.retry_after(failures)
        self._pause(wait, f"retry {failures} of {options.max_retries} in {wait:g} s, from the last checkpoint")

    def _pause(self, seconds: float, reason: str) -> bool:
        """Note the reason and wait; False if a stop is requested."""
        self._listener.note(reason)
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0 and not self._stop_requests():
            self._interrupts.sleep(min(left, POLL_SECONDS))
        return not self._stop_requests()

    def _finish(self, state: str, failure: Failure | None) -> None:
        self._directory.event("finished", state=state, failure=failure)
        try:
            write_json(self._directory.path / names.OUTCOME, {"state": state, "failure": failure})
        except OSError as error:
            if state == "failed":
                raise RunError(f"the run failed, and its outcome could not be written: {error}.") from None
