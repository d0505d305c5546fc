"""What a launch runs and how far it got: a task in batchwright's loop, or a command that reports its position."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Protocol, cast

from batchwright.core import codec
from batchwright.core.batch.loading import readers_on
from batchwright.core.errors import (
    BatchwrightError,
    ConfigError,
    RunError,
    Violation,
    did_you_mean,
    raise_violations,
)
from batchwright.core.nodes.policies import Launch, Stage
from batchwright.core.numbers import count
from batchwright.processes.target import is_jax_task
from batchwright.rundir import names
from batchwright.rundir.checkpoint import positions
from batchwright.rundir.files import JsonLines, parse, parse_object, read_bytes

from .directory import RunDirectory, modified, write_json
from .engine import Job, engine, tail
from .interrupts import Pause, pause
from .records import COMMAND, LaunchProgress, Manifest, RunPlan

LOOP, JAX_LOOP = "batchwright.runtime.loop", "batchwright.jax.loop"
SAVES = 20  # checkpoints of a whole run where checkpoint_samples is not given; boundaries come on top
POSITION_SECONDS = 120.0  # a position command may import a framework and list a bucket
LOOP_ENVIRONMENT = {
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # else a restart reads the old store's addresses
    "PYTHONFAULTHANDLER": "1",  # a rank that hangs writes its stack when it is ended
    "PYTHONUNBUFFERED": "1",
    "PYTHONDONTWRITEBYTECODE": "1",  # nothing is written outside the run directory
    "PYTHONSAFEPATH": "1",
}
SIMULATED_DEVICES = "--xla_force_host_platform_device_count"
# Known only to a launch of one stage: several stages have several batches.
BATCH_PLACEHOLDERS = ("global_batch_size", "micro_batch_size", "accumulation_steps")
PLACEHOLDERS = (
    *BATCH_PLACEHOLDERS, "nodes", "devices_per_node", "devices", "data_parallel_size", "start_sample", "end_sample",
    "first_step", "end_step", "samples", "steps", "stage", "launch", "run_dir", "status_file",
)  # fmt: skip
_PLACEHOLDER = re.compile(r"\{\{|\}\}|\{([a-z][a-z_]*)\}")


class Work(Protocol):
    """The two kinds of work, as the supervisor sees them."""

    def job(self, launch: Launch, number: int, position: int) -> Job:
        """The launch for an engine; nothing is written."""
        ...

    def prepare(self, launch: Launch, number: int, position: int) -> None:
        """Write what the processes of the launch read."""
        ...

    def position(self, *, verify: bool = False) -> int:
        """The first sample that is not in the newest checkpoint; with `verify` the checkpoint is read completely."""
        ...

    def progress(self, manifest: Manifest) -> LaunchProgress:
        """How far a running launch is; cheap, as the supervisor asks twice a second."""
        ...

    def reached(self, manifest: Manifest) -> int:
        """The position of a running launch, for a process that asks once."""
        ...


def work(directory: RunDirectory, plan: RunPlan, pause: Pause = pause) -> Work:
    """The work of a plan."""
    return CommandWork(directory, plan, pause) if plan.kind == COMMAND else TaskWork(directory, plan)


def launch_end(plan: RunPlan, launch: Launch) -> int:
    """The first sample after a launch."""
    return plan.total_samples if launch.end_sample is None else launch.end_sample


class TaskWork:
    """A task in batchwright's loop. This class alone knows the loop's files: its spec, its events, its checkpoints."""

    def __init__(self, directory: RunDirectory, plan: RunPlan) -> None:
        self._directory, self._plan = directory, plan
        self._follow: LoopFollower | None = None

    def job(self, launch: Launch, number: int, position: int) -> Job:
        """Every rank runs the loop with one spec file."""
        folder = self._directory.launch(number)
        options, devices = self._plan.options, self._plan.ranks(launch) // launch.nodes
        jax = is_jax_task(self._plan.target)
        environment = {**LOOP_ENVIRONMENT, "OMP_NUM_THREADS": str(options.threads)}
        if jax:  # one process per node; on a machine without accelerators, the devices of a node are simulated
            environment["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {SIMULATED_DEVICES}={devices}".strip()
        return Job(
            name=f"launch {number}",
            directory=folder,
            nodes=launch.nodes,
            ranks_per_node=1 if jax else devices,
            argv=(sys.executable, "-m", JAX_LOOP if jax else LOOP, str(folder / "spec.json")),
            direct=False,
            environment={**environment, **options.environment},
            working_directory=Path(self._plan.working_directory),
            stop_signal="SIGUSR1",
            grace_seconds=options.grace_seconds,
            launcher="processes" if jax else "torchrun",
        )

    def prepare(self, launch: Launch, number: int, position: int) -> None:
        """Write the spec file that every rank reads: `runtime.loop.settings.Spec`."""
        plan, options = self._plan, self._plan.options
        settings: dict[str, Any] = {
            "checkpoint_every": options.checkpoint_samples or max(1, plan.total_samples // SAVES),
            "keep": options.keep,
            "strategy": options.strategy,
            "seed": options.seed,
            "stop_after_nonfinite": options.stop_after_nonfinite,
            "tracker": options.tracker,
            **options.settings,
            **_loading(plan, launch),
            **pipeline_settings(plan),
            "directory": str(self._directory.path),
            "micro_batch_size": [stage.micro_batch_size for stage in plan.stages],
            "allow_ragged": any(_has_ragged_step(stage) for stage in plan.stages),
            "launch": number,
            "start_sample": plan.start_sample,
            "end_sample": launch_end(plan, launch),
            "nodes": launch.nodes,
            "dataset_size": plan.ramp.dataset_size if plan.ramp else None,
        }
        spec = {
            "schema": codec.SCHEMA,
            "task": plan.target,
            "args": dict(plan.arguments),
            "schedule": plan.schedule,
            "settings": settings,
        }
        write_json(self._directory.launch(number) / "spec.json", spec)

    def position(self, *, verify: bool = False) -> int:
        """The position of the newest complete checkpoint; without one, the start of the run."""
        return next(positions(self._directory.path / names.CHECKPOINTS, verify=verify), self._plan.start_sample)

    def progress(self, manifest: Manifest) -> LaunchProgress:
        """From the loop's events, read on from where the last call stopped."""
        if self._follow is None or self._follow.number != manifest.number:
            self._follow = LoopFollower(self._directory, manifest)
        return self._follow.read()

    def reached(self, manifest: Manifest) -> int:
        """From the last events: those of a million steps have hundreds of megabytes."""
        path = self._directory.path / names.EVENTS / names.events(manifest.number)
        for line in reversed(tail(path).splitlines()):
            try:
                event = parse_object(line.encode())
                if event["kind"] in ("launch", "step", "evaluating", "evaluation", "saving"):
                    return int(event["samples"])
            except (ValueError, KeyError, TypeError, OverflowError):  # cut off, or not a line of the loop
                continue
        return manifest.start_sample


