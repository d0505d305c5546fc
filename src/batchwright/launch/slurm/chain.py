"""A chain of jobs with nobody around: each runs one launch, and leaves the next one in the queue.

    link   runs whatever launch the checkpoints say is next; when its stages are complete, it submits the next link
    successor   waits behind a link, from the moment that is submitted, for it to fail in any way, even before it starts: a
           link that is not complete needs do nothing more

Where compute nodes may not submit, all links are queued at the start, each behind the one before, with spares. Either
way a job first looks: nothing left, somebody else's turn, or a launch of another size, and it exits 0.
"""

from __future__ import annotations

import re
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import FrameType

from batchwright.core.errors import BatchwrightError, EnvironmentFault
from batchwright.core.nodes.policies import Launch
from batchwright.launch.directory import RunDirectory, write_json
from batchwright.launch.engine import Poll
from batchwright.launch.interrupts import Interrupts
from batchwright.launch.records import Ending, Failure, Manifest, RunPlan
from batchwright.launch.show import LineDisplay
from batchwright.launch.supervisor import Supervisor
from batchwright.launch.work import launch_end, work
from batchwright.rundir import names
from batchwright.rundir.files import find_json

from . import commands as slurm
from . import sbatch
from .claim import JobRecord, create_once, owner_lives
from .elastic import affordable, on_nodes
from .engine import cancel_all, tasks_per_node, write_script
from .job import prologue_failure, say
from .site import SlurmRun, job_name
from .step import StepEngine

TRY_AGAIN = 75  # the exit code that lets the successor start
_LOCK_SECONDS = 60.0
_SUCCESSOR_SECONDS = (
    60.0  # for a controller that is away: a successor is a precaution, and the launch does not wait for it
)


def link_script(directory: RunDirectory, plan: RunPlan, run: SlurmRun, launch: Launch) -> sbatch.Script:
    """The script of one link."""
    job = work(directory, plan).job(launch, launch.index + 1, launch.start_sample)
    end = launch_end(plan, launch)
    return sbatch.Script(
        title=f"launch {launch.index + 1} of {len(plan.launches)}, {launch.nodes} nodes × {plan.devices_per_node} ranks, "
        f"samples {launch.start_sample:,} to {end:,}",
        name=job_name(run.site, directory),
        nodes=launch.nodes,
        tasks_per_node=tasks_per_node(run.site, job),
        comment=slurm.comment_of(run.token, "link", launch.index),
        log=directory.path / "logs" / f"launch-{launch.index + 1}.log",
        working_directory=job.working_directory,
        python=sys.executable,
        words=(str(directory.path), "link", str(launch.index)),
        shows=StepEngine(run.site).command(job),
    )


def write_link(directory: RunDirectory, plan: RunPlan, run: SlurmRun, launch: Launch) -> Path:
    """The script on disk."""
    path = directory.path / "scripts" / f"launch-{launch.index + 1}.sh"
    write_script(path, sbatch.render(link_script(directory, plan, run, launch), run.site))
    return path


def submit(
    directory: RunDirectory, plan: RunPlan, run: SlurmRun, launch: Launch, role: str, *options: str,
    nodes: int | None = None, seconds: float = slurm.PATIENCE,
) -> str:  # fmt: skip
    """Put a job of a chain in the queue, and write that down; as planned, or on `nodes`."""
    script, nodes = write_link(directory, plan, run, launch), nodes or launch.nodes
    mark = slurm.comment_of(run.token, role, launch.index)
    job = slurm.submit_patiently(script, mark, f"--nodes={nodes}", *options, seconds=seconds)
    directory.event("submitted", job=job, role=role, launch=launch.index, nodes=nodes, by=slurm.me())
    return job


def submit_successor(
    directory: RunDirectory, plan: RunPlan, run: SlurmRun, launch: Launch, job: str, nodes: int | None = None
) -> str | None:
    """Leave one behind a job; None where that is refused, as by a limit on how many may wait, or nobody answers soon."""
    try:
        after = (f"--dependency=afternotok:{job}", "--kill-on-invalid-dep=yes")
        return submit(directory, plan, run, launch, "successor", *after, nodes=nodes, seconds=_SUCCESSOR_SECONDS)
    except (BatchwrightError, OSError) as error:
        print(f"no successor for job {job}: {error}", file=sys.stderr)
        return None


