"""One order of samples, whoever reads it; a run goes on with other numbers of processes and devices."""

from __future__ import annotations

import numpy as np
import pytest

from batchwright.core.errors import PlanError
from batchwright.core.ramp.rules import Constant, Linear
from batchwright.runtime.data.order import GlobalOrder
from batchwright.runtime.state.audit import audit
from tests.jax.devices import run
from tests.needs import needs

needs("jax")
needs("optax")
needs("orbax")

SCHEDULE = Linear(start=16, increment=16, samples=96, target=48).compile()


def expected(start, end):
    order, schedule = GlobalOrder(1000, seed=9), SCHEDULE.until(end)
    steps = [schedule.at_step(n) for n in range(schedule.total_steps)]
    return {
        s.start_sample: sorted(order.ids(range(s.start_sample, s.end_sample)).tolist())
        for s in steps
        if s.start_sample >= start
    }


def check_fed(results, start, end):
    wanted = expected(start, end)
    for result in results:
        assert {at: ids for at, ids, _ in result["steps"]} == wanted
    for index, (at, ids) in enumerate(wanted.items()):
        recorded = [i for result in results for i in result["steps"][index][2]]
        assert sorted(recorded) == ids, at


def test_two_processes_feed_every_sample_of_a_step_once_and_a_resume_on_one_goes_on():
    before = run("fed", devices=2, processes=2, start=0, end=80)
    check_fed(before, 0, 80)
    assert [r["read"] for r in before] == [80, 80]  # each half, twice: the whole step, and by micro batches
    assert [r["asked"] for r in before] == [[0, 1], [2, 3]]  # nobody computes the shares of all ranks
    check_fed(run("fed", devices=3, start=80, end=201, micro=3), 80, 201)


def test_one_of_two_processes_reads_for_both():
    results = run("fed", devices=2, processes=2, start=16, end=201, loading_hosts=1)
    check_fed(results, 16, 201)
    assert results[0]["read"] == 2 * (201 - 16) and results[1]["read"] == 0


@pytest.mark.rounds
@pytest.mark.parametrize("hosts", [2, [1], [0, 2]])
def test_some_of_three_processes_read(hosts):
    results = run("fed", devices=1, processes=3, start=0, end=96, loading_hosts=hosts)
    check_fed(results, 0, 96)
    reading = hosts if isinstance(hosts, list) else list(range(hosts))
    assert [r["read"] > 0 for r in results] == [i in reading for i in range(3)]
    assert sum(r["read"] for r in results) == 2 * 96


def test_a_loop_of_a_user_goes_on_with_other_processes_exactly(tmp_path):
    whole = run("own_loop", devices=2, directory=str(tmp_path / "whole"), until=320, launch=0)[0]
    parts = str(tmp_path / "parts")
    first = run("own_loop", devices=1, directory=parts, until=80, launch=0)
    second = run("own_loop", devices=2, processes=2, directory=parts, until=200, launch=1)
    at = second[0][0]
    third = run("own_loop", devices=3, directory=parts, until=320, launch=2)
    assert first[0][0] == 80 and 80 < at < 320 and third[0][0] == 320
    weights, wanted = np.array(third[0][1]), np.array(whole[1])
    assert np.linalg.norm(weights - wanted) < 1e-5 * np.linalg.norm(wanted)
    report = audit(tmp_path / "parts")
    assert report.ok and report.samples == 320 and not report.gaps and not report.repeats, report


@pytest.mark.parametrize(
    "moment",
    [
        "orbax.checkpoint.CompositeCheckpointHandler.finalize",  # orbax has written the arrays
        pytest.param("batchwright.jax.checkpoint._commit", marks=pytest.mark.rounds),
    ],
)
def test_a_save_that_is_killed_does_not_count(tmp_path, moment):
    parts = str(tmp_path / "parts")
    run("own_loop", devices=2, directory=parts, until=80, launch=0)
    run("own_loop", devices=2, directory=parts, until=200, launch=1, die_in=moment, killed=True)
    folder = tmp_path / "parts" / "checkpoints"
    assert sorted(p.name[:9] for p in folder.iterdir()) == [".partial-", "step-0000"]
    assert run("own_loop", devices=1, directory=parts, until=320, launch=2)[0][0] == 320
    assert len(list(folder.iterdir())) == 2 and not list(folder.glob(".partial-*"))
    report = audit(tmp_path / "parts")
    assert report.ok and (report.samples, report.gaps, report.repeats) == (320, 0, 0), report
    assert report.discarded_samples


def test_processes_that_need_the_same_rows_cannot_leave_the_reading_to_one():
    (message,) = set(run("crossed", devices=2, processes=2))
    assert message.startswith("loading_hosts=[1]: rows are split over data, and other axes of the mesh cross processes")


def feed(schedule, micro=2, **options):
    import jax

    from batchwright.jax import Feed

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    return Feed([{"x": np.float32(i)} for i in range(50)], GlobalOrder(50), schedule, micro, mesh=mesh, **options)


def test_what_cannot_be_fed_is_refused():
    with pytest.raises(PlanError, match=r"step 1 has 2 samples, .* micro_batch_size 4 × 1 ranks = 4") as e:
        feed(Constant(8).compile().until(10), 4)
    assert e.value.field == "blank"
    with pytest.raises(PlanError, match=r"step 0 has 7 samples, .* Nearest: 6 or 8. Or give `blank`") as e:
        feed(Constant(7).compile().until(70), 2)
    assert "allow_ragged" not in str(e.value)
    changing = feed(Constant(8).compile().until(40), lambda step: 4 if step.step == 2 else 2)
    with pytest.raises(PlanError, match="micro_batch_size is 4 at step 2, and 2 at step 0 of the same segment"):
        list(changing)
    with pytest.raises(PlanError, match="axis='model' does not name the axes"):
        feed(Constant(8).compile(), axis="model")
    with pytest.raises(PlanError, match="loading_hosts needs rows that are stacked"):
        feed(Constant(8).compile(), loading_hosts=1, collate=list)


def test_shapes_change_only_with_the_micro_batch_size():
    schedule = Linear(start=4, increment=4, samples=32, target=16).compile().until(160)
    shapes = {step.batches["x"].shape for step in feed(schedule, lambda step: 2 if step.segment < 2 else 4)}
    assert shapes == {(4, 2), (4, 4)}
    assert {step.batches["x"].shape for step in feed(schedule)} == {(8, 2)}
