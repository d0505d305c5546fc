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


def test_each_is_decided_by_the_flag_and_not_by_the_number_of_files(cli, tmp_path):
    other, file, broken = (tmp_path / name for name in ("other.yaml", "sft.yaml", "broken.yaml"))
    other.write_text("hello: world\n")
    file.write_text(HF)
    broken.write_text("a: [1\n")
    ran = cli("check", "--each", str(other))
    assert ran.code == 0 and "no framework" in ran.out  # a hook that gets one file of no concern
    assert cli("check", str(other)).code == 2
    [one] = cli("check", "--each", str(file), "--devices", "8", "--json").json["configurations"]
    assert one["file"] == str(file) and one["ok"]
    ran = cli("check", "--each", str(broken), str(file), "--devices", "8")
    assert ran.code == 5 and f"{broken}: not ok: it cannot be read" in ran.out and "256 = 4 micro" in ran.out
    found = cli("check", "--each", str(file), str(broken), "--devices", "8", "--json").json
    assert not found["ok"] and [one["file"] for one in found["unreadable"]] == [str(broken)]
    for flag in (("--devices", "x"), ("--from", "nothing")):
        assert cli("check", "--each", str(file), *flag).code == 2


def test_a_folder_whose_name_has_py_in_it_is_no_task(cli, tmp_path):
    folder = tmp_path / ".pyenv"
    folder.mkdir()
    (folder / "hf.yaml").write_text(HF)
    assert cli("check", str(folder / "hf.yaml"), "--devices", "8").code == 0


def test_a_list_of_flags_without_a_program(cli):
    flags = "--micro-batch-size 4 --global-batch-size 512 --tensor-model-parallel-size 2 --bf16 --devices 8"
    for line in (flags, flags.replace("--tensor-model-parallel-size 2 ", "") + " --tensor-model-parallel-size=2"):
        ran = cli("check", *line.split())
        assert ran.code == 0 and "512 = 4 micro × 32 accumulation × 4 data-parallel" in ran.out, ran
        assert "1 other key passed over" in ran.out
    assert cli("convert", *flags.split(), "--to", "nemo").code == 0
    ran = cli("check", "--micro-batch-size", "4", "--devices", "8")
    assert ran.code == 2 and "put the program in front" in ran.err
    layers = "--num-layers 32 --num-layers-per-virtual-pipeline-stage 2 --pipeline-model-parallel-size 4"
    planned = cli("plan", *flags.replace("--bf16 ", "").split(), *layers.split(), "--json")
    assert planned.json["data_parallel_size"] == 1
    assert "No such option" in cli("plan", *flags.split()).err  # not a pasted line: a flag of nobody is an error


MEGATRON = "pretrain_gpt.py --micro-batch-size 2 --global-batch-size 128"


@pytest.mark.parametrize(
    ("line", "equation"),
    [
        (f"srun -N 4 --ntasks-per-node=8 python {MEGATRON}", "128 = 2 micro × 2 accumulation × 32 data-parallel"),
        (f"srun -N4 -n 16 python {MEGATRON}", "128 = 2 micro × 4 accumulation × 16 data-parallel"),
        (
            f"env A=1 nohup uv run torchrun --nproc_per_node=8 --nnodes=2 {MEGATRON}",
            "× 4 accumulation × 16 data-parallel",
        ),
        (
            f"ray job submit --address=http://x -- torchrun --nproc-per-node 8 {MEGATRON}",
            "accumulation × 8 data-parallel",
        ),
        (f"mpirun -np 16 -x A=1 python {MEGATRON}", "128 = 2 micro × accumulation × data-parallel"),
        ("composer -n 8 train.py mpt.yaml", "1024 = 8 micro × 16 accumulation × 8 data-parallel"),
        ("llamafactory-cli train lf.yaml --num_processes 4", "32 = 8 micro × 1 accumulation × 4 data-parallel"),
        ("run.sh --devices 8", "128 = 2 micro × 8 accumulation × 8 data-parallel"),
    ],
)
def test_command_lines_as_they_are_pasted(cli, tmp_path, monkeypatch, line, equation):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mpt.yaml").write_text(
        "max_seq_len: 2048\nglobal_train_batch_size: 1024\ndevice_train_microbatch_size: 8\n"
    )
    (tmp_path / "lf.yaml").write_text("stage: sft\ntemplate: llama3\nfinetuning_type: lora\n")  # the defaults
    (tmp_path / "run.sh").write_text(f"#!/bin/bash\nset -x\nexport A=1\npython {MEGATRON} \\\n  --save x $@\n")
    ran = cli("check", *line.split())
    assert ran.code == 0 and equation in ran.out, ran.out


