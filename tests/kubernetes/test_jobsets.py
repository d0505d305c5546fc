"""The example for Kubernetes: its manifests follow the JobSet API, hostile names and secrets included."""

from __future__ import annotations

import doctest
import json
import os
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from batchwright.core.batch.request import Request
from batchwright.core.ramp.request import read_ramp
from batchwright.launch.directory import RunDirectory, write_json
from batchwright.launch.plan import build
from batchwright.launch.records import Options
from batchwright.launch.work import work
from examples.kubernetes import jobsets

from .jobset_schema import violations


def nemo(directory: Path, command=("python", "train.py", "--until", "{end_sample}"), **options):
    request = Request(global_batch_size=2048, micro_batch_size=4, nodes=16, devices_per_node=8)
    ramp = read_ramp({"linear": "256,256,10M", "samples": "12M", "node_policy": "launcher"})
    plan, _ = build(request, ramp, Options(**options), command=command, working_directory="/data/my code")
    return RunDirectory(directory), plan


def test_kubernetes_manifests_follow_the_jobset_api(tmp_path):
    place, command = tmp_path / "My run's $(dir)", ("train", "$(HOME) {end_sample}")
    directory, plan = nemo(place, command, environment={"A": "$(B)"})
    found = jobsets.manifests(directory, plan)
    assert [d["spec"]["replicatedJobs"][0]["template"]["spec"]["completions"] for d in found] == [8, 10, 12, 14, 16]
    for document in found:
        assert violations(document) == []
        assert json.loads(jobsets.render(document)) == document
    container = found[0]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]
    assert container["command"][-1].startswith("$$(HOME)")  # $(NAME) would be expanded by the kubelet
    assert {"name": "A", "value": "$$(B)"} in container["env"]
    paths = jobsets.write(directory, plan)
    assert [path.name for path in paths] == [f"launch-{n}.yaml" for n in range(1, 6)]


def test_the_schema_catches_mistakes(tmp_path):
    document = jobsets.manifests(*nemo(tmp_path))[0]
    document["spec"]["replicatedJob"] = []
    document["spec"]["successPolicy"]["operator"] = "Most"
    document["spec"]["replicatedJobs"][0]["template"]["spec"]["completions"] = "8"
    assert len(violations(document)) == 3


def test_manifests_are_readable_by_their_owner_only_and_ranks_find_their_spec(tmp_path):
    directory, plan = nemo(tmp_path / "run", environment={"TOKEN": "secret"})
    old = os.umask(0)
    try:
        paths = jobsets.write(directory, plan)
        paths = jobsets.write(directory, plan)  # overwrites
    finally:
        os.umask(old)
    assert {stat.S_IMODE(path.stat().st_mode) for path in paths} == {0o600}
    (tmp_path / "task.py").write_text("def task(): ...\n")
    task = replace(plan, kind="task", target=f"{tmp_path / 'task.py'}:task")
    jobsets.write(directory, task)
    for launch in task.launches:
        spec = work(directory, task).job(launch, launch.index + 1, launch.start_sample).argv[-1]
        assert json.loads(Path(spec).read_text())["settings"]["launch"] == launch.index + 1
    for document in jobsets.manifests(directory, task):
        assert violations(document) == []


def test_the_script_writes_the_manifests_of_a_planned_run(tmp_path):
    directory, plan = nemo(tmp_path / "run")
    write_json(directory.path / "plan.json", plan)
    script = [
        sys.executable,
        jobsets.__file__,
        str(directory.path),
        "--image",
        "train:1",
        "--claim",
        "runs",
        "--gpu",
        "",
    ]
    done = subprocess.run(script, capture_output=True, text=True, check=True)
    paths = [Path(line) for line in done.stdout.splitlines()]
    assert [path.name for path in paths] == [f"launch-{n}.yaml" for n in range(1, 6)]
    pod = json.loads(paths[0].read_text())["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert pod["containers"][0]["image"] == "train:1" and "resources" not in pod["containers"][0]
    assert pod["volumes"][0]["persistentVolumeClaim"] == {"claimName": "runs"}


def test_names_and_values_are_escaped():
    assert doctest.testmod(jobsets).failed == 0


def test_the_command_line_has_no_such_engine(tmp_path):
    run = [sys.executable, "-m", "batchwright", "run", "--samples", "64", "--global-batch-size", "8", "--dir", "run"]
    done = subprocess.run([*run, "--engine", "kubernetes", "--", "train"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and "engine" in done.stderr and not (tmp_path / "run").exists()
