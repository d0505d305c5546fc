"""A fixed small number of every attack of `make torture`; `make test-all` runs more of each."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.conftest import _signals_as_at_a_terminal  # noqa: F401  (for processes that are started here)

from . import material as makes
from .calls import Caller
from .flips import flips
from .material import Material
from .mutations import mutations
from .proof import proof
from .record import Case

pytestmark = pytest.mark.torch
SEED = "7"
more = pytest.mark.rounds


@pytest.fixture(scope="module")
def call() -> Iterator[Caller]:
    with Caller() as caller:
        yield caller


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("torture")
    for folder in (made, made.parent, made.parent.parent):
        folder.chmod(0o755)  # another user must come in
    return made


@pytest.fixture(scope="module")
def material(base: Path) -> Material:
    (base / "material").mkdir()
    return makes.make(base / "material")


def assert_all_pass(cases: Iterator[Case]) -> None:
    """Every case passes; the first that does not is shown with the command that repeats it."""
    for case in cases:
        assert not case.wrong, "\n".join([f"{case.what}\nrepeat: {case.repeat(SEED)}", *case.wrong])


@pytest.mark.parametrize(
    ("numbers", "resumes"), [(range(60), 0.0), pytest.param(range(60, 1060), 0.06, marks=more)], ids=str
)
def test_damaged_files_get_a_sentence_and_are_not_touched(material, base, call, numbers, resumes):
    assert_all_pass(mutations(material, base / f"mutations {numbers.start}", call, SEED, numbers, resumes))


@pytest.mark.parametrize("numbers", [range(150), pytest.param(range(150, 3000), marks=more)], ids=str)
def test_one_flipped_bit_is_found_unless_it_cannot_matter(material, base, call, numbers):
    assert_all_pass(flips(material, base / f"flips {numbers.start}", call, SEED, numbers))


def changed(ledger: Path, line: int, key: str, value: object) -> None:
    """Change one value of a ledger."""
    lines = ledger.read_text().splitlines()
    lines[line] = json.dumps(json.loads(lines[line]) | {key: value})
    ledger.write_text("\n".join([*lines, ""]))


@pytest.mark.parametrize(
    ("line", "key", "value", "problem"),
    [
        (0, "order", {"size": 4096, "seed": 1, "shuffle": True}, "not the samples of the order"),
        (0, "parent", 9, "parent"),
        (1, "hash", "0" * 32, "not the samples of the order"),
        (1, "samples", 7, "samples"),
        (1, "start_sample", 8, "not step"),
        (1, "steps", 1, "not step"),
        (1, "outcome", "dropped", "dropped"),
    ],
)
def test_the_independent_audit_can_fail(material, tmp_path, line, key, value, problem):
    run = tmp_path / "run"
    shutil.copytree(material.done, run)
    assert proof(run, makes.SAMPLES).problems == () and proof(run).samples == makes.SAMPLES
    assert proof(run, 512).problems
    changed(run / "ledger" / "launch-00001-rank-00000.jsonl", line, key, value)
    assert any(problem in text for text in proof(run).problems), proof(run).problems
