"""The step on a device: every variant gives the numbers of the CPU, and the host waits for the device once."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from batchwright.core.errors import RunError
from batchwright.runtime.data.windows import windows
from batchwright.runtime.step.accumulate import Accumulator
from batchwright.runtime.step.noise import NoiseScale
from batchwright.runtime.step.pipeline_calls import Output, asked_of, called
from tests.device.host import SIMULATED, place, same, waits

STEPS, MICRO_STEPS, ROWS = 3, 4, 2


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).squeeze(-1)


def weight(kind: str, x: torch.Tensor, row: torch.Tensor) -> Any:
    return {"number": float(row.sum()), "host": row.sum(), "device": row.sum().to(x.device, non_blocking=True)}[kind]


# Variant -> (options of the accumulator, and what the case itself does)
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "weights that are numbers": {"weights": "number"},
    "weights on the host": {"weights": "host"},
    "clip": {"max_norm": 0.05},
    "measured norm": {"max_norm": float("inf")},
    "noise": {"noise": 1},
    "noise every second step": {"noise": 2, "max_norm": 0.05},
    "bf16 with fp32 sums": {"accumulate_dtype": torch.float32, "half": True},
    "scaler": {"scaler": 2.0**16},
    "scaler, clip and noise": {"scaler": 2.0**16, "max_norm": 0.05, "noise": 1},
    "a scale that overflows": {"scaler": 2.0**127},
    "auxiliary mean": {"auxiliary": True},
    "carried": {"partial": "carry"},
    "dropped": {"partial": "drop"},
    "loss scale": {"loss_scale": 0.125},
    "fused optimizer": {"optimizer": {"fused": True}},
    "capturable optimizer": {"optimizer": {"capturable": True}},
    "a learning rate on the device": {"rate": "tensor"},
    **({"dropout": {"dropout": 0.5}} if SIMULATED else {}),  # a real device has another generator
}


def steps(variant: str, device: str | None) -> tuple[list[Any], dict[str, torch.Tensor], list[dict[str, int]]]:
    """The results of some steps, the final weights, and the waits of the host in each step."""
    options = dict(VARIANTS[variant])
    where = torch.device(device) if device else place()
    kind = torch.bfloat16 if options.pop("half", False) else torch.float32
    weights, auxiliary = options.pop("weights", "device"), options.pop("auxiliary", False)
    settings = options.pop("optimizer", {})
    torch.manual_seed(1)
    model = Net(options.pop("dropout", 0.0)).to(where, kind)
    if where.type == "cpu":
        settings = {k: v for k, v in settings.items() if k != "capturable"}
    rate: Any = 0.01
    if options.pop("rate", None):
        rate, settings = torch.tensor(rate, device=where), {"fused": True}
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, **settings)
    if scale := options.pop("scaler", None):
        options["scaler"] = torch.amp.GradScaler(where.type, init_scale=scale)
    if every := options.pop("noise", None):
        options["noise"] = NoiseScale(every=every)
    generator = torch.Generator().manual_seed(2)
    count = STEPS * MICRO_STEPS - (2 if "partial" in options else 0)
    batches = [
        (
            torch.randn(ROWS, 6, generator=generator),
            torch.randn(ROWS, generator=generator),
            torch.tensor([1.0, 2.0 + i % 3]),
        )
        for i in range(count)
    ]
    there = [tuple(t.to(where) for t in batch) for batch in batches]
    accumulator = Accumulator(model, **options)
    torch.manual_seed(3)
    results, counts = [], []
    if SIMULATED:
        waits()
    micros = windows(zip(batches, there, strict=True), accumulation_steps=MICRO_STEPS)
    for step in accumulator.steps(micros):
        for micro in step:
            (_, _, row), (x, y, own) = micro.data
            output = model(x.to(kind))
            loss = ((output - y.to(kind)).square() * own).sum()
            step.backward(loss, weight(weights, x, row), output.square().mean() if auxiliary else None)
        results.append(astuple(step.apply(optimizer, learning_rate=lambda sample: 1.0 + sample / 100)))
        counts.append(dict(waits()) if SIMULATED else {})
    if "noise" in options:
        results.append([(t.trace, t.signal) for t in options["noise"].terms])
    return results, {name: p.detach().cpu() for name, p in model.named_parameters()}, counts


def compared(variant: str) -> tuple[bool, list[dict[str, int]], list[Any]]:
    expected, found = steps(variant, "cpu"), steps(variant, None)
    exact = "capturable" not in variant  # which is another formula, and does not exist on the CPU
    equal = same(found[0], expected[0], exact) and same(found[1], expected[1], exact)
    return equal, found[2], [found[0], expected[0]]


# Waits of the host in one step, at most. With a GradScaler: the sums, the scale (and the norm), torch's question whether a
# gradient overflowed, and the new scale.
ALLOWED = {"scaler": 4, "scaler, clip and noise": 5, "a scale that overflows": 4}
# A rate on the device is read once, before the first step.
AT_FIRST = {"a learning rate on the device": 1}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_step_on_a_device_is_that_of_the_cpu_and_waits_once(on_device, variant):
    equal, counts, shown = on_device(compared, variant)
    assert equal, shown
    waited, allowed = [sum(count.values()) for count in counts], ALLOWED.get(variant, 1)
    assert all(n <= allowed for n in waited[1:]) and waited[0] <= allowed + AT_FIRST.get(variant, 0), counts


def after_a_failure() -> list[str]:
    """A step without weight is refused; the next one is applied."""
    model = Net().to(place())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulator = Accumulator(model, scaler=torch.amp.GradScaler(place().type, init_scale=8.0))
    outcomes = []
    for weighs in (0.0, 1.0):
        try:
            for step in accumulator.steps(windows([torch.ones(2, 6)], accumulation_steps=1)):
                for micro in step:
                    step.backward(model(micro.data.to(place())).square().sum() * weighs, weighs)
                outcomes.append(step.apply(optimizer).outcome)
        except RunError as error:
            outcomes.append(str(error))
    return outcomes


def test_a_step_that_was_refused_leaves_the_scaler_usable(on_device):
    refused, applied = on_device(after_a_failure)
    assert "weight" in refused and applied == "applied"


def drawn_by_a_loss() -> tuple[list[float], list[float], list[float], list[float]]:
    """What the two calls of a loss in a pipeline draw on the device, what one of another seed does, and what comes after."""
    draws: list[list[float]] = []

    def loss(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
        draws.append(torch.rand(4, device=batch.device).tolist())
        return model(batch).sum(), len(batch)

    device, (micro,) = place(), windows([torch.ones(2, 6)], accumulation_steps=1)
    torch.manual_seed(1)
    expected = torch.rand(4, device=device).tolist()
    torch.manual_seed(1)
    asked_of(loss, micro, device, seed=3)
    torch.rand(1)  # the rank of the last stage has drawn other numbers before
    called(loss, Output(torch.ones(2, 6, device=device)), micro, device, 3)
    asked_of(loss, micro, device, seed=4)
    torch.manual_seed(1)
    called(loss, Output(torch.ones(2, 6, device=device)), micro, device, 3)
    after = torch.rand(4, device=device).tolist()
    assert after == expected
    return draws[0], draws[1], draws[2], draws[3]


def test_the_calls_of_a_loss_in_a_pipeline_draw_the_same_on_a_device(on_device):
    first, last, other, again = on_device(drawn_by_a_loss)
    assert first == last == again and other != first
