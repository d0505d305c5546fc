"""A chain of jobs without a supervisor: each job runs one launch and submits the next job.

    chain job   runs the launch that is next by the checkpoints; when its stages are complete, it submits the next job
    successor   a chain job that waits in the queue behind another (`--dependency`)

A successor is submitted together with every chain job, with `afternotok`: it starts if that job fails in any way, even
before its process starts. Where compute nodes may not submit (`nodes_submit: false`), all jobs are queued at the start,
each behind the one before with `afterany`, and `spares` more per launch. All of them do the same: look which launch is next
by the checkpoints, and exit 0 if nothing is left, another job runs it, or it needs another number of nodes.
"""

from __future__ import annotations

import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import FrameType

from batchwright.core.errors import BatchwrightError, EnvironmentFault
from batchwright.core.nodes.policies import Launch
from batchwright.launch.directory import RunDirectory
from batchwright.launch.engine import Poll
from batchwright.launch.failure import hopeless
from batchwright.launch.interrupts import Interrupts
from batchwright.launch.records import Ending, Failure, Manifest, RunPlan
from batchwright.launch.show import LineDisplay
from batchwright.launch.supervisor import Supervisor
from batchwright.launch.work import work
from batchwright.rundir import names
from batchwright.rundir.files import create_once

from . import commands as slurm
from .claim import JobRecord, job_record, owner_lives
from .elastic import affordable, on_nodes
from .engine import cancel_all
from .script import write_chain_script
from .site import SlurmRun
from .step import StepEngine, prologue_failure, say

TRY_AGAIN = 75  # the exit code that starts the successor
_LOCK_SECONDS = 60.0
_SUCCESSOR_SECONDS = 60.0  # for a controller that does not answer: a launch starts without a successor, too


def submit(
    directory: RunDirectory,
    run: SlurmRun,
    launch: Launch,
    script: Path,
    *options: str,
    nodes: int,
    after: str = "",
    seconds: float = slurm.PATIENCE,
) -> str:
    """Put one job of a chain in the queue and record it; `after`: a successor, with this dependency."""
    role = "successor" if after else "chain"
    comment = slurm.comment(run.token, role, launch.index)
    job = slurm.submit_patiently(script, comment, f"--nodes={nodes}", *options, after=after, seconds=seconds)
    directory.event("submitted", job=job, role=role, launch=launch.index, nodes=nodes, by=slurm.me())
    return job


def submit_successor(
    directory: RunDirectory, run: SlurmRun, launch: Launch, script: Path, job: str, nodes: int
) -> None:
    """Put a job in the queue that starts if `job` fails; the chain continues without it if Slurm refuses it."""
    try:
        after = f"afternotok:{job}"
        submit(directory, run, launch, script, nodes=nodes, after=after, seconds=_SUCCESSOR_SECONDS)
    except (BatchwrightError, OSError) as error:
        print(f"no successor for job {job}: {error}", file=sys.stderr)


def submit_with_successor(
    directory: RunDirectory,
    plan: RunPlan,
    run: SlurmRun,
    launch: Launch,
    *options: str,
    freed: tuple[int, str] = (0, ""),
) -> str:
    """Put a job and its successor in the queue.

    Both ask for the nodes that the cluster can give soon, if the site is elastic; `freed` are those of this job.
    """
    script = write_chain_script(directory, plan, run, launch)
    nodes = affordable(plan, launch, run.site, script, freed)
    job = submit(directory, run, launch, script, *options, nodes=nodes)
    submit_successor(directory, run, launch, script, job, nodes)
    return job


def begin(directory: RunDirectory, plan: RunPlan, run: SlurmRun) -> list[str]:
    """Start or continue a chain: submit the first job, or all jobs where nodes may not submit."""
    if directory.supervisor() is not None:
        directory.lock()  # raises an error that names the supervisor
    for name in (names.STOP, names.OUTCOME):
        (directory.path / name).unlink(missing_ok=True)
    run = replace(run, after=max(directory.numbers(), default=0)).save(directory)
    cancel_all(directory, run.token)
    position = work(directory, plan).position()
    if position >= plan.total_samples:
        return []
    first = plan.launch_at(position)
    if run.site.nodes_submit:
        return [submit_with_successor(directory, plan, run, first)]
    queued: list[str] = []
    for launch in plan.launches[first.index :]:
        script = write_chain_script(directory, plan, run, launch)
        for _ in range(1 + run.site.spares):
            after = f"afterany:{queued[-1]}" if queued else ""
            queued.append(submit(directory, run, launch, script, nodes=launch.nodes, after=after))
    return queued


