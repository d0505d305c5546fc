"""`batchwright plan`: pasted command lines, files, precedence, output."""

from __future__ import annotations

import json
from importlib import import_module

import pytest

from batchwright import Plan
from batchwright.probe.records import Probe, Trial


def shown(out: str, name: str) -> list[str]:
    """The row of a number: value, source, and the reason."""
    line = next(line for line in out.splitlines() if line.strip().startswith(f"{name} "))
    return line.split(None, 3)[1:]


def test_the_documented_product(cli):
    ran = cli("plan", "--micro-batch-size", "4", "--accumulation-steps", "8", "--devices", "2")
    assert ran.code == 0
    assert ran.err == ""
    assert ran.out.splitlines()[0] == "64 = 4 micro × 8 accumulation × 2 data-parallel"


@pytest.mark.parametrize(
    ("line", "micro", "steps", "ranks", "batch"),
    [
        # NeMo, as documented
        ("data.micro_batch_size=4 data.global_batch_size=16 trainer.accumulate_grad_batches=1", 4, 1, 4, 16),
        (
            "nemo llm pretrain --factory llama3_8b data.micro_batch_size=4 data.global_batch_size=16 "
            "trainer.accumulate_grad_batches=1",
            4, 1, 4, 16,
        ),
        ("nemo llm pretrain --factory llama3_8b trainer.num_nodes=2 trainer.devices=8 data.micro_batch_size=1 "
         "data.global_batch_size=512 trainer.strategy.tensor_model_parallel_size=2", 1, 64, 8, 512),
        ("training.trainer.num_nodes=8 training.trainer.devices=8 training.model.micro_batch_size=4 "
         "training.model.global_batch_size=512", 4, 2, 64, 512),
        # MaxText
        ("per_device_batch_size=4 gradient_accumulation_steps=2 devices=8", 4, 2, 8, 64),
        ("per_device_batch_size=0.25 ici_tensor_parallelism=8 --devices 64", 2, 1, 8, 16),
        ("python3 -m MaxText.train MaxText/configs/base.yml run_name=a per_device_batch_size=2 ici_fsdp_parallelism=16 "
         "dcn_data_parallelism=2 gradient_accumulation_steps=3", 2, 3, 32, 192),
        # Hugging Face
        ("--per_device_train_batch_size 2 --gradient_accumulation_steps 8 --devices 2", 2, 8, 2, 32),
        ("torchrun --nproc_per_node 8 --nnodes 2 train.py --per_device_train_batch_size 2 --gradient_accumulation_steps 8 "
         "--learning_rate 1e-5 --bf16", 2, 8, 16, 256),
        ("accelerate launch --num_processes 4 train.py --per-device-train-batch-size 2", 2, 1, 4, 8),
        ("srun -N 4 -n 32 python train.py --per_device_train_batch_size 2", 2, 1, 32, 64),
        ("srun -N4 --ntasks-per-node=8 -p gpu python train.py --per_device_train_batch_size 2 -n 3", 2, 1, 32, 64),
        ("srun -N 4 -n 4 torchrun --nproc_per_node 8 train.py --per_device_train_batch_size 2", 2, 1, 32, 64),
        # our own keys, with sections
        ("batch.global_batch_size=64 world.devices=2 batch.max_micro_batch_size=4", 4, 8, 2, 64),
    ],
)  # fmt: skip
def test_lines_that_people_paste(cli, line, micro, steps, ranks, batch):
    ran = cli("plan", *line.split(), "--json")
    assert ran.code == 0, ran.out
    found = ran.json
    names = ("micro_batch_size", "accumulation_steps", "data_parallel_size", "global_batch_size")
    assert tuple(found[name] for name in names) == (micro, steps, ranks, batch)
    assert cli("plan", "--json", *line.split()).json == found  # the flag may come first


def test_nemos_line_says_that_nemo_derives_accumulation(cli):
    ran = cli("plan", "data.micro_batch_size=4", "data.global_batch_size=16", "trainer.accumulate_grad_batches=1")
    flat = " ".join(ran.out.split())
    assert "NeMo derives accumulation itself, as global / (micro × ranks)" in flat
    assert shown(ran.out, "data_parallel_size") == ["4", "derived", "16 / (4 × 1)"]
    assert shown(ran.out, "micro_batch_size") == ["4", "given", "data.micro_batch_size=4"]


