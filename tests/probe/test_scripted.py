"""Scripted workers: every way in which a trial can end, and what the prober concludes."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from batchwright.cli.probe import render
from batchwright.core.errors import ConfigError, NothingFitsError, RunError
from batchwright.probe.display import NoProgress
from batchwright.probe.journal import Journal
from batchwright.probe.prober import run_probe
from batchwright.probe.records import Trial

LIMIT_40 = "oom() if size > 40 else fits()\n"


class Watching(NoProgress):
    def __init__(self):
        self.trials, self.notes = [], []

    def finished(self, trial):
        self.trials.append(trial)

    def note(self, text):
        self.notes.append(text)


def test_fits_and_out_of_memory(scripted):
    probe = run_probe(scripted("fits(600 + 34 * size) if size <= 40 else oom()"))
    assert (probe.max_micro_batch_size, probe.first_failing_micro_batch_size) == (40, 41)
    assert [t.purpose for t in probe.trials] == ["limit"] * len(probe.trials)
    assert len(probe.trials) <= 5
    assert probe.recommended_micro_batch_size is None, "its speed was not measured"
    assert any(note.startswith("no size is recommended: speed was not measured") for note in probe.notes)


@pytest.mark.parametrize(
    ("failure", "kind"),
    [
        ("oom('device-oom')", "device-oom"),
        ("oom('loader-worker')", "loader-worker"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "host-oom"),
        ("os.kill(os.getpid(), signal.SIGBUS)", "host-oom"),
        ("sys.exit(137)", "host-oom"),
        ("sys.exit('RuntimeError: CUDA error: out of memory')", "device-oom"),
        (
            "sys.stderr.write(\"terminate called after throwing an instance of 'std::bad_alloc'\"); os.abort()",
            "host-oom",
        ),
        ("raise MemoryError", "host-oom"),
    ],
)
def test_failures_that_limit_the_size(scripted, failure, kind):
    probe = run_probe(
        scripted(f"fits() if size <= 8 else {failure}" if "raise" not in failure else f"if size > 8: {failure}\nfits()")
    )
    assert probe.max_micro_batch_size == 8
    assert {t.cause for t in probe.trials if not t.fits} == {kind}
    assert {t.status for t in probe.trials if not t.fits} == {"oom"}


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV"),
        ("os.abort()", "SIGABRT"),
        ("sys.exit(0)", "exit status 0 but no result"),
        ("open(spec['result'] + '.0', 'w').write('{\"status\": \"do'); sys.exit(0)", "no result"),
        ("open(spec['result'] + '.0', 'w').write('[1, 2]'); sys.exit(0)", "no result"),
        ("raise KeyError('mine')", "KeyError"),
        (
            "say(status='failed', kind='compile', reason='InductorError', traceback='Traceback: theirs')",
            "InductorError",
        ),
    ],
)
def test_failures_that_stop_the_search(scripted, failure, message):
    watching = Watching()
    with pytest.raises(RunError, match=message) as caught:
        run_probe(scripted(failure), progress=watching)
    assert caught.value.exit_code == 5
    assert len(watching.trials) == 1, "no search"
    assert watching.trials[0].status == "crash"


def test_a_crash_shows_the_users_traceback(scripted):
    with pytest.raises(RunError) as caught:
        run_probe(scripted("raise KeyError('mine')"))
    assert "KeyError: 'mine'" in "".join(caught.value.__notes__)


def test_a_size_that_hangs_bounds_the_search(scripted, hangs_end):
    probe = run_probe(scripted("fits() if size <= 4 else hang()", largest=8))
    assert probe.max_micro_batch_size == 4
    hung = [t for t in probe.trials if t.status == "timeout"]
    assert hung
    assert hung[0].cause == "hang"
    assert any("timed out" in note for note in probe.notes)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("hang('building the task')", "hung while the task was built"),
        ("hang_now()", "hung while libraries were imported"),
    ],
)
def test_a_hang_before_the_first_step_is_a_crash(scripted, hangs_end, code, message):
    """Smaller sizes would hang as well."""
    watching = Watching()
    with pytest.raises(RunError, match=message):
        run_probe(scripted(code), progress=watching)
    assert len(watching.trials) == 1


def test_a_trial_ends_at_its_timeout(scripted):
    with pytest.raises(RunError, match=r"no end within 0\.5 s"):
        run_probe(scripted("time.sleep(10**9)", timeout=0.5))


def test_a_hung_trial_leaves_no_process(scripted, hangs_end, tmp_path):
    code = """
    import subprocess
    if size > 4:
        child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"], start_new_session=True)
        open(sys.argv[1] + f".{child.pid}", "w")
        os.makedirs(%r, exist_ok=True)
        open(os.path.join(%r, str(child.pid)), "w")
        hang()
    fits()
    """
    pids = tmp_path / "pids"
    run_probe(scripted(code % (str(pids), str(pids)), largest=8))
    assert [p.name for p in pids.iterdir()]
    assert not [p.name for p in pids.iterdir() if alive(int(p.name))]


def test_nothing_fits(scripted):
    with pytest.raises(NothingFitsError, match="Tried 8, 4, 2, 1") as caught:
        run_probe(scripted("oom()"))
    assert caught.value.exit_code == 3


def test_an_invalid_task_is_an_invalid_request(scripted):
    error = {"type": "ConfigError", "message": "no such function", "field": "task", "given": "x", "nearest": ["y"]}
    code = f"say(status='invalid', error={error})"
    with pytest.raises(ConfigError, match="no such function") as caught:
        run_probe(scripted(code))
    assert caught.value.nearest == ("y",)


def test_the_cap_is_respected(scripted):
    probe = run_probe(scripted(LIMIT_40, largest=20))
    assert probe.max_micro_batch_size == 20
    assert probe.first_failing_micro_batch_size is None
    assert max(t.micro_batch_size for t in probe.trials) == 20


def test_multiples_only(scripted):
    probe = run_probe(scripted("fits(600 + 34 * size) if size <= 40 else oom()", multiple_of=16))
    assert probe.max_micro_batch_size == 32
    assert all(t.micro_batch_size % 16 == 0 for t in probe.trials)


def test_a_recommended_size_is_within_the_limit_with_the_users_own_allocator(scripted):
    """Without the fixed allocator, each size needs 1.5 times as much: the largest sizes exceed the limit of 2000."""
    code = "fits(int((600 + 10 * size) * (1.5 if mode == 'throughput' else 1))) if size <= 140 else oom()"
    probe = run_probe(scripted(code, throughput=True))
    assert probe.max_micro_batch_size == 140
    assert probe.recommended_peak_memory_bytes <= probe.memory_bytes
    assert probe.recommended_micro_batch_size < 140
    assert any("with your own allocator" in note for note in probe.notes)


def test_of_the_sizes_within_the_limit_a_faster_one_is_recommended(scripted):
    """Samples/s: 8: 80, 16: 160, 32: 128, 64: 200. At 64 the peak is above the limit of 2000, and 32 is slower than 16."""
    code = """
    seconds = {8: 0.1, 16: 0.1, 32: 0.25, 64: 0.32}.get(size, 1.0)
    timing = TIMING | {"seconds": seconds, "low": seconds * 0.99, "high": seconds * 1.01}
    more = {"timing": timing} if mode == "throughput" else {}
    fits(2100 if more and size == 64 else 1000 + 31 * size // 2, **more) if size <= 64 else oom()
    """
    probe = run_probe(scripted(code, throughput=True))
    assert (probe.max_micro_batch_size, probe.largest_worthwhile_micro_batch_size) == (64, 64)
    assert probe.recommended_micro_batch_size == 16
    assert any("16 is recommended instead" in note for note in probe.notes)


def test_what_the_allocator_of_a_device_holds_counts(scripted):
    code = "fits(600 + 10 * size, reserved_bytes=2001 if mode == 'throughput' and size > 100 else 1900) if size <= 140 else oom()"
    probe = run_probe(scripted(code, throughput=True))
    assert probe.max_micro_batch_size == 140
    assert (probe.recommended_micro_batch_size, probe.recommended_peak_memory_bytes) == (64, 1900)


@pytest.mark.parametrize(
    ("measured", "said"),
    [("oom()", "none ran while its speed was measured"), ("fits(2001)", "no size that was measured is within")],
)
def test_no_size_is_recommended_if_none_is_within_the_limit_at_speed(scripted, measured, said):
    code = f"if mode == 'throughput': {measured}\nfits(600 + 10 * size) if size <= 140 else oom()"
    probe = run_probe(scripted(code, throughput=True))
    assert probe.max_micro_batch_size == 140
    assert min(t.micro_batch_size for t in probe.trials if t.purpose == "throughput") == 1, "the smallest was measured"
    assert probe.recommended_micro_batch_size is None
    assert probe.recommended_peak_memory_bytes is None
    assert any(said in note for note in probe.notes)
    assert any(note.startswith("no size is recommended") for note in probe.notes)
    assert "recommended: no size (see the notes)" in render(probe)


@pytest.mark.parametrize(
    ("failing", "ending"),
    [("size == 140", "oom()"), ("size >= 64", "oom()"), ("True", "oom()"), ("True", "raise KeyError")],
)
def test_a_size_that_fails_while_the_bottleneck_is_looked_for(scripted, failing, ending):
    """Out of memory: the next best is recommended. A crash, as of a dataset that cannot be read, costs the comparison only."""
    code = f"if spec['contrasts'] and ({failing}): {ending}\nfits(600 + 10 * size) if size <= 140 else oom()"
    probe = run_probe(scripted(code, throughput=True))
    assert probe.max_micro_batch_size == 140
    crashed = ending != "oom()"
    expected = 140 if crashed else {"size == 140": 64, "size >= 64": 32, "True": None}[failing]
    assert probe.recommended_micro_batch_size == expected
    said = "the bottleneck of micro_batch_size 140 failed" if crashed else "micro_batch_size 140 fits, but ran out"
    assert any(said in note for note in probe.notes)
    assert (probe.bottleneck is None) == (expected is None)


def test_throughput_recommends_a_measured_size_and_names_the_bottleneck(scripted):
    probe = run_probe(scripted("fits(600 + 10 * size) if size <= 140 else oom()", throughput=True))
    measured = [t.micro_batch_size for t in probe.trials if t.purpose == "throughput" and t.fits]
    best = max(t.samples_per_second for t in probe.trials if t.samples_per_second)
    assert probe.max_micro_batch_size == 140
    assert {probe.saturating_micro_batch_size, probe.recommended_micro_batch_size} <= set(measured)
    at = next(
        t for t in probe.trials if t.micro_batch_size == probe.saturating_micro_batch_size and t.samples_per_second
    )
    assert at.samples_per_second >= 0.9 * best
    assert probe.curve.predicted_saturating == 90  # a/b × 9
    assert probe.bottleneck == "none"
    document = json.loads(json.dumps(probe.to_json(), allow_nan=False))
    assert document["schema"] == 1
    assert {
        "micro_batch_size",
        "status",
        "purpose",
        "peak_memory_bytes",
        "samples_per_second",
        "step_seconds",
        "predicted_peak_memory_bytes",
    } <= set(document["trials"][0])


@pytest.mark.parametrize("evaluation", [False, True])
def test_the_trials_that_are_left_are_counted_to_the_end_of_the_probe(scripted, evaluation):
    class Counting(Watching):
        def __init__(self):
            super().__init__()
            self.left = []

        def started(self, size, purpose, left):
            self.left.append((purpose, left))

    counting = Counting()
    code = "fits(600 + 10 * size) if size <= 140 else oom()"
    probe = run_probe(scripted(code, throughput=True, evaluation=evaluation), progress=counting)
    assert [t.purpose for t in probe.trials] == [purpose for purpose, _ in counting.left]
    told = [left for purpose, left in counting.left if not evaluation or purpose != "limit"]
    assert len(told) > 8
    # Before the second trial of a search nothing is known; from then on these peaks are on one line.
    assert told[1:] == list(range(len(told) - 2, -1, -1))


def test_evaluation_batches_are_searched_separately(scripted):
    probe = run_probe(
        scripted("fits(500 + size) if size <= (100 if mode == 'evaluation' else 40) else oom()", evaluation=True)
    )
    assert (probe.max_micro_batch_size, probe.max_evaluation_batch_size) == (40, 100)
    assert {t.purpose for t in probe.trials} == {"limit", "evaluation"}


def test_the_cap_holds_for_evaluation_too(scripted):
    probe = run_probe(scripted("fits(500 + size)", evaluation=True, largest=20))
    assert probe.max_evaluation_batch_size == 20
    assert max(t.micro_batch_size for t in probe.trials) == 20
    assert any(note.startswith("evaluation batch 20 is the cap") for note in probe.notes)


def test_out_of_memory_while_measuring_speed_is_noted(scripted):
    code = "oom() if size > (39 if mode == 'throughput' else 40) else fits(600 + 34 * size)"
    probe = run_probe(scripted(code, throughput=True))
    assert probe.max_micro_batch_size == 40
    assert probe.recommended_micro_batch_size < 40
    assert any("micro_batch_size 40 fits, but ran out of memory while its speed" in note for note in probe.notes)


# The journal.


def test_a_search_that_ends_early_says_so_and_exact_continues_from_its_trials(scripted):
    """A segment ends at 89% of the limit: eight trials do not come within 1% of it."""
    code = "peak = int(max(1022 + 2.69 * size, 1254 + 1.97 * size))\nfits(peak) if peak <= 2000 else oom()"
    probe = run_probe(scripted(code))
    ran, failed = probe.max_micro_batch_size, probe.first_failing_micro_batch_size
    assert len(probe.trials) == 8 and ran * 1.01 < failed
    said = (
        f"the search ended after 8 trials: {ran} ran, {failed} did not, {failed / ran - 1:.1%} apart; --exact continues"
    )
    assert f"{said} from the journal." in probe.notes
    exact = run_probe(scripted(code, exact=True))
    assert (exact.max_micro_batch_size, exact.first_failing_micro_batch_size) == (363, 364)
    assert [t.micro_batch_size for t in exact.trials[:8]] == [t.micro_batch_size for t in probe.trials]
    assert [t.resumed for t in exact.trials] == [True] * 8 + [False] * (len(exact.trials) - 8)
    assert not any("the search ended" in note for note in exact.notes)
    assert f"{said}." in run_probe(scripted(code, directory=None)).notes


def test_an_interrupted_probe_continues_where_it_stopped(scripted):
    stopped = scripted("fits(600 + 34 * size) if size <= 40 else oom()")

    class Interrupt(Watching):
        def started(self, size, purpose, left):
            if len(self.trials) == 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_probe(stopped, progress=Interrupt())
    probe = run_probe(scripted("fits(600 + 34 * size) if size <= 40 else oom()"))
    assert [t.resumed for t in probe.trials] == [True, True, *[False] * (len(probe.trials) - 2)]
    assert len(probe.trials) > 2
    assert any(note.startswith("resumed: 2 trials") for note in probe.notes)
    again = run_probe(scripted("fits(600 + 34 * size) if size <= 40 else oom()"))
    assert all(t.resumed for t in again.trials)
    assert again.max_micro_batch_size == probe.max_micro_batch_size == 40
    fresh = run_probe(scripted("fits(600 + 34 * size) if size <= 40 else oom()", fresh=True))
    assert not any(t.resumed for t in fresh.trials)


def test_fresh_supersedes_what_was_measured_before(scripted, tmp_path):
    run_probe(scripted("oom() if size > 6 else fits()"))
    run_probe(scripted(LIMIT_40, fresh=True))
    (journal,) = (tmp_path / "journal").glob("*.jsonl")
    assert '{"kind": "fresh"}' in journal.read_text().splitlines()
    again = run_probe(scripted(LIMIT_40))
    assert all(t.resumed for t in again.trials)
    assert again.max_micro_batch_size == 40


def test_other_seconds_measure_speed_again_but_not_the_limit(scripted):
    run_probe(scripted(LIMIT_40, throughput=True, seconds=1, largest=4))
    probe = run_probe(scripted(LIMIT_40, throughput=True, seconds=3, largest=4))
    assert {(t.purpose, t.resumed) for t in probe.trials} == {("limit", True), ("throughput", False)}


def test_a_changed_optimizer_is_noticed_and_named(scripted):
    run_probe(scripted(LIMIT_40))
    probe = run_probe(scripted("IDENTITY['optimizer'] = 'SGD'\n" + LIMIT_40))
    assert "optimizer changed: AdamW -> SGD; probing again" in probe.notes
    assert not any(t.resumed for t in probe.trials)
    back = run_probe(scripted(LIMIT_40))
    assert "optimizer changed: SGD -> AdamW; probing again" in back.notes
    assert all(t.resumed for t in back.trials), "what was measured before still holds"


def test_a_task_that_can_no_longer_be_built_has_not_changed_in_everything(scripted):
    run_probe(scripted(LIMIT_40))
    progress = Watching()
    with pytest.raises(RunError, match="the user's own mistake"):
        run_probe(scripted('sys.exit("ValueError: the user\'s own mistake")'), progress=progress)
    assert progress.notes == []


def test_another_budget_is_measured_again(scripted):
    run_probe(scripted(LIMIT_40, memory="1GiB"))
    assert not any(t.resumed for t in run_probe(scripted(LIMIT_40, memory="2GiB")).trials)


def test_where_other_memory_was_there_it_is_measured_again(scripted):
    for room, resumed in ((7, False), (7, True), (8, False)):
        made = run_probe(scripted(f"RESULT['room'] = {room}\n" + LIMIT_40))
        assert {t.resumed for t in made.trials} == {resumed}


def test_two_probes_at_once_keep_their_trials_apart(tmp_path):
    """Both write into one file: the arguments of a task are not in its name."""
    small, large = {"args": {"layers": "2"}}, {"args": {"layers": "48"}}
    one, other = Journal(tmp_path / "j.jsonl"), Journal(tmp_path / "j.jsonl")
    one.add(small, {}, Trial(8, "fits", "limit"))
    other.add(large, {}, Trial(8, "oom", "limit"))
    one.add(small, {}, Trial(512, "fits", "limit"))
    trials, _ = Journal(tmp_path / "j.jsonl").resume(large, lambda purpose: {})
    assert [(t.micro_batch_size, t.status) for t in trials] == [(8, "oom")]
    trials, changed = Journal(tmp_path / "j.jsonl").resume(small, lambda purpose: {})
    assert [(t.micro_batch_size, t.status) for t in trials] == [(8, "fits"), (512, "fits")] and not changed


def test_a_torn_line_is_skipped(scripted, tmp_path):
    run_probe(scripted(LIMIT_40))
    (journal,) = (tmp_path / "journal").glob("*.jsonl")
    with journal.open("a") as file:
        file.write('{"kind": "trial", "condi')
    probe = run_probe(scripted(LIMIT_40))
    assert all(t.resumed for t in probe.trials)
    run_probe(scripted(LIMIT_40, memory="1GiB"))  # appends after the torn line
    assert all(t.resumed for t in run_probe(scripted(LIMIT_40, memory="1GiB")).trials)


@pytest.mark.parametrize(
    "line",
    [
        b'{"kind": "trial\xff"}',
        b"[1]",
        b'{"kind": "trial", "identity": 3, "conditions": {}, "trial": {}}',
        b'{"kind": "trial", "identity": {}, "conditions": {}, "trial": 3}',
        b'{"kind": "trial", "identity": {}, "conditions": {}, "trial": {"micro_batch_size": "8", "status": "fits", '
        b'"purpose": "limit"}}',
        b'{"kind": "trial", "identity": {}, "conditions": {}, "trial": {"status": "fits"}}',
        b'{"kind": "trial", "conditions": {}}',
    ],
)
def test_a_damaged_line_is_skipped(scripted, tmp_path, line):
    run_probe(scripted(LIMIT_40))
    (journal,) = (tmp_path / "journal").glob("*.jsonl")
    first, *trials = journal.read_bytes().splitlines()
    journal.write_bytes(b"\n".join([line, first, line, *trials, line, b""]))
    probe = run_probe(scripted(LIMIT_40))
    assert all(t.resumed for t in probe.trials) and probe.max_micro_batch_size == 40


def test_a_full_disk_keeps_the_results(scripted, monkeypatch):
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("batchwright.probe.journal.os.fsync", full)
    probe = run_probe(scripted(LIMIT_40))
    assert probe.max_micro_batch_size == 40
    assert "No space left on device" in probe.journal_error


def test_a_journal_is_not_written_through_a_link(scripted, tmp_path):
    run_probe(scripted(LIMIT_40))
    (journal,) = (tmp_path / "journal").glob("*.jsonl")
    journal.unlink()
    (tmp_path / "victim").write_text("precious")
    journal.symlink_to(tmp_path / "victim")
    probe = run_probe(scripted(LIMIT_40))
    assert probe.max_micro_batch_size == 40 and "symbolic link" in probe.journal_error
    assert (tmp_path / "victim").read_text() == "precious"


def test_an_interrupted_probe_says_what_is_kept(scripted):
    class Interrupt(Watching):
        def __init__(self, after):
            super().__init__()
            self.after = after

        def started(self, size, purpose, left):
            if len(self.trials) == self.after:
                raise KeyboardInterrupt

    for after, options in ((0, {}), (1, {}), (2, {}), (2, {"directory": None})):
        watching = Interrupt(after)
        with pytest.raises(KeyboardInterrupt):
            run_probe(scripted(LIMIT_40, fresh=True, **options), progress=watching)
        kept = [note for note in watching.notes if "kept in" in note]
        assert len(kept) == (1 if after and not options else 0)
        held = "1 trial is" if after == 1 else "2 trials are"
        assert all(note.startswith(f"{held} kept in") for note in kept)


def test_a_message_with_a_full_stop_gets_no_second_one(scripted):
    with pytest.raises(RunError, match=r"ValueError: use x instead\. This does not depend on the size") as caught:
        run_probe(scripted("say(status='failed', kind='crash', reason='ValueError: use x instead.')"))
    assert ".." not in str(caught.value)


# Processes.


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_killing_the_prober_leaves_no_orphan_and_a_journal(scripted, tmp_path, how):
    pids = tmp_path / "pids"
    code = f"""
    import subprocess
    if size > 8:
        os.makedirs({str(pids)!r}, exist_ok=True)
        child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"], start_new_session=True)
        for pid in (os.getpid(), os.getppid(), child.pid):
            open(os.path.join({str(pids)!r}, str(pid)), "w")
        open(os.path.join({str(pids)!r}, "ready"), "w").write(spec["result"])
        time.sleep(600)
    fits()
    """
    request = scripted(code)
    program = (
        "import sys; from batchwright.probe.records import read_request; from batchwright.probe.prober import run_probe\n"
        f"run_probe(read_request({request.target!r}, worker={request.worker!r}, throughput=False,\n"
        f"    directory={str(request.directory)!r}))"
    )
    prober = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.DEVNULL)
    wait_for(lambda: (pids / "ready").exists() and (pids / "ready").read_text())
    scratch = Path((pids / "ready").read_text()).parent
    prober.send_signal(how)
    prober.wait(300)
    started = [int(p.name) for p in pids.iterdir() if p.name.isdigit()]
    assert len(started) == 3
    wait_for(lambda: not any(alive(pid) for pid in started) and not scratch.exists())
    probe = run_probe(scripted("fits() if size <= 8 else oom()"))
    assert probe.trials[0].resumed, "the finished trial was on disk"


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_between_two_trials_leaves_no_temporary_directory(scripted, tmp_path, how):
    request = scripted("fits()")
    scratch = tmp_path / "temporary"
    scratch.mkdir()
    program = (
        # Under nohup, SIGHUP is ignored, and this process would inherit that.
        f"import os, signal; signal.signal({int(how)}, signal.SIG_DFL)\n"
        "from batchwright.probe.display import NoProgress\n"
        "from batchwright.probe.records import read_request; from batchwright.probe.prober import run_probe\n"
        "class Ending(NoProgress):\n"
        f"    def finished(self, trial): os.listdir({str(scratch)!r}) and os.kill(os.getpid(), {int(how)})\n"
        f"run_probe(read_request({request.target!r}, worker={request.worker!r}, throughput=False,\n"
        f"    directory={str(request.directory)!r}), progress=Ending())"
    )
    ended = subprocess.run([sys.executable, "-c", program], env={**os.environ, "TMPDIR": str(scratch)}, timeout=600)
    assert ended.returncode == -how
    assert not list(scratch.iterdir())


def wait_for(condition, seconds=300.0):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "the condition did not become true"
        time.sleep(0.05)


def test_the_worker_ends_when_its_guard_is_killed(scripted, tmp_path):
    """The trial ends with the guard, even if that is killed."""
    seen = tmp_path / "seen"
    code = f"""
    if size > 4:
        open({str(seen)!r} + ".part", "w").write(f"{{os.getpid()}} {{os.getppid()}}")
        os.replace({str(seen)!r} + ".part", {str(seen)!r})
        time.sleep(600)
    fits()
    """
    import threading

    def kill_guard():
        wait_for(seen.exists)
        os.kill(int(seen.read_text().split()[1]), signal.SIGKILL)

    killer = threading.Thread(target=kill_guard)
    killer.start()
    probe = run_probe(scripted(code, largest=5))
    killer.join()
    assert probe.max_micro_batch_size == 4
    assert not alive(int(seen.read_text().split()[0]))
