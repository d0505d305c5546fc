"""MaxText: sizes per device count all devices and may be below one; the mesh is ici × dcn."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import batchwright
from batchwright.core.errors import ConfigError, PlanError
from tests.examples import many

quarters = st.builds(Fraction, st.integers(1, 16), st.sampled_from([1, 2, 4, 8]))


@settings(deadline=None, max_examples=many(150))
@given(quarters, st.integers(1, 16), st.integers(1, 4), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]))
def test_the_global_batch_is_per_device_times_all_devices_times_accumulation(size, ranks, steps, tensor, context):
    devices = ranks * tensor * context
    keys = {
        "per_device_batch_size": str(float(size)),
        "gradient_accumulation_steps": steps,
        "ici_tensor_parallelism": tensor,
        "ici_context_parallelism": context,
    }
    micro = size * tensor * context
    try:
        p = batchwright.plan(keys, devices=devices)
    except PlanError as error:
        assert micro.denominator != 1
        if error.field == "per_device_batch_size":
            for near in error.nearest:
                again = batchwright.plan(keys | {"per_device_batch_size": near}, devices=devices)
                assert again.global_batch_size == Fraction(near) * devices * steps
            wanted = [n for n in (micro.__floor__(), micro.__ceil__()) if n]
            assert [Fraction(near) for near in error.nearest] == [Fraction(n, tensor * context) for n in wanted]
        return
    assert p.global_batch_size == size * devices * steps
    assert p.micro_batch_size == micro
    assert p.data_parallel_size == ranks
    assert p.accumulation_steps == steps


def test_a_fraction_is_resolved_with_words():
    p = batchwright.plan({"per_device_batch_size": 0.25, "ici_tensor_parallelism": 8}, devices=64)
    assert (p.micro_batch_size, p.data_parallel_size, p.global_batch_size) == (2, 8, 16)
    assert p.reasons["micro_batch_size"] == "per_device_batch_size × 8 devices per replica"
    text = "\n".join(p.notes)
    assert "counts every device: 1/4 × 8 devices per replica = micro_batch_size 2" in text
    assert "drops 75% of them; batchwright reads exactly the global batch" in text


def test_a_fraction_that_is_no_micro_batch_names_those_that_are():
    with pytest.raises(PlanError) as caught:
        batchwright.plan({"per_device_batch_size": 0.3, "ici_tensor_parallelism": 8}, data_parallel_size=2)
    assert "× 8 devices per replica = 2.4 samples" in str(caught.value)
    assert "MaxText would truncate" in str(caught.value)
    assert caught.value.nearest == ("0.25", "0.375")


def test_half_a_row_per_device_without_replicas_is_the_whole_batch_and_does_not_divide():
    with pytest.raises(PlanError) as caught:
        batchwright.plan({"per_device_batch_size": 0.5}, devices=8)
    assert "global_batch_size=4" in str(caught.value)
    assert caught.value.nearest == (8,)
    assert batchwright.plan({"per_device_batch_size": 0.5}, devices=8, allow_ragged=True).global_batch_size == 4


def test_the_mesh_multiplies_ici_and_dcn():
    p = batchwright.plan(
        {
            "per_device_batch_size": 1,
            "ici_fsdp_parallelism": 16,
            "dcn_data_parallelism": 4,
            "ici_tensor_parallelism": 2,
            "dcn_pipeline_parallelism": 2,
            "ici_expert_parallelism": 2,
            "max_target_length": 2048,
        }
    )
    assert (p.tensor_parallel, p.pipeline_parallel, p.expert_parallel) == (2, 2, 2)
    assert p.data_parallel_size == 16 * 4 * 2
    assert p.devices == 512
    assert p.micro_batch_size == 4
    assert p.pipeline.pipeline_style == "inner"
    assert p.sequence_length == 2048


def test_minus_one_fills_up_from_the_devices():
    keys = {
        "per_device_batch_size": 2,
        "ici_fsdp_parallelism": -1,
        "dcn_data_parallelism": 2,
        "ici_tensor_parallelism": 4,
    }
    assert batchwright.plan(keys, devices=64).data_parallel_size == 16
    assert batchwright.plan(keys, nodes=8, devices_per_node=8).data_parallel_size == 16


def test_pipeline_microbatches_are_a_factor_inside_a_step():
    keys = {"per_device_batch_size": 2, "ici_pipeline_parallelism": 4, "num_pipeline_microbatches": 8}
    p = batchwright.plan(keys, devices=16)
    assert (p.pipeline.pipeline_microbatches, p.pipeline.schedule, p.accumulation_steps) == (8, "circular", 1)
    assert batchwright.plan(keys | {"num_pipeline_microbatches": -1}, devices=16).pipeline.pipeline_microbatches == 4
    delayed = keys | {"num_pipeline_microbatches": -1, "pipeline_delay_activation_forwarding": True}
    assert batchwright.plan(delayed, devices=16).pipeline.pipeline_microbatches == 8
    repeats = batchwright.plan(keys | {"num_pipeline_repeats": 2}, devices=16)
    assert repeats.pipeline.bubble_fraction == pytest.approx(3 / (2 * 8 + 3))
    with pytest.raises(PlanError) as caught:
        batchwright.plan(keys | {"num_pipeline_microbatches": 6}, devices=16)
    assert caught.value.nearest == (4, 8)


@pytest.mark.parametrize("wrong", [0, -2, -0.5, "x"])
def test_an_invalid_expansion_factor_is_refused(wrong):
    with pytest.raises(ConfigError) as caught:
        batchwright.plan({"per_device_batch_size": 2, "expansion_factor_real_data": wrong}, devices=8)
    assert caught.value.field == "expansion_factor_real_data"


@pytest.mark.parametrize("wrong", [0, -1, "nan", "1e999", "1e-999", "1" + "0" * 400 + ".5", "", None, [1]])
def test_an_invalid_size_is_refused(wrong):
    with pytest.raises(PlanError):
        batchwright.plan({"per_device_batch_size": wrong, "ici_tensor_parallelism": 2})


def plan(**keys):
    return batchwright.plan(keys)


def test_an_axis_that_fills_the_devices_counts_as_one_without_them_and_says_so():
    made = plan(per_device_batch_size=4, ici_fsdp_parallelism=-1)  # as in MaxText's own file
    assert made.data_parallel_size == 1 and any("ici_fsdp_parallelism" in n and "1 is assumed" in n for n in made.notes)
    assert plan(per_device_batch_size=4, ici_fsdp_parallelism=-1, devices=8).data_parallel_size == 8


@pytest.mark.parametrize(("layers", "each", "repeats"), [(16, 2, 2), (16, 1, 4), (32, None, 8)])
def test_repeats_of_a_pipeline_follow_from_its_layers(layers, each, repeats):
    more = {} if each is None else {"num_layers_per_pipeline_stage": each}
    made = plan(
        per_device_batch_size=8,
        devices=16,
        ici_pipeline_parallelism=4,
        base_num_decoder_layers=layers,
        num_pipeline_repeats=-1,
        **more,
    )
    assert made.pipeline.virtual_stages == repeats
    pieces = made.pipeline.pipeline_microbatches
    assert made.pipeline.bubble_fraction == pytest.approx(3 / (repeats * pieces + 3))


@pytest.mark.parametrize(
    ("keys", "repeats", "said"),
    [
        ({}, 1, "which is not given"),
        (
            {"base_num_decoder_layers": 14, "num_layers_per_pipeline_stage": 2},
            1,
            r"14 layers / (4 stages × 2) = 1.75 times",
        ),
        ({"base_num_decoder_layers": 61, "pipeline_parallel_layers": 56}, 14, None),
        ({"base_num_decoder_layers": 16, "pipeline_parallel_layers": -1}, 4, None),
        ({"base_num_decoder_layers": 16, "model_name": "llama3.1-70b"}, 1, "which is not given"),
        ({"base_num_decoder_layers": 16, "model_name": "default"}, 4, None),
    ],
)
def test_layers_that_are_not_known_or_do_not_fill_the_stages_are_noted(keys, repeats, said):
    made = plan(per_device_batch_size=8, devices=16, ici_pipeline_parallelism=4, **keys)
    assert made.pipeline.virtual_stages == repeats
    assert said is None or any(said in note for note in made.notes)


def test_every_axis_is_counted_and_only_its_own_keys_are_named():
    made = plan(per_device_batch_size=3, devices=16, ici_context_autoregressive_parallelism=2, ici_tensor_parallelism=1)
    assert (made.context_parallel, made.data_parallel_size) == (2, 8)
    assert made.reasons["context_parallel"] == "ici_context_autoregressive_parallelism=2"
