"""`batchwright run` drives each example through a ramp: one rank, then two, with a kill or a request to stop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from batchwright.runtime import audit
from tests.adapters.driven import drive
from tests.needs import needs

pytestmark = pytest.mark.torch
# The Trainer saves every 5 steps: at 40, at the boundary 64, and at 96. Lightning is told to save every 2.
PACKAGES = {"huggingface": ("transformers", ()), "lightning": ("lightning", ("--save-every", "2"))}
BOTH = pytest.mark.parametrize("framework", PACKAGES)


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
