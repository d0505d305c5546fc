"""The supervisor: launch after launch to the end of the ramp, through crashes, from what the files say.

    while position < end:
        fence, manifest, start;  watch until it has ended;  read the position;  done, stopped or failed

Where the run is, is read from checkpoints and status files after every launch and at every start: never from an exit
code, never from a log, never from memory. So a supervisor may die at any line, and the next one goes on.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from batchwright.core.errors import BatchwrightError, RunError
from batchwright.core.nodes.policies import Launch
from batchwright.rundir import names
from batchwright.rundir.files import find_json

from .directory import RunDirectory, write_json
from .engine import Action, Engine, Handle, Poll, tail
from .eta import Speeds, remaining_seconds
from .failure import explain, memory_advice, stuck
from .interrupts import Interrupts
from .records import COMMAND, Ending, Failure, Manifest, Progress, RunPlan
from .work import Work, launch_end, work

POLL_SECONDS = 0.5
SOON_SECONDS = 0.1  # where the end is a matter of moments
FULL_BYTES = 1 << 20  # less than this is what a failed save leaves
ABSENT_SECONDS = 1.0  # more than that between two looks is no look
TRACE_SECONDS = 3.0  # for ranks to write their stacks before they are ended
SILENT = (
    "It has not said how far it got: a command writes the samples it has trained and saved to the file that "
    'BATCHWRIGHT_STATUS_FILE names, as a number or as {"consumed_samples": N}, or --position-command prints them.'
)


class Listener(Protocol):
    """Who is told what happens: a bar, lines, or nobody."""

    def launched(self, plan: RunPlan, manifest: Manifest) -> None: ...
    def progress(self, plan: RunPlan, manifest: Manifest, progress: Progress, eta: float | None) -> None: ...
    def ended(self, plan: RunPlan, manifest: Manifest, ending: Ending) -> None: ...
    def note(self, text: str) -> None: ...


class Supervisor:
    """Brings one run to its end, or says why not; `run` returns complete, stopped or failed."""

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
        """Supervise until the end; the lock is held throughout."""
        self._directory.lock(fresh=True)
        try:
            with self._interrupts:
                (self._directory.path / names.OUTCOME).unlink(missing_ok=True)
                self._directory.event("supervising", launches=len(self._plan.launches))
                try:
                    state, failure = self._walk()
                except BatchwrightError as error:
                    self._finish("failed", Failure(str(error)))
                    raise
                self._finish(state, failure)
                return state
        finally:
            self._directory.unlock()

    def _walk(self) -> tuple[str, Failure | None]:
        self._adopt()
        failures, furthest, doubt, before = 0, self._work.position(), True, None
        while True:
            # After a failure, and at the start, the checkpoint is read through: it may be what failed.
            position = self._work.position(verify=doubt)
            if position >= self._plan.total_samples:
                return "complete", None
            if self._stop_requests():
                return "stopped", None
            try:
                ending = self._launch(self._plan.launch_at(position), position)
            except OSError as error:  # a full disk under our own files
                ending = Ending(0, "failed", position, self._clock(), failure=Failure(f"cannot write: {error}"))
                self._listener.note(f"{error}")
            if ending.outcome == "stopped":
                return "stopped", None
            if ending.outcome == "done":
                failures, furthest, doubt = 0, max(furthest, ending.position), False
                continue
            failure = ending.failure or Failure("it failed")
            if ending.code == 0 and ending.position > furthest and failure.kind == "crash":
                # A time limit, its own or the queue's: it saved, and left without an error. There is nothing to retry.
                failures, furthest, doubt = 0, ending.position, True
                continue
            failures = 0 if ending.position > furthest else failures
            # What was out of memory, or refused, twice at one place will be so a third time.
            hopeless = failure.kind == "overshot" or (
                failure.kind in ("oom", "refused") and before == failure.kind and failures > 0
            )
            furthest, doubt, before = max(furthest, ending.position), True, failure.kind
            failures += 1
            if hopeless or failures > self._plan.options.max_retries:
                return "failed", failure
            self._back_off(failures)

    def _launch(self, launch: Launch, position: int) -> Ending:
        """Start one launch and see it end."""
        number = max(self._directory.numbers(), default=0) + 1
        job = self._work.job(launch, number, position)
        manifest = Manifest(
            number, launch.index, launch.nodes, self._plan.ranks(launch), position, launch_end(self._plan, launch),
            job.argv, job.environment, str(job.working_directory), self._clock(),
        )  # fmt: skip
        # The fence first: from here on no older launch can save, whatever became of it.
        self._directory.fence(number)
        self._work.prepare(launch, number, position)
        write_json(self._directory.launch(number) / "manifest.json", manifest)
        handle = self._engine.start(job)
        try:
            manifest = replace(manifest, handle=handle)
            write_json(self._directory.launch(number) / "manifest.json", manifest)
            stage = self._plan.stage_at(position)
            self._directory.event(
                "launch", number=number, launch=launch.index, stage=stage.index, nodes=launch.nodes,
                ranks=manifest.ranks, start_sample=position, end_sample=manifest.end_sample,
            )  # fmt: skip
            self._listener.launched(self._plan, manifest)
            self._speeds.restart()
            return self._see_out(manifest, handle)
        except BaseException:
            self._until_ended(handle, 30.0, "kill")
            raise

    def _adopt(self) -> None:
        """A launch that another supervisor left: see it out before anything is started."""
        for number in self._directory.numbers()[-1:]:
            manifest = self._directory.manifest(number)
            if manifest is None or manifest.handle is None or self._directory.ending(number) is not None:
                continue
            there = self._engine.poll(manifest.handle).state != "ended"
            if there:
                self._listener.note(f"launch {number} is still there; seeing it out")
            if there or self._engine.name == "slurm":  # a job outlives its supervisor, and says how it ended
                self._see_out(manifest, manifest.handle)
            else:
                left = Failure("its supervisor went away, and it ended with it")
                self._record(manifest, Poll("ended"), self._work.progress(manifest), left, stopping=False)

    def _see_out(self, manifest: Manifest, handle: Handle) -> Ending:
        progress, failure, stopping = self._watch(manifest, handle)
        return self._record(manifest, self._engine.poll(handle), progress, failure, stopping, handle)

    def _watch(self, manifest: Manifest, handle: Handle) -> tuple[Progress, Failure | None, bool]:
        """Look at a running launch until it has ended; end it when it stalls or somebody wishes so."""
        options = self._plan.options
        before = Progress(manifest.start_sample)
        life, finished, asked = time.monotonic(), 0.0, 0.0
        first: float | None = None  # when its first step was seen
        told: set[str] = set()  # of why it does not run
        looked, pause = life, 0.0
        while True:
            polled, progress, now = self._engine.poll(handle), self._work.progress(manifest), time.monotonic()
            if (absent := now - looked - pause) > ABSENT_SECONDS and not self._plan.position_command:
                # This machine stood still, and the ranks with it. A position command may just be slow.
                life, asked, finished = life + absent, asked and asked + absent, finished and finished + absent
            looked, pause = now, POLL_SECONDS
            if progress != before:
                life, before = now, progress
                if progress.position > manifest.start_sample and first is None:
                    first = progress.first_step or self._clock()
                self._tell(manifest, progress)
            progress = replace(progress, first_step=first)
            if polled.state == "ended":  # who is told to stop with its ranks may come to hear it after they have
                return progress, None, bool(asked or self._stop_requests())
            if polled.state == "pending":
                life = now
                if polled.detail and polled.detail not in told:
                    told.add(polled.detail)
                    self._listener.note(polled.detail)
            stop_requests = self._stop_requests()
            if stop_requests > 1 or (asked and now - asked > options.grace_seconds):
                self._engine.signal(handle, "kill")
            elif stop_requests:
                # A task that has not taken a step has nothing to save. What a command has done, only it knows.
                saves = first is not None or self._plan.kind == COMMAND
                if not asked:
                    asked = now
                    grace = f": a checkpoint first (up to {options.grace_seconds:.0f} s)" if saves else ""
                    self._listener.note(f"stopping{grace}")
                # Again: a rank may not have been listening. The engine sees to it that a command hears it once.
                self._engine.signal(handle, "checkpoint" if saves else "kill")
            elif progress.saved_position >= manifest.end_sample and self._plan.kind != COMMAND:
                # All is saved: whatever hangs on the way out is not waited for, nor a launcher whose ranks have gone.
                # A command may have more to do, an export say: that is between it and stall_seconds.
                finished, pause = finished or now, SOON_SECONDS
                ranks = self._engine.logs(handle)
                if now - finished > options.grace_seconds or (ranks and all(r.code is not None for r in ranks)):
                    self._engine.signal(handle, "kill")
            else:
                stall = options.stall_seconds
                limit = stall if first is not None or stall is None else max(options.start_seconds, stall)
                if limit is not None and now - life > limit:
                    return progress, self._end_stalled(handle, now - life), False
            self._interrupts.sleep(pause)

    def _end_stalled(self, handle: Handle, seconds: float) -> Failure:
        before = self._engine.logs(handle)
        self._engine.signal(handle, "trace")
        self._until_ended(handle, TRACE_SECONDS)
        after = self._engine.logs(handle)
        self._until_ended(handle, 30.0, "kill")
        return stuck(before, after, seconds)

    def _until_ended(self, handle: Handle, seconds: float, action: Action | None = None) -> None:
        """Wait for its end; a wish is repeated, as it may not come through at once."""
        now = again = time.monotonic()
        deadline = now + seconds
        while self._engine.poll(handle).state != "ended" and (now := time.monotonic()) < deadline:
            if action is not None and now >= again:
                self._engine.signal(handle, action)
                again = now + 1.0
            time.sleep(0.05)

    def _record(
        self, manifest: Manifest, polled: Poll, progress: Progress, failure: Failure | None, stopping: bool,
        handle: Handle | None = None,
    ) -> Ending:  # fmt: skip
        """How a launch ended, by where its files say the run is now."""
        position = self._work.position()
        final = self._work.progress(manifest)
        progress = replace(final, first_step=progress.first_step or final.first_step)
        ranks = self._engine.logs(handle) if handle else ()
        outcome = "done" if position >= manifest.end_sample else "stopped" if stopping and failure is None else "failed"
        if outcome == "done" and position > manifest.end_sample and self._plan.kind == COMMAND:
            outcome, failure = "failed", self._overshot(manifest, position)
        if outcome == "failed" and failure is None:
            who = "the command" if self._plan.kind == COMMAND else "torchrun"
            launcher = tail(self._directory.launch(manifest.number) / "logs" / "launcher.log")
            failure = explain(polled, ranks, launcher, who)
            if (free := self._directory.free_bytes()) < FULL_BYTES:
                failure = replace(failure, reason=f"{failure.reason}; the disk is full ({free:,} bytes left)")
            if self._plan.kind == COMMAND and not self._plan.position_command and progress.saved is None:
                failure = replace(failure, advice=SILENT)
            if failure.kind == "oom":
                stage = self._plan.stage_at(max(position, progress.position))
                failure = replace(
                    failure, advice=memory_advice(self._plan, stage, shlex.quote(str(self._directory.path)))
                )
        if outcome == "stopped" and (lost := progress.position - position) > 0:
            self._listener.note(
                f"no checkpoint was made: {lost:,} samples, from {position:,} to {progress.position:,}, are to be done again"
            )
        ending = Ending(
            manifest.number, outcome, position, self._clock(), polled.code, failure, progress.first_step,
            progress.last_step, progress.saved, progress.loaded, progress.load_seconds,
        )  # fmt: skip
        self._boundary_of(manifest, ending)
        try:
            write_json(self._directory.launch(manifest.number) / "ending.json", ending)
        except OSError as error:
            self._listener.note(f"{error}")
        self._directory.event("ended", **{**vars(ending), "failure": failure})
        self._listener.ended(self._plan, manifest, ending)
        self._last = ending
        return ending

    def _overshot(self, manifest: Manifest, position: int) -> Failure:
        return Failure(
            f"the command trained to sample {position:,}, {position - manifest.end_sample:,} past its end at "
            f"{manifest.end_sample:,}: those samples had the batch of the stage before. It has to stop at {{end_sample}}",
            kind="overshot",
        )

    def _boundary_of(self, manifest: Manifest, ending: Ending) -> None:
        """The time that the change to this launch cost: from the last step before it to the first one in it."""
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

    def _tell(self, manifest: Manifest, progress: Progress) -> None:
        stage = self._plan.stage_before(progress.position, manifest.start_sample)
        when = progress.last_step or self._clock()
        self._speeds.seen(stage.index, progress.position, when, progress.samples_per_second)
        eta = remaining_seconds(self._plan, progress.position, self._speeds.by_stage, self._boundary)
        self._listener.progress(self._plan, manifest, progress, eta)

    def _stop_requests(self) -> int:
        """0: go on; 1: save and stop; 2: stop now."""
        stop_requests = min(2, self._interrupts.stop_requests)
        path = self._directory.path / names.STOP
        if stop_requests > 1 or not path.exists():
            return stop_requests
        return 2 if (find_json(path) or {}).get("now") else 1

    def _back_off(self, failures: int) -> None:
        options = self._plan.options
        wait = options.retry_after(failures)
        self._pause(wait, f"retry {failures} of {options.max_retries} in {wait:g} s, from the last checkpoint")

    def _pause(self, seconds: float, reason: str) -> bool:
        """Say why, and wait; False where somebody wishes to stop."""
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
                raise RunError(f"the run failed, and even that could not be written: {error}.") from None
