"""The ledger proves that every sample was trained in one step; and the audit finds every fault made here."""

from __future__ import annotations

import errno
import json
import os
import resource
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.core.errors import EnvironmentFault, RunError
from batchwright.core.ramp.rules import Constant, Linear
from batchwright.core.ramp.schedule import Schedule, Step
from batchwright.rundir.files import digest_of, write_json
from batchwright.runtime.data.order import GlobalOrder
from batchwright.runtime.data.sampler import StepSampler
from batchwright.runtime.state import joined
from batchwright.runtime.state.audit import LedgerAudit, _expected, audit
from batchwright.runtime.state.ledger import WIDTH, Ledger, _line, next_launch, sample_hashes, span_hash, sums
from tests.fabricated import ledger as ledger_of
from tests.fabricated import opened

ORDER = GlobalOrder(100, seed=3)
SCHEDULE = Linear(start=8, increment=8, samples=64, target=24).compile().until(250)


def record(
    root: Path,
    start: int,
    stop: int,
    *,
    launch: int,
    ranks: int = 2,
    parent: int | None = None,
    saves: tuple[int, ...] = (),
    feed=lambda step, rank, ids: ids,
    order: GlobalOrder = ORDER,
    schedule: Schedule = SCHEDULE,
    micro: int = 3,
    outcome=lambda step: "applied",
    first_sample: int = 0,
) -> None:
    """Write the ledgers of a launch that trains samples `start` to `stop`, and saves at `saves` and at the end."""
    first = schedule.at_sample(start)
    for rank in range(ranks):
        begin = {"start": (first.step, start), "first_sample": first_sample, "parent": parent}
        ledger = Ledger(root / "ledger", order, launch=launch, rank=rank, ranks=ranks, **begin)
        for part in StepSampler(schedule.until(stop), micro, rank, ranks, start, allow_ragged=True):
            if not part.filler:
                ledger.fed(feed(part.step, rank, order.ids(part.positions)))
            if part.index + 1 == part.count:
                ledger.applied(part.step.step, part.step.start_sample, part.step.global_batch_size, outcome(part.step))
                if part.step.end_sample in saves:
                    ledger.close()
        ledger.finish()


def checkpoint(root: Path, position: int, launch: int) -> None:
    step = SCHEDULE.at_sample(position - 1).step + 1
    folder = root / "checkpoints" / f"step-{step:012d}-launch-{launch:05d}"
    folder.mkdir(parents=True)
    (folder / "state.json").write_text(json.dumps({"position": position, "step": step, "launch": launch}))


