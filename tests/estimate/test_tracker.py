"""The tracker against torch's own trackers, to the byte; and its cost, counted in visits of storages."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from batchwright.estimate.fake import FakeRuns, ReadsAsOne, _tensors, destroy_fake_group
from batchwright.estimate.records import EstimateRequest
from batchwright.estimate.steps import run_steps
from batchwright.estimate.tracker import Tracker

pytestmark = pytest.mark.torch
# Torch's categories in our terms.
CATEGORIES = {
    "Parameter": "parameters",
    "Buffer": "buffers",
    "Gradient": "gradients",
    "Activation": "activations",
    "Temp": "activations",
    "Optstate": "optimizer",
    "Other": "other",
    "Sharded Param": "parameters",
    "Unsharded Param": "parameters",
    "Sharded Grad": "gradients",
    "Unsharded Grad": "gradients",
    "All Gather": "other",
    "Reduce Scatter": "other",
    "OptState": "optimizer",
    "Inputs": "other",
}


class Whole(nn.Module):
    """Model and loss as one module: torch's tracker allows one call of a model per step."""

    def __init__(self, task, model):
        super().__init__()
        self.model, self.task = model, task

    def forward(self, batch):
        return self.task.loss_of(self.model, batch)


class OracleRuns(FakeRuns):
    """The same steps under torch's own tracker."""

    def _follow(self, model, batch):
        from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
        from torch.distributed._tools.mem_tracker import MemTracker

        optimizer = self._optimizer(model)
        if self.request.ranks > 1:
            tracker = FSDPMemTracker(model, optimizer)
            tracker.track_inputs(tuple(_tensors(batch)))
            loss = lambda b: self.task.loss_of(model, b)  # noqa: E731
        else:
            tracker = MemTracker()
            tracker.track_external(model, optimizer, *_tensors(batch))
            loss = Whole(self.task, model)
            for p in model.parameters():
                if not p.requires_grad:  # it hooks every parameter, and a frozen one takes no hook
                    handle = torch.zeros(1, requires_grad=True).register_hook(lambda gradient: None)
                    tracker._param_to_grad_hook_handles[p] = (handle, handle)

        def again(batch):
            tracker.reset_mod_stats()
            return loss(batch)

        with tracker, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run_steps(
                again,
                model,
                optimizer,
                batch,
                precision="fp32" if self.request.ranks > 1 else self.request.precision,
                accumulation_steps=self.request.accumulation_steps,
                stepping=ReadsAsOne,
            )
        model.zero_grad(set_to_none=True)
        (snapshot,) = tracker.get_tracker_snapshot("peak").values()
        parts = {getattr(kind, "value", kind): size for kind, size in snapshot.items()}
        result = Tracker(self.mode)
        result.peak = parts.pop("Total")
        for name, size in parts.items():
            result.breakdown[CATEGORIES[name]] += size
        return result


@pytest.fixture(autouse=True)
def no_ranks_afterwards():
    yield
    destroy_fake_group()


CASES = [
    ("gpt", {}),
    pytest.param("gpt", {"args": {"flash": False}, "precision": "bf16"}, marks=pytest.mark.rounds),
    pytest.param("gpt", {"checkpoint_activations": True}, marks=pytest.mark.rounds),
    ("gpt", {"accumulation_steps": 2, "accelerator": True}),
    pytest.param("mlp", {}, marks=pytest.mark.rounds),
    ("twice", {}),
    ("frozen", {}),
    ("reads_its_data", {}),
    pytest.param("converted", {"args": {"tied": True, "how": "to"}}, marks=pytest.mark.rounds),
    pytest.param("gpt", {"ranks": 4, "accelerator": True}, marks=pytest.mark.rounds),
    pytest.param("gpt", {"ranks": 8, "precision": "bf16"}, marks=pytest.mark.rounds),
    ("gpt", {"ranks": 3, "checkpoint_activations": True, "accumulation_steps": 2}),
    pytest.param("mlp", {"ranks": 2}, marks=pytest.mark.rounds),
]


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize(("name", "options"), CASES, ids=lambda value: str(value))
def test_peak_and_parts_are_equal_to_those_of_torchs_tracker(tasks, name, options):
    request = EstimateRequest(f"{tasks}:{name}", **options)
    ours, oracle = FakeRuns(request), OracleRuns(request)
    for size in (1, 16):
        assert ours.point(size) == oracle.point(size)
    assert not ours.differs  # one forward and backward stood for both steps