def _loading(plan: RunPlan, launch: Launch) -> dict[str, Any]:
    """The settings of reading hosts for a launch: a node is a host. None if nobody asked for any."""
    batch = plan.batch
    readers = None if batch is None else readers_on(launch.nodes, batch.loading_hosts, batch.expansion_factor)
    if batch is None or readers is None:
        return {}
    ranks = plan.ranks(launch) // launch.nodes
    return {"loading_hosts": readers, "ranks_per_host": ranks, "read_ahead": batch.read_ahead}


def pipeline_settings(plan: RunPlan) -> dict[str, Any]:
    """The loop's settings of a pipeline; none without one."""
    rule = plan.rules.pipeline
    if rule is None:
        return {}
    return {
        "pipeline_parallel": rule.stages,
        "pipeline_schedule": rule.schedule,
        "virtual_stages": rule.virtual_stages,
        "inner_microbatches": plan.rules.inner_microbatches,
    }


def _has_ragged_step(stage: Stage) -> bool:
    """Whether the stage is ragged, or its last step is cut by the end of the budget."""
    if stage.ragged or stage.steps is None or stage.end_sample is None:
        return stage.ragged
    return stage.end_sample - stage.start_sample != stage.steps * stage.global_batch_size


class LoopFollower:
    """Reads the loop's events of one launch as they are written."""

    def __init__(self, directory: RunDirectory, manifest: Manifest) -> None:
        self.number = manifest.number
        self._lines = JsonLines(directory.path / names.EVENTS / names.events(manifest.number))
        self._progress = LaunchProgress(manifest.start_sample)

    def read(self) -> LaunchProgress:
        """The progress after all events so far."""
        for event in self._lines.new():
            try:
                self._progress = _after(self._progress, event, float(event["time"]))
            except (ValueError, KeyError, TypeError, OverflowError):  # not a line of the loop
                continue
        return self._progress


