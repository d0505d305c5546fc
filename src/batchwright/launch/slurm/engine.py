"""Engine `slurm`: a supervisor on a login node submits one job per launch, each with its own nodes, and watches it.

    supervisor -> sbatch                        on the login node
    job.sh -> job.py -> srun -> rank.py         on the nodes

The state of a job comes from the files that it writes to the run directory. squeue says whether it waits, and how it ended
if it wrote nothing. squeue forgets a job soon after its end; sacct may know more.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from batchwright.core import codec
from batchwright.core.nodes.policies import Launch
from batchwright.launch.directory import RunDirectory, write_json
from batchwright.launch.engine import Action, Handle, Job, Poll, RankLog, rank_logs
from batchwright.launch.interrupts import Pause, pause
from batchwright.launch.records import Ending, Failure, RunPlan
from batchwright.launch.supervisor import Listener, Supervisor
from batchwright.launch.work import work
from batchwright.rundir.files import find_object

from . import commands as slurm
from .claim import job_record
from .elastic import affordable, on_nodes
from .script import render, write_chain_script, write_script
from .site import SlurmRun
from .step import Leaving

SIGNAL_SECONDS = 5.0  # between two equal signals: each is a call to the controller
_LEAVING_LAUNCHES = 3  # whose jobs may still be in the queue
_WAITING = ("PENDING", "SUSPENDED", "STOPPED")  # a job in these states makes no progress
_REASONS = {
    "TIMEOUT": "it reached its time limit",
    "NODE_FAIL": "a node failed",
    "PREEMPTED": "it was preempted",
    "OUT_OF_MEMORY": "out of memory",
    "CANCELLED": "it was cancelled",
}


class SlurmEngine:
    """Jobs of a Slurm cluster, submitted from here."""

    name = "slurm"

    def __init__(self, pause: Pause = pause) -> None:
        self._pause = pause  # while the controller does not answer
        self._asked: dict[str, tuple[float, Poll]] = {}
        self._sent: dict[tuple[str, str], float] = {}
        self._leaving = Leaving()

    def command(self, job: Job) -> tuple[str, ...]:
        """What runs here; the script holds the ranks' own command."""
        return ("sbatch", "--parsable", str(job.directory / "job.sh"))

    def start(self, job: Job) -> Handle:
        """Cancel the jobs of earlier launches that still run or wait, then submit a launch."""
        directory = RunDirectory(job.directory.parents[1])
        run = SlurmRun.load(directory)
        if not SlurmRun.path(directory).exists():
            run.save(directory)
        cancel_all(directory, run.token)
        # A checkpoint may use all the time before a time limit.
        job = replace(job, grace_seconds=max(job.grace_seconds, run.site.signal_seconds))
        number, script = int(job.directory.name), job.directory / "job.sh"
        write_job(job)
        title = f"start {number}, {job.nodes} nodes × {job.ranks_per_node} ranks"
        log = job.directory / "logs" / "job.log"
        write_script(script, render(directory, run, job, "start", number, title=title, log=log))
        submitted, comment = time.time(), slurm.comment(run.token, "start", number)
        return {
            "engine": self.name,
            "job": slurm.submit_patiently(script, comment, pause=self._pause),
            "directory": str(job.directory),
            "submitted": submitted,
            "comment": comment,
            "poll_seconds": run.site.poll_seconds,
        }

    def poll(self, handle: Handle) -> Poll:
        """By the job's own file; then by squeue, every `poll_seconds`."""
        record = _record(handle)
        if record.get("state") == "ended":
            return _ended(record)
        when, known = self._asked.get(handle["job"], (0.0, Poll("running" if record else "pending")))
        if known.state == "ended" or time.monotonic() - when < handle.get("poll_seconds", 5.0):
            return known
        try:
            known = self._look(handle, slurm.job(_owner(handle, record), handle.get("comment", "")))
        except slurm.Unreachable as error:
            known = Poll(known.state, detail=f"the controller does not answer: {error}")
        self._asked[handle["job"]] = (time.monotonic(), known)
        return known

    def _look(self, handle: Handle, seen: slurm.Queued | None) -> Poll:
        if seen is not None and seen.alive:
            if seen.state not in _WAITING:
                return Poll("running", detail=seen.state)
            if seen.stuck:
                # Only a person could release it. Without it, the supervisor tries again.
                slurm.cancel(handle["job"])
                return Poll(
                    "ended", None, f"Slurm could not start it and holds it ({seen.reason}): a node's prolog may fail"
                )
            if seen.state != "PENDING":
                return Poll("pending", detail=f"job {seen.job} is {seen.state.lower()}")
            # "None": the scheduler has not looked at it yet.
            return Poll("pending", detail="" if seen.reason == "None" else f"waiting in the queue: {seen.reason}")
        state = seen.state if seen is not None else slurm.accounted(handle["job"])
        record = _record(handle)  # the job may have written it since
        if record.get("state") == "ended":
            return _ended(record)
        reason = _REASONS.get(state or "", state or "squeue has forgotten it, and there are no accounts (sacct)")
        if record:
            return Poll("ended", None, f"Slurm ended its job {handle['job']}: {reason}")
        log = Path(handle["directory"]) / "logs" / "job.log"
        return Poll(
            "ended",
            None,
            f"job {handle['job']} ended before its process started: {reason}. Can the nodes read the run directory and "
            f"{sys.executable}? {log}",
        )

    def signal(self, handle: Handle, action: Action) -> None:
        """Ask the job's first process, which asks the ranks; a job that still waits is cancelled."""
        key = (handle["job"], action)
        if time.monotonic() - self._sent.get(key, -SIGNAL_SECONDS) < SIGNAL_SECONDS:
            return
        if action == "kill" and self._leaving.soon(handle["directory"]):
            return  # it ends by itself, and then Slurm does not call it CANCELLED
        self._sent[key] = time.monotonic()
        record = _record(handle)
        job_id = _owner(handle, record)
        try:
            if slurm.job(job_id, handle.get("comment", "")) is None:
                return
        except slurm.Unreachable:
            return  # the supervisor repeats the action
        if action == "kill":
            slurm.cancel(job_id, "--signal=KILL", "--full")
        if action == "kill" or not record:
            slurm.cancel(job_id)
            self._asked.pop(handle["job"], None)
        else:
            slurm.cancel(job_id, "--batch", f"--signal={'USR2' if action == 'trace' else 'USR1'}")

    def logs(self, handle: Handle) -> tuple[RankLog, ...]:
        """Every rank's files; the processes run on other machines."""
        return rank_logs(Path(handle["directory"]), alive=False)


