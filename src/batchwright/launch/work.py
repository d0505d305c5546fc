"""What a launch runs and how far it got: a task in our loop, or anybody's command that says where it is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from batchwright.core.errors import BatchwrightError, RunError
from batchwright.core.nodes.policies import Launch
from batchwright.core.numbers import count

from . import loop_spec
from .directory import RunDirectory, write_json
from .engine import Job
from .local import ENVIRONMENT
from .records import COMMAND, Manifest, Progress, RunPlan
from .template import fill

POSITION_SECONDS = 120.0  # a position command may import a framework and list a bucket


class Work(Protocol):
    """The two kinds of work, as the supervisor sees them."""

    def job(self, launch: Launch, number: int, position: int) -> Job:
        """The launch for an engine; nothing is written."""
        ...

    def prepare(self, launch: Launch, number: int, position: int) -> None:
        """Write what the launch's processes read."""
        ...

    def position(self, *, verify: bool = False) -> int:
        """The first sample that no surviving checkpoint has trained on; to verify reads all of it."""
        ...

    def progress(self, manifest: Manifest) -> Progress:
        """How far a running launch is; cheap, as it is asked twice a second."""
        ...


Pause = Callable[[float, str], bool]  # waits so long, for this reason; False where there is no time to


def _sleep(seconds: float, reason: str) -> bool:
    time.sleep(seconds)
    return True


def work(directory: RunDirectory, plan: RunPlan, pause: Pause = _sleep) -> Work:
    """The work of a plan."""
    return CommandWork(directory, plan, pause) if plan.kind == COMMAND else TaskWork(directory, plan)


def launch_end(plan: RunPlan, launch: Launch) -> int:
    """The first sample after a launch."""
    return plan.total_samples if launch.end_sample is None else launch.end_sample


class TaskWork:
    """A task in our own loop: `loop_spec` knows the loop's files."""

    def __init__(self, directory: RunDirectory, plan: RunPlan) -> None:
        self._directory, self._plan = directory, plan
        self._follow: loop_spec.Follower | None = None

    def job(self, launch: Launch, number: int, position: int) -> Job:
        """One rank is our loop with a spec file; torchrun starts as many as there are."""
        folder = self._directory.launch(number)
        options = self._plan.options
        made = {**ENVIRONMENT, "OMP_NUM_THREADS": str(options.threads), "PYTHONSAFEPATH": "1", **options.environment}
        argv = (sys.executable, "-m", loop_spec.MODULE, str(folder / "spec.json"))
        return Job(
            f"launch {number}", folder, launch.nodes, self._plan.devices_per_node, argv, False, made,
            Path(self._plan.working_directory), "SIGUSR1", options.grace_seconds,
        )  # fmt: skip

    def prepare(self, launch: Launch, number: int, position: int) -> None:
        """The spec file that every rank reads."""
        end = launch_end(self._plan, launch)
        spec = loop_spec.spec(self._directory, self._plan, launch, number, end)
        write_json(self._directory.launch(number) / "spec.json", spec)

    def position(self, *, verify: bool = False) -> int:
        """That of the newest complete checkpoint."""
        return loop_spec.position(self._directory, verify=verify)

    def progress(self, manifest: Manifest) -> Progress:
        """From the loop's events, read on from where the last call stopped."""
        if self._follow is None or self._follow.number != manifest.number:
            self._follow = loop_spec.Follower(self._directory, manifest)
        return self._follow.read()


