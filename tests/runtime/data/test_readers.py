"""Hosts that read for others: every rank gets the same micro batches, whoever reads; failures are named."""

from __future__ import annotations

from fractions import Fraction
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.core.errors import PlanError
from batchwright.core.ramp.schedule import Step
from batchwright.runtime.data.hosts import Hosts, LoadBatch
from tests.examples import many

from . import reader_ranks

pytestmark = pytest.mark.torch
ROWS = 121  # of the schedule


def test_hosts_from_a_count_a_factor_and_a_list() -> None:
    assert Hosts.of(8, 3, 2) == Hosts((0, 0, 1, 1, 2, 2, 3, 3), (0, 1, 2))
    assert Hosts.of(8, Fraction(4), 2).readers == (0,)
    assert Hosts.of(6, [2, 0], 2).readers == (4, 0)
    assert Hosts.of(3, [1], (0, 1, 1)).readers == (1,)
    assert Hosts.of(4, Fraction(4, 3)).readers == (0, 1, 2)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (0, "loading_hosts=0: must be 1 to 4"),
        (5, "loading_hosts=5 is more than the 4 hosts. Nearest: 4"),
        (Fraction(3), "does not give a whole number of reading hosts"),
        (Fraction(1, 2), "must be at least 1 in a loader"),
        ([4], "out of 0 to 3"),
        ([1, 1], "each once"),
        ([], "at least one host"),
    ],
)
def test_hosts_that_cannot_read(given: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Hosts.of(8, given, 2)


def test_a_host_of_every_rank_has_no_gaps() -> None:
    for wrong in ((0, 2), (0,), (1, 1), 0 - 1):
        with pytest.raises(PlanError, match="ranks_per_host"):
            Hosts.of(2, 1, wrong)


@settings(deadline=None, max_examples=many(200))
@given(st.lists(st.integers(1, 20), min_size=1, max_size=4), st.integers(1, 9), st.integers(1, 9), st.integers(1, 4))
def test_rows_are_read_once_and_reach_the_ranks_that_train_on_them(sizes, ranks, readers, parts) -> None:
    steps, at = [], 100
    for number, size in enumerate(sizes):
        steps.append(Step(number, at, size, 0))
        at += size
    batch = LoadBatch(0, tuple(steps))
    read = [p for reader in range(readers) for p in batch.read_by(reader, readers)]
    assert read == list(batch.span)
    for rank in range(ranks):
        needed = [p for part in batch.needed(rank, ranks) for p in part]
        got, counts = [], {}
        for reader in range(readers):
            own = batch.read_by(reader, readers)
            for i in range(parts):
                part = own[i * len(own) // parts : (i + 1) * len(own) // parts]
                sent = [p for piece in batch.served(part, ranks).get(rank, []) for p in piece] if part else []
                got += sent
                if sent:
                    counts[reader] = counts.get(reader, 0) + len(sent)
        assert got == needed and counts == batch.sources(rank, ranks, readers)


def cases(ranks: int, workers: tuple[int, ...]) -> list[dict[str, Any]]:
    """Without reading hosts, and with 1 to `ranks` of them, one of which reads two steps at once."""
    found: list[dict[str, Any]] = [{}]
    for readers in range(1, ranks + 1):
        found += [{"loading_hosts": readers, "num_workers": n, "read_ahead": 1 + (readers == 2)} for n in workers]
    return found


def check(results: list[list[tuple[str, int]]], ranks: int) -> None:
    for of_rank in results:
        assert len({digest for digest, _ in of_rank}) == 1
    for case in range(1, len(results[0])):
        read = [of_rank[case][1] for of_rank in results]
        assert sum(read) == ROWS  # every row once, none twice: also with fillers and while the batch grows


@pytest.mark.slow
def test_every_rank_gets_the_same_micro_batches_whoever_reads(run_ranks) -> None:
    check(run_ranks(reader_ranks.sequences, 3, 3, cases(3, (0, 2))), 3)


@pytest.mark.rounds
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_number_of_ranks_and_readers(run_ranks, ranks: int) -> None:
    check(run_ranks(reader_ranks.sequences, ranks, ranks, cases(ranks, (0, 2))), ranks)


@pytest.mark.slow
def test_lists_factors_and_hosts_of_several_ranks(run_ranks) -> None:
    made = [
        {},
        {"loading_hosts": Fraction(2), "ranks_per_host": 2},
        {"loading_hosts": [1], "ranks_per_host": (0, 0, 1, 1)},
    ]
    results = run_ranks(reader_ranks.sequences, 4, 4, made)
    check(results, 4)
    assert [[read for _, read in of_rank[1:]] for of_rank in results] == [[ROWS, 0], [0, 0], [0, ROWS], [0, 0]]


@pytest.mark.slow
def test_an_iteration_may_end_early_and_start_again(run_ranks) -> None:
    (first, second), plain = (
        run_ranks(reader_ranks.abandoned, 2, 2),
        run_ranks(reader_ranks.sequences, 2, 2, [{"collate": None}]),
    )
    assert first[2][0] == plain[0][0][0] and second[2][0] == plain[1][0][0]
    assert first[2][1] == ROWS and second[2][1] == 0


@pytest.mark.slow
def test_a_slow_trainer_holds_the_reader_back(run_ranks, tmp_path: Path) -> None:
    results = run_ranks(reader_ranks.slow_trainer, 2, 2, str(tmp_path / "reads"))
    for early, whole in results:
        assert early <= 40 and whole == ROWS  # the first steps have 4 and 8 rows


@pytest.mark.slow
def test_a_row_that_cannot_be_read_is_named_on_every_rank(run_ranks) -> None:
    reader, other = run_ranks(reader_ranks.failing, 2, 2, reader_ranks.Source(bad=7), {"read_retries": 1})
    assert "ConnectionResetError" in reader and "row 7 of data.bin" in reader and "2 times" in reader
    assert other.startswith("RunError: host 0 (") and "rank 0) could not read the rows from dataset[" in other
    assert "ConnectionResetError" in other and "row 7 of data.bin" in other and "the sample at position" in other


@pytest.mark.slow
def test_a_reader_that_hangs_is_named_within_the_time_out(run_ranks) -> None:
    texts = run_ranks(reader_ranks.failing, 2, 2, reader_ranks.Source(bad=7, hang=True), {"read_timeout": 3.0})
    for text in texts:  # the rank that notices first ends the reading, and the other one may hear of that
        assert text.startswith("RunError: host 0 (") and "of data.bin), the sample at position" in text
    assert any("rank 0) has delivered no rows for 3 s, from dataset[" in text for text in texts)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])  # the reader, and a rank that only trains
def test_a_rank_that_is_killed_is_named_at_once(victim: int, tmp_path: Path) -> None:
    context = get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "numpy"])
    receiver, sender = context.Pipe(duplex=False)
    arguments = [(rank, str(tmp_path / "store"), victim, sender) for rank in range(2)]
    processes = [context.Process(target=reader_ranks.killed, args=one) for one in arguments]
    for process in processes:
        process.start()
    assert receiver.poll(300)
    text = receiver.recv()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [-9 if rank == victim else 0 for rank in range(2)]
    assert f"host {victim} (" in text and f"rank {victim}) has gone" in text
    assert "of data.bin), the sample at position" in text or victim == 1
