"""The real loop under torchrun: a ramp over 1, 2 and 4 ranks, and processes that are killed or stopped."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from batchwright.core import codec
from batchwright.core.ramp.rules import parse_thresholds
from batchwright.runtime.state.audit import audit

pytestmark = pytest.mark.torch

RAMP = "0:8 64:16 192:32"


def losses(directory: Path) -> dict[int, float]:
    """The loss of each step; of a repeated step, the last one."""
    found: dict[int, float] = {}
    for path in sorted((directory / "events").glob("launch-*.jsonl")):
        for line in path.read_text().splitlines():
            event = json.loads(line)
            if event["kind"] == "step":
                found[event["step"]] = event["loss"]
    return found


def assert_exact(out: str) -> dict:
    """The output of `--json`: complete, and every sample is in exactly one step."""
    document = json.loads(out)
    assert document["state"] == "complete", document
    ledger = document["ledger"]
    assert (ledger["ok"], ledger["gaps"], ledger["repeats"]) == (True, 0, 0), ledger
    assert ledger["samples"] == document["total_samples"] and ledger["ids_checked"] is False
    found = audit(document["directory"])  # the ids, too
    assert found.ok and found.samples == document["total_samples"], found.findings
    return document


def test_a_ramp_over_1_2_and_4_ranks_trains_what_one_uninterrupted_process_does(run, tmp_path_factory):
    code, out, err = run(*run.task("--json", "--micro-batch-size", "8", ramp=RAMP, samples=512, nodes=4))
    assert code == 0, err
    document = assert_exact(out)
    assert [(s["ranks"], s["start_sample"], s["position"]) for s in document["history"]] == [
        (1, 0, 64),
        (2, 64, 192),
        (4, 192, 512),
    ]
    assert document["ledger"]["discarded_samples"] == 0
    assert len(document["boundaries"]) == 2 and document["lost_seconds"] > 0
    assert [p.name for p in run.directory.parent.iterdir()] == [run.directory.name]

    alone = tmp_path_factory.mktemp("alone")
    spec = json.loads((run.directory / "launches" / "0001" / "spec.json").read_text())
    assert spec["schedule"] == codec.encode(parse_thresholds(RAMP, "samples").compile().until(512))
    spec["settings"] |= {"directory": str(alone / "run"), "launch": 1, "end_sample": None}
    (alone / "spec.json").write_text(json.dumps(spec))
    subprocess.run(
        [sys.executable, "-m", "batchwright.runtime.loop", str(alone / "spec.json")],
        check=True,
        timeout=900,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
    )
    ours, theirs = losses(run.directory), losses(alone / "run")
    assert sorted(ours) == sorted(theirs) == list(range(26))
    assert ours == pytest.approx(theirs, rel=1e-5)


@pytest.mark.rounds
def test_rank_torchrun_and_supervisor_killed_a_rank_stopped_a_checkpoint_cut(run):
    draw = random.Random(os.environ.get("TORTURE_SEED", "7"))
    arguments = run.task(
        "--stall-seconds",
        "6",
        "--start-seconds",
        "120",  # the limit for a save, in which the rank may be stopped
        "--checkpoint-samples",
        "32",
        "--max-retries",
        "6",
        ramp="0:16",
        samples=1280,
        nodes=2,
        args=("slow=0.05",),
    )
    run.start(*arguments)
    seen = 0

    def trains(more: int = 32) -> Path:
        """The next launch, once it has trained `more` samples."""
        nonlocal seen

        def found() -> Path | None:
            """The newest: on a busy machine an earlier one may have counted as stalled."""
            launch = run.newest()
            begun = json.loads((launch / "manifest.json").read_text())["start_sample"]
            return launch if int(launch.name) > seen and run.position() >= begun + more else None

        launch = run.until(found)
        seen = int(launch.name)
        return launch

    def hit(who: Callable[[Path], int], number: signal.Signals) -> None:
        """Signal a process of a launch that trains; of the next launch, if that one has just ended."""
        while True:
            try:
                return os.kill(who(trains()), number)
            except (ProcessLookupError, FileNotFoundError):
                continue

    def torchrun(launch: Path) -> int:
        wrapper = json.loads((launch / "ranks" / "0.json").read_text())["parent"]
        return int(Path(f"/proc/{wrapper}/stat").read_text().rsplit(")", 1)[1].split()[1])

    killed, stopped = draw.randrange(2), draw.randrange(2)
    hit(lambda launch: run.rank_pid(killed, launch), signal.SIGKILL)
    hit(torchrun, signal.SIGKILL)
    hit(lambda launch: run.rank_pid(stopped, launch), signal.SIGSTOP)
    trains(80)  # at least two of its checkpoints are complete: one is damaged below
    supervisor = run.process
    stderr = run.stderr()
    supervisor.kill()
    supervisor.communicate()
    run.assert_nothing_left()
    assert "was killed by SIGKILL" in stderr
    assert "torchrun was killed by SIGKILL, and its ranks with it" in stderr
    assert f"rank {stopped} (process " in stderr and "is stopped" in stderr

    newest = max((run.directory / "checkpoints").glob("step-*"), key=lambda p: p.name.split("-launch-")[::-1])
    damaged = max(newest.glob("tensors/*.distcp"), key=lambda p: p.stat().st_size)
    os.truncate(damaged, damaged.stat().st_size // 2)
    code, out, err = run.resume("--json")
    assert code == 0, err
    document = assert_exact(out)
    assert document["restarts"] >= 4  # a busy machine may look stalled once more
    assert document["ledger"]["discarded_samples"] > 0
    assert [p.name for p in run.directory.parent.iterdir()] == [run.directory.name]


@pytest.mark.rounds
def test_an_interrupt_saves_the_step_in_progress_and_nothing_is_repeated(run):
    process = run.start(
        *run.task("--json", "--checkpoint-samples", "640", ramp="0:16", samples=640, nodes=1, args=("slow=0.2",))
    )
    run.until(lambda: run.position() >= 32)
    process.send_signal(signal.SIGINT)
    code, out, err = run.finish()
    assert code == 130, err
    document = json.loads(out)
    assert "a checkpoint first" in err and document["state"] == "stopped"
    assert 32 <= document["saved_samples"] == document["consumed_samples"] < 640
    code, out, err = run.resume("--json")
    assert code == 0, err
    assert assert_exact(out)["ledger"]["discarded_samples"] == 0


@pytest.mark.rounds
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_full_disk_during_a_save(run):
    disk = run.directory.parent / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(disk)], capture_output=True, check=False
    )
    if mounted.returncode:
        missing = pytest.fail if os.environ.get("CI") == "true" else pytest.skip
        missing(f"no tmpfs here: {mounted.stderr.decode()[:80]}")
    try:
        run.directory = disk / "run"
        arguments = run.task(
            "--json",
            "--checkpoint-samples",
            "32",
            "--max-retries",
            "8",
            ramp="0:16",
            samples=640,
            nodes=1,
            args=("slow=0.1", "width=256"),
        )
        run.start(*arguments)
        run.until(lambda: run.position() >= 32 and any((run.directory / "checkpoints").glob("step-*")))
        ballast = disk / "ballast"
        with open(ballast, "wb", buffering=0) as file:
            try:
                while file.write(b"x" * 4096):
                    pass
            except OSError:
                pass
        run.until(lambda: "failed at sample" in run.stderr() or "No space left" in run.stderr())
        ballast.unlink()
        code, out, err = run.finish()
        assert code == 0, err
        assert "No space left" in err or "the disk is full" in err
        assert_exact(out)
        run.assert_nothing_left()
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_complete_run_whose_ledger_is_damaged_exits_with_5_and_names_the_line(run):
    code, out, err = run(*run.task("--json", "--micro-batch-size", "8", ramp="0:8", samples=64, nodes=1))
    assert code == 0, err
    assert_exact(out)
    (path,) = (run.directory / "ledger").iterdir()
    path.write_bytes(path.read_bytes().replace(b'"first_step"', b'"first_stfp"', 1))
    code, out, err = run("--status", str(run.directory))
    assert code == 0, err
    assert "ledger: NOT ok" in out and f"{path.name}, line 2: first_step is missing" in " ".join(out.split()), out
    code, out, err = run.resume("--json")
    assert (code, json.loads(out)["ledger"]["ok"]) == (5, False), err


def test_a_run_whose_checkpoints_are_gone_does_not_start_again_at_0(run):
    run.start(*run.task("--checkpoint-samples", "16", ramp="0:16", samples=640, nodes=1, args=("slow=0.1",)))
    run.until(lambda: any((run.directory / "checkpoints").glob("step-*/manifest.json")) and run.position() >= 48)
    run.process.kill()  # without a record of its end
    run.finish()
    run.assert_nothing_left()
    shutil.rmtree(run.directory / "checkpoints")
    for _ in range(2):
        code, _, err = run.resume()
        assert code == 4 and "holds no complete checkpoint, and this run had saved" in err, err
    assert len(list((run.directory / "launches").iterdir())) == 1
