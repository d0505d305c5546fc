"""`batchwright convert` and `batchwright check CONFIG`: text, JSON, exit codes, and files that are edited."""

from __future__ import annotations

import json
import stat

import pytest
import yaml

HF = "output_dir: x  # where\nper_device_train_batch_size: 4\ngradient_accumulation_steps: 8\nwarmup_steps: 100\nlr: 1e-4\n"


@pytest.fixture
def sft(tmp_path):
    file = tmp_path / "sft.yaml"
    file.write_text(HF)
    return str(file)


def test_the_verdict_the_keys_and_what_is_left_out(cli, sft):
    ran = cli("convert", sft, "--to", "deepspeed", "--devices", "16")
    assert ran.code == 0
    assert ran.out.startswith("exact: Hugging Face (by ")
    assert "512 = 4 micro × 8 accumulation × 16 data-parallel" in ran.out
    assert '"train_batch_size": 512' in ran.out
    assert '"warmup_num_steps"' not in ran.out and "warmup of 100 steps" in ran.out  # there is no scheduler
    assert "2 other keys passed over" in ran.out


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ("yaml", "train_batch_size: 512\n"),
        ("json", '"train_batch_size": 512'),
        ("toml", "train_batch_size = 512\n"),
        ("keys", "train_batch_size=512\n"),
        ("flags", "--train_batch_size 512 \\\n"),
    ],
)
def test_every_format(cli, sft, form, said):
    assert said in cli("convert", sft, "--to", "deepspeed", "--devices", "16", "--format", form).out


def test_json_has_the_keys_others_rely_on(cli, sft):
    found = cli("convert", sft, "--to", "megatron-lm@0.17", "--devices", "16", "--json").json
    assert found["schema"] == 1 and found["status"] == "exact"
    assert (found["from"], found["to"], found["to_version"]) == ("huggingface", "megatron-lm", "0.17")
    assert found["keys"] == {"micro_batch_size": 4, "global_batch_size": 512, "lr_warmup_iters": 100}
    assert (found["differences"], found["left_out"], found["passed_over"]) == ([], [], 2)
    assert found["text"].splitlines()[0] == "--micro-batch-size 4 \\"


def test_a_pasted_line_becomes_another_frameworks_configuration(cli):
    line = "torchrun --nproc-per-node 8 pretrain_gpt.py --micro-batch-size 2 --global-batch-size 64 --bf16"
    ran = cli("convert", "--to", "levanter", *line.split(), "--json")
    assert ran.json["keys"] == {"trainer.train_batch_size": 64, "trainer.per_device_parallelism": 2}
    assert ran.json["passed_over_keys"] == ["bf16"]


def test_what_cannot_be_expressed_exits_with_5(cli):
    keys = (
        "data.micro_batch_size=4 data.global_batch_size=512 data.rampup_batch_size=[128,128,100000] trainer.devices=8"
    )
    ran = cli("convert", *keys.split(), "--to", "huggingface")
    assert ran.code == 5 and ran.out.startswith("not expressible: NeMo")
    assert "the batch would be 512 from the first step, not 128" in " ".join(ran.out.split())


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--to", "deepspeed"], "convert needs a configuration"),
        (["a=1", "--to", "nothing"], "is not a framework that batchwright reads"),
        (["a=1"], "--to NAME is required"),
        (["a=1", "--to", "deepspeed"], "belong to no framework"),
        (["per_device_train_batch_size=4", "--to", "megatron-lm"], "Give --devices, or --nodes and --devices-per-node"),
        (["per_device_train_batch_size=4", "--to", "deepspeed", "--dry-run"], "needs --into"),
        (["per_device_train_batch_size=4", "--to", "deepspeed@new"], "is not a version"),
        (["per_device_train_batch_size=4", "--to", "deepspeed", "--format", "x"], "is not one of yaml"),
    ],
)
def test_requests_that_cannot_be_read(cli, argv, said):
    ran = cli("convert", *argv)
    assert ran.code == 2 and said in ran.err


TARGET = """\
# my run
train_batch_size: 8   # old
zero_optimization:
  stage: 2  # keep
"""


