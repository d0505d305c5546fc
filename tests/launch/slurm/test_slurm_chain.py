"""Chains that go on with nobody around, against a real Slurm, hurt in every way they can be."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import replace

import pytest

from batchwright.launch.slurm import chain
from batchwright.launch.slurm import commands as slurm
from batchwright.launch.slurm.control import rows
from batchwright.launch.slurm.script import write_chain_script
from batchwright.launch.slurm.site import SlurmRun
from batchwright.rundir.files import find_json

from .conftest import LAUNCHES, PATIENCE, QUICK, audit, gone, seen, supervisor, wait_for


def begin(directory, plan) -> list[str]:
    return chain.begin(directory, plan, SlurmRun.load(directory))


def complete(directory):
    outcome = wait_for(lambda: find_json(directory.path / "outcome.json"))
    assert outcome["state"] == "complete", outcome
    wait_for(
        lambda: not [one for one in slurm.jobs(SlurmRun.load(directory).token) if one.alive]
    )  # no successor is left
    return audit(directory)


def started(directory, number: int) -> dict:
    """Wait until a launch's trainer runs; the record of its job."""
    wait_for(lambda: (directory.launch(number) / "ranks" / "0.json").exists())
    return json.loads((directory.launch(number) / "job.json").read_text())


def reached(directory, number: int, samples: int) -> str:
    """Wait until a launch has saved so much; its job."""
    path = directory.launch(number) / "status.json"
    wait_for(lambda: path.exists() and json.loads(path.read_text())["consumed_samples"] >= samples)
    return started(directory, number)["job"]


def log(directory) -> str:
    return "".join(path.read_text() for path in sorted((directory.path / "logs").glob("launch-*.log")))


def ended(job: str) -> None:
    wait_for(lambda: (one := slurm.job(job)) is None or not one.alive)
    one = slurm.job(job)
    assert one is None or one.state == "COMPLETED", one  # exit 0


def test_a_ramp_over_1_2_and_4_nodes_chains_itself(cluster, make):
    directory, plan = make(detached=True)
    assert len(begin(directory, plan)) == 1
    assert seen(complete(directory)) == list(LAUNCHES)
    table = rows(directory, plan)
    assert [(row.state, row.nodes, row.start_sample, row.end_sample) for row in table] == [
        ("done", *launch) for launch in LAUNCHES
    ]
    assert all(row.waited_seconds is not None and row.node_hours for row in table)
    ended(slurm.submit(directory.path / "scripts" / "launch-2.sh"))  # a finished launch, once more
    assert "nothing to do: the run is complete" in log(directory)
    audit(directory)


def test_where_nodes_may_not_submit_all_launches_are_queued_and_spares_step_in(cluster, make, tmp_path):
    hold = tmp_path / "hold"
    hold.touch()
    directory, plan = make(detached=True, nodes_submit=False, spares=1, extra=("--hold", str(hold), "--hold-at", "96"))
    assert len(begin(directory, plan)) == 6
    job = reached(directory, 2, 96)
    assert [row.state.split()[0] for row in rows(directory, plan)] == ["done", "running", "pending"]
    cluster.call("scancel", job)
    wait_for(lambda: directory.ending(2))  # held till then: else it might come to its end first
    hold.unlink()
    assert [nodes for nodes, *_ in seen(complete(directory))] == [1, 2, 2, 4]
    assert "and this job has 1" in log(directory)  # the spare of the first launch


def test_scancel_a_duplicate_sigkill_and_a_killed_controller_are_survived(cluster, make, tmp_path):
    hold = tmp_path / "hold"
    hold.touch()
    directory, plan = make(detached=True, extra=("--hold", str(hold), "--hold-at", "32"))
    begin(directory, plan)
    job = reached(directory, 1, 32)
    ended(slurm.submit(directory.path / "scripts" / "launch-1.sh"))  # an impatient person
    assert f"is being run by job {job}" in log(directory)
    cluster.call("scancel", job)
    second = started(directory, 2)["job"]
    assert second != job
    driver = json.loads((directory.launch(2) / "ranks" / "0.json").read_text())["parent"]
    os.kill(_parent(driver), signal.SIGKILL)  # the job's own process, and with it all below
    started(directory, 3)
    cluster.settled()
    cluster.kill("slurmctld")
    hold.unlink()  # this launch ends, and finds no controller to submit the next one to
    wait_for(lambda: directory.ending(3))
    cluster.restart("slurmctld")
    trained = complete(directory)
    assert [nodes for nodes, *_ in seen(trained)][-2:] == [2, 4]
    assert len(directory.numbers()) == 5


def _parent(pid: int) -> int:
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rsplit(")", 1)[1].split()[1])


def test_the_time_limit_and_a_preemption_are_survived_by_a_chain_and_by_a_supervised_run(cluster, make, tmp_path):
    hold = tmp_path / "hold"
    hold.touch()
    held = {"signal_seconds": 20, "extra": ("--hold", str(hold), "--hold-at", "0")}
    chained, plan = make(detached=True, title="a chain", **held)
    watched, _ = make(title="a supervised run", **held)
    begin(chained, plan)
    with supervisor(watched) as process:
        for directory in (chained, watched):
            wait_for((directory.path / "trained" / "launch-0001.jsonl").exists)  # it can be asked to stop
            # Slurm looks at limits twice a minute, and is up to half a minute early with its warning.
            cluster.call(
                "scontrol", "update", f"JobId={find_json(directory.launch(1) / 'job.json')['job']}", "TimeLimit=1"
            )
        for directory in (chained, watched):
            assert "SIGUSR1" in left(directory, 1)["detail"]
            wait_for((directory.path / "trained" / "launch-0002.jsonl").exists)
        cluster.urgent(tmp_path)
        for directory in (chained, watched):
            assert "SIGTERM" in left(directory, 2)["detail"]
        hold.unlink()
        assert process.wait(PATIENCE) == 0
    complete(chained)
    for directory in (chained, watched):
        audit(directory)
        assert [directory.ending(number).position for number in (1, 2)] == [16, 32]  # each saved the step it was in


