"""Engine `slurm`: a supervisor on a login node submits one job per launch, each with its own nodes, and watches.

    supervisor -> sbatch                        here
    job.sh -> slurm_job -> srun -> rank.py      on the nodes, with nobody of ours in between

A job's state comes from the files that it writes in the run directory. squeue says whether it waits, and what became of
one that left no word; it forgets a job soon after its end, which then is no answer, and no harm. sacct may know more.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from batchwright.launch.directory import RunDirectory, write_json
from batchwright.launch.engine import Action, Handle, Job, Poll, RankLog, rank_logs
from batchwright.rundir import atomic
from batchwright.rundir.files import find_json

from . import commands as slurm
from . import sbatch
from .site import Site, SlurmRun, job_name
from .step import Leaving, StepEngine

SIGNAL_SECONDS = 5.0  # between two equal signals: each is a call to the controller
_LEAVING_LAUNCHES = 3  # whose jobs may still be there
_WAITING = ("PENDING", "SUSPENDED", "STOPPED")  # states in which nothing can be expected of a job


class SlurmEngine:
    """Jobs of a Slurm cluster, submitted from here."""

    name = "slurm"

    def __init__(self) -> None:
        self.pause: slurm.Pause = slurm.pause  # while the controller is away
        self._asked: dict[str, tuple[float, Poll]] = {}
        self._sent: dict[tuple[str, str], float] = {}
        self._leaving = Leaving()

    def command(self, job: Job) -> tuple[str, ...]:
        """What is run here; the ranks' own command is in the script."""
        return ("sbatch", "--parsable", str(job.directory / "job.sh"))

    def start(self, job: Job) -> Handle:
        """Submit a launch. An earlier one that nobody recorded is taken out of the queue first."""
        directory = RunDirectory(job.directory.parents[1])
        run = SlurmRun.load(directory)
        if not SlurmRun.path(directory).exists():
            run.save(directory)
        cancel_all(directory, run.token)
        job = replace(job, grace_seconds=max(job.grace_seconds, run.site.signal_seconds))  # all the time that there is
        number = int(job.directory.name)
        mark = slurm.comment_of(run.token, "start", number)
        write_job(job)
        script = start_script(directory, run, job, number)
        write_script(job.directory / "job.sh", sbatch.render(script, run.site))
        submitted = time.time()
        job_id = slurm.submit_patiently(job.directory / "job.sh", mark, pause=self.pause)
        return {
            "engine": self.name, "job": job_id, "directory": str(job.directory), "submitted": submitted,
            "mark": mark, "poll_seconds": run.site.poll_seconds,
        }  # fmt: skip

    def poll(self, handle: Handle) -> Poll:
        """By the job's own file; then by squeue, asked now and then."""
        record = _record(handle)
        if record.get("state") == "ended":
            return Poll("ended", record.get("code"), record.get("detail") or "")
        when, known = self._asked.get(handle["job"], (0.0, Poll("running" if record else "pending")))
        if known.state == "ended" or time.monotonic() - when < handle.get("poll_seconds", 5.0):
            return known
        try:
            known = self._look(handle, slurm.job(_owner(handle, record), handle.get("mark", "")))
        except slurm.Unreachable as error:
            known = Poll(known.state, detail=f"the controller does not answer: {error}")
        self._asked[handle["job"]] = (time.monotonic(), known)
        return known

    def _look(self, handle: Handle, seen: slurm.Queued | None) -> Poll:
        if seen is not None and seen.alive:
            if seen.state not in _WAITING:
                return Poll("running", detail=seen.state)
            if seen.stuck:
                # Nobody would ever release it: away with it, and the supervisor tries again.
                slurm.cancel(handle["job"])
                return Poll(
                    "ended", None, f"Slurm could not start it and holds it ({seen.reason}): a node's prolog may fail"
                )
            if seen.state != "PENDING":
                return Poll("pending", detail=f"job {seen.job} is {seen.state.lower()}")
            # None: the scheduler has not looked yet.
            return Poll("pending", detail="" if seen.reason == "None" else f"waiting in the queue: {seen.reason}")
        record = _record(handle)  # it may have been written since
        state = seen.state if seen is not None else slurm.accounted(handle["job"])
        if record.get("state") == "ended":
            return Poll("ended", record.get("code"), record.get("detail") or "")
        if record:
            return Poll("ended", None, f"Slurm ended its job {handle['job']}: {_words(state)}")
        return Poll(
            "ended", None, f"job {handle['job']} ended before its first word: {_words(state)}. Are the run directory and "
            f"{sys.executable} there on the nodes? {Path(handle['directory']) / 'logs' / 'job.log'}",
        )  # fmt: skip

    def signal(self, handle: Handle, action: Action) -> None:
        """Ask the job's own process, which asks the ranks; a job that still waits is taken back."""
        key = (handle["job"], action)
        if time.monotonic() - self._sent.get(key, -SIGNAL_SECONDS) < SIGNAL_SECONDS:
            return
        if action == "kill" and self._leaving.soon(handle["job"], self.logs(handle)):
            return  # by itself, and not as CANCELLED
        self._sent[key] = time.monotonic()
        record = _record(handle)
        job_id = _owner(handle, record)
        try:
            if slurm.job(job_id, handle.get("mark", "")) is None:
                return
        except slurm.Unreachable:
            return  # the wish is repeated
        if action == "kill":
            slurm.cancel(job_id, "--signal=KILL", "--full")
        if action == "kill" or not record:
            slurm.cancel(job_id)
            self._asked.pop(handle["job"], None)
        else:
            slurm.cancel(job_id, "--batch", f"--signal={'USR2' if action == 'trace' else 'USR1'}")

    def logs(self, handle: Handle) -> tuple[RankLog, ...]:
        """Every rank's files; the processes are elsewhere."""
        return rank_logs(Path(handle["directory"]), alive=False)


