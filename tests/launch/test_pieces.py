"""The pieces of a run without processes: time left, reasons, advice, settings, files."""

from __future__ import annotations

import errno
import fcntl
import io
import json
import math
import os
import signal
import subprocess
import sys
import time
import tracemalloc
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from batchwright.cli import main
from batchwright.core import codec
from batchwright.core.batch.request import BatchRequest
from batchwright.core.errors import ConfigError, EnvironmentFault
from batchwright.core.ramp.request import read_ramp
from batchwright.launch import directory as files
from batchwright.launch import interrupts
from batchwright.launch.directory import RunDirectory, write_json
from batchwright.launch.engine import Poll, RankLog
from batchwright.launch.failure import explain, hopeless, memory_advice, stopped, stuck
from batchwright.launch.plan import begin, build
from batchwright.launch.records import Ending, Failure, LaunchProgress, Manifest, Options, RunPlan
from batchwright.launch.resume import refit
from batchwright.launch.settings import read_options
from batchwright.launch.show import BarDisplay, LineDisplay, Speeds, describe, remaining_seconds
from batchwright.launch.work import LoopFollower, TaskWork, read_position
from batchwright.rundir.fence import Fence
from batchwright.rundir.files import digest_of

TRACE = """step 3
Fatal Python error: Aborted

Thread 0x00007f (most recent call first):
  File "/lib/python3.11/threading.py", line 331 in wait

Current thread 0x00007e (most recent call first):
  File "{file}", line 28 in {name}
  File "/src/batchwright/runtime/loop.py", line 110 in _train
"""


@pytest.fixture
def plan() -> RunPlan:
    request = BatchRequest(nodes=4, devices_per_node=1, max_micro_batch_size=8)
    wanted = read_ramp({"thresholds": "0:8 64:16 192:32", "samples": "512", "node_policy": "constant-work"})
    return build(request, wanted, Options(), command=["train", "{global_batch_size}"])[0]


def manifest_of(plan: RunPlan, number: int = 1, launch: int = 0) -> Manifest:
    one = plan.launches[launch]
    return Manifest(
        number, launch, one.nodes, one.nodes, one.start_sample, one.end_sample or 0, ("x",), {}, "/", 1000.0
    )


@dataclass(frozen=True)
class Logged(RankLog):
    """A rank whose log is a text and not a file."""

    tail: str = ""


def rank_log(
    rank: int, *, code: int | None = None, state: str | None = None, ended: float = 0.0, tail: str = ""
) -> RankLog:
    return Logged(rank, 100 + rank, state, code, ended, Path(f"rank-{rank}.log"), tail)


def test_the_time_left_follows_the_ramp(plan):
    assert remaining_seconds(plan, 0, {}) is None
    # Stage 1 at 8 samples/s on one rank: 8 s. The rest is as fast per rank: 128/16 + 320/32 = 18 s. Two boundaries.
    assert remaining_seconds(plan, 0, {0: 8.0}, boundary_seconds=5.0) == pytest.approx(8 + 8 + 10 + 2 * 5)
    assert remaining_seconds(plan, 128, {0: 8.0, 1: 32.0}, boundary_seconds=5.0) == pytest.approx(2 + 5 + 320 / 64)
    assert remaining_seconds(plan, 512, {0: 8.0}) == 0


def test_speed_is_counted_within_a_stage_and_a_launch():
    speeds = Speeds()
    speeds.seen(0, 10, 100.0)
    speeds.seen(0, 30, 102.0)
    assert speeds.by_stage == {0: 10.0}
    speeds.restart()
    speeds.seen(0, 40, 150.0)
    assert speeds.by_stage == {0: 10.0}
    speeds.seen(1, 50, 151.0, reported=100.0)
    assert speeds.by_stage[1] == 100.0


