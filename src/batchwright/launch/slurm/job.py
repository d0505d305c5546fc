"""The first process of a job, on its first node.

    python -P -m batchwright.launch.slurm.job RUN_DIR start 3      submitted by a supervisor: runs launch number 3
    python -P -m batchwright.launch.slurm.job RUN_DIR chain 1      a job of a chain: runs the launch that is next (`chain.py`)

A duplicate (a person submitted a script again, or a supervisor crashed between sbatch and its record) exits 0 and changes
nothing.
"""

from __future__ import annotations

import os
import signal
import sys
import time

from batchwright.core.errors import BatchwrightError
from batchwright.launch.directory import RunDirectory
from batchwright.launch.engine import Handle, Poll
from batchwright.processes.guard import die_with
from batchwright.rundir import names
from batchwright.rundir.files import find_object

from .chain import ChainJob
from .claim import HEARTBEAT_SECONDS, JobRecord, job_record
from .engine import read_job
from .site import SlurmRun
from .step import StepEngine, prologue_failure, say

_WAIT = 0.1
_REPEAT = 2.0  # seconds until a rank is asked again: it may not have handled the signal yet


class Start:
    """One launch of a supervisor on a login node, which decides what comes next."""

    def __init__(self, directory: RunDirectory, number: int) -> None:
        self._directory, self._number = directory, number
        self._folder = directory.launch(number)
        self._record = JobRecord(self._folder)
        self._signals: list[int] = []

    def _not_ours(self) -> str | None:
        """Why this job has nothing to do."""
        current = (find_object(self._directory.path / names.FENCE) or {}).get("launch")
        # None is a transient read error, and no newer launch.
        if current is not None and current != self._number:
            return f"launch {self._number} may not run: launch {current} may"
        if (self._folder / "ending.json").exists():
            return f"launch {self._number} has ended"
        return None

    def run(self) -> int:
        """The job's exit code."""
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda n, frame: self._signals.append(n))
        reason = self._not_ours()
        if reason is None and not self._record.claim():
            reason = f"launch {self._number} is or was run by job {job_record(self._folder).get('job')}"
        if reason is not None:
            say(f"nothing to do: {reason}")
            return 0
        if (self._directory.path / names.STOP).exists():
            say("nothing to do: a stop of the run was requested")
            self._record.end(0, "asked to stop before it started")
            return 0
        site = SlurmRun.load(self._directory).site
        job, failure = read_job(self._folder), prologue_failure(site)
        if job is None or failure is not None:
            return self._failed(failure or f"{self._folder / 'work.json'} cannot be read")
        engine = StepEngine(site)
        say(f"launch {self._number} on {job.nodes} nodes")
        try:
            handle = engine.start(job)
        except BatchwrightError as error:
            return self._failed(str(error))
        polled, detail = self._watch(engine, handle, job.grace_seconds)
        self._record.end(polled.code, detail)
        say(f"ended with {polled.code}{': ' + detail if detail else ''}")
        return 0 if not polled.code else 1

    def _failed(self, reason: str) -> int:
        say(reason)
        self._record.end(1, reason)
        return 1

    def _watch(self, engine: StepEngine, handle: Handle, grace: float) -> tuple[Poll, str]:
        asked, again, looked, detail = 0.0, 0.0, time.monotonic(), ""
        while True:
            polled, now = engine.poll(handle), time.monotonic()
            self._record.heartbeat()
            # Also after the end: Slurm signals the ranks, too, and they may end before this process looks.
            while self._signals:
                number = self._signals.pop(0)
                if number == signal.SIGUSR2:
                    engine.signal(handle, "trace")
                elif not asked:
                    asked, detail = now, f"asked to save and stop by {signal.Signals(number).name}"
                    say(detail)
            if polled.state == "ended":
                return polled, detail
            if now - looked > HEARTBEAT_SECONDS:
                looked = now
                if (reason := self._not_ours()) is not None:
                    detail = f"ended here: {reason}"
                    engine.signal(handle, "kill")
                elif not asked and (self._directory.path / names.STOP).exists():  # the supervisor may be gone
                    asked, detail = now, "asked to save and stop by --stop"
                    say(detail)
            if asked and now - again > _REPEAT:
                again = now
                engine.signal(handle, "kill" if now - asked > grace else "checkpoint")
            time.sleep(_WAIT)


def main(arguments: list[str]) -> int:
    """Run a job; see the text of this module."""
    die_with(os.getppid())  # the step daemon: without it, Slurm no longer controls this process
    directory, role, number = RunDirectory(arguments[0]), arguments[1], int(arguments[2])
    return Start(directory, number).run() if role == "start" else ChainJob(directory).run_job()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
