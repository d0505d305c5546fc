"""A real Slurm of four virtual nodes, started once for the session and ended with it (.ci/slurm_up, .ci/slurm_down)."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from batchwright.core.batch.request import BatchRequest
from batchwright.core.ramp.request import read_ramp
from batchwright.launch.directory import RunDirectory, write_json
from batchwright.launch.engine import process_state
from batchwright.launch.plan import build
from batchwright.launch.records import Options, RunPlan
from batchwright.launch.slurm import commands as slurm
from batchwright.launch.slurm.site import Site, remember

ROOT = Path(__file__).parents[3]
TRAINER = Path(__file__).with_name("trainer.py")
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
NODES = 4
PATIENCE = 600.0  # for a machine that is busy with other things


def missing() -> str | None:
    """Why there can be no Slurm here."""
    path = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin"))
    gone = [program for program in PROGRAMS if shutil.which(program, path=path) is None]
    if gone:
        return f"{', '.join(gone)} not installed (apt-get install slurm-wlm slurmctld slurmd munge)"
    if os.getuid() != 0:
        return "a Slurm of one's own is started by root only"
    return None


class Cluster:
    """The Slurm under test, and how to hurt it."""

    def __init__(self, base: Path) -> None:
        self.base = base

    def call(self, *words: str) -> str:
        """What it prints; asked again where the controller is too busy to answer."""
        deadline = time.monotonic() + PATIENCE
        while True:
            done = subprocess.run(words, capture_output=True, text=True)
            if not done.returncode or not slurm._AWAY.search(done.stderr) or time.monotonic() > deadline:
                done.check_returncode()
                return done.stdout
            time.sleep(0.5)

    def kill(self, daemon: str) -> None:
        """SIGKILL for a daemon that this fixture started; a slurmd takes the step daemons of its node along."""
        pid = int((self.base / "run" / f"{daemon}.pid").read_text())
        steps = []
        if daemon.startswith("slurmd-"):
            for entry in Path("/proc").iterdir():
                if entry.name.isdigit() and _comm(entry) == "slurmstepd" and self._is_of(entry, daemon[7:]):
                    steps.append(int(entry.name))
        for one in (pid, *steps):
            try:
                os.kill(one, signal.SIGKILL)
            except ProcessLookupError:
                pass
        for one in (pid, *steps):  # its port is free once it has gone
            wait_for(lambda one=one: process_state(one, None) in (None, "Z"))

    def _is_of(self, entry: Path, node: str) -> bool:
        """Whether a step daemon is that node's: it has the log of its slurmd open."""
        log = str(self.base / "log" / f"slurmd-{node}.log")
        try:
            return any(os.readlink(fd) == log for fd in (entry / "fd").iterdir())
        except OSError:
            return False

    def restart(self, daemon: str) -> None:
        """Start it again."""
        name, _, node = daemon.partition("-")
        path = os.pathsep.join((os.environ["PATH"], "/usr/sbin"))
        words = [name, "-f", os.environ["SLURM_CONF"], *(("-N", node) if node else ())]
        subprocess.run(words, check=True, env={**os.environ, "PATH": path})

    def settled(self) -> None:
        """Until the controller has written down what it was told: within 5 s of a change; before, kill -9 makes it forget."""
        since = time.time()
        # It writes only where something has changed, which may have been, and be written, before `since`.
        changed = self.call("sbatch", "--parsable", "--hold", "--output=/dev/null", "--wrap=true").strip()
        self.call("scancel", changed)
        wait_for(lambda: (self.base / "state" / "job_state").stat().st_mtime > since)

    def resume(self) -> None:
        """Every node in service again."""
        for node in range(1, NODES + 1):
            # One that is in service already has nothing to resume, which is an error to scontrol.
            subprocess.run(["scontrol", "update", f"NodeName=node{node}", "State=RESUME"], capture_output=True)

    def urgent(self, where: Path) -> None:
        """A job of the partition that preempts all others, on every node."""
        script = where / "urgent.sh"
        script.write_text("#!/bin/sh\nsleep 1\n")
        self.call("sbatch", "--partition=urgent", f"--nodes={NODES}", "--exclusive", "--output=/dev/null", str(script))

    def fail(self, node: str) -> None:
        """A node that is lost: its daemons are killed, Slurm notices, and it comes back later."""
        self.kill(f"slurmd-{node}")
        self.call("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=lost")  # or wait for SlurmdTimeout
        self.restart(f"slurmd-{node}")
        # It may have come back by itself already, and then there is nothing to resume.
        subprocess.run(["scontrol", "update", f"NodeName={node}", "State=RESUME"], capture_output=True)

    def ready(self) -> None:
        """All nodes idle and nothing queued: what every test begins with."""
        deadline = time.monotonic() + PATIENCE
        asked: set[str] = set()  # once: a step that is killed while it ends is taken for one that cannot be
        while True:
            for job in set(self.call("squeue", "-h", "-o", "%A").split()) - asked:
                asked.add(job)
                slurm.cancel(job, "--signal=KILL", "--full")
                slurm.cancel(job)
            states = dict(
                line.split() for line in self.call("sinfo", "-h", "-N", "-p", "main", "-o", "%N %T").splitlines()
            )
            if all(state == "idle" for state in states.values()) and not self.call("squeue", "-h").strip():
                return
            for node, state in states.items():
                if state.rstrip("*").startswith(("drain", "down")):
                    subprocess.run(["scontrol", "update", f"NodeName={node}", "State=RESUME"], capture_output=True)
            assert time.monotonic() < deadline, states
            time.sleep(0.1)