def test_the_rank_that_failed_first_is_the_reason():
    ranks = (
        rank_log(0, code=1, ended=5.1, tail="Traceback\nRuntimeError: Connection closed by peer"),
        rank_log(1, code=-9, ended=5.2, tail="step 7\n"),
        rank_log(2, code=-15, ended=5.3),
    )
    failure = explain(Poll("ended", 1), ranks, "")
    assert failure.reason == "rank 1 was killed by SIGKILL" and failure.lines == ("step 7",)
    failure = explain(Poll("ended", -9), (), "the launcher's last line")
    assert failure.reason == "torchrun was killed by SIGKILL, and its ranks with it"
    assert failure.lines == ("the launcher's last line",)


def test_a_rank_out_of_memory_is_the_reason_even_if_another_failed_first():
    ranks = (
        rank_log(0, code=-6, ended=5.0, tail="RuntimeError: Connection closed by peer"),
        rank_log(1, code=1, ended=5.2, tail="torch.OutOfMemoryError: CUDA out of memory."),
    )
    failure = explain(Poll("ended", 1), ranks, "")
    assert (failure.kind, failure.rank) == ("oom", 1)
    assert failure.reason == "rank 1 exited with 1: torch.OutOfMemoryError: CUDA out of memory."


def test_a_retry_is_hopeless_after_the_same_refusal_or_memory_error():
    crash, oom, refused = (Failure("why", kind=kind) for kind in ("crash", "oom", "refused"))
    assert hopeless(oom, oom) and hopeless(refused, refused) and hopeless(Failure("why", kind="overshot"), None)
    assert not hopeless(crash, crash) and not hopeless(oom, None)
    assert not hopeless(oom, crash) and not hopeless(refused, oom)


def test_the_stuck_rank_is_the_one_outside_a_collective():
    waiting = TRACE.format(file="/venv/torch/distributed/distributed_c10d.py", name="all_reduce")
    busy = TRACE.format(file="/home/me/train.py", name="loss")
    after = (rank_log(0, tail=waiting), rank_log(1, tail=busy), rank_log(2, tail=waiting))
    failure = stuck(after, "no progress for 600 s")
    assert failure.rank == 1 and failure.kind == "stalled"
    assert "rank 1 is stuck at /home/me/train.py:28 in loss; 2 others wait for it" in failure.reason
    failure = stuck((rank_log(0, tail=waiting), rank_log(1)), "no progress for 600 s")
    assert failure.rank is None and failure.lines[1] == "rank 1: no stack"
    failure = stuck([rank_log(rank, tail=waiting) for rank in range(8192)], "no progress for 600 s")
    assert len(failure.lines) == 13 and failure.lines[-1] == "and 8,180 more ranks: their stacks are in their logs"
    failure = stopped((rank_log(0, state="S"), rank_log(1, state="T", tail="a\nb\nc\nd\ne\n")), "no progress for 600 s")
    assert failure is not None and "rank 1 (process 101) is stopped" in failure.reason
    assert failure.lines == ("b", "c", "d", "e")
    assert stopped(after, "no progress for 600 s") is None


def test_advice_keeps_the_global_batch(plan):
    text = memory_advice(plan, plan.stages[1], "'a run'")
    assert "micro_batch_size 8 × accumulation_steps 1 × data_parallel_size 2 does not fit in memory" in text
    assert "4 × 2 × 2 or 2 × 4 × 2" in text and "--resume 'a run' --max-micro-batch-size 4" in text
    least = replace(plan.stages[1], micro_batch_size=1, accumulation_steps=8)
    assert "the smallest valid micro batch" in memory_advice(plan, least, "r")


def test_a_smaller_micro_batch_changes_only_the_split(plan):
    smaller = refit(plan, 3)
    for before, after in zip(plan.stages, smaller.stages, strict=True):
        assert after.micro_batch_size <= 3
        assert after.micro_batch_size * after.accumulation_steps * after.data_parallel_size == before.global_batch_size
    assert smaller.schedule == plan.schedule and smaller.launches == plan.launches


