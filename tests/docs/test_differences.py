"""Every row of the table of deliberate differences is a case that runs and says what the row says."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from batchwright.cli import cli

PAGE = (Path(__file__).parents[2] / "docs" / "convert.md").read_text(encoding="utf-8")
TABLE = PAGE.split("## Where batchwright differs on purpose")[1].split("\n## ")[0]
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")] for line in TABLE.splitlines() if line.startswith("| ")
][1:]


@pytest.mark.parametrize("row", ROWS, ids=[f"{row[0]}: {row[1][:30]}" for row in ROWS])
def test_the_case_of_a_deliberate_difference(row):
    _, there, here, case, says = row
    assert there and here
    ran = CliRunner().invoke(cli, shlex.split(case.strip("`")))
    told = ran.output + ("" if ran.exception is None else str(ran.exception))
    assert " ".join(says.split()) in " ".join(told.split())
