"""Sampling on a device: what a rollout draws there is a function of the seed and the prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from batchwright.runtime import GlobalOrder, Prompts, RLSettings, RLTask
from batchwright.runtime.device import generator_state
from batchwright.runtime.rl.responses import Responses
from batchwright.runtime.rl.worker import Sampler
from tests.device.host import place, same


def drawn(folder: str, kind: str, rollout: str) -> tuple[list[torch.Tensor], bool]:
    """What the rollout of the same prompts draws, twice; whether the device's generator is as before."""
    device, seen = place() if kind == "accelerator" else torch.device("cpu"), list[torch.Tensor]()

    def sample(policy: nn.Module, prompts: Prompts, generations: int) -> Any:
        seen.append(torch.rand(4, device=device).cpu())
        return [[{"token": prompt}] * generations for prompt in prompts.data]

    task = RLTask(
        model=lambda: nn.Linear(2, 2),
        dataset=list(range(8)),
        loss=lambda model, batch: (model(batch).sum(), 1),
        optimizer=torch.optim.SGD,
        rollout=sample,
    )
    settings, order = RLSettings(directory=folder, rollout=rollout), GlobalOrder(8, seed=3)
    sampler = Sampler(task, task.build_model(3).to(device), order, Responses(Path(folder), 0, generations=2), settings)
    sampler.responses.folder.mkdir(parents=True)
    before = generator_state(place())
    for _ in range(2):
        sampler._sample(range(2, 4), version=0, round=0)
        torch.rand(3)
    return seen, torch.equal(generator_state(place()), before)


@pytest.mark.parametrize("kind", ["accelerator", "cpu"])
def test_the_generators_are_seeded_for_every_rollout_micro_batch(on_device, tmp_path, kind):
    (first, second), untouched = on_device(drawn, str(tmp_path), kind, "ranks")
    assert same(first, second) and untouched == (kind == "cpu")


def test_a_thread_leaves_the_generator_of_the_device_to_training(on_device, tmp_path):
    (first, second), _ = on_device(drawn, str(tmp_path), "accelerator", "thread")
    assert not same(first, second)
