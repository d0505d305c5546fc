"""Several ranks: all report, one that is out of memory decides, a hung one is named. Scripted; test_real has real ranks."""

from __future__ import annotations

import pytest

from batchwright.core.errors import RunError
from batchwright.probe.prober import run_probe

SAY = """
def rank(number, **result):
    path = spec["result"] + f".{number}"
    json.dump({"identity": IDENTITY, "limit_bytes": 2000} | result, open(path + ".part", "w"))
    os.replace(path + ".part", path)

def both(peak=1000):
    rank(0, status="done", peak_memory_bytes=peak)
    rank(1, status="done", peak_memory_bytes=peak + 50)
    sys.exit(0)
"""


def test_one_rank_out_of_memory_is_out_of_memory(scripted):
    code = """
    if size <= 4: both()
    rank(0, status="running", stage=5, doing="backward of step 0")
    rank(1, status="failed", kind="host-oom", reason="no memory")
    sys.exit(1)
    """
    probe = run_probe(scripted(SAY + _dedent(code), ranks=2))
    assert probe.max_micro_batch_size == 4
    failed = [t for t in probe.trials if not t.fits]
    assert {(t.status, t.rank) for t in failed} == {("oom", 1)}
    assert failed[0].reason.startswith("rank 1:")


def test_the_largest_peak_counts(scripted):
    probe = run_probe(scripted(SAY + "both(peak=900)", ranks=2, largest=8))
    assert probe.trials[0].peak_memory_bytes == 950


def test_a_hung_rank_is_named(scripted, hangs_end):
    code = """
    if size <= 4: both()
    rank(0, status="running", stage=7, doing="backward of step 1")
    rank(1, status="running", stage=5, doing="reading the batch of step 1")
    hang_now()
    """
    probe = run_probe(scripted(SAY + _dedent(code), ranks=2, largest=5))
    hung = next(t for t in probe.trials if t.status == "timeout")
    assert "rank 1 of 2 hung" in hung.reason
    assert "reading the batch of step 1" in hung.reason


def test_out_of_memory_wins_over_a_crash_it_caused(scripted):
    code = """
    if size <= 4: both()
    rank(0, status="failed", kind="crash", reason="connection reset by peer")
    rank(1, status="failed", kind="host-oom", reason="no memory")
    sys.exit(1)
    """
    probe = run_probe(scripted(SAY + _dedent(code), ranks=2, largest=8))
    assert {t.rank for t in probe.trials if not t.fits} == {1}


def test_the_rank_that_failed_first_is_at_fault(scripted):
    """The others lose their connection to it, and write that."""
    code = """
    if size <= 4: both()
    rank(1, status="failed", kind="crash", reason="label 17 is not below 10")
    rank(0, status="failed", kind="crash", reason="connection reset by peer")
    for number, written in ((0, 2), (1, 1)):
        os.utime(spec["result"] + f".{number}", ns=(0, written))
    sys.exit(1)
    """
    with pytest.raises(RunError, match="rank 1: label 17 is not below 10"):
        run_probe(scripted(SAY + _dedent(code), ranks=2, largest=8))


@pytest.mark.parametrize("missing", ["done", "running"])
def test_a_rank_without_a_result(scripted, missing):
    code = f"""
    if size <= 4: both()
    rank(0, status={missing!r}, stage=3)
    os.kill(os.getpid(), signal.SIGKILL)
    """
    probe = run_probe(scripted(SAY + _dedent(code), ranks=2, largest=8))
    assert {t.cause for t in probe.trials if not t.fits} == {"host-oom"}


def _dedent(code: str) -> str:
    import textwrap

    return textwrap.dedent(code)
