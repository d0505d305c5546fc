"""Cutting spans: every position once over all ranks and micro steps, for any number of ranks and micro batch size."""

from __future__ import annotations

from itertools import groupby

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.core.errors import EnvironmentFault, PlanError, ScheduleError
from batchwright.core.ramp.rules import Constant, Linear
from batchwright.core.ramp.schedule import Schedule, Segment, Step
from batchwright.runtime.data.sampler import Slice, StepSampler, micro_steps, share, slices
from batchwright.runtime.ranks import Ranks, data_parallel, discover

pytestmark = pytest.mark.torch


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """A few segments of any batch size; the last step may be shortened."""
    segments: list[Segment] = []
    step = sample = 0
    for size, steps in draw(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 4)), min_size=1, max_size=4)):
        segments.append(Segment(step, sample, size, steps))
        step, sample = step + steps, sample + steps * size
    schedule = Schedule(tuple(segments))
    return schedule.until(draw(st.integers(1, sample)))


def seen(slices: list[Slice]) -> list[int]:
    """The positions without fillers."""
    return [position for s in slices if not s.filler for position in s.positions]


@given(st.integers(0, 10**15), st.integers(0, 500), st.integers(1, 70))
def test_shares_partition_the_span_in_rank_order(start: int, length: int, ranks: int) -> None:
    span = range(start, start + length)
    shares = [share(span, rank, ranks) for rank in range(ranks)]
    assert [p for s in shares for p in s] == list(span)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@given(st.integers(1, 300), st.integers(1, 20), st.integers(1, 20))