def test_a_lineage_over_restarts_and_numbers_of_ranks_is_exact(tmp_path):
    ends = [SCHEDULE.at_step(n).start_sample for n in range(10)]
    record(tmp_path, 0, ends[6], launch=0, ranks=1, saves=(ends[2], ends[4]))  # saved at 2 and 4, killed after 6
    record(tmp_path, ends[4], ends[5], launch=1, ranks=4, parent=0)  # killed before it saved
    record(tmp_path, ends[4], ends[9], launch=2, ranks=3, parent=0, saves=(ends[8],), micro=2)
    checkpoint(tmp_path, ends[8], 2)
    found = audit(tmp_path)
    lost = (ends[6] - ends[4]) + (ends[5] - ends[4])
    assert found == LedgerAudit(
        ok=True,
        samples=ends[8],
        gaps=0,
        repeats=0,
        discarded_samples=lost,
        unsaved_samples=ends[9] - ends[8],
        steps=8,
        launches=3,
        lineage=(0, 2),
    )
    record(tmp_path, ends[8], 250, launch=3, ranks=2, parent=2)
    checkpoint(tmp_path, 250, 3)
    found = audit(tmp_path)
    assert (found.ok, found.samples, found.unsaved_samples) == (True, 250, 0)
    assert found.discarded_samples == lost + ends[9] - ends[8]
    assert found.lineage == (0, 2, 3)
    assert audit(tmp_path / "ledger").ok  # the folder itself works too
    assert next_launch(tmp_path / "ledger") == 4


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        (lambda step, rank, ids: ids[:-1] if step.step == 5 and rank == 1 else ids, "count"),  # one is missing
        (lambda step, rank, ids: np.append(ids, ids[-1]) if step.step == 5 and rank == 1 else ids, "count"),  # one repeated
        (lambda step, rank, ids: np.where(ids == ids[0], ids[-1], ids) if step.step == 5 and rank == 1 else ids, "ids"),
        (lambda step, rank, ids: (ids + 1) % 100 if step.step == 5 and rank == 1 else ids, "ids"),  # another sample
        (lambda step, rank, ids: ORDER.ids(range(step.start_sample, step.start_sample + len(ids))) if rank == 1 else ids, "ids"),
    ],
)  # fmt: skip
def test_a_wrong_missing_or_repeated_sample_is_found_and_the_rank_named(tmp_path, fault, cause):
    record(tmp_path, 0, 250, launch=0, ranks=2, feed=fault)
    checkpoint(tmp_path, 250, 0)
    found = audit(tmp_path)
    assert not found.ok
    assert found.wrong_runs >= 1
    assert cause in {f.cause for f in found.findings}
    named = next(f for f in found.findings if f.cause == "ids")
    assert "on rank 1 of 2" in named.message and named.launch == 0


def test_two_samples_that_exchanged_their_steps_are_found(tmp_path):
    """The sum over a run changes if a sample moves to another of its steps: the hash depends on the step."""
    schedule = Constant(4).compile().until(40)
    swap = {int(ORDER.ids([4])[0]): int(ORDER.ids([8])[0]), int(ORDER.ids([8])[0]): int(ORDER.ids([4])[0])}
    record(
        tmp_path,
        0,
        40,
        launch=0,
        ranks=1,
        schedule=schedule,
        feed=lambda step, rank, ids: np.array([swap.get(int(i), int(i)) for i in ids]),
    )
    checkpoint(tmp_path, 40, 0)
    assert audit(tmp_path, recompute=False).ok
    assert [f.cause for f in audit(tmp_path).findings] == ["ids"]


def test_gaps_overlaps_and_missing_files_are_found(tmp_path):
    ends = [SCHEDULE.at_step(n).start_sample for n in range(10)]
    record(tmp_path / "gap", 0, ends[4], launch=0)
    record(tmp_path / "gap", ends[5], ends[8], launch=1, parent=0)
    checkpoint(tmp_path / "gap", ends[8], 1)
    found = audit(tmp_path / "gap")
    assert (found.ok, found.gaps, found.repeats) == (False, ends[5] - ends[4], 0)
    record(tmp_path / "rank", 0, ends[4], launch=0, ranks=4)
    checkpoint(tmp_path / "rank", ends[4], 0)
    (tmp_path / "rank" / "ledger" / "launch-00000-rank-00002.jsonl").unlink()
    found = audit(tmp_path / "rank")
    assert not found.ok and found.gaps > 0 and "no ledger of rank 2 of 4" in found.findings[0].message
    record(tmp_path / "launch", ends[4], ends[6], launch=1, parent=0)
    checkpoint(tmp_path / "launch", ends[6], 1)
    found = audit(tmp_path / "launch")
    assert (found.ok, found.gaps) == (False, ends[4])
    assert "the ledger of launch 0 is missing" in found.findings[0].message
    record(tmp_path / "order", 0, ends[4], launch=0)
    record(tmp_path / "order", ends[4], ends[6], launch=1, parent=0, order=GlobalOrder(100, seed=4))
    checkpoint(tmp_path / "order", ends[6], 1)
    assert [f.cause for f in audit(tmp_path / "order").findings] == ["order"]