def test_into_a_file_keeps_comments_and_makes_a_backup(cli, sft, tmp_path):
    file = tmp_path / "ds.yaml"
    file.write_text(TARGET)
    file.chmod(0o640)
    shown = cli("convert", sft, "--to", "deepspeed", "--devices", "16", "--into", file, "--dry-run")
    assert shown.code == 0 and file.read_text() == TARGET
    assert "-train_batch_size: 8   # old\n+train_batch_size: 512   # old" in shown.out
    ran = cli("convert", sft, "--to", "deepspeed", "--devices", "16", "--into", file)
    text = file.read_text()
    assert (
        ran.code == 0
        and "# my run\n" in text
        and "train_batch_size: 512   # old\n" in text
        and "stage: 2  # keep" in text
    )
    assert yaml.safe_load(text)["gradient_accumulation_steps"] == 8
    assert (tmp_path / "ds.yaml.bak").read_text() == TARGET
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    again = cli("convert", sft, "--to", "deepspeed", "--devices", "8", "--into", file, "--json").json
    assert again["written"] and again["backup"].endswith("ds.yaml.bak1")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ds.yaml", "ds.yaml.bak", "ds.yaml.bak1", "sft.yaml"]


def test_flags_of_convert_count_after_a_pasted_line(cli, tmp_path):
    file = tmp_path / "ds.json"
    file.write_text("{}\n")
    line = "torchrun --nproc-per-node 8 t.py --per_device_train_batch_size 4".split()
    ran = cli("convert", "--to", "deepspeed", *line, "--into", file, "--dry-run")
    assert ran.code == 0 and file.read_text() == "{}\n" and "train_batch_size" in ran.out
    assert [p.name for p in tmp_path.iterdir()] == ["ds.json"]


def test_into_a_new_file_and_through_a_link(cli, sft, tmp_path):
    new = tmp_path / "new.json"
    assert cli("convert", sft, "--to", "deepspeed", "--devices", "16", "--into", new).code == 0
    assert json.loads(new.read_text())["train_batch_size"] == 512
    link = tmp_path / "link.json"
    link.symlink_to(new)
    assert cli("convert", sft, "--to", "deepspeed", "--devices", "8", "--into", link).code == 0
    assert link.is_symlink() and json.loads(new.read_text())["train_batch_size"] == 256


def test_keys_of_the_file_that_mean_another_batch_are_said(cli, sft, tmp_path):
    file = tmp_path / "nemo.yaml"
    file.write_text("data:\n  rampup_batch_size: [64, 64, 10000]\n")
    argv = ["convert", sft, "--to", "nemo", "--devices", "16", "--into", file]
    for more in ([], ["--dry-run"]):
        ran = cli(*argv, *more)
        assert ran.code == 5 and ran.out.startswith("differs: ") and file.read_text().count("\n") == 2
        said = " ".join(ran.out.split())
        assert "as a whole means another batch" in said and "the batch is constant, and grows" in said
    assert cli(*argv, "--partial").code == 0 and "global_batch_size: 512" in file.read_text()


def test_line_ends_stay(cli, sft, tmp_path):
    file = tmp_path / "axolotl.yml"
    file.write_bytes(b"base_model: x\r\nmicro_batch_size: 1\r\n")
    assert cli("convert", sft, "--to", "axolotl", "--devices", "16", "--into", file).code == 0
    content = file.read_bytes()
    assert content.count(b"\n") == content.count(b"\r\n") > 2 and b"\r\r" not in content


def test_a_file_is_not_changed_by_half(cli, tmp_path):
    file = tmp_path / "hf.yaml"
    file.write_text(HF)
    argv = ["data.micro_batch_size=4", "data.global_batch_size=512", "data.rampup_batch_size=[128,128,100000]"]
    argv += ["trainer.devices=8", "--to", "huggingface", "--into", str(file)]
    refused = cli("convert", *argv)
    assert refused.code == 5 and file.read_text() == HF and "give --partial" in refused.out
    assert cli("convert", *argv, "--partial").code == 0
    assert "gradient_accumulation_steps: 16" in file.read_text()
    for name in ("x.txt", "x.sh"):
        assert cli("convert", *argv[:-1], str(tmp_path / name)).code == 2


def test_check_of_a_configuration_is_a_check_before_a_commit(cli, sft, tmp_path):
    assert cli("check", sft, "--devices", "8").code == 0
    bad = tmp_path / "ds.json"
    bad.write_text('{"train_batch_size": 100, "train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 1}}')
    ran = cli("check", bad, "--devices", "16")
    assert ran.code == 5 and ran.out.startswith("not ok: 1 error: DeepSpeed")
    assert "train_batch_size=100 is not a whole number of accumulation steps" in " ".join(ran.out.split())
    document = cli("check", bad, "--devices", "16", "--json").json
    assert (
        document["ok"] is False
        and document["framework"] == "deepspeed"
        and document["findings"][0]["nearest"] == [64, 128]
    )
    assert cli("check", bad, "--devices", "16", "--allow", "batch").code == 0
    assert cli("check", bad, "--devices", "16", "--allow", "bach").code == 2


