"""The gradient of the global batch: equal to the one-process full batch at any split, wrapper and world size."""

from __future__ import annotations

import math
import sys
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from batchwright.core.errors import PlanError, RunError
from batchwright.core.ramp.rules import Thresholds
from batchwright.core.ramp.schedule import Step
from batchwright.runtime.data.loader import Loader
from batchwright.runtime.data.order import GlobalOrder
from batchwright.runtime.data.sampler import StepSampler
from batchwright.runtime.data.windows import windows
from batchwright.runtime.step.accumulate import Accumulator, GradientStep, accumulate
from batchwright.runtime.step.noise import NoiseScale

sys.path.insert(0, str(Path(__file__).parent))  # the helpers beside this file, under any import mode

from step_cases import Micro, build, collate, loss, micros, pad, plain_gradients, reference, relative_error, sample
from step_workers import everything

STEP = Step(3, 20, 12, 0)
LIMITS = {"torch.float32": 1e-6, "torch.float64": 1e-12}


def sgd(model: nn.Module, rate: float = 0.0) -> torch.optim.SGD:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=rate)


def run(step: GradientStep, model: nn.Module) -> None:
    for micro in step:
        step.backward(*loss(model, micro.data))


# Several ranks: each world is started once.


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, *(pytest.param(n, marks=pytest.mark.rounds) for n in (2, 4)), 3])
def test_gradient_equals_the_full_batch(world: int, run_ranks: Any) -> None:
    for answer in run_ranks(everything, world, "equality", *["meshes"] * (world == 4), timeout=600):
        assert all(error < 1e-12 for error in answer.get("meshes", {}).values()), answer
        errors = answer["equality"]
        assert len(errors) == (3 * 3 + 2 * 1) * 2 * 2  # wrappers × micro batches, dtypes, steps
        assert all(error <= LIMITS[key[1]] for key, error in errors.items()), errors


@pytest.fixture(scope="module")
def three_ranks(run_ranks: Any) -> list[dict[str, Any]]:
    return run_ranks(everything, 3, "numbers", "unused", timeout=600)


@pytest.fixture(scope="module")
def two_ranks(run_ranks: Any) -> list[dict[str, Any]]:
    return run_ranks(everything, 2, "collectives", "partial", "disagreement", "mixed", timeout=600)


@pytest.mark.slow
def test_results_clipping_and_noise_are_those_of_the_full_batch(three_ranks: list[dict[str, Any]]) -> None:
    for answer in three_ranks:
        for kind, found in answer["numbers"].items():
            assert found["numbers"] < 1e-12, (kind, found)
            assert found["clipped"] < 1e-6, (kind, found)  # torch's own norm has + 1e-6 in it
            assert found["noise"] < 1e-9, (kind, found)
            assert found["result"] == three_ranks[0]["numbers"][kind]["result"]
            assert (found["result"].end_sample, found["result"].outcome) == (13, "applied")


@pytest.mark.slow
def test_parameters_that_only_some_ranks_use(three_ranks: list[dict[str, Any]]) -> None:
    assert all(answer["unused"] < 1e-12 for answer in three_ranks)


@pytest.mark.slow
def test_one_gradient_synchronisation_per_step(two_ranks: list[dict[str, Any]]) -> None:
    for answer in two_ranks:
        counted = answer["collectives"]
        assert counted["ddp"] == 1  # buckets handed to the comm hook
        assert counted["ddp all-reduce"] == counted["ours all-reduce"] == 2, counted  # gradients, and the sums
        assert counted["fsdp-medium reduce-scatter"] == 2, counted  # one for each of the two sharded modules
        assert counted["fsdp-low reduce-scatter"] == 2 * 4, counted


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "ours", "fsdp-medium"])
def test_partial_steps_on_ranks_never_leak(kind: str, two_ranks: list[dict[str, Any]]) -> None:
    for answer in two_ranks:
        found = answer["partial"]
        outcomes = {"exact": "applied", "drop": "dropped", "carry": "carried"}
        for policy, outcome in outcomes.items():
            one = found[kind, policy]
            assert one["early"].outcome == outcome
            assert one["pending"] == (3 if policy == "carry" else 0)
            assert one["early"].end_sample == (0 if policy == "carry" else 6)
            assert one["whole"].samples == (14 if policy == "carry" else 8)
            assert one["later error"] < 1e-12, (policy, one)
        assert found[kind, "exact"]["early error"] < 1e-12
        assert found[kind, "abandoned"] < 1e-12


