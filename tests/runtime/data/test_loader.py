"""The loader: the same samples and augmentation at any split and worker count, and after resuming anywhere."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, default_collate

from batchwright.core.errors import PlanError, RunError
from batchwright.core.ramp.rules import Constant, Linear
from batchwright.core.ramp.schedule import Schedule
from batchwright.runtime.data.loader import Loader, Micro, _SlicesWithIds
from batchwright.runtime.data.order import GlobalOrder
from batchwright.runtime.data.sampler import StepSampler
from batchwright.runtime.ranks import data_parallel

pytestmark = pytest.mark.torch


class Noisy:
    """A sample is its id and one random number of each generator, like an augmentation."""

    def __init__(self, size: int = 50) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> dict[str, Any]:
        assert type(i) is int
        noise = torch.tensor([random.random(), float(np.random.rand()), float(torch.rand(()))], dtype=torch.float64)
        return {"id": i, "noise": noise}


class Broken(Noisy):
    """Raises for one id."""

    def __init__(self, bad: int, error: Exception) -> None:
        super().__init__()
        self.bad, self.error = bad, error

    def __getitem__(self, i: int) -> dict[str, Any]:
        if i == self.bad:
            raise self.error
        return super().__getitem__(i)


def ramp() -> Schedule:
    """4, 8, 12 samples per step, through 2.4 epochs of 50 samples, the last step shortened."""
    return Linear(start=4, increment=4, samples=40, target=12).compile().until(121)


def noisy_collate(items: list[Any]) -> dict[str, Any]:
    """Draws random numbers: they depend on the split, but not on the workers."""
    return default_collate(items) | {"drawn": (random.random(), float(np.random.rand()), float(torch.rand(())))}


def load(
    micro: int = 4, rank: int = 0, ranks: int = 1, start: int = 0, dataset: Any = None, **options: Any
) -> Iterable[Micro]:
    dataset = dataset or Noisy()
    sampler = StepSampler(ramp(), micro, rank, ranks, start, allow_ragged=True)
    return Loader(dataset, GlobalOrder(len(dataset), seed=11), sampler, **options)


def rows(micros: Iterable[Micro]) -> dict[int, tuple[int, list[float]]]:
    """Position -> (id, noise) of every row that is not a filler; each position once."""
    found: dict[int, tuple[int, list[float]]] = {}
    for micro in micros:
        assert micro.data["id"].tolist() == micro.ids.tolist()
        for position, id, noise in zip(micro.positions, micro.ids.tolist(), micro.data["noise"].tolist(), strict=True):
            if not micro.filler:
                assert position not in found
                found[position] = id, noise
    return found


@pytest.fixture(scope="module")
def reference() -> dict[int, tuple[int, list[float]]]:
    """The whole stream of one process without workers."""
    stream = rows(load())
    assert list(stream) == list(range(121))
    assert [id for id, _ in stream.values()] == GlobalOrder(50, seed=11).ids(range(121)).tolist()
    assert len({tuple(noise) for _, noise in stream.values()}) == 121  # the augmentation changes every epoch
    return stream


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("micro", [1, 3, 7])
def test_samples_and_augmentation_do_not_depend_on_the_split(micro: int, ranks: int, reference) -> None:
    union: dict[int, tuple[int, list[float]]] = {}
    for rank in range(ranks):
        own = rows(load(micro, rank, ranks))
        assert not union.keys() & own.keys()
        union |= own
    assert union == reference


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": 2},
        {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 5},
        {"num_workers": 1, "multiprocessing_context": "spawn"},
    ],
    ids=["fork", "persistent", "spawn"],
)
def test_workers_give_the_same_sequence_across_the_ramp(options: dict[str, Any]) -> None:
    alone, loader = list(load(collate=noisy_collate)), load(collate=noisy_collate, **options)
    passes = 2 if "persistent_workers" in options else 1
    for _ in range(passes):
        with_workers = list(loader)
        assert with_workers == alone  # steps, indices, counts, positions
        for one, other in zip(alone, with_workers, strict=True):
            assert np.array_equal(one.ids, other.ids)
            assert torch.equal(one.data["noise"], other.data["noise"]) and one.data["drawn"] == other.data["drawn"]


@pytest.mark.slow
def test_one_set_of_workers_serves_every_stage() -> None:
    micros = list(load(dataset=WhoReads(), num_workers=2, collate=list))
    assert len({m.step.segment for m in micros}) == 3
    assert len({process for m in micros for process in m.data}) == 2


class WhoReads(Noisy):
    """A sample is the process that read it."""

    def __getitem__(self, i: int) -> int:  # type: ignore[override]
        import os

        return os.getpid()


@pytest.mark.parametrize("stop", [1, 5, 10])
def test_resuming_on_another_world_equals_the_uninterrupted_stream(stop: int, reference) -> None:
    """Train some steps on two ranks, with prefetched samples; continue on three ranks with another micro batch size."""
    position = ramp().at_step(stop).start_sample
    trained = {}
    for rank in range(2):
        ahead = iter(load(2, rank, 2))
        taken = [m for m in islice(ahead, 3 * stop + 3) if m.step.end_sample <= position]
        trained |= rows(taken)
    for rank in range(3):
        trained |= rows(load(5, rank, 3, start=position))
    assert trained == reference


def test_the_generators_of_the_process_are_not_changed() -> None:
    def draws(loader: Iterable[Micro]) -> list[float]:
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
        found = []
        for _ in loader:
            found += [random.random(), float(np.random.rand()), float(torch.rand(()))]
        return found

    class Quiet(Noisy):
        def __getitem__(self, i: int) -> dict[str, Any]:
            return {"id": i, "noise": torch.zeros(3)}

    micros = list(load())
    assert draws(load()) == draws(micros) == draws(load(dataset=Quiet()))


@pytest.mark.parametrize("drawn", [0, 1, 2, 311, 312, 623, 624])
def test_numpys_state_is_restored_with_the_normal_it_kept(drawn: int) -> None:
    """numpy draws normals in pairs and keeps the second one for the next call. Its state has blocks of 624 numbers."""

    class Pairs(Noisy):
        def __getitem__(self, i: int) -> dict[str, Any]:
            return {"id": i, "noise": torch.tensor([float(np.random.randn()), 0.0, 0.0])}

    np.random.seed(3)
    np.random.randn(drawn)
    before = np.random.get_state()
    micros = list(load(dataset=Pairs()))
    for one, other in zip(before, np.random.get_state(), strict=True):
        assert np.array_equal(one, other)
    after = np.random.randn(3)
    np.random.set_state(before)
    assert np.array_equal(after, np.random.randn(3))
    # A kept normal is not used for another sample.
    assert len({float(row[0]) for m in micros for row in m.data["noise"]}) == 121


def test_a_loader_inside_a_dataset_does_not_change_what_the_dataset_draws() -> None:
    class Outer(Noisy):
        def __getitem__(self, i: int) -> dict[str, Any]:
            drawn = np.random.rand()
            if i % 2:
                list(load(dataset=self.inner))
            return {"id": i, "noise": torch.tensor([drawn, np.random.rand(), 0.0])}

        inner: Any = Noisy()

    class Deep(Outer):
        inner = Outer()

    class Plain(Outer):
        def __getitem__(self, i: int) -> dict[str, Any]:
            return {"id": i, "noise": torch.tensor([np.random.rand(), np.random.rand(), 0.0])}

    samples = [next(iter(load(dataset=kind()))).data["noise"] for kind in (Plain, Outer, Deep)]
    assert torch.equal(samples[0], samples[1]) and torch.equal(samples[0], samples[2])


def test_another_kind_of_global_generator_is_refused() -> None:
    global_: Any = np.random
    kept = global_.get_bit_generator()
    global_.set_bit_generator(np.random.PCG64(1))
    try:
        with pytest.raises(RunError, match=r"replaced by PCG64.*Put MT19937 back"):
            list(load())
    finally:
        global_.set_bit_generator(kept)


# Position 7 with seed 11: a run that resumes with a later version of this package must draw the same.
DRAWN = (0.898864498686348, 0.36219756104238265, 0.7225756645202637)


def test_the_random_numbers_of_a_position_never_change(reference) -> None:
    assert reference[7][1] == list(DRAWN)


def test_collate_is_the_users_and_a_filler_carries_the_same_sample_again() -> None:
    micros = list(load(2, rank=2, ranks=3, collate=lambda items: [item["id"] for item in items]))
    assert all(m.data == m.ids.tolist() for m in micros)
    fillers = [m for m in micros if m.filler]
    assert fillers and all(m.samples == 0 and len(m.ids) == 1 for m in fillers)
    order = GlobalOrder(50, seed=11)
    assert all(m.ids.tolist() == order.ids(m.positions).tolist() for m in micros)


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_an_item_that_raises_shows_the_users_traceback_with_position_and_id(workers: int) -> None:
    order = GlobalOrder(50, seed=11)
    bad = int(order.ids([9])[0])
    with pytest.raises(ZeroDivisionError) as caught:
        list(load(dataset=Broken(bad, ZeroDivisionError("planted")), num_workers=workers))
    shown = str(caught.value) + "".join(getattr(caught.value, "__notes__", []))
    assert "planted" in shown and f"dataset[{bad}], the sample at position 9" in shown


def test_an_item_that_stops_the_iteration_does_not_end_the_run_in_silence() -> None:
    with pytest.raises(RunError, match="StopIteration"):
        list(load(dataset=Broken(7, StopIteration())))


def test_a_collate_that_raises_names_the_samples() -> None:
    def collate(items: list[Any]) -> Any:
        raise KeyError("planted")

    with pytest.raises(KeyError) as caught:
        list(load(collate=collate))
    assert "positions range(0, 4)" in caught.value.__notes__[0]


@dataclass(frozen=True)
class Asked(GlobalOrder):
    """Records the sizes of its requests."""

    notes: list[int] = field(default_factory=list)

    def ids(self, positions: Any) -> Any:
        self.notes.append(len(positions))
        return super().ids(positions)


@pytest.mark.parametrize(
    ("batch", "steps", "start", "asked"),
    [
        (8, 1024, 0, [4096, 4096]),  # small steps together: on two ranks, 512 steps at once
        (10_000, 3, 10_000, [5000, 5000, 5000]),  # large steps: one share each
        (8, 2, 2**63 - 16, [16]),  # nothing beyond the largest position
    ],
)
def test_ids_are_asked_for_many_at_once_and_stay_those_of_the_positions(batch, steps, start, asked) -> None:
    order, sampler = Asked(50, 11), StepSampler(Constant(batch).compile(), batch // 2, 0, 2, start)
    micros = list(islice(_SlicesWithIds(sampler, order), steps))
    assert order.notes == asked
    plain = GlobalOrder(50, 11)
    assert all(ids.tolist() == plain.ids(part.positions).tolist() for part, ids in micros)


class Stream(IterableDataset):  # type: ignore[type-arg]
    """Can only be read in order."""

    def __iter__(self):
        return iter(range(10))


@pytest.mark.parametrize(
    ("dataset", "size", "options", "field"),
    [
        (Stream(), 10, {}, "dataset"),
        (iter([1, 2]), 2, {}, "dataset"),
        (Noisy(50), 49, {}, "size"),
        (Noisy(50), 50, {"shuffle": True}, "shuffle"),
        (Noisy(50), 50, {"batch_size": 3}, "batch_size"),
        (Noisy(50), 50, {"collate_fn": list}, "collate_fn"),
    ],
)
def test_what_the_loader_cannot_do_exactly_is_an_error(dataset, size: int, options, field: str) -> None:
    with pytest.raises(PlanError) as caught:
        Loader(dataset, GlobalOrder(size), StepSampler(Constant(4).compile(), 2), **options)
    assert caught.value.field == field


def test_plain_lists_and_tensors_are_datasets() -> None:
    sampler = StepSampler(Constant(4).compile().until(8), 2)
    loader = Loader(list(range(100, 108)), GlobalOrder(8, shuffle=False), sampler)
    assert [m.data.tolist() for m in loader] == [[100, 101], [102, 103], [104, 105], [106, 107]]
    assert [m.data.shape for m in Loader(torch.zeros(8, 3), GlobalOrder(8), sampler)] == [(2, 3)] * 4
    assert repr(next(iter(loader))).startswith("Micro(step=Step(step=0,")


def on_mesh(rank: int) -> dict[int, tuple[int, list[float]]]:
    """On each of four ranks of a dp × tp mesh: all rows that the loader gives, read by a worker."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return rows(load(3, *data_parallel(mesh, "dp"), num_workers=1, collate=default_collate))