def _after(known: LaunchProgress, event: Mapping[str, Any], when: float) -> LaunchProgress:
    kind = event["kind"]
    if kind in ("step", "saving", "save", "stop"):
        known = replace(known, saving=kind == "saving")
    if kind == "launch":
        return replace(
            known, position=int(event["samples"]), changed=when, loaded=when, load_seconds=event["load_seconds"]
        )
    if kind == "step":
        return replace(
            known,
            position=int(event["samples"]),
            changed=when,
            first_step=known.first_step or when,
            last_step=when,
            loss=event["loss"] if isinstance(event.get("loss"), float) else None,
            tokens_per_second=event.get("tokens_per_second"),
            samples_per_second=event.get("samples_per_second"),
        )
    if kind == "tracker":
        trouble = f"the tracker {event.get('tracker')} failed: {event.get('error')}. The run continues."
        return replace(known, changed=when, trouble=trouble)
    if kind == "save":
        return replace(known, changed=when, saved=when, saved_position=int(event["samples"]))
    return replace(known, changed=when, nonfinite=known.nonfinite or kind == "nonfinite")


class CommandWork:
    """A command of the user: placeholders are filled per launch; a status file or a position command gives its position."""

    def __init__(self, directory: RunDirectory, plan: RunPlan, pause: Pause = pause) -> None:
        self._directory, self._plan, self._pause = directory, plan, pause

    def values(self, launch: Launch, number: int, position: int) -> dict[str, object]:
        """The values of all placeholders."""
        plan, end = self._plan, launch_end(self._plan, launch)
        stage = plan.stages[launch.stages[0]]
        first = plan.step_at(position)
        return {
            "global_batch_size": stage.global_batch_size,
            "micro_batch_size": stage.micro_batch_size,
            "accumulation_steps": stage.accumulation_steps,
            "data_parallel_size": stage.data_parallel_size,
            "nodes": launch.nodes,
            "devices_per_node": plan.ranks(launch) // launch.nodes,
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
        return Job(
            name=f"launch {number}",
            directory=self._directory.launch(number),
            nodes=launch.nodes,
            ranks_per_node=self._plan.ranks(launch) // launch.nodes,
            argv=fill(self._plan.command, values),
            direct=True,
            environment={
                "BATCHWRIGHT_RUN_DIR": str(self._directory.path),
                "BATCHWRIGHT_LAUNCH": str(number),
                "BATCHWRIGHT_STATUS_FILE": str(values["status_file"]),
                "BATCHWRIGHT_FENCE_FILE": str(self._directory.path / names.FENCE),
                "BATCHWRIGHT_START_SAMPLE": str(position),
                "BATCHWRIGHT_END_SAMPLE": str(values["end_sample"]),
                "BATCHWRIGHT_STOP_SIGNAL": options.stop_signal,
                "PYTHONFAULTHANDLER": "1",
                **options.environment,
            },
            working_directory=Path(self._plan.working_directory),
            stop_signal=options.stop_signal,
            grace_seconds=options.grace_seconds,
        )

    def prepare(self, launch: Launch, number: int, position: int) -> None:
        """Nothing: a command gets arguments and environment only."""

    def position(self, *, verify: bool = False) -> int:
        """What the position command prints; without one, what the newest launch reported, else where it started."""
        if self._plan.position_command:
            return self._asked()
        # Each launch has its own status file, so an old launch that still runs cannot move the run.
        for number in reversed(self._directory.numbers()):
            if (reported := read_position(self._status_file(number))) is not None:
                return reported
            if (manifest := self._directory.manifest(number)) is not None:
                return manifest.start_sample
        return 0

    def progress(self, manifest: Manifest) -> LaunchProgress:
        """The status file's position; a growing log also counts as a change."""
        log = self._directory.launch(manifest.number) / "logs" / "rank-0.log"
        reported = read_position(self._status_file(manifest.number))
        times = [modified(self._status_file(manifest.number)), modified(log)]
        saved = times[0] if reported is not None else None
        return LaunchProgress(
            manifest.start_sample if reported is None else reported,
            max((t for t in times if t is not None), default=None),
            last_step=saved,
            saved=saved,
            saved_position=reported or 0,
        )

    def reached(self, manifest: Manifest) -> int:
        """The status file's position."""
        return self.progress(manifest).position

    def _status_file(self, number: int) -> Path:
        return self._directory.launch(number) / "status.json"

    def _asked(self) -> int:
        """What the position command prints; it is retried, as storage may not answer for a moment."""
        options, failures = self._plan.options, 0
        while True:
            try:
                return self._ask()
            except RunError as error:
                failures += 1
                if failures > options.max_retries:
                    raise
                wait = options.retry_after(failures)
                if not self._pause(wait, f"{error} Retry in {wait:g} s ({failures} of {options.max_retries})"):
                    raise

    def _ask(self) -> int:
        command = fill(self._plan.position_command, {"run_dir": self._directory.path})
        try:
            done = subprocess.run(
                command,
                cwd=self._plan.working_directory,
                env={**os.environ, **self._plan.options.environment},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=POSITION_SECONDS,
                check=False,
                start_new_session=True,  # Ctrl-C is for the supervisor
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise RunError(
                f"the position command failed: {error}.", field="position_command", given=command[0]
            ) from None
        lines = [line for line in done.stdout.splitlines() if line.strip()]
        position = _parse(lines[-1].encode()) if lines and done.returncode == 0 else None
        if position is None:
            last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
            raise RunError(
                f"the position command did not print a position: it exited with {done.returncode} and printed "
                f"{(lines[-1] if lines else '')[:80]!r}{' / ' + last[0][:200] if last else ''}. Its last line must be the "
                "number of samples trained, 0 before the first.",
                field="position_command",
                given=command[0],
            )
        return position


def read_position(path: Path) -> int | None:
    """The samples trained according to a script's status file: a number, or JSON with `consumed_samples`."""
    try:
        return _parse(read_bytes(path))
    except OSError:
        return None


def _parse(text: bytes) -> int | None:
    try:
        document: Any = parse(text)
    except ValueError:  # count reads more than JSON: 1_000, 2M
        document = text.decode(errors="replace").strip()
    if isinstance(document, Mapping):
        document = cast("Mapping[str, Any]", document).get("consumed_samples")
    try:
        return count(document, "consumed_samples", least=0)
    except BatchwrightError:
        return None


def placeholders(command: Iterable[str]) -> set[str]:
    """The placeholders in a command.

    >>> sorted(placeholders(["train", "--batch={global_batch_size}", "--until", "{end_sample}"]))
    ['end_sample', 'global_batch_size']
    """
    return {found[1] for argument in command for found in _PLACEHOLDER.finditer(argument) if found[1]}


def fill(command: Sequence[str], values: Mapping[str, object]) -> tuple[str, ...]:
    """Fill the placeholders, each argument by itself, without a shell. `{{name}}` becomes `{name}`; other braces stay.

    >>> fill(["--batch={global_batch_size}", '{"a": 1}', "{{nodes}}"], {"global_batch_size": 64})
    ('--batch=64', '{"a": 1}', '{nodes}')
    """
    return tuple(_PLACEHOLDER.sub(lambda m: str(values[m[1]]) if m[1] else m[0][0], argument) for argument in command)


def check_placeholders(command: Sequence[str], field: str = "command") -> None:
    """Refuse placeholders that have no value."""
    wrong: list[Violation] = []
    for name in sorted(placeholders(command) - set(PLACEHOLDERS)):
        near = tuple(f"{{{n}}}" for n in get_close_matches(name, PLACEHOLDERS, n=2))
        hint = did_you_mean(near) or f" Known: {', '.join(PLACEHOLDERS)}."
        message = f"the {field} has an unknown placeholder {{{name}}}.{hint} Write {{{{{name}}}}} to keep the braces."
        wrong.append(Violation(message, field, f"{{{name}}}", near))
    raise_violations(ConfigError, wrong)


def dry_run(directory: RunDirectory, plan: RunPlan) -> list[dict[str, Any]]:
    """Every launch as it would be started from its first sample; nothing is written."""
    doing, chosen = work(directory, plan), engine(plan.options.engine)
    records: list[dict[str, Any]] = []
    for launch in plan.launches:
        job = doing.job(launch, launch.index + 1, launch.start_sample)
        records.append(
            {
                **codec.encode(launch),
                "ranks": plan.ranks(launch),
                "command": list(chosen.command(job)),
                "environment": dict(job.environment),
                "working_directory": str(job.working_directory),
            }
        )
    return records