@pytest.mark.slow
def test_disagreement_is_an_error_on_every_rank(two_ranks: list[dict[str, Any]]) -> None:
    for answer in two_ranks:
        said = answer["disagreement"]
        assert "agree on micro steps (rank 0: 2, rank 1: 3)" in said["ddp counts"]
        assert "agree on micro steps (rank 0: 2, rank 1: 3)" in said["fsdp counts"]
        assert "agree on the step (rank 0: 0, rank 1: 1)" in said["steps"]
        assert "step 0: 2 of its weights are negative or not finite" in said["negative"]
        assert "2 of its weights are negative or not finite" in said["nan"]
        assert "step 0 has no weight" in said["zero"]


@pytest.mark.slow
def test_mixed_precision_on_ranks(two_ranks: list[dict[str, Any]]) -> None:
    for answer in two_ranks:
        found = answer["mixed"]
        assert found["ddp fp32"] < 0.5 * found["ddp bf16"], found
        assert found["fsdp-medium fp32"] < 0.5 * found["ddp bf16"], found
        for kind in ("ddp", "fsdp-medium"):
            outcomes, error = found[f"{kind} scaler"]
            assert outcomes == [("skipped", 2.0, True), ("applied", 2.0, False)]
            assert error < 1e-6


# One process.


@pytest.mark.parametrize("micro_batch_size", [1, 5, 12])
@pytest.mark.parametrize("options", [{}, {"loss_scale": 2.0**-10}, {"accumulate_dtype": torch.float64}])
def test_one_process(micro_batch_size: int, options: dict[str, Any]) -> None:
    model = build(torch.float32)
    for step in accumulate(micros([STEP], micro_batch_size), model, **options):
        run(step, model)
        result = step.apply(sgd(model))
    assert relative_error(plain_gradients(model), reference(build(torch.float32), STEP)) < 1e-6
    assert (result.step, result.samples, result.end_sample, result.outcome) == (3, 12, 32, "applied")
    assert result.micro_steps == math.ceil(12 / micro_batch_size)
    assert result.grad_norm is None


def test_losses_and_weights_may_be_numbers_or_tensors_of_any_kind() -> None:
    """Different dtypes and shapes, also within one step; the micro batches have equal, but not identical, Step objects."""
    model = nn.Linear(1, 1, bias=False)
    kinds: list[Any] = [2, 2.0, torch.tensor(2), torch.tensor([2.0]), torch.tensor([[2]], dtype=torch.int16)]
    for chosen in (kinds, kinds[2:], kinds[3:4] * 5, kinds[:2]):
        split = [replace(m, step=copy(m.step)) for m in windows([torch.ones(2, 1)] * len(chosen), len(chosen))]
        for step in accumulate(split, model):
            for micro, weight in zip(step, chosen, strict=True):
                total = model(micro.data).sum()
                step.backward(total.reshape(1) if isinstance(weight, float) else total.double(), weight)
            result = step.apply(sgd(model))
            assert result.weight == 2.0 * len(chosen) and model.weight.grad is not None
            assert float(model.weight.grad) == pytest.approx(1.0)
            assert result.loss == pytest.approx(model.weight.item())


