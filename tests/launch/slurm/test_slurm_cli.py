"""The command line: dry runs without a cluster; a supervised run and a chain from start to end on one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from batchwright.launch.directory import RunDirectory
from batchwright.launch.slurm import commands as slurm
from batchwright.launch.slurm.control import rows
from batchwright.launch.work import read_position

from .conftest import LAUNCHES, TRAINER, audit, chain_log, ended, seen, submitted_again, wait_for

NEMO = (
    "--linear 256,256,10M --samples 12M --global-batch-size 2048 --micro-batch-size 4 --nodes 16 --devices-per-node 8"
).split()
RAMP = (
    "--thresholds",
    "0:16 64:32 192:64",
    *"--samples 448 --nodes 4 --devices-per-node 1 --node-policy constant-work".split(),
)
COMMAND = ("--", sys.executable, str(TRAINER), *"--start {start_sample} --end {end_sample} --nodes {nodes}".split())
QUICK = ("--engine", "slurm", "launch.slurm.poll_seconds=0.3", "--retry-seconds", "0.5")


def batchwright(*arguments: str, code: int = 0) -> str:
    done = subprocess.run([sys.executable, "-m", "batchwright", "run", *arguments], capture_output=True, text=True)
    assert done.returncode == code, done.stderr + done.stdout
    return done.stdout if code == 0 else done.stderr


def completed(directory: RunDirectory) -> None:
    """Wait for a chain to end, and ask for its status once: many commands would slow the chain down."""
    wait_for((directory.path / "outcome.json").exists)
    assert json.loads(batchwright("--status", str(directory.path), "--json"))["state"] == "complete"


def test_a_dry_run_writes_five_scripts(tmp_path):
    site = tmp_path / "site.yaml"
    site.write_text("partition: gpu\nprologue: [module load cuda]\nsbatch: [--exclusive]\n")
    overrides = ("launch.slurm.partition=fast", "launch.slurm.account=me")
    arguments = (*NEMO, "--engine", "slurm", "--site", str(site), *overrides)
    shown = json.loads(batchwright(*arguments, "--dir", str(tmp_path / "run"), "--dry-run", "--json", *COMMAND))
    assert [launch["nodes"] for launch in shown["launches"]] == [8, 10, 12, 14, 16]
    for launch in shown["launches"]:
        text = Path(launch["script"]).read_text()
        assert f"#SBATCH --nodes={launch['nodes']}\n" in text
        assert "#SBATCH --partition=fast\n#SBATCH --account=me\n#SBATCH --exclusive\n" in text
        assert "\nmodule load cuda\n" in text and launch["test"]
    assert "launch-5.sh" in batchwright(*arguments, "--dir", str(tmp_path / "run"), "--dry-run", *COMMAND)


def test_settings_that_are_wrong_are_refused_before_anything_is_written(tmp_path):
    arguments = (*RAMP, "--engine", "slurm", "--dir", str(tmp_path / "run"))
    assert "launch.slurm.partition" in batchwright(*arguments, "launch.slurm.partitoin=gpu", *COMMAND, code=2)
    assert "--engine slurm" in batchwright(*RAMP, "--dir", str(tmp_path / "run"), "--detach", *COMMAND, code=2)
    assert not (tmp_path / "run").exists()


def test_a_dry_run_asks_the_cluster_when_each_launch_would_start(cluster, tmp_path):
    arguments = (*RAMP, *QUICK, "--dir", str(tmp_path / "a run"), "--dry-run", "--json")
    shown = json.loads(batchwright(*arguments, "--nodes", "8", "--thresholds", "0:16 64:128", *COMMAND))
    first, last = shown["launches"]
    assert first["starts_in"] is not None and "to start at" in first["test"]
    # The cluster has four nodes; `test` says so.
    assert last["nodes"] == 8 and last["starts_in"] is None and last["test"]
    assert not cluster.call("squeue", "-h").strip()


def test_a_run_is_supervised_to_its_end(cluster, tmp_path):
    directory = RunDirectory(tmp_path / 'a run\'s "directory" 100%j')
    site = tmp_path / "site.yaml"
    site.write_text(json.dumps({"name": "$(x) \"y\"\n'z'"}))
    hostile = "$(touch x)\n'\""
    given = ("--site", str(site), "--env", f"HOSTILE={hostile}", "--dir", str(directory.path), "--json")
    shown = json.loads(batchwright(*RAMP, *QUICK, *given, *COMMAND))
    assert shown["state"] == "complete" and [job["nodes"] for job in shown["chain"]["jobs"]] == [1, 2, 4]
    trained = audit(directory)
    assert seen(trained) == list(LAUNCHES)
    assert {line["hostile"] for lines in trained.values() for line in lines} == {hostile}
    check_rows(directory)
    folder = directory.launch(2)
    assert "nothing to do" in submitted_again(folder / "job.sh", folder / "logs" / "job.log")  # a finished launch
    audit(directory)


def test_a_chain_runs_to_its_end(cluster, tmp_path):
    directory = RunDirectory(tmp_path / 'a run\'s "directory" 100%j')
    shown = json.loads(batchwright(*RAMP, *QUICK, "--dir", str(directory.path), "--detach", "--json", *COMMAND))
    assert shown["state"] == "running" and len(shown["jobs"]) == 1
    completed(directory)
    assert seen(audit(directory)) == list(LAUNCHES)
    wait_for(lambda: not cluster.call("squeue", "-h", "-t", "R,PD").strip())  # no successor is left
    check_rows(directory)
    table = batchwright("--status", str(directory.path))
    assert "node-hours" in table and "waited" in table
    ended(slurm.submit(directory.path / "scripts" / "launch-2.sh"))  # a finished launch, once more
    assert "nothing to do: the run is complete" in chain_log(directory)
    audit(directory)


def check_rows(directory: RunDirectory) -> None:
    """The table of a complete run."""
    table = rows(directory, directory.plan())
    assert [(row.launch, row.state, row.nodes, row.start_sample, row.end_sample) for row in table] == [
        (index, "done", *launch) for index, launch in enumerate(LAUNCHES)
    ]
    assert all(row.job and row.waited_seconds is not None and row.node_hours for row in table)


def test_a_chain_is_stopped_and_resumed_and_one_that_runs_is_left_alone(cluster, tmp_path):
    hold, directory = tmp_path / "hold", RunDirectory(tmp_path / "a run")
    hold.touch()
    place, held = str(directory.path), ("--hold", str(hold), "--hold-at", "96")
    batchwright(*RAMP, *QUICK, "--dir", place, "--detach", *COMMAND, *held)
    wait_for(lambda: read_position(directory.launch(2) / "status.json") == 96)
    for again in (("--resume", place, "--detach"), ("--resume", place)):
        assert "of it runs" in batchwright(*again, code=4)
    shown = json.loads(batchwright("--stop", place, "--json"))
    assert shown["state"] == "stopped" and 96 < shown["saved_samples"] < 192
    hold.unlink()
    shown = json.loads(batchwright("--resume", place, "--detach", "--json"))
    assert shown["state"] == "running" and len(shown["jobs"]) == 1
    completed(directory)
    assert [nodes for nodes, *_ in seen(audit(directory))] == [1, 2, 2, 4]
    wait_for(lambda: not cluster.call("squeue", "-h").strip())
    shown = json.loads(batchwright("--resume", place, "--detach", "--json"))
    assert shown["state"] == "complete" and shown["jobs"] == []


def test_a_job_that_has_lost_its_supervisor_is_shown_and_stopped(cluster, tmp_path):
    hold, directory = tmp_path / "hold", RunDirectory(tmp_path / "a run")
    hold.touch()
    place = str(directory.path)
    arguments = (*RAMP, *QUICK, "--dir", place, *COMMAND, "--hold", str(hold), "--hold-at", "32")
    with subprocess.Popen(
        [sys.executable, "-m", "batchwright", "run", *arguments], stderr=subprocess.DEVNULL
    ) as process:
        wait_for(lambda: read_position(directory.launch(1) / "status.json") == 32)
        process.kill()
    shown = json.loads(batchwright("--status", place, "--json"))
    assert shown["state"] == "running" and "has lost its supervisor" in shown["reason"]
    shown = json.loads(batchwright("--stop", place, "--json"))
    assert (shown["state"], shown["saved_samples"]) == ("stopped", 48)
    hold.unlink()
    assert json.loads(batchwright("--resume", place, "--json"))["state"] == "complete"
    # The job wrote this while no supervisor ran.
    assert "asked to save and stop by --stop" in directory.ending(1).failure.reason
    assert [nodes for nodes, *_ in seen(audit(directory))] == [1, 1, 2, 4]
