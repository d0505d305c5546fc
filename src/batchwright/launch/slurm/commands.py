"""Slurm's own commands, each with a time limit; their output becomes a few records.

The controller may not answer for a while (a restart, a busy hour): that is `Unreachable`, and never the end of a job.
"""

from __future__ import annotations

import datetime
import os
import re
import shutil
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from batchwright.core.errors import EnvironmentFault
from batchwright.launch.interrupts import Pause, pause

SECONDS = 60.0
PATIENCE = 1800.0  # without a controller: its failover or upgrade takes minutes
# In these states a job has ended or will never run. In all others (PENDING, RUNNING, COMPLETING, …) it is alive.
ENDED = frozenset(
    "BOOT_FAIL CANCELLED COMPLETED DEADLINE FAILED NODE_FAIL OUT_OF_MEMORY PREEMPTED REVOKED TIMEOUT".split()
)
# Variables of the submitter by which sbatch would override lines of the script that a chain needs.
_STRUCTURAL = frozenset(
    "SBATCH_ARRAY_INX SBATCH_CLUSTERS SBATCH_COMMENT SBATCH_ERROR SBATCH_EXPORT SBATCH_GET_USER_ENV SBATCH_INPUT "
    "SBATCH_JOB_NAME SBATCH_NO_REQUEUE SBATCH_OUTPUT SBATCH_REQUEUE SBATCH_SIGNAL SBATCH_TEST_ONLY SBATCH_WAIT "
    "BATCHWRIGHT_PROLOGUE_FAILED".split()  # the last is about the job that submits
)
# Options whose variable is not SBATCH_OPTION.
_VARIABLES = {"time": "SBATCH_TIMELIMIT", "mem": "SBATCH_MEM_PER_NODE", "debug": "SBATCH_DEBUG"}
_OPTION = re.compile(r"^#SBATCH\s+--([a-z-]+)", re.MULTILINE)
_STARTS = re.compile(r"to start at (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)")
_NO_ANSWER = re.compile(r"Unable to contact|[Cc]onnect|timed out|Zero Bytes|temporarily unable|Slurm backup|[Mm]unge")
_FIELDS = "%i|%T|%D|%k|%E|%r"
# Reasons of a job that only a person can release.
_STUCK = ("launch failed requeued held", "JobHeldAdmin", "PrologError", "BadConstraints", "DependencyNeverSatisfied")


class Unreachable(Exception):
    """The controller did not answer; nothing is known."""


class Withdrawn(Exception):
    """The run was asked to stop before the controller accepted its job."""


@dataclass(frozen=True)
class Queued:
    """One job as squeue shows it."""

    job: str
    state: str
    nodes: int
    comment: str
    reason: str
    dependency: str = ""

    @property
    def alive(self) -> bool:
        """Whether it runs or may still run."""
        return self.state not in ENDED

    @property
    def stuck(self) -> bool:
        """Whether Slurm could not start it and holds it."""
        return any(text in self.reason for text in _STUCK)

    @property
    def waits_for_a_job(self) -> bool:
        """Whether it can start only after another job has ended."""
        return "after" in self.dependency

    def depends(self, after: str) -> bool:
        """Whether it has this dependency, such as `afternotok:7`; every job depends on ""."""
        return not after or re.search(rf"\b{after}\b", self.dependency) is not None


def comment_prefix(token: str) -> str:
    """The first part of the comments of all jobs of a run."""
    return f"batchwright:{token}:"


def comment(token: str, role: str, number: int) -> str:
    """The comment of a job in Slurm's queue, by which a run finds its jobs.

    >>> comment("c0ffee", "chain", 2)
    'batchwright:c0ffee:chain:2'
    """
    return f"{comment_prefix(token)}{role}:{number}"


def role_of(comment: str) -> tuple[str, int]:
    """Role and number in a comment.

    >>> role_of("batchwright:c0ffee:successor:2")
    ('successor', 2)
    """
    *_, role, number = comment.split(":")
    return role, int(number) if number.isdigit() else -1


def environment(base: Mapping[str, str] | None = None) -> dict[str, str]:
    """What a job may inherit: nothing of the job that submits it, because srun would use its numbers."""
    known = os.environ if base is None else base
    return {
        k: v for k, v in known.items() if k == "SLURM_CONF" or not (k.startswith(("SLURM", "PMI")) or k in _STRUCTURAL)
    }


def installed() -> bool:
    """Whether Slurm's commands are installed here."""
    return shutil.which("sbatch") is not None


def check_installed() -> None:
    """An error if Slurm's commands are not installed here."""
    if not installed():
        raise EnvironmentFault(
            "sbatch is not installed here, and --engine slurm submits with it. Run this on a login node of the cluster, "
            "or look at the scripts with --dry-run.",
            field="engine",
            given="slurm",
            nearest=("local",),
        )


def submit(script: Path, *options: str) -> str:
    """Submit a script; the job's id."""
    check_installed()
    done = _run("sbatch", "--parsable", *options, str(script), without=_variables_of(script))
    job = done.stdout.strip().split(";")[0]
    if done.returncode and _NO_ANSWER.search(done.stderr):
        raise Unreachable(_output(done))
    if done.returncode or not job.isdigit():
        raise EnvironmentFault(
            f"sbatch refused {script}: {_output(done) or f'exit code {done.returncode}'}. Its options are in the first "
            "lines of the script and in launch.slurm; sbatch --test-only tries them.",
            field="slurm",
            given=str(script),
        )
    return job


