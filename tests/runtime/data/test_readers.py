"""Hosts that read for others: every rank gets the same micro batches, whoever reads; failures are named."""

from __future__ import annotations

import re
from fractions import Fraction
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.core.batch.loading import Storage
from batchwright.core.errors import PlanError, RunError
from batchwright.core.ramp.rules import Constant, Linear
from batchwright.core.ramp.schedule import Step
from batchwright.launch.records import Options
from batchwright.runtime.data import loader
from batchwright.runtime.data.hosts import Hosts, LoadBatch
from batchwright.runtime.data.loader import READ_TIMEOUT, Loader
from batchwright.runtime.data.order import GlobalOrder
from batchwright.runtime.data.readers import OPEN_TIMEOUT, ReadingHosts
from batchwright.runtime.data.sampler import StepSampler
from batchwright.runtime.data.sources.access import Access
from batchwright.runtime.data.sources.jsonl import JsonLines
from batchwright.runtime.loop.settings import Settings
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
        (5, "loading_hosts=5: must be 1 to 4, the number of hosts. Nearest: 4"),
        (Fraction(3), "does not give a whole number of reading hosts"),
        (Fraction(1, 2), "must be at least 1 in a loader"),
        ([4], "out of 0 to 3"),
        ([1, 1], "each once"),
        ([], "at least one host"),
        (2.0, "loading_hosts=2.0 is of type float.*Fraction"),
        (True, "type bool"),
        ([0, "1"], "type list"),
    ],
)
def test_hosts_that_cannot_read(given: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Hosts.of(8, given, 2)


def test_a_host_of_every_rank_has_no_gaps() -> None:
    for wrong in ((0, 2), (0,), (1, 1), -1, 0):
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
@pytest.mark.parametrize(("ranks", "readers"), [(2, 1), (2, 2), (1, 1)])
def test_a_slow_trainer_holds_the_reader_back(run_ranks, tmp_path: Path, ranks: int, readers: int) -> None:
    results = run_ranks(reader_ranks.slow_trainer, ranks, ranks, readers, str(tmp_path / "reads"))
    for early, whole in results:
        # One load batch in training, ROOM of them, one that is sent, and two requests of the worker: the first six steps.
        assert early <= sum(step.global_batch_size for step in islice(reader_ranks.sampler(0, 1).steps(), 6))
        assert whole == ROWS


@pytest.mark.slow
def test_a_row_that_cannot_be_read_is_named_on_every_rank(run_ranks) -> None:
    reader, other = run_ranks(reader_ranks.failing, 2, 2, reader_ranks.Source(bad=7), {"read_retries": 1}, {})
    assert "ConnectionResetError" in reader and "row 7 of data.bin" in reader and "2 times" in reader
    assert other.startswith("RunError: host 0 (") and "rank 0) could not read the rows from dataset[" in other
    assert "ConnectionResetError" in other and "row 7 of data.bin" in other and "the sample at position" in other


@pytest.mark.slow
def test_a_reader_that_hangs_is_named_with_the_row_that_hangs(run_ranks, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(f"{i}\n" for i in range(50)))
    source = JsonLines(tmp_path / "a.jsonl", parse=reader_ranks.hanging_parse)
    # The reader finds it first: the other rank would wait for ten minutes.
    limits = {0: {"read_timeout": 2.0}, 1: {"read_timeout": 600.0}}
    for text in run_ranks(reader_ranks.failing, 2, 2, source, {}, limits):
        # Many rows are read at once, and the first of them is named: by the thread that reads or by the one that trains.
        assert "host 0 (" in text or "a read has not returned for" in text, text
        assert f"of {tmp_path}/a.jsonl and others), the samples at positions" in text, text
    for text in run_ranks(reader_ranks.failing, 2, 2, reader_ranks.Source(bad=7, hang=True), {}, limits):
        assert "dataset[7] (row 7 of data.bin), the sample at position" in text, text


@pytest.mark.slow
def test_a_rank_that_waits_names_a_reader_that_does_not_answer(run_ranks, tmp_path: Path) -> None:
    _, other = run_ranks(reader_ranks.waiting, 2, 2, str(tmp_path / "said"))
    assert "rank 0) has delivered no rows for 1 s, from dataset[" in other and "of data.bin), the sample" in other


class Reads:
    """What a DataLoader of a reading host does, one look per second of a clock that the test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self._workers, self.looks = 0.0, [], iter(())
        monkeypatch.setattr(loader, "perf_counter", lambda: self.now)

    def __next__(self) -> Any:
        self.now += 1.0
        next(self.looks)()
        raise RuntimeError("DataLoader timed out after 1 seconds")


def test_a_slow_reader_does_not_hang_while_it_begins_further_rows(monkeypatch) -> None:
    made = Loader(range(50), GlobalOrder(50), reader_ranks.sampler(0, 1), loading_hosts=1, read_timeout=10.0)
    reads, begun = Reads(monkeypatch), made._reader.begun

    def row(position: int) -> Any:
        return lambda: begun.__setitem__(slice(0, 2), [position, position])

    reads.looks = iter([row(position) for position in range(30)] + [lambda: None] * 30)
    with pytest.raises(RunError, match=r"a read has not returned for 9.0 s: dataset\[\d+\], the sample at position 29"):
        next(made._blocks(reads))
    assert reads.now == 39.0  # the last row began after 30 s


@pytest.mark.parametrize(("dataset", "most"), [(range(10**6), 32), (reader_ranks.Batched(), 256)])
def test_a_request_is_limited_in_rows_and_bytes(dataset: Any, most: int) -> None:
    steps = StepSampler(Constant(10_000).compile().until(20_000), 10_000)
    made = Loader(dataset, GlobalOrder(len(dataset)), steps, loading_hosts=1, read_ahead=2)._requests
    assert made is not None
    requests, issued = iter(made), made.issued()

    def rows(bytes_per_row: int | None) -> int:
        """Of a request after one whose rows had so many bytes."""
        found = next(requests)
        assert next(issued) is found
        if bytes_per_row:
            made.arrived(bytes_per_row * len(found.positions))
        return len(found.positions)

    assert rows(None) == rows(100) == 16  # before a size is known
    assert most - 2 <= rows(1 << 20) <= most  # in equal parts
    assert min(most, 64) - 2 <= rows(50_000_000) <= min(most, 64)  # 64 MiB
    assert rows(None) == 1
    left = [request.positions for request in requests]
    assert sum(map(len, left)) + 16 + 16 < 20_000 and left[-1].stop == 20_000


@pytest.mark.slow
def test_a_worker_of_a_reader_that_is_killed_is_named_with_its_row(run_ranks) -> None:
    for text in run_ranks(reader_ranks.failing, 2, 2, reader_ranks.Ends(bad=7), {"read_timeout": 600.0}, {}):
        assert "has died (exit code -9): dataset[7] (row 7 of data.bin), the sample at position" in text, text


@pytest.mark.slow
@pytest.mark.parametrize("pickled", [False, True])
def test_strange_rows_and_errors_reach_every_rank(run_ranks, pickled: bool) -> None:
    reader, other = run_ranks(reader_ranks.failing, 2, 2, reader_ranks.Strange(pickled), {"read_timeout": 600.0}, {})
    assert ("invalid literal for int" if pickled else "a file called") in reader, reader
    if pickled:  # the reader trains on that row: it ends, and may say why before
        assert "host 0 (" in other and ("invalid literal for int" in other or "has gone" in other), other
    else:
        assert "a file called \\udcff" in other, other


@pytest.mark.slow
def test_ranks_that_were_given_different_things_say_so(run_ranks) -> None:
    for other, message in (
        ({"read_ahead": 2}, "different values of read_ahead: 1 on host 0"),
        ({"schedule": Constant(8).compile().until(120)}, "different values of schedule: Schedule(segments=(Segment("),
        ({"start": 4}, "different values of start: 0 on host 0"),
        ({"seed": 12}, "seed=11, shuffle=True) on host 0"),
        ({"shuffle": False}, "GlobalOrder(size=50, seed=11, shuffle=False) on host 1"),
    ):
        for readers in (1, 2):  # with two, every rank reads all of its own rows
            options = {"read_timeout": 600.0, "loading_hosts": readers}
            for text in run_ranks(reader_ranks.failing, 2, 2, reader_ranks.Batched(), options, {1: other}):
                assert message in text, text
    for text in run_ranks(reader_ranks.failing, 2, 2, reader_ranks.Batched(), {}, {1: {"loading_hosts": 2}}):
        assert "the ranks of loading_hosts do not agree" in text, text


@pytest.mark.slow
@pytest.mark.parametrize("readers", [1, 2])
def test_schedules_that_differ_late_are_shown_from_the_difference_on(run_ranks, readers: int) -> None:
    """The texts of a ramp are alike for many hundred characters."""
    long = Linear(start=16, increment=16, samples=960, target=64).compile()
    options, other = {"loading_hosts": readers, "schedule": long.until(2000)}, {"schedule": long.until(2048)}
    one, same = run_ranks(reader_ranks.failing, 2, 2, reader_ranks.Batched(), options, {1: other})
    assert one == same
    values = re.search(r"different values of schedule: (.*) on host 0 \(.*rank 0\), (.*) on host 1 \(", one)
    assert values is not None, one
    first, second = values.groups()
    assert first != second and len(first) < 210 and len(second) < 210
    assert "2000" in first and "2048" in second, one


@pytest.mark.slow
def test_ranks_that_iterate_over_other_loaders_say_so(run_ranks) -> None:
    for text in run_ranks(reader_ranks.crossed, 2, 2):
        assert "give all ranks the same schedule, start and read_ahead" in text, text


@pytest.mark.slow
def test_only_readers_open_the_dataset(run_ranks, tmp_path: Path) -> None:
    path = tmp_path / "opened"
    assert sum(run_ranks(reader_ranks.opened, 2, 2, str(path))) >= ROWS
    assert sorted(set(path.read_text().splitlines())) == ["length on 0", "row on 0"]


@pytest.mark.slow
def test_a_reader_that_does_not_open_its_dataset_is_named(run_ranks) -> None:
    for text in run_ranks(reader_ranks.hanging_length, 3, 3)[::2]:
        assert text.startswith("RunError: len(dataset) has not returned for 1 s on host 1 ("), text
        assert text.count("rank ") == 1


def test_hosts_and_sampler_are_of_one_rank() -> None:
    hosts = ReadingHosts(1, rank=0, ranks=1)
    with pytest.raises(PlanError, match="loading_hosts is rank 0 of 1, and sampler is rank 1 of 2"):
        Loader(range(50), GlobalOrder(50), reader_ranks.sampler(1, 2), loading_hosts=hosts)


@pytest.mark.slow
def test_readers_whose_datasets_differ_or_cannot_be_opened(run_ranks, tmp_path: Path) -> None:
    for text in run_ranks(reader_ranks.lengths, 2, 2, str(tmp_path / "a"), 51):
        assert text.startswith("RunError: the readers have datasets of different lengths: 50 on host 0 ("), text
    first, second = run_ranks(reader_ranks.lengths, 2, 2, str(tmp_path / "b"), None)
    assert (
        "rank 1) could not open the dataset: OSError: no such bucket" in first and second == "OSError: no such bucket"
    )


@pytest.mark.slow
def test_an_error_of_the_first_reader_has_its_type_and_says_what_was_asked(run_ranks) -> None:
    error = PlanError("a.jsonl is not here.", field="path", given="a.jsonl")
    for found in run_ranks(reader_ranks.asked_of_the_first, 2, 2, error):
        assert found[:3] == ("PlanError", "a.jsonl is not here.", "path")
    other, reader = run_ranks(reader_ranks.asked_of_the_first, 2, 2, ValueError("row 17 is not JSON"))
    assert reader[:2] == ("ValueError", "row 17 is not JSON")
    assert other[0] == "RunError" and other[2] == "dataset" and "in question" in other[3]
    assert other[1].startswith("host 1 (")
    assert other[1].endswith(", rank 1): reading samples failed: ValueError: row 17 is not JSON")


@pytest.mark.slow
def test_ranks_with_one_host_name_are_on_one_host(run_ranks) -> None:
    for found in run_ranks(reader_ranks.hosts_by_name, 4, 4, ["b", "b", "a", "a"]):
        assert found == ((0, 0, 1, 1), (0, 2), "host 1 (a, rank 3)")


@pytest.mark.slow
def test_processes_of_a_mesh_read_for_their_data_parallel_group(run_ranks) -> None:
    found = run_ranks(reader_ranks.mesh_sequences, 4, 4)
    assert [at for at, *_ in found] == [0, 0, 1, 1]
    for at, plain, received, rows in found:
        assert received == plain and rows == (0 if at else ROWS)  # each of the two groups has a reader


def test_the_model_of_plan_has_the_connections_of_a_source() -> None:
    assert Storage().connections == Access().connections


def test_a_source_reports_its_own_failure_before_its_host_counts_as_hanging() -> None:
    assert Access().longest_wait(Access().largest_request) < 0.9 * READ_TIMEOUT < READ_TIMEOUT < Options().stall_seconds
    assert Settings.read_timeout == READ_TIMEOUT
    assert OPEN_TIMEOUT < Options().start_seconds and Settings.open_timeout == OPEN_TIMEOUT


@pytest.mark.parametrize(
    "option", [{"persistent_workers": True}, {"timeout": 3}, {"read_timeout": 0}, {"read_timeout": 1e10}]
)
def test_options_that_do_not_go_with_reading_hosts(option: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match=next(iter(option))):
        Loader(range(50), GlobalOrder(50), reader_ranks.sampler(0, 1), loading_hosts=1, **option)


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