def left(directory, number: int) -> dict:
    """Wait until a launch has ended, and its job has said so: its record follows the ending, or goes before it."""
    wait_for(lambda: directory.ending(number))
    return wait_for(lambda: (said := find_json(directory.launch(number) / "job.json"))["state"] == "ended" and said)


def test_a_launch_that_ends_early_is_gone_on_with_by_a_chain_and_by_a_supervised_run(cluster, make):
    """Exit 0, before its end: done is what the position says, not the exit code."""
    early = {"extra": ("--enough", "96")}  # in the middle of launch 2
    chained, plan = make(detached=True, title="a chain", **early)
    watched, _ = make(title="a supervised run", **early)
    begin(chained, plan)
    with supervisor(watched) as process:
        assert process.wait(PATIENCE) == 0
    complete(chained)
    for directory in (chained, watched):
        assert seen(audit(directory)) == [(1, 0, 64), (2, 64, 96), (2, 96, 192), (4, 192, 448)]
        assert directory.ending(2).outcome == "failed" and directory.ending(2).position == 96


@pytest.mark.parametrize("end", ["cancelled while it waits", "killed in its prologue"])
def test_a_link_that_never_comes_to_its_first_word_is_gone_on_with(cluster, make, tmp_path, end):
    """It could not leave a successor itself: that was there before it."""
    flag = tmp_path / "flag"
    directory, plan = make(detached=True, prologue=(f'test -e "{flag}" || {{ touch "{flag}"; kill -9 $$; }}',))
    cluster.call("scontrol", "update", "NodeName=node[1-4]", "State=DRAIN", "Reason=test")
    first = begin(directory, plan)
    if "cancelled" in end:
        flag.touch()
        cluster.call("scancel", *first)
        wait_for(lambda: (one := slurm.job(first[0])) is None or not one.alive)
    cluster.resume()
    assert seen(complete(directory)) == list(LAUNCHES)
    assert flag.exists() and directory.manifest(1).handle["job"] not in first


def test_a_failed_node_is_survived(cluster, make, tmp_path):
    hold = tmp_path / "hold"
    hold.touch()
    directory, plan = make(detached=True, extra=("--hold", str(hold), "--hold-at", "96"))
    begin(directory, plan)
    job = reached(directory, 2, 96)
    cluster.fail(cluster.call("squeue", "-h", "-j", job, "-o", "%B").strip())  # where the batch script is
    gone(directory, 2)
    hold.unlink()
    assert [nodes for nodes, *_ in seen(complete(directory))] == [1, 2, 2, 4]


def test_an_elastic_chain_takes_fewer_nodes_and_grows_at_the_next_boundary(cluster, make, tmp_path):
    hold = tmp_path / "hold"
    hold.touch()
    directory, plan = make(detached=True, elastic=True, time="10", extra=("--hold", str(hold), "--hold-at", "96"))
    cluster.call("scontrol", "update", "NodeName=node[2-4]", "State=DRAIN", "Reason=test")
    begin(directory, plan)
    reached(directory, 2, 96)
    cluster.call("scontrol", "update", "NodeName=node[2-4]", "State=RESUME")
    script = directory.path / "scripts" / "launch-3.sh"
    write_chain_script(directory, plan, SlurmRun.load(directory), plan.launches[2])
    wait_for(
        lambda: (slurm.starts_at(script, "--nodes=3", "--exclude=node1")[0] or 1e12) < time.time() + 300
    )  # Slurm counts them in again
    hold.unlink()
    assert seen(complete(directory)) == [(1, 0, 64), (1, 64, 192), (4, 192, 448)]


def test_a_chain_is_stopped_and_begun_again(cluster, make, tmp_path):
    hold = tmp_path / "hold"
    hold.touch()
    directory, plan = make(detached=True, extra=("--hold", str(hold), "--hold-at", "32"))
    begin(directory, plan)
    reached(directory, 1, 32)
    chain.stop(directory)
    outcome = wait_for(lambda: find_json(directory.path / "outcome.json"))
    assert outcome["state"] == "stopped"
    wait_for(lambda: not cluster.call("squeue", "-h").strip())
    hold.unlink()
    begin(directory, plan)
    complete(directory)


def test_a_chain_that_gets_nowhere_ends_with_its_reason(cluster, make):
    directory, plan = make(detached=True, options=replace(QUICK, max_retries=1), prologue=("false",))
    begin(directory, plan)
    outcome = wait_for(lambda: find_json(directory.path / "outcome.json"))
    assert outcome["state"] == "failed" and "prologue command 1" in outcome["failure"]["reason"]
    assert len(directory.numbers()) == 2
    wait_for(lambda: not cluster.call("squeue", "-h").strip())


def test_a_chain_whose_jobs_die_without_a_word_ends_and_may_be_begun_again(cluster, make):
    directory, plan = make(detached=True, options=replace(QUICK, max_retries=1), extra=("--kill-job",))
    for starts in (2, 4):  # what failed before a person began it again does not count
        begin(directory, plan)
        outcome = wait_for(lambda: find_json(directory.path / "outcome.json"))
        assert outcome["state"] == "failed" and "without a report" in outcome["failure"]["reason"]
        assert len(directory.numbers()) == starts
        wait_for(lambda: not cluster.call("squeue", "-h").strip())