@pytest.mark.slow
def test_tensor_parallel_peers_see_equal_and_data_parallel_peers_disjoint_samples(run_ranks, reference) -> None:
    found = run_ranks(on_mesh, 4)
    assert found[0] == found[1] and found[2] == found[3]
    assert not found[0].keys() & found[2].keys()
    assert found[0] | found[2] == reference


class Pids(Noisy):
    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"id": i, "pid": os.getpid(), "told": TOLD[0]}


TOLD = [-1]


def tell(worker: int) -> None:
    TOLD[0] = worker


@pytest.mark.slow
def test_a_signal_to_the_process_group_does_not_stop_the_workers() -> None:
    micros = iter(load(dataset=Pids(), num_workers=2, worker_init_fn=tell))
    seen = list(islice(micros, 4))
    pids = {int(micro.data["pid"][0]) for micro in seen}
    assert len(pids) == 2 and os.getpid() not in pids
    assert {int(micro.data["told"][0]) for micro in seen} == {0, 1}  # the user's worker_init_fn was called too
    for pid in pids:
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            os.kill(pid, number)
    seen += list(micros)
    assert max(micro.positions.stop for micro in seen) == 121
    assert {int(micro.data["pid"][0]) for micro in seen} == pids


FAILS = """
import tempfile
keep = tempfile.TemporaryDirectory()  # a finalizer that is registered before those of multiprocessing
from batchwright.core.ramp.rules import Constant
from batchwright.runtime import GlobalOrder, Loader, StepSampler

class Broken:
    def __len__(self): return 8
    def __getitem__(self, i): return 1 // (i - 5)

if __name__ == "__main__":
    loader = Loader(Broken(), GlobalOrder(8), StepSampler(Constant(4).compile().until(8), 2), num_workers=2, **{options})
    try:
        list(loader)
    except Exception as error:
        error.itself = error  # a reference cycle, collected in any order
    import gc, multiprocessing
    gc.collect()
    assert {options} or not multiprocessing.active_children()
    held = iter(loader)
    next(held)
    list(loader)
"""