def test_a_default_of_a_launcher_is_not_given(cli):
    ran = cli("plan", "torchrun", "--nproc_per_node", "2", "t.py", "--per_device_train_batch_size", "4")
    assert shown(ran.out, "nodes") == ["1", "default", "the launcher's default"]
    assert shown(ran.out, "devices_per_node") == ["2", "given", "nproc_per_node=2"]


def test_a_note_lists_what_is_ignored_in_a_pasted_line(cli):
    ran = cli("plan", "nemo", "llm", "pretrain", "--factory", "llama3_8b", "data.micro_batch_size=4", "optim.lr=1")
    assert "Ignored because it does not concern the batch: nemo llm pretrain --factory llama3_8b, optim.lr" in " ".join(
        ran.out.split()
    )


# --- files ------------------------------------------------------------------------------------------------------------


def test_a_flag_wins_over_an_override_and_that_over_a_file(cli, tmp_path):
    file = tmp_path / "batchwright.yaml"
    file.write_text("batch:\n  global_batch_size: 64\n  micro_batch_size: 1\nworld: {devices: 4}\n")
    argv = ["plan", str(file)]
    assert shown(cli(*argv).out, "micro_batch_size") == ["1", "given", f"{file}: batch.micro_batch_size"]
    argv.append("batch.micro_batch_size=2")
    assert shown(cli(*argv).out, "micro_batch_size") == ["2", "given", "batch.micro_batch_size=2"]
    argv += ["--micro-batch-size", "4"]
    assert shown(cli(*argv).out, "micro_batch_size") == ["4", "given", "--micro-batch-size"]
    found = cli(*argv, "--json").json
    assert found["reasons"]["global_batch_size"] == f"{file}: batch.global_batch_size"
    assert (found["accumulation_steps"], found["sources"]["accumulation_steps"]) == (4, "derived")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.yaml", "global_batch_size: 1Ki\ndevices: 8\n"),
        ("a.yaml", "batch: {global_batch_size: 1024}\nworld: {devices: 8}\nlaunch: {engine: local}\ntask: x.py:task\n"),
        ("a.json", '{"batch": {"global_batch_size": 1024}, "world": {"devices": 8}}'),
        ("a.toml", "[batch]\nglobal_batch_size = 1024\n[world]\ndevices = 8\n"),
        ("maxtext.yml", "per_device_batch_size: 128.0\nici_fsdp_parallelism: 8\nrun_name: x\nenable_checkpointing: true\n"),
        ("nemo.yaml", "data: {micro_batch_size: 128, global_batch_size: 1024}\ntrainer: {num_nodes: 1, devices: 8}\n"
         "model: {hidden_size: 4096, layers: [1, 2]}\n"),
    ],
)  # fmt: skip
def test_files_of_every_kind(cli, tmp_path, name, text):
    file = tmp_path / name
    file.write_text(text)
    found = cli("plan", str(file), "--json").json
    assert (found["global_batch_size"], found["data_parallel_size"]) == (1024, 8)


def test_a_misspelt_key_of_a_file_is_named_with_what_was_meant(cli, tmp_path):
    file = tmp_path / "b.yaml"
    file.write_text("batch: {global_batchsize: 64, micro_batch_size: 2}\nworld: {device: 4}\n")
    ran = cli("plan", str(file))
    assert ran.code == 2
    assert (
        f"error: batch.global_batchsize is not a known key of {file}. Did you mean batch.global_batch_size" in ran.err
    )
    assert "error: world.device is not a known key" in ran.err
    file.write_text(
        "nodes: 4\nbatch: {micro_batch_size: 2}\n"
    )  # `nodes` is the name of a section, but not a section here: an error
    ran = cli("plan", str(file))
    assert ran.code == 2
    assert "world.nodes" in ran.err


@pytest.mark.parametrize("ending", ["yaml", "json"])
def test_a_key_given_twice_in_a_file_is_refused(cli, tmp_path, ending):
    file = tmp_path / f"twice.{ending}"
    file.write_text('{"micro_batch_size": 2, "devices": 4, "micro_batch_size": 4}')
    ran = cli("plan", str(file))
    assert ran.code == 2
    assert "'micro_batch_size' is given twice" in ran.err


