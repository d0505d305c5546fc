"""Two fixed rounds of the chaos of `make torture`, at the same time; `make test-all` runs more."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.launch.conftest import _signals_as_at_a_terminal  # noqa: F401  (for processes that are started here)

from .calls import Caller
from .chaos import chaos, differences, reference, result

pytestmark = pytest.mark.torch
SEED = "7"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    return reference(tmp_path_factory.mktemp("chaos") / "undisturbed")


def play(undisturbed: Path, place: Path, number: int) -> list[str]:
    with Caller() as call:
        (case,) = chaos(undisturbed, place, call, SEED, range(number, number + 1))
    return [case.what, case.repeat(SEED), *case.wrong] if case.wrong else []


@pytest.mark.parametrize(
    "numbers", [(0, 1), *(pytest.param((n, n + 1), marks=pytest.mark.rounds) for n in range(2, 20, 2))]
)
def test_signals_at_any_moment_lose_no_sample_and_change_no_bit(undisturbed, tmp_path, numbers):
    with ThreadPoolExecutor(2) as pool:
        for wrong in pool.map(lambda number: play(undisturbed, tmp_path / str(number), number), numbers):
            assert not wrong, "\n".join(wrong)


def test_one_bit_of_a_weight_is_a_difference(undisturbed):
    one, two = result(undisturbed), result(undisturbed)
    assert differences(one, two) == []
    name = next(name for name in two[0] if name.endswith("0.weight"))
    two[0][name].view(-1)[0] = two[0][name].view(-1)[0].nextafter(two[0][name].new_tensor(9.0))
    assert differences(one, two) == [f"tensor {name} differs"]
