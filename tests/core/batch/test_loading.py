"""Loading: every row once, every stored shard once, for any number of hosts."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import batchwright
from batchwright.core.batch.loading import (
    MANY_ROWS,
    Loading,
    Storage,
    enough_readers,
    loading,
    part_of,
    reader_load,
    share,
)
from batchwright.core.codec import decode, encode
from batchwright.core.errors import PlanError
from tests.examples import many

hosts = st.integers(1, 40)
batches = st.integers(1, 600)


def shares(rows: int | tuple[int, ...], parts: int) -> list[int]:
    return [rows] * parts if isinstance(rows, int) else list(rows)


@given(batches, hosts, st.data())
def test_rows_are_partitioned_exactly_for_any_number_of_readers(batch, hosts, data):
    readers = data.draw(st.integers(1, hosts))
    load = loading(batch, hosts=hosts, loading_hosts=readers)
    rows = [row for host in range(hosts) for row in load.rows(host)]
    assert rows == list(range(batch))  # each once, in order
    each = shares(load.rows_per_loading_host, readers)
    assert each == [len(load.rows(h)) for h in range(readers)]
    assert max(each) - min(each) <= 1
    assert isinstance(load.rows_per_loading_host, int) == (batch % readers == 0)
    assert [load.reads(h) for h in range(hosts)] == [h < readers for h in range(hosts)]
    assert load.expansion_factor == Fraction(hosts, readers)
    assert load.load_batch_size == -(-batch * hosts // readers)  # global × factor, never less than the batch
    assert load.placeholder_rows == load.load_batch_size - batch
    assert load.rows_read == batch
    assert load.read_amplification == 1


@given(batches, hosts, st.data())
def test_equal_rows_show_what_is_read_in_excess(batch, hosts, data):
    readers = data.draw(st.integers(1, hosts))
    load = loading(batch, hosts=hosts, loading_hosts=readers, equal_rows=True)
    assert load.rows_per_loading_host == -(-batch // readers)
    assert load.rows_read == -(-batch // readers) * readers
    assert load.read_amplification == load.rows_read / batch >= 1
    assert sum(len(load.rows(h)) for h in range(hosts)) == batch


@given(batches, hosts, st.integers(0, 60))
def test_stored_shards_are_partitioned_exactly_and_the_load_batch_stays(batch, hosts, more):
    stored = hosts + more
    load = loading(batch, hosts=hosts, stored_hosts=stored)
    assert load.load_batch_size == batch
    assert load.loading_hosts == hosts
    assert load.placeholder_rows == 0
    if more:
        taken = [list(load.shards(h)) for h in range(hosts)]
        assert sorted(shard for each in taken for shard in each) == list(range(stored))
        assert [len(each) for each in taken] == shares(load.shards_per_host, hosts)
        assert all(shard % hosts == h for h, each in enumerate(taken) for shard in each)
        assert load.stored_shards == stored
    else:
        assert load.stored_shards is None


@given(batches, hosts, st.builds(Fraction, st.integers(1, 24), st.integers(1, 12)))
def test_a_factor_is_the_same_as_counting_hosts(batch, hosts, factor):
    readers, stored = Fraction(hosts) / max(1, factor), Fraction(hosts) / min(1, factor)
    if readers.denominator == 1 and stored.denominator == 1:
        by_count = (
            loading(batch, hosts=hosts, loading_hosts=int(readers))
            if factor >= 1
            else loading(batch, hosts=hosts, stored_hosts=int(stored))
        )
        assert loading(batch, hosts=hosts, expansion_factor=factor) == by_count
        return
    with pytest.raises(PlanError) as caught:
        loading(batch, hosts=hosts, expansion_factor=factor)
    counts = range(1, hosts + 1) if factor > 1 else range(hosts, 20 * hosts + 2)
    works = sorted(Fraction(hosts, n) for n in counts)  # every factor that gives whole hosts
    expected = {*[f for f in works if f < factor][-1:], *[f for f in works if f > factor][:1]}
    assert {Fraction(near) for near in caught.value.nearest} == expected
    assert all(loading(batch, hosts=hosts, expansion_factor=Fraction(near)) for near in caught.value.nearest)


def test_invalid_factors_are_refused():
    for wrong in (Fraction(0), Fraction(-1), Fraction(-1, 2)):
        with pytest.raises(PlanError) as caught:
            loading(8, hosts=4, expansion_factor=wrong)
        assert caught.value.field == "expansion_factor"
    with pytest.raises(PlanError) as caught:
        loading(8, hosts=4, loading_hosts=5)
    assert caught.value.nearest == (4,)
    with pytest.raises(PlanError) as caught:
        loading(8, hosts=4, stored_hosts=3)
    assert caught.value.nearest == (4,)
    with pytest.raises(PlanError, match="expansion_factor and loading_hosts are mutually exclusive"):
        loading(8, hosts=4, loading_hosts=2, expansion_factor=Fraction(2))


@settings(max_examples=many(50))
@given(batches, hosts)
def test_every_loading_survives_json(batch, hosts):
    for load in (loading(batch, hosts=hosts), loading(batch, hosts=hosts, stored_hosts=hosts + 3)):
        assert decode(Loading, json.loads(json.dumps(encode(load)))) == load


# --- what goes wrong in MaxText ---------------------------------------------------------------------------------------


def maxtext(**keys: object) -> Loading:
    return batchwright.plan({"per_device_batch_size": 2, **keys}, devices=256, hosts=64).loading


def test_half_the_hosts_do_not_halve_the_load_batch():
    load = maxtext(expansion_factor_real_data=0.5)
    assert load.load_batch_size == 512  # MaxText: 256
    assert load.rows_per_loading_host == 8  # MaxText: 4
    assert load.stored_shards == 128
    assert list(load.shards(3)) == [3, 67]


def test_no_number_is_a_float_that_could_get_into_a_name():
    for factor in (-1, 1, 2, 4, 0.5, 0.25):
        load = maxtext(expansion_factor_real_data=factor)
        for name in ("loading_hosts", "load_batch_size", "rows_read", "placeholder_rows"):
            assert type(getattr(load, name)) is int
        assert type(load.stored_shards) in (int, type(None))
        names = [
            f"process_{host}-of-{load.stored_shards or load.loading_hosts}.json" for host in range(load.loading_hosts)
        ]
        assert not any("." in name.removesuffix(".json") for name in names)


def test_accumulation_is_part_of_the_load_batch():
    assert maxtext(gradient_accumulation_steps=4).load_batch_size == 2048
    assert maxtext(gradient_accumulation_steps=4, expansion_factor_real_data=2).load_batch_size == 4096
    assert maxtext(gradient_accumulation_steps=4, expansion_factor_real_data=0.5).load_batch_size == 2048


def test_below_one_row_per_device_no_row_is_thrown_away():
    p = batchwright.plan({"per_device_batch_size": 0.5, "ici_tensor_parallelism": 2}, devices=64, hosts=16)
    assert p.loading.load_batch_size == p.global_batch_size == 32  # MaxText reads 64
    assert p.loading.read_amplification == 1


def test_minus_one_means_that_every_host_reads():
    assert maxtext(expansion_factor_real_data=-1) == maxtext()


def test_a_plan_reads_with_its_nodes_unless_hosts_are_given():
    by_nodes = batchwright.plan(micro_batch_size=1, nodes=3, devices_per_node=8)
    assert (by_nodes.loading.hosts, by_nodes.loading.rows_per_loading_host) == (3, 8)
    assert batchwright.plan(micro_batch_size=1, nodes=3, devices_per_node=8, hosts=5).loading.rows_per_loading_host == (
        5,
        5,
        5,
        5,
        4,
    )
    subset = batchwright.plan(micro_batch_size=1, nodes=4, devices_per_node=8, expansion_factor=2)
    assert (subset.loading.load_batch_size, subset.loading.placeholder_rows) == (64, 32)
    assert any("2 of 4 hosts read; 32 placeholder rows" in note for note in subset.notes)


@settings(deadline=None, max_examples=many(200))
@given(st.integers(0, 200), st.integers(1, 40), st.integers(0, 50))
def test_shares_partition_a_span_and_part_of_is_their_inverse(length, parts, start):
    span = range(start, start + length)
    cut = [share(span, part, parts) for part in range(parts)]
    assert [position for one in cut for position in one] == list(span)
    assert max(map(len, cut)) - min(map(len, cut)) <= 1
    assert all(part_of(span, position, parts) == part for part, one in enumerate(cut) for position in one)


def test_read_ahead_multiplies_the_load_batch_and_not_the_amplification():
    made = loading(512, hosts=64, loading_hosts=5, read_ahead=4)
    assert (made.load_batch_size, made.rows_read, made.read_amplification) == (26215, 2048, 1.0)
    assert made.rows_per_loading_host == (410, 410, 410, 409, 409)
    assert sum(len(made.rows(host)) for host in range(64)) == 2048


@pytest.mark.parametrize("storage", [Storage(), MANY_ROWS])
@pytest.mark.parametrize("seconds", [0.5, 2.0, 30.0])
def test_enough_readers_are_the_fewest_that_are_fast_enough(seconds, storage):
    def fast(readers):
        load = reader_load(32768, 150_000, 1000, readers, storage)
        return 2 * max(load.read_seconds, load.send_seconds) <= seconds

    slow = [readers for readers in range(1, 1001) if not fast(readers)]
    found = enough_readers(32768, 150_000, 1000, seconds, storage)
    assert found is not None and found.loading_hosts == len(slow) + 1
    assert enough_readers(32768, 150_000, 1000, 0.01, storage) is None


def test_the_table_in_the_docs_is_the_models():
    page = (Path(__file__).parents[3] / "docs" / "data.md").read_text()
    lines = page.split("| readers | tokens: many rows")[1].split("\n\n")[0].splitlines()[2:]
    assert len(lines) == 7
    for line in lines:
        readers, *cells = (cell.strip() for cell in line.strip("| ").split("|"))
        found = []
        for rows, size in ((4096, 32768), (32768, 150_000)):
            many, one = (reader_load(rows, size, 1000, int(readers), storage) for storage in (MANY_ROWS, Storage()))
            found += [f"{load.read_seconds:.2f} s, {load.connections}" for load in (many, one)]
            found.append(f"{one.send_seconds:.3f} s, {one.sent_bytes / 1e6:.0f} MB")
        assert cells == found


def test_plan_says_how_many_readers_are_enough():
    known = {
        "global_batch_size": 4096,
        "micro_batch_size": 4,
        "nodes": 1024,
        "devices_per_node": 1,
        "sequence_length": 8192,
    }
    [note] = [note for note in batchwright.plan(**known, step_seconds=0.5).notes if "would be enough" in note]
    assert (
        "loading_hosts=64 would be enough if a request returns one row (rows in random order of remote files)" in note
    )
    assert "loading_hosts=3 would be enough if a request returns many rows" in note
    # Where reading hosts would not save connections, only the other case is left.
    [note] = [note for note in batchwright.plan(**known, step_seconds=0.25).notes if "would be enough" in note]
    assert "one row" not in note
    for other in ({}, {"step_seconds": 0.5, "loading_hosts": 12}, {"step_seconds": 0.01}):
        assert not any("would be enough" in note for note in batchwright.plan(**known, **other).notes)