# --- JSON -------------------------------------------------------------------------------------------------------------


def test_the_json_has_the_promised_keys(cli):
    ran = cli(
        "plan",
        "--global-batch-size",
        "256",
        "--nodes",
        "4",
        "--devices-per-node",
        "8",
        "--pipeline-parallel",
        "4",
        "--max-micro-batch-size",
        "2",
        "--json",
    )
    found = ran.json
    assert found["schema"] == 1
    for name in (
        "global_batch_size",
        "micro_batch_size",
        "accumulation_steps",
        "data_parallel_size",
        "batch_quantum",
        "devices",
        "sources",
        "alternatives",
        "notes",
    ):
        assert name in found
    assert {"pipeline_microbatches", "bubble_fraction", "schedule"} <= set(found["pipeline"])
    assert {"load_batch_size", "loading_hosts", "rows_per_loading_host"} <= set(found["loading"])
    assert ran.err == ""
    assert Plan.from_json(found).to_json() == found


def test_an_error_is_one_json_document_on_stdout(cli):
    ran = cli("plan", "--global-batch-size", "1000", "--micro-batch-size", "3", "--data-parallel-size", "64", "--json")
    assert (ran.code, ran.err) == (2, "")
    error = ran.json["error"]
    assert (error["type"], error["field"], error["given"], error["nearest"]) == (
        "PlanError",
        "global_batch_size",
        1000,
        [960, 1152],
    )
    several = cli("plan", "--global-batch-size", "x", "--nodes", "0", "--json").json["error"]
    assert [v["field"] for v in several["violations"]] == ["global_batch_size", "nodes"]


def test_a_request_without_numbers_says_what_to_give(cli):
    ran = cli("plan")
    assert (ran.code, ran.out) == (2, "")
    assert "Not enough is known to plan a batch" in ran.err
    assert "Give --global-batch-size (or --global-batch-size-tokens), --micro-batch-size or --max-micro" in ran.err


def test_a_contradiction_shows_the_product(cli):
    ran = cli(
        "plan", "--global-batch-size", "64", "--micro-batch-size", "4", "--accumulation-steps", "8", "--devices", "4"
    )
    assert ran.code == 2
    assert "--micro-batch-size 4 × --accumulation-steps 8 × data_parallel_size 4 = 128" in ran.err


# --- tolerance, round, ragged -----------------------------------------------------------------------------------------


def test_tolerance_lists_what_works_even_when_the_request_does_not(cli):
    argv = [
        "plan",
        "--global-batch-size",
        "1000",
        "--micro-batch-size",
        "4",
        "--nodes",
        "6",
        "--devices-per-node",
        "8",
        "--tolerance",
        "20%",
    ]
    ran = cli(*argv)
    assert ran.code == 2
    assert "valid batches nearby:" in ran.out
    assert "960" in ran.out
    found = cli(*argv, "--json").json
    assert "error" in found
    assert found["nearby"][0]["global_batch_size"] == 960
    assert {row["nodes"] for row in found["nearby"]} == {5, 6, 7}
    fine = cli("plan", "--global-batch-size", "960", *argv[3:])
    assert fine.code == 0
    assert "valid batches nearby:" in fine.out
    assert cli("plan", "--global-batch-size", "960", *argv[3:], "--json").json["nearby"]
    nothing = cli("plan", "--global-batch-size", "7", "--micro-batch-size", "4", "--devices", "48", "--tolerance", "1%")
    assert nothing.code == 2


@pytest.mark.parametrize(
    ("line", "batch", "ranks", "field"),
    [
        ("--global-batch-size-tokens 4M --sequence-length 4096 --devices 64", 960, 64, "global_batch_size_tokens"),
        ("--global-batch-size 1000 --devices 100 --tensor-parallel 8", 1001, 13, "devices"),
        ("--global-batch-size 1000 --nodes 5 --devices-per-node 8 --tensor-parallel 16", 1000, 2, "nodes"),
        ("--global-batch-size 1000 --nodes 3 --devices 100", 990, 99, "nodes"),
    ],
)
def test_tolerance_lists_what_is_near_numbers_that_are_not_whole(cli, line, batch, ranks, field):
    found = cli("plan", *line.split(), "--tolerance", "20%", "--json").json
    assert found["error"]["field"] == field
    assert (found["nearby"][0]["global_batch_size"], found["nearby"][0]["data_parallel_size"]) == (batch, ranks)