def test_a_run_that_began_at_a_later_sample_has_no_gap_before_it(tmp_path):
    ends = [SCHEDULE.at_step(n).start_sample for n in range(10)]
    record(tmp_path / "whole", ends[2], ends[5], launch=0, first_sample=ends[2])
    record(tmp_path / "whole", ends[5], ends[8], launch=1, parent=0, first_sample=ends[2])
    checkpoint(tmp_path / "whole", ends[5], 0)
    checkpoint(tmp_path / "whole", ends[8], 1)
    found = audit(tmp_path / "whole")
    assert (found.ok, found.samples, found.gaps) == (True, ends[8] - ends[2], 0)
    for name, start, first, gaps, message in (
        ("gap", ends[3], ends[2], ends[3] - ends[2], f"samples {ends[2]} to {ends[3]} are in no ledger"),
        (
            "early",
            ends[2],
            ends[3],
            0,
            f"the run began at sample {ends[3]} by its ledgers, and its first launch at {ends[2]}",
        ),
    ):
        record(tmp_path / name, start, ends[5], launch=0, first_sample=first)
        checkpoint(tmp_path / name, ends[5], 0)
        found = audit(tmp_path / name)
        assert (found.ok, found.gaps) == (False, gaps) and message in found.findings[0].message
    record(tmp_path / "other", ends[2], ends[5], launch=0, first_sample=ends[2])
    record(tmp_path / "other", ends[5], ends[8], launch=1, parent=0, first_sample=0)
    checkpoint(tmp_path / "other", ends[8], 1)
    assert [f.cause for f in audit(tmp_path / "other").findings] == ["lineage"]


def test_a_damaged_checkpoint_that_was_skipped_does_not_end_the_lineage(tmp_path):
    ends = [SCHEDULE.at_step(n).start_sample for n in range(10)]
    record(tmp_path, 0, ends[6], launch=0, saves=(ends[4], ends[6]))
    checkpoint(tmp_path, ends[4], 0)
    checkpoint(tmp_path, ends[6], 0)  # damaged: launch 1 resumed from the one before
    record(tmp_path, ends[4], ends[5], launch=1, parent=0)
    found = audit(tmp_path)
    assert (found.ok, found.samples, found.lineage) == (True, ends[4], (0,))
    assert (found.discarded_samples, found.unsaved_samples) == (ends[6] - ends[4], ends[5] - ends[4])


def test_skipped_steps_are_recorded_as_such(tmp_path):
    record(tmp_path, 0, 250, launch=0, outcome=lambda step: "skipped" if step.step in (3, 4) else "applied")
    checkpoint(tmp_path, 250, 0)
    found = audit(tmp_path)
    skipped = sum(SCHEDULE.at_step(n).global_batch_size for n in (3, 4))
    assert (found.ok, found.samples, found.skipped_samples) == (True, 250, skipped)


def test_an_incomplete_line_is_a_gap_and_not_a_crash(tmp_path):
    record(tmp_path, 0, 250, launch=0)
    checkpoint(tmp_path, 250, 0)
    file = tmp_path / "ledger" / "launch-00000-rank-00001.jsonl"
    file.write_bytes(file.read_bytes()[: -WIDTH - 100])
    found = audit(tmp_path)
    assert not found.ok and found.gaps > 0


def test_no_ledger_and_a_launch_twice(tmp_path):
    with pytest.raises(RunError, match="holds no ledger"):
        audit(tmp_path)
    Ledger(tmp_path, ORDER, launch=4).finish()
    with pytest.raises(RunError, match="launch=4 has run in") as caught:
        Ledger(tmp_path, ORDER, launch=4)
    assert caught.value.nearest == (5,)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 2**48), min_size=1, max_size=50), st.integers(0, 10**9), st.integers(1, 7), st.data())
