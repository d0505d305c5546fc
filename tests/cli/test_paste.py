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
        # not pasted: only spellings that cannot be ours are rewritten
        ("--per_device_train_batch_size 2 --nodes 4", "per_device_train_batch_size=2 --nodes 4", ""),
        ("--unknown 3 file.yaml --nodes nemo", "--unknown 3 file.yaml --nodes nemo", ""),
        ("", "", ""),
        ("nemo", "", "nemo"),
        ("--nodes", "--nodes", ""),
        ("-- nemo", "-- nemo", ""),
    ],
)
def test_lines_of_other_tools(line, kept, left):
    assert rewritten(line) == (kept, left)


@given(
    st.lists(
        st.sampled_from(["nemo", "--json", "--nodes", "--nnodes", "--x", "a=b", "--", "-", "", "3", "="]), max_size=8
    )
)
def test_no_word_is_lost_or_made_up(words):
    kept, left = unpaste(words, OWN, lambda key: False)
    pieces = sorted(
        piece for word in (*kept, *left) for piece in word.replace("nnodes=", "--nnodes=").split("=") if piece
    )
    assert pieces == sorted(piece for word in words for piece in word.split("=") if piece)
