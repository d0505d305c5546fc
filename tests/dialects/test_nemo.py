"""NeMo: its documented override line, its launcher's keys, and its recipes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import batchwright
from batchwright.core.errors import PlanError
from batchwright.dialects import Given, resolve


def recipe(**data: Any) -> SimpleNamespace:
    """An object with NeMo's attributes."""
    return SimpleNamespace(
        data=SimpleNamespace(micro_batch_size=1, global_batch_size=512, seq_length=8192, **data),
        trainer=SimpleNamespace(
            num_nodes=2,
            devices=8,
            accumulate_grad_batches=1,
            strategy=SimpleNamespace(
                tensor_model_parallel_size=2,
                pipeline_model_parallel_size=1,
                virtual_pipeline_model_parallel_size=None,
                context_parallel_size=2,
            ),
        ),
        optim=SimpleNamespace(config=SimpleNamespace(lr=3e-4)),
    )


def test_a_recipe_is_read():
    p = batchwright.plan(recipe())
    assert (p.global_batch_size, p.micro_batch_size, p.data_parallel_size, p.accumulation_steps) == (512, 1, 4, 128)
    assert (p.nodes, p.devices_per_node, p.tensor_parallel, p.context_parallel) == (2, 8, 2, 2)
    assert p.sequence_length == 8192
    assert p.sources["micro_batch_size"] == "given"
    assert p.reasons["micro_batch_size"] == "data.micro_batch_size"
    assert p.sources["accumulation_steps"] == "derived"
    assert any("NeMo derives accumulation itself" in note for note in p.notes)


def test_keywords_win_over_the_recipe():
    p = batchwright.plan(recipe(), micro_batch_size=4, nodes=4)
    assert (p.micro_batch_size, p.nodes, p.accumulation_steps) == (4, 4, 16)


def test_a_plan_is_applied_to_a_recipe_and_read_back_the_same():
    target = recipe()
    p = batchwright.plan(global_batch_size=256, micro_batch_size=2, nodes=4, devices_per_node=8, tensor_parallel=4)
    done = p.apply(target)
    assert done == {
        "data.micro_batch_size": 2,
        "data.global_batch_size": 256,
        "trainer.num_nodes": 4,
        "trainer.devices": 8,
        "trainer.strategy.tensor_model_parallel_size": 4,
        "trainer.strategy.pipeline_model_parallel_size": 1,
        "trainer.strategy.context_parallel_size": 1,
        "trainer.accumulate_grad_batches": 1,
    }  # this recipe has no expert_model_parallel_size
    assert target.optim.config.lr == 3e-4
    again = batchwright.plan(target)
    for name in (
        "global_batch_size",
        "micro_batch_size",
        "accumulation_steps",
        "data_parallel_size",
        "devices",
        "nodes",
    ):
        assert getattr(again, name) == getattr(p, name), name


def test_parts_a_recipe_does_not_have_are_left_alone():
    bare = SimpleNamespace(data=SimpleNamespace())
    assert batchwright.plan(global_batch_size=8, devices=2).apply(bare) == {
        "data.micro_batch_size": 4,
        "data.global_batch_size": 8,
    }
    assert batchwright.plan(global_batch_size=8).apply(SimpleNamespace()) == {}


@pytest.mark.parametrize("source", [SimpleNamespace(), object(), 5, "recipe", [], recipe])
def test_objects_that_are_no_recipe_are_refused(source):
    with pytest.raises(PlanError, match="is not a recipe"):
        batchwright.plan(source, micro_batch_size=2, devices=2)


def test_a_recipe_without_numbers_takes_them_from_keywords():
    empty = SimpleNamespace(data=SimpleNamespace(), trainer=SimpleNamespace())
    assert batchwright.plan(empty, micro_batch_size=2, devices=2).global_batch_size == 4
    with pytest.raises(PlanError, match="Not enough is known to plan a batch"):
        batchwright.plan(empty)


def test_a_ramp_is_read_from_a_recipe_and_old_recipes_are_written_where_they_were_read():
    new = SimpleNamespace(data=SimpleNamespace(global_batch_size=1024, rampup_batch_size=[256, 128, 50_000_000]))
    assert [s.global_batch_size for s in batchwright.ramp(new).schedule.segments][:2] == [256, 384]
    old = {"model": {"micro_batch_size": 1, "global_batch_size": 16}, "trainer": {"num_nodes": 1, "devices": 8}}
    done = batchwright.plan(old, micro_batch_size=2).apply(old)
    assert old["model"]["micro_batch_size"] == 2 == done["model.micro_batch_size"]


def test_attributes_of_other_kinds_are_not_mistaken_for_numbers():
    odd = recipe()
    odd.data.micro_batch_size = SimpleNamespace()
    odd.trainer.devices = [0, 1]
    odd.trainer.strategy = "auto"
    assert batchwright.plan(odd, micro_batch_size=4).micro_batch_size == 4


def test_accumulate_grad_batches_is_one_because_nemo_derives_it():
    keys = [("data.micro_batch_size", Given(4)), ("data.global_batch_size", Given(16))]
    alone = resolve([*keys, ("trainer.accumulate_grad_batches", Given("1"))])
    assert alone.fields["accumulation_steps"].value == "1"
    assert "so it is read as accumulation_steps=1" in alone.notes[0]
    placed = resolve([*keys, ("trainer.accumulate_grad_batches", Given(1)), ("devices", Given(2))])
    assert "accumulation_steps" not in placed.fields  # 16 / (4 × 2) = 2 is derived
    assert "must be 1" in placed.notes[0]


@pytest.mark.parametrize("prefix", ["", "training."])
def test_the_launchers_keys(prefix):
    keys = {
        "trainer.num_nodes": 8,
        "trainer.devices": 8,
        "model.micro_batch_size": 2,
        "model.global_batch_size": 256,
        "model.tensor_model_parallel_size": 4,
        "model.pipeline_model_parallel_size": 2,
        "model.encoder_seq_length": 4096,
    }
    p = batchwright.plan({prefix + key: value for key, value in keys.items()})
    assert (p.nodes, p.devices, p.data_parallel_size, p.accumulation_steps) == (8, 64, 8, 16)
    assert p.pipeline is not None
    assert p.sequence_length == 4096
