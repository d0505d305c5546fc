"""Each file of tests needs its framework (tests/needs.py). Modules that import one are left out of the search for doctests."""

from __future__ import annotations

import pytest

from tests.needs import needs

collect_ignore = ["hf.py", "lit_cases.py"]
FRAMEWORKS = {"huggingface": "transformers", "lightning": "lightning", "accelerate": "accelerate"}


@pytest.fixture(scope="module", autouse=True)
def _framework(request: pytest.FixtureRequest) -> None:
    """Before all other fixtures of the file, which import the framework."""
    for name, package in FRAMEWORKS.items():
        if request.path.name.startswith(f"test_{name}"):
            needs(package)
