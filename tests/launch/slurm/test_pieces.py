"""Without a cluster: locks and claims that outlive their owners, a controller that does not answer."""

from __future__ import annotations

import io
import json
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from batchwright.core.batch.request import BatchRequest
from batchwright.core.errors import EnvironmentFault
from batchwright.core.ramp.request import read_ramp
from batchwright.launch import directory as files
from batchwright.launch.directory import RunDirectory, write_json
from batchwright.launch.engine import Job, Poll
from batchwright.launch.plan import build
from batchwright.launch.ports import free_port
from batchwright.launch.records import Ending, Manifest, Options
from batchwright.launch.show import LineDisplay
from batchwright.launch.slurm import chain
from batchwright.launch.slurm import claim as slurm_claim
from batchwright.launch.slurm import commands as slurm
from batchwright.launch.slurm import control as slurm_run
from batchwright.launch.slurm import engine as slurm_engine
from batchwright.launch.slurm import job as slurm_job
from batchwright.launch.slurm import site as slurm_site
from batchwright.launch.slurm import step as slurm_step
from batchwright.launch.slurm.elastic import affordable
from batchwright.launch.slurm.site import Site, SlurmRun
from batchwright.launch.status import status
from batchwright.launch.work import work
from batchwright.rundir.fence import Fence
from batchwright.rundir.files import create_once, find_object

from .conftest import wait_for

SEVEN = {"engine": "slurm", "job": "7", "directory": "d"}  # the handle of a job


def no_answer(*given: object) -> None:
    raise slurm.Unreachable("Unable to contact slurm controller")