def test_a_file_that_a_command_line_names_and_that_is_not_here(cli, tmp_path):
    ran = cli("check", *"llamafactory-cli train nothing.yaml".split())
    assert ran.code == 2 and "nothing.yaml is not a file here" in ran.err
    ran = cli("check", *"python train.py --config-name=gpt.yaml trainer.devices=8 data.micro_batch_size=4".split())
    assert ran.code == 0 and "gpt.yaml is not a file here, so its keys are not read" in " ".join(ran.out.split())


def test_ranks_are_shown_where_the_batch_is_not_known(cli, tmp_path):
    file = tmp_path / "accelerate.yaml"
    file.write_text("compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nnum_processes: 8\n")
    assert "global batch = micro × 1 accumulation × 8 data-parallel\n" in cli("check", str(file)).out


def test_two_keys_for_one_way_to_split_a_replica(cli):
    """verl 0.9.1: the key of fsdp_config counts, and the old one where it is above 1 (workers/config/actor.py)."""
    actor = "actor_rollout_ref.actor"
    keys = [f"{actor}.ppo_mini_batch_size=64", f"{actor}.ppo_micro_batch_size_per_gpu=4", "trainer.n_gpus_per_node=8"]
    for old, new in ((1, 4), (4, 1), (4, 4)):
        given = [
            f"{actor}.ulysses_sequence_parallel_size={old}",
            f"{actor}.fsdp_config.ulysses_sequence_parallel_size={new}",
        ]
        ran = cli("check", *keys, *given, "data.train_batch_size=64")
        assert ran.code == 0 and "on 2 ranks" in ran.out, ran.out


def test_a_wrong_flag_is_an_error_of_the_command_not_of_the_configuration(cli, tmp_path):
    file = tmp_path / "hf.yaml"
    file.write_text(HF)
    for flag in ("--devices", "--sequence-length"):
        ran = cli("check", str(file), flag, "x")
        assert ran.code == 2 and ran.err.startswith(f"error: {flag}='x' is not a number"), ran.err


def test_every_line_fits_a_narrow_terminal(cli, tmp_path, monkeypatch):
    monkeypatch.setattr("batchwright.cli.text._terminal", lambda: 44)
    file = tmp_path / "hf.yaml"
    file.write_text(HF)
    for line in (["check"], ["convert", "--to", "deepspeed"]):
        ran = cli(*line, str(file), "--devices", "8")
        assert max(map(len, ran.out.splitlines())) <= 60, ran.out  # a key is never broken


def test_files_that_name_each_other(cli, tmp_path):
    one, other = tmp_path / "one.yaml", tmp_path / "other.yaml"
    one.write_text(HF + "deepspeed: other.yaml\n")
    other.write_text("train_batch_size: 256\ndeepspeed: one.yaml\n")
    for verb in ("check", "plan"):
        ran = cli(verb, str(one), "--devices", "8")
        assert ran.code == 0 and "256 = 4 micro × 8 accumulation × 8 data-parallel" in ran.out, ran


