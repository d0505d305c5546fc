"""The real loop on 1, 2 and 4 nodes of a real Slurm: the same losses as the local engine, an exact ledger."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from batchwright.core.batch.request import BatchRequest
from batchwright.core.ramp.request import read_ramp
from batchwright.launch.directory import RunDirectory, write_json
from batchwright.launch.engine import rank_logs
from batchwright.launch.local import LocalEngine
from batchwright.launch.plan import build
from batchwright.launch.records import Options
from batchwright.launch.show import LineDisplay
from batchwright.launch.slurm import chain
from batchwright.launch.slurm.engine import SlurmSupervisor
from batchwright.launch.slurm.site import Site, remember
from batchwright.launch.supervisor import Supervisor
from batchwright.rundir import names
from batchwright.rundir.files import find_object
from tests.needs import needs

from .conftest import RAMP, wait_for

pytestmark = pytest.mark.torch
TASK = Path(__file__).with_name("byte_task.py")
JAX_TASK = Path(__file__).parents[3] / "examples" / "jax_gpt" / "jax_gpt.py"


def plan(engine: str, nodes: int = 4, task: str = f"{TASK}:task", arguments=None, readers: int | None = None, **ramp):
    request = BatchRequest(nodes=nodes, devices_per_node=1, max_micro_batch_size=8, loading_hosts=readers)
    options = Options(engine=engine, settings={"progress": False})
    return build(request, read_ramp({**RAMP, **ramp}), options, target=task, arguments=arguments)[0]


def losses(path: Path) -> dict[int, float]:
    """By step, over all launches."""
    found: dict[int, float] = {}
    for file in sorted((path / "events").glob("launch-*.jsonl")):
        for line in file.read_text().splitlines():
            event = json.loads(line)
            if event["kind"] == "step":
                found[event["step"]] = event["loss"]
    return found


def check(directory: RunDirectory, nodes: list[int], expected: dict[int, float]) -> None:
    from batchwright.runtime.state.audit import audit

    assert [directory.manifest(number).nodes for number in directory.numbers()] == nodes
    ledger = audit(directory.path)
    assert ledger.ok and ledger.gaps == ledger.repeats == 0
    found = losses(directory.path)
    assert found.keys() == expected.keys()
    for step, loss in expected.items():
        assert found[step] == pytest.approx(loss, rel=2e-5), step


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> dict[int, float]:
    """One process of the local engine, without a boundary."""
    directory = RunDirectory(tmp_path_factory.mktemp("local"))
    one = plan("local", nodes=1, node_policy="constant")
    write_json(directory.path / "plan.json", one)
    assert Supervisor(directory, one, LocalEngine(), LineDisplay(every=1e9)).run() == "complete"
    return losses(directory.path)


def test_a_supervised_ramp_trains_what_the_local_engine_does(cluster, tmp_path, expected):
    directory, made = RunDirectory(tmp_path / "a run"), plan("slurm")
    write_json(directory.path / "plan.json", made)
    # A site that keeps the login node's environment out of its jobs, and whose prologue runs a step.
    site = Site(
        poll_seconds=0.5, sbatch=("--export=NONE", "--cpus-per-task=2"), prologue=(f"srun {sys.executable} -V",)
    )
    remember(directory, site, detached=False)
    assert SlurmSupervisor(directory, made, LineDisplay(every=1e9)).run() == "complete"
    check(directory, [1, 2, 4], expected)


@pytest.mark.rounds
def test_nodes_are_the_hosts_that_read(cluster, tmp_path, expected):
    directory, made = RunDirectory(tmp_path / "a run"), plan("slurm", readers=2)
    write_json(directory.path / "plan.json", made)
    remember(directory, Site(poll_seconds=0.5), detached=False)
    assert SlurmSupervisor(directory, made, LineDisplay(every=1e9)).run() == "complete"
    check(directory, [1, 2, 4], expected)
    read = [find_object(directory.path / names.status(number))["loading"] for number in directory.numbers()]
    assert [(one["hosts"], one["loading_hosts"], one["read_amplification"]) for one in read] == [
        (1, 1, 1.0),
        (2, 2, 1.0),
        (4, 2, 1.0),
    ]


@pytest.mark.rounds
def test_a_jax_task_trains_with_one_process_on_each_node(cluster, tmp_path):
    from batchwright.runtime.state.audit import audit

    for package in ("jax", "optax", "orbax"):
        needs(package)
    made = plan("slurm", task=f"{JAX_TASK}:task", arguments={"sequence_length": 16, "files": 20})
    directory = RunDirectory(tmp_path / "a run")
    write_json(directory.path / "plan.json", made)
    remember(directory, Site(poll_seconds=0.5), detached=False)
    assert SlurmSupervisor(directory, made, LineDisplay(every=1e9)).run() == "complete"
    assert [directory.manifest(number).nodes for number in directory.numbers()] == [1, 2, 4]
    assert len(rank_logs(directory.launch(3))) == 4
    found = audit(directory.path)
    assert (found.ok, found.samples, found.gaps, found.repeats) == (True, made.total_samples, 0, 0), found


@pytest.mark.rounds
def test_a_chain_with_torchrun_on_each_node_trains_it_too(cluster, tmp_path, expected):
    directory, made = RunDirectory(tmp_path / "a run"), plan("slurm")
    write_json(directory.path / "plan.json", made)
    run = remember(directory, Site(poll_seconds=0.5, launcher="torchrun"), detached=True)
    chain.begin(directory, made, run)
    outcome = wait_for(lambda: find_object(directory.path / "outcome.json"))
    assert outcome["state"] == "complete", outcome
    check(directory, [1, 2, 4], expected)
    # torchrun ends by itself after its ranks: Slurm drains the node of a step that is killed while it ends.
    for number in directory.numbers():
        assert "Killed" not in (directory.launch(number) / "logs" / "launcher.log").read_text()


@pytest.mark.parametrize("launcher", ["srun", pytest.param("torchrun", marks=pytest.mark.rounds)])
def test_ranks_on_two_nodes_save_the_step_they_are_in_before_the_time_limit(cluster, tmp_path, launcher):
    """A step may take long, but torchrun takes a second signal as the request to end at once."""
    slow = {"task": f"{TASK.parents[1] / 'tiny.py'}:task", "arguments": {"slow": 4.0}}
    made = plan("slurm", nodes=2, **slow, thresholds="0:16", samples="448", node_policy="constant")
    directory = RunDirectory(tmp_path / "a run")
    write_json(directory.path / "plan.json", made)
    chain.begin(directory, made, remember(directory, Site(poll_seconds=0.5, launcher=launcher), detached=True))
    wait_for(lambda: losses(directory.path))
    job = json.loads((directory.launch(1) / "job.json").read_text())["job"]
    cluster.call("scancel", "--batch", "--signal=USR1", job)  # as Slurm does before a time limit
    wait_for(lambda: "stopping" in (directory.path / "logs" / "launch-1.log").read_text())
    write_json(directory.path / "stop.json", {"now": False})  # the chain ends with this launch
    ending = wait_for(lambda: directory.ending(1))
    assert ending.outcome == "stopped" and ending.position == 16 * len(losses(directory.path)) > 0
    assert all(rank.code == 0 for rank in rank_logs(directory.launch(1)))
