"""Runs for tests: `batchwright run` as a process of its own, its ranks, and what it leaves behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
TRAINER = (sys.executable, str(HERE / "trainer.py"), "{global_batch_size}", "{start_sample}", "{end_sample}")
TASK = f"{HERE / 'tiny.py'}:task"
PATIENCE = 900.0  # seconds: the machine may be busy


@pytest.fixture(autouse=True)
def _signals_as_at_a_terminal() -> Iterator[None]:
    """Default handlers: under nohup SIGHUP is ignored, and the processes of a test would inherit that."""
    before = {
        number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1)
    }
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Run:
    """One run directory and the command that works on it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.prefix: tuple[str, ...] = ()  # what starts the command
        self.process: subprocess.Popen[str] | None = None
        self._errors: dict[int, Any] = {}

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """`batchwright run …` in the background."""
        errors = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            [*self.prefix, sys.executable, "-m", "batchwright", "run", *arguments],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=self.directory.parent,
        )
        self._errors[self.process.pid] = errors
        return self.process

    def stderr(self) -> str:
        """Its stderr so far."""
        assert self.process is not None
        file = self._errors[self.process.pid]
        return os.pread(file.fileno(), 1 << 20, 0).decode()

    def finish(self) -> tuple[int, str, str]:
        """Wait for it: exit code, stdout, stderr."""
        assert self.process is not None
        out, _ = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, out, self.stderr()

    def close(self) -> None:
        """Close the files of stderr."""
        for file in self._errors.values():
            file.close()

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        self.start(*arguments)
        return self.finish()

    @contextmanager
    def held(self) -> Iterator[str]:
        """The script argument for a trainer that waits after its third step until this context ends."""
        with tempfile.NamedTemporaryFile(prefix="hold-") as file:
            yield f"hold={file.name}"

    def scripted(self, *script: str, flags: tuple[str, ...] = (), ramp: str = "0:8 64:16 192:32") -> tuple[str, ...]:
        """The arguments for a run of the scripted trainer over three stages on 1, 2 and 4 nodes."""
        place = ("--thresholds", ramp, "--dir", str(self.directory))
        fixed = "--samples 512 --nodes 4 --devices-per-node 1 --node-policy constant-work --retry-seconds 0.1".split()
        return (*place, *fixed, *flags, "--", *TRAINER, *script)

    def task(self, *flags: str, ramp: str, samples: int, nodes: int, args: tuple[str, ...] = ()) -> tuple[str, ...]:
        """The arguments for a run of the tiny task in the real loop."""
        place = (TASK, "--thresholds", ramp, "--dir", str(self.directory))
        fixed = f"--samples {samples} --nodes {nodes} --devices-per-node 1 --node-policy constant-work".split()
        return (*place, *fixed, "--retry-seconds", "0.1", *flags, *(f"--arg={arg}" for arg in args))

    def resume(self, *flags: str) -> tuple[int, str, str]:
        return self("--resume", str(self.directory), *flags)

    def status(self) -> dict[str, Any]:
        code, out, err = self("--status", str(self.directory), "--json")
        assert code == 0, err
        return json.loads(out)

    def events(self, kind: str) -> list[dict[str, Any]]:
        lines = (self.directory / "events" / "supervisor.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["kind"] == kind]

    def newest(self) -> Path:
        """The newest launch's directory."""
        return self.until(
            lambda: max((p.parent for p in self.directory.glob("launches/*/manifest.json")), default=None)
        )

    def rank_pid(self, rank: int, launch: Path | None = None) -> int:
        path = (launch or self.newest()) / "ranks" / f"{rank}.json"
        return self.until(lambda: json.loads(path.read_text())["pid"] if path.exists() else None)

    def position(self) -> int:
        """From the files of the newest launch."""
        launch = self.newest()
        status = launch / "status.json"
        if status.exists():
            return json.loads(status.read_text())["consumed_samples"]
        events = self.directory / "events" / f"launch-{int(launch.name):05d}.jsonl"
        lines = events.read_text().splitlines() if events.exists() else []
        steps = [json.loads(line)["samples"] for line in lines if '"kind": "step"' in line and line.endswith("}")]
        return max(steps, default=0)

    def until(self, found: Callable[[], Any], seconds: float = PATIENCE, *, ended: bool = True) -> Any:
        """Wait until `found` gives something."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                value = found()
            except (OSError, ValueError):
                value = None
            if value:
                return value
            if ended and self.process is not None and self.process.poll() is not None:
                raise AssertionError(f"the supervisor ended before that:\n{self.stderr()}")
            time.sleep(0.02)
        raise AssertionError(f"nothing found in {seconds:.0f} s")

    def processes(self) -> list[str]:
        """All processes with this run's directory in their command line or environment."""
        own, found = str(self.directory).encode(), []
        for name in filter(str.isdigit, os.listdir("/proc")):
            try:
                command = Path(f"/proc/{name}/cmdline").read_bytes()
                state = Path(f"/proc/{name}/stat").read_bytes().rsplit(b")", 1)[1].split()[0]
                about = command + Path(f"/proc/{name}/environ").read_bytes()
            except OSError:
                continue
            if own in about and int(name) != os.getpid() and state != b"Z" and b"pytest" not in command:
                found.append(f"{name} {command.replace(bytes(1), b' ').decode(errors='replace')[:200]}")
        return found

    def assert_nothing_left(self) -> None:
        """No process of the run is left."""
        self.until(lambda: not self.processes(), ended=False)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """A run in a directory whose name has quotes, spaces and $(…)."""
    made = Run(tmp_path / 'a run\'s "own" $(touch x) dir')
    yield made
    if made.process is not None and made.process.poll() is None:
        made.process.send_signal(signal.SIGKILL)
        made.process.communicate()
    made.close()
    made.assert_nothing_left()