def test_a_file_that_a_key_names_counts_in_a_plan_too(cli, tmp_path):
    host, other = tmp_path / "hf.yaml", tmp_path / "ds.json"
    host.write_text(HF)
    other.write_text('{"train_batch_size": 128}')
    for verb, code in (("check", 5), ("plan", 2)):
        ran = cli(verb, str(host), f"deepspeed={other}", "--devices", "8")
        assert ran.code == code and "128" in ran.out + ran.err, ran


@pytest.mark.parametrize(
    "text",
    [
        'train_iters: 5\nmicro_batch_size: 2\nseq_length: 8\nstep_batch_size_schedule: "0:64 1M:128"\n',
        "trainer:\n  mp: f32\n  per_device_parallelism: 2\n  train_batch_size: [{start: 0, value: 64}, {start: 9, value: 128}]\n",
    ],
)
def test_a_plan_of_a_ramp_is_its_last_stage_as_in_check(cli, tmp_path, text):
    file = tmp_path / "c.yaml"
    file.write_text(text)
    for verb in ("check", "plan"):
        out = cli(verb, str(file), "--devices", "8").out
        assert "128 = 2 micro × 8 accumulation × 8 data-parallel" in out, out


TRAIN = "--micro-batch-size 1 --seq-length 4096 --lr 1e-4 --train-iters 100"
RUN = "torchrun --nproc_per_node 8 pretrain_gpt.py"
GLOBAL = "--global-batch-size 64"


@pytest.mark.parametrize(
    "script",
    [
        f'TRAIN=({TRAIN})\n{RUN} "${{TRAIN[@]}}" {GLOBAL}\n',
        f'TRAIN=(\n  {TRAIN}  # the batch\n);\n{RUN} "${{TRAIN[@]}}" {GLOBAL}\n',
        f'export TRAIN=({TRAIN} --save "$(date -u)")\n{RUN} ${{TRAIN[*]}} {GLOBAL}\n',
        f'TRAIN=(--lr 1)\nTRAIN+=({TRAIN})\nALL=("${{TRAIN[@]}}" --bf16)\n{RUN} "${{ALL[@]}}" {GLOBAL}\n',
        f'TRAIN=" {TRAIN} "\n{RUN} $TRAIN {GLOBAL}\n',
        f'local TRAIN="\n {TRAIN} \\\n --bf16\n";\nTRAIN="$TRAIN --fp8"\n{RUN} ${{TRAIN}} {GLOBAL} | tee log\n',
        f'TRAIN=({TRAIN})\nOTHER=(--micro-batch-size 4)\n{RUN} "${{TRAIN[@]}}" {GLOBAL}\n',
        f'TRAIN="{TRAIN}"\nCMD="{RUN} $TRAIN {GLOBAL}"\neval $CMD\n',
        f'TRAIN="{TRAIN}"\nsrun bash -c "{RUN} $TRAIN {GLOBAL}"\n',
        f'D=(--nproc_per_node 8)\ngo() {{\n  torchrun "${{D[@]}}" pretrain_gpt.py ${{T[@]}} {GLOBAL}\n}}\nT=({TRAIN})\ngo\n',
        f'export TRAIN="{TRAIN} {GLOBAL}"\nexport DIST="--nproc_per_node 8"\nbash pretrain_gpt.sh\n',
    ],
)
def test_flags_in_the_variables_of_a_script(cli, tmp_path, script):
    (tmp_path / "run.sh").write_text(script)
    found = cli("check", str(tmp_path / "run.sh"), "--json").json
    assert found["equation"] == "64 = 1 micro × 8 accumulation × 8 data-parallel"
    assert found["framework"] == "megatron-lm" and str(found["keys"]["train_iters"]) == "100"


def test_variables_of_a_script_that_repeat_each_other(cli, tmp_path):
    lines = [f'A{n}="$A{n - 1} $A{n - 1}"' for n in range(1, 64)]
    (tmp_path / "run.sh").write_text("\n".join(['A0="--micro-batch-size 4"', *lines, f"{RUN} $A63", ""]))
    ran = cli("check", str(tmp_path / "run.sh"))
    assert ran.code == 2 and "run.sh: its variables make more than 20,000 words" in ran.err


