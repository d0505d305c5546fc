"""Valid requests close to a given one, compared with trying every batch on every number of ranks."""

from __future__ import annotations

import time
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import batchwright
from batchwright.core.batch.nearby import MOST_ROWS, nearby
from batchwright.core.batch.plan import plan
from batchwright.core.batch.request import BatchRequest
from batchwright.core.errors import PlanError
from tests.examples import many

maybe = st.none() | st.integers(1, 5)


def works(request: BatchRequest, batch: int, ranks: int) -> bool:
    try:
        plan(replace(request, global_batch_size=batch, data_parallel_size=ranks))
    except PlanError:
        return False
    return True


@settings(deadline=None, max_examples=many(60))
@given(
    st.integers(1, 60),
    st.integers(1, 12),
    maybe,
    maybe,
    st.sampled_from([None, None, 2, 4]),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([1, 1, 2]),
    st.none() | st.integers(1, 6),
    st.sampled_from([0, 5, 10, 25, 50]),
)
def test_nearby_equals_brute_force(batch, ranks, micro, steps, per_node, expert, stages, limit, percent):
    request = BatchRequest(
        global_batch_size=batch,
        data_parallel_size=ranks,
        micro_batch_size=micro,
        accumulation_steps=steps,
        devices_per_node=per_node,
        expert_parallel=expert,
        pipeline_parallel=stages,
        pipeline_schedule="circular" if stages > 1 else None,
        max_micro_batch_size=limit,
    )
    tolerance = Fraction(percent, 100)
    found = nearby(request, tolerance)
    rows = [(row.global_batch_size, row.data_parallel_size) for row in found]
    expected = set()
    for other in range(1, 2 * ranks + 1):
        if abs(other - ranks) > ranks * tolerance or (per_node and other * stages % per_node):
            continue
        sizes = [b for b in range(1, 2 * batch + 1) if abs(b - batch) <= batch * tolerance]
        quantum = (micro or 1) * (steps or 1) * other
        sizes = [b for b in sizes if (b == quantum if micro and steps else b % quantum == 0)]
        if other != ranks and sizes:  # on other ranks only the closest batch; of two equally close ones the larger
            sizes = [min(sizes, key=lambda b: (abs(b - batch), -b))]
        expected |= {(b, other) for b in sizes if works(request, b, other)}
    assert set(rows) == expected
    assert len(rows) == len(expected)
    distance = [Fraction(abs(b - batch), batch) + Fraction(abs(r - ranks), ranks) for b, r in rows]
    assert distance == sorted(distance), "closest first"
    for row in found:
        assert row.batch_change == pytest.approx(row.global_batch_size / batch - 1)
        assert row.ranks_change == pytest.approx(row.data_parallel_size / ranks - 1)
        if micro:
            assert row.accumulation_steps * micro * row.data_parallel_size == row.global_batch_size


@settings(deadline=None, max_examples=many(60))
@given(
    st.integers(1, 300),
    st.integers(1, 7),
    st.integers(1, 40),
    st.sampled_from([1, 2, 3]),
    st.none() | st.integers(1, 5),
    maybe,
    st.sampled_from([5, 10, 25, 50]),
)
def test_around_tokens_and_devices_that_are_not_whole(tokens, length, devices, tensor, nodes, micro, percent):
    request = BatchRequest(
        global_batch_size_tokens=tokens,
        sequence_length=length,
        devices=devices,
        nodes=nodes,
        tensor_parallel=tensor,
        micro_batch_size=micro,
    )
    tolerance, batch, ranks = Fraction(percent, 100), Fraction(tokens, length), Fraction(devices, tensor)
    found = nearby(request, tolerance)
    expected = set()
    for other in range(1, 2 * devices + 1):
        even = other * tensor % (devices // nodes if devices % nodes == 0 else nodes) == 0 if nodes else True
        if abs(other - ranks) > ranks * tolerance or not even:
            continue
        sizes = [k * other * (micro or 1) for k in range(1, 2 * tokens + 1)]
        sizes = [b for b in sizes if abs(b - batch) <= batch * tolerance]
        if other != ranks and sizes:
            sizes = [min(sizes, key=lambda b: (abs(b - batch), -b))]
        expected |= {(b, other) for b in sizes}
    rows = [(row.global_batch_size, row.data_parallel_size) for row in found]
    assert set(rows) <= expected and len(set(rows)) == len(rows) == min(len(expected), MOST_ROWS)
    distance = [abs(b - batch) / batch + abs(r - ranks) / ranks for b, r in rows]
    assert distance == sorted(distance)
    for row in found:
        assert row.batch_change == pytest.approx(float(row.global_batch_size / batch - 1))
        assert row.nodes is None or row.data_parallel_size * tensor % row.nodes == 0


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        ({"devices": 9, "nodes": 2, "devices_per_node": 4, "tensor_parallel": 3}, "devices=9 contradicts nodes 2"),
        (
            {"devices": 9, "tensor_parallel": 2, "data_parallel_size": 4},
            "devices=9 does not hold a whole number of replicas",
        ),
        ({"devices": 8, "global_batch_size_tokens": 65, "sequence_length": 2}, "is 32.50 samples"),
        ({"devices": 8, "global_batch_size_tokens": 65}, "needs sequence_length"),
    ],
)
def test_a_contradiction_has_no_nearest_values(given_, message):
    with pytest.raises(PlanError, match=message):
        batchwright.nearby(global_batch_size=64, tolerance="10%", **given_)


def test_every_node_count_that_works_is_listed_with_its_batch():
    rows = batchwright.nearby(global_batch_size=1000, micro_batch_size=4, nodes=6, devices_per_node=8, tolerance="20%")
    assert {row.nodes for row in rows} == {5, 6, 7}
    assert (rows[0].global_batch_size, rows[0].nodes) == (960, 6)
    assert all(abs(row.batch_change) <= 0.2 for row in rows)


def test_a_tolerance_of_zero_gives_the_request_itself_or_nothing():
    assert [
        r.global_batch_size for r in nearby(BatchRequest(global_batch_size=64, data_parallel_size=8), Fraction(0))
    ] == [64]
    assert nearby(BatchRequest(global_batch_size=65, data_parallel_size=8), Fraction(0)) == ()


def test_tolerance_needs_something_to_look_around():
    with pytest.raises(PlanError, match="needs a global batch and a number of ranks") as caught:
        batchwright.nearby(global_batch_size=64, tolerance="10%")
    assert caught.value.field == "tolerance"


def test_the_largest_request_is_answered_at_once():
    start = time.process_time()
    rows = nearby(BatchRequest(global_batch_size=10**9, data_parallel_size=10**6), Fraction(1))
    assert time.process_time() - start < 2
    assert (rows[0].global_batch_size, rows[0].data_parallel_size) == (10**9, 10**6)