@pytest.fixture
def signals():
    """Restore the signal handlers that a job sets."""
    before = {one: signal.getsignal(one) for one in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_without_a_controller_the_heartbeat_says_whether_the_owner_lives(tmp_path, monkeypatch):
    monkeypatch.setattr(slurm, "job", no_answer)
    directory = RunDirectory(tmp_path)
    record = directory.launch(1) / "job.json"
    write_json(record, {"job": "7", "state": "running"})
    ended = threading.Event()

    def heartbeat() -> None:
        while not ended.wait(0.05):
            os.utime(record)

    owner = threading.Thread(target=heartbeat)
    owner.start()
    try:
        assert slurm_claim.owner_lives(directory.launch(1), "7", "token")
    finally:
        ended.set()
        owner.join()
    monkeypatch.setattr(slurm_claim, "SILENT_SECONDS", 3.0)
    os.utime(record)
    before = time.monotonic()
    assert not slurm_claim.owner_lives(directory.launch(1), "7", "token")  # no heartbeat any more
    assert time.monotonic() - before > 1.0


def test_a_lock_that_a_lost_node_left_does_not_end_the_chain(make, monkeypatch):
    directory, _ = make(detached=True)
    monkeypatch.setattr(files, "LOCK_PATIENCE", 0.0)
    monkeypatch.setattr(chain, "_LOCK_SECONDS", 0.0)
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    gone = RunDirectory(directory.path)
    gone.lock()  # as a file server keeps it for a client that is gone
    try:
        queue: list[slurm.Queued] = []
        monkeypatch.setattr(slurm, "jobs", lambda token: queue)
        assert chain.ChainJob(directory)._locked() is None
        queue += [slurm.Queued("8", "RUNNING", 1, "", ""), slurm.Queued("9", "PENDING", 1, "", "")]
        assert chain.ChainJob(directory)._locked() is None  # this job, and one that has not started
    finally:
        gone.unlock()


@pytest.mark.parametrize("queue", [lambda token: [slurm.Queued("7", "RUNNING", 1, "", "")], no_answer])
def test_a_job_waits_until_the_job_before_releases_the_lock(make, monkeypatch, queue):
    """The last calls of the job before to a busy controller may take long. If this job gave up, the chain would end."""
    directory, _ = make(detached=True)
    monkeypatch.setattr(files, "LOCK_PATIENCE", 0.01)
    monkeypatch.setattr(chain, "_LOCK_SECONDS", 0.1)
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    asked = threading.Event()

    def jobs(token: str) -> list[slurm.Queued]:
        asked.set()
        return queue(token)

    monkeypatch.setattr(slurm, "jobs", jobs)
    write_json(
        directory.launch(1) / "manifest.json",
        Manifest(1, 0, 1, 1, 0, 64, ("x",), {}, "/", 0.0, SEVEN),
    )
    write_json(directory.launch(1) / "job.json", {"job": "7", "state": "ended"})
    before = RunDirectory(directory.path)
    before.lock()
    released: list[bool] = []

    def leave() -> None:
        released.append(asked.wait(30.0))  # it has looked for a stale lock, and still waits
        before.unlock()

    other = threading.Thread(target=leave)
    other.start()
    job = chain.ChainJob(directory)
    assert job._locked() is None and released == [True]
    other.join()
    job._directory.unlock()


class _Quick(slurm_step.StepEngine):
    """Slurm signals ranks and job at the same time, and the ranks end before the job polls."""

    def start(self, job):
        return {"engine": "slurm", "job": "7", "directory": str(job.directory)}

    def poll(self, handle):
        os.kill(os.getpid(), signal.SIGTERM)
        return Poll("ended", 0)


@pytest.mark.parametrize("detached", [True, False])
def test_a_signal_that_ends_the_ranks_first_is_still_the_reason(make, monkeypatch, signals, detached):
    directory, plan = make(detached=detached)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(chain, "submit", lambda *given, **more: pytest.fail("it has a successor"))
    monkeypatch.setattr(chain, "StepEngine", _Quick)
    monkeypatch.setattr(slurm_job, "StepEngine", _Quick)
    successor = slurm.Queued("8", "PENDING", 1, "", "Dependency", "afternotok:7(unfulfilled)")
    monkeypatch.setattr(slurm, "jobs", lambda token: [successor])
    monkeypatch.setattr(slurm, "postpone", lambda job, seconds: None)
    if detached:
        assert chain.ChainJob(directory).run_job() == chain.TRY_AGAIN
        ending = directory.ending(1)
        assert ending is not None and (ending.outcome, ending.failure) == ("stopped", None)
    else:
        slurm_engine.write_job(work(directory, plan).job(plan.launches[0], 1, 0))
        directory.fence(1)
        assert slurm_job.Start(directory, 1).run() == 0
    assert "SIGTERM" in json.loads((directory.launch(1) / "job.json").read_text())["detail"]


def test_of_two_jobs_that_look_at_the_same_time_one_runs(make, monkeypatch):
    """On a file system without locks: the other job claims while this one verifies a checkpoint."""
    directory, _ = make(detached=True)
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    monkeypatch.setattr(slurm, "jobs", lambda token: [])
    monkeypatch.setattr(slurm, "job", lambda job, prefix: slurm.Queued(job, "RUNNING", 1, "", ""))
    monkeypatch.setattr(chain, "submit", lambda *given, **more: pytest.fail("it has nothing to submit"))
    job = chain.ChainJob(directory)
    other = Manifest(1, 0, 1, 1, 0, 64, ("x",), {}, "/", 0.0, SEVEN)
    position = job._work.position

    def meanwhile(**given):
        assert create_once(directory.launch(1) / "manifest.json", other)
        return position(**given)

    monkeypatch.setattr(job._work, "position", meanwhile)
    assert job.run_job() == 0
    assert directory.numbers() == [1] and directory.manifest(1) == other and directory.ending(1) is None
    assert chain.ChainJob(directory).run_job() == 0  # now it sees that another job runs the launch
    assert directory.numbers() == [1] and directory.ending(1) is None


def test_a_job_that_was_suspended_before_it_started_leaves_the_run_to_the_later_launch(make, monkeypatch):
    directory, _ = make(detached=True)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    successor = slurm.Queued("9", "PENDING", 1, "", "Dependency", "afternotok:7(unfulfilled)")
    monkeypatch.setattr(slurm, "jobs", lambda token: [successor])

    def suspended(site) -> None:  # meanwhile another job claims launch 2 and starts it
        directory.fence(2)

    monkeypatch.setattr(chain, "prologue_failure", suspended)
    monkeypatch.setattr(chain.StepEngine, "start", lambda *given: pytest.fail("launch 2 runs"))
    assert chain.ChainJob(directory).run_job() == EnvironmentFault.exit_code  # its successor finds that launch 2 runs
    assert Fence.current(directory.path) == 2 and not (directory.path / "outcome.json").exists()


def test_a_launch_that_is_claimed_while_a_job_looks_gets_no_ending(make, monkeypatch):
    directory, _ = make(detached=True)
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    monkeypatch.setattr(slurm, "jobs", lambda token: [])
    job = chain.ChainJob(directory)
    other = Manifest(1, 0, 1, 1, 0, 64, ("x",), {}, "/", 0.0, SEVEN)
    looked = job._not_ours

    def meanwhile():
        reason = looked()
        if job._directory._lock is not None:  # the last look
            create_once(directory.launch(1) / "manifest.json", other)
        return reason

    monkeypatch.setattr(job, "_not_ours", meanwhile)
    assert job.run_job() == 0
    assert directory.numbers() == [1] and directory.ending(1) is None


def test_a_job_and_its_successor_ask_for_the_same_nodes(make, monkeypatch):
    directory, plan = make(detached=True, elastic=True)
    monkeypatch.setattr(chain, "affordable", lambda *given: 1)
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(
        slurm,
        "submit_patiently",
        lambda script, comment, *options, **more: asked.append((*options, more["after"])) or "9",
    )
    chain.submit_with_successor(directory, plan, SlurmRun.load(directory), plan.launches[2])
    assert [options[0] for options in asked] == ["--nodes=1", "--nodes=1"]
    assert [after for *_, after in asked] == ["", "afternotok:9"]

    def full(*given, **more):
        if more["seconds"] < slurm.PATIENCE:  # the successor: a launch starts without it, too
            raise OSError(28, "No space left on device")
        return "10"

    monkeypatch.setattr(slurm, "submit_patiently", full)
    assert chain.submit_with_successor(directory, plan, SlurmRun.load(directory), plan.launches[2]) == "10"


@pytest.mark.parametrize("waits", [True, False])
def test_a_job_that_cannot_write_leaves_the_launch_to_its_successor_or_ends_the_chain(make, monkeypatch, waits):
    directory, _ = make(detached=True)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    successor = slurm.Queued("9", "PENDING", 1, "", "Dependency", "afternotok:7(unfulfilled)")
    monkeypatch.setattr(slurm, "jobs", lambda token: [successor] if waits else [])
    monkeypatch.setattr(chain, "submit", lambda *given, **more: "10")

    def full(number) -> None:
        raise OSError(28, "No space left on device")

    job = chain.ChainJob(directory)
    monkeypatch.setattr(job._directory, "fence", full)
    outcome = directory.path / "outcome.json"
    outcome.write_text('{"state": "failed"}')  # of an earlier job
    assert job.run_job() == 4
    assert not outcome.exists() if waits else "No space left" in outcome.read_text()


def test_a_transient_read_error_decides_nothing(make, monkeypatch):
    directory, _ = make(detached=True)
    known, path = SlurmRun.load(directory), SlurmRun.path(directory)
    text = path.read_text()
    path.write_text("")
    later = threading.Timer(0.5, path.write_text, (text,))
    later.start()
    assert SlurmRun.load(directory) == known
    later.join()
    path.write_text("")
    monkeypatch.setattr(slurm_site, "READ_SECONDS", 0.0)
    with pytest.raises(EnvironmentFault, match=r"slurm.json cannot be read"):
        SlurmRun.load(directory)
    start = slurm_job.Start(directory, 3)
    assert start._not_ours() is None  # launch.json cannot be read: no newer launch is known
    directory.fence(4)
    assert "launch 4 may" in (start._not_ours() or "")


def test_a_launch_that_cannot_start_says_so(make, monkeypatch, signals):
    directory, plan = make()
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    job = work(directory, plan).job(plan.launches[0], 1, 0)
    slurm_engine.write_job(replace(job, working_directory=Path("/nowhere")))
    directory.fence(1)
    assert slurm_job.Start(directory, 1).run() == 1
    record = json.loads((directory.launch(1) / "job.json").read_text())
    assert record["state"] == "ended" and "cannot start" in record["detail"] and "/nowhere" in record["detail"]


def test_a_job_that_starts_after_a_stop_runs_nothing(make, monkeypatch, signals):
    directory, plan = make()
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    slurm_engine.write_job(work(directory, plan).job(plan.launches[0], 1, 0))
    directory.fence(1)
    write_json(directory.path / "stop.json", {"now": False})
    assert slurm_job.Start(directory, 1).run() == 0
    record = json.loads((directory.launch(1) / "job.json").read_text())
    assert (record["state"], record["detail"]) == ("ended", "asked to stop before it started")
    assert not (directory.launch(1) / "ranks").exists()


def test_successors_are_cancelled_before_the_jobs_whose_end_would_start_them(make, monkeypatch):
    directory, _ = make(detached=True)
    queue = [
        slurm.Queued("7", "PENDING", 1, "", ""),
        slurm.Queued("8", "PENDING", 1, "", "", "afternotok:7(unfulfilled)"),
    ]
    monkeypatch.setattr(slurm, "jobs", lambda token: queue)
    monkeypatch.setattr(slurm, "cancel", lambda job, *options: None)
    assert slurm_engine.cancel_all(directory, "token") == ["8", "7"]


@pytest.mark.parametrize("signalled", [True, False])
def test_a_command_that_slurm_has_signalled_is_not_signalled_again(tmp_path, signalled):
    """Slurm sends SIGTERM to all processes of a job, except with proctrack/cgroup; many take a second one as "stop now"."""
    received = tmp_path / "received"
    script = f"trap 'echo x >> {received}' TERM; echo ready > {tmp_path}/ready; while :; do sleep 0.05; done"
    job = Job("launch 1", tmp_path / "launch", 1, 1, ("sh", "-c", script), True, {}, tmp_path, "SIGTERM", 5.0)
    engine = slurm_step.StepEngine(Site())
    handle = engine.start(job)
    try:
        wait_for((tmp_path / "ready").exists)
        pids = wait_for(lambda: find_object(job.directory / "ranks" / "0.json"))  # its parent writes it a little later
        if signalled:
            for pid in (pids["parent"], pids["pid"]):
                os.kill(pid, signal.SIGTERM)
            wait_for((job.directory / "ranks" / "0.told.json").exists)
        for _ in range(15):
            engine.signal(handle, "checkpoint")
            time.sleep(0.1)
        wait_for(received.exists)
        assert received.read_text() == "x\n"
    finally:
        engine.signal(handle, "kill")
        wait_for(lambda: engine.poll(handle).state == "ended")


def test_a_job_that_slurm_holds_is_not_the_next_job(make, monkeypatch):
    directory, plan = make(detached=True)
    job, token = chain.ChainJob(directory), SlurmRun.load(directory).token
    submitted: list[str] = []
    monkeypatch.setattr(slurm, "submit_patiently", lambda script, comment, *o, **m: submitted.append(comment) or "9")
    pair = [slurm.comment(token, role, 0) for role in ("chain", "successor")]
    queue = [slurm.Queued("8", "PENDING", 1, slurm.comment(token, "chain", 0), "launch failed requeued held")]
    monkeypatch.setattr(slurm, "jobs", lambda token: queue)
    job._submit_next(plan.launches[0])
    assert submitted == pair
    shown, _ = slurm_run.seen(directory, plan, status(directory, plan))
    assert shown.state == "running" and "Slurm holds job 8 (launch failed requeued held)" in (shown.reason or "")
    queue.append(replace(queue[0], job="9", reason="Priority"))  # its replacement
    shown, _ = slurm_run.seen(directory, plan, status(directory, plan))
    assert shown.state == "running" and "holds" not in (shown.reason or "")
    del queue[0]
    job._submit_next(plan.launches[0])
    assert submitted == pair


def test_a_successor_is_the_next_job_once_the_job_before_it_has_failed(make, monkeypatch):
    directory, plan = make(detached=True)
    job, token = chain.ChainJob(directory), SlurmRun.load(directory).token
    submitted: list[str] = []
    monkeypatch.setattr(slurm, "submit_patiently", lambda script, comment, *o, **m: submitted.append(comment) or "9")
    successor = slurm.Queued(
        "8", "PENDING", 1, slurm.comment(token, "successor", 0), "Dependency", "afternotok:7(unfulfilled)"
    )
    queue = [replace(successor, reason="Priority", dependency="(null)")]
    monkeypatch.setattr(slurm, "jobs", lambda token: queue)
    job._submit_next(plan.launches[0])
    assert submitted == []  # the successor will look which launch is next
    assert slurm_run.rows(directory, plan)[0].job == "8"
    queue[0] = successor
    job._submit_next(plan.launches[0])
    assert len(submitted) == 2


def test_a_job_that_waits_for_the_lock_stops_when_asked_and_the_chain_continues(make, monkeypatch):
    directory, _ = make(detached=True)
    monkeypatch.setattr(files, "LOCK_PATIENCE", 0.0)
    monkeypatch.setattr(slurm, "jobs", lambda token: [])
    submitted: list[str] = []
    monkeypatch.setattr(slurm, "submit_patiently", lambda script, comment, *o, **m: submitted.append(comment) or "9")
    held = RunDirectory(directory.path)
    held.lock()
    try:
        job = chain.ChainJob(directory)
        job._interrupts.stop_requests, job._interrupts.name = 1, "SIGUSR1"
        assert "asked to stop by SIGUSR1" in (job._locked() or "")
        assert [slurm.role_of(comment) for comment in submitted] == [("chain", 0), ("successor", 0)]
        SlurmRun.load(directory).save(directory)
        replace(SlurmRun.load(directory), detached=False).save(directory)
        assert job._locked() == "this run has a supervisor on a login node now"  # since the job started
    finally:
        held.unlock()


def test_a_duplicate_that_is_cancelled_while_the_run_completes_submits_nothing(make, monkeypatch, signals, capsys):
    """The other job has trained the last sample, and still holds the lock."""
    directory, plan = make(detached=True)
    monkeypatch.setattr(files, "LOCK_PATIENCE", 0.0)
    monkeypatch.setattr(slurm, "jobs", lambda token: [])
    monkeypatch.setattr(slurm, "submit_patiently", lambda *given, **more: pytest.fail("nothing is left to run"))
    held = RunDirectory(directory.path)
    held.lock()
    try:
        job = chain.ChainJob(directory)
        monkeypatch.setattr(job._work, "position", lambda **given: plan.total_samples)
        job._interrupts.stop_requests, job._interrupts.name = 1, "SIGTERM"
        assert job.run_job() == 0
    finally:
        held.unlock()
    assert "nothing to do: asked to stop by SIGTERM" in capsys.readouterr().out


def test_a_failure_under_srun_names_srun(tmp_path, monkeypatch, signals):
    """A stand-in for srun cannot create the step."""
    (tmp_path / "task.py").write_text("def task(): ...\n")
    srun = tmp_path / "bin" / "srun"
    srun.parent.mkdir()
    srun.write_text("#!/bin/sh\necho srun: error: Unable to create step >&2\nexit 1\n")
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", str(srun.parent), prepend=os.pathsep)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(slurm, "jobs", lambda token: [])
    request = BatchRequest(global_batch_size=64, micro_batch_size=4, nodes=2, devices_per_node=4)
    options = Options(engine="slurm", max_retries=0)
    plan, _ = build(request, read_ramp({"samples": "640"}), options, target=str(tmp_path / "task.py"))
    directory = RunDirectory(tmp_path / "run")
    write_json(directory.path / "plan.json", plan)
    slurm_site.remember(directory, Site(nodes_submit=False), detached=True)
    assert chain.ChainJob(directory).run_job() == 5
    failure = find_object(directory.path / "outcome.json")["failure"]
    assert failure["reason"] == "srun exited with 1, and its ranks with it"
    assert failure["lines"] == ["srun: error: Unable to create step"]


def test_stop_and_status_say_that_the_controller_does_not_answer(make, monkeypatch):
    directory, plan = make(detached=True)
    monkeypatch.setattr(slurm, "jobs", no_answer)
    with pytest.raises(EnvironmentFault, match="stops by itself"):
        slurm_run.stop(directory, plan, False)
    assert (directory.path / "stop.json").exists()
    now, _ = slurm_run.seen(directory, plan, status(directory, plan))
    assert now.reason is not None and "not known" in now.reason and "--resume" not in now.reason


def test_a_job_whose_ranks_have_ended_is_not_killed(make, monkeypatch):
    directory, _ = make()
    folder, sent = directory.launch(1), list[tuple[str, ...]]()
    handle = {"job": "7", "directory": str(folder), "comment": ""}
    monkeypatch.setattr(slurm, "job", lambda job, prefix="": slurm.Queued(job, "RUNNING", 1, "", ""))
    monkeypatch.setattr(slurm, "cancel", lambda *given: sent.append(given))
    write_json(folder / "job.json", {"job": "7", "state": "running"})
    write_json(folder / "ranks" / "0.json", {"pid": 1})
    write_json(folder / "ranks" / "0.exit.json", {"code": 0, "time": 1.0})
    engine = slurm_engine.SlurmEngine()
    engine.signal(handle, "kill")
    assert sent == []  # it ends by itself, as COMPLETED
    monkeypatch.setattr(slurm_step, "LEAVING_SECONDS", 0.0)
    engine.signal(handle, "kill")
    assert [job for job, *_ in sent] == ["7", "7"]


def test_the_rendezvous_port_is_below_those_of_connections():
    first_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert all(20_000 <= free_port() < first_given for _ in range(20))


def test_a_successor_waits_from_the_end_of_its_job_and_a_silent_job_lived_until_its_last_heartbeat(make, monkeypatch):
    directory, plan = make(detached=True)
    monkeypatch.setattr(slurm, "jobs", lambda token: [])
    start = time.time() - 10_000
    for number, job, started, ended, found in ((1, "1", 0, None, 5000), (2, "2", 4000, 4600, 4600)):
        handle = {"engine": "slurm", "job": job, "directory": "d"}
        manifest = Manifest(number, 0, 2, 2, 0, 64, ("x",), {}, "/", start + started, handle)
        write_json(directory.launch(number) / "manifest.json", manifest)
        write_json(directory.launch(number) / "ending.json", Ending(number, "failed", 0, start + found))
        record = {"job": job, "state": "ended" if ended else "running", "nodes": 2, "started": start + started}
        write_json(directory.launch(number) / "job.json", record | {"ended": ended and start + ended})
    os.utime(directory.launch(1) / "job.json", (start + 3595, start + 3595))  # its last heartbeat
    # The successor was submitted together with the first job; the events say when.
    lines = [json.dumps({"kind": "submitted", "job": job, "time": start - 60}) for job in ("1", "2")]
    (directory.path / "events").mkdir()
    (directory.path / "events" / "supervisor.jsonl").write_text("\n".join(lines) + "\n")
    first, second, *_ = slurm_run.rows(directory, plan)
    assert first.waited_seconds == pytest.approx(60) and first.node_hours == pytest.approx(2.0)
    assert second.waited_seconds == pytest.approx(400) and second.node_hours == pytest.approx(2 * 600 / 3600)


def test_a_job_whose_submission_got_no_answer_is_found_by_its_dependency(tmp_path, monkeypatch):
    """Successors of one launch have the same comment."""
    first = slurm.Queued("8", "PENDING", 1, "c", "Dependency", "afterany:7(unfulfilled)")
    queue, answers = [first], [slurm.Unreachable(), "9"]

    def submit(script, *options):
        assert "--dependency=afterany:8" in options
        if isinstance(answer := answers.pop(0), Exception):
            raise answer
        return answer

    monkeypatch.setattr(slurm, "submit", submit)
    monkeypatch.setattr(slurm, "_listed", lambda: queue)
    given = {"after": "afterany:8", "pause": lambda seconds, reason: True}
    assert slurm.submit_patiently(tmp_path / "x", "c", **given) == "9"  # not job 8, which it waits for
    queue.append(replace(first, job="9", dependency="afterany:8(unfulfilled)"))
    answers.append(slurm.Unreachable())
    assert slurm.submit_patiently(tmp_path / "x", "c", **given) == "9"  # the controller took it


def test_an_interactive_job_s_own_nodes_are_not_free(make, monkeypatch, tmp_path):
    _, plan = make()
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "4")
    asked: list[tuple[str, ...]] = []

    def starts_at(script, *options):
        asked.append(options)
        return time.time(), ""

    monkeypatch.setattr(slurm, "starts_at", starts_at)
    site = slurm_run.read_site({"elastic": True})
    assert affordable(plan, plan.launches[2], site, tmp_path / "x") == 4 and asked == [("--nodes=4",)]
    asked.clear()
    assert affordable(plan, plan.launches[2], site, tmp_path / "x", (2, "n[1-2]")) == 4
    assert asked == [("--nodes=2", "--exclude=n[1-2]")]