def _record(handle: Handle) -> dict[str, Any]:
    return job_record(Path(handle["directory"]))


def _ended(record: Mapping[str, Any]) -> Poll:
    return Poll("ended", record.get("code"), record.get("detail") or "")


def _owner(handle: Handle, record: Mapping[str, Any]) -> str:
    """The job that runs a launch: the submitted one, or a duplicate that claimed the launch first."""
    return record.get("job") or handle["job"]


def cancel_all(directory: RunDirectory, token: str) -> list[str]:
    """Cancel the jobs of a run that run or wait, and return them; not this job, and none that is about to end."""
    records = [job_record(directory.launch(number)) for number in directory.numbers()[-_LEAVING_LAUNCHES:]]
    leaving = {slurm.me(), *(record.get("job") for record in records if record.get("state") == "ended")}
    try:
        known = [one for one in slurm.jobs(token) if one.alive and one.state != "COMPLETING"]
    except slurm.Unreachable:
        return []
    # First those that wait for another job: the end of that job would start them.
    known.sort(key=lambda one: not one.waits_for_a_job)
    found = [one.job for one in known if one.job not in leaving]
    for job_id in found:
        slurm.cancel(job_id)
    return found


def write_job(job: Job) -> None:
    """Write the launch for its job: command and environment as JSON, which no shell reads."""
    document = {**vars(job), "directory": str(job.directory), "working_directory": str(job.working_directory)}
    write_json(job.directory / "work.json", document)


def read_job(directory: Path) -> Job | None:
    """What `write_job` wrote."""
    document = find_object(directory / "work.json")
    if document is None:
        return None
    paths = {key: Path(document[key]) for key in ("directory", "working_directory")}
    return codec.decode(Job, {**document, **paths})


class SlurmSupervisor(Supervisor):
    """A supervisor whose launches are jobs: it may take fewer nodes, and reports what Slurm reports."""

    launcher = "srun"

    def __init__(self, directory: RunDirectory, plan: RunPlan, listener: Listener) -> None:
        super().__init__(directory, plan, SlurmEngine(self._without_controller), listener)
        self._reported = ""  # the last answer of a controller that was not there

    def _launch(self, launch: Launch, position: int) -> Ending:
        """Run a launch; a stop is possible even while no controller takes its job."""
        try:
            return self._sized(launch, position)
        except slurm.Withdrawn:
            # The ending tells a job that the controller took without an answer that there is nothing to do.
            number = max(self._directory.numbers())
            ending = Ending(number, "stopped", position, self._clock())
            write_json(self._directory.launch(number) / "ending.json", ending)
            return ending

    def _without_controller(self, seconds: float, reason: str) -> bool:
        if reason != self._reported:
            self._reported = reason
            self._listener.note(f"Slurm's controller does not answer; asking again: {reason}")
        self._interrupts.sleep(seconds)
        return not self._stop_requests()

    def _sized(self, launch: Launch, position: int) -> Ending:
        """Run on the nodes of the plan or, if the site is elastic, on those that the cluster can give soon."""
        run = SlurmRun.load(self._directory)
        if not run.site.elastic:
            return super()._launch(launch, position)
        planned, planned_work = self._plan, self._work
        nodes = affordable(planned, launch, run.site, write_chain_script(self._directory, planned, run, launch))
        if nodes != launch.nodes:
            self._listener.note(
                f"launch {launch.index + 1} takes {nodes} nodes: {launch.nodes} nodes are not free soon enough"
            )
        self._plan, launch = on_nodes(planned, launch, nodes) or (planned, launch)
        self._work = work(self._directory, self._plan, self._pause)
        try:
            return super()._launch(launch, position)
        finally:
            self._plan, self._work = planned, planned_work

    def _engine_reason(self, polled: Poll, ranks: Sequence[RankLog]) -> Failure | None:
        """If no rank failed, the reason is what Slurm or the job reports."""
        return Failure(polled.detail, code=polled.code) if polled.detail and not any(r.code for r in ranks) else None
