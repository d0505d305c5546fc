"""The choice among ways to train, with scripted peaks: no torch."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.core.batch.request import BatchRequest
from batchwright.core.numbers import divisors
from batchwright.estimate.choose import choose, closest, ways
from batchwright.estimate.records import EstimateRequest, Point
from batchwright.estimate.remedies import remedies
from batchwright.estimate.walks import Walks

BASE = EstimateRequest("", model="config.json", sequence_lengths=(1024,))


class Scripted(Walks):
    """Peaks by a formula: states are divided by the ranks, activations by recomputation; `layers` are walked, or all."""

    def __init__(
        self, layers: int | None, whole: int = 32, states: int = 10, activations: int = 4, late: int = 0
    ) -> None:
        super().__init__(runs=None)  # type: ignore[arg-type]
        self.__dict__["layers"] = layers
        self.whole, self.states, self.activations, self.late = whole, states, activations, late
        self.walked: list[int | None] = []

    def _walk(self, request: EstimateRequest, size: int) -> Point:
        depth = request.layers or self.whole
        self.walked.append(request.layers)
        kept = 1 if request.checkpoint_activations else self.activations
        states = self.states * depth * (request.accumulation_steps + 1) // (2 * request.ranks)
        # `late`: a second line that is the peak in deep models only.
        peak = max(states + kept * size * depth, self.late * (depth - 8))
        return Point(size, 1024, peak, {"parameters": states, "activations": peak - states})


def best(walks: Scripted, limit: int, batch: BatchRequest) -> tuple[int, bool, int] | None:
    """By brute force: the largest micro batch of every way, and the best by the documented rule."""
    share = (batch.global_batch_size or 0) // 8
    found = []
    for way in ways(batch, BASE, None, None):
        sizes = [
            size
            for size in divisors(share)
            if walks._walk(replace(way, accumulation_steps=1 if size == share else 2), size).peak_memory_bytes <= limit
        ]
        if sizes:
            time = (4 / 3 if way.checkpoint_activations else 1) * (1.1 if way.ranks > 1 else 1)
            found.append((time * (1 + 512 / (max(sizes) * 1024)), max(sizes), way.checkpoint_activations, way.ranks))
    return min(found)[1:] if found else None


@settings(max_examples=60, deadline=None)
@given(st.integers(50, 4000), st.sampled_from([8, 64, 96, 512]), st.sampled_from([None, 32]), st.integers(0, 60))
def test_the_choice_is_the_best_by_brute_force_from_few_layers_or_all(limit, size, layers, late):
    batch = BatchRequest(global_batch_size=size, devices=8, sequence_length=1024)
    walks = Scripted(layers, late=late)
    made = choose(batch, ways(batch, BASE, None, None), limit, walks)
    wanted = best(Scripted(None, late=late), limit, batch)
    if wanted is None:
        assert made is None
        return
    assert made is not None
    assert made.point.peak_memory_bytes <= limit and made.candidates[0].source == "estimated"
    assert made.plan.global_batch_size == size and made.plan.sources["max_micro_batch_size"] == "estimated"
    assert (made.plan.micro_batch_size, made.request.checkpoint_activations, made.request.ranks) == wanted


def test_few_layers_are_walked_often_and_all_layers_for_the_winner():
    batch = BatchRequest(global_batch_size=512, devices=8, sequence_length=1024)
    walks = Scripted(32)
    made = choose(batch, ways(batch, BASE, None, None), 900, walks)
    assert made is not None and len(made.candidates) == 4
    assert walks.walked.count(None) == 1 and set(walks.walked) == {None, 2, 4}
    assert [c.source for c in made.candidates] == ["estimated", *["extrapolated"] * 3]


def test_what_few_layers_call_too_large_is_walked_before_it_is_refused():
    # Two and four layers overestimate: as if a first block were shared by all.
    class Wrong(Scripted):
        def _walk(self, request, size):
            point = super()._walk(request, size)
            return replace(point, peak_memory_bytes=point.peak_memory_bytes * 10) if request.layers == 4 else point

    batch = BatchRequest(global_batch_size=8, devices=8, sequence_length=1024)
    made = choose(batch, ways(batch, BASE, None, None), 600, Wrong(32))
    right = choose(batch, ways(batch, BASE, None, None), 600, Scripted(None))
    assert made is not None and right is not None and made.point == right.point


def test_numbers_that_were_given_are_kept():
    batch = BatchRequest(global_batch_size=64, micro_batch_size=2, devices=8, sequence_length=1024)
    made = choose(batch, ways(batch, BASE, None, None), 4000, Scripted(32))
    assert made is not None and (made.plan.micro_batch_size, made.plan.accumulation_steps) == (2, 4)
    assert ways(batch, BASE, True, False) == [replace(BASE, checkpoint_activations=True)]
    assert [w.ranks for w in ways(batch, BASE, False, True)] == [8]
    free = BatchRequest(devices=8, sequence_length=1024)
    made = choose(free, ways(free, BASE, False, False), 4000, Scripted(None))
    assert made is not None and made.plan.accumulation_steps == 1
    assert (
        made.point.peak_memory_bytes
        <= 4000
        < Scripted(None)._walk(BASE, made.plan.micro_batch_size + 1).peak_memory_bytes
    )


@pytest.mark.parametrize("parallel", [2, 4])
def test_tensor_parallel_is_a_rule_and_its_plan_is_of_the_same_batch(parallel):
    batch = BatchRequest(global_batch_size=64, devices=8, tensor_parallel=parallel, sequence_length=1024)
    base = replace(BASE, tensor_parallel=parallel)
    made = choose(batch, ways(batch, base, None, None), 300, Scripted(32))
    assert made is not None and made.candidates[0].source == "rule"
    plan = made.plan
    assert plan.micro_batch_size * plan.accumulation_steps * (8 // parallel) == plan.global_batch_size == 64


def test_remedies_name_each_change_with_its_peak_and_the_fewest_ranks():
    walks = Scripted(None)
    batch = BatchRequest(global_batch_size=8, devices=1, sequence_length=1024)
    request, point, size = closest(batch, ways(batch, BASE, None, None), walks)
    assert request.checkpoint_activations and size == 1
    found = {r.change: r for r in remedies(request, size, point.peak_memory_bytes // 4, walks)}
    assert {"lora=16", "optimizer=adamw-8bit", "precision=bf16-pure", "lora=16 + precision=bf16-pure"} <= set(found)
    ranks = next(r for name, r in found.items() if name.startswith("ranks="))
    count = int(ranks.change.partition("=")[2])
    assert (
        ranks.fits
        and walks._walk(replace(request, ranks=count // 2), 1).peak_memory_bytes > point.peak_memory_bytes // 4
    )
