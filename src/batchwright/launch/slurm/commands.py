"""Slurm's own commands, each with a time limit; what they say becomes a few records, and nothing is kept.

The controller may be away for a while (a restart, a busy hour): that is `Unreachable`, and never the end of a job.
"""

from __future__ import annotations

import datetime
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from batchwright.core.errors import EnvironmentFault

Pause = Callable[[float, str], bool]  # waits so long, for this reason; False where it is to be given up
SECONDS = 60.0
PATIENCE = 1800.0  # with a controller that is away: a failover or an upgrade of it takes minutes
# States in which a job has ended or never will run; all others (PENDING, CONFIGURING, RUNNING, COMPLETING, …) are alive.
ENDED = frozenset(
    "BOOT_FAIL CANCELLED COMPLETED DEADLINE FAILED NODE_FAIL OUT_OF_MEMORY PREEMPTED REVOKED TIMEOUT".split()
)
# Of the submitter's own environment; sbatch lets them overrule the script, and the chain rests on the script.
_STRUCTURAL = (
    "SBATCH_ARRAY_INX", "SBATCH_COMMENT", "SBATCH_ERROR", "SBATCH_EXPORT", "SBATCH_GET_USER_ENV", "SBATCH_JOB_NAME",
    "SBATCH_INPUT", "SBATCH_NO_REQUEUE", "SBATCH_OUTPUT", "SBATCH_REQUEUE", "SBATCH_SIGNAL", "SBATCH_TEST_ONLY",
    "SBATCH_WAIT", "SBATCH_CLUSTERS",
    "BATCHWRIGHT_PROLOGUE_FAILED",  # of the job that submits
)  # fmt: skip
# Options whose variable has another name than SBATCH_OPTION.
_VARIABLES = {"time": "SBATCH_TIMELIMIT", "mem": "SBATCH_MEM_PER_NODE", "debug": "SBATCH_DEBUG"}
_OPTION = re.compile(r"^#SBATCH\s+--([a-z-]+)", re.MULTILINE)
_STARTS = re.compile(r"to start at (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)")
_AWAY = re.compile(r"Unable to contact|[Cc]onnect|timed out|Zero Bytes|temporarily unable|Slurm backup|[Mm]unge")
_FIELDS = "%i|%T|%D|%k|%E|%r"
# Reasons of a job that waits for a person: nobody else will ever release it.
_STUCK = ("launch failed requeued held", "JobHeldAdmin", "PrologError", "BadConstraints", "DependencyNeverSatisfied")


class Unreachable(Exception):
    """The controller did not answer; nothing is known."""


class Withdrawn(Exception):
    """Whoever wanted to submit no longer does."""


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
        """Whether it waits in vain: Slurm could not start it, and holds it."""
        return any(word in self.reason for word in _STUCK)


def comment_of_run(token: str) -> str:
    """How the marks of all jobs of a run begin."""
    return f"batchwright:{token}:"


def comment_of(token: str, role: str, index: int) -> str:
    """The mark by which a run's jobs are found again.

    >>> comment_of("c0ffee", "link", 2)
    'batchwright:c0ffee:link:2'
    """
    return f"batchwright:{token}:{role}:{index}"


def role_of(comment: str) -> tuple[str, int]:
    """Role and index in a mark.

    >>> role_of("batchwright:c0ffee:successor:2")
    ('successor', 2)
    """
    *_, role, index = comment.split(":")
    return role, int(index) if index.isdigit() else -1


def environment(base: Mapping[str, str] | None = None) -> dict[str, str]:
    """What a job may inherit: nothing of the job that submits it, or srun would take its numbers for ours."""
    known = os.environ if base is None else base
    return {
        k: v for k, v in known.items() if k == "SLURM_CONF" or not (k.startswith(("SLURM", "PMI")) or k in _STRUCTURAL)
    }


def installed() -> bool:
    """Whether there is a Slurm here to submit to."""
    return shutil.which("sbatch") is not None


def submit(script: Path, *options: str) -> str:
    """Submit a script; the job's id."""
    try:
        done = _run("sbatch", "--parsable", *options, str(script), without=_said_in(script))
    except FileNotFoundError:
        raise EnvironmentFault(
            "sbatch is not installed here, and --engine slurm submits with it. Run this on a login node of the cluster, "
            "or look at the scripts with --dry-run.",
            field="engine",
            given="slurm",
            nearest=("local",),
        ) from None
    job = done.stdout.strip().split(";")[0]
    if done.returncode and _AWAY.search(done.stderr):
        raise Unreachable(_said(done))
    if done.returncode or not job.isdigit():
        raise EnvironmentFault(
            f"sbatch refused {script}: {_said(done) or f'exit code {done.returncode}'}. Its options are in the script's "
            "head and in launch.slurm; sbatch --test-only tries them.",
            field="slurm",
            given=str(script),
        )
    return job


def pause(seconds: float, reason: str) -> bool:
    """Wait, whatever happens."""
    time.sleep(seconds)
    return True