LINE = "deepspeed --num_gpus 8 train.py --per_device_train_batch_size 4 --deepspeed"


def test_a_configuration_that_a_key_names_and_that_cannot_be_read(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.json").write_text('{"train_batch_size": 64,}')
    (tmp_path / "data.json").write_text("[1, 2]")
    (tmp_path / "bad.yaml").write_text(HF + "deepspeed: bad.json\n")
    (tmp_path / "missing.yaml").write_text(HF + "deepspeed: missing.json\n")
    grpo = "num_generations: 8\nper_device_train_batch_size: 8\nsteps_per_generation: 1\n"
    (tmp_path / "grpo.yaml").write_text(grpo + "deepspeed: missing.json\n")
    for line in (f"{LINE} bad.json", "bad.yaml --devices 8", f"{LINE}_config=bad.json"):
        ran = cli("check", *line.split())
        assert ran.code == 2 and "bad.json is not valid JSON" in ran.err, line
    for line in (f"{LINE} missing.json", "missing.yaml --devices 8"):
        ran = cli("check", *line.split())
        assert ran.code == 0 and "missing.json is not a file here, so its keys are not read" in " ".join(
            ran.out.split()
        )
    for verb in (
        f"plan {LINE} missing.json",
        "plan missing.yaml --devices 8",
        f"ramp {LINE} missing.json --ramp 0:64",
        "rl grpo.yaml",
    ):
        said = " ".join(cli(*verb.split()).out.split())
        assert "missing.json is not a file here, so its keys are not read" in said, verb
    for line in (LINE, f"{LINE} --train_file data.json", f"{LINE} --train_file missing.json"):
        ran = cli("check", *line.split())
        assert ran.code == 0 and "not a file here" not in ran.out


def test_a_configuration_of_deepspeed_as_json_in_a_text(cli, tmp_path):
    for size, code in ((32, 0), (64, 5)):
        (tmp_path / "hf.yaml").write_text(
            f"per_device_train_batch_size: 4\ndeepspeed: '{{\"train_batch_size\": {size}}}'\n"
        )
        for words in (
            [*LINE.split(), f'{{"train_batch_size": {size}}}'],
            [str(tmp_path / "hf.yaml"), "--devices", "8"],
        ):
            ran = cli("check", *words)
            assert ran.code == code and str(size) in ran.out, ran.out


ACCELERATE = (
    "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\nnum_processes: 8\ngradient_accumulation_steps: 2\n"
    "deepspeed_config:\n  deepspeed_config_file: ds.json\n  zero3_init_flag: true\n"
)


def test_the_file_of_deepspeed_that_accelerates_configuration_names(cli, tmp_path):
    """As accelerate 1.15 does (accelerator.py: _prepare_deepspeed; utils/dataclasses.py: _deepspeed_config_checks)."""
    file, named = tmp_path / "acc.yaml", tmp_path / "ds.json"
    file.write_text(ACCELERATE)
    named.write_text(DEEPSPEED.replace("{", '{"gradient_accumulation_steps": 4, ', 1))
    ran = cli("check", str(file))
    assert ran.code == 0 and "64 = 2 micro × 4 accumulation × 8 data-parallel" in ran.out, ran.out
    assert ran.out.startswith("ok: Accelerate") and "give batch_size=N" not in ran.out
    named.write_text('{"gradient_accumulation_steps": "auto", "zero_optimization": {"stage": 3}}')
    assert "× 2 accumulation × 8" in cli("check", str(file)).out
    file.write_text(ACCELERATE + "  gradient_accumulation_steps: 2\n")
    said = " ".join(cli("check", str(file)).out.split())
    assert "excluded-key" in said and "deepspeed_config.deepspeed_config_file: Accelerate refuses both" in said
    named.unlink()
    assert "ds.json is not a file here" in " ".join(cli("check", str(file)).out.split())
    named.write_text('{"train_batch_size": 128}')
    line = "accelerate launch --num_processes 8 --use_deepspeed --deepspeed_config_file " + str(named)
    ran = cli("check", *line.split(), "train.py", "--per_device_train_batch_size", "4")
    assert ran.code == 5 and "128" in ran.out


@pytest.mark.parametrize("more", ["", "dataset_text_field: text\n", "template: llama3\nfinetuning_type: lora\n"])
def test_split_batches_divides_the_batch_per_device(cli, tmp_path, more):
    """As transformers 5.22 does (training_args.py: accelerator_config), with accelerate's BatchSamplerShard."""
    file, named = tmp_path / "hf.yaml", tmp_path / "acc.json"
    named.write_text('{"split_batches": true}')
    size = f"output_dir: x\nper_device_train_batch_size: 64\ngradient_accumulation_steps: 1\n{more}"
    for given in ("{split_batches: true}", "'{\"split_batches\": true}'", "acc.json"):
        file.write_text(f"{size}accelerator_config: {given}\n")
        ran = cli("check", str(file), "--devices", "8")
        assert ran.code == 0 and "64 = 8 micro × 1 accumulation × 8 data-parallel" in ran.out, (given, ran.out)
    ran = cli("check", str(file))
    assert ran.code == 0 and "64 = micro × 1 accumulation × data-parallel" in ran.out, ran.out
    said = " ".join(cli("check", str(file), "--devices", "24").out.split())
    assert (
        "per_device_train_batch_size=64 must be a multiple of the 24 processes" in said and "Nearest: 48 or 72" in said
    )
    file.write_text(f"{size}accelerator_config: {{split_batches: false}}\n")
    assert "512 = 64 micro" in cli("check", str(file), "--devices", "8").out
    line = "torchrun --nproc-per-node 8 train.py --per_device_train_batch_size 64 --accelerator_config"
    assert "64 = 8 micro" in cli("check", *line.split(), '{"split_batches": true}').out
    assert "64 = 8 micro" in cli("plan", *line.split(), str(named)).out


def test_files_of_no_framework_whose_keys_look_like_one(cli, tmp_path):
    tokens, model = tmp_path / "tokens.json", tmp_path / "config.json"
    tokens.write_text('{"tokens": {"color": "red"}}')
    model.write_text(
        '{"architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32, '
        '"model_type": "llama", "torch_dtype": "bfloat16", "vocab_size": 32000}'
    )
    ran = cli("check", "--each", str(tokens), str(model), "--json")
    assert ran.code == 0 and ran.json["no_framework"] == [str(tokens), str(model)]


ZERO3 = """{"fp16": {"enabled": "auto"}, "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
"zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}, "gradient_accumulation_steps": "auto",
"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "steps_per_print": 2000}"""


def test_sizes_of_deepspeed_that_another_program_fills_in(cli, tmp_path):
    """As in the documentation of transformers (docs/source/en/deepspeed.md: zero3.json)."""
    zero, hf = tmp_path / "zero3.json", tmp_path / "hf.yaml"
    zero.write_text(ZERO3)
    ran = cli("check", "--each", str(zero), "--devices", "8")
    said = " ".join(ran.out.split())
    assert ran.code == 0 and "global batch = micro × accumulation × 8 data-parallel" in said, said
    assert "train_batch_size, train_micro_batch_size_per_gpu, gradient_accumulation_steps: auto." in said
    hf.write_text(HF + "deepspeed: zero3.json\n")
    for words in ([str(hf)], [str(hf), str(zero)], [str(zero), str(hf)]):
        ran = cli("check", *words, "--devices", "8")
        assert ran.code == 0 and "256 = 4 micro × 8 accumulation × 8 data-parallel" in ran.out, ran.out
    assert "256 = 4 micro × 8" in cli("plan", str(hf), str(zero), "--devices", "8").out
    zero.write_text('{"zero_optimization": {"stage": 3}, "gradient_accumulation_steps": "auto"}')
    assert "DeepSpeed needs one of them" in " ".join(cli("check", str(zero)).out.split())


def test_accelerate_with_a_file_of_deepspeed_whose_sizes_are_auto(cli, tmp_path):
    (tmp_path / "zero3.json").write_text(ZERO3)
    file = tmp_path / "acc.yaml"
    file.write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\nnum_processes: 8\n"
        "deepspeed_config:\n  deepspeed_config_file: zero3.json\n"
    )
    ran = cli("check", str(file))
    assert ran.code == 0 and ran.out.startswith("ok: Accelerate")
    assert "global batch = micro × 1 accumulation × 8 data-parallel" in ran.out
    for verb in ("check", "plan"):
        assert "32 = 4 micro × 1 accumulation × 8 data-parallel" in cli(verb, str(file), "batch_size=4").out


