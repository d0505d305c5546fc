"""`batchwright run`: reading, errors and dry runs. Real launches are in tests/launch."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from batchwright.cli.run import command
from batchwright.core.errors import BatchwrightError, ConfigError, ScheduleError

WORLD = ("--nodes", "4", "--devices-per-node", "1", "--node-policy", "constant-work")
RAMP = ("--thresholds", "0:8 64:16 192:32", "--samples", "512")
SCRIPT = ("--", "train", "{global_batch_size}", "{end_sample}")


@pytest.fixture(autouse=True)
def somewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("def task(): ...\n")


def run(*argv: str, code: int = 0) -> str:
    result = CliRunner().invoke(command, list(argv), catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.output


def dry(*argv: str) -> dict:
    at = argv.index("--") if "--" in argv else len(argv)
    return json.loads(run(*argv[:at], "--dry-run", "--json", *argv[at:]))


def refused(*argv: str) -> BatchwrightError:
    with pytest.raises(BatchwrightError) as caught:
        run(*argv)
    return caught.value


def test_a_dry_run_shows_every_launch_and_writes_nothing():
    document = dry("train.py:task", *RAMP, *WORLD, "--micro-batch-size", "8")
    assert [(x["nodes"], x["ranks"], x["start_sample"], x["end_sample"]) for x in document["launches"]] == [
        (1, 1, 0, 64),
        (2, 2, 64, 192),
        (4, 4, 192, 512),
    ]
    first = document["launches"][0]
    assert first["command"][:3] == [sys.executable, "-m", "torch.distributed.run"]
    for flag in ("--standalone", "--nproc-per-node=1", "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"):
        assert flag in first["command"]
    assert first["environment"]["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    assert first["environment"]["OMP_NUM_THREADS"] == "1"
    assert [s["global_batch_size"] for s in document["stages"]] == [8, 16, 32]
    text = run("train.py:task", *RAMP, *WORLD, "--micro-batch-size", "8", "--dry-run")
    assert "launch 3: 4 nodes × 1 = 4 ranks, samples 192 to 512" in text and "OMP_NUM_THREADS=1" in text
    assert os.listdir() == ["train.py"]


def test_stages_on_equal_nodes_share_a_launch_unless_asked():
    argv = ("train.py:task", *RAMP, *WORLD[:4], "--node-policy", "constant", "--micro-batch-size", "2")
    assert [x["stages"] for x in dry(*argv)["launches"]] == [[0, 1, 2]]
    assert [x["stages"] for x in dry(*argv, "--stop-every-stage")["launches"]] == [[0], [1], [2]]


def test_places_are_filled_per_launch_and_never_go_through_a_shell():
    argv = (
        "--",
        "train it",
        "--b={global_batch_size}",
        "{micro_batch_size}",
        "{accumulation_steps}",
        "{nodes}",
        "{start_sample}:{end_sample}",
        "{run_dir}",
        "{{nodes}}",
        '{"a": 1}',
        "$(reboot); `x`",
    )
    launches = dry(*RAMP, *WORLD, "--max-micro-batch-size", "4", "--dir", "a 'dir'", *argv)["launches"]
    filled = [x["command"][x["command"].index("0") + 1 :] for x in launches]
    place = str(Path("a 'dir'").absolute())
    assert filled[1] == [
        "train it",
        "--b=16",
        "4",
        "2",
        "2",
        "64:192",
        place,
        "{nodes}",
        '{"a": 1}',
        "$(reboot); `x`",
    ]
    text = run(*RAMP, *WORLD, "--dry-run", *argv)
    line = next(line for line in text.splitlines() if line.strip().startswith("$ "))
    assert shlex.split(line.strip()[2:])[-1] == "$(reboot); `x`"


def test_a_file_gives_all_of_it_and_flags_win():
    Path("run.yaml").write_text(
        "batch: {micro_batch_size: 8}\n"
        "world: {nodes: 4, devices_per_node: 1}\n"
        "ramp: {thresholds: '0:8 64:16 192:32', samples: 512}\n"
        "nodes: {node_policy: constant-work}\n"
        "launch: {threads: 2, max_retries: 5, dir: there, environment: {TOKEN: a b}}\n"
        "task: {target: train.py:task, args: {width: 4}, settings: {max_norm: 1.0}}\n"
    )
    document = dry("run.yaml")
    assert document["dir"].endswith("/there") and len(document["launches"]) == 3
    environment = document["launches"][0]["environment"]
    assert environment["TOKEN"] == "a b" and environment["OMP_NUM_THREADS"] == "2"
    document = dry("run.yaml", "launch.threads=3", "--dir", "here", "--env", "TOKEN=c")
    assert document["dir"].endswith("/here")
    assert document["launches"][0]["environment"]["OMP_NUM_THREADS"] == "3"
    assert document["launches"][0]["environment"]["TOKEN"] == "c"
    assert dry("run.yaml", "--threads", "4", "launch.threads=3")["launches"][0]["environment"]["OMP_NUM_THREADS"] == "4"


def test_one_process_is_the_world_where_none_is_given():
    document = dry("train.py:task", "--global-batch-size", "8", "--samples", "64")
    assert [(x["nodes"], x["ranks"]) for x in document["launches"]] == [(1, 1)]


@pytest.mark.parametrize(
    ("argv", "kind", "field", "said"),
    [
        (("train.py:task", "--global-batch-size", "8"), ScheduleError, "samples", "a run needs an end"),
        ((*RAMP,), ConfigError, "task", "neither given"),
        (("train.py:task", *RAMP, *SCRIPT), ConfigError, "task", "both given"),
        (("train.py:task", "train.py:other", *RAMP), ConfigError, "task", "two tasks"),
        (("missing.py:task", *RAMP), ConfigError, "task", "does not exist"),
        (("train.py:tsak", *RAMP), ConfigError, "task", "has no function 'tsak'. It has: task. Did you mean task?"),
        ((*RAMP, "--", "train", "{global_batch}"), ConfigError, "command", "Did you mean {global_batch_size}"),
        ((*RAMP, "--position-command", "where {end_sample}", *SCRIPT), ConfigError, "position_command", "run_dir"),
        ((*RAMP, "--position-command", "where 'x", *SCRIPT), ConfigError, "command", "No closing quotation"),
        (("train.py:task", *RAMP, "launch.thread=2"), ConfigError, "launch.thread", "threads"),
        (("train.py:task", *RAMP, "task.arg=2"), ConfigError, "task.arg", "task.args"),
        (("train.py:task", *RAMP, "--engine", "ray"), ConfigError, "engine", "local"),
        (("train.py:task", *RAMP, "--stop-signal", "SIGNOPE"), ConfigError, "stop_signal", "not a signal"),
        (("train.py:task", *RAMP, "--env", "=x"), ConfigError, "environment", "KEY=VALUE"),
        (("train.py:task", *RAMP, "--arg", "x"), ConfigError, "arg", "KEY=VALUE"),
        (("--resume", "nowhere"), ConfigError, "dir", "does not exist"),
        (("--status", "."), ConfigError, "dir", "holds no run"),
        (("--status", ".", "--stop", "."), ConfigError, "stop", "mutually exclusive"),
        (("--resume", ".", "--dry-run"), ConfigError, "dry-run", "--resume needs an existing one"),
        (("train.py:task", *RAMP, "--now"), ConfigError, "now", "--stop RUN_DIR"),
        (("train.py:task", *RAMP, "--plot"), ConfigError, "plot", "--status RUN_DIR"),
        (("--status", ".", "--plot", "--json"), ConfigError, "json", "mutually exclusive"),
        (("train.py:task", *RAMP, "--env", "FOO"), ConfigError, "environment", "'FOO' has no value"),
        (("train.py:task", *RAMP, "--env", "A B=3"), ConfigError, "environment", "not the name of a variable"),
        (("train.py:task", *RAMP, "task.settings.max_nrom=2"), ConfigError, "max_nrom", "Nearest: max_norm"),
        (("train.py:task", *RAMP, "task.settings.checkpoint_every=1k"), ConfigError, "checkpoint_every", "a whole number"),
        (("train.py:task", *RAMP, "task.settings.learning_rate={peak: 1}"), ConfigError, "peak", "Nearest: peak_lr"),
        (("train.py:task", *RAMP, "task.settings.strategy=dpp"), ConfigError, "strategy", "not known"),
    ],
)  # fmt: skip
def test_an_invalid_request_is_refused_before_anything_starts(argv, kind, field, said):
    error = refused(*argv)
    assert isinstance(error, kind), error
    assert error.field == field and said in str(error), error
    assert os.listdir() == ["train.py"]


@pytest.mark.parametrize(
    ("override", "read"),
    [
        ("glob=*.jsonl", "*.jsonl"),
        ("glob=@x", "@x"),
        ("glob=a\x07b", "a\x07b"),
        ("glob=a\udcffb", "a\udcffb"),
        ("glob=a: b: c", "a: b: c"),
        ("glob=2024-01-02", "2024-01-02"),
        ("glob=[1, a]", [1, "a"]),
    ],
)
def test_an_override_that_is_not_yaml_is_text(override, read):
    from batchwright.cli.run import _sections

    assert _sections((), [f"task.args.{override}"])[1] == {"args": {"glob": read}}
    dry("train.py:task", *RAMP, f"task.args.{override}")


@pytest.mark.parametrize(
    "override",
    [
        "launch.dir=[",
        "launch.dir=5",
        'launch.dir="a\\0b"',
        "task.args.x='a",
        "task.args.x=&a [*a]",
        "task.args.x=&a {b: *a}",
        "task.args.x=" + "[" * 800 + "]" * 800,
        "task.args.x=!!set {a}",
        "task.args.x=!!binary aGVsbG8=",
        "task.args.x=!!python/name:os.system x",
        "task.args.x=0x" + "f" * 5000,
        "launch=5",
        "task=[1]",
        "launch.position_command=true",
        "launch.environment=5",
        'launch.environment={a: "\\ud800"}',
        "launch.slurm={srun: 5}",
        "launch.slurm={prologue: true}",
        "launch.slurm={prologue: [true]}",
        "launch.slurm={container: 7}",
        "launch.slurm={container_mounts: {a: b}}",
        "launch.slurm={sbatch: 1.5}",
        "launch.slurm={time: '" + "9" * 5000 + "'}",
    ],
)
def test_an_override_with_a_wrong_value_is_refused(override):
    for argv in ((override,), (override, "--engine", "slurm", "--elastic")):
        error = refused("train.py:task", *RAMP, *argv, "--dry-run")
        assert isinstance(error, ConfigError)
        assert len(str(error)) < 1000
    if override.startswith("launch."):
        assert isinstance(refused(*RAMP, override, "--dry-run", *SCRIPT), ConfigError)


@pytest.mark.parametrize("override", ["launch.command=5", 'launch.command=["a\\0b"]', "task.target=5"])
def test_a_task_and_a_command_are_text(override):
    assert "must be text" in str(refused(*RAMP, override)) or "no process" in str(refused(*RAMP, override))


@pytest.mark.parametrize("depth", [20, 800, 50_000])
def test_an_argument_that_is_nested_too_deeply_is_refused(depth):
    error = refused("train.py:task", *RAMP, "--arg", "x=" + "[" * depth + "]" * depth)
    assert isinstance(error, ConfigError)
    assert len(str(error)) < 500


def test_anchors_in_a_file_cannot_describe_an_endless_value():
    Path("run.yaml").write_text("task: {target: 'train.py:task', args: {x: &a [*a]}}\n")
    assert "levels" in str(refused("run.yaml", *RAMP))


def test_lengths_of_stages_are_given_in_a_file_and_by_flag():
    Path("run.yaml").write_text("ramp: {thresholds: '0:8 64:16', sequence_lengths: [128, 256], samples: 512}\n")
    in_file = dry("train.py:task", "run.yaml")
    by_flag = dry("train.py:task", "--thresholds", "0:8 64:16", "--samples", "512", "--sequence-lengths", "128,256")
    assert [s["sequence_length"] for s in in_file["stages"]] == [128, 256]
    assert in_file["stages"] == by_flag["stages"]


def test_a_note_says_that_a_command_does_not_get_its_batch():
    shown = run(*RAMP, *WORLD, "--dry-run", "--", "train", "{end_sample}")
    assert "The command has no placeholder for its batch" in shown and "{global_batch_size}" in shown
    assert "no placeholder for its batch" not in run(*RAMP, *WORLD, "--dry-run", *SCRIPT)
    assert "no place" not in run("--global-batch-size", "8", "--samples", "64", "--dry-run", "--", "train")


def test_a_run_keeps_within_what_its_probe_measured():
    trials = [{"micro_batch_size": m, "status": "fits", "step_seconds": 0.1 * m} for m in (1, 2, 4)]
    Path("probe.json").write_text(json.dumps({"trials": trials, "max_micro_batch_size": 5, "ranks": 1}))
    stages = dry("train.py:task", *RAMP, "--nodes", "1", "--devices-per-node", "1", "--from-probe", "probe.json")[
        "stages"
    ]
    assert [stage["micro_batch_size"] for stage in stages] == [4, 4, 4]


@pytest.mark.parametrize(("length", "micro"), [(512, [8, 16, 16]), (1024, [8, 8, 8]), (4096, [2, 2, 2])])
def test_the_largest_micro_batch_scales_with_the_sequence_length(length, micro):
    trials = [{"micro_batch_size": m, "status": "fits", "step_seconds": 0.1 * m} for m in (1, 2, 4, 8)]
    probe = {"trials": trials, "max_micro_batch_size": 8, "ranks": 1, "identity": {"sequence_length": 1024}}
    Path("probe.json").write_text(json.dumps(probe))
    argv = ("--nodes", "1", "--devices-per-node", "1", "--from-probe", "probe.json", "--sequence-length", str(length))
    stages = dry("train.py:task", *RAMP, *argv)["stages"]
    assert [stage["micro_batch_size"] for stage in stages] == micro
    shown = run("train.py:task", *RAMP, *argv, "--dry-run")
    assert ("which was not measured" in shown.replace("\n", " ").replace("    ", "")) == (length != 1024)
    assert "synchronisation" in shown and "synchronisation" not in run(
        "train.py:task", *RAMP, *argv, "--dry-run", "--sync-seconds", "0.1"
    )


def test_a_task_is_data_parallel():
    Path("tp.yaml").write_text("world: {nodes: 2, devices_per_node: 2, tensor_parallel: 2}\n")
    error = refused("train.py:task", "tp.yaml", *RAMP)
    assert "data-parallel" in str(error) and error.exit_code == 2


def test_a_run_is_resumed_as_it_was_planned():
    code = [sys.executable, "-c", "import os; open(os.environ['BATCHWRIGHT_STATUS_FILE'], 'w').write('{end_sample}')"]
    code[2] = code[2].replace("{end_sample}", "' + os.environ['BATCHWRIGHT_END_SAMPLE'] + '")
    run(*RAMP, *WORLD, "--dir", "r", "--", *code)
    error = refused("--resume", "r", "--seed", "3")
    assert "--seed cannot be changed" in str(error)
    run("--resume", "r", "--max-retries", "1")  # nothing is left to do
    document = json.loads(run("--status", "r", "--json"))
    assert document["schema"] == 1
    for key in ("state", "stage", "stages", "consumed_samples", "step", "restarts", "ledger"):
        assert key in document
    assert (document["state"], document["stage"], document["stages"]) == ("complete", 2, 3)
    assert {"ok", "gaps", "repeats"} <= set(document["ledger"])
    drawn = run("--status", "r", "--plot")
    assert "global batch" in drawn and "Node-hours" in drawn and "Node-hours" not in run("--status", "r")


def test_the_status_of_a_task_is_drawn(tmp_path):
    from tests.report import material

    drawn = run("--status", str(material.run_directory(tmp_path / "run", steps=20)), "--plot")
    for title in (
        "Loss against samples",
        "Loss against time",
        "Throughput by stage",
        "Gradient noise scale",
        "Node-hours",
    ):
        assert title in drawn
    assert drawn.index("nodes") < drawn.index("Loss against samples") < drawn.index("next:")


def test_a_damaged_plan_is_an_error_that_names_it():
    Path("r").mkdir()
    Path("r/plan.json").write_text('{"schema": 99}')
    assert "another version" in str(refused("--status", "r"))
    Path("r/plan.json").write_text('{"schema": 1, "stages": 3}')
    assert "is damaged" in str(refused("--status", "r"))


@pytest.mark.parametrize("engine", ["local", "slurm"])
def test_a_run_that_this_machine_cannot_start_leaves_no_directory(monkeypatch, engine):
    Path("train.py").write_text("def task(): ...\n")
    monkeypatch.setattr("batchwright.launch.engine.find_spec", lambda name: None)  # as without torch
    monkeypatch.setenv("PATH", "")  # without sbatch
    error = refused("train.py:task", *RAMP, *WORLD, "--engine", engine, "--dir", "runs/x")
    assert error.exit_code == 4 and {"local": "batchwright[torch]", "slurm": "sbatch"}[engine] in str(error)
    assert sorted(os.listdir()) == ["train.py"]


@pytest.mark.parametrize(
    ("more", "field", "message"),
    [
        (("--pipeline-schedule", "zero-bubble", "--strategy", "fsdp2"), "strategy", "it loses gradients"),
        (("--pipeline-schedule", "zbv", "--virtual-stages", "2", "task.settings.noise_every=2"), "noise_every", "zbv"),
        (("--strategy", "fsdp2", "task.settings.noise_every=2"), "noise_every", "strategy=fsdp2 in a pipeline"),
        (("task.settings.grad_scaler=1024",), "grad_scaler", "train in bf16"),
    ],
)
def test_settings_that_a_pipeline_does_not_have_are_refused_before_a_start(more, field, message):
    line = (
        "train.py:task",
        "--nodes",
        "4",
        "--devices-per-node",
        "1",
        "--global-batch-size",
        "64",
        "--micro-batch-size",
        "4",
    )
    error = refused(*line, "--samples", "512", "--pipeline-parallel", "2", *more, "--dry-run")
    assert error.field == field and message in str(error)