def test_the_naive_mean_of_means_is_far_off() -> None:
    model = build()
    for micro in micros([STEP], 1):
        summed, weight, balance = loss(model, micro.data)
        ((summed / weight + balance) / 12).backward()
    assert relative_error(plain_gradients(model), reference(build(), STEP)) > 0.1


def test_a_filler_counts_for_nothing() -> None:
    model = build()
    feed = [
        Micro(collate(range(20, 32)), STEP, 0, 2, range(20, 32), range(20, 32)),
        Micro(collate(range(20, 21)), STEP, 1, 2, range(20, 21), range(20, 21), filler=True),
    ]
    for step in accumulate(feed, model):
        run(step, model)
        result = step.apply(sgd(model))
    assert relative_error(plain_gradients(model), reference(build(), STEP)) < 1e-12
    assert result.samples == 12


def test_a_data_parallel_group_is_needed_only_where_there_are_ranks() -> None:
    assert Accumulator(build()).parallel.size == 1
    assert Accumulator(build(), group=None).parallel.groups == ()


def test_gradients_left_by_others_do_not_leak_in() -> None:
    model = build()
    loss(model, collate(range(4)))[0].backward()
    for step in accumulate(micros([STEP], 4), model):
        run(step, model)
        step.apply(sgd(model))
    assert relative_error(plain_gradients(model), reference(build(), STEP)) < 1e-12


def test_an_abandoned_loop_that_ends_late_disturbs_nothing() -> None:
    """For example, the traceback of an exception may keep the frame of the loop alive."""
    model = build()
    owner = Accumulator(model, noise=NoiseScale())
    old = owner.steps(micros([STEP], 4))
    for micro in (abandoned := next(old)):
        abandoned.backward(*loss(model, micro.data))
        break
    for step in owner.steps(micros([STEP], 4)):
        for micro in step:
            if micro.index == 1:
                old.close()
            step.backward(*loss(model, micro.data))
        step.apply(sgd(model))
    assert relative_error(plain_gradients(model), reference(build(), STEP)) < 1e-12
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_on_the_loaders_own_micro_batches() -> None:
    """Two steps of a ramp from the real loader: the gradient is that of the ids it reports."""
    schedule = Thresholds(((0, 4), (4, 12))).compile().until(16)
    order = GlobalOrder(40, seed=1)
    sampler = StepSampler(schedule, micro_batch_size=4, rank=0, ranks=1)
    model, read = build(), []
    loader = Loader([sample(p) for p in range(40)], order, sampler, collate=pad)
    for step in accumulate(loader, model):
        for micro in step:
            read += micro.ids.tolist()
            step.backward(*loss(model, micro.data))
        result = step.apply(sgd(model))
    assert (result.step, result.samples, result.end_sample, result.micro_steps) == (1, 12, 16, 3)
    ids = order.ids(range(4, 16)).tolist()
    assert read[4:] == ids
    summed, weight, balance = loss(whole := build(), pad([sample(i) for i in ids]))
    (summed / weight + balance).backward()
    wanted = {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}
    assert relative_error(plain_gradients(model), wanted) < 1e-12


def test_clipping_happens_once_on_the_final_gradient() -> None:
    model, whole = build(), build()
    wanted = reference(whole, STEP)
    norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.05)
    for step in accumulate(micros([STEP], 5), model, max_norm=0.05):
        run(step, model)
        result = step.apply(sgd(model))
    assert result.grad_norm == pytest.approx(float(norm), rel=1e-9)
    clipped = {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}
    assert wanted.keys() == clipped.keys()
    assert relative_error(plain_gradients(model), clipped) < 1e-9


def test_an_infinite_limit_only_measures() -> None:
    model = build()
    for step in accumulate(micros([STEP], 5), model, max_norm=math.inf):
        run(step, model)
        assert step.apply(sgd(model)).grad_norm is not None
    assert relative_error(plain_gradients(model), reference(build(), STEP)) < 1e-12