COUNTS = """
import gc
from functools import partial
from batchwright.core.ramp.rules import Constant
from batchwright.runtime import GlobalOrder, Loader, StepSampler
from batchwright.runtime.data.loader import _end_workers

def exit_functions():
    gc.collect()
    return sum(type(one) is partial and one.func is _end_workers for one in gc.get_objects())

if __name__ == "__main__":
    loader = Loader(list(range(8)), GlobalOrder(8), StepSampler(Constant(4).compile().until(8), 2), num_workers=1)
    for _ in range(3):
        assert len(list(loader)) == 4
    held = iter(loader)
    next(held)
    assert exit_functions() == 1
    del held  # an iterator that was not exhausted
    assert exit_functions() == 0
"""


@pytest.mark.slow
def test_finished_iterations_leave_no_exit_function(tmp_path) -> None:
    (tmp_path / "counts.py").write_text(COUNTS)
    done = subprocess.run([sys.executable, tmp_path / "counts.py"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"persistent_workers": True}], ids=["plain", "persistent"])
def test_a_process_whose_sample_raised_ends_though_its_workers_ignore_sigterm(options, tmp_path) -> None:
    (tmp_path / "fails.py").write_text(FAILS.replace("{options}", repr(options)))
    done = subprocess.run([sys.executable, tmp_path / "fails.py"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 1 and "ZeroDivisionError" in done.stderr


def test_a_batch_of_a_billion_does_not_make_all_its_ids_at_once():

    order = GlobalOrder(100, seed=3)
    sampler = StepSampler(Constant(10**9).compile().until(2 * 10**9), 500_000)
    tracemalloc.start()
    try:
        read = [(part, ids) for part, ids in islice(_SlicesWithIds(sampler, order), 4)]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2**27
    for part, ids in read:
        assert np.array_equal(ids[:9], order.ids(part.positions[:9])) and len(ids) == len(part.positions)