def test_check_compares_with_an_earlier_configuration(cli, sft, tmp_path):
    new = tmp_path / "new.yaml"
    new.write_text(HF.replace("steps: 8", "steps: 32"))
    ran = cli("check", new, "--against", sft, "--devices", "8")
    assert ran.code == 5 and "warmup_steps=100 is as before" in " ".join(ran.out.split())


def test_two_configurations_of_one_job_are_checked_together(cli, sft, tmp_path):
    beside = tmp_path / "ds.json"
    beside.write_text(
        '{"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": "auto", "zero_optimization": {}}'
    )
    ran = cli("check", sft, beside)
    assert ran.code == 5 and "micro_batch_size has two different values: 4" in " ".join(ran.out.split())


@pytest.mark.parametrize(
    "start", ["accelerate launch --num_processes 8", "deepspeed --num_gpus 8", "srun -N 1 -n 8 python"]
)
def test_a_configuration_that_a_command_line_names_must_agree(cli, tmp_path, start):
    beside = tmp_path / "ds.json"
    beside.write_text('{"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}}')
    line = f"{start} train.py --output_dir x --deepspeed {beside} --gradient_accumulation_steps 4 --per_device_train_batch_size"
    ran = cli("check", *line.split(), "4")
    assert ran.code == 5 and "micro_batch_size has two different values" in " ".join(ran.out.split())
    good = cli("check", *line.split(), "2", "--json")
    assert good.code == 0 and good.json["equation"] == "64 = 2 micro × 4 accumulation × 8 data-parallel"


def test_flags_of_a_task_and_of_a_configuration_are_not_mixed(cli, sft):
    assert "--ranks: only for a task" in cli("check", sft, "--ranks", "2").err
    assert "only for a configuration" in cli("check", "train.py:task", "--devices", "2").err


def test_each_configuration_is_checked_by_itself(cli, sft, tmp_path):
    bad = tmp_path / "ds.json"
    bad.write_text('{"train_batch_size": 100, "train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 1}}')
    ran = cli("check", "--each", sft, bad, "--devices", "16", "--json")
    assert ran.code == 5
    assert [(c["framework"], c["ok"]) for c in ran.json["configurations"]] == [
        ("huggingface", True),
        ("deepspeed", False),
    ]
    assert cli("check", "--each", sft, sft, "--devices", "16").code == 0


def test_the_frameworks_are_listed(cli):
    listed = cli("convert", "--list-frameworks", "--json").json["frameworks"]
    assert len(listed) == 22 and {"name": "verl"}.items() <= next(d for d in listed if d["name"] == "verl").items()
    assert "torchtitan" in cli("convert", "--list-frameworks").out


def test_warmup_steps_of_deepspeed_need_a_scheduler(cli, sft, tmp_path):
    file = tmp_path / "ds.json"
    for text, there in (('{"scheduler": {"type": "WarmupLR"}}', True), ('{"zero_optimization": {"stage": 1}}', False)):
        file.write_text(text)
        assert cli("convert", sft, "--to", "deepspeed", "--devices", "16", "--into", str(file)).code == 0
        assert ("warmup_num_steps" in file.read_text()) is there


def test_an_axolotl_job_that_trains_on_responses_is_not_called_exact(cli, tmp_path):
    file = tmp_path / "axolotl.yml"
    file.write_text("base_model: x\nsequence_len: 2048\nrl: grpo\nmicro_batch_size: 4\n")
    ran = cli("convert", str(file), "--to", "huggingface", "--devices", "8")
    assert ran.code == 5 and "counts-responses" in ran.out
    assert "note: counts-responses" in cli("check", str(file), "--devices", "8").out


def test_the_whole_file_must_be_right(cli, sft, tmp_path):
    argv = ("convert", sft, "--devices", "8", "--to")
    nemo = tmp_path / "nemo.yaml"
    nemo.write_text("trainer:\n  strategy:\n    tensor_model_parallel_size: 3\n")
    ran = cli(*argv, "nemo", "--into", nemo)
    said = " ".join(ran.out.split())
    assert ran.code == 5 and f"{nemo} as a whole has no valid batch" in said and nemo.read_text().count("\n") == 3
    elastic = tmp_path / "ds.json"
    elastic.write_text('{"elasticity": {"enabled": true}}')
    ran = cli(*argv, "deepspeed", "--into", elastic)
    assert (
        ran.code == 5
        and "as a whole is wrong: " in " ".join(ran.out.split())
        and "train_batch" not in elastic.read_text()
    )
    assert cli(*argv, "deepspeed", "--into", elastic, "--partial").code == 0


def test_a_mark_of_the_encoding_stays(cli, sft, tmp_path):
    file = tmp_path / "ds.json"
    file.write_text("{}", encoding="utf-8-sig")
    assert cli("convert", sft, "--to", "deepspeed", "--devices", "8", "--into", file).code == 0
    assert file.read_bytes().startswith(b"\xef\xbb\xbf{") and '"train_batch_size": 256' in file.read_text("utf-8-sig")


