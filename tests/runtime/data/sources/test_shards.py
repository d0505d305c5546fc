"""Iterables with known shards are read by index; those without are refused by name, with what to do."""

from __future__ import annotations

import pickle
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.core.errors import PlanError, RunError
from batchwright.runtime import Shards, indexed
from tests.needs import needs

SIZES = [4, 0, 7, 1]


def numbers(start: int, count: int):
    return iter([{"i": i} for i in range(start, start + count)])


def source(**options) -> Shards:
    starts = [sum(SIZES[:k]) for k in range(len(SIZES))]
    return Shards([partial(numbers, s, c) for s, c in zip(starts, SIZES, strict=True)], SIZES, **options)


@given(st.lists(st.integers(-12, 11)), st.integers(0, 3))
def test_rows_by_index(wanted, cached):
    rows = source(cached_shards=cached)
    assert rows.__getitems__(wanted) == [{"i": i % 12} for i in wanted] == [rows[i] for i in wanted]


def test_each_shard_is_read_once_and_a_changed_row_stays_alone():
    rows = source()
    first, second = rows.__getitems__([5, 5])
    first["i"] = "changed"
    assert second == rows[5] == {"i": 5}
    assert rows.reads.requests == 1
    rows.__getitems__(range(12))
    assert rows.reads.requests == 3 and rows.reads.rows == 15
    assert pickle.loads(pickle.dumps(rows))[11] == {"i": 11}


@pytest.mark.parametrize(("said", "has"), [(5, "4 rows"), (3, "more than 3 rows")])
def test_a_wrong_number_of_rows_is_an_error(said, has):
    rows = Shards([partial(numbers, 0, 4), partial(numbers, 4, 2)], [said, 2])
    with pytest.raises(RunError, match=rf"shard 0 of 2 has {has}, and rows\[0\] says {said}"):
        rows[0]
    with pytest.raises(PlanError, match="1 numbers for 2 shards"):
        Shards([partial(numbers, 0, 4)] * 2, [4])


def test_datasets_of_hugging_face():
    needs("datasets")
    import datasets

    whole = datasets.Dataset.from_dict({"i": list(range(25))})
    assert indexed(whole) is whole
    assert whole.__getitems__([3, 3, 0]) == [{"i": 3}, {"i": 3}, {"i": 0}]
    stream = whole.to_iterable_dataset(num_shards=4)
    with pytest.raises(PlanError, match=r'datasets.IterableDataset .* 4 shards are not known.*rows="count"'):
        indexed(stream)
    rows = indexed(stream, rows="count")
    assert rows.rows == [7, 6, 6, 6]
    assert [rows[i]["i"] for i in range(25)] == [row["i"] for row in stream] == list(range(25))
    assert indexed(stream, rows=[7, 6, 6, 6])[24] == {"i": 24}
    assert pickle.loads(pickle.dumps(rows))[7] == {"i": 7}
    even = indexed(stream.filter(lambda row: row["i"] % 2 == 0).map(lambda row: {"j": row["i"]}), rows="count")
    assert [row["j"] for row in even] == list(range(0, 25, 2))
    twice = indexed(datasets.concatenate_datasets([stream, stream]), rows="count")
    assert sorted(row["i"] for row in twice) == sorted([*range(25), *range(25)])


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda s, d: s.shuffle(seed=1), "Shuffle"),
        (lambda s, d: s.take(3), "Take"),
        (lambda s, d: s.skip(3).map(lambda row: row), "Skip"),
        (lambda s, d: s.repeat(2), "Repeat"),
        (lambda s, d: d.interleave_datasets([s, s], probabilities=[0.5, 0.5], seed=1), "RandomlyCycling"),
        (lambda s, d: d.interleave_datasets([s, s]), "Cycling"),
        (lambda s, d: s.map(lambda row, i: {"j": i}, with_indices=True), "Mapped: with_indices=True"),
        (
            lambda s, d: s.map(lambda rows: {"j": [len(rows["i"])]}, batched=True, remove_columns="i"),
            "Mapped: batched=True",
        ),
        (lambda s, d: s.batch(4), "Mapped: batched=True"),
        (
            lambda s, d: s.filter(lambda row, i: i % 2 == 0, with_indices=True).map(lambda row: row),
            "Filtered: with_indices",
        ),
    ],
)
def test_an_order_that_is_not_fixed_is_refused(change, name):
    needs("datasets")
    import datasets

    stream = datasets.Dataset.from_dict({"i": list(range(25))}).to_iterable_dataset(num_shards=4)
    with pytest.raises(PlanError, match=rf"changes the order or the number of rows as it goes, or .*\(.*{name}"):
        indexed(change(stream, datasets), rows="count")


def test_other_iterables_are_refused():
    with pytest.raises(PlanError, match=r"builtins\.generator cannot be read by index.*JsonLines, Parquet"):
        indexed(i for i in range(3))
    assert indexed([1, 2]) == [1, 2]
    torch = pytest.importorskip("torch")

    class Stream(torch.utils.data.IterableDataset):
        def __len__(self):
            return 3

        def __iter__(self):
            return iter(range(3))

    with pytest.raises(PlanError, match=r"Stream cannot be read by index: its length and its order are not known"):
        indexed(Stream())
