"""What people fine-tune, with the real libraries: their estimates against arithmetic and against each other."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchwright.estimate import estimate
from batchwright.estimate.fake import FakeRuns
from batchwright.estimate.records import EstimateRequest
from batchwright.estimate.rules import four_bit_bytes, four_bits
from tests.needs import needs

pytestmark = [
    pytest.mark.torch,
    pytest.mark.usefixtures("in_process"),
]
TASK = f"{Path(__file__).with_name('hf_tasks.py')}:llama"
SIZE = 8


@pytest.fixture(scope="module", autouse=True)
def libraries():
    for name in ("transformers", "peft", "bitsandbytes"):
        needs(name)


def held(size=SIZE, *, options=None, **args):
    """The peak and its parts."""
    runs = FakeRuns(EstimateRequest(TASK, args=args, **options or {}))
    point = runs.point(size)
    assert sum(point.breakdown.values()) == point.peak_memory_bytes
    return {**point.breakdown, "peak": point.peak_memory_bytes}


@pytest.fixture(scope="module")
def plain():
    return held()


def test_sizes_of_a_llama_are_those_of_its_parameters(plain):
    # Embedding and head, and per layer: attention (q, k, v, o), three products of the MLP, two norms; and the last norm.
    layer = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64
    parameters = 2 * 512 * 64 + 2 * layer + 64
    assert plain["parameters"] == 4 * parameters
    assert plain["optimizer"] == 2 * 4 * parameters + 4 * (2 + 2 * 9 + 1)  # two moments, and a step for each tensor
    assert plain["other"] == SIZE * 32 * 8


@pytest.mark.parametrize("args", [{"dtype": "bfloat16"}, {"half": True}], ids=["to", "half"])
def test_a_converted_model_takes_half(plain, args):
    converted = held(**args)
    assert converted["parameters"] == plain["parameters"] / 2
    assert converted["peak"] < 0.75 * plain["peak"]


@pytest.mark.parametrize("kind", ["fp16", pytest.param("bf16", marks=pytest.mark.rounds)])
def test_autocast_keeps_the_parameters_and_pure_converts_them(plain, kind):
    autocast, pure = held(options={"precision": kind}), held(options={"precision": f"{kind}-pure"})
    assert autocast["parameters"] == plain["parameters"] and autocast["optimizer"] == plain["optimizer"]
    assert autocast["activations"] < plain["activations"]
    converted = held(dtype={"bf16": "bfloat16", "fp16": "float16"}[kind])
    assert pure == converted


def test_tied_weights_count_once(plain):
    assert plain["parameters"] - held(tied=True)["parameters"] == 4 * 512 * 64


def test_eager_attention_holds_scores_and_sdpa_does_not():
    sdpa, eager = (
        [held(attention=kind, sequence_length=n)["activations"] for n in (32, 128)] for kind in ("sdpa", "eager")
    )
    assert sdpa[1] == pytest.approx(4 * sdpa[0], rel=0.05) and eager[1] > 4.5 * eager[0]


def test_checkpointing_of_hugging_face_and_of_torch_hold_less(plain):
    own, ours = held(checkpointing=True), held(options={"checkpoint_activations": True})
    assert own["peak"] < 0.7 * plain["peak"] and own["peak"] == pytest.approx(ours["peak"], rel=0.02)


def test_lora_holds_gradients_and_moments_of_the_adapters_only(plain):
    lora = held(lora=4)
    adapters = 2 * (4 * (64 + 64) + 4 * (64 + 32))  # q and v of two layers
    assert lora["parameters"] == plain["parameters"] + 4 * adapters
    assert lora["optimizer"] == 2 * 4 * adapters + 4 * 8
    assert held(lora=4, checkpointing=True)["peak"] < lora["peak"] < plain["peak"]


def test_optimizers_hold_their_state(plain):
    state = {name: held(optimizer=name)["optimizer"] for name in ("fused", "foreach", "sgd", "adafactor", "adamw8bit")}
    assert state["fused"] == state["foreach"] == plain["optimizer"]
    assert state["sgd"] == plain["parameters"]
    assert state["adafactor"] < 0.1 * plain["parameters"]
    # A byte for each of two moments, two scales of 4 bytes per 256 weights; tensors below 4096 weights stay in fp32.
    small = 5 * 64 + 4 * 32 * 64
    large = plain["parameters"] // 4 - small
    tables = 2 * 256 * 4
    assert state["adamw8bit"] == pytest.approx(2 * large + 2 * 4 * large // 256 + 2 * 4 * small + tables, rel=0.001)


def test_qlora_is_a_rule_and_says_so():
    full = held(lora=4)
    made = estimate(TASK, args={"lora": 4}, micro_batch_sizes=(SIZE,), quantize_frozen=True)
    assert any(line.startswith("rule: the weights of 14 frozen linear layers take 4 bits") for line in made.assumptions)
    layers = [64 * 64, 64 * 64, 32 * 64, 32 * 64] + 3 * [64 * 128]
    saved = sum(4 * n - four_bit_bytes(n) for n in 2 * layers)
    assert full["parameters"] - made.points[0].breakdown["parameters"] == saved
    assert made.points[0].peak_memory_bytes == full["peak"] - saved + 4 * 64 * 128  # the largest layer
    assert made.points[0].source == "rule"


def test_the_rule_of_four_bits_leaves_out_the_head_as_transformers_does():
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.quantizers.base import get_keys_to_not_convert

    sizes = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    for tied in (False, True):
        config = LlamaConfig(**sizes, num_attention_heads=4, tie_word_embeddings=tied)
        model = LlamaForCausalLM(config).requires_grad_(False)
        assert "lm_head" in get_keys_to_not_convert(model)
        assert four_bits(model).layers == 2 * 7


@pytest.mark.parametrize(("inputs", "outputs"), [(64, 64), (256, 96), (4096, 512)])
def test_the_rule_of_four_bits_is_the_size_of_a_real_layer(inputs, outputs):
    import bitsandbytes as bnb
    import torch

    layer = bnb.nn.Linear4bit(inputs, outputs, bias=False, quant_type="nf4", compress_statistics=True).to("cpu")
    state = layer.weight.quant_state
    scales, of_scales = state.absmax, state.state2.absmax
    assert layer.weight.dtype == torch.uint8 and state.nested and state.blocksize == 64
    held = sum(t.numel() * t.element_size() for t in (layer.weight, scales, of_scales))
    assert held == four_bit_bytes(inputs * outputs)
    # The rule leaves out what does not grow: two tables of values and one offset for each layer.
    rest = sum(t.numel() * t.element_size() for t in (state.code, state.state2.code, state.offset))
    assert rest == 4 * (16 + 256 + 1)


def test_experts_are_followed_under_uniform_routing(plain):
    made = estimate(TASK, args={"experts": 4}, micro_batch_sizes=(1, SIZE))
    assert any(line.startswith("uniform routing") for line in made.assumptions)
    experts = 3 * 64 * 128
    assert made.points[0].breakdown["parameters"] == plain["parameters"] + 4 * 2 * (3 * experts + 4 * 64)
    looped = estimate(TASK, args={"experts": 4, "loop": True}, micro_batch_sizes=(1, SIZE))
    assert looped.points == made.points


def test_ranks_share_a_llama_with_frozen_parameters(plain):
    sharded = held(options={"ranks": 4, "precision": "bf16"}, lora=4)
    assert sharded["optimizer"] < plain["optimizer"] / 100


def test_only_the_sizes_that_were_given_are_estimated():
    made = estimate(TASK, micro_batch_sizes=(2, 4, 64), memory_bytes=8 * 2**20)
    assert [p.micro_batch_size for p in made.points] == [2, 4, 64] and made.max_micro_batch_size == 4
