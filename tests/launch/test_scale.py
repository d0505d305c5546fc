"""What a run of 8,192 ranks costs, counted in files that are opened and folders that are listed; and never the clock."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from batchwright.cli import main
from batchwright.launch.directory import RunDirectory
from batchwright.launch.engine import Poll, all_ended, rank_logs
from batchwright.launch.failure import explain
from batchwright.launch.show import LineDisplay
from batchwright.launch.slurm import engine as slurm_engine
from batchwright.launch.slurm import step as slurm_step
from batchwright.launch.supervisor import Supervisor
from batchwright.runtime.data.order import GlobalOrder
from tests.fabricated import complete_run, end, launch_folder, opened

RANKS = (16, 8192)


@pytest.fixture(params=RANKS)
def ranks(request) -> int:
    return request.param


def test_a_stop_request_opens_the_files_of_a_nodes_own_ranks_only(tmp_path, monkeypatch, ranks):
    launch_folder(tmp_path, ranks, ended=0)
    process, sent = os.getpid(), list[tuple[int, int]]()
    (tmp_path / "ranks" / "9.json").write_text(f'{{"pid": {process}}}')
    (tmp_path / "ranks" / "7.json").write_text(f'{{"pid": {process}}}')  # on node 0
    monkeypatch.setattr(slurm_step, "send", lambda *given: sent.append(given))
    with opened() as seen:
        slurm_step.signal_ranks(tmp_path, 1, 8, signal.SIGUSR1)
    assert sent == [(process, signal.SIGUSR1)]
    assert len(seen.files) <= 3 * 8 and not seen.listed  # ranks/N.json, ranks/N.exit.json, /proc/N/stat
    assert not [name for name in seen.files if "/logs/" in name]


def test_waiting_for_ranks_that_leave_lists_one_folder_and_opens_nothing(tmp_path, ranks):
    launch_folder(tmp_path, ranks, ended=ranks - 1)
    with opened() as seen:
        assert not all_ended(tmp_path)
        end(tmp_path, ranks - 1)
        seen.files.clear()
        assert all_ended(tmp_path)
        # As a job is asked to end: it does so by itself.
        slurm_engine.SlurmEngine().signal({"job": "7", "directory": str(tmp_path)}, "kill")
    assert seen.listed == [str(tmp_path / "ranks")] * 3 and seen.files == []
    assert not all_ended(tmp_path / "nowhere")


def test_the_log_of_the_rank_that_failed_is_read_and_no_other(tmp_path, ranks):
    launch_folder(tmp_path, ranks)
    end(tmp_path, 5, code=1)
    with opened() as seen:
        failure = explain(Poll("ended", 1), rank_logs(tmp_path, alive=False), "")
    assert failure.rank == 5 and failure.lines[-1] == "step 3 loss 2.5"
    assert {name for name in seen.files if "/logs/" in name} == {str(tmp_path / "logs" / "rank-5.log")}
    assert len(seen.files) <= 2 * ranks + 2


class _Leaving:
    """An engine whose launch has saved everything: its last rank ends at the third poll, and the launcher by a kill."""

    name = "local"

    def __init__(self, folder: Path, ranks: int) -> None:
        self.folder, self.ranks, self.polls, self.killed = folder, ranks, 0, False

    def poll(self, handle) -> Poll:
        self.polls += 1
        if self.polls == 3:
            end(self.folder, self.ranks - 1)
        return Poll("ended", 0) if self.killed else Poll("running")

    def signal(self, handle, action) -> None:
        assert action == "kill" and all_ended(self.folder)
        self.killed = True

    def logs(self, handle):
        pytest.fail("nothing has failed")


def test_the_end_of_a_launch_that_saved_everything_opens_no_file_of_its_ranks(tmp_path, ranks):
    directory = RunDirectory(complete_run(tmp_path, ranks, lines=1))
    folder = directory.launch(1)
    for name in (folder / "ending.json", folder / "ranks" / f"{ranks - 1}.exit.json"):
        name.unlink()
    plan, manifest = directory.plan(), directory.manifest(1)
    assert manifest is not None
    saved = {"kind": "save", "time": 1.0, "samples": plan.total_samples}
    (tmp_path / "events").mkdir()
    (tmp_path / "events" / "launch-00001.jsonl").write_text(json.dumps(saved) + "\n")
    engine = _Leaving(folder, ranks)
    supervisor = Supervisor(directory, plan, engine, LineDisplay(io.StringIO()))
    with opened() as seen:
        ending = supervisor._wait_for_end(manifest, {"directory": str(folder)})
    assert ending.outcome == "done" and engine.polls == 5
    own = [name for name in seen.files if name.startswith((f"{folder}/ranks", f"{folder}/logs"))]
    assert own == [str(folder / "ranks" / f"{ranks - 1}.exit.json")]  # this test wrote it
    assert seen.listed.count(str(folder / "ranks")) == 4  # at each poll that found it running, and in `signal` above


def test_a_rank_that_wrote_its_stack_waits_for_the_others_without_listing_their_files(tmp_path):
    (tmp_path / "tracing").mkdir()
    script = """
import sys
from batchwright.launch import rank
rank.time.sleep = lambda seconds: print("waits", seconds, flush=True)
sys.addaudithook(lambda event, given: print(event, *given, flush=True) if event == "os.listdir" else None)
rank.main(sys.argv[1:])
"""
    command = (sys.executable, "-c", script, str(tmp_path), "0", "sh", "-c", "kill -ABRT $$")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGABRT, "waits 5.0\n"), done.stderr
    assert (tmp_path / "ranks" / "0.exit.json").exists()


def test_the_status_of_a_run_computes_no_order_and_opens_each_ledger_once(tmp_path, monkeypatch, capsys, ranks):
    run = complete_run(tmp_path / "run", ranks)
    computed = GlobalOrder.ids
    monkeypatch.setattr(GlobalOrder, "ids", lambda *given: pytest.fail("this grows with the samples"))

    def printed(*arguments: str) -> str:
        with pytest.raises(SystemExit) as left:
            main(list(arguments))
        assert left.value.code == 0
        return capsys.readouterr().out

    with opened() as seen:
        document = json.loads(printed("run", "--status", str(run), "--json"))
    ledger = document["ledger"]
    assert (document["state"], ledger["ok"], ledger["samples"]) == ("complete", True, document["total_samples"])
    assert ledger["ids_checked"] is False
    own = [name for name in seen.files if name.startswith(f"{run}/")]
    assert len(own) <= ranks + 20 and not [name for name in own if "/ranks/" in name or "/logs/" in name]
    out = " ".join(printed("run", "--status", str(run)).split())
    assert "ledger: ok (spans and counts, not ids), 0 gaps, 0 repeats" in out
    assert f"check the id of every sample, too: batchwright check --ledger {run}" in out
    monkeypatch.setattr(GlobalOrder, "ids", computed)
    checked = json.loads(printed("check", "--ledger", str(run), "--json"))
    assert (checked["ok"], checked["ids_checked"]) == (True, True)