def test_a_batch_of_deepspeed_that_contradicts_split_batches_without_devices(cli, tmp_path):
    file = tmp_path / "hf.yaml"
    text = "output_dir: x\nper_device_train_batch_size: 64\ngradient_accumulation_steps: 2\n"
    for size, code in ((128, 0), (100, 5)):
        (tmp_path / "ds.json").write_text(f'{{"train_batch_size": {size}}}')
        file.write_text(text + "accelerator_config: {split_batches: true}\ndeepspeed: ds.json\n")
        ran = cli("check", str(file))
        assert ran.code == code, ran.out
        assert code == 0 or "global_batch_size has two different values" in " ".join(ran.out.split())


def test_a_value_that_is_made_of_several_keys_keeps_its_name_in_messages(cli, tmp_path):
    hf, titan = tmp_path / "hf.yaml", tmp_path / "titan.toml"
    hf.write_text("output_dir: x\nper_device_train_batch_size: 64\ngradient_accumulation_steps: 2\n")
    hf.write_text(hf.read_text() + "accelerator_config: {split_batches: true}\n")
    said = cli("plan", str(hf), "--devices", "8", "--global-batch-size", "512").err
    assert "micro_batch_size 8" in said and "or micro_batch_size=32" in said and "split_batches" not in said
    titan.write_text(
        "[training]\nlocal_batch_size = 2\nseq_len = 8\n[parallelism]\ndata_parallel_replicate_degree = 1\n"
        "data_parallel_shard_degree = 8\ntensor_parallel_degree = 2\n"
    )
    said = cli("plan", str(titan), "--devices", "32").err
    assert said.startswith("error: data_parallel_size=8 contradicts 32 devices"), said


