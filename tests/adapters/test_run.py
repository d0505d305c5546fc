"""`batchwright run` drives each example through a ramp: one rank, then two, with a kill or a request to stop."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import batchwright
from batchwright.runtime import audit
from tests.adapters.driven import EXAMPLES, drive
from tests.adapters.driven import __file__ as driven_script
from tests.needs import needs

pytestmark = pytest.mark.torch
# The Trainer saves every 5 steps: at 40, at the boundary 64, and at 96. Lightning is told to save every 2.
PACKAGES = {
    "huggingface": ("transformers", ()),
    "sft": ("trl", ()),
    "lightning": ("lightning", ("--save-every", "2")),
}
BOTH = pytest.mark.parametrize("framework", ["huggingface", "lightning"])


def driven(framework: str, folder: Path, place: str, **options: Any) -> tuple[int, list[tuple[int, int]]]:
    """The samples that were discarded by a run that continued once, and the ranks and first sample of each launch."""
    package, arguments = PACKAGES[framework]
    needs(package)
    status = drive(framework, folder, place, *arguments, **options)
    # A launch that stops before its boundary is started again: that is a restart, whatever ended it.
    assert (status.state, status.consumed_samples, status.restarts) == ("complete", 128, 1)
    found = audit(folder)
    assert (found.ok, found.samples, found.gaps, found.repeats, found.launches) == (True, 128, 0, 0, 3), found
    assert not list((folder / "out").rglob(".*.part"))  # the next save removed the half of a file
    headers = [
        json.loads(path.read_text().splitlines()[0]) for path in sorted(folder.glob("ledger/*-rank-00000.jsonl"))
    ]
    ranks = [len(list(folder.glob(f"ledger/launch-0000{launch}-*"))) for launch in (1, 2, 3)]
    return found.discarded_samples, [(n, header["position"]) for n, header in zip(ranks, headers, strict=True)]


@pytest.mark.parametrize(
    ("framework", "place", "discarded", "launches"),
    [
        ("huggingface", "step@48", 8, [(1, 0), (1, 40), (2, 64)]),
        ("lightning", "write@32", 16, [(1, 0), (1, 16), (2, 64)]),
        pytest.param("sft", "step@48", 8, [(1, 0), (1, 40), (2, 64)], marks=pytest.mark.rounds),
        pytest.param("sft", "write@96", 32, [(1, 0), (2, 64), (2, 64)], marks=pytest.mark.rounds),
    ],
)
def test_a_ramp_over_two_launches_survives_a_kill(tmp_path, framework, place, discarded, launches):
    assert driven(framework, tmp_path / "run", place) == (discarded, launches)


@pytest.mark.rounds
@BOTH
@pytest.mark.parametrize("kind", ["write", "save"])
def test_a_kill_in_the_middle_of_a_save_on_two_ranks(tmp_path, framework, kind):
    # The save at 96 does not count: the newest complete one is that of the boundary.
    assert driven(framework, tmp_path / "run", f"{kind}@96") == (32, [(1, 0), (2, 64), (2, 64)])


@pytest.mark.rounds
@BOTH
@pytest.mark.parametrize("number", ["SIGTERM", "SIGUSR1"])
def test_a_request_to_stop_saves_and_the_run_continues(tmp_path, framework, number):
    # There is no regular save at 56: the ranks agree on it in the step after the signal.
    assert driven(framework, tmp_path / "run", "stop@48", stop_signal=number) == (0, [(1, 0), (1, 56), (2, 64)])


def interrupted(command: list[str], framework: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """An example that gets Ctrl-C after the step that ends at sample 48."""
    script = [driven_script, "interrupt@48", str(EXAMPLES / framework / "train.py"), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run([*command, *script], env=environment, capture_output=True, text=True, timeout=600)


@pytest.mark.rounds  # the ramp with a kill is the case of Lightning in `make test`
def test_ctrl_c_in_lightning_ends_without_a_traceback_and_the_run_continues(tmp_path):
    needs("lightning")
    arguments = ["--out", str(tmp_path), "--batch", "16", "--save-every", "2"]
    done = interrupted([sys.executable], "lightning", *arguments)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr  # by Lightning itself
    again = subprocess.run(
        [sys.executable, str(EXAMPLES / "lightning" / "train.py"), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert again.returncode == 0, again.stderr
    found = audit(tmp_path / "batchwright")
    assert (found.ok, found.gaps, found.repeats, found.discarded_samples, found.launches) == (True, 0, 0, 16, 2), found


@pytest.mark.rounds
@BOTH
def test_ctrl_c_under_run_saves_and_the_run_continues(tmp_path, framework):
    package, arguments = PACKAGES[framework]
    needs(package)
    folder = tmp_path / "run"
    flags = f"--thresholds 0:8 --samples 128 --micro-batch-size 4 --devices 1 --dir {folder} --max-retries 0".split()
    torchrun = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--shutdown-timeout",
        "60",
        "--nproc-per-node",
        "{devices}",
    ]
    run = [
        "sh",
        "-c",
        'export INTERRUPT=$$; exec "$@"',
        "run",
        sys.executable,
        "-m",
        "batchwright",
        "run",
        *flags,
        "--",
    ]
    done = interrupted([*run, sys.executable, *torchrun], framework, "--out", "{run_dir}/out", *arguments)
    assert done.returncode == 130 and "Traceback" not in done.stderr, done.stderr
    status = batchwright.run(resume=str(folder), progress=False)
    assert (status.state, status.consumed_samples) == ("complete", 128)
    found = audit(folder)
    assert (found.ok, found.samples, found.repeats, found.discarded_samples) == (True, 128, 0, 0), found