def _comm(entry: Path) -> str:
    try:
        return (entry / "comm").read_text().strip()
    except OSError:
        return ""


def _ports() -> int:
    """The first of five free ports in a row, in this worker's part of those below the ranks' own (slurm_step.py)."""
    begin = 16_810 + 1000 * (int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 3)
    for first in random.sample(range(begin, begin + 1000, 10), 100):
        try:
            for port in range(first, first + NODES + 1):
                with socket.socket() as probe:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind(("127.0.0.1", port))
            return first
        except OSError:
            continue
    raise RuntimeError("no free ports")


@pytest.fixture(scope="session")
def running() -> Iterator[Cluster]:
    if (reason := missing()) is not None:
        if os.environ.get("CI") == "true":
            pytest.fail(f"CI has to have Slurm: {reason}")
        pytest.skip(f"no Slurm: {reason}")
    base = Path(
        tempfile.mkdtemp(prefix="slurm-", dir="/tmp")
    )  # munged wants a short path that only its owner writes to
    try:
        subprocess.run(
            [ROOT / ".ci" / "slurm_up", base, str(NODES)],
            check=True,
            # A machine that stands still for a while has not lost its nodes.
            env={**os.environ, "SLURM_MINI_PORT": str(_ports()), "SLURM_MINI_SLURMD_TIMEOUT": "120"},
        )
        os.environ["SLURM_CONF"] = str(base / "etc" / "slurm.conf")
        yield Cluster(base)
    finally:
        os.environ.pop("SLURM_CONF", None)
        subprocess.run([ROOT / ".ci" / "slurm_down", base, "--purge"], check=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """What failed on a cluster is explained by its queue and its logs, which are gone with it."""
    report = yield
    if report.when == "call" and report.failed and "tmp_path" in getattr(item, "funcargs", {}):
        report.sections.append(("the cluster and the logs", _seen(item.funcargs["tmp_path"])))  # type: ignore[attr-defined]
    return report


def _seen(path: Path) -> str:
    asked = (["squeue", "-a", "-o", "%i %T %D %r %k"], ["sinfo", "-N", "-p", "main", "-o", "%N %T %E"])
    found = [subprocess.run(words, capture_output=True, text=True).stdout for words in asked]
    for log in sorted(path.rglob("*.log")) + sorted(path.rglob("supervisor.jsonl")):
        found.append(f"== {log.relative_to(path)}\n{log.read_text(errors='replace')[-1500:]}")
    return "\n".join(found)


@pytest.fixture
def cluster(running: Cluster) -> Cluster:
    running.ready()
    return running


RAMP = {"thresholds": "0:16 64:32 192:64", "samples": "448", "node_policy": "constant-work"}
LAUNCHES = ((1, 0, 64), (2, 64, 192), (4, 192, 448))  # nodes, first and last sample of each launch
QUICK = Options(engine="slurm", retry_seconds=0.5, stall_seconds=600.0, grace_seconds=120.0)


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., tuple[RunDirectory, RunPlan]]:
    """Begin a run of the scripted trainer over 1, 2 and 4 nodes, in a directory with spaces and quotes."""

    def made(
        *,
        options: Options = QUICK,
        detached: bool = False,
        extra: tuple[str, ...] = (),
        title: str = "a run",
        **site: Any,
    ) -> tuple[RunDirectory, RunPlan]:
        directory = RunDirectory(tmp_path / f'{title}\'s "directory" 100%j')
        command = (
            sys.executable,
            str(TRAINER),
            "--start",
            "{start_sample}",
            "--end",
            "{end_sample}",
            "--nodes",
            "{nodes}",
        )
        plan, _ = build(
            BatchRequest(nodes=4, devices_per_node=1), read_ramp(RAMP), options, command=(*command, *extra),
            working_directory=str(tmp_path),
        )  # fmt: skip
        write_json(directory.path / "plan.json", plan)
        remember(directory, Site(**{"poll_seconds": 0.3, "signal_seconds": 20, **site}), detached=detached)
        return directory, plan

    return made


