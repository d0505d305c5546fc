"""What the next launch reads of the one before."""

from __future__ import annotations

import os

import pytest

from batchwright.rundir import names
from batchwright.rundir.files import write_json
from batchwright.rundir.status import last_seen
from tests.fabricated import opened


@pytest.mark.parametrize("ranks", [16, 8192])
def test_the_launch_before_is_seen_by_its_first_rank(tmp_path, ranks):
    assert last_seen(tmp_path, 3) == {}
    for folder in (names.LEDGER, names.EVENTS):
        (tmp_path / folder).mkdir()
    for launch in (0, 1, 7):
        (tmp_path / names.EVENTS / names.events(launch)).touch()
        for rank in range(ranks):
            (tmp_path / names.LEDGER / names.ledger(launch, rank)).touch()
    (tmp_path / names.EVENTS / names.SUPERVISOR_EVENTS).touch()
    os.utime(tmp_path / names.LEDGER / names.ledger(1, 0), (50.0, 50.0))
    write_json(tmp_path / names.status(1), {"times": {"save_seconds": 2.0}})
    with opened() as seen:
        assert last_seen(tmp_path, 3) == {"time": 50.0, "times": {"save_seconds": 2.0}}
    assert seen.listed == [str(tmp_path / names.EVENTS)]  # its size does not depend on the ranks
    assert last_seen(tmp_path, 0) == {}
    (tmp_path / names.LEDGER / names.ledger(1, 0)).unlink()
    assert last_seen(tmp_path, 3) == {}