def test_a_scaler_is_unscaled_once_and_a_skipped_step_is_recorded() -> None:
    model = build(torch.float32)
    optimizer, scaler = sgd(model, 0.1), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    before = [p.detach().clone() for p in model.parameters()]
    owner = Accumulator(model, scaler=scaler, loss_scale=2.0**-6, max_norm=math.inf)
    spoilt = Step(0, 0, 12, 0), Step(1, 12, 12, 0)
    for step in owner.steps(micros(list(spoilt), 4)):
        for micro in step:
            summed, weight, balance = loss(model, micro.data)
            step.backward(summed * (math.inf if (step.plan.step, micro.index) == (0, 1) else 1.0), weight, balance)
        result = step.apply(optimizer)
        if step.plan.step == 0:
            assert step.skipped and result.outcome == "skipped"
            assert result.end_sample == 12  # the position advances
            assert scaler.get_scale() == 2.0**9
            assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert not step.skipped
    assert relative_error(plain_gradients(model), reference(build(torch.float32), spoilt[1])) < 1e-6


def test_bf16_sums_lose_what_fp32_sums_keep() -> None:
    """1024 micro batches of one sample: a bf16 sum stops growing, an fp32 sum does not."""
    errors = {}
    for dtype in (None, torch.float32):
        model = nn.Linear(16, 1, bias=False).to(torch.bfloat16)
        x = torch.rand(1024, 1, 16, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
        for step in accumulate(windows(list(x), 1024), model, accumulate_dtype=dtype):
            for micro in step:
                step.backward(model(micro.data).sum(), 1)
            step.apply(sgd(model))
        exact = x.float().mean(0)
        assert model.weight.grad is not None and model.weight.grad.dtype == torch.bfloat16
        errors[dtype] = float((model.weight.grad.float() - exact).norm() / exact.norm())
    assert errors[torch.float32] < 2.0**-8  # one rounding to bf16 at the end
    assert errors[None] > 10 * errors[torch.float32]


def test_fp32_parameters_under_autocast_need_no_option() -> None:
    model, whole = build(torch.float32), build(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        for step in accumulate(micros([STEP], 1), model):
            run(step, model)
            step.apply(sgd(model))
        wanted = reference(whole, STEP)
    assert relative_error(plain_gradients(model), wanted) < 0.02  # activations are bf16; the sum is not


def test_the_learning_rate_is_a_function_of_samples() -> None:
    model = build()
    groups = [{"params": [model.router], "lr": 0.5}, {"params": list(model.body.parameters()), "lr": torch.tensor(0.1)}]
    optimizer = torch.optim.SGD(groups)
    tensor = optimizer.param_groups[1]["lr"]
    rates = []
    for step in accumulate(micros([Step(0, 0, 4, 0), Step(1, 4, 8, 0), Step(2, 12, 8, 1)], 4), model):
        run(step, model)
        result = step.apply(optimizer, learning_rate=lambda sample: 1 - sample / 16)
        rates.append((optimizer.param_groups[0]["lr"], result.learning_rate))
    assert rates == [(0.5, 1.0), (0.375, 0.75), (0.125, 0.25)]
    assert optimizer.param_groups[1]["lr"] is tensor and float(tensor) == pytest.approx(0.025)


def test_several_optimizers_and_tied_weights() -> None:
    model = build()
    split = [[model.router], [*model.body.parameters(), model.embed.weight]]
    optimizers = [torch.optim.SGD(parameters, lr=1.0) for parameters in split]
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for step in accumulate(micros([STEP], 5), model):
        run(step, model)
        step.apply(*optimizers)
    wanted = reference(build(), STEP)
    moved = {name: before[name] - p.detach() for name, p in model.named_parameters() if name in wanted}
    assert relative_error(moved, wanted) < 1e-12


# Any loader, and windows that end early.


@pytest.mark.parametrize("policy", ["exact", "drop", "carry"])
def test_partial_windows_of_an_ordinary_loader(policy: str) -> None:
    """13 batches in windows of 8: the second window has 5. The next epoch starts with none, or continues with the 5."""
    rows = torch.randn(26, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    loader = torch.utils.data.DataLoader(rows, batch_size=2)  # type: ignore[arg-type]
    model = nn.Linear(4, 1, bias=False).double()
    owner = Accumulator(model, partial=policy)  # type: ignore[arg-type]
    seen = []
    for epoch in range(2):
        for step in owner.steps(windows(loader, 8, first_index=owner.pending, start_sample=26 * epoch)):
            for micro in step:
                step.backward(model(micro.data).sum(), len(micro.data))
            result = step.apply(sgd(model))
            mean = None if model.weight.grad is None else model.weight.grad.flatten().clone()
            seen.append((result.outcome, result.samples, result.end_sample, mean))
    first, tail, carried = rows[:16].mean(0), rows[16:].mean(0), torch.cat([rows[16:], rows[:6]]).mean(0)
    wanted = {
        "exact": [("applied", 16, 16, first), ("applied", 10, 26, tail)] * 2,
        "drop": [("applied", 16, 16, first), ("dropped", 10, 26, None)] * 2,
        "carry": [
            ("applied", 16, 16, first),
            ("carried", 10, 16, None),
            ("applied", 16, 32, carried),
            ("applied", 16, 48, rows[6:22].mean(0)),
            ("carried", 4, 48, None),
        ],
    }[policy]
    if policy != "carry":
        wanted = [(o, n, end + 26 * (i // 2), mean) for i, (o, n, end, mean) in enumerate(wanted)]
    assert [w[:3] for w in wanted] == [s[:3] for s in seen]
    for (outcome, *_, mean), (*_, target) in zip(seen, wanted, strict=True):
        if outcome == "applied":
            torch.testing.assert_close(mean, target)
    assert owner.pending == (2 if policy == "carry" else 0)


def test_the_partial_end_of_a_loader_without_length_is_exact() -> None:
    model = nn.Linear(4, 1, bias=False).double()
    rows = torch.randn(5, 1, 4, dtype=torch.float64)
    for step in accumulate(windows(iter(rows), 8), model):
        for micro in step:
            step.backward(model(micro.data).sum(), 1)
        assert step.apply(sgd(model)).micro_steps == 5
    torch.testing.assert_close(model.weight.grad, rows.mean(0))


# Errors.


def test_misuse_is_reported() -> None:
    model = build()
    optimizer = sgd(model)

    with pytest.raises(RunError, match="step 3 was not applied"):
        for step in accumulate(micros([STEP, Step(4, 32, 12, 0)], 4), model):
            run(step, model)
    with pytest.raises(RunError, match="step 3 had no backward in micro step 0"):
        for step in accumulate(micros([STEP], 4), model):
            for _ in step:
                pass
    with pytest.raises(RunError, match="step 3 has no micro step waiting"):
        for step in accumulate(micros([STEP], 4), model):
            for micro in step:
                for _ in range(2):
                    step.backward(*loss(model, micro.data))
    with pytest.raises(RunError, match="step 3 is applied after 0 micro steps, too early"):
        for step in accumulate(micros([STEP], 4), model):
            step.apply(optimizer)
    with pytest.raises(RunError, match="step 3 is applied twice"):
        for step in accumulate(micros([STEP], 4), model):
            run(step, model)
            step.apply(optimizer)
            step.apply(optimizer)
    with pytest.raises(RunError, match=r"loss of shape \(2,\)"):
        for step in accumulate(micros([STEP], 4), model):
            for _ in step:
                step.backward(torch.ones(2, requires_grad=True), 2)
    with pytest.raises(RunError, match="has micro step 2 instead of 1"):
        feed = list(micros([STEP], 4))
        for step in accumulate([feed[0], feed[2]], model):
            run(step, model)


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf, torch.tensor(-2)])
def test_negative_or_infinite_weights_are_refused(weight: Any) -> None:
    model = build()
    with pytest.raises(RunError, match="step 3: 3 of its weights are negative or not finite"):
        for step in accumulate(micros([STEP], 4), model):
            for micro in step:
                step.backward(loss(model, micro.data)[0], weight)
            step.apply(sgd(model))


def test_a_step_without_weight_is_refused() -> None:
    model = build()
    with pytest.raises(RunError, match="step 3 has no weight: its 3 micro steps × 1 ranks sum to 0") as caught:
        for step in accumulate(micros([STEP], 4), model):
            for micro in step:
                step.backward(loss(model, micro.data)[0], 0)
            step.apply(sgd(model))
    assert caught.value.field == "weight"


def test_an_optimizer_of_another_model_is_refused() -> None:
    model = build()
    with pytest.raises(RunError, match="step 3 has an optimizer with 6 of 6 parameters that are not the model's"):
        for step in accumulate(micros([STEP], 4), model):
            run(step, model)
            step.apply(sgd(build()))


def test_all_wrong_options_are_collected() -> None:
    with pytest.raises(PlanError) as caught:
        Accumulator(build(), partial="round", loss_scale=0.0, max_norm=-1.0)  # type: ignore[arg-type]
    assert [v.field for v in caught.value.violations] == ["partial", "loss_scale", "max_norm"]
    with pytest.raises(PlanError, match="no parameter that requires a gradient"):
        Accumulator(nn.ReLU())
    with pytest.raises(PlanError, match="a scaler cannot be used with half-precision"):
        Accumulator(build(torch.bfloat16), accumulate_dtype=torch.float32, scaler=torch.amp.GradScaler("cpu"))


# torch.compile: a ramp changes the number of micro steps, not their shape.


@pytest.mark.slow
def test_a_ramp_does_not_recompile() -> None:
    torch._dynamo.reset()
    bare = build(torch.float32)
    compiled = torch.compile(bare, backend="aot_eager")
    ramp = [Step(0, 0, 4, 0), Step(1, 4, 8, 1), Step(2, 12, 16, 2)]

    def rows(span: range) -> torch.Tensor:
        return torch.stack([torch.randint(0, 29, (9,), generator=torch.Generator().manual_seed(p)) for p in span])

    torch._dynamo.utils.counters.clear()
    graphs = []
    for step in accumulate(micros(ramp, 4, make=rows), compiled):
        with torch._dynamo.config.patch(error_on_recompile=True):
            run(step, compiled)
        step.apply(sgd(compiled))
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs == [graphs[0]] * 3 and graphs[0] >= 1
    summed, weight, balance = loss(whole := build(torch.float32), rows(range(12, 28)))
    (summed / weight + balance).backward()
    wanted = {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}
    assert relative_error(plain_gradients(bare), wanted) < 1e-6


def partly_wrapped(rank: int) -> dict[str, str]:
    said = {}
    for kind in ("ddp", "sharded"):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        for p in model[1].parameters():
            p.requires_grad = kind == "ddp"  # FSDP2: frozen parameters may stay unwrapped, others may not
        if kind == "ddp":
            model[0] = nn.parallel.DistributedDataParallel(model[0])
        else:
            fully_shard(model[0], mesh=init_device_mesh("cpu", (2,)))
            Accumulator(model)
            model[1].weight.requires_grad = True
        try:
            Accumulator(model)
        except PlanError as error:
            said[kind] = str(error)
    return said


@pytest.mark.slow
def test_partly_wrapped_models_are_refused(run_ranks: Any) -> None:
    for said in run_ranks(partly_wrapped, 2):
        assert "the wrapper leaves out 1.weight, 1.bias: wrap all 2, or freeze them" in said["ddp"]
        assert "the wrapper leaves out 1.weight: wrap all 1" in said["sharded"]
