"""Micro batches from ordinary loaders: numbered, counted, and read one ahead at most."""

from __future__ import annotations

import pytest
import torch

from batchwright.core.errors import PlanError, RunError
from batchwright.runtime.data.windows import Feed, leading_size, windows

pytestmark = pytest.mark.torch


def test_windows_number_the_batches_of_any_loader() -> None:
    rows = list(torch.ones(7, 3).split(2))  # 2, 2, 2, 1
    found = [(m.step.step, m.step.start_sample, m.index, m.count, list(m.ids)) for m in windows(rows, 3)]
    assert found == [
        (0, 0, 0, 3, [0, 1]),
        (0, 0, 1, 3, [2, 3]),
        (0, 0, 2, 3, [4, 5]),
        (1, 6, 0, 3, [6]),
    ]
    later = list(windows(rows, 3, first_step=5, start_sample=100, first_index=2, data_parallel_size=2))
    assert [(m.step.step, m.index, m.step.start_sample) for m in later][:2] == [(5, 2, 100), (6, 0, 104)]
    with pytest.raises(PlanError, match="first_index=3 is not a micro step"):
        list(windows(rows, 3, first_index=3))


def test_samples_are_counted_in_any_batch() -> None:
    assert leading_size([torch.ones(4, 2), torch.ones(4)]) == 4
    assert leading_size({"a": {"b": torch.ones(3)}}) == 3
    for batch in ("text", [], 3, torch.ones(())):
        with pytest.raises(RunError, match="cannot count the samples"):
            leading_size(batch)


def test_a_feed_looks_one_ahead_and_no_further() -> None:
    asked = []

    def count():
        for micro in windows([torch.ones(1)] * 3, 3):
            asked.append(micro.index)
            yield micro

    feed = Feed(count())
    first = feed.take()
    assert feed.continues(first.step) and asked == [0, 1]
    assert feed.take().index == 1 and asked == [0, 1]
    feed.take()
    assert feed.peek() is None
    with pytest.raises(RunError, match="ended in the middle of a step"):
        feed.take()