STAGE = '"zero_optimization": {"stage": 3}'


@pytest.mark.parametrize(
    ("host", "said"),
    [
        ("per_device_train_batch_size: 2\n", "accumulation_steps has two different values: 1 (Hugging Face's default) and 4"),
        ("gradient_accumulation_steps: 4\n", "micro_batch_size has two different values: 8 (Hugging Face's default) and 2"),
        ("per_device_train_batch_size: 2\nstage: sft\ntemplate: llama3\ncutoff_len: 2048\n",
         "accumulation_steps has two different values: 1 (LLaMA-Factory's default) and 4"),
        ("per_device_train_batch_size: 2\ngradient_accumulation_steps: 8\n", "accumulation_steps has two different values: 8"),
        ("per_device_train_batch_size: 2\ngradient_accumulation_steps: 4\n", None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("inline", [True, False])
def test_values_of_deepspeed_are_compared_with_those_of_the_trainer_and_its_defaults(cli, tmp_path, host, said, inline):
    """As transformers 5.22 does (integrations/deepspeed.py: fill_match)."""
    file = tmp_path / "hf.yaml"
    ds = f'{{"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, {STAGE}}}'
    (tmp_path / "ds.json").write_text(ds)
    file.write_text(f"output_dir: x\nlogging_steps: 1\n{host}deepspeed: {ds if inline else 'ds.json'}\n")
    for verb in ("check", "plan"):
        ran = cli(verb, str(file), "--devices", "8")
        shown = " ".join((ran.out + ran.err).split()).replace("--accumulation-steps", "accumulation_steps")
        shown = shown.replace("--micro-batch-size", "micro_batch_size")
        assert (ran.code == 0) == (said is None) and (said or "64 = 2 micro × 4 accumulation") in shown, shown
    if said and not inline and "per_device" in host:  # otherwise no flag is the Trainer's only
        line = "deepspeed --num_gpus 8 train.py --deepspeed " + str(tmp_path / "ds.json")
        for flag in host.splitlines():
            line += " --" + flag.replace(": ", " ")
        ran = cli("check", *line.split())
        assert ran.code == 5 and said in " ".join(ran.out.split()), ran.out


def test_a_flag_of_batchwright_wins_over_the_file_of_deepspeed(cli, tmp_path):
    (tmp_path / "ds.json").write_text('{"train_batch_size": 128}')
    (tmp_path / "hf.yaml").write_text("output_dir: x\nper_device_train_batch_size: 4\ndeepspeed: ds.json\n")
    ran = cli("plan", str(tmp_path / "hf.yaml"), "--devices", "8", "--global-batch-size", "64")
    assert ran.code == 0 and "64 = 4 micro × 2 accumulation × 8" in ran.out, ran


@pytest.mark.parametrize(("said", "steps"), [("4", 4), ('"auto"', 2), (None, 1)])
@pytest.mark.parametrize("flags", [True, False])
def test_accelerate_takes_the_accumulation_of_the_file_of_deepspeed(cli, tmp_path, said, steps, flags):
    """As accelerate 1.15 does (accelerator.py: _prepare_deepspeed; utils/dataclasses.py: DeepSpeedPlugin)."""
    named, file = tmp_path / "ds.json", tmp_path / "acc.yaml"
    accumulation = f'"gradient_accumulation_steps": {said}, ' if said else ""
    named.write_text(f"{{{accumulation}{STAGE}}}")
    file.write_text(ACCELERATE.replace("gradient_accumulation_steps: 2\n", ""))
    line = ["accelerate", "launch", "--gradient_accumulation_steps", "2"]
    line += ["--num_processes", "8", "--use_deepspeed", "--deepspeed_config_file", str(named)] * flags
    line += ["--config_file", str(file)] * (not flags)
    ran = cli("check", *line, "train.py")
    said_all = " ".join(ran.out.split())
    assert ran.code == 0 and ran.out.startswith("ok: Accelerate"), ran.out
    assert f"global batch = micro × {steps} accumulation × 8 data-parallel" in said_all
    assert ("Accelerate takes" in said_all) == (steps != 2)


def test_accelerate_refuses_auto_beside_a_file_of_deepspeed_too(cli, tmp_path):
    (tmp_path / "ds.json").write_text(f"{{{STAGE}}}")
    (tmp_path / "acc.yaml").write_text(ACCELERATE + "  gradient_accumulation_steps: auto\n")
    ran = cli("check", str(tmp_path / "acc.yaml"))
    assert ran.code == 5 and "excluded-key" in ran.out


@pytest.mark.parametrize("inline", [True, False])
def test_messages_name_the_keys_of_deepspeed(cli, tmp_path, inline):
    file = tmp_path / "hf.yaml"
    (tmp_path / "ds.json").write_text('{"train_batch_size": 100}')
    file.write_text(HF + f"deepspeed: {'{train_batch_size: 100}' if inline else 'ds.json'}\n")
    said = " ".join(cli("check", str(file), "--devices", "8").out.split())
    assert "- train_batch_size=100 contradicts per_device_train_batch_size 4 × gradient_accumulation_steps 8" in said
    assert "global_batch_size 100" in said  # the row of the key


def test_a_file_is_opened_from_here_before_it_is_looked_for_beside_the_one_that_names_it(cli, tmp_path, monkeypatch):
    """As transformers and Accelerate open it: by its path from the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf").mkdir()
    host, here, beside = (tmp_path / name for name in ("conf/hf.yaml", "z.json", "conf/z.json"))
    host.write_text(HF + "deepspeed: z.json\n")
    beside.write_text('{"gradient_accumulation_steps": 4, "train_batch_size": 128}')
    assert cli("check", "conf/hf.yaml", "--devices", "8").code == 5
    here.write_text('{"gradient_accumulation_steps": 8, "train_batch_size": 256}')
    ran = cli("check", "conf/hf.yaml", "--devices", "8")
    assert ran.code == 0 and "256 = 4 micro × 8" in ran.out, ran


def test_a_file_that_the_program_writes_is_not_its_configuration(cli, tmp_path):
    line = ["python", "train.py", "--per_device_train_batch_size", "4", "--save_config", str(tmp_path / "run.yaml")]
    for verb in ("check", "plan"):
        assert "not a file here" not in cli(verb, *line, "--devices", "8").out
    (tmp_path / "run.yaml").write_text("per_device_train_batch_size: 2\ngradient_accumulation_steps: 8\n")
    assert "32 = 4 micro × 1 accumulation" in cli("check", *line, "--devices", "8").out


@pytest.mark.parametrize("text", ["[draft] run", "{% for m in messages %}", "[1, 2"])
def test_the_text_of_a_flag_may_begin_with_a_bracket(cli, text):
    line = ["python", "train.py", "--per_device_train_batch_size", "4", "--output_dir", "o", "--run_name", text]
    for verb in ("check", "plan"):
        ran = cli(verb, *line, "--devices", "8")
        assert ran.code == 0 and "32 = 4 micro × 1 accumulation × 8" in ran.out, ran
    ran = cli("check", "--per_device_train_batch_size", "[4")
    assert ran.code == 2 and "is not plain YAML" in ran.err


def test_a_value_that_another_program_fills_in_is_given_as_an_argument_as_in_a_file(cli, tmp_path):
    file = tmp_path / "ds.json"
    file.write_text('{"gradient_accumulation_steps": "auto", "train_batch_size": "auto"}')
    arguments = ["--from", "deepspeed", "gradient_accumulation_steps=auto", "train_batch_size=auto"]
    for words in ([str(file)], arguments):
        ran = cli("check", *words)
        assert ran.code == 0 and "gradient_accumulation_steps, train_batch_size: auto." in " ".join(
            ran.out.split()
        ).replace("train_batch_size, gradient_accumulation_steps", "gradient_accumulation_steps, train_batch_size"), ran
    assert "× 8 accumulation" in cli("check", "per_device_train_batch_size=auto", "gradient_accumulation_steps=8").out
    ran = cli("plan", "micro_batch_size=auto", "--global-batch-size", "64", "--devices", "8")
    assert ran.code == 0 and "64 = " in ran.out


def test_a_key_whose_file_is_read_is_not_passed_over(cli, tmp_path):
    (tmp_path / "ds.json").write_text('{"train_batch_size": 256}')
    (tmp_path / "hf.yaml").write_text(HF + f"deepspeed: {tmp_path / 'ds.json'}\n")
    assert "1 other key passed over" in cli("check", str(tmp_path / "hf.yaml"), "--devices", "8").out  # output_dir
    said = " ".join(cli("plan", str(tmp_path / "hf.yaml"), "--devices", "8").out.split())
    assert "does not concern the batch: output_dir" in said and "deepspeed" not in said.partition("does not concern")[2]