def test_micro_steps_are_those_of_the_longest_share(samples: int, ranks: int, micro: int) -> None:
    longest = -(-samples // ranks)
    assert micro_steps(samples, ranks, micro) == -(-longest // micro)


@given(st.integers(0, 10**12), st.integers(1, 200), st.integers(1, 12), st.integers(1, 9))
def test_one_step_is_cut_exactly(start: int, batch: int, ranks: int, micro: int) -> None:
    step = Step(3, start, batch, 0)
    per_rank = [list(slices(step, rank, ranks, micro)) for rank in range(ranks)]
    assert sorted(p for own in per_rank for p in seen(own)) == list(range(start, start + batch))
    assert {len(own) for own in per_rank} == {micro_steps(batch, ranks, micro)}
    for own in per_rank:
        assert [s.index for s in own] == list(range(own[0].count)) and {s.count for s in own} == {len(own)}
        sizes = [s.samples for s in own]
        assert all(size == micro for size in sizes[:-2]) and sizes == sorted(sizes, reverse=True)  # full ones first
        for s in own:
            assert s.positions and set(s.positions) <= set(range(start, start + batch))
            assert not s.filler or len(s.positions) == 1


def test_a_rank_without_any_sample_repeats_one_of_the_span() -> None:
    assert list(slices(Step(0, 10, 2, 0), rank=2, ranks=3, micro_batch_size=4)) == [
        Slice(Step(0, 10, 2, 0), 0, 1, range(10, 11), filler=True)
    ]


@given(schedule=schedules(), data=st.data())
@settings(max_examples=200, deadline=None)
def test_worlds_and_micro_batches_that_change_in_mid_run_see_every_position_once(
    schedule: Schedule, data: st.DataObject
) -> None:
    """Several launches: each resumes at the position of the one before, with other ranks and micro batch sizes."""
    position, total = 0, schedule.total_samples
    trained: list[int] = []
    while position != total:
        ranks = data.draw(st.integers(1, 6), "ranks")
        sizes = data.draw(st.lists(st.integers(1, 9), min_size=4, max_size=4), "micro_batch_size of each stage")
        steps = data.draw(st.integers(1, 5), "steps until the next change")
        launch = [
            [
                list(own)
                for _, own in groupby(
                    StepSampler(schedule, lambda s, m=sizes: m[s.segment], rank, ranks, position, allow_ragged=True),
                    key=lambda s: s.step,
                )
            ]
            for rank in range(ranks)
        ]
        for k in range(min(steps, len(launch[0]))):
            of_ranks = [own[k] for own in launch]
            step = of_ranks[0][0].step
            assert step == schedule.at_sample(position)
            assert len({len(own) for own in of_ranks}) == 1
            union = [p for own in of_ranks for p in seen(own)]
            assert sorted(union) == list(range(step.start_sample, step.end_sample))
            trained += union
            position = step.end_sample
    assert sorted(trained) == list(range(total or 0))


def test_a_ramp_adds_micro_steps_before_it_changes_their_shape() -> None:
    schedule = Linear(start=16, increment=16, samples=96, target=64).compile().until(400)
    sampler = StepSampler(schedule, 8, rank=1, ranks=2)
    shapes = [(s.step.global_batch_size, s.count, len(s.positions)) for s in sampler]
    assert {shape[2] for shape in shapes[:-1]} == {8}
    assert {batch: count for batch, count, _ in shapes[:-4]} == {16: 1, 32: 2, 48: 3, 64: 4}


def test_a_schedule_without_end_can_start_anywhere_at_no_cost() -> None:
    start = 32 * 10**12
    sampler = StepSampler(Constant(32).compile(), 16, rank=0, ranks=2, start=start)
    assert next(iter(sampler)).positions == range(start, start + 16)
    assert next(iter(sampler)) == next(iter(sampler))


def test_start_must_be_a_boundary_and_the_end_is_one() -> None:
    schedule = Constant(32).compile().until(100)
    with pytest.raises(ScheduleError, match=r"start=40 is inside a step: step 1 has positions 32 to 64") as caught:
        StepSampler(schedule, 8, start=40)
    assert caught.value.nearest == (32, 64) and caught.value.field == "start"
    assert list(StepSampler(schedule, 8, start=100)) == []
    for outside in (101, -1):
        with pytest.raises(ScheduleError):
            StepSampler(schedule, 8, start=outside)


def test_batches_that_do_not_divide_are_refused_for_all_stages_together() -> None:
    schedule = Linear(start=16, increment=8, samples=96, target=32).compile()
    with pytest.raises(PlanError) as caught:
        StepSampler(schedule, 5, ranks=2)
    assert [v.given for v in caught.value.violations] == [16, 24, 32]
    assert caught.value.nearest == (10, 20)
    assert "micro_batch_size 5 × 2 ranks = 10, and 16 / 10 = 1.60. Nearest: 10 (1) or 20 (2)" in str(caught.value)
    StepSampler(schedule, 5, ranks=2, allow_ragged=True)
    # `until` shortens the last step on purpose.
    assert seen(list(StepSampler(Constant(8).compile().until(11), 4))) == list(range(11))


def test_a_micro_batch_function_is_checked_at_every_step() -> None:
    sampler = StepSampler(Constant(8).compile(), lambda step: 4 if step.step < 2 else 3)
    with pytest.raises(PlanError, match="step 2 is not a whole number"):
        list(sampler)
    with pytest.raises(PlanError, match="micro_batch_size=0"):
        StepSampler(Constant(8).compile(), 0)


@pytest.mark.parametrize(("rank", "ranks", "nearest"), [(2, 2, (1,)), (-1, 2, (0,)), (0, 0, (0,))])
def test_a_rank_outside_its_ranks_is_an_error(rank: int, ranks: int, nearest: tuple[int, ...]) -> None:
    with pytest.raises(PlanError) as caught:
        StepSampler(Constant(8).compile(), 1, rank, ranks)
    assert caught.value.nearest == nearest


def test_ranks_come_from_torchrun_then_srun() -> None:
    torchrun = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    srun = {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1", "SLURM_NTASKS": "8"}
    assert discover(torchrun | srun) == Ranks(3, 4, 1, 2)
    assert discover(srun) == Ranks(5, 8, 1, None)
    # The batch script's own process, without srun, is one process, not eight.
    assert discover({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}) == Ranks()


@pytest.mark.parametrize(
    ("environment", "field"),
    [
        ({"RANK": "3"}, "WORLD_SIZE"),
        ({"WORLD_SIZE": "3"}, "RANK"),
        ({"RANK": "x", "WORLD_SIZE": "3"}, "RANK"),
        ({"RANK": "3", "WORLD_SIZE": "3"}, "RANK"),
        ({"SLURM_STEP_NUM_TASKS": "3"}, "SLURM_PROCID"),
    ],
)
def test_a_broken_environment_is_named(environment: dict[str, str], field: str) -> None:
    with pytest.raises(EnvironmentFault) as caught:
        discover(environment)
    assert caught.value.field == field and caught.value.exit_code == 4


def on_mesh(rank: int) -> dict[str, object]:
    """On each of four ranks: data-parallel ranks of several meshes, and the positions of a dp × tp one."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    swapped = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))
    line = init_device_mesh("cpu", (4,))
    own, ranks = data_parallel(mesh, "dp")
    errors = []
    for dims in (None, "pp", ("dp", "dp"), ()):
        try:
            data_parallel(mesh, dims)
        except PlanError as error:
            errors.append((error.field, error.nearest))
    schedule = Linear(start=8, increment=8, samples=16, target=16).compile().until(64)
    return {
        "places": [data_parallel(mesh, "dp"), data_parallel(swapped, "dp"), data_parallel(line)],
        "both": [data_parallel(mesh, ("dp", "tp")), data_parallel(mesh, ("tp", "dp")), data_parallel(mesh["dp"])],
        "positions": seen(list(StepSampler(schedule, 2, own, ranks))),
        "errors": errors,
    }


@pytest.mark.slow
def test_a_dp_by_tp_mesh_on_four_real_ranks(run_ranks) -> None:
    ranks = run_ranks(on_mesh, 4)
    assert [r["places"] for r in ranks] == [
        [(0, 2), (0, 2), (0, 4)],
        [(0, 2), (1, 2), (1, 4)],
        [(1, 2), (0, 2), (2, 4)],
        [(1, 2), (1, 2), (3, 4)],
    ]
    assert [r["both"] for r in ranks] == [
        [(0, 4), (0, 4), (0, 2)],
        [(1, 4), (2, 4), (0, 2)],
        [(2, 4), (1, 4), (1, 2)],
        [(3, 4), (3, 4), (1, 2)],
    ]
    positions = [r["positions"] for r in ranks]
    assert positions[0] == positions[1] and positions[2] == positions[3]  # tensor-parallel peers get the same samples
    assert sorted(positions[0] + positions[2]) == list(range(64))  # data-parallel peers share the span
    assert ranks[0]["errors"] == [("dims", ("dp", "tp"))] * 4


def fails_on_one_rank(rank: int) -> None:
    import torch
    import torch.distributed as dist

    if rank == 1:
        raise RuntimeError("planted")
    dist.all_reduce(torch.ones(1))


@pytest.mark.slow
def test_the_helper_reports_a_failing_rank_and_leaves_nothing_behind(run_ranks) -> None:
    import multiprocessing

    before = {child.pid for child in multiprocessing.active_children()}  # other tests may have processes
    with pytest.raises(pytest.fail.Exception, match="planted"):
        run_ranks(fails_on_one_rank, 2, timeout=300)
    assert {child.pid for child in multiprocessing.active_children()} <= before
