"""Hugging Face's keys, and those of the launchers used with them."""

from __future__ import annotations

import pytest

import batchwright


def test_the_documented_flags():
    p = batchwright.plan({"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8, "num_processes": 4})
    assert (p.micro_batch_size, p.accumulation_steps, p.data_parallel_size, p.global_batch_size) == (2, 8, 4, 64)
    assert p.reasons["micro_batch_size"] == "per_device_train_batch_size"
    assert any("N optimizer steps in Hugging Face: N × 8 micro steps" in note for note in p.notes)


@pytest.mark.parametrize(
    "launcher",
    [
        {"nnodes": 2, "nproc_per_node": 4},
        {"num_machines": 2, "num_processes": 8},
        {"nodes": 2, "devices_per_node": 4},
    ],
)
def test_the_launchers_say_how_many_devices(launcher):
    p = batchwright.plan({"per_device_train_batch_size": 2, **launcher})
    assert (p.nodes, p.devices_per_node, p.devices, p.global_batch_size) == (2, 4, 8, 16)