def test_a_job_inherits_nothing_of_the_job_that_submits_it():
    given = {
        "SLURM_JOB_ID": "1",
        "SBATCH_CLUSTERS": "x",
        "BATCHWRIGHT_PROLOGUE_FAILED": "1 7",
        "SLURM_CONF": "c",
        "A": "b",
    }
    assert slurm.environment(given) == {"SLURM_CONF": "c", "A": "b"}


def test_accounts_are_used_if_there_are_any(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert slurm.accounted("7") is None  # no sacct
    sacct = tmp_path / "sacct"
    sacct.write_text("#!/bin/sh\necho 'CANCELLED by 1000'\n")
    sacct.chmod(0o755)
    assert slurm.accounted("7") == "CANCELLED"
    sacct.write_text("#!/bin/sh\necho 'Slurm accounting storage is disabled' >&2; exit 1\n")
    assert slurm.accounted("7") is None


def test_a_run_that_waits_for_a_controller_can_be_stopped(make, tmp_path, monkeypatch):
    for name in ("sbatch", "squeue", "scancel"):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text("#!/bin/sh\necho 'Unable to contact slurm controller (connect failure)' >&2; exit 1\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    directory, plan = make()
    output = io.StringIO()

    def stop() -> None:
        wait_for(lambda: "does not answer" in output.getvalue())
        write_json(directory.path / "stop.json", {"now": False})

    person = threading.Thread(target=stop)
    person.start()
    try:
        assert slurm_engine.SlurmSupervisor(directory, plan, LineDisplay(output)).run() == "stopped"
    finally:
        person.join()
    assert output.getvalue().count("does not answer") == 1
    ending = directory.ending(1)
    assert ending is not None and ending.outcome == "stopped"
