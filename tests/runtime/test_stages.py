"""The split of a model into stages: slices of a Sequential, and torch's tracer."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import nn

from batchwright.core.errors import ConfigError
from batchwright.runtime.stages import split

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")]  # of torch's tracer


class Blocks(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), deepcopy(part)) for _ in range(2)])

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


def parts(part: nn.Module) -> list[nn.Module]:
    return split(Blocks(part), 2, lambda: ((torch.ones(3, 4),), {}))


def test_a_traced_model_that_would_keep_the_training_mode_in_evaluation_is_refused():
    with pytest.raises(ConfigError, match="keeps dropout of Blocks in training mode"):
        parts(nn.Dropout(0.5))
    with pytest.raises(ConfigError, match="keeps batch_norm of Blocks in training mode"):
        parts(nn.BatchNorm1d(4, affine=False))
    first, _ = (part.eval() for part in parts(nn.Dropout(0.0)))
    assert torch.equal(first(torch.ones(3, 4)), first(torch.ones(3, 4)))


def test_a_module_that_a_sequential_uses_twice_is_in_the_stages_twice():
    shared = nn.Tanh()
    model = nn.Sequential(nn.Linear(3, 3), shared, nn.Linear(3, 3), shared, nn.Linear(3, 3), shared)
    hidden = inputs = torch.randn(4, 3)
    for part in split(model, 2):
        hidden = part(hidden)
    assert torch.equal(hidden, model(inputs))
    layer = nn.Linear(3, 3)
    with pytest.raises(ConfigError, match=r"2.weight is in stages 0 and 1"):
        split(nn.Sequential(layer, nn.Tanh(), layer), 2)


@pytest.mark.parametrize(
    ("model", "most"),
    [
        (nn.Sequential(nn.Linear(2, 2), nn.ReLU()), 1),
        (nn.Sequential(nn.Linear(2, 100), nn.ReLU(), nn.Linear(100, 2), nn.Sigmoid()), 2),
        (nn.Sequential(nn.Flatten(), nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2), nn.Linear(2, 2)), 2),
    ],
)
def test_every_stage_of_a_sequential_has_weights_to_train(model, most):
    for stages in range(1, 5):
        if stages <= most:
            assert all(any(p.requires_grad for p in part.parameters()) for part in split(model, stages))
            continue
        with pytest.raises(ConfigError, match="with weights to train") as caught:
            split(model, stages)
        assert caught.value.nearest == (most,)
