"""The engine and its supervisor on a real Slurm, with every kind of failure."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest

from batchwright.launch.directory import write_json
from batchwright.launch.engine import Job
from batchwright.launch.records import Manifest
from batchwright.launch.show import LineDisplay
from batchwright.launch.slurm import commands as slurm
from batchwright.launch.slurm.engine import SlurmEngine, SlurmSupervisor
from batchwright.launch.work import launch_end, work
from batchwright.processes.guard import process_state

from .conftest import LAUNCHES, PATIENCE, QUICK, audit, gone, seen, submitted_again, supervisor, wait_for


def supervise(directory, plan) -> tuple[str, str]:
    out = io.StringIO()
    state = SlurmSupervisor(directory, plan, LineDisplay(out, every=0.0)).run()
    return state, out.getvalue()


def running(directory, number: int, samples: int = 0) -> str:
    """Wait until a launch has saved at this sample; its job."""
    wait_for(lambda: (directory.launch(number) / "status.json").exists())
    wait_for(lambda: json.loads((directory.launch(number) / "status.json").read_text())["consumed_samples"] >= samples)
    return wait_for(lambda: (m := directory.manifest(number)) and m.handle and m.handle["job"])


def test_a_killed_supervisor_a_duplicate_and_a_killed_controller_cost_nothing(cluster, make, tmp_path):
    """No launch runs twice: not one that ended without a supervisor and that Slurm has forgotten, nor one that runs."""
    hold = tmp_path / "hold"
    hold.touch()
    directory, _ = make(extra=("--hold", str(hold), "--hold-at", "128"))
    with supervisor(directory) as first:
        job = running(directory, 2, 128)
        first.send_signal(signal.SIGKILL)
        first.wait()
    refused = subprocess.run(["scontrol", "requeue", job], capture_output=True)  # as an administrator might
    assert refused.returncode and directory.ending(2) is None
    hold.unlink()
    wait_for(lambda: slurm.job(job) is None)  # MinJobAge
    hold.touch()
    with supervisor(directory) as second:
        wait_for(lambda: (directory.launch(3) / "ranks" / "0.json").exists())
        wait_for(lambda: (m := directory.manifest(3)) and m.handle)
        second.send_signal(signal.SIGKILL)
        second.wait()
    with supervisor(directory) as third:
        folder = directory.launch(3)
        assert "is or was run by job" in submitted_again(folder / "job.sh", folder / "logs" / "job.log")
        cluster.settled()
        cluster.kill("slurmctld")
        time.sleep(1.5)
        cluster.restart("slurmctld")
        hold.unlink()
        assert third.wait(PATIENCE) == 0
    assert seen(audit(directory)) == list(LAUNCHES)  # no launch started anew


def test_scancel_and_a_failed_node_are_survived(cluster, make, tmp_path):
    hold = tmp_path / "hold"
    hold.touch()
    directory, _ = make(extra=("--hold", str(hold), "--hold-at", "96"))
    with supervisor(directory) as process:
        cluster.call("scancel", running(directory, 2, 96))
        wait_for(lambda: (directory.launch(3) / "ranks" / "0.json").exists())
        job = json.loads((directory.launch(3) / "job.json").read_text())["job"]
        cluster.fail(cluster.call("squeue", "-h", "-j", job, "-o", "%B").strip())  # where the batch script runs
        gone(directory, 3)  # before the hold ends: else the launch might complete first
        hold.unlink()
        assert process.wait(PATIENCE) == 0
    trained = audit(directory)
    assert [nodes for nodes, *_ in seen(trained)] == [1, 2, 2, 4]  # the one on the failed node took no step
    outcomes = [directory.ending(number).outcome for number in directory.numbers()]
    assert outcomes == ["done", "failed", "failed", "done", "done"]


def test_a_crash_between_sbatch_and_its_record_leaves_no_second_writer(cluster, make):
    directory, plan = make()
    launch = plan.launches[0]
    job = work(directory, plan).job(launch, 1, 0)
    place, end = str(job.working_directory), launch_end(plan, launch)
    manifest = Manifest(1, 0, 1, 1, 0, end, job.argv, job.environment, place, time.time())
    directory.fence(1)
    write_json(directory.launch(1) / "manifest.json", manifest)  # without a handle: the supervisor died here
    cluster.call("scontrol", "update", "PartitionName=main", "State=DOWN")
    try:
        stray = SlurmEngine().start(job)["job"]
        with supervisor(directory) as process:
            wait_for(lambda: (one := slurm.job(stray)) is None or not one.alive)  # cancelled by the new supervisor
            cluster.call("scontrol", "update", "PartitionName=main", "State=UP")
            assert process.wait(PATIENCE) == 0
    finally:
        cluster.call("scontrol", "update", "PartitionName=main", "State=UP")
    trained = audit(directory)
    assert all(line["job"] != stray for lines in trained.values() for line in lines)


def test_a_job_that_slurm_holds_after_its_own_prolog_failed_is_replaced(cluster, make):
    directory, _ = make(options=replace(QUICK, max_retries=50))
    flags = [cluster.base / "flags" / f"fail-prolog-node{n}" for n in range(1, 5)]
    for flag in flags:
        flag.touch()
    try:
        with supervisor(directory) as process:
            wait_for(lambda: directory.ending(1))
            for flag in flags:
                flag.unlink()
            # Repeated: another job may have seen a flag just before, and drained a node since.
            wait_for(lambda: cluster.resume() or process.poll() is not None)
            assert process.returncode == 0
    finally:
        for flag in flags:
            flag.unlink(missing_ok=True)
    assert seen(audit(directory)) == list(LAUNCHES)


def test_sbatch_that_refuses_is_quoted(cluster, make):
    from batchwright.core.errors import EnvironmentFault

    directory, plan = make(partition="nowhere")
    with pytest.raises(EnvironmentFault, match="invalid partition"):
        supervise(directory, plan)


def test_a_stop_saves_and_ends_the_job(cluster, make, tmp_path):
    hold = tmp_path / "hold"
    hold.touch()
    directory, _ = make(extra=("--hold", str(hold), "--hold-at", "32"))
    with supervisor(directory) as process:
        running(directory, 1, 32)
        job = directory.manifest(1).handle
        rank = json.loads((directory.launch(1) / "ranks" / "0.json").read_text())["pid"]
        cluster.call("scontrol", "suspend", job["job"])
        assert SlurmEngine().poll(job).state == "pending"  # a suspended job does not stall
        wait_for(lambda: process_state(rank, None) == "T")  # else the node may suspend it after it has resumed it
        cluster.call("scontrol", "resume", job["job"])
        wait_for(lambda: process_state(rank, None) not in (None, "T"))
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(PATIENCE) == 5
    assert directory.ending(1).outcome == "stopped" and directory.ending(1).position == 48
    wait_for(lambda: not cluster.call("squeue", "-h", "-t", "R,PD").strip())


def test_stuck_ranks_on_several_nodes_leave_their_stacks(cluster, make):
    directory, _ = make()
    folder = directory.launch(1)
    text = "import time\ndef here():\n    print('ready', flush=True)\n    time.sleep(600)\nhere()"
    stuck = (sys.executable, "-c", text)
    job = Job("launch 1", folder, 2, 2, stuck, False, {"PYTHONFAULTHANDLER": "1"}, directory.path, "SIGUSR1", 5.0)
    directory.fence(1)
    engine = SlurmEngine()
    handle = engine.start(job)
    wait_for(lambda: ["ready" in rank.tail for rank in engine.logs(handle)] == [True] * 4)
    wait_for(lambda: engine.signal(handle, "trace") or engine.poll(handle).state == "ended")
    for rank in engine.logs(handle):
        assert "Fatal Python error: Aborted" in rank.tail and "in here" in rank.tail
        assert rank.code == -signal.SIGABRT


def test_a_job_that_waits_says_why_and_a_prologue_that_fails_is_named_and_tried_again(cluster, make, tmp_path):
    flag = tmp_path / "flag"
    directory, plan = make(prologue=("export READY=1", f'test -e "{flag}" || {{ touch "{flag}"; (exit 7); }}'))
    cluster.call("scontrol", "update", "NodeName=node[1-4]", "State=DRAIN", "Reason=test")
    out = io.StringIO()
    watch = threading.Thread(
        target=wait_for,
        args=(lambda: "waiting in the queue: Nodes required" in out.getvalue() and cluster.resume() is None,),
    )
    watch.start()
    assert SlurmSupervisor(directory, plan, LineDisplay(out, every=0.0)).run() == "complete", out.getvalue()
    watch.join()
    assert "waiting in the queue: Nodes required for job are DOWN, DRAINED" in out.getvalue()
    first = json.loads((directory.launch(1) / "job.json").read_text())
    assert first["detail"].startswith("prologue command 2 exited with 7")
    assert directory.ending(1).outcome == "failed" and seen(audit(directory)) == list(LAUNCHES)


def test_an_elastic_supervisor_takes_the_free_nodes(cluster, make):
    directory, plan = make(elastic=True, time="10")
    cluster.call("scontrol", "update", "NodeName=node[2-4]", "State=DRAIN", "Reason=test")
    state, output = supervise(directory, plan)
    assert state == "complete" and "takes 1 nodes: 4 nodes are not free soon enough" in output, output
    assert [nodes for nodes, *_ in seen(audit(directory))] == [1, 1, 1]


def test_a_duplicate_that_claims_first_is_the_one_that_is_watched(cluster, make):
    directory, plan = make()
    directory.fence(1)
    cluster.call("scontrol", "update", "PartitionName=main", "State=DOWN")
    try:
        engine = SlurmEngine()
        handle = engine.start(replace(work(directory, plan).job(plan.launches[0], 1, 0), argv=("sleep", "600")))
        cluster.call("scontrol", "hold", handle["job"])
        duplicate = slurm.submit(directory.launch(1) / "job.sh")
    finally:
        cluster.call("scontrol", "update", "PartitionName=main", "State=UP")
    wait_for(lambda: (directory.launch(1) / "ranks" / "0.json").exists())
    assert json.loads((directory.launch(1) / "job.json").read_text())["job"] == duplicate
    cluster.call("scontrol", "release", handle["job"])
    wait_for(lambda: (one := slurm.job(handle["job"])) is None or not one.alive)  # it found nothing to do
    time.sleep(2 * handle["poll_seconds"])  # until the engine asks squeue again
    assert engine.poll(handle).state == "running"
    engine.signal(handle, "kill")
    wait_for(lambda: engine.poll(handle).state == "ended")


def test_settings_of_the_run_override_the_environment(cluster, make, monkeypatch):
    monkeypatch.setenv("SBATCH_PARTITION", "nowhere")
    directory, plan = make(partition="main", time="10", name='it\'s "$(x)" #1 \\ %j\né')
    monkeypatch.setenv("SBATCH_TIMELIMIT", "1")
    cluster.call("scontrol", "update", "PartitionName=main", "State=DOWN")
    try:
        handle = SlurmEngine().start(work(directory, plan).job(plan.launches[0], 1, 0))
        shown = cluster.call("squeue", "-h", "-j", handle["job"], "-o", "%P|%l|%j").rstrip("\n")
        assert shown == 'main|10:00|it\'s "$(x)" #1 \\ %j é'
    finally:
        cluster.call("scontrol", "update", "PartitionName=main", "State=UP")