@pytest.mark.parametrize(
    ("name", "steps", "differs"), [("unused", 1, False), ("unused", 2, True), ("remembers", 1, True)]
)
def test_a_task_whose_second_step_needs_more_is_followed_for_two_steps(tasks, name, steps, differs):
    request = EstimateRequest(f"{tasks}:{name}", accumulation_steps=steps)
    ours, both = FakeRuns(request), FakeRuns(request)
    made = ours.point(64)
    with both.mode:
        assert made == both._point(both._twice(both.model, both.batches.of(64)), 64)
    assert ours.differs == differs


def visits_per_operation(kept: int) -> float:
    """Visits of storages during a hundred operations, while `kept` other tensors are alive."""
    mode = FakeTensorMode()
    with mode:
        x, alive = torch.ones(8), []
        tracker = Tracker(mode)
        with tracker.following(nn.Identity()):
            alive += [torch.ones(8) for _ in range(kept)]
            before = tracker.visits
            for _ in range(100):
                y = x + 1
                y.add_(1)
            assert tracker.live["activations"] == tracker.total == 4 * 8 * (kept + 1)
            return (tracker.visits - before) / 100


def test_an_operation_costs_the_same_however_many_tensors_are_alive():
    assert visits_per_operation(10) == visits_per_operation(1000) == 2


def test_the_visits_of_a_step_are_at_most_its_results_and_its_parameters(tasks):
    """A deeper model: the visits grow as the operations do."""

    class Count(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.calls += 1
            return func(*args, **kwargs or {})

    def visits(layers):
        runs = FakeRuns(EstimateRequest(f"{tasks}:gpt", args={"layers": layers}))
        with runs.mode, Count() as count:
            return runs._follow(runs.model, runs.batches.of(2)).visits / count.calls

    assert visits(8) == pytest.approx(visits(2), rel=0.05)


def test_a_storage_counts_once_from_its_creation_to_its_end():
    untouched = torch.UntypedStorage.resize_
    mode = FakeTensorMode()
    with mode:
        layer = nn.Linear(4, 4, bias=False)
        tracker = Tracker(mode)
        with tracker.following(layer, batch=[given := torch.ones(2, 4)]):
            first, second = given.split(1)  # views
            assert tracker.total == 64 + 32
            made = torch.cat([first, second], 1)
            assert tracker.live["activations"] == 32
            made.untyped_storage().resize_(0)
            assert tracker.live["activations"] == 0
            made.resize_(4, 8)
            assert tracker.live["activations"] == 128
            with tracker.stepping(torch.optim.SGD(layer.parameters())):
                state = torch.ones(3)
            assert tracker.live["optimizer"] == 12
            del made, first, second, state
            with pytest.raises(ValueError, match="the loss is wrong"):
                with tracker.following(layer):
                    raise ValueError("the loss is wrong")
        assert tracker.total == 96 and tracker.peak == 64 + 32 + 128 + 12
        assert tracker.breakdown == {
            **dict.fromkeys(tracker.live, 0),
            "parameters": 64,
            "other": 32,
            "activations": 128,
            "optimizer": 12,
        }
    assert torch.UntypedStorage.resize_ is untouched
    del given, layer
    assert tracker.total == 0


def test_tensors_of_another_fake_mode_do_not_count():
    mode = FakeTensorMode()
    with mode:
        tracker = Tracker(mode)
        with tracker.following(nn.Identity()), FakeTensorMode():
            other = torch.ones(8)
        assert tracker.peak == 0 and other.shape == (8,)
