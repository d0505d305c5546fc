"""The choice among ways to train, with scripted peaks: no torch."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.core.batch.request import BatchRequest
from batchwright.core.errors import PlanError
from batchwright.core.numbers import divisors
from batchwright.estimate.choose import choose, closest, ways
from batchwright.estimate.records import EstimateRequest, Point
from batchwright.estimate.remedies import remedies
from batchwright.estimate.walks import FEW, MORE, Walks, _key

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
        self.sizes: dict[int | None, set[int]] = {}

    def _walk(self, request: EstimateRequest, size: int) -> Point:
        depth = request.layers or self.whole
        self.walked.append(request.layers)
        self.sizes.setdefault(request.layers, set()).add(size)
        kept = 1 if request.checkpoint_activations else self.activations
        states = self.states * depth * (request.accumulation_steps + 1) // (2 * request.ranks)
        # `late`: a second line that is the peak in deep models only.
        peak = max(states + kept * size * depth, self.late * (depth - 8))
        point = Point(size, 1024, peak, {"parameters": states, "activations": peak - states})
        self.known[_key(request), size] = point
        return point


def best(walks: Scripted, limit: int, batch: BatchRequest) -> tuple[int, bool, int] | None:
    """By brute force: the largest micro batch of every way, and the best by the documented rule."""
    parallel = batch.tensor_parallel
    share = (batch.global_batch_size or 0) * parallel // 8
    found = []
    for way in ways(batch, BASE, None, None):
        steps = {size: replace(way, accumulation_steps=1 if size == share else 2) for size in divisors(share)}
        sizes = [b for b in steps if walks._walk(steps[b], b).split(parallel).peak_memory_bytes <= limit]
        if sizes:
            time = (4 / 3 if way.checkpoint_activations else 1) * (1.1 if way.ranks > 1 else 1)
            found.append((time * (1 + 512 / (max(sizes) * 1024)), max(sizes), way.checkpoint_activations, way.ranks))
    return min(found)[1:] if found else None


@settings(max_examples=60, deadline=None)
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("parallel", [1, 2])
@given(
    limit=st.integers(50, 4000),
    size=st.sampled_from([8, 64, 96, 512]),
    layers=st.sampled_from([None, 32]),
    deep=st.integers(1, 60),
    states=st.integers(1, 6).map(lambda n: 16 * n),  # shards of whole bytes: the lines are exact
)
def test_the_choice_is_the_best_by_brute_force_from_few_layers_or_all(
    late, parallel, limit, size, layers, deep, states
):
    batch = BatchRequest(global_batch_size=size, devices=8, sequence_length=1024, tensor_parallel=parallel)
    options = {"late": deep * late, "states": states}
    walks = Scripted(layers, **options)
    made = choose(batch, ways(batch, replace(BASE, tensor_parallel=parallel), None, None), limit, walks)
    wanted = best(Scripted(None, **options), limit, batch)
    if wanted is None:
        assert made is None
        return
    assert made is not None
    assert made.point.peak_memory_bytes <= limit
    assert made.candidates[0].source == ("rule" if parallel > 1 else "estimated")
    assert made.plan.global_batch_size == size and made.plan.sources["max_micro_batch_size"] == "estimated"
    assert (made.plan.micro_batch_size, made.request.checkpoint_activations, made.request.ranks) == wanted


@settings(max_examples=150, deadline=None)
@given(
    size=st.sampled_from([8, 64, 96]),
    layers=st.sampled_from([None, 32, 33]),
    late=st.integers(0, 60),
    states=st.integers(1, 3000),  # the shards of eight ranks and the parts of a device are rounded
    parallel=st.sampled_from([1, 2, 4]),
    way=st.integers(0, 3),
    micro=st.integers(0, 5),
    beside=st.sampled_from([-1, 0, 1]),
)
def test_the_choice_is_right_to_the_byte(size, layers, late, states, parallel, way, micro, beside):
    """The limit is the peak of one way at one size, or a byte beside it."""
    batch = BatchRequest(global_batch_size=size, devices=8, sequence_length=1024, tensor_parallel=parallel)
    options = {"late": late, "states": states, "whole": layers or 32}
    all_layers = Scripted(None, **options)
    open_ways = ways(batch, replace(BASE, tensor_parallel=parallel), None, None)
    share = size * parallel // 8
    at = divisors(share)[micro % len(divisors(share))]
    request = replace(open_ways[way % len(open_ways)], accumulation_steps=1 if at == share else 2)
    limit = all_layers._walk(request, at).split(parallel).peak_memory_bytes + beside
    made = choose(batch, open_ways, limit, Scripted(layers, **options))
    wanted = best(all_layers, limit, batch)
    found = made and (made.plan.micro_batch_size, made.request.checkpoint_activations, made.request.ranks)
    assert found == wanted
    assert made is None or made.point.peak_memory_bytes <= limit


def test_few_layers_are_walked_often_and_all_layers_for_the_winner():
    batch = BatchRequest(global_batch_size=512, devices=8, sequence_length=1024)
    walks = Scripted(32)
    made = choose(batch, ways(batch, BASE, None, None), 900, walks)
    assert made is not None and len(made.candidates) == 4
    assert walks.walked.count(None) == 1 and set(walks.walked) == {None, FEW, MORE}
    assert [c.source for c in made.candidates] == ["estimated", *["extrapolated"] * 3]


def test_few_layers_that_do_not_fit_are_enough_to_refuse_a_size():
    batch = BatchRequest(global_batch_size=512, devices=8, sequence_length=1024)
    walks = Scripted(32, activations=20)
    made = choose(batch, ways(batch, BASE, False, False), 2000, walks)
    assert made is not None and made.plan.micro_batch_size == 2
    assert walks.sizes[FEW] >= {1, 2, 4, 64} and 64 not in walks.sizes[MORE]


def test_what_few_layers_call_too_large_is_walked_before_it_is_refused():
    # Few layers overestimate: as if a first block were shared by all.
    class Wrong(Scripted):
        def _walk(self, request, size):
            point = super()._walk(request, size)
            return replace(point, peak_memory_bytes=point.peak_memory_bytes * 10) if request.layers == MORE else point

    batch = BatchRequest(global_batch_size=8, devices=8, sequence_length=1024)
    made = choose(batch, ways(batch, BASE, None, None), 600, Wrong(32))
    right = choose(batch, ways(batch, BASE, None, None), 600, Scripted(None))
    assert made is not None and right is not None and made.point == right.point


def test_numbers_that_were_given_are_kept():
    batch = BatchRequest(global_batch_size=64, micro_batch_size=2, devices=8, sequence_length=1024)
    made = choose(batch, ways(batch, BASE, None, None), 4000, Scripted(32))
    assert made is not None and (made.plan.micro_batch_size, made.plan.accumulation_steps) == (2, 4)
    assert ways(batch, BASE, True, False) == [replace(BASE, checkpoint_activations=True, replicas=8)]
    assert [w.replicas for w in ways(batch, BASE, False, True)] == [1]
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


def test_a_micro_batch_that_is_a_divisor_is_not_called_the_limit():
    # 62 samples per rank: 2 fits, 31 does not. With 64, sizes up to 16 fit.
    made = {}
    for size in (62, 64):
        batch = BatchRequest(global_batch_size=size, devices=1, sequence_length=1024)
        made[size] = choose(batch, ways(batch, BASE, False, None), 2700, Scripted(None)).plan
    assert [plan.micro_batch_size for plan in made.values()] == [2, 16]
    assert made[62].sources["max_micro_batch_size"] == "estimated"
    assert "the largest divisor of 62 samples per rank" in made[62].reasons["max_micro_batch_size"]
    said = [[note for note in plan.notes if "another global batch would allow them" in note] for plan in made.values()]
    assert "the next one, 31, does not" in said[0][0] and said[1] == []


def test_remedies_name_each_change_with_its_peak_and_the_fewest_ranks():
    walks = Scripted(None)
    batch = BatchRequest(global_batch_size=8, devices=1, sequence_length=1024)
    request, point, size = closest(batch, ways(batch, BASE, None, None), walks)
    assert request.checkpoint_activations and size == 1
    walks.walked.clear()
    found = {r.change: r for r in remedies(request, size, point.peak_memory_bytes // 4, walks)}
    assert len(walks.walked) <= len(found) + 2  # a change is one walk; the ranks are solved from one, then verified
    assert {"lora=16", "optimizer=adamw-8bit", "precision=bf16-pure", "lora=16 + precision=bf16-pure"} <= set(found)
    ranks = next(r for name, r in found.items() if name.startswith("ranks="))
    count = int(ranks.change.partition("=")[2])
    assert (
        ranks.fits
        and walks._walk(replace(request, ranks=count // 2), 1).peak_memory_bytes > point.peak_memory_bytes // 4
    )


class NoBlocks(Scripted):
    """A model without blocks to recompute."""

    def _walk(self, request, size):
        if request.checkpoint_activations:
            raise PlanError("no blocks", field="checkpoint_activations")
        return super()._walk(request, size)


def test_recomputation_of_a_model_without_blocks_is_no_way_unless_it_is_asked_for():
    batch = BatchRequest(global_batch_size=64, devices=8, sequence_length=1024)
    base = EstimateRequest("t.py:task")
    made = choose(batch, ways(batch, base, None, None), 4000, NoBlocks(None))
    assert made is not None and [c.checkpoint_activations for c in made.candidates] == [False, False]
    with pytest.raises(PlanError, match="no blocks"):
        choose(batch, ways(batch, base, True, None), 4000, NoBlocks(None))
    request, point, size = closest(batch, ways(batch, base, None, None), NoBlocks(None))
    found = remedies(request, size, point.peak_memory_bytes // 2, NoBlocks(None))
    assert found and not any("checkpoint" in r.change for r in found)


def test_lines_that_are_refuted_often_are_replaced_by_whole_walks():
    # The line of every way is far below its peak of all layers.
    class Steep(Scripted):
        def _walk(self, request, size):
            point = super()._walk(request, size)
            more = 0 if request.layers else 100 * size
            parts = {**point.breakdown, "activations": point.breakdown["activations"] + more}
            return replace(point, peak_memory_bytes=point.peak_memory_bytes + more, breakdown=parts)

    batch = BatchRequest(global_batch_size=2**12, devices=8, sequence_length=1024)
    made = choose(batch, ways(batch, BASE, None, None), 700, Steep(32))
    right = choose(batch, ways(batch, BASE, None, None), 700, Steep(None))
    assert made is not None and right is not None and made.plan == right.plan


def test_a_share_that_fits_only_without_accumulation_is_found():
    # With accumulation, gradients exist in the forward: even one sample needs more than the whole share.
    batch = BatchRequest(global_batch_size=32, devices=8, sequence_length=1024)
    walks = Scripted(None, states=100)
    limit = walks._walk(replace(BASE, checkpoint_activations=True), 4).peak_memory_bytes
    assert walks._walk(replace(BASE, checkpoint_activations=True, accumulation_steps=2), 1).peak_memory_bytes > limit
    open_ways = ways(batch, BASE, True, False)
    made = choose(batch, open_ways, limit, walks)
    assert made is not None and (made.plan.micro_batch_size, made.plan.accumulation_steps) == (4, 1)
    request, point, size = closest(batch, open_ways, walks)
    assert (request.accumulation_steps, point.peak_memory_bytes, size) == (1, limit, 4)
    single = BatchRequest(global_batch_size=8, devices=8, sequence_length=1024)
    assert closest(single, open_ways, walks)[0].accumulation_steps == 1


def test_a_change_is_said_to_fit_only_after_a_walk_of_all_layers():
    # From few layers, half of the memory would be enough for some changes; the peak of all layers is higher.
    walks = Scripted(32, late=20)
    request = replace(BASE, checkpoint_activations=True)
    whole = Scripted(None, late=20)
    for limit in (100, 300, 480, 600):
        for remedy in remedies(request, 1, limit, walks):
            if remedy.change.startswith("ranks="):
                changed = replace(request, ranks=int(remedy.change.partition("=")[2]))
                assert not remedy.fits or whole._walk(changed, 1).peak_memory_bytes == remedy.peak_memory_bytes <= limit
            assert remedy.source == ("predicted" if remedy.fits else remedy.source)


def test_the_ranks_that_fit_are_tried_once():
    walks = Scripted(32, states=1000, activations=1)
    request = replace(BASE, checkpoint_activations=True)
    found = [r for r in remedies(request, 1, 300, walks) if r.change.startswith("ranks=")]
    assert [(r.change, r.fits) for r in found] == [("ranks=128", True)]
    # Five changes and two numbers of ranks, each with few and more layers, and all layers of the one that fits.
    assert len(walks.walked) == 2 * (5 + 2) + 1, len(walks.walked)