def test_hashes_add_up_over_any_partition_and_differ_for_every_change(ids, step, parts, data):
    whole = np.array(ids, np.int64)
    total = sums(*sample_hashes(step, whole))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), min_size=parts, max_size=parts)))
    pieces = [sums(*sample_hashes(step, piece)) for piece in np.split(data.draw(st.permutations(ids)), cuts)]
    assert tuple(sum(lane) % 2**64 for lane in zip(*pieces, strict=True)) == total
    assert span_hash(whole, step, len(ids)) == total
    assert sums(*sample_hashes(step + 1, whole)) != total
    assert sums(*sample_hashes(step, whole[1:])) != total
    assert sums(*sample_hashes(step, np.append(whole, whole[0]))) != total


def test_the_hash_is_the_documented_one():
    """Computed here a second time, so that the ledgers of today can be audited by later versions."""
    mask = 2**64 - 1

    def mix(x, a, b, c, d, e):
        x = (x ^ (x >> a)) * b & mask
        x = (x ^ (x >> c)) * d & mask
        return x ^ (x >> e)

    low = (30, 0xBF58476D1CE4E5B9, 27, 0x94D049BB133111EB, 31)
    high = (27, 0x3C79AC492BA7B653, 33, 0x1C69B3F74AC4AE35, 27)
    x = (12346 * 0x9E3779B97F4A7C15 + mix(679 * 0x9E3779B97F4A7C15 & mask, *high)) & mask
    assert sums(*sample_hashes(678, np.array([12345]))) == (mix(x, *low), mix(x, *high))


def test_a_million_steps_are_a_thousand_lines(tmp_path):
    """Written line by line, then audited. benchmarks/bench_loop.py measures the time."""
    steps, batch, root = 1_000_000, 2, tmp_path / "ledger"
    order = GlobalOrder(10**9, seed=1)
    ledger = Ledger(root, order, launch=0)
    for first in range(0, steps, 1000):
        hash_ = _expected(order, first * batch, (first + 1000) * batch, first, batch)
        step = Step(first, first * batch, batch, 0)
        ledger.applied(step.step, step.start_sample, batch)
        run = ledger._run
        run.steps, run.samples, run.low, run.high = 1000, 1000 * batch, hash_ % 2**64, hash_ >> 64
        ledger.close(sync=False)
        os.pwrite(ledger._file, _line(run), ledger._offset - WIDTH)
    ledger.finish()
    assert ledger.path.stat().st_size < 400_000
    state = {"position": steps * batch, "step": steps, "launch": 0}
    folder = tmp_path / "checkpoints" / f"step-{steps:012d}-launch-00000"
    folder.mkdir(parents=True)
    (folder / "state.json").write_text(json.dumps(state))
    found = audit(tmp_path)
    assert (found.ok, found.samples, found.steps) == (True, steps * batch, steps)


@pytest.mark.parametrize("call", ["pwrite", "fsync"])
def test_a_full_disk_is_an_environment_fault(tmp_path, monkeypatch, call):
    ledger = Ledger(tmp_path, ORDER)

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        with pytest.raises(EnvironmentFault, match=r"the ledger .* could not be written") as caught:
            ledger.applied(0, 0, 8)
            ledger.finish()
    assert caught.value.exit_code == 4
    ledger.finish()
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", lambda file, line, offset: len(line) - 1)
        with pytest.raises(EnvironmentFault, match="No space left"):
            Ledger(tmp_path, ORDER, launch=1)


def test_a_limit_on_the_size_of_files_is_named_not_called_a_full_disk(tmp_path):
    """The first write is short; only the next one says why."""
    ledger = Ledger(tmp_path, ORDER)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (ledger.path.stat().st_size + 20, before[1]))
    try:
        with pytest.raises(EnvironmentFault, match="File too large"):
            ledger.applied(0, 0, 8)
            ledger.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    ledger.finish()


def test_a_file_in_the_place_of_the_ledger_is_named(tmp_path):
    (tmp_path / "ledger").touch()
    with pytest.raises(EnvironmentFault, match=r"the ledger .* could not be written to .*File exists"):
        Ledger(tmp_path / "ledger", ORDER, launch=1)


