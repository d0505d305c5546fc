"""A real Slurm of four virtual nodes, started once per session and ended with it (.ci/slurm_up, .ci/slurm_down)."""

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
from batchwright.launch.plan import build
from batchwright.launch.records import Options, RunPlan
from batchwright.launch.slurm import commands as slurm
from batchwright.launch.slurm.site import Site, remember
from batchwright.processes.guard import process_state

ROOT = Path(__file__).parents[3]
TRAINER = Path(__file__).with_name("trainer.py")
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
NODES = 4
PATIENCE = 600.0  # for a busy machine


def missing() -> str | None:
    """Why Slurm cannot start here; None if it can."""
    path = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin"))
    absent = [program for program in PROGRAMS if shutil.which(program, path=path) is None]
    if absent:
        return f"{', '.join(absent)} not installed (apt-get install slurm-wlm slurmctld slurmd munge)"
    if os.getuid() != 0:
        return "only root can start a Slurm for tests"
    return None


class Cluster:
    """The Slurm under test, and its failures."""

    def __init__(self, base: Path) -> None:
        self.base = base

    def call(self, *command: str) -> str:
        """The output of a command; repeated if the controller is too busy to answer."""
        deadline = time.monotonic() + PATIENCE
        while True:
            done = subprocess.run(command, capture_output=True, text=True)
            if not done.returncode or not slurm._NO_ANSWER.search(done.stderr) or time.monotonic() > deadline:
                done.check_returncode()
                return done.stdout
            time.sleep(0.5)

    def kill(self, daemon: str) -> None:
        """SIGKILL for a daemon that this fixture started; with a slurmd, the step daemons of its node, too."""
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
        for one in (pid, *steps):  # then its port is free
            wait_for(lambda one=one: process_state(one, None) in (None, "Z"))

    def _is_of(self, entry: Path, node: str) -> bool:
        """Whether a step daemon belongs to this node: it has the log of its slurmd open."""
        log = str(self.base / "log" / f"slurmd-{node}.log")
        try:
            return any(os.readlink(fd) == log for fd in (entry / "fd").iterdir())
        except OSError:
            return False

    def restart(self, daemon: str) -> None:
        """Start it again."""
        name, _, node = daemon.partition("-")
        path = os.pathsep.join((os.environ["PATH"], "/usr/sbin"))
        command = [name, "-f", os.environ["SLURM_CONF"], *(("-N", node) if node else ())]
        subprocess.run(command, check=True, env={**os.environ, "PATH": path})

    def settled(self) -> None:
        """Wait until the controller has saved its state, up to 5 s after a change: kill -9 before that loses the change."""
        since = time.time()
        # It saves only after a change, so make one.
        changed = self.call("sbatch", "--parsable", "--hold", "--output=/dev/null", "--wrap=true").strip()
        self.call("scancel", changed)
        wait_for(lambda: (self.base / "state" / "job_state").stat().st_mtime > since)

    def resume(self) -> None:
        """Every node in service again."""
        for node in range(1, NODES + 1):
            # For a node that is in service already, scontrol reports an error.
            subprocess.run(["scontrol", "update", f"NodeName=node{node}", "State=RESUME"], capture_output=True)

    def urgent(self, where: Path) -> None:
        """A job on every node, in the partition that preempts all others."""
        script = where / "urgent.sh"
        script.write_text("#!/bin/sh\nsleep 1\n")
        self.call("sbatch", "--partition=urgent", f"--nodes={NODES}", "--exclusive", "--output=/dev/null", str(script))

    def fail(self, node: str) -> None:
        """Lose a node: its daemons are killed, Slurm notices, and the node comes back later."""
        self.kill(f"slurmd-{node}")
        self.call("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=lost")  # or wait for SlurmdTimeout
        self.restart(f"slurmd-{node}")
        # If it came back by itself already, scontrol reports an error.
        subprocess.run(["scontrol", "update", f"NodeName={node}", "State=RESUME"], capture_output=True)

    def ready(self) -> None:
        """Wait until all nodes are idle and the queue is empty, for the next test."""
        deadline = time.monotonic() + PATIENCE
        asked: set[str] = set()  # only once: Slurm drains the node of a step that is killed while it ends
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
    """The first of five free ports in a row, in this worker's range, below the ports of the ranks (step.py)."""
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
    # munged needs a short path that only its owner may write to.
    base = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    try:
        subprocess.run(
            [ROOT / ".ci" / "slurm_up", base, str(NODES)],
            check=True,
            # A busy machine may pause for a while; its nodes are not lost then.
            env={**os.environ, "SLURM_MINI_PORT": str(_ports()), "SLURM_MINI_SLURMD_TIMEOUT": "120"},
        )
        os.environ["SLURM_CONF"] = str(base / "etc" / "slurm.conf")
        yield Cluster(base)
    finally:
        os.environ.pop("SLURM_CONF", None)
        subprocess.run([ROOT / ".ci" / "slurm_down", base, "--purge"], check=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Add the queue and the logs to the report of a failed test: they are deleted with the cluster."""
    report = yield
    if report.when == "call" and report.failed and "tmp_path" in getattr(item, "funcargs", {}):
        report.sections.append(("the cluster and the logs", _seen(item.funcargs["tmp_path"])))  # type: ignore[attr-defined]
    return report


def _seen(path: Path) -> str:
    asked = (["squeue", "-a", "-o", "%i %T %D %r %k"], ["sinfo", "-N", "-p", "main", "-o", "%N %T %E"])
    found = [subprocess.run(command, capture_output=True, text=True).stdout for command in asked]
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
    """Make a run of the scripted trainer over 1, 2 and 4 nodes, in a directory with spaces and quotes."""

    def made(
        *,
        options: Options = QUICK,
        detached: bool = False,
        extra: tuple[str, ...] = (),
        title: str = "a run",
        **site: Any,
    ) -> tuple[RunDirectory, RunPlan]:
        directory = RunDirectory(tmp_path / f'{title}\'s "directory" 100%j')
        arguments = "--start {start_sample} --end {end_sample} --nodes {nodes}".split()
        plan, _ = build(
            BatchRequest(nodes=4, devices_per_node=1),
            read_ramp(RAMP),
            options,
            command=(sys.executable, str(TRAINER), *arguments, *extra),
            working_directory=str(tmp_path),
        )
        write_json(directory.path / "plan.json", plan)
        remember(directory, Site(**{"poll_seconds": 0.3, "signal_seconds": 20, **site}), detached=detached)
        return directory, plan

    return made


@contextmanager
def supervisor(directory: RunDirectory) -> Iterator[subprocess.Popen[bytes]]:
    """A supervisor in its own process; killed if it has not ended."""
    process = subprocess.Popen([sys.executable, Path(__file__).with_name("supervise.py"), directory.path])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def audit(directory: RunDirectory, end: int = 448) -> dict[int, list[dict[str, Any]]]:
    """Check that every saved sample was trained once, and every launch by one process of one job; the lines by launch."""
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


def ended(job: str) -> None:
    """Wait until a job has ended with exit code 0."""
    wait_for(lambda: (one := slurm.job(job)) is None or not one.alive)
    one = slurm.job(job)
    assert one is None or one.state == "COMPLETED", one


def submitted_again(script: Path, log: Path) -> str:
    """Submit a script a second time; what its job writes to the log."""
    before = log.stat().st_size
    ended(slurm.submit(script))
    return log.read_text()[before:]


def chain_log(directory: RunDirectory) -> str:
    """What the jobs of a chain wrote."""
    return "".join(path.read_text() for path in sorted((directory.path / "logs").glob("launch-*.log")))


def gone(directory: RunDirectory, number: int) -> None:
    """Wait until the command of a launch has ended: it is killed when the node's daemons are."""
    pid = json.loads((directory.launch(number) / "ranks" / "0.json").read_text())["pid"]
    wait_for(lambda: process_state(pid, None) in (None, "Z"))


def wait_for(what: Callable[[], Any], seconds: float = PATIENCE) -> Any:
    """Wait until it is true; its value."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            if value := what():
                return value
        except (slurm.Unreachable, subprocess.CalledProcessError, OSError, ValueError) as error:
            value = error  # a busy controller, or a line that is being written
        assert time.monotonic() < deadline, f"still {value!r} after {seconds:g} s"
        time.sleep(0.1)