class CommandWork:
    """Anybody's command: places filled per launch; a status file, or a command of its own, says how far it got."""

    def __init__(self, directory: RunDirectory, plan: RunPlan, pause: Pause = _sleep) -> None:
        self._directory, self._plan, self._pause = directory, plan, pause

    def values(self, launch: Launch, number: int, position: int) -> dict[str, object]:
        """What fills the command's places."""
        plan, end = self._plan, launch_end(self._plan, launch)
        stage = plan.stages[launch.stages[0]]
        first = plan.step_at(position)
        return {
            "global_batch_size": stage.global_batch_size,
            "micro_batch_size": stage.micro_batch_size,
            "accumulation_steps": stage.accumulation_steps,
            "data_parallel_size": stage.data_parallel_size,
            "nodes": launch.nodes,
            "devices_per_node": plan.devices_per_node,
            "devices": plan.ranks(launch),
            "start_sample": position,
            "end_sample": end,
            "samples": end - position,
            "first_step": first,
            "end_step": plan.step_at(end),
            "steps": plan.step_at(end) - first,
            "stage": stage.index,
            "launch": number,
            "run_dir": self._directory.path,
            "status_file": self._status_file(number),
        }

    def job(self, launch: Launch, number: int, position: int) -> Job:
        """The filled command, started once: it starts its own ranks."""
        values = self.values(launch, number, position)
        options = self._plan.options
        made = {
            "BATCHWRIGHT_RUN_DIR": str(self._directory.path),
            "BATCHWRIGHT_LAUNCH": str(number),
            "BATCHWRIGHT_STATUS_FILE": str(values["status_file"]),
            "BATCHWRIGHT_FENCE_FILE": str(self._directory.path / "launch.json"),
            "BATCHWRIGHT_START_SAMPLE": str(position),
            "BATCHWRIGHT_END_SAMPLE": str(values["end_sample"]),
            "PYTHONFAULTHANDLER": "1",
            **options.environment,
        }
        return Job(
            f"launch {number}", self._directory.launch(number), launch.nodes, self._plan.devices_per_node,
            fill(self._plan.command, values), True, made, Path(self._plan.working_directory), options.stop_signal,
            options.grace_seconds,
        )  # fmt: skip

    def prepare(self, launch: Launch, number: int, position: int) -> None:
        """Nothing: all it gets is its command line and environment."""

    def position(self, *, verify: bool = False) -> int:
        """What the newest launch told, or where it began; or what the position command prints."""
        if self._plan.position_command:
            return self._asked()
        # Each launch has a status file of its own, so one that outlived its turn cannot move the run.
        for number in reversed(self._directory.numbers()):
            told = read_position(self._status_file(number))
            manifest = self._directory.manifest(number)
            if told is not None or manifest is not None:
                return told if told is not None else manifest.start_sample  # type: ignore[union-attr]
        return 0

    def progress(self, manifest: Manifest) -> Progress:
        """The status file's position; a growing log is a sign of life, too."""
        folder = self._directory.launch(manifest.number)
        told = read_position(self._status_file(manifest.number))
        times = [_modified(self._status_file(manifest.number)), _modified(folder / "logs" / "rank-0.log")]
        saved = times[0] if told is not None else None
        return Progress(
            manifest.start_sample if told is None else told,
            max((t for t in times if t is not None), default=None),
            first_step=None,
            last_step=saved,
            saved=saved,
            saved_position=told or 0,
        )

    def _status_file(self, number: int) -> Path:
        return self._directory.launch(number) / "status.json"

    def _asked(self) -> int:
        """What the position command says; a bucket that does not answer once is no reason to give a run up."""
        options, failures = self._plan.options, 0
        while True:
            try:
                return self._ask()
            except RunError as error:
                failures += 1
                if failures > options.max_retries:
                    raise
                wait = options.retry_after(failures)
                if not self._pause(wait, f"{error} Asked again in {wait:g} s ({failures} of {options.max_retries})"):
                    raise

    def _ask(self) -> int:
        words = fill(self._plan.position_command, {"run_dir": self._directory.path})
        try:
            done = subprocess.run(
                words, cwd=self._plan.working_directory, env={**os.environ, **self._plan.options.environment},
                stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=POSITION_SECONDS, check=False,
                start_new_session=True,  # Ctrl-C is for the supervisor
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            raise RunError(f"the position command failed: {error}.", field="position_command", given=words[0]) from None
        lines = [line for line in done.stdout.splitlines() if line.strip()]
        told = _parse(lines[-1]) if lines and done.returncode == 0 else None
        if told is None:
            last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
            raise RunError(
                f"the position command did not say where the run is: it ended with {done.returncode} and printed "
                f"{(lines[-1] if lines else '')[:80]!r}{' / ' + last[0][:200] if last else ''}. Its last line has to be "
                "the number of samples trained, 0 before the first.",
                field="position_command",
                given=words[0],
            )
        return told


def read_position(path: Path) -> int | None:
    """Samples trained as a script's status file tells: a bare number, or JSON with `consumed_samples`."""
    try:
        return _parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _parse(text: str) -> int | None:
    try:
        document: Any = json.loads(text)
    except ValueError:
        document = text.strip()
    if isinstance(document, Mapping):
        document = document.get("consumed_samples")
    try:
        return count(document, "consumed_samples", least=0)  # type: ignore[arg-type]
    except BatchwrightError:
        return None


def _modified(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None