def one_run(root: Path) -> list[Path]:
    """Two ranks, saved every few steps, so that each file has a header and several lines."""
    ends = [SCHEDULE.at_step(step).end_sample for step in range(SCHEDULE.at_sample(249).step + 1)]
    record(root, 0, ends[-1], launch=0, saves=tuple(ends[2::3]))
    checkpoint(root, ends[-1], 0)
    assert audit(root).ok
    return sorted((root / "ledger").iterdir())


@pytest.mark.parametrize(
    ("line", "old", "new", "message"),
    [
        (2, b'"first_step"', b'"first_stfp"', "first_step is missing"),
        (2, b'"steps": ', b'"steps": -', "steps is '-3', no valid number"),
        (2, b'"steps": ', b'"steps": 1e', "steps is '1000.0', no valid number"),
        (2, b'"hash": "', b'"hash": "x', "hash is not a number"),
        (2, b'"outcome": "a', b'"outcome": "b', "outcome is 'bpplied'"),
        (2, b'"first_step"', b'"first\xffstep"', "byte 7 is not UTF-8"),
        (2, b'{"first_step"', b'"first_step"', "not JSON"),
        (2, b"{", b"[" * 100_000 + b"{", "nested too deeply"),
        (2, b'"start_sample": ', b'"start_sample": 9', "from 0 on elsewhere"),
        (1, b'"order": {', b'"ordfr": {', "order is not valid"),
        (1, b'"order": {', b'"order": {"more": 1, ', "order is not valid"),
        (1, b'"ranks": 2', b'"ranks": 3', "the header differs from that of another rank"),
        (1, b'"schema": 1', b'"schema": 9', "schema is 9, and this version"),
        (1, b'"parent": null', b'"parent": "0"', "parent is '0', no valid number"),
        (1, b'"launch": 0', b'"launch": 8', "launch is 8, and the name of the file says 0"),
        (1, b'"rank": 1', b'"rank": 0', "rank is 0, and the name of the file says 1"),
    ],
)
def test_a_damaged_line_is_named_and_the_rest_is_still_proven(tmp_path, line, old, new, message):
    path = one_run(tmp_path)[1]
    lines = path.read_bytes().split(b"\n")
    assert old in lines[line - 1]
    lines[line - 1] = lines[line - 1].replace(old, new, 1)
    path.write_bytes(b"\n".join(lines))
    done = audit(tmp_path)
    assert not done.ok
    damaged = [f.message for f in done.findings if f.cause == "damaged"]
    assert len(damaged) == 1 and f"{path}, line {line}: " in damaged[0] and message in damaged[0]
    assert "what the undamaged lines prove: " in done.notes[-1] and "prove: 0 of" not in done.notes[-1]


def test_a_rank_with_more_steps_than_the_others_is_a_finding_although_the_samples_add_up(tmp_path):
    path = one_run(tmp_path)[1]
    path.write_bytes(path.read_bytes().replace(b'"steps": 3, ', b'"steps": 7, ', 1))
    done = audit(tmp_path)
    assert not done.ok and "the ranks differ in the steps from step 0 on" in done.findings[0].message


def test_no_flipped_bit_ends_the_audit_or_passes_with_other_numbers(tmp_path):
    path = one_run(tmp_path)[1]
    whole, clean, rng = path.read_bytes(), audit(tmp_path), np.random.default_rng(5)
    passed = 0
    used = [at for at in range(len(whole)) if whole[at] != ord(" ")]
    for at in rng.choice(used, 300, replace=False):
        data = bytearray(whole)
        data[at] ^= 1 << int(rng.integers(0, 8))
        path.write_bytes(data)
        done = audit(tmp_path)
        # The time of a line, for example, is no part of the proof.
        assert not done.ok or replace(done, notes=()) == clean
        passed += done.ok
    assert passed < 100


