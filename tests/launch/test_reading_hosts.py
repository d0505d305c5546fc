"""`run` with nodes that read for others: which nodes read in each launch, kills of a reader and of a trainer, what is refused."""

from __future__ import annotations

import json
import os
import signal

import pytest

from batchwright.runtime.state.audit import audit

from .conftest import TASK


def test_dry_run_and_refusals(run, tmp_path):
    place = (TASK, "--samples", "64", "--global-batch-size", "8", "--nodes", "4", "--devices-per-node", "1")
    refused = {
        ("--expansion-factor", "1/2"): "--expansion-factor=1/2: must be at least 1 in a run",
        ("--read-ahead", "2"): "--read-ahead=2 needs --loading-hosts",
        ("--loading-hosts", "2", "--expansion-factor", "2"): "mutually exclusive",
        ("--loading-hosts", "0"): "--loading-hosts=0",
    }
    for flags, message in refused.items():
        code, _, err = run(*place, *flags, "--dry-run")
        assert code == 2 and message in err, err
    file = tmp_path / "batchwright.yaml"
    file.write_text("loading: {hosts: 4, loading_hosts: 2, read_ahead: 3}\n")
    code, out, err = run(*place, str(file), "--dry-run")
    assert code == 0, err
    assert "a host is a node and every row is read once: hosts" in " ".join(out.split())


@pytest.mark.torch
def test_a_reader_and_a_trainer_are_killed_and_the_audit_is_exact(run, tmp_path):
    file = tmp_path / "batchwright.yaml"
    file.write_text("loading: {loading_hosts: 1, read_ahead: 2}\n")
    flags = ("--micro-batch-size", "2", "--checkpoint-samples", "32", str(file))
    run.start(*run.task(*flags, ramp="0:16", samples=192, nodes=2, args=("slow=0.05", "size=100")))
    for victim, after in ((0, 48), (1, 112)):  # node 0 reads
        run.until(lambda after=after: run.position() >= after)
        os.kill(run.rank_pid(victim), signal.SIGKILL)
        run.until(lambda victim=victim: len(run.events("launch")) >= (2 if victim == 0 else 3))
    code, out, err = run.finish()
    assert code == 0, err
    assert "was killed by SIGKILL" in err
    found = audit(run.directory)
    assert (found.ok, found.samples, found.gaps, found.repeats, found.ids_checked) == (True, 192, 0, 0, True)
    document = run.status()
    said = [start["loading"] for start in document["history"]]
    assert said[0] is None and said[1] is None  # killed
    assert (said[2]["loading_hosts"], said[2]["hosts"], said[2]["read_amplification"]) == (1, 2, 1.0)
    assert "1 of 2 hosts" in out and "waited for data" in out


@pytest.mark.torch
@pytest.mark.rounds
def test_a_run_goes_on_with_other_nodes_and_readers_in_mid_epoch(run):
    """8 nodes of which 4 read, then 3 of which 2 read, then 5 of which 3 read; an epoch has 1,000 samples."""
    flags = ("--micro-batch-size", "1", "--loading-hosts", "4", "--read-ahead", "2")
    run.start(*run.task(*flags, ramp="0:120", samples=2400, nodes=8, args=("slow=0.02", "size=1000")))
    seen = []
    for nodes, readers in ((3, 2), (5, 3), (None, None)):
        before = run.newest()
        if nodes is not None:
            begun = run.position()
            run.until(lambda begun=begun: run.position() >= begun + 240)
            assert run.process is not None
            run.process.send_signal(signal.SIGINT)
        code, _, err = run.finish()
        assert code == (130 if nodes else 0), err
        spec = json.loads((before / "spec.json").read_text())["settings"]
        seen.append((spec["nodes"], spec["loading_hosts"], spec["ranks_per_host"], spec["read_ahead"]))
        if nodes is not None:
            place = ("--resume", str(run.directory), "--nodes", str(nodes), "--loading-hosts", str(readers))
            run.start(*place)
            run.until(lambda before=before: run.newest() != before)
    assert seen == [(8, 4, 1, 2), (3, 2, 1, 2), (5, 3, 1, 2)]
    found = audit(run.directory)
    assert (found.ok, found.samples, found.gaps, found.repeats, found.ids_checked) == (True, 2400, 0, 0, True)
    assert [start["nodes"] for start in run.status()["history"]] == [8, 3, 5]