class _JobSignals(Interrupts):
    """Slurm's signals: before the time limit, at scancel, at preemption. All ask for one checkpoint; none means "now"."""

    def __init__(self) -> None:
        super().__init__()
        self.name = ""

    def __enter__(self) -> _JobSignals:
        super().__enter__()
        self._before[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, self._came)
        return self

    def _came(self, number: int, frame: FrameType | None) -> None:
        if number != signal.SIGCHLD and not self.stop_requests:
            self.stop_requests, self.name = 1, signal.Signals(number).name


class ChainJob(Supervisor):
    """The supervisor of one launch, inside its own job."""

    launcher = "srun"

    def __init__(self, directory: RunDirectory) -> None:
        self._run = SlurmRun.load(directory)
        super().__init__(directory, directory.plan(), StepEngine(self._run.site), LineDisplay(sys.stdout))
        self._interrupts: _JobSignals = _JobSignals()
        self._claimed: JobRecord | None = None

    def run_job(self) -> int:
        """The job's exit code: 75 starts the successor; 0 if the chain continues without it or is over."""
        with self._interrupts:
            try:
                reason = self._locked()
                if reason is None:
                    return self._run_next_or_end_chain()
                say(f"nothing to do: {reason}")
                return 0
            except (BatchwrightError, OSError) as error:
                say(f"{type(error).__name__}: {error}")
                return error.exit_code if isinstance(error, BatchwrightError) else EnvironmentFault.exit_code
            finally:
                self._directory.unlock()

    def _not_ours(self) -> str | None:
        """Why this job has nothing to do; None if it may run the next launch."""
        if not SlurmRun.load(self._directory).detached:
            return "this run has a supervisor on a login node now"
        if (self._directory.path / names.STOP).exists():
            return "a stop of the run was requested"
        for number in self._directory.numbers()[-1:]:
            owner = self._owner(number)
            if (
                self._directory.ending(number) is None
                and owner != slurm.me()
                and owner_lives(self._directory.launch(number), owner, self._run.token)
            ):
                return f"launch {number} is being run by job {owner}"
        return None

    def _owner(self, number: int) -> str | None:
        manifest = self._directory.manifest(number)
        return str((manifest.handle or {}).get("job")) if manifest else None

    def _locked(self) -> str | None:
        """Take the run's lock, which the job before may still hold; or the reason why there is nothing to do."""
        deadline, waits = time.monotonic() + _LOCK_SECONDS, False
        while (reason := self._not_ours()) is None:
            if self._interrupts.stop_requests:
                position = self._work.position()
                # The job that holds the lock may have trained the last sample.
                if self._run.site.nodes_submit and position < self._plan.total_samples:
                    self._submit_next(self._plan.launch_at(position))
                return f"asked to stop by {self._interrupts.name} before the run's lock was free"
            try:
                return self._directory.lock()
            except EnvironmentFault as error:
                if not waits:
                    waits = True
                    say(f"waiting: {error}")
                if time.monotonic() > deadline and self._lock_is_stale():
                    say("the process that held the lock is gone: continuing without the lock")
                    return None
            except OSError:
                return None  # no locks on this file system: the claim is enough
        return reason

    def _lock_is_stale(self) -> bool:
        """Whether no job of this run can hold the lock: a file server may keep it for a node that is gone."""
        owners = {job_record(self._directory.launch(number)).get("job") for number in self._directory.numbers()}
        try:
            known = slurm.jobs(self._run.token)
        except slurm.Unreachable:
            return False
        # A job without a launch does not hold the lock: it waits for it.
        return not any(one.alive and one.job in owners and one.job != slurm.me() for one in known)

    def _run_next_or_end_chain(self) -> int:
        """Run the next launch. If that fails with an error and no successor waits, the chain ends with this error."""
        try:
            return self._run_next()
        except (BatchwrightError, OSError) as error:
            if self._run.site.nodes_submit and self._successor(unknown="?") is None:
                self._finish("failed", Failure(str(error)))
            raise

    def _run_next(self) -> int:
        """Find the next launch by the checkpoints, claim it and run it."""
        plan = self._directory.plan()
        if plan != self._plan:  # a resume has changed it before this job had the lock
            self._plan, self._work = plan, work(self._directory, plan)
        # Read once, before the checks: of two jobs that look at the same time, only one can claim the next number.
        number, numbers = self._directory.next_number(), self._directory.numbers()
        if (reason := self._not_ours()) is not None:
            say(f"nothing to do: {reason}")
            return 0
        self._end_abandoned(numbers[-1:])
        last = self._directory.ending(numbers[-1]) if numbers else None
        # After a failure the whole checkpoint is verified: it may be the cause.
        position = self._work.position(verify=last is not None and last.outcome != "done")
        if position >= plan.total_samples:
            say("nothing to do: the run is complete")
            return self._end_chain("complete", None)
        if self._without_progress() > plan.options.max_retries:  # the earlier jobs ended before they could check this
            return self._end_chain("failed", (last and last.failure) or Failure("launches in a row made no progress"))
        launch = plan.launch_at(position)
        nodes = slurm.my_nodes()[0] or launch.nodes
        sized = on_nodes(plan, launch, nodes) if nodes == launch.nodes or self._run.site.elastic else None
        if sized is None:
            say(f"nothing to do: launch {launch.index + 1} is next, on {launch.nodes} nodes, and this job has {nodes}")
            if self._run.site.nodes_submit:
                self._submit_next(launch)
            return 0
        self._plan, launch = sized
        # A checkpoint may use all the time before a time limit.
        grace_seconds = max(self._plan.options.grace_seconds, self._run.site.signal_seconds)
        self._plan = replace(self._plan, options=replace(self._plan.options, grace_seconds=grace_seconds))
        self._work = work(self._directory, self._plan)
        job = self._work.job(launch, number, position)
        handle = {"engine": "slurm", "job": slurm.me(), "directory": str(job.directory)}
        manifest = self._manifest(number, launch, job, position, handle)
        if not create_once(self._directory.launch(number) / "manifest.json", manifest, mode=0o600):
            say(f"nothing to do: another job has just claimed launch {number}")
            return 0
        self._claimed = JobRecord(self._directory.launch(number))
        self._claimed.claim()
        return self._continue_chain(self._run_claimed(self._claimed, manifest, launch, position))

    def _end_abandoned(self, numbers: list[int]) -> None:
        """Write the ending of a launch whose job ended without writing one."""
        for number in numbers:
            manifest = self._directory.manifest(number)
            if manifest is not None and self._directory.ending(number) is None:
                failure = None
                if self._work.position() < manifest.end_sample:
                    failure = Failure(
                        f"job {self._owner(number)} ended without a report (a node, its daemon, or SIGKILL)"
                    )
                self._record(manifest, Poll("ended"), self._work.progress(manifest), failure, stopping=False)

    def _run_claimed(self, claimed: JobRecord, manifest: Manifest, launch: Launch, position: int) -> Ending:
        """Run the claimed launch."""
        failure = prologue_failure(self._run.site)
        (self._directory.path / names.OUTCOME).unlink(missing_ok=True)  # the run continues after all
        if failure is not None:
            return self._not_started(claimed, manifest, failure)
        if self._run.site.nodes_submit and self._successor() is None:
            script = write_chain_script(self._directory, self._plan, self._run, launch)
            submit_successor(self._directory, self._run, launch, script, slurm.me() or "", launch.nodes)
        self._directory.fence(manifest.number)  # from here on no older launch can save
        self._work.prepare(launch, manifest.number, position)
        self._report_start(manifest)
        try:
            handle = self._engine.start(self._work.job(launch, manifest.number, position))
        except BatchwrightError as error:
            return self._not_started(claimed, manifest, str(error))
        ending = self._wait_for_end(manifest, handle)
        claimed.end(ending.code, f"stopped by {self._interrupts.name}" if self._interrupts.name else "")
        return ending

    def _not_started(self, claimed: JobRecord, manifest: Manifest, reason: str) -> Ending:
        progress = self._work.progress(manifest)
        ending = self._record(manifest, Poll("ended"), progress, Failure(reason), stopping=False)
        claimed.end(1, reason)
        return ending

    def _stop_requests(self) -> int:
        if self._claimed is not None:
            self._claimed.heartbeat()
        return super()._stop_requests()

    def _continue_chain(self, ending: Ending) -> int:
        """Continue the chain after a launch, or end it; the job's exit code."""
        plan = self._directory.plan()  # as planned: a launch on fewer nodes grows again
        if ending.position >= plan.total_samples:
            return self._end_chain("complete", None)
        if (self._directory.path / names.STOP).exists():
            return self._end_chain("stopped", None)
        if not SlurmRun.load(self._directory).detached:
            say("the run has a supervisor on a login node now: the chain ends")
            return self._end_chain("stopped", None)
        nodes_submit = self._run.site.nodes_submit
        if ending.outcome == "done":
            if nodes_submit:
                self._submit_next(plan.launch_at(ending.position))
                if (successor := self._successor()) is not None:
                    slurm.cancel(successor)
            return 0
        failures, failure = self._without_progress(), ending.failure
        before = self._directory.ending(ending.number - 1) if failures > 1 else None
        final = failure is not None and hopeless(failure, before and before.failure)
        if final or failures > plan.options.max_retries:
            return self._end_chain("failed", failure or Failure(f"{failures} launches in a row made no progress"))
        if not nodes_submit:
            return 0
        wait = plan.options.retry_after(failures) if failures else 0.0
        if (successor := self._successor()) is not None:
            if wait:
                slurm.postpone(successor, wait)
            say(f"not complete: job {successor} continues" + (f" in {wait:g} s" if wait else ""))
            return TRY_AGAIN
        launch = plan.launch_at(ending.position)
        later = [f"--begin=now+{round(wait)}"] if wait else []
        job = submit_with_successor(self._directory, plan, self._run, launch, *later, freed=slurm.my_nodes())
        say(f"not complete: job {job} continues")
        return 0

    def _without_progress(self) -> int:
        """How many launches in a row, up to the last, ended where they started."""
        found = 0
        for number in reversed(self._directory.numbers()):
            manifest, ending = self._directory.manifest(number), self._directory.ending(number)
            if number <= self._run.after or manifest is None or ending is None:
                break
            if ending.position > manifest.start_sample:
                break
            found += 1
        return found

    def _submit_next(self, launch: Launch) -> None:
        """Submit the next job, unless one waits that will find what is next: there must be one chain only.

        A job that runs does not count: it may be a duplicate that is about to exit.
        """
        try:
            waiting = [one for one in slurm.jobs(self._run.token) if one.state in ("PENDING", "CONFIGURING")]
        except slurm.Unreachable:
            waiting = []
        next_jobs = [o.job for o in waiting if not (o.waits_for_a_job or o.stuck or "Held" in o.reason)]
        if next_jobs:
            say(f"the next job is already in the queue: job {next_jobs[0]}")
            return
        job = submit_with_successor(self._directory, self._directory.plan(), self._run, launch, freed=slurm.my_nodes())
        say(f"launch {launch.index + 1} is next: job {job}")

    def _successor(self, *, unknown: str | None = None) -> str | None:
        """The job that starts if this one fails, or None; `unknown` if the controller does not answer.

        Found by its dependency: a controller that was killed may have lost the successor and given its id away.
        """
        after = f"afternotok:{slurm.me()}"
        try:
            return next((one.job for one in slurm.jobs(self._run.token) if one.alive and one.depends(after)), None)
        except slurm.Unreachable:
            return unknown

    def _end_chain(self, state: str, failure: Failure | None) -> int:
        """End the chain."""
        cancel_all(self._directory, self._run.token)
        self._finish(state, failure)
        say(f"the run is {state}" + (f": {failure.reason}" if failure else ""))
        return 5 if state == "failed" else 0