@contextmanager
def supervisor(directory: RunDirectory) -> Iterator[subprocess.Popen[bytes]]:
    """One in a process of its own; killed if it has not ended."""
    process = subprocess.Popen([sys.executable, Path(__file__).with_name("supervise.py"), directory.path])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def audit(directory: RunDirectory, end: int = 448) -> dict[int, list[dict[str, Any]]]:
    """Every sample once in what survived, and every launch by one process of one job; the lines by launch."""
    found: dict[int, list[dict[str, Any]]] = {}
    position = 0
    for number in directory.numbers():
        path = directory.path / "trained" / f"launch-{number:04d}.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        assert len({(line["job"], line["pid"]) for line in lines}) <= 1, f"launch {number} was trained twice"
        status = directory.launch(number) / "status.json"
        saved = json.loads(status.read_text())["consumed_samples"] if status.exists() else position
        for line in lines:
            if line["end"] <= saved:
                assert line["start"] == position, f"launch {number}: {line} after sample {position}"
                position = line["end"]
        found[number] = lines
    assert position == end
    return found


def seen(trained: dict[int, list[dict[str, Any]]]) -> list[tuple[int, int, int]]:
    """Nodes, first and last sample of every launch that trained."""
    return [(lines[0]["nodes"], lines[0]["start"], lines[-1]["end"]) for lines in trained.values() if lines]


def gone(directory: RunDirectory, number: int) -> None:
    """Wait until the command of a launch is no more: its death comes down from the node's daemons."""
    pid = json.loads((directory.launch(number) / "ranks" / "0.json").read_text())["pid"]
    wait_for(lambda: process_state(pid, None) in (None, "Z"))


def wait_for(what: Callable[[], Any], seconds: float = PATIENCE) -> Any:
    """Until it is true; its value."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            if value := what():
                return value
        except (slurm.Unreachable, subprocess.CalledProcessError, OSError, ValueError) as error:
            value = error  # a controller that is busy, a line that is being written
        assert time.monotonic() < deadline, f"waited in vain: {value!r}"
        time.sleep(0.1)