def test_a_ledger_without_any_readable_header_is_not_ok(tmp_path):
    for path in one_run(tmp_path):
        path.write_bytes(path.read_bytes().replace(b'"schema"', b'"scheme"'))
    done = audit(tmp_path)
    assert not done.ok and [f.cause for f in done.findings][:2] == ["damaged", "damaged"]
    assert "what the undamaged lines prove: 0 of" in done.notes[-1]


def test_a_header_without_its_parent_is_damaged_also_in_the_first_launch(tmp_path):
    path = one_run(tmp_path)[0]
    path.write_bytes(path.read_bytes().replace(b'"parent"', b'"parEnt"'))
    done = audit(tmp_path)
    assert not done.ok and "parent is missing" in done.findings[0].message


@pytest.mark.parametrize("state", ["[1]", '{"launch": 0, "position": 1e999}', '{"launch": -1}', "\udcff"])
def test_a_damaged_checkpoint_state_is_a_finding(tmp_path, state):
    one_run(tmp_path)
    (path,) = (tmp_path / "checkpoints").glob("*/state.json")
    path.write_bytes(state.encode("utf-8", "surrogateescape"))
    done = audit(tmp_path)
    assert not done.ok and done.findings[0].cause == "checkpoint" and "cannot be read" in done.findings[0].message


def test_a_checkpoint_state_with_another_digest_is_a_finding_and_the_one_before_it_counts(tmp_path):
    ends = [SCHEDULE.at_step(n).start_sample for n in range(10)]
    record(tmp_path, 0, ends[4], launch=0, ranks=1, saves=(ends[2], ends[4]))
    checkpoint(tmp_path, ends[2], launch=0)
    checkpoint(tmp_path, ends[4], launch=0)
    newest = tmp_path / "checkpoints" / "step-000000000004-launch-00000"
    state = newest / "state.json"
    facts = {"size": state.stat().st_size, "sha256": digest_of(state)}
    write_json(newest / "manifest.json", {"schema": 1, "files": {"state.json": facts}})
    assert audit(tmp_path).ok
    state.write_text(state.read_text().replace(f'"position": {ends[4]}', f'"position": {ends[2]}'))
    done = audit(tmp_path)
    assert (done.ok, done.samples, done.unsaved_samples) == (False, ends[2], ends[4] - ends[2])
    (finding,) = done.findings
    assert finding.cause == "checkpoint" and "state.json has" in finding.message


def test_a_step_larger_than_a_block_is_hashed_in_parts(monkeypatch):
    whole = _expected(ORDER, 40, 240, 3, 100)
    ids = ORDER.ids(range(40, 240))
    low, high = span_hash(ids, 3, 100)
    monkeypatch.setattr("batchwright.runtime.state.audit._BLOCK", 7)
    assert whole == _expected(ORDER, 40, 240, 3, 100) == high << 64 | low


def test_ranks_that_trained_the_same_samples_are_found_without_the_order(tmp_path, monkeypatch):
    first = lambda step, rank, ids: ORDER.ids(range(step.start_sample, step.start_sample + len(ids)))  # noqa: E731
    record(tmp_path, 0, 250, launch=0, ranks=2, feed=first)
    record(tmp_path / "b", 0, 250, launch=0, ranks=3, schedule=Constant(2).compile().until(250))  # rank 2 has none
    for root in (tmp_path, tmp_path / "b"):
        checkpoint(root, 250, 0)
    monkeypatch.setattr(GlobalOrder, "ids", lambda *given: pytest.fail("the order is not needed"))
    found = audit(tmp_path, recompute=False)
    named = [f.message for f in found.findings]
    assert (found.gaps, found.repeats) == (0, 0)  # the counts alone are right
    assert not found.ok and not found.ids_checked and found.wrong_runs == len(named) > 0
    assert named[0] == "launch 0, steps 0 to 4: rank 1 trained the same samples as rank 0."
    found = audit(tmp_path / "b", recompute=False)
    assert found.ok and found.summary() == "ok by spans and counts: 250 samples, each in exactly one step"