def submit_with_successor(
    directory: RunDirectory, plan: RunPlan, run: SlurmRun, launch: Launch, *options: str,
    freed: tuple[int, str] = (0, ""),
) -> str:  # fmt: skip
    """A link, and the job that goes on where it is cancelled, or dies before it can leave a successor of its own.

    Both on the nodes that the cluster can give soon, where the site is elastic; `freed` are those of the job that asks.
    """
    nodes = affordable(plan, launch, run.site, write_link(directory, plan, run, launch), freed)
    job = submit(directory, plan, run, launch, "link", *options, nodes=nodes)
    submit_successor(directory, plan, run, launch, job, nodes)
    return job


def begin(directory: RunDirectory, plan: RunPlan, run: SlurmRun) -> list[str]:
    """Start a chain, or go on with one: the first link, or all of them where nodes may not submit."""
    if directory.supervisor() is not None:
        directory.lock()  # says who it is
    for name in ("stop.json", "outcome.json"):
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
        for spare in range(1 + run.site.spares):
            after = [f"--dependency=afterany:{queued[-1]}"] if queued else []
            queued.append(submit(directory, plan, run, launch, "spare" if spare else "link", *after))
    return queued


def stop(directory: RunDirectory, *, now: bool = False) -> None:
    """End a chain: what waits is taken back, what runs saves and stops."""
    write_json(directory.path / names.STOP, {"now": now})
    try:
        known = slurm.jobs(SlurmRun.load(directory).token)
    except slurm.Unreachable as error:
        raise EnvironmentFault(
            f"Slurm does not answer here ({error}), so nothing was taken out of the queue. A job of {directory.path} that "
            "runs, or that starts later, sees the wish and stops by itself.",
            field="stop",
            given=str(directory.path),
        ) from None
    for one in known:
        if one.alive and one.state == "PENDING":
            slurm.cancel(one.job)


class _JobSignals(Interrupts):
    """Slurm's signals: the warning before the time limit, scancel, preemption. Each asks for a checkpoint, never twice."""

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


