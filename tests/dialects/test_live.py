"""The same comparison with the packages that are installed here: transformers and trl."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

pytest.importorskip("transformers")
pytest.importorskip("trl")
pytestmark = pytest.mark.torch


@pytest.mark.parametrize("name", ["transformers", "trl"])
def test_the_installed_package_gives_the_recorded_vectors(name):
    import json

    from tests.dialects import oracles
    from tests.dialects.test_vectors import vectors

    _, make = oracles.ORACLES[name]
    assert json.loads(json.dumps(make(Path(), Random(name)))) == vectors(name)
