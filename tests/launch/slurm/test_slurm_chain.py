"""Chains of jobs without a supervisor, on a real Slurm, with every kind of failure."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import replace

from batchwright.launch.slurm import chain
from batchwright.launch.slurm import commands as slurm
from batchwright.launch.slurm.control import rows
from batchwright.launch.slurm.script import write_chain_script
from batchwright.launch.slurm.site import SlurmRun
from batchwright.rundir.files import find_object

from .conftest import LAUNCHES, PATIENCE, QUICK, audit, chain_log, ended, gone, seen, supervisor, wait_for


def begin(directory, plan) -> list[str]:
    return chain.begin(directory, plan, SlurmRun.load(directory))


def complete(directory):
    outcome = wait_for(lambda: find_object(directory.path / "outcome.json"))
    assert outcome["state"] == "complete", outcome
    # No successor is left.
    wait_for(lambda: not [one for one in slurm.jobs(SlurmRun.load(directory).token) if one.alive])
    return audit(directory)


def started(directory, number: int) -> dict:
    """Wait until a launch's trainer runs; the record of its job."""
    wait_for(lambda: (directory.launch(number) / "ranks" / "0.json").exists())
    return json.loads((directory.launch(number) / "job.json").read_text())


def reached(directory, number: int, samples: int) -> str:
    """Wait until a launch has saved at this sample; its job."""
    path = directory.launch(number) / "status.json"
    wait_for(lambda: path.exists() and json.loads(path.read_text())["consumed_samples"] >= samples)
    return started(directory, number)["job"]


def test_where_nodes_may_not_submit_all_launches_are_queued_and_spares_step_in(cluster, make, tmp_path):
    hold = tmp_path / "hold"
    hold.touch()
    directory, plan = make(detached=True, nodes_submit=False, spares=1, extra=("--hold", str(hold), "--hold-at", "96"))
    assert len(begin(directory, plan)) == 6
    job = reached(directory, 2, 96)
    assert [row.state.split()[0] for row in rows(directory, plan)] == ["done", "running", "pending"]
    cluster.call("scancel", job)
    wait_for(lambda: directory.ending(2))  # without the hold, the launch might complete first
    hold.unlink()
    assert [nodes for nodes, *_ in seen(complete(directory))] == [1, 2, 2, 4]
    assert "launch 2 is next, on 2 nodes, and this job has 1" in chain_log(directory)  # the spare of the first launch


def test_scancel_a_duplicate_sigkill_and_a_killed_controller_are_survived(cluster, make, tmp_path):
    hold = tmp_path / "hold"
    hold.touch()
    directory, plan = make(detached=True, extra=("--hold", str(hold), "--hold-at", "32"))
    begin(directory, plan)
    job = reached(directory, 1, 32)
    ended(slurm.submit(directory.path / "scripts" / "launch-1.sh"))  # a person submits it again
    assert f"is being run by job {job}" in chain_log(directory)
    cluster.call("scancel", job)
    second = started(directory, 2)["job"]
    assert second != job
    driver = json.loads((directory.launch(2) / "ranks" / "0.json").read_text())["parent"]
    os.kill(_parent(driver), signal.SIGKILL)  # the job's first process, and so all below it
    started(directory, 3)
    cluster.settled()
    cluster.kill("slurmctld")
    hold.unlink()  # this launch ends, and no controller is there to submit the next one to
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
    # Slurm checks time limits every 30 s and warns up to 30 s early: with 50 s, at the first check.
    held = {"signal_seconds": 50, "extra": ("--hold", str(hold), "--hold-at", "0")}
    chained, plan = make(detached=True, title="a chain", **held)
    watched, _ = make(title="a supervised run", **held)
    begin(chained, plan)
    with supervisor(watched) as process:
        for directory in (chained, watched):
            wait_for((directory.path / "trained" / "launch-0001.jsonl").exists)  # it handles signals now
            job = started(directory, 1)["job"]
            cluster.call("scontrol", "update", f"JobId={job}", "TimeLimit=1")
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
    """Wait until a launch has ended and its job has written its end, in whichever order."""
    wait_for(lambda: directory.ending(number))
    return wait_for(
        lambda: (record := find_object(directory.launch(number) / "job.json"))["state"] == "ended" and record
    )


def test_a_launch_that_ends_early_is_continued_by_a_chain_and_by_a_supervised_run(cluster, make):
    """Exit code 0 before end_sample: the position says whether a launch is done, not the exit code."""
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


def test_a_job_that_is_cancelled_while_it_waits_or_killed_in_its_prologue_has_a_successor(cluster, make, tmp_path):
    """Such a job cannot submit a successor itself: it was submitted together with the job."""
    flag = tmp_path / "flag"
    kill_once = f'[ "$SLURM_JOB_NUM_NODES" != 2 ] || test -e "{flag}" || {{ touch "{flag}"; kill -9 $$; }}'
    directory, plan = make(detached=True, prologue=(kill_once,))
    cluster.call("scontrol", "update", "NodeName=node[1-4]", "State=DRAIN", "Reason=test")
    (cancelled,) = begin(directory, plan)
    cluster.call("scancel", cancelled)
    wait_for(lambda: (one := slurm.job(cancelled)) is None or not one.alive)
    cluster.resume()
    assert seen(complete(directory)) == list(LAUNCHES)
    events = [event for event in directory.events() if event["kind"] == "submitted" and event["role"] == "chain"]
    killed = next(event["job"] for event in events if event["launch"] == 1)
    assert flag.exists()
    assert directory.manifest(1).handle["job"] != cancelled and directory.manifest(2).handle["job"] != killed


def test_a_failed_node_is_survived(cluster, make, tmp_path):
    hold = tmp_path / "hold"
    hold.touch()
    directory, plan = make(detached=True, extra=("--hold", str(hold), "--hold-at", "96"))
    begin(directory, plan)
    job = reached(directory, 2, 96)
    cluster.fail(cluster.call("squeue", "-h", "-j", job, "-o", "%B").strip())  # where the batch script runs
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
    script = write_chain_script(directory, plan, SlurmRun.load(directory), plan.launches[2])
    # Wait until Slurm would use these nodes again.
    wait_for(lambda: (slurm.starts_at(script, "--nodes=3", "--exclude=node1")[0] or 1e12) < time.time() + 300)
    hold.unlink()
    assert seen(complete(directory)) == [(1, 0, 64), (1, 64, 192), (4, 192, 448)]


def test_a_chain_without_progress_ends_with_its_reason(cluster, make):
    directory, plan = make(detached=True, options=replace(QUICK, max_retries=1), prologue=("false",))
    begin(directory, plan)
    outcome = wait_for(lambda: find_object(directory.path / "outcome.json"))
    assert outcome["state"] == "failed" and "prologue command 1" in outcome["failure"]["reason"]
    assert len(directory.numbers()) == 2
    wait_for(lambda: not cluster.call("squeue", "-h").strip())


def test_a_chain_whose_jobs_end_without_a_report_ends_and_may_be_started_again(cluster, make):
    directory, plan = make(detached=True, options=replace(QUICK, max_retries=1), extra=("--kill-job",))
    for starts in (2, 4):  # failures before a person started it again do not count
        begin(directory, plan)
        outcome = wait_for(lambda: find_object(directory.path / "outcome.json"))
        assert outcome["state"] == "failed" and "without a report" in outcome["failure"]["reason"]
        assert len(directory.numbers()) == starts
        wait_for(lambda: not cluster.call("squeue", "-h").strip())
