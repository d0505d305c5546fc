"""`batchwright check CONFIG`: configurations of several files, and values that only the run knows."""

from __future__ import annotations

import pytest

HF = "output_dir: x\nper_device_train_batch_size: 4\ngradient_accumulation_steps: 8\n"
AXOLOTL = "base_model: m\nsequence_len: 2048\nmicro_batch_size: 4\ngradient_accumulation_steps: 8\n"
FACTORY = HF + "stage: sft\ntemplate: llama3\ncutoff_len: 2048\n"
DEEPSPEED = '{"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}, "bf16": {"enabled": true}}'


@pytest.mark.parametrize(
    ("host", "title"), [(HF, "Hugging Face"), (AXOLOTL, "Axolotl"), (FACTORY, "LLaMA-Factory")], ids=lambda one: one[:9]
)
@pytest.mark.parametrize("inline", [True, False])
def test_a_configuration_of_deepspeed_must_agree_with_the_one_that_names_it(cli, tmp_path, host, title, inline):
    file = tmp_path / "train.yaml"
    (tmp_path / "ds.json").write_text(DEEPSPEED)
    file.write_text(host + (f"deepspeed: {DEEPSPEED}\n" if inline else "deepspeed: ds.json\n"))
    ran = cli("check", str(file), "--devices", "8")
    assert ran.code == 5 and ran.out.startswith(f"not ok: 1 error: {title} ")
    assert "two different values" in " ".join(ran.out.split())
    (tmp_path / "ds.json").write_text(DEEPSPEED.replace("2,", "4,"))
    if not inline:
        assert cli("check", str(file), "--devices", "8").code == 0


def test_nearest_values_are_in_the_unit_of_the_key_that_is_named(cli, tmp_path):
    file = tmp_path / "titan.toml"
    file.write_text(
        "[training]\nlocal_batch_size = 8\nseq_len = 4096\n[parallelism]\ndata_parallel_replicate_degree = 2\n"
        "data_parallel_shard_degree = 4\ntensor_parallel_degree = 2\n"
    )
    said = " ".join(cli("check", str(file), "--devices", "24").out.split())
    assert "data_parallel_size=8 contradicts 24 devices" in said and "shard_degree=12" not in said
    tokens = ["training.num_tokens_per_microbatch_per_dp_rank=8192", "training.num_tokens_per_train_step=122880"]
    said = " ".join(cli("check", *tokens, "training.max_context_length=4096", "--devices", "8").out.split())
    assert "per_dp_rank 2 " not in said and "Nearest: 16" in said and "allow_ragged" not in said


@pytest.mark.parametrize(
    "words", ["--nproc_per_node gpu", "--nproc_per_node 8 --nnodes $NNODES", "--nproc_per_node 8 --nnodes 1:4"]
)
def test_devices_that_are_known_only_at_run_time_count_as_not_given(cli, words):
    line = f"torchrun {words} train.py --per_device_train_batch_size 4"
    ran = cli("check", *line.split())
    assert ran.code == 0 and "the number of devices is not given" in ran.out
    assert "is known only when the job runs" in " ".join(ran.out.split())
    assert "32 = 4 micro" in cli("check", "--devices", "8", *line.split()).out


def test_the_default_of_an_environment_variable_and_a_deleted_key(cli, tmp_path):
    file = tmp_path / "nemo.yaml"
    file.write_text(
        "trainer: {devices: '${oc.env:GPUS,8}', num_nodes: 1, accumulate_grad_batches: 2}\nexp_manager: {name: x}\n"
        "model: {micro_batch_size: 2, global_batch_size: 64}\n"
    )
    assert "accumulates-twice" in cli("check", str(file)).out
    ran = cli("check", str(file), "~trainer.accumulate_grad_batches")
    assert ran.code == 0 and "64 = 2 micro × 4 accumulation × 8 data-parallel" in ran.out


def test_keys_that_may_be_about_the_batch_are_named_when_they_are_passed_over(cli):
    said = cli("check", "per_device_train_batch_size=4", "output_dir=x", "my_batch_rows=3").out
    assert "2 other keys passed over" in said and "may be about the batch: my_batch_rows" in " ".join(said.split())


def test_flags_as_keys_of_a_section(cli, tmp_path):
    file = tmp_path / "model.yaml"
    file.write_text(
        "MODEL_ARGS:\n  --micro-batch-size: 4\n  --global-batch-size: 32\n  --tensor-model-parallel-size: 2\n"
    )
    assert "32 = 4 micro × 2 accumulation × 4 data-parallel" in cli("check", str(file), "--devices", "8").out


def test_each_goes_on_after_a_file_of_no_framework(cli, tmp_path):
    other, file = tmp_path / "other.yaml", tmp_path / "sft.yaml"
    other.write_text("hello: world\n")
    file.write_text(HF)
    ran = cli("check", "--each", str(other), str(file), "--devices", "8")
    assert ran.code == 0 and f"{other}: no framework" in ran.out and "256 = 4 micro" in ran.out
    found = cli("check", "--each", str(other), str(file), "--devices", "8", "--json").json
    assert found["no_framework"] == [str(other)] and len(found["configurations"]) == 1
