"""`run` with a task in a pipeline: a ramp of microbatches, kills, other ranks and stages after a resume, what is refused."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from batchwright.runtime.state import tensors
from batchwright.runtime.state.audit import audit
from batchwright.runtime.state.checkpoint import Checkpoints

TASK = f"{Path(__file__).resolve().parent / 'piped.py'}:task"


def place(run: Any, *flags: str, ramp: str = "0:16 64:32", samples: int = 192, nodes: int = 4) -> tuple[str, ...]:
    fixed = (
        f"--samples {samples} --nodes {nodes} --devices-per-node 1 --node-policy constant --micro-batch-size 2".split()
    )
    return (TASK, "--thresholds", ramp, "--dir", str(run.directory), *fixed, "--retry-seconds", "0.1", *flags)


def weights(directory: Path) -> dict[str, torch.Tensor]:
    saved = Checkpoints(directory / "checkpoints").newest()
    assert saved is not None
    return tensors.read(saved.path / "tensors")


def _compare_with_one_rank(run: Any, folder: Path) -> None:
    """The weights at the end are those of one rank without a pipeline."""
    staged, run.directory = weights(run.directory), folder / "whole"
    code, _, err = run(*place(run, nodes=1))
    assert code == 0, err
    whole = weights(run.directory)
    assert staged.keys() == whole.keys()
    assert all(torch.allclose(staged[name], whole[name], rtol=1e-5, atol=1e-6) for name in whole)


def test_every_stage_of_a_ramp_is_checked_before_a_start(run):
    two = ("--pipeline-parallel", "2")
    for flags, ramp, samples, message in (
        (
            (*two, "--pipeline-schedule", "zero-bubble"),
            "0:16 64:28",
            176,
            "zero-bubble needs equal rounds: 7 mod (7 // 2) = 1",
        ),
        (
            ("--pipeline-parallel", "4"),
            "0:4 64:32",
            192,
            "needs at least as many microbatches as the 4 stages, not 2. Nearest: 8",
        ),
        ((*two, "--pipeline-schedule", "circular"), "0:16", 192, "--pipeline-schedule=circular is not run by torch"),
        ((*two, "--allow-ragged"), "0:16", 192, "--allow-ragged does not work in a pipeline"),
        (two, "0:16", 198, "cuts the last step to 6 samples"),
        (("tensor_parallel=2",), "0:16", 192, "data-parallel or in a pipeline"),
    ):
        code, _, err = run(*place(run, *flags, ramp=ramp, samples=samples), "--dry-run")
        assert code == 2 and message in " ".join(err.split()), err
    code, out, err = run(
        *place(run, *two, "--pipeline-style", "inner", "--pipeline-microbatches", "2"), "--dry-run", "--json"
    )
    assert code == 0, err  # MaxText's style with torch's default schedule
    code, out, err = run(*place(run, *two, "--pipeline-schedule", "1f1b"), "--dry-run")
    assert code == 0 and "the rules of --pipeline-schedule torch-1f1b hold" in " ".join((out + err).split()), out + err


@pytest.mark.torch
def test_a_killed_stage_is_resumed_and_the_audit_is_exact(run, tmp_path):
    flags = ("--pipeline-parallel", "2", "--checkpoint-samples", "32")
    run.start(*place(run, *flags, "--arg=slow=0.01"))
    for victim, after in ((3, 32), (0, 96)):  # the last stage, then the first
        run.until(lambda after=after: run.position() >= after)
        os.kill(run.rank_pid(victim), signal.SIGKILL)
        run.until(lambda victim=victim: len(run.events("launch")) >= (2 if victim == 3 else 3))
    code, _, err = run.finish()
    assert code == 0 and "was killed by SIGKILL" in err, err
    found = audit(run.directory)
    assert (found.ok, found.samples, found.gaps, found.repeats, found.ids_checked) == (True, 192, 0, 0, True)
    ledgers = {path.name.partition("-rank-")[2] for path in (run.directory / "ledger").glob("*.jsonl")}
    assert ledgers == {"00000.jsonl", "00001.jsonl"}  # of 4 ranks: one for each data-parallel rank
    _compare_with_one_rank(run, tmp_path)


@pytest.mark.torch
@pytest.mark.rounds
def test_a_run_goes_on_with_other_ranks_and_other_stages(run, tmp_path):
    run.start(*place(run, "--pipeline-parallel", "2", "--arg=slow=0.01"))
    for nodes, stages, after in ((2, 2, 32), (4, 4, 64), (1, 1, 128)):
        run.until(lambda after=after: run.position() >= after)
        assert run.process is not None
        run.process.send_signal(signal.SIGINT)
        assert run.finish()[0] == 130
        more = ("--nodes", str(nodes), "--pipeline-parallel", str(stages))
        run.start("--resume", str(run.directory), *more)
    code, _, err = run.finish()
    assert code == 0, err
    found = audit(run.directory)
    assert found.ok and found.samples == 192 and found.ids_checked
    spec = json.loads((run.newest() / "spec.json").read_text())["settings"]
    assert spec.get("pipeline_parallel", 1) == 1
    _compare_with_one_rank(run, tmp_path)
