"""What the attacks damage, made once: runs that are finished and half-finished, the journal and the result of a probe."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.launch.conftest import Run

RAMP, BOUNDARY, SAMPLES = "0:8 96:16", 96, 352
# The whole run takes about 3 s of steps: time enough to hit one.
TASK_FLAGS = ("--micro-batch-size", "8", "--checkpoint-samples", "32")
PROBE = ("--limit-only", "--max", "2", "--", "true", "{micro_batch_size}")


@dataclass(frozen=True)
class Material:
    """Folders that are copied before they are damaged."""

    done: Path
    """A task that is complete, after its supervisor was killed in the second stage and resumed."""
    half: Path
    """The same run before it was resumed."""
    command_done: Path
    command_half: Path
    """A command that failed in its second stage, and would succeed now."""
    probe: Path
    """`journal/`, of a probe of PROBE, and `result.json`, the output of a probe with times."""


def task(run: Run, *flags: str, slow: float = 0.1) -> tuple[str, ...]:
    """The arguments for a small ramp of the tiny task, from 1 to 2 ranks."""
    return run.task(*TASK_FLAGS, *flags, ramp=RAMP, samples=SAMPLES, nodes=2, args=(f"slow={slow}",))


def make(base: Path, *, tasks: bool = True) -> Material:
    """Make all of it below `base`; without `tasks`, only what needs no torch."""
    made = Material(base / "done", base / "half", base / "command-done", base / "command-half", base / "probe")
    if tasks:
        run = Run(base / "done")
        run.start(*task(run))
        run.until(lambda: any((base / "done" / "checkpoints").glob("step-*-launch-00002")) and run.position() >= 192)
        run.process.send_signal(signal.SIGKILL)
        run.finish()
        run.assert_nothing_left()
        shutil.copytree(made.done, made.half)
        code, _, err = run.resume()
        assert code == 0, err
        run.close()
    _commands(base, made)
    _probes(made.probe)
    return made


def _commands(base: Path, made: Material) -> None:
    """A run of a shell command that fails in its second stage until the file `allowed` exists."""
    allowed = base / "allowed"
    script = f'test {{stage}} = 0 || test -e "{allowed}" || exit 7; echo {{end_sample}} > "$BATCHWRIGHT_STATUS_FILE"'
    run = Run(made.command_half)
    code, _, err = run(
        *("--thresholds", "0:8 32:16", "--samples", "64", "--nodes", "2", "--devices-per-node", "1"),
        *("--node-policy", "constant-work", "--micro-batch-size", "8", "--max-retries", "0"),
        *("--dir", str(made.command_half), "--", "sh", "-c", script),
    )
    assert code == 5, err
    allowed.touch()
    (
        run.newest() / "ending.json"
    ).unlink()  # as if the supervisor had been killed: the next one looks for the processes
    run.close()
    shutil.copytree(made.command_half, made.command_done)
    run = Run(made.command_done)
    code, _, err = run.resume()
    assert code == 0, err
    run.close()


def _probes(folder: Path) -> None:
    folder.mkdir()
    probe = (sys.executable, "-m", "batchwright", "probe", "--dir", "journal")
    subprocess.run([*probe, *PROBE], cwd=folder, check=True, capture_output=True)
    script = "for i in 1 2 3 4 5 6 7 8 9; do echo step $i; sleep 0.01; done"
    timed = [*probe, "--json", "--max", "2", "--step-regex", r"step (\d+)", "--seconds", "0.1", "--"]
    done = subprocess.run(
        [*timed, "sh", "-c", script, "{micro_batch_size}"], cwd=folder, check=True, capture_output=True
    )
    (folder / "result.json").write_bytes(done.stdout)
