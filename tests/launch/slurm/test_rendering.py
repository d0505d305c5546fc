"""Scripts without a cluster: the NeMo table as a chain, hostile names, a site's settings."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from itertools import takewhile
from pathlib import Path

import pytest

from batchwright.core.batch.request import BatchRequest
from batchwright.core.errors import ConfigError
from batchwright.core.ramp.request import read_ramp
from batchwright.launch.directory import RunDirectory
from batchwright.launch.plan import build
from batchwright.launch.records import Options
from batchwright.launch.slurm.elastic import legal_nodes, on_nodes
from batchwright.launch.slurm.engine import read_job, write_job
from batchwright.launch.slurm.script import chain_script
from batchwright.launch.slurm.site import Site, SlurmRun, job_name, layers, read_site, remember
from batchwright.launch.slurm.step import StepEngine
from batchwright.launch.work import work

GOLDEN = Path(__file__).with_name("golden")
HOSTILE = 'it\'s "$(touch INJECTED)" `touch INJECTED`; touch INJECTED\n#SBATCH --hold\n%j \\ é'
NEMO = {"linear": "256,256,10M", "samples": "12M", "node_policy": "launcher"}
SITE = {
    "name": "gpt3 5b",
    "partition": "gpu",
    "account": "research",
    "qos": "high",
    "time": "24:00:00",
    "gres": "gpu:8",
    "constraint": "a100|h100",
    "sbatch": ["#SBATCH --exclusive", "--mem=0"],
    "prologue": ["module load cuda  # the site's", 'export NCCL_DEBUG="WARN"'],
}


def nemo(command=("python", "train.py", "--until", "{end_sample}"), directory="/runs/gpt3 5b", **options):
    request = BatchRequest(global_batch_size=2048, micro_batch_size=4, nodes=16, devices_per_node=8)
    plan, _ = build(
        request, read_ramp(NEMO), Options(engine="slurm", **options), command=command, working_directory="/data/my code"
    )
    return RunDirectory(directory), plan


def scripts(directory, plan, site) -> list[str]:
    run = SlurmRun(site, "dry-run", detached=True)
    return [chain_script(directory, plan, run, launch) for launch in plan.launches]


def test_the_nemo_table_is_a_chain_of_five_launches():
    directory, plan = nemo()
    assert [stage.nodes for stage in plan.stages] == [8, 8, 8, 8, 10, 12, 14, 16]
    texts = [text.replace(sys.executable, "PYTHON") for text in scripts(directory, plan, read_site(SITE))]
    assert len(texts) == 5
    for number, text in enumerate(texts, 1):
        path = GOLDEN / f"nemo-{number}.sh"
        if os.environ.get("BATCHWRIGHT_GOLDEN") == "write":
            path.write_text(text, encoding="utf-8")
        assert text == path.read_text(encoding="utf-8")


@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_a_task_has_direct_ranks_or_torchrun_on_each_node(tmp_path, launcher):
    (tmp_path / "task.py").write_text("def task(): ...\n")
    request = BatchRequest(global_batch_size=64, micro_batch_size=4, nodes=2, devices_per_node=4)
    plan, _ = build(request, read_ramp({"samples": "640"}), Options(), target=str(tmp_path / "task.py"))
    directory = RunDirectory("/runs/task")
    site = read_site({"launcher": launcher, "container": "image.sqsh", "container_mounts": ["/data:/data"]})
    (text,) = scripts(directory, plan, site)
    text = text.replace(sys.executable, "PYTHON").replace(os.getcwd(), "/data")
    path = GOLDEN / f"task-{launcher}.sh"
    if os.environ.get("BATCHWRIGHT_GOLDEN") == "write":
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


def test_a_hostile_name_path_and_environment_keep_their_text(tmp_path):
    """bash runs the script's body, with a stand-in for the job that writes its arguments."""
    place = tmp_path / HOSTILE.replace("/", "-")
    place.mkdir()
    directory, plan = nemo(command=("train", HOSTILE), directory=place, environment={"HOSTILE": HOSTILE})
    given = tmp_path / "given.json"
    stand_in = tmp_path / "stand in"
    stand_in.write_text(
        f"#!{sys.executable}\nimport json, os, sys\njson.dump([sys.argv[1:], os.getcwd()], open({str(given)!r}, 'w'))\n"
    )
    stand_in.chmod(0o755)
    plan = plan.__class__(**{**vars(plan), "working_directory": str(place)})
    site = read_site({"name": HOSTILE, "prologue": ["true  # a comment"]})
    text = scripts(directory, plan, site)[0]
    head = list(takewhile(lambda line: line.startswith("#") or not line, text.split("\n")))  # sbatch reads no further
    assert not any(line.startswith("#SBATCH --hold") for line in head)
    script = tmp_path / "script.sh"
    script.write_text(text.replace(shlex.quote(sys.executable), shlex.quote(str(stand_in))))
    subprocess.run(["bash", script], check=True, cwd=tmp_path)
    arguments, there = json.loads(given.read_text())
    assert arguments == ["-P", "-m", "batchwright.launch.slurm.job", str(directory.path), "chain", "0"]
    assert there == str(place)
    assert not list(tmp_path.rglob("INJECTED"))

    job = work(directory, plan).job(plan.launches[0], 1, 0)
    write_job(job)
    assert read_job(job.directory) == job  # JSON, which no shell reads
    assert oct((job.directory / "work.json").stat().st_mode & 0o777) == "0o600"
    assert StepEngine(site).command(job)[-1] == HOSTILE