def test_round_and_ragged_are_noted(cli):
    argv = ["plan", "--global-batch-size", "1000", "--micro-batch-size", "4", "--data-parallel-size", "48"]
    down, up = cli(*argv, "--round", "down"), cli(*argv, "--round", "up")
    assert "Rounded down as asked: --global-batch-size 1000 -> 960" in " ".join(down.out.split())
    assert "Rounded up as asked: --global-batch-size 1000 -> 1152" in " ".join(up.out.split())
    assert shown(down.out, "global_batch_size") == ["960", "derived", "rounded down as asked"]
    ragged = cli(*argv, "--allow-ragged")
    assert ragged.out.splitlines()[0] == "1000 ≤ 4 micro × 6 accumulation × 48 data-parallel   (ragged)"
    assert cli(*argv, "--allow-ragged", "--json").json["ragged"] is True
    assert cli(*argv).code == 2


def test_loading_and_pipeline_are_shown(cli):
    ran = cli(
        "plan",
        "--micro-batch-size",
        "8",
        "--nodes",
        "5",
        "--devices-per-node",
        "8",
        "--tensor-parallel",
        "5",
        "--equal-rows",
        "--loading-hosts",
        "3",
        "--pipeline-parallel",
        "2",
    )
    assert "pipeline: 1f1b, 2 stages\n" in ran.out
    assert shown(ran.out, "pipeline_microbatches") == ["2", "derived", "accumulation_steps"]
    assert shown(ran.out, "bubble_fraction") == ["33.3%", "derived", "1 / (1 × 2 + 1)"]
    assert shown(ran.out, "load_batch_size") == ["107", "derived", "64 × 5/3, rounded up"]
    assert shown(ran.out, "hosts") == ["5", "derived", "one per node"]
    assert shown(ran.out, "loading_hosts") == ["3", "given", "--loading-hosts"]
    assert shown(ran.out, "rows_per_loading_host") == ["22", "derived", "64 / 3, rounded up"]
    assert shown(ran.out, "read_amplification") == ["1.031", "derived", "66 / 64"]
    stored = cli(
        "plan", "--micro-batch-size", "8", "--nodes", "4", "--devices-per-node", "8", "--expansion-factor", "1/2"
    )
    assert "host h continues with stored shards h, h + 4, … of 8" in stored.out


def test_many_alternatives_are_cut_short_and_all_in_the_json(cli):
    argv = ["plan", "--global-batch-size", "5040", "--devices", "1"]
    assert "… and 53 more: --json lists them" in cli(*argv).out
    assert len(cli(*argv, "--json").json["alternatives"]) == 59


def test_speed_is_shown(cli):
    found = cli(
        "plan", "--global-batch-size", "64", "--samples-per-second", "12.8", "--sequence-length", "4096", "--json"
    ).json
    assert found["step_seconds"] == pytest.approx(5)
    assert found["tokens_per_second"] == pytest.approx(12.8 * 4096)


def test_values_written_with_suffixes(cli):
    found = json.loads(cli("plan", "--global-batch-size-tokens", "4Mi", "--sequence-length", "4Ki", "--json").out)
    assert found["global_batch_size"] == 1024
    meant = cli("plan", "--global-batch-size-tokens", "4M", "--sequence-length", "4096")
    assert "Did you mean 4Mi = 4,194,304 (1024)?" in meant.err