def test_keys_to_write_by_hand_are_one_error(cli, sft, tmp_path):
    file = tmp_path / "ds.yaml"
    file.write_text("train_batch_size: &n 8\nmine: *n\n")
    ran = cli("convert", sft, "--to", "deepspeed", "--devices", "8", "--into", file)
    assert (
        ran.code == 2
        and ran.err.count("error:") == 1
        and "train_batch_size=256, train_micro" in " ".join(ran.err.split())
    )


def test_a_file_gets_the_keys_of_its_version(cli, sft, tmp_path):
    file = tmp_path / "titan.toml"
    file.write_text("[training]\nlocal_batch_size = 1  # per rank\nseq_len = 2048\n")
    ran = cli("convert", str(sft), "--to", "torchtitan", "--devices", "8", "--into", str(file))
    assert ran.code == 0, ran.out
    text = file.read_text()
    assert "local_batch_size = 4  # per rank" in text and "seq_len = 2048" in text and "tokens" not in text


def test_intervals_of_reinforcement_learning_are_compared_too(cli, tmp_path):
    old, new = tmp_path / "old.yaml", tmp_path / "new.yaml"
    text = "use_vllm: true\nper_device_train_batch_size: {}\nnum_generations: 8\nsave_steps: 100\nlogging_steps: 1\n"
    old.write_text(text.format(8))
    new.write_text(text.format(16))
    ran = cli("check", str(new), "--against", str(old), "--devices", "8")
    said = " ".join(ran.out.split())
    assert (
        ran.code == 5
        and "save_steps=100 is as before, and the batch was 64 and is 128" in said
        and "Nearest: 50" in said
    )
    assert "count optimizer steps of 128 responses: save_steps=100 (12,800 responses)" in said


GRPO = "num_generations=8 per_device_train_batch_size=8 gradient_accumulation_steps=4 steps_per_generation=4"


@pytest.mark.parametrize(
    ("to", "nodes", "each", "line"),
    [
        ("nemo", "trainer.num_nodes", "trainer.devices", "per_device_train_batch_size=4"),
        ("lightning", "trainer.num_nodes", "trainer.devices", "per_device_train_batch_size=4"),
        ("openrlhf", "actor.num_nodes", "actor.num_gpus_per_node", GRPO),
        ("verl", "trainer.nnodes", "trainer.n_gpus_per_node", GRPO),
        ("nemo-rl", "cluster.num_nodes", "cluster.gpus_per_node", GRPO),
    ],
)
def test_into_a_file_that_has_nodes_and_devices(cli, tmp_path, to, nodes, each, line):
    file = tmp_path / "into.yaml"
    section, other, last = *nodes.split("."), each.split(".")[1]

    def made(devices, *flags):
        file.write_text(f"{section}: {{{other}: 2, {last}: 8}}\n")
        ran = cli("convert", *line.split(), *devices.split(), "--to", to, "--into", str(file), "--json", *flags).json
        return ran, file.read_text()

    ran, text = made("--devices 16")
    assert ran["written"] and f"{section}: {{{other}: 2, {last}: 8" in text
    assert not any("nodes is not given" in one for one in ran["notes"])
    ran, text = made("--devices 32")
    assert f"{other}: 1, {last}: 32" in text
    [said] = [one for one in ran["notes"] if "nodes is not given" in one]
    assert f"{nodes} was 2 and is 1" in said and f"{each} was 8 and is 32" in said
    ran, text = made("--nodes 4 --devices-per-node 4")
    assert f"{other}: 4, {last}: 4" in text and not any("nodes is not given" in one for one in ran["notes"])


@pytest.mark.parametrize("devices", ["[0, 1, 2, 3, 4, 5, 6, 7]", "'0,1,2,3,4,5,6,7'", "8", "'8'"])
def test_into_a_file_that_lists_its_devices(cli, tmp_path, devices):
    file = tmp_path / "into.yaml"
    text = f"seed_everything: 1\ntrainer: {{num_nodes: 2, devices: {devices}}}\n"
    line = ["per_device_train_batch_size=4", "--to", "lightning", "--into", str(file), "--json"]
    file.write_text(text)
    ran = cli("convert", *line, "--devices", "16").json
    assert f"num_nodes: 2, devices: {devices}" in file.read_text()
    assert not any("nodes is not given" in one for one in ran["notes"])
    file.write_text(text)
    ran = cli("convert", *line, "--devices", "32").json
    assert "num_nodes: 1, devices: 32" in file.read_text()
    assert any("nodes is not given" in one for one in ran["notes"])
