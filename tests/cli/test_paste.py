"""Whole command lines of other tools."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.cli.paste import unpaste

OWN = {"--json": False, "--nodes": True, "--global-batch-size": True}


def rewritten(line: str) -> tuple[str, str]:
    kept, left = unpaste(line.split(), OWN, lambda key: f"--{key.replace('_', '-')}" in OWN)
    return " ".join(kept), " ".join(left)


@pytest.mark.parametrize(
    ("line", "kept", "left"),
    [
        (
            "nemo llm pretrain --factory llama3_8b data.micro_batch_size=4 data.global_batch_size=16",
            "data.micro_batch_size=4 data.global_batch_size=16",
            "nemo llm pretrain --factory llama3_8b",
        ),
        (
            "python train.py --per_device_train_batch_size 2 --gradient_accumulation_steps=8 --bf16 --lr 1e-5",
            "per_device_train_batch_size=2 gradient_accumulation_steps=8",
            "python train.py --bf16 --lr 1e-5",
        ),
        (
            "/usr/bin/python3 -m MaxText.train configs/base.yml per_device_batch_size=4 run_name=x",
            "per_device_batch_size=4 run_name=x",
            "/usr/bin/python3 -m MaxText.train configs/base.yml",
        ),
        ("torchrun --nproc-per-node=8 --nnodes 2 t.py", "nproc_per_node=8 nnodes=2", "torchrun t.py"),
        ("nemo x ++data.micro_batch_size=4 +y=1", "data.micro_batch_size=4 y=1", "nemo x"),
        ("--json nemo x data.micro_batch_size=4 --nodes 3", "--json data.micro_batch_size=4 --nodes 3", "nemo x"),
        ("--nodes 3 nemo x --json y", "--nodes 3 --json", "nemo x y"),
        ("python t.py --global_batch_size 64 --nodes=2", "global_batch_size=64 --nodes=2", "python t.py"),
        # environment variables only before the command
        ("OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc-per-node=2 t.py", "nproc_per_node=2",
         "OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES=0,1 torchrun t.py"),
        ("OMP_NUM_THREADS=1 micro_batch_size=2", "OMP_NUM_THREADS=1 micro_batch_size=2", ""),
        # srun: its own short flags, with or without a space
        ("srun -N 4 -n 32 python t.py -n 5 -N6", "nnodes=4 ntasks=32", "srun python t.py -n 5 -N6"),
        ("srun -N4 -n32 t --x 1 -n 5", "nnodes=4 ntasks=32", "srun t --x 1 -n 5"),
        ("/usr/bin/srun -p gpu -n=32 -N 4 --ntasks-per-node=8 ./t -n 5",
         "ntasks=32 nnodes=4 ntasks_per_node=8", "/usr/bin/srun -p gpu ./t -n 5"),
        ("srun --exclusive ./t -n 5", "", "srun --exclusive ./t -n 5"),
        ("srun --mpi pmix -o out -N 2 t -n 5", "nnodes=2", "srun --mpi pmix -o out t -n 5"),
        ("srun -N", "", "srun -N"),
        ("srun -N -n 2", "ntasks=2", "srun -N"),
        ("python t.py -N 4 -n 32", "", "python t.py -N 4 -n 32"),
        # tasks that start the ranks are not ranks
        ("srun -N 4 -n 4 torchrun --nproc-per-node=8 t.py", "nnodes=4 nproc_per_node=8", "srun -n 4 torchrun t.py"),
        ("srun -N4 --ntasks-per-node 1 python -m torch.distributed.run --nproc-per-node=8 t.py",
         "nnodes=4 nproc_per_node=8", "srun --ntasks-per-node 1 python -m torch.distributed.run t.py"),
        # not pasted: only spellings that cannot be ours are rewritten
        ("--per_device_train_batch_size 2 --nodes 4", "per_device_train_batch_size=2 --nodes 4", ""),
        ("--unknown 3 file.yaml --nodes nemo", "--unknown 3 file.yaml --nodes nemo", ""),
        ("", "", ""),
        ("nemo", "", "nemo"),
        ("--nodes", "--nodes", ""),
        ("-- nemo", "-- nemo", ""),
        ("-N 4", "-N 4", ""),
    ],
)  # fmt: skip
def test_lines_of_other_tools(line, kept, left):
    assert rewritten(line) == (kept, left)


@given(
    st.lists(
        st.sampled_from(
            [
                "nemo",
                "srun",
                "torchrun",
                "t.py",
                "--json",
                "--nodes",
                "--nnodes",
                "--x",
                "-N",
                "-n",
                "-N4",
                "-n=5",
                "a=b",
                "--",
                "-",
                "",
                "3",
                "=",
            ]
        ),
        max_size=8,
    )
)
def test_every_argument_is_kept_or_listed(argv):
    kept, left = unpaste(argv, OWN, lambda key: False)

    def pieces(argv):  # flags by their new names; joined ones are split
        names = {"nnodes": "--nnodes", "-N": "--nnodes", "ntasks": "-n"}
        parts = [names.get(part, part) for word in argv for part in word.replace("-N4", "-N=4").split("=") if part]
        return sorted(parts)

    assert pieces([*kept, *left]) == pieces(argv)


@pytest.mark.parametrize(
    ("slip", "meant"),
    [
        ("--tensor-modle-parallel-size 2", "tensor_model_parallel_size"),
        ("--per_device_train_batch_sise 4", "per_device_train_batch_size"),
    ],
)
def test_a_launcher_does_not_hide_a_frameworks_misspelt_flag(cli, slip, meant):
    line = f"torchrun --nproc-per-node 8 train.py {slip} --micro-batch-size 2 --global-batch-size 64"
    refused = cli("plan", *line.split())
    assert refused.code == 2 and f"Did you mean {meant}" in refused.err


@pytest.mark.parametrize(
    "start", ["env A=1 B=2", "nohup", "uv run", "uv run --with x", "env A=1 nohup", "OMP_NUM_THREADS=1", "nice -n 5"]
)
@pytest.mark.parametrize(
    "launcher", ["torchrun --nproc-per-node 8", "python -m torch.distributed.run --nproc-per-node 8"]
)
def test_what_starts_a_launcher_is_passed_over(cli, start, launcher):
    line = f"{start} {launcher} train.py --per_device_train_batch_size 2"
    assert cli("plan", *line.split(), "--json").json["global_batch_size"] == 16


@pytest.mark.parametrize("triple", [["32 8 9384"], ["32", "8", "9384"], ["32,8,9384"]])
def test_megatrons_triple_is_read_in_every_way_it_is_written(cli, triple):
    argv = ["python", "pretrain_gpt.py", "--micro-batch-size", "4", "--global-batch-size", "88", "--rampup-batch-size"]
    stages = cli("ramp", *argv, *triple, "--devices", "2", "--json").json["stages"]
    assert [stage["global_batch_size"] for stage in stages] == [32, 40, 48, 56, 64, 72, 80, 88]


def test_a_batch_that_shrinks_in_megatron_is_rounded_down(cli):
    line = "python pretrain_gpt.py --micro-batch-size 4 --global-batch-size 30 --decrease-batch-size-if-needed"
    assert cli("plan", *line.split(), "--devices", "3", "--json").json["global_batch_size"] == 24


def test_a_negative_number_is_the_value_of_the_flag_before_it():
    line = "python train.py --max_steps -1 --lr -0.5 --bf16 -x --per_device_train_batch_size 4"
    kept, _ = unpaste(line.split(), {}, lambda key: False, everything=True)
    assert kept == ["max_steps=-1", "lr=-0.5", "bf16=true", "per_device_train_batch_size=4"]