@pytest.mark.parametrize("batch", [3, 8, 20])
@pytest.mark.parametrize("block", [2, 1 << 19])
def test_the_ranks_of_a_wrong_run_are_named_where_shares_differ(tmp_path, monkeypatch, batch, block):
    monkeypatch.setattr("batchwright.runtime.state.audit._BLOCK", block)
    schedule = Constant(batch).compile().until(250)
    fault = lambda step, rank, ids: (ids + 1) % 100 if step.step == 5 and rank in (1, 2) else ids  # noqa: E731
    record(tmp_path, 0, 250, launch=0, ranks=5, schedule=schedule, feed=fault)
    checkpoint(tmp_path, 250, 0)
    (found,) = audit(tmp_path).findings
    assert found.message.endswith("the samples are not those of the order, on rank 1, 2 of 5.")


@pytest.mark.parametrize("file", [0, 1, 2])
def test_lines_that_are_read_without_json_give_the_same_audit(tmp_path, monkeypatch, file):
    """Any change of one byte: what the fast reader accepts, the reader of JSON accepts with the same numbers."""
    ends = [SCHEDULE.at_step(n).start_sample for n in range(10)]
    record(tmp_path, 0, ends[9], launch=0, ranks=3, saves=(ends[3], ends[6]))
    checkpoint(tmp_path, ends[9], 0)
    path = sorted((tmp_path / "ledger").iterdir())[file]
    whole, rng = path.read_bytes(), np.random.default_rng(7)
    lines = whole.split(b"\n")
    damaged = [whole, whole[:-1], b"", lines[1], b"\n".join(lines[1:]), b"\n".join([*lines[:2], *lines[1:]])]
    damaged += [whole + b"\0" * 384, whole.replace(b'"steps": 3', b'"steps": 2'), whole.replace(b': "', b': "0', 1)]
    for at in rng.integers(0, len(whole), 200):
        data = bytearray(whole)
        data[at] = rng.choice(list(b'0123456789abcdef"{}:, \n')) if at % 2 else data[at] ^ 1 << int(rng.integers(0, 8))
        damaged.append(bytes(data))
    for data in damaged:
        path.write_bytes(data)
        quick = audit(tmp_path), audit(tmp_path, recompute=False)
        with monkeypatch.context() as patch:
            patch.setattr(joined, "_add_quickly", lambda *given: False)
            assert (audit(tmp_path), audit(tmp_path, recompute=False)) == quick


@pytest.mark.parametrize("ranks", [16, 8192])
def test_an_audit_opens_each_file_once_and_parses_the_lines_of_one_rank(tmp_path, monkeypatch, ranks):
    samples, parsed = ledger_of(tmp_path, ranks, lines=3), []
    parse = joined.parse_object
    monkeypatch.setattr(joined, "parse_object", lambda text: parsed.append(text) or parse(text))
    with opened() as seen:
        found = audit(tmp_path)
    assert found.ok and found.samples == samples
    files = [name for name in seen.files if name.endswith(".jsonl")]
    assert len(files) == len(set(files)) == ranks and seen.listed.count(str(tmp_path / "ledger")) == 1
    assert len(parsed) == ranks + 3  # a header of each rank


def test_files_are_read_again_for_few_wrong_runs(tmp_path):
    """A wrong order makes every run wrong: the ranks of the first ones are named."""
    ledger_of(tmp_path, 64, lines=12)
    for path in (tmp_path / "ledger").iterdir():
        path.write_bytes(path.read_bytes().replace(b'"seed": 1', b'"seed": 2'))
    with opened() as seen:
        found = audit(tmp_path)
    named = ["on rank 0, 1, 2" in f.message for f in found.findings]
    assert found.wrong_runs == 12 and named == [True] * 8 + [False] * 4
    assert len([name for name in seen.files if name.endswith(".jsonl")]) == 64 * 9
