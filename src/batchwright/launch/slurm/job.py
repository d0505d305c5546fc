"""The first process of a job, on its first node: is it our turn; run the launch; pass signals on; write how it ended.

    python -P -m batchwright.launch.slurm.job RUN_DIR start 3      submitted by a supervisor: the launch numbered 3
    python -P -m batchwright.launch.slurm.job RUN_DIR link 1       one of a chain: whatever is next (`chain.py`)

A duplicate (an impatient person, a crash between sbatch and its record, a requeue) exits 0 and touches nothing.
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
from batchwright.rundir.files import find_json

from .claim import BEAT_SECONDS, JobRecord
from .engine import read_job
from .site import Site, SlurmRun
from .step import StepEngine

_WAIT = 0.1
_REPEAT = 2.0  # a rank may not have been listening yet


def say(text: str) -> None:
    """A line in the job's log."""
    print(f"{time.strftime('%H:%M:%S')} batchwright: {text}", flush=True)


def prologue_failure(site: Site) -> str | None:
    """What the script says of a prologue that failed, in words."""
    told = os.environ.pop("BATCHWRIGHT_PROLOGUE_FAILED", "").split()
    if len(told) != 2 or not told[0].isdigit():
        return None
    number = int(told[0])
    line = site.prologue[number - 1].strip() if 0 < number <= len(site.prologue) else ""
    return f"prologue command {number} exited with {told[1]}: {line[:200]}"


class Start:
    """One launch of a supervisor's; the supervisor decides what comes after it."""

    def __init__(self, directory: RunDirectory, number: int) -> None:
        self._directory, self._number = directory, number
        self._folder = directory.launch(number)
        self._record = JobRecord(self._folder)
        self._signals: list[int] = []

    def _not_ours(self) -> str | None:
        """Why this job has nothing to do."""
        current = (find_json(self._directory.path / names.FENCE) or {}).get("launch")
        # None is a transient read error, and no newer launch.
        if current is not None and current != self._number:
            return f"launch {self._number} is not the one that may run: that is {current}"
        if (self._folder / "ending.json").exists():
            return f"launch {self._number} has ended"
        return None

    def run(self) -> int:
        """The job's exit code."""
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT):  # a claim may be asked to stop
            signal.signal(number, lambda n, frame: self._signals.append(n))
        reason = self._not_ours()
        if reason is None and not self._record.claim():
            owner = (find_json(self._record.path) or {}).get("job")
            reason = f"launch {self._number} is or was run by job {owner}"
        if reason is not None:
            say(f"nothing to do: {reason}")
            return 0
        if (self._directory.path / names.STOP).exists():
            say("nothing to do: the run is to stop")
            self._record.end(0, "told to stop before it began")
            return 0
        site = SlurmRun.load(self._directory).site
        job, failure = read_job(self._folder), prologue_failure(site)
        if job is None or failure is not None:
            failure = failure or f"{self._folder / 'work.json'} cannot be read"
            say(failure)
            self._record.end(1, failure)
            return 1
        engine = StepEngine(site)
        say(f"launch {self._number} on {job.nodes} nodes")
        try:
            handle = engine.start(job)
        except BatchwrightError as error:
            say(str(error))
            self._record.end(1, str(error))
            return 1
        polled, detail = self._watch(engine, handle, job.grace_seconds)
        self._record.end(polled.code, detail)
        say(f"ended with {polled.code}{': ' + detail if detail else ''}")
        return 0 if not polled.code else 1

    def _watch(self, engine: StepEngine, handle: Handle, grace: float) -> tuple[Poll, str]:
        asked, again, looked, detail = 0.0, 0.0, time.monotonic(), ""
        while True:
            polled, now = engine.poll(handle), time.monotonic()
            self._record.beat()
            # Also after the end: Slurm signals the ranks, too, which may be gone within a pause.
            while self._signals:
                number = self._signals.pop(0)
                if number == signal.SIGUSR2:
                    engine.signal(handle, "trace")
                elif not asked:
                    asked, detail = now, f"asked to save and stop by {signal.Signals(number).name}"
                    say(detail)
            if polled.state == "ended":
                return polled, detail
            if now - looked > BEAT_SECONDS:
                looked = now
                if (reason := self._not_ours()) is not None:
                    detail = f"ended here: {reason}"
                    engine.signal(handle, "kill")
                elif not asked and (self._directory.path / names.STOP).exists():  # its supervisor may be gone
                    asked, detail = now, "asked to save and stop by --stop"
                    say(detail)
            if asked and now - again > _REPEAT:
                again = now
                engine.signal(handle, "kill" if now - asked > grace else "checkpoint")
            time.sleep(_WAIT)


def main(words: list[str]) -> int:
    """See the module's text."""
    die_with(os.getppid())  # the step daemon: a job whose daemon is gone is nobody's any more
    directory, mode, number = RunDirectory(words[0]), words[1], int(words[2])
    if mode == "start":
        return Start(directory, number).run()
    from .chain import Link

    return Link(directory).run_link()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