def submit_patiently(script: Path, mark: str, *options: str, seconds: float = PATIENCE, pause: Pause = pause) -> str:
    """Submit through an absence of the controller. Where it took the job and its answer was lost, that job is found."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return submit(script, f"--comment={mark}", *options)
        except Unreachable as error:
            reason = error
        while True:
            if time.monotonic() > deadline:
                raise EnvironmentFault(
                    f"Slurm's controller did not answer for {seconds:.0f} s: {reason}. Nothing is lost: go on with "
                    "batchwright run --resume once it is back.",
                    field="engine",
                    given="slurm",
                ) from None
            if not pause(1.0, str(reason)):
                raise Withdrawn
            try:
                taken = [one for one in _listed() if one.comment == mark and one.alive and one.job != me()]
            except Unreachable:
                continue
            if taken:
                return taken[-1].job
            break


def me() -> str | None:
    """The job that this process runs in."""
    return os.environ.get("SLURM_JOB_ID")


def my_nodes() -> tuple[int, str]:
    """How many nodes this process's job has, and which; (0, "") outside of one."""
    if me() is None:
        return 0, ""
    return int(os.environ.get("SLURM_JOB_NUM_NODES", "0")), os.environ.get("SLURM_JOB_NODELIST", "")


def job(job_id: str, mark: str = "") -> Queued | None:
    """A job as the controller knows it; None once it is forgotten, or where its mark is another's.

    A controller that was killed may forget the jobs of its last seconds, and give their numbers away a second time.
    """
    done = _asked("squeue", "--noheader", "--states=all", f"--jobs={job_id}", f"--format={_FIELDS}")
    if done.returncode:
        if "Invalid job id" in done.stderr:
            return None
        raise Unreachable(_said(done))
    return next((one for one in _parse(done.stdout) if one.job == job_id and one.comment.startswith(mark)), None)


def jobs(token: str) -> list[Queued]:
    """All jobs of a run that the controller has not forgotten."""
    return [one for one in _listed() if one.comment.startswith(comment_of_run(token))]


def _listed() -> list[Queued]:
    done = _asked("squeue", "--noheader", "--states=all", f"--user={os.getuid()}", f"--format={_FIELDS}")
    if done.returncode:
        raise Unreachable(_said(done))
    return _parse(done.stdout)


def _parse(text: str) -> list[Queued]:
    rows = (line.strip().split("|", 5) for line in text.splitlines())
    return [Queued(r[0], r[1], int(r[2]) if r[2].isdigit() else 0, r[3], r[5], r[4]) for r in rows if len(r) == 6]


def cancel(job_id: str, *options: str) -> None:
    """scancel; a job that has ended meanwhile is no error."""
    try:
        _run("scancel", "--quiet", *options, job_id)
    except (FileNotFoundError, Unreachable):
        pass


def postpone(job_id: str, seconds: float) -> None:
    """Let a waiting job start no sooner than so many seconds from now."""
    try:
        _run("scontrol", "update", f"JobId={job_id}", f"StartTime=now+{max(0, round(seconds))}")
    except (FileNotFoundError, Unreachable):
        pass


def starts_at(script: Path, *options: str) -> tuple[float | None, str]:
    """When the job would start, by `sbatch --test-only`, in seconds since the epoch; None where it never would."""
    done = _asked("sbatch", "--test-only", *options, str(script), without=_said_in(script))
    said = _said(done)
    found = _STARTS.search(said)
    return (datetime.datetime.fromisoformat(found[1]).timestamp() if found else None), said


def accounted(job_id: str) -> str | None:
    """The final state by sacct, where a cluster keeps accounts."""
    try:
        done = _run(
            "sacct", "--noheader", "--allocations", "--parsable2", "--format=State", f"--jobs={job_id}", seconds=20.0
        )
    except (FileNotFoundError, Unreachable):
        return None
    words = done.stdout.split()
    return words[0] if done.returncode == 0 and words else None


def steps(job_id: str) -> list[str]:
    """The steps of srun in a job, by their ids; the batch script is none."""
    done = _asked("squeue", "--noheader", "--steps", f"--jobs={job_id}", "--format=%i")
    if done.returncode:
        raise Unreachable(_said(done))
    return [word for word in done.stdout.split() if word.rpartition(".")[2].isdigit()]


def _said_in(script: Path) -> frozenset[str]:
    """The variables by which sbatch would overrule what a script says: a partition of SBATCH_PARTITION, say."""
    found: list[str] = _OPTION.findall(script.read_text(encoding="utf-8"))
    return frozenset(_VARIABLES.get(key, f"SBATCH_{key.upper().replace('-', '_')}") for key in found)


def _asked(*words: str, without: frozenset[str] = frozenset()) -> subprocess.CompletedProcess[str]:
    try:
        return _run(*words, without=without)
    except FileNotFoundError:
        raise Unreachable(f"{words[0]} is not installed here") from None


def _run(
    *words: str, seconds: float = SECONDS, without: frozenset[str] = frozenset()
) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=seconds,
            check=False, env={k: v for k, v in environment().items() if k not in without}, cwd="/",
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise Unreachable(f"{words[0]} did not answer within {seconds:.0f} s") from None


def _said(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line.strip() for line in (done.stderr + done.stdout).splitlines() if line.strip()]
    return " / ".join(lines)[:400]