def test_plans_and_records_are_read_as_they_were_written(plan, tmp_path):
    directory = RunDirectory(tmp_path / "r")
    write_json(directory.path / "plan.json", plan)
    assert directory.plan() == plan
    handle = {"engine": "local", "pid": 3, "boot": "b", "directory": "d", "stop_signal": "SIGTERM"}
    manifest = replace(manifest_of(plan), handle=handle)
    write_json(directory.launch(1) / "manifest.json", manifest)
    ending = Ending(1, "failed", 8, 2.0, 1, Failure("why", 0, 1, ("last",), "oom", "less"))
    write_json(directory.launch(1) / "ending.json", ending)
    assert (directory.manifest(1), directory.ending(1), directory.numbers()) == (manifest, ending, [1])
    (directory.launch(1) / "ending.json").write_text("{half")
    assert directory.ending(1) is None


def test_a_plan_may_hold_infinite_numbers_and_names_that_are_not_utf_8(plan, tmp_path):
    directory = RunDirectory(tmp_path / "r")
    made = replace(plan, arguments={"clip": math.inf}, command=("train", os.fsdecode(b"caf\xe9")))
    write_json(directory.path / "plan.json", made)
    assert directory.plan() == made
    directory.event("launch", command=made.command)
    assert directory.events()[0]["command"] == list(made.command)


def test_the_lock_has_one_holder_and_status_does_not_disturb_it(tmp_path):
    first, second = RunDirectory(tmp_path), RunDirectory(tmp_path)
    assert second.supervisor() is None
    first.lock()
    assert second.supervisor() == os.getpid()
    with pytest.raises(EnvironmentFault, match=f"another supervisor \\(process {os.getpid()} on "):
        second.lock()
    first.unlock()
    with open(tmp_path / "lock") as looking:  # as --status does for a moment
        fcntl.flock(looking, fcntl.LOCK_SH)
        fcntl.flock(looking, fcntl.LOCK_UN)
        second.lock()
    second.unlock()


def test_a_late_launch_does_not_take_the_run_from_a_later_one(plan, tmp_path):
    directory = RunDirectory(tmp_path)
    assert directory.next_number() == 1
    write_json(directory.launch(2) / "manifest.json", manifest_of(plan, 2))
    assert directory.next_number() == 3
    directory.fence(2)
    directory.fence(2)
    directory.fence(4)  # for example of a loop that ran here without a supervisor
    with pytest.raises(EnvironmentFault, match="launch=3 is too late: launch 4 has taken over"):
        directory.fence(3)
    assert Fence.current(tmp_path) == 4 and directory.next_number() == 5