def _record(handle: Handle) -> dict[str, Any]:
    return find_json(Path(handle["directory"]) / "job.json") or {}


def _owner(handle: Handle, record: dict[str, Any]) -> str:
    """The job that runs a launch: the one that was submitted, or a duplicate that was first."""
    return record.get("job") or handle["job"]


def _words(state: str | None) -> str:
    known = {
        "TIMEOUT": "its time limit came", "NODE_FAIL": "a node failed", "PREEMPTED": "it was preempted",
        "OUT_OF_MEMORY": "out of memory", "CANCELLED": "it was cancelled",
    }  # fmt: skip
    return known.get(state or "", state or "squeue has forgotten it, and there are no accounts (sacct)")


def cancel_all(directory: RunDirectory, token: str) -> list[str]:
    """Take every living job of a run out of the queue; those that were. One that leaves by itself is let go."""
    numbers = directory.numbers()[-_LEAVING_LAUNCHES:]
    records = [find_json(directory.launch(number) / "job.json") or {} for number in numbers]
    leaving = {slurm.me(), *(record.get("job") for record in records if record.get("state") == "ended")}
    try:
        known = [one for one in slurm.jobs(token) if one.alive and one.state != "COMPLETING"]
        # First those that wait for another: its end would start them.
        known.sort(key=lambda one: "after" not in one.dependency)
        found = [one.job for one in known if one.job not in leaving]
    except slurm.Unreachable:
        return []
    for job_id in found:
        slurm.cancel(job_id)
    return found


def start_script(directory: RunDirectory, run: SlurmRun, job: Job, number: int) -> sbatch.Script:
    """The script of a launch that a supervisor starts."""
    return sbatch.Script(
        title=f"start {number}, {job.nodes} nodes × {job.ranks_per_node} ranks",
        name=job_name(run.site, directory),
        nodes=job.nodes,
        tasks_per_node=tasks_per_node(run.site, job),
        comment=slurm.comment_of(run.token, "start", number),
        log=job.directory / "logs" / "job.log",
        working_directory=job.working_directory,
        python=sys.executable,
        words=(str(directory.path), "start", str(number)),
        shows=StepEngine(run.site).command(job),
    )


def tasks_per_node(site: Site, job: Job) -> int:
    """A command of the user's own may srun its ranks, so it has all tasks to itself."""
    return 1 if site.launcher == "torchrun" and not job.direct else job.ranks_per_node


def write_script(path: Path, text: str) -> None:
    """Write a script whole, for its owner only: a prologue may hold secrets."""
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic.write(path, text, mode=0o700)


def write_job(job: Job) -> None:
    """The launch as its job reads it: command and environment as JSON, through no shell."""
    document = {**vars(job), "directory": str(job.directory), "working_directory": str(job.working_directory)}
    write_json(job.directory / "work.json", document)


def read_job(directory: Path) -> Job | None:
    """What `write_job` wrote."""
    document = find_json(directory / "work.json")
    if not isinstance(document, dict):
        return None
    paths = {key: Path(document[key]) for key in ("directory", "working_directory")}
    return Job(**{**document, **paths, "argv": tuple(document["argv"])})