class Link(Supervisor):
    """The supervisor of one launch, inside its own job."""

    def __init__(self, directory: RunDirectory) -> None:
        self._run = SlurmRun.load(directory)
        super().__init__(directory, directory.plan(), StepEngine(self._run.site), LineDisplay(sys.stdout))
        self._interrupts: _JobSignals = _JobSignals()
        self._successor: str | None = None
        self._claimed: JobRecord | None = None

    def run_link(self) -> int:
        """The job's exit code: 0 where the chain goes on by itself or is over, 75 for the successor."""
        with self._interrupts:
            try:
                reason = self._locked()
                if reason is None:
                    return self._checked_turn()
                say(f"nothing to do: {reason}")
                return 0
            except (BatchwrightError, OSError) as error:
                say(f"{type(error).__name__}: {error}")
                return error.exit_code if isinstance(error, BatchwrightError) else EnvironmentFault.exit_code
            finally:
                self._directory.unlock()

    def _not_ours(self) -> str | None:
        if not SlurmRun.load(self._directory).detached:
            return "this run is supervised from elsewhere"
        if (self._directory.path / names.STOP).exists():
            return "the run is to stop"
        for number in self._directory.numbers()[-1:]:
            manifest = self._directory.manifest(number)
            owner = str((manifest.handle or {}).get("job")) if manifest else None
            if (
                self._directory.ending(number) is None
                and owner != slurm.me()
                and owner_lives(self._directory, number, owner, slurm.comment_of_run(self._run.token))
            ):
                return f"launch {number} is being run by job {owner}"
        return None

    def _locked(self) -> str | None:
        """The lock is a second guard, where the file system has one; a link before this one may be on its way out."""
        deadline, waits = time.monotonic() + _LOCK_SECONDS, False
        while (reason := self._not_ours()) is None:
            if self._interrupts.stop_requests:
                if self._run.site.nodes_submit:
                    self._pass_on(self._plan.launch_at(self._work.position()))
                return f"asked to leave by {self._interrupts.name}, and the run's lock was never free"
            try:
                return self._directory.lock()
            except EnvironmentFault as error:
                if not waits:
                    waits = True
                    say(f"waiting: {error}")
                if time.monotonic() > deadline and self._lock_is_stale():
                    say("the lock is that of a process that is gone: going on without it")
                    return None
            except OSError:
                return None
        return reason

    def _lock_is_stale(self) -> bool:
        """Whether no job of ours can have it: a file server may keep it for a node that is gone."""
        numbers = self._directory.numbers()
        owners = {(find_json(self._directory.launch(number) / "job.json") or {}).get("job") for number in numbers}
        try:
            known = slurm.jobs(self._run.token)
        except slurm.Unreachable:
            return False
        # One that has no launch waits for the lock itself.
        return not any(one.alive and one.job in owners and one.job != slurm.me() for one in known)

    def _checked_turn(self) -> int:
        """A turn; where it cannot be taken and nobody comes after it, that is the end of the chain, with its reason."""
        self._successor = self._waiting_successor() if self._run.site.nodes_submit else None
        try:
            return self._turn()
        except (BatchwrightError, OSError) as error:
            if self._run.site.nodes_submit and not self._successor_waits(unknown=True):
                self._finish("failed", Failure(str(error)))
            raise

    def _turn(self) -> int:
        """Whose turn it is, by the checkpoints; and if it is ours, run it."""
        plan = self._plan
        # Once: of two links that look at the same time only one can make the next.
        numbers = self._directory.numbers()
        if (reason := self._not_ours()) is not None:
            say(f"nothing to do: {reason}")
            return 0
        self._left_behind(numbers[-1:])
        last = self._directory.ending(numbers[-1]) if numbers else None
        # After a failure the checkpoint is read through: it may be what failed.
        position = self._work.position(verify=last is not None and last.outcome != "done")
        if position >= plan.total_samples:
            say("nothing to do: the run is complete")
            return self._over("complete", None)
        if self._in_vain() > plan.options.max_retries:  # those before this one could not even say so
            return self._over("failed", (last and last.failure) or Failure("launches in a row made no progress"))
        launch = plan.launch_at(position)
        nodes = slurm.my_nodes()[0] or launch.nodes
        sized = on_nodes(plan, launch, nodes) if nodes == launch.nodes or self._run.site.elastic else None
        if sized is None:
            say(f"launch {launch.index + 1} is next, on {launch.nodes} nodes, and this job has {nodes}: not its turn")
            if self._run.site.nodes_submit:
                self._pass_on(launch)
            return 0
        self._plan, launch = sized
        options = self._plan.options  # all the time that there is before a time limit
        options = replace(options, grace_seconds=max(options.grace_seconds, self._run.site.signal_seconds))
        self._plan = replace(self._plan, options=options)
        self._work = work(self._directory, self._plan)
        number = max(numbers, default=0) + 1
        job = self._work.job(launch, number, position)
        manifest = Manifest(
            number, launch.index, nodes, self._plan.ranks(launch), position, launch_end(plan, launch), job.argv,
            job.environment, str(job.working_directory), self._clock(), {"engine": "slurm", "job": slurm.me(),
            "directory": str(job.directory)},
        )  # fmt: skip
        if not create_once(self._directory.launch(number) / "manifest.json", manifest):
            say(f"nothing to do: launch {number} was claimed by another job a moment ago")
            return 0
        self._claimed = JobRecord(self._directory.launch(number))
        self._claimed.claim()
        return self._after(self._one(manifest, launch, position))

    def _left_behind(self, numbers: list[int]) -> None:
        """A launch whose job died without a word gets its ending now."""
        for number in numbers:
            manifest = self._directory.manifest(number)
            if manifest is not None and self._directory.ending(number) is None:
                owner = str((manifest.handle or {}).get("job"))
                failure = None
                if self._work.position() < manifest.end_sample:
                    failure = Failure(f"job {owner} ended without a word (a node, its daemon, or SIGKILL)")
                self._record(manifest, Poll("ended"), self._work.progress(manifest), failure, stopping=False)

    def _one(self, manifest: Manifest, launch: Launch, position: int) -> Ending:
        """Run the launch that is claimed."""
        assert self._claimed is not None
        failure = prologue_failure(self._run.site)
        (self._directory.path / names.OUTCOME).unlink(missing_ok=True)  # it goes on, whatever a job before it thought
        if failure is not None:
            return self._never_ran(manifest, failure)
        if self._run.site.nodes_submit and self._successor is None:
            self._successor = submit_successor(self._directory, self._plan, self._run, launch, slurm.me() or "")
        self._directory.fence(manifest.number)  # from here on no older launch can save
        self._work.prepare(launch, manifest.number, position)
        self._directory.event(
            "launch", number=manifest.number, launch=launch.index, stage=self._plan.stage_at(position).index,
            nodes=manifest.nodes, ranks=manifest.ranks, start_sample=position, end_sample=manifest.end_sample,
        )  # fmt: skip
        self._listener.launched(self._plan, manifest)
        self._speeds.restart()
        try:
            handle = self._engine.start(self._work.job(launch, manifest.number, position))
        except BatchwrightError as error:
            return self._never_ran(manifest, str(error))
        ending = self._wait_for_end(manifest, handle)
        self._claimed.end(ending.code, f"stopped by {self._interrupts.name}" if self._interrupts.name else "")
        return ending

    def _never_ran(self, manifest: Manifest, reason: str) -> Ending:
        assert self._claimed is not None
        progress = self._work.progress(manifest)
        ending = self._record(manifest, Poll("ended"), progress, Failure(reason), stopping=False)
        self._claimed.end(1, reason)
        return ending

    def _stop_requests(self) -> int:
        if self._claimed is not None:
            self._claimed.beat()
        return super()._stop_requests()

    def _waiting_successor(self) -> str | None:
        """The one that was submitted with this job."""
        mine = re.compile(rf"\bafternotok:{slurm.me()}\b")
        try:
            return next(
                (one.job for one in slurm.jobs(self._run.token) if one.alive and mine.search(one.dependency)), None
            )
        except slurm.Unreachable:
            return None

    def _after(self, ending: Ending) -> int:
        """What the chain does next."""
        plan = self._directory.plan()  # as planned: a launch on fewer nodes grows again
        if ending.position >= plan.total_samples:
            return self._over("complete", None)
        if (self._directory.path / names.STOP).exists():
            return self._over("stopped", None)
        if not SlurmRun.load(self._directory).detached:
            say("supervised from elsewhere now: the chain ends here")
            return self._over("stopped", None)
        if ending.outcome == "done":
            if self._run.site.nodes_submit:
                self._pass_on(plan.launch_at(ending.position))
            self._drop_successor()
            return 0
        in_vain = self._in_vain()
        failure = ending.failure
        hopeless = failure is not None and (
            failure.kind == "overshot" or (failure.kind in ("oom", "refused") and in_vain > 1)
        )
        if hopeless or in_vain > plan.options.max_retries:
            return self._over("failed", failure or Failure(f"{in_vain} launches in a row made no progress"))
        wait = 0.0
        if in_vain:
            wait = plan.options.retry_after(in_vain)
        if self._successor is not None and self._successor_waits():
            if wait:
                slurm.postpone(self._successor, wait)
            say(f"not complete: job {self._successor} goes on" + (f" in {wait:g} s" if wait else ""))
            return TRY_AGAIN
        if self._run.site.nodes_submit:
            launch = plan.launch_at(ending.position)
            after = [f"--begin=now+{round(wait)}"] if wait else []
            job = submit_with_successor(self._directory, plan, self._run, launch, *after, freed=slurm.my_nodes())
            say(f"not complete: job {job} goes on")
        return 0

    def _in_vain(self) -> int:
        """How many launches in a row, up to the last, ended where they began."""
        found = 0
        for number in reversed(self._directory.numbers()):
            manifest, ending = self._directory.manifest(number), self._directory.ending(number)
            if (
                number <= self._run.after
                or manifest is None
                or ending is None
                or ending.position > manifest.start_sample
            ):
                break
            found += 1
        return found

    def _pass_on(self, launch: Launch) -> None:
        """Submit the next link, unless one of this run's waits already: two chains are one too many.

        One that runs does not count: it may be a duplicate on its way out. One that waits will find what is next.
        """
        try:
            waiting = [one for one in slurm.jobs(self._run.token) if one.state in ("PENDING", "CONFIGURING")]
        except slurm.Unreachable:
            waiting = []
        useful = [one for one in waiting if not one.stuck and "Held" not in one.reason]
        links = [one.job for one in useful if slurm.role_of(one.comment)[0] == "link"]
        if links:
            say(f"the next link is there already: job {links[0]}")
            return
        job = submit_with_successor(self._directory, self._directory.plan(), self._run, launch, freed=slurm.my_nodes())
        say(f"launch {launch.index + 1} is next: job {job}")

    def _successor_waits(self, *, unknown: bool = False) -> bool:
        """Whether the successor is still in the queue: a controller that was killed may have lost it, and reused its number."""
        if self._successor is None:
            return False
        try:
            mark = slurm.comment_of_run(self._run.token) + "successor:"
            seen = slurm.job(self._successor, mark)
        except slurm.Unreachable:
            return unknown
        return seen is not None and seen.alive

    def _drop_successor(self) -> None:
        if self._successor is not None and self._successor_waits():
            slurm.cancel(self._successor)

    def _over(self, state: str, failure: Failure | None) -> int:
        """The end of the chain."""
        self._drop_successor()
        cancel_all(self._directory, self._run.token)
        self._finish(state, failure)
        say(f"the run is {state}" + (f": {failure.reason}" if failure else ""))
        return 5 if state == "failed" else 0