def test_a_run_works_on_a_file_system_without_locks(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    directory = RunDirectory(tmp_path)
    directory.lock()
    assert RunDirectory(tmp_path).supervisor() == os.getpid()  # from the file, while that process runs
    directory.unlock()
    assert RunDirectory(tmp_path).supervisor() is None


RANK = r"""
import os, signal, time
received = []
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda n, frame: (received.append(n), os.write(1, signal.Signals(n).name.encode() + b"\n")))
os.write(1, b"ready\n")  # one call: `print` may be interrupted by the signal, and cannot be entered again
while len(set(received)) < 2:
    time.sleep(0.01)
"""


def test_a_signal_to_a_ranks_parent_alone_reaches_the_rank(tmp_path):
    """As Slurm sends it with proctrack/cgroup."""
    log = tmp_path / "logs" / "rank-0.log"
    parent = subprocess.Popen(
        [sys.executable, "-P", "-m", "batchwright.launch.rank", tmp_path, "SLURM_PROCID", sys.executable, "-c", RANK]
    )
    until = time.monotonic() + 60
    for word, number in (("ready", signal.SIGUSR1), ("SIGUSR1", signal.SIGTERM)):
        while not log.exists() or word not in log.read_text():
            assert time.monotonic() < until, f"no {word} in the log"
            time.sleep(0.02)
        parent.send_signal(number)
    assert parent.wait(60) == 0
    assert log.read_text().split() == ["ready", "SIGUSR1", "SIGTERM"]


def test_only_the_holder_of_the_lock_writes_a_plan(plan, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "LOCK_PATIENCE", 0.0)
    first, second = RunDirectory(tmp_path), RunDirectory(tmp_path)
    first.lock()  # about to write
    with pytest.raises(EnvironmentFault, match="another supervisor"):
        begin(second, plan)
    assert not second.exists
    begin(first, plan)
    first.lock()  # as a supervisor does: it already holds it
    with pytest.raises(ConfigError, match="already holds a run"):
        begin(second, plan)
    first.unlock()
    second.lock()
    second.unlock()


def test_without_file_locks_a_supervisor_on_this_host_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_try_lock", lambda descriptor, how: None)  # Lustre without -o flock
    monkeypatch.setattr(files, "LOCK_PATIENCE", 0.0)
    first, second = RunDirectory(tmp_path), RunDirectory(tmp_path)
    code = "import sys, time; from batchwright.launch import directory as files; files._try_lock = lambda *_: None\n"
    code += f"files.RunDirectory({str(tmp_path)!r}).lock(); print('held', flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        assert first.supervisor() == other.pid
        with pytest.raises(EnvironmentFault, match=rf"another supervisor \(process {other.pid} on "):
            second.lock()
        other.kill()
    second.lock()  # it is gone
    second.unlock()
    host = files.socket.gethostname()
    (tmp_path / "lock").write_text(f"{os.getppid()} {host} 1\n")  # the number of another process now
    assert first.supervisor() is None
    first.lock()
    first.unlock()


def test_a_stop_request_is_for_the_current_holder_of_the_lock(tmp_path):
    directory = RunDirectory(tmp_path)
    stop = tmp_path / "stop.json"
    stop.touch()
    directory.lock(fresh=True)
    assert not stop.exists()  # it was for the holder before
    stop.touch()
    directory.lock(fresh=True)  # as a supervisor does at its start: it already holds the lock
    assert stop.exists()
    directory.unlock()


def test_nohup_outlives_its_terminal():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with interrupts.Interrupts() as interrupted:
            os.kill(os.getpid(), signal.SIGHUP)
            assert interrupted.stop_requests == 0
            os.kill(os.getpid(), signal.SIGTERM)
            assert interrupted.stop_requests == 1
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_only_a_later_ctrl_c_is_a_second_request(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(interrupts.time, "monotonic", lambda: now[0])
    with interrupts.Interrupts() as interrupted:
        for number, at, expected in (
            (signal.SIGHUP, 0.0, 1),
            (signal.SIGINT, 0.5, 1),
            (signal.SIGTERM, 5.0, 1),
            (signal.SIGINT, 6.0, 2),
        ):
            now[0] = 100.0 + at
            signal.raise_signal(number)
            assert interrupted.stop_requests == expected


def test_waits_between_retries_grow_up_to_a_limit():
    assert [Options().retry_after(n) for n in (1, 2, 3, 10, 10_000)] == [5, 10, 20, 300, 300]


def test_one_error_lists_everything_that_is_wrong_with_settings():
    with pytest.raises(ConfigError) as caught:
        read_options({"threads": "none", "keep": 0, "strategy": "zero", "nope": 1})
    assert [v.field for v in caught.value.violations] == ["threads", "keep", "strategy", "launch.nope"]
    assert read_options({"environment": ["A=1"]}, Options(environment={"B": "2"})).environment == {"B": "2", "A": "1"}
    assert read_options({"stop_signal": "usr1"}).stop_signal == "SIGUSR1"


def checkpoint(folder: Path, step: int, launch: int, at: int) -> Path:
    path = folder / "checkpoints" / f"step-{step:012d}-launch-{launch:05d}"
    path.mkdir(parents=True)
    (path / "state.json").write_text(json.dumps({"position": at}))
    (path / "w").write_text("weights")
    digests = {"state.json": digest_of(path / "state.json"), "w": "9a17a1ff1d9d9fa4d9c6f7f1b2f2d1f9"}
    facts = {name: {"size": (path / name).stat().st_size, "sha256": digest} for name, digest in digests.items()}
    (path / "manifest.json").write_text(json.dumps({"schema": 1, "files": facts}))
    return path


def test_the_position_is_that_of_the_newest_complete_checkpoint(plan, tmp_path):
    task = TaskWork(RunDirectory(tmp_path), plan)
    assert task.position() == 0
    checkpoint(tmp_path, 4, 1, 64)
    newer = checkpoint(tmp_path, 3, 2, 48)  # a later launch continued from before step 4: its lineage counts
    assert task.position() == 48
    assert task.position(verify=True) == 0  # none has the right hash
    (newer / "w").write_text("weig")
    assert task.position() == 64


@pytest.mark.parametrize(
    "written, position",
    [
        ("2M\n", 2_000_000),
        ('{"consumed_samples": 64}', 64),
        ("caf\xe9", None),
        ("[" * 100_000, None),
        ('{"consumed_samples": ' + "[" * 400 + "]" * 400 + "}", None),
    ],
)
def test_a_command_may_write_anything_to_its_status_file(tmp_path, written, position):
    (tmp_path / "status.json").write_bytes(written.encode("latin-1"))
    assert read_position(tmp_path / "status.json") == position


def test_events_are_read_on_from_the_last_call(plan, tmp_path):
    directory = RunDirectory(tmp_path)
    follower = LoopFollower(directory, manifest_of(plan))
    assert follower.read() == LaunchProgress(0)
    path = tmp_path / "events" / "launch-00001.jsonl"
    path.parent.mkdir()
    lines = [
        {"kind": "launch", "time": 10.0, "samples": 0, "load_seconds": 0.5},
        {"kind": "step", "time": 11.0, "samples": 8, "loss": 2.0, "samples_per_second": 8.0},
        {"kind": "step", "time": 12.0, "samples": 16, "loss": "nan", "samples_per_second": 8.0},
        {"kind": "save", "time": 13.0, "samples": 16},
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    path.write_text(text[:-9])  # the last line is being written
    seen = follower.read()
    assert (seen.position, seen.first_step, seen.last_step, seen.loss, seen.saved) == (16, 11.0, 12.0, None, None)
    path.write_text(text)
    seen = follower.read()
    assert (seen.saved, seen.saved_position, seen.load_seconds) == (13.0, 16, 0.5)


def test_the_position_of_a_long_launch_is_in_its_last_events(plan, tmp_path):
    task, manifest = TaskWork(RunDirectory(tmp_path), plan), manifest_of(plan, launch=1)
    assert task.reached(manifest) == manifest.start_sample
    path = tmp_path / "events" / "launch-00001.jsonl"
    path.parent.mkdir()
    line = json.dumps({"kind": "step", "time": 1.0, "samples": 8, "loss": 2.0}) + "\n"
    last = json.dumps({"kind": "step", "time": 2.0, "samples": 96, "loss": 2.0}) + "\n"
    save = json.dumps({"kind": "save", "time": 2.0, "samples": 64}) + "\n"
    path.write_text(line * 500_000 + last + save + "[1]\n" + '{"kind": "step"}\n' + line[:-9])
    tracemalloc.start()
    try:
        assert task.reached(manifest) == 96
        assert tracemalloc.get_traced_memory()[1] < 2 << 20 < path.stat().st_size
    finally:
        tracemalloc.stop()


def test_lines_and_bar_show_the_same(plan):
    manifest = manifest_of(plan, 2, 1)
    progress = LaunchProgress(96, samples_per_second=100.0, loss=1.25)
    text = describe(plan, manifest, progress, 30.0)
    assert text == "stage 2/3 · batch 16 · 2 ranks · 100 samples/s · loss 1.2500 · 30 s left"
    failed = Ending(2, "failed", 80, 1010.0, 1, Failure("rank 0 exited with 1: ValueError: [x]", 0, 1, ("[last]",)))
    for kind in (LineDisplay, BarDisplay):
        stream = io.StringIO()
        shown = kind(stream)
        shown.launched(plan, manifest)
        shown.progress(plan, manifest, progress, 30.0)
        shown.ended(plan, manifest, failed)
        shown.close()
        assert (
            "launch 2: samples 64 to 192, stage 2/3, batch 16 = 8 micro × 1 accumulation × 2 ranks" in stream.getvalue()
        )
        assert "  rank 0 exited with 1: ValueError: [x]" in stream.getvalue() and "  | [last]" in stream.getvalue()


@pytest.mark.parametrize(
    ("columns", "shown"),
    [
        (120, " 19% stage 2/3 · batch 16 · 2 ranks · 100 samples/s · loss 1.2500 · 30 s left"),
        (80, " 19% stage 2/3 · batch 16 · 100 samples/s · loss 1.2500 · 30 s left"),
        (40, " 19% loss 1.2500 · 30 s left"),
        (20, " 19% loss 1.2500"),
    ],
)
def test_a_narrow_terminal_shows_what_matters_most(plan, monkeypatch, columns, shown):
    monkeypatch.setenv("COLUMNS", str(columns))
    manifest = manifest_of(plan, 2, 1)
    stream = io.StringIO()
    bar = BarDisplay(stream)
    bar.launched(plan, manifest)
    bar.progress(plan, manifest, LaunchProgress(96, samples_per_second=100.0, loss=1.25), 30.0)
    bar.close()
    (line,) = [line.rstrip() for line in stream.getvalue().splitlines() if "loss" in line]
    assert line.endswith(shown) and len(line) <= columns


def test_a_closed_stream_does_not_stop_a_run(plan):
    stream = io.StringIO()
    stream.close()
    LineDisplay(stream).note("nobody reads this")
    assert codec.encode(plan)["kind"] == "command"


def test_a_command_notes_the_site_settings_that_are_for_tasks():
    request = BatchRequest(nodes=2, devices_per_node=1, max_micro_batch_size=8)
    wanted = read_ramp({"thresholds": "0:8 64:16", "samples": "512"})
    options = Options(engine="slurm", slurm={"container": "image.sif", "partition": "gpu"})
    plan, _ = build(request, wanted, options, command=["train", "{end_sample}"])
    assert "A command is started unchanged: launch.slurm.container is for tasks only." in plan.notes


def test_files_are_never_written_through_a_link(tmp_path, monkeypatch):
    """In a directory that others may write to: links at the temporary name, at the lock and at the events."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    run = tmp_path / "run"
    run.mkdir()
    monkeypatch.setattr(os, "urandom", lambda size: bytes(size))  # the name is guessed
    for suffix in (f"{os.getpid()}.part", f"{os.getpid()}.tmp", f"{bytes(8).hex()}.part"):
        (run / f".plan.json.{suffix}").symlink_to(victim)
    with pytest.raises(FileExistsError):
        write_json(run / "plan.json", {"secret": 1})
    (run / "lock").symlink_to(victim)
    with pytest.raises(EnvironmentFault, match="lock cannot be used: it is a symbolic link"):
        RunDirectory(run).lock()
    (run / "events").mkdir()
    (run / "events" / "supervisor.jsonl").symlink_to(victim)
    RunDirectory(run).event("launch", number=1)
    assert victim.read_text() == "precious"


def test_a_ranks_log_is_not_written_through_a_link(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "victim").touch()
    (tmp_path / "logs" / "rank-0.log").symlink_to(tmp_path / "victim")
    rank = [sys.executable, "-P", "-m", "batchwright.launch.rank", str(tmp_path), "0", "echo", "hello"]
    done = subprocess.run(rank, capture_output=True, text=True)
    assert done.returncode and "does not write through links" in done.stderr
    assert (tmp_path / "victim").read_text() == ""


def test_a_full_disk_during_a_resume_is_named(plan, tmp_path, monkeypatch, capfd):
    directory = RunDirectory(tmp_path)
    begin(directory, plan)
    directory.unlock()

    def full(path: Path, document: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr("batchwright.launch.resume.write_json", full)
    with pytest.raises(SystemExit) as ended:
        main(["run", "--resume", str(tmp_path), "--max-retries", "7"])
    error = capfd.readouterr().err
    assert ended.value.code == 4
    assert f"{tmp_path} cannot be written: " in error and "No space left on device" in error