def test_a_probe_says_what_fits_and_what_each_split_costs(cli, tmp_path):
    probe = tmp_path / "probe.json"
    trials = [{"micro_batch_size": m, "status": "fits", "step_seconds": 0.1 + 0.05 * m} for m in (1, 2, 4, 8)]
    probe.write_text(json.dumps({"trials": trials, "max_micro_batch_size": 11}))
    found = cli("plan", "--global-batch-size", "96", "--devices", "2", "--from-probe", str(probe), "--json").json
    assert found["global_batch_size"] == 96 and found["micro_batch_size"] == 8  # the largest divisor of 48 up to 11
    assert found["sources"]["max_micro_batch_size"] == found["sources"]["step_seconds"] == "probed"
    assert found["step_seconds"] == pytest.approx(6 * 0.5)
    costs = {a["micro_batch_size"]: a["step_seconds"] for a in found["alternatives"]}
    assert costs == pytest.approx({m: 48 // m * (0.1 + 0.05 * m) for m in (1, 2, 3, 4, 6)})
    text = cli("plan", "--global-batch-size", "96", "--devices", "2", "--from-probe", str(probe)).out
    assert "s/step" in text
    given = cli(
        "plan",
        "--global-batch-size",
        "96",
        "--devices",
        "2",
        "--max-micro-batch-size",
        "4",
        "--from-probe",
        str(probe),
        "--json",
    ).json
    assert given["micro_batch_size"] == 4 and given["sources"]["max_micro_batch_size"] == "given"
    probe.write_text(json.dumps({"trials": trials, "bottleneck": "too-noisy", "ranks": 1}))
    notes = " ".join(
        cli("plan", "--global-batch-size", "96", "--devices", "2", "--from-probe", str(probe), "--json").json["notes"]
    )
    assert "too noisy to rely on" in notes and "a probe on 1 rank:" in notes


def test_a_key_that_may_concern_the_batch_is_listed_separately(cli, tmp_path):
    file = tmp_path / "own.json"
    file.write_text('{"my_batch_size": 256, "rows_of_a_batch": 4, "gradient_accumulation_steps": 8, "fp16": 1}')
    notes = cli("plan", str(file), "--devices", "8", "--micro-batch-size", "2", "--json").json["notes"]
    assert any(n.endswith("may concern the batch: my_batch_size, rows_of_a_batch") for n in notes)
    assert any(n.endswith("does not concern the batch: fp16") for n in notes)
    file.write_text('{"mine": {"micro_batch_size": 4, "global_batch_size": 64}}')
    ran = cli("plan", str(file))
    assert ran.code == 2 and "may concern the batch: mine.micro_batch_size, mine.global_batch_size." in ran.err
    ran = cli(*"plan torchrun --nproc_per_node 8 t.py --micro-batch-size 4 --global-batch-sise 1024".split())
    assert ran.code == 2 and "Did you mean global_batch_size" in ran.err
    ran = cli(
        *"plan torchrun --nproc_per_node 8 t.py --micro-batch-size 4 --per_device_eval_batch_size 9 --device x".split()
    )
    assert ran.code == 0 and "may concern" not in ran.out


def test_the_configuration_of_a_pasted_line_is_read(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.yml").write_text("gradient_accumulation_steps: 4\n")
    line = "python3 -m MaxText.train base.yml run_name=foo per_device_batch_size=4 --devices 8"
    assert cli("plan", *line.split(), "--json").json["global_batch_size"] == 4 * 4 * 8
    assert cli("plan", *line.replace("base.yml", "gone.yml").split(), "--json").json["global_batch_size"] == 4 * 8


BASE = """
per_device_batch_size: 12.0
gradient_accumulation_steps: 2
load_parameters_path: ""
dcn_data_parallelism: -1
ici_data_parallelism: 1
ici_fsdp_parallelism: -1
ici_tensor_parallelism: 1
micro_batch_size_to_train_on: -1
"""


def test_a_pasted_maxtext_line_with_its_own_base_yml(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.yml").write_text(BASE)
    line = "plan python3 -m MaxText.train base.yml run_name= load_parameters_path= per_device_batch_size=2".split()
    assert cli(*line, "ici_fsdp_parallelism=16", "--json").json["global_batch_size"] == 2 * 2 * 16
    assert cli(*line, "--devices", "8", "--json").json["global_batch_size"] == 2 * 2 * 8
    ran = cli(*line, "ici_fsdp_parallelism=-1")  # a key that is typed counts
    assert ran.code == 2 and "ici_fsdp_parallelism=-1 takes the devices that the other axes leave" in ran.err


def test_what_a_pasted_line_names_is_read_only_where_it_configures_a_batch(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.json").write_text('{"a": 1}\n{"a": 2}\n')
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "own.yaml").write_text("devices: cuda\nnodes: [a, b]\n")
    (tmp_path / "ds.json").write_text('{"gradient_accumulation_steps": "auto", "train_batch_size": "auto"}')
    (tmp_path / "train.yaml").write_text("gradient_accumulation_steps: 8\nlr: 1\n")
    line = "plan torchrun --nproc_per_node 2 t.py --train_files rows.json list.json own.yaml --per_device_train_batch_size 4"
    assert cli(*line.split(), "--deepspeed", "ds.json", "--json").json["global_batch_size"] == 4 * 2
    for config in (["--config", "train.yaml"], ["--config_file=train.yaml"], ["train.yaml"]):
        found = cli(*line.split(), *config, "--json").json
        assert found["global_batch_size"] == 4 * 8 * 2 and not any("train.yaml" in note for note in found["notes"])


@pytest.mark.parametrize(
    ("flags", "doubtful"),
    [
        ("--accumulate-allreduce-grads-in-fp32 --no-gradient-accumulation-fusion", None),
        ("--run_name=batch512 --output_dir /x/batch", None),
        ("--virtual-pipeline-model-parallel-size 2", "virtual_pipeline_model_parallel_size=2"),
        ("--mine.local_batch_size 4 --lr 1", "mine.local_batch_size=4"),
    ],
)
def test_flags_that_may_concern_the_batch_are_named_with_their_values(cli, flags, doubtful):
    notes = cli(*f"plan torchrun --nproc_per_node 8 t.py --micro-batch-size 4 {flags} --json".split()).json["notes"]
    found = [note.partition("may concern the batch: ")[2] for note in notes if "may concern" in note]
    assert found == ([] if doubtful is None else [doubtful])


def test_the_arguments_of_nemo_s_factory_are_read(cli):
    argv = ["nemo", "llm", "pretrain", "--factory", "llama3_8b(num_nodes=128, num_gpus_per_node=8, name='x=1')"]
    batch = ["data.micro_batch_size=4", "data.global_batch_size=4096"]
    for line in (argv, [*argv[:3], f"--factory={argv[4]}"]):
        found = cli("plan", *line, *batch, "--json").json
        assert (found["nodes"], found["devices"], found["accumulation_steps"]) == (128, 1024, 1)
        assert cli("plan", *line, *batch, "trainer.num_nodes=4", "--json").json["devices"] == 32  # a typed key wins


def test_a_key_without_a_value_is_an_error(cli):
    ran = cli("plan", "data.micro_batch_size=", "data.global_batch_size=16")
    assert ran.code == 2 and "data.micro_batch_size= has no value" in ran.err


def test_a_chosen_number_is_not_called_derived(cli):
    found = cli("plan", "--global-batch-size", "512", "--micro-batch-size", "4", "--json").json
    assert found["sources"]["accumulation_steps"] == "default" and found["sources"]["data_parallel_size"] == "derived"


@pytest.mark.parametrize(
    "content", ["{}", '{"trials": 5}', '{"trials": [5]}', '{"trials": [{"status": "fits", "step_seconds": 1}]}']
)
def test_a_bad_probe_file_is_refused(cli, tmp_path, content):
    probe = tmp_path / "probe.json"
    probe.write_text(content)
    for verb in ("plan", "ramp"):
        ran = cli(
            verb,
            "--global-batch-size",
            "96",
            "--nodes",
            "2",
            "--devices-per-node",
            "1",
            "--micro-batch-size",
            "1",
            "--from-probe",
            str(probe),
            "--json",
        )
        assert ran.code == 2 and ran.json["error"]["type"] == "ConfigError"


def test_megatrons_expert_flags_as_they_are(cli):
    line = (
        "--global-batch-size 32 --micro-batch-size 1 --devices 8 --tensor-model-parallel-size 2 "
        "--expert-model-parallel-size 8 --expert-tensor-parallel-size"
    )
    assert cli("plan", *line.split(), "1", "--json").json["accumulation_steps"] == 8
    refused = cli("plan", *line.split(), "2")
    assert refused.code == 0 and "Megatron refuses 8 devices" in refused.out


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("--no-shard --no-checkpoint-activations", "--checkpoint-activations, --no-shard: needs --model or --task"),
        ("--device h100 --probe", "--device, --probe: needs --model or --task"),
        ("--model m --probe --context 5MiB --no-shard", "--context has no effect with probe"),
    ],
)
def test_flags_of_a_model_are_refused_where_they_have_no_effect(cli, line, named):
    ran = cli("plan", "--global-batch-size", "8", *line.split())
    assert ran.code == 2 and named.replace("--checkpoint", "--no-checkpoint") in ran.err, ran.err


def test_a_probed_plan_uses_no_size_that_did_not_run(cli, monkeypatch, tmp_path):
    asked: dict[str, object] = {}

    def probe(target, **options):
        asked.update(options)
        return probed([Trial(8, "fits", "throughput", step_seconds=1.0)], 8, recommended=8)

    monkeypatch.setattr(import_module("batchwright.probe.prober"), "probe", probe)
    (tmp_path / "train.py").write_text("def task(): ...")
    line = f"--task {tmp_path / 'train.py'}:task --probe --global-batch-size 1024 --devices 2".split()
    ran = cli("plan", *line, "--max-micro-batch-size", "512", "--json")
    assert ran.code == 0, ran.out + ran.err
    assert asked["max"] == 512 and ran.json["micro_batch_size"] == 8
    assert ran.json["sources"]["max_micro_batch_size"] == "probed"
    assert any("DDP's buckets" in note for note in ran.json["notes"])
    assert set(ran.json["settings"]) == {"per_device_train_batch_size", "gradient_accumulation_steps"}
    assert cli("plan", *line, "--micro-batch-size", "16").code == 2
    monkeypatch.setattr("batchwright.estimate.model.find_spec", lambda name: True)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    model = f"--model {tmp_path} --sequence-length 8 --lora 4 --precision bf16-pure --probe --global-batch-size 8"
    shown = cli("plan", *model.split()).out
    assert "peft.LoraConfig(r=4" in shown and 'from_pretrained(..., dtype="bfloat16")' in shown


def probed(trials, largest, recommended, notes=()):
    return Probe(tuple(trials), largest, largest + 1, recommended, recommended, recommended, "none", notes=notes)


@pytest.mark.parametrize(
    ("flags", "recommended", "micro", "said"),
    [
        ("", 16, 16, "The probe recommends micro_batch_size 16, and 64 is the largest that ran"),
        ("--global-batch-size 12", 16, 12, "micro_batch_size 12 did not run itself"),
        (
            "--micro-batch-size 64",
            16,
            64,
            "ran out of memory while its speed",
        ),  # the user's own decision, with the note
        ("", None, None, "ran out of memory while its speed"),
    ],
)
def test_a_probed_plan_follows_the_probes_verdict(cli, monkeypatch, tmp_path, flags, recommended, micro, said):
    trials = [
        Trial(64, "fits", "limit", 990, 1000),
        *(Trial(size, "fits", "throughput", 700, step_seconds=size / 100) for size in (1, 16)),
        Trial(64, "oom", "throughput"),
    ]
    note = "micro_batch_size 64 fits, but ran out of memory while its speed was measured."
    made = probed(trials, 64, recommended, (note,))
    monkeypatch.setattr(import_module("batchwright.probe.prober"), "probe", lambda target, **options: made)
    (tmp_path / "train.py").write_text("def task(): ...")
    line = f"--task {tmp_path / 'train.py'}:task --probe --global-batch-size 64 --devices 1 --memory 1GiB {flags}"
    ran = cli("plan", *line.split(), "--json")
    assert ran.code == (0 if recommended else 3), ran.out + ran.err
    if micro:
        assert ran.json["micro_batch_size"] == micro and note in ran.json["notes"]
    assert said in ran.out


def test_a_margin_of_zero_is_the_default(cli):
    ran = cli("plan", "--global-batch-size", "8", "--task", "missing.py:task", "--memory", "1GiB", "--margin", "0")
    assert ran.code == 2 and "missing.py" in ran.err and "--margin" not in ran.err
