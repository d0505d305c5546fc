"""The real loop on 1, 2 and 4 nodes of a real Slurm: the losses of the local engine, an exact ledger, a stop in a step."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from batchwright.core.batch.request import Request
from batchwright.core.ramp.request import read_ramp
from batchwright.launch.directory import RunDirectory, write_json
from batchwright.launch.engine import rank_logs
from batchwright.launch.local import LocalEngine
from batchwright.launch.plan import build
from batchwright.launch.records import Ending, Options
from batchwright.launch.show import LineDisplay
from batchwright.launch.slurm import chain
from batchwright.launch.slurm.site import Site, remember
from batchwright.launch.supervisor import Supervisor
from batchwright.rundir.files import find_json

from .conftest import PATIENCE, RAMP, supervisor, wait_for

pytestmark = pytest.mark.torch
TASK = Path(__file__).with_name("byte_task.py")
NODES = [1, 2, 2, 4]  # the second launch is interrupted once


def plan(engine: str, nodes: int = 4, arguments=None, **ramp):
    request = Request(nodes=nodes, devices_per_node=1, max_micro_batch_size=8)
    options = Options(engine=engine, settings={"progress": False})
    return build(request, read_ramp({**RAMP, **ramp}), options, target=f"{TASK}:task", arguments=arguments)[0]


def losses(path: Path, launch: int | None = None) -> dict[int, float]:
    """By step, over all launches or one."""
    found: dict[int, float] = {}
    for file in sorted((path / "events").glob("launch-*.jsonl" if launch is None else f"launch-{launch:05d}.jsonl")):
        for line in file.read_text().splitlines():
            event = json.loads(line)
            if event["kind"] == "step":
                found[event["step"]] = event["loss"]
    return found


def check(directory: RunDirectory, expected: dict[int, float]) -> None:
    from batchwright.runtime.state.audit import audit

    assert [directory.manifest(number).nodes for number in directory.numbers()] == NODES
    ledger = audit(directory.path)
    assert ledger.ok and ledger.gaps == ledger.repeats == 0
    found = losses(directory.path)
    assert found.keys() == expected.keys()
    for step, loss in expected.items():
        assert found[step] == pytest.approx(loss, rel=2e-5), step


def interrupt(cluster, directory: RunDirectory, slow: Path) -> Ending:
    """Signal launch 2 in a slow step, as Slurm does before a time limit; how the launch ended."""
    wait_for(lambda: losses(directory.path, 2))
    job = json.loads((directory.launch(2) / "job.json").read_text())["job"]
    cluster.call("scancel", "--batch", "--signal=USR1", job)
    ending = wait_for(lambda: directory.ending(2))
    slow.unlink()
    # The ranks on both nodes saved the step that they were in.
    assert 64 < ending.position == 64 + 32 * len(losses(directory.path, 2)) < 192
    assert all(rank.code == 0 for rank in rank_logs(directory.launch(2)))
    return ending


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> dict[int, float]:
    """One process of the local engine, without a boundary."""
    directory = RunDirectory(tmp_path_factory.mktemp("local"))
    one = plan("local", nodes=1, node_policy="constant")
    write_json(directory.path / "plan.json", one)
    assert Supervisor(directory, one, LocalEngine(), LineDisplay(every=1e9)).run() == "complete"
    return losses(directory.path)


@pytest.fixture
def slow(tmp_path) -> Path:
    """While this file exists, a step on two nodes takes seconds, longer than a launcher is patient."""
    path = tmp_path / "slow"
    path.touch()
    return path


def test_a_supervised_ramp_trains_what_the_local_engine_does(cluster, tmp_path, expected, slow):
    directory, made = RunDirectory(tmp_path / "a run"), plan("slurm", arguments={"slow": str(slow)})
    write_json(directory.path / "plan.json", made)
    # A site that keeps the login node's environment out of its jobs, and whose prologue runs a step.
    site = Site(
        poll_seconds=0.5, sbatch=("--export=NONE", "--cpus-per-task=2"), prologue=(f"srun {sys.executable} -V",)
    )
    remember(directory, site, detached=False)
    with supervisor(directory) as process:
        interrupt(cluster, directory, slow)
        assert process.wait(PATIENCE) == 0
    check(directory, expected)


def test_a_chain_with_torchrun_on_each_node_trains_it_too(cluster, tmp_path, expected, slow):
    """torchrun takes a second signal as the request to end at once."""
    directory, made = RunDirectory(tmp_path / "a run"), plan("slurm", arguments={"slow": str(slow)})
    write_json(directory.path / "plan.json", made)
    run = remember(directory, Site(poll_seconds=0.5, launcher="torchrun"), detached=True)
    chain.begin(directory, made, run)
    assert interrupt(cluster, directory, slow).outcome == "stopped"
    outcome = wait_for(lambda: find_json(directory.path / "outcome.json"))
    assert outcome["state"] == "complete", outcome
    check(directory, expected)
    # torchrun ends by itself after its ranks: Slurm drains the node of a step that is killed while it ends.
    for number in directory.numbers():
        assert "Killed" not in (directory.launch(number) / "logs" / "launcher.log").read_text()