def submit_patiently(
    script: Path, comment: str, *options: str, after: str = "", seconds: float = PATIENCE, pause: Pause = pause
) -> str:
    """Submit, and wait for a controller that does not answer. If it took the job and its answer was lost, find the job.

    `after` is the dependency of the job. It distinguishes successors, which may have the same comment.
    """
    if after:
        options = (*options, f"--dependency={after}", "--kill-on-invalid-dep=yes")
    deadline = time.monotonic() + seconds
    while True:
        try:
            return submit(script, f"--comment={comment}", *options)
        except Unreachable as error:
            reason = error
        while True:
            if time.monotonic() > deadline:
                raise EnvironmentFault(
                    f"Slurm's controller did not answer for {seconds:.0f} s: {reason}. Nothing is lost: continue with "
                    "batchwright run --resume when the controller answers again.",
                    field="engine",
                    given="slurm",
                ) from None
            if not pause(1.0, str(reason)):
                raise Withdrawn
            try:
                same = [one for one in _listed() if one.comment == comment and one.alive and one.job != me()]
            except Unreachable:
                continue
            taken = [one for one in same if one.depends(after)]
            if taken:
                return taken[-1].job
            break


def me() -> str | None:
    """The job that this process runs in."""
    return os.environ.get("SLURM_JOB_ID")


def my_nodes() -> tuple[int, str]:
    """How many nodes this process's job has, and which; (0, "") outside of a job."""
    if me() is None:
        return 0, ""
    return int(os.environ.get("SLURM_JOB_NUM_NODES", "0")), os.environ.get("SLURM_JOB_NODELIST", "")


def job(job_id: str, prefix: str = "") -> Queued | None:
    """A job as the controller knows it; None if the controller forgot it, or if its comment begins otherwise.

    A controller that was killed may forget the jobs of its last seconds, and give their ids to other jobs.
    """
    done = _asked("squeue", "--noheader", "--states=all", f"--jobs={job_id}", f"--format={_FIELDS}")
    if done.returncode:
        if "Invalid job id" in done.stderr:
            return None
        raise Unreachable(_output(done))
    return next((one for one in _parse(done.stdout) if one.job == job_id and one.comment.startswith(prefix)), None)


def jobs(token: str) -> list[Queued]:
    """All jobs of a run that the controller still knows."""
    return [one for one in _listed() if one.comment.startswith(comment_prefix(token))]


def _listed() -> list[Queued]:
    done = _asked("squeue", "--noheader", "--states=all", f"--user={os.getuid()}", f"--format={_FIELDS}")
    if done.returncode:
        raise Unreachable(_output(done))
    return _parse(done.stdout)


def _parse(text: str) -> list[Queued]:
    rows = (line.strip().split("|", 5) for line in text.splitlines())
    return [Queued(r[0], r[1], int(r[2]) if r[2].isdigit() else 0, r[3], r[5], r[4]) for r in rows if len(r) == 6]


def cancel(job_id: str, *options: str) -> None:
    """scancel; a job that has already ended is no error."""
    try:
        _run("scancel", "--quiet", *options, job_id)
    except (FileNotFoundError, Unreachable):
        pass


def postpone(job_id: str, seconds: float) -> None:
    """Let a waiting job start at least this many seconds from now."""
    try:
        _run("scontrol", "update", f"JobId={job_id}", f"StartTime=now+{max(0, round(seconds))}")
    except (FileNotFoundError, Unreachable):
        pass


def starts_at(script: Path, *options: str) -> tuple[float | None, str]:
    """When the job would start, by `sbatch --test-only`, in seconds since the epoch (None: never), and its output."""
    done = _asked("sbatch", "--test-only", *options, str(script), without=_variables_of(script))
    output = _output(done)
    found = _STARTS.search(output)
    return (datetime.datetime.fromisoformat(found[1]).timestamp() if found else None), output


def accounted(job_id: str) -> str | None:
    """The final state by sacct, if the cluster keeps accounts."""
    command = ("sacct", "--noheader", "--allocations", "--parsable2", "--format=State", f"--jobs={job_id}")
    try:
        done = _run(*command, seconds=20.0)
    except (FileNotFoundError, Unreachable):
        return None
    fields = done.stdout.split()
    return fields[0] if done.returncode == 0 and fields else None


def steps(job_id: str) -> list[str]:
    """The ids of a job's srun steps, without the batch script."""
    done = _asked("squeue", "--noheader", "--steps", f"--jobs={job_id}", "--format=%i")
    if done.returncode:
        raise Unreachable(_output(done))
    return [step for step in done.stdout.split() if step.rpartition(".")[2].isdigit()]


def _variables_of(script: Path) -> frozenset[str]:
    """The variables by which sbatch would override options of a script, such as SBATCH_PARTITION."""
    found: list[str] = _OPTION.findall(script.read_text(encoding="utf-8"))
    return frozenset(_VARIABLES.get(key, f"SBATCH_{key.upper().replace('-', '_')}") for key in found)


def _asked(*command: str, without: frozenset[str] = frozenset()) -> subprocess.CompletedProcess[str]:
    try:
        return _run(*command, without=without)
    except FileNotFoundError:
        raise Unreachable(f"{command[0]} is not installed here") from None


def _run(
    *command: str, seconds: float = SECONDS, without: frozenset[str] = frozenset()
) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            check=False,
            env={k: v for k, v in environment().items() if k not in without},
            cwd="/",
        )
    except subprocess.TimeoutExpired:
        raise Unreachable(f"{command[0]} did not answer within {seconds:.0f} s") from None


def _output(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line.strip() for line in (done.stderr + done.stdout).splitlines() if line.strip()]
    return " / ".join(lines)[:400]