def test_a_job_name_keeps_the_characters_that_slurm_allows():
    name = job_name(read_site({"name": HOSTILE}), RunDirectory("x"))
    assert "\n" not in name and "$(touch INJECTED)" in name and "é" in name
    assert job_name(Site(), RunDirectory("/runs/byte gpt")) == "batchwright byte gpt"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"partitoin": "gpu"}, "launch.slurm.partition"),
        ({"partitoin": None}, "launch.slurm.partition"),
        ({"time": 86400}, "24:00:00"),
        ({"time": "a day"}, "not a Slurm time"),
        ({"sbatch": ["--nodes=3"]}, "set by batchwright"),
        ({"sbatch": ["-N3"]}, "set by batchwright"),
        ({"sbatch": ["--mem=0 --nodes=3"]}, "set by batchwright"),
        ({"sbatch": ["--exclusive -N 3"]}, "set by batchwright"),
        ({"sbatch": ["--dep=afterok:1"]}, "set by batchwright"),
        ({"sbatch": ["-Mother"]}, "set by batchwright"),
        ({"sbatch": ["--tasks-per-node=1"]}, "set by batchwright"),
        ({"time": "2"}, "time=2 is 120 s, and signal_seconds=120"),
        ({"time": "1:00", "signal_seconds": 60}, "is 60 s"),
        ({"sbatch": ["echo hello"]}, "not an option"),
        ({"sbatch": ["--mem=0\n#SBATCH --hold"]}, "one line"),
        ({"account": "a\nb"}, "one line"),
        ({"launcher": "mpirun"}, "srun"),
        ({"signal_seconds": 100_000}, "65"),
        ({"elastic": "maybe"}, "not true or false"),
    ],
)
def test_wrong_settings_of_a_site_are_refused(given, expected):
    with pytest.raises(ConfigError, match=expected):
        read_site(given)


def test_settings_of_a_run_override_those_of_its_site_and_survive_on_disk(tmp_path):
    whole = {"partition": "cpu", "prologue": "a", "container": ["apptainer", "exec", "i.sif"]}
    site = read_site(layers({"partition": "gpu", "prologue": ["b"]}, whole))
    assert (site.partition, site.prologue) == ("gpu", ("a", "b"))
    directory = RunDirectory(tmp_path)
    saved = remember(directory, site, detached=True)
    assert SlurmRun.load(directory) == saved
    assert remember(directory, site, detached=False).token == saved.token
    assert oct(SlurmRun.path(directory).stat().st_mode & 0o777) == "0o600"


def test_fewer_nodes_are_legal_if_every_batch_of_a_launch_divides():
    _, plan = nemo()
    first, second = plan.launches[:2]
    assert legal_nodes(plan, first) == (8, 4, 2, 1)  # 256 is its smallest batch
    assert legal_nodes(plan, second) == (10, 8, 5, 4, 2, 1)  # 1280
    smaller = on_nodes(plan, second, 5)
    assert smaller is not None
    stage = smaller[0].stages[second.stages[0]]
    assert stage.micro_batch_size * stage.accumulation_steps * stage.data_parallel_size == 1280
    assert stage.micro_batch_size <= 4 and smaller[1].nodes == 5
    assert on_nodes(plan, second, 7) is None
